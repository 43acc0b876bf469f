"""The page in a browser, and what the agent's real process sends to it while a GPU is lost."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp

from tests.component.conftest import SHARED, Stage
from tests.patience import PATIENCE_SECONDS

CONFIG = """\
version: v1
gpu: {usageSeconds: 0.5, recovery: {quietSeconds: 600}}
"""


async def test_a_lost_gpu_is_on_the_stream_within_seconds(stage: Stage) -> None:
    """The card, the problem with its remedy, the head and the last hour, in one small message; and
    its return.
    """
    agent = await stage.ready_agent(CONFIG + SHARED)
    pod = await stage.admit("train")
    await agent.until(
        "/debug/allocations", lambda found: any(each["pod"] for each in found["allocations"])
    )
    lost = stage.node.uuids.index(stage.ids(pod)[0].partition("::")[0])
    address = f"http://{agent.public_address}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{address}/", headers={"Accept": "text/html"}) as answer:
            page = await answer.text()
        assert "default/train" in page
        assert page.count("Healthy</span>") == 2
        (version,) = re.findall(r'data-version="(.*?)"', page)
        async with session.get(f"{address}/stream?have={version}") as response:
            stage.node.lose(lost)
            changes = await _until(response, f"g{lost}h")
            assert "Gone</span>" in changes["set"][f"g{lost}h"]
            assert "drain the node and reboot it" in changes["set"][f"g{lost}h"]
            assert len(json.dumps(changes)) <= 5 * 1024
            assert f"g{1 - lost}h" not in changes["set"]
            assert re.search("[12] problems?<", changes["set"]["head"])
            assert "GPU is lost" in changes["set"]["p0"]
            (event,) = [part for part in changes["order"]["hour"] if part in changes["set"]][:1]
            assert f"GPU {lost}" in changes["set"][event]
        async with session.get(f"{address}/?pod=train", headers={"Accept": "text/html"}) as answer:
            assert "has been gone since" in await answer.text()
    assert await agent.terminate() == 0


async def _until(response: aiohttp.ClientResponse, part: str) -> dict[str, Any]:
    """The first changes that have ``part``."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for line in response.content:
            if line.startswith(b"data: "):
                changes: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["changes"]
                if part in changes.get("set", {}):
                    return changes
    raise AssertionError("the stream has ended")
