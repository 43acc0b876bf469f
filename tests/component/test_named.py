"""Named configurations with the agent's real process: an API server that is there, one that goes
away, and one that never answers.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import time
from pathlib import Path

from tests import constants
from tests.component.conftest import QUICK, Stage
from tests.patience import PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.sim.api.server import ApiServer

NODE, LABEL = "node-a", "nvidia.com/device-plugin.config"
WAIT_SECONDS = 3.0


async def _named_documents(stage: Stage, **replicas: int) -> None:
    folder = stage.folder / "available-configs"
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    for name, number in replicas.items():
        text = (
            "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: "
            f"{number}}}]}}}}\n"
        )
        await asyncio.to_thread(replace_text, folder / name, text)


async def _config(stage: Stage, server: ApiServer, *, url: str = "") -> str:
    """The agent's own; ``url`` takes the place of the server's."""
    stage.constants |= {
        constants.API_START_WAIT: WAIT_SECONDS,
        constants.API_REQUEST_TIMEOUT: 20,
        constants.API_BACKOFF_MIN: 0.1,
        constants.API_BACKOFF_MAX: 0.5,
    }
    kubeconfig = await asyncio.to_thread(server.kubeconfig, stage.folder / "kubeconfig")
    text = (await asyncio.to_thread(kubeconfig.read_text)).replace(server.url, url or server.url)
    await asyncio.to_thread(replace_text, kubeconfig, text)
    return (
        f"{QUICK}nodeName: {NODE}\nkubeconfig: {kubeconfig}\n"
        f"stateDirectory: {stage.folder}/state\nnamedConfig: {{directory: "
        f"{stage.folder}/available-configs, default: two}}\n"
    )


async def test_the_label_is_followed_and_outlives_the_api_server(stage: Stage) -> None:
    """Nothing of the agent's is written to the Node,
    and a restart during the outage offers what pods know.
    """
    await _named_documents(stage, four=4, two=2)
    async with ApiServer() as server:
        server.objects.create("nodes", {"metadata": {"name": NODE, "labels": {LABEL: "four"}}})
        agent = await stage.ready_agent(await _config(stage, server))
        await stage.allocatable(8)
        server.objects.patch("nodes", NODE, {"metadata": {"labels": {LABEL: "two"}}})
        await stage.allocatable(4)
        server.objects.patch("nodes", NODE, {"metadata": {"labels": {LABEL: "four"}}})
        await stage.allocatable(8)
        assert server.writes == []
        await agent.until("/debug/cluster", lambda answer: answer["connected"])
        await asyncio.to_thread(
            _until_remembered, stage.folder / "state" / "remembered.json", '"four"'
        )
        await server.down()
        await agent.kill()
        await stage.allocatable(0)
        await agent.start()
        await agent.until_ready()
        await stage.allocatable(8)
        named = (await agent.get("/debug/config"))["named"]
        assert (named["name"], named["problem"]) == ("four", "")


def _until_remembered(file: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, "nothing was remembered"
        time.sleep(0.02)


async def test_a_start_waits_once_for_an_api_server_that_never_answers(stage: Stage) -> None:
    """NVIDIA's init container waits for ever (its issue 1540).
    Here the default is offered, and the problem is reported.
    """
    await _named_documents(stage, four=4, two=2)
    async with ApiServer() as server:
        with socket.create_server(("127.0.0.1", 0)) as hung:  # only the kernel takes the connection
            config = await _config(stage, server, url=f"http://127.0.0.1:{hung.getsockname()[1]}")
            agent = await stage.ready_agent(config)
            await stage.allocatable(4)
            named = (await agent.get("/debug/config"))["named"]
            assert f"no answer from the API server in {WAIT_SECONDS:g} s" in named["problem"]
            lines = agent.log_lines()
            assert "cluster.slow_start" in [line["msg"] for line in lines]
            (began,) = [line["ts"] for line in lines if line["msg"] == "agent.starting"]
            (slow,) = [line["ts"] for line in lines if line["msg"] == "cluster.slow_start"]
            # the wait was over before the agent was built
            assert _seconds(slow) - _seconds(began) < WAIT_SECONDS


def _seconds(timestamp: str) -> float:
    return dt.datetime.fromisoformat(timestamp).timestamp()
