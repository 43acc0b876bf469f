"""Problems of the node, provoked in the agent's real process: each is in ``vgpu-agent status``, in
``/readyz``, on the page and in the metrics, and once in each.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import constants
from tests.component.conftest import QUICK, Stage, full
from tests.component.test_mps import Mps
from tests.component.volcano import NUMBER, VolcanoStage, asks, volcano_stage
from tests.replacing import replace_text
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.mps_tools import end_daemon
from vgpu_agent.sim.stand_in_library import REGION_BYTES, load_instruction

WITHHELD, SERVED = "[-]", "[~]"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can mount a file system without room"
)


@pytest.fixture
async def volcano(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        stage.constants |= {constants.API_BACKOFF_MAX: 0.5, constants.VERIFY: 0.3}
        yield stage


async def seen_once(agent: AgentProcess, mark: str, part: str, cause: str) -> None:
    """Check that each view has the cause once, as the only problem, under ``part``.

    While the agent starts, other problems come and go beside it.
    """
    overview = await agent.until(
        "/debug/status",
        lambda found: (
            [problem["part"] for problem in found["problems"]] == [part]
            and cause in found["problems"][0]["reason"]
        ),
    )

    text = await status_text(agent)
    assert text.count(cause) == 1, text
    assert "none known" not in text
    code, ready = await agent.get_text("/readyz")
    assert code == (503 if mark == WITHHELD else 200)
    assert ready.count(cause) == 1, ready
    assert f"{mark} {part}: " in ready
    status, page = await agent.get_text("/")
    assert (status, page.count(cause)) == (200, 1), page
    _, metrics = await agent.get_text("/metrics")
    samples = re.findall(r'^vgpu_agent_problems\{kind="(.*)"\} (.+)$', metrics, re.MULTILINE)
    assert [(kind, float(number)) for kind, number in samples if float(number)] == [
        (overview["problems"][0]["kind"], 1)
    ]


async def status_text(agent: AgentProcess) -> str:
    """Return what ``vgpu-agent status`` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vgpu_agent",
        "status",
        "-o",
        "wide",
        "--debug-listen",
        agent.debug_address,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return out.decode()


async def none_left(agent: AgentProcess) -> None:
    """Wait until no problem is known."""
    await agent.until("/debug/status", lambda found: found["problems"] == [])
    assert "none known" in await status_text(agent)
    assert (await agent.get_text("/readyz")) == (200, "ready\n")


@needs_root
async def test_a_full_state_directory(volcano: VolcanoStage) -> None:
    """The next restart during an outage would offer nothing, so it is a problem now."""
    state = volcano.folder / "state"
    with full(state):
        agent = await volcano.start_agent()
        await seen_once(agent, SERVED, "files", f"in {state}: No space left on device")
    await none_left(agent)


@needs_root
async def test_a_full_cdi_directory_of_specs(stage: Stage) -> None:
    """Two families have no names for their devices, for one reason."""
    cdi = stage.folder / "cdi"
    config = (
        f"{QUICK}binding: {{cdiDirectory: {cdi}}}\n"
        "families: {aws: true}\nplugin: {deviceListStrategy: [cdi-cri]}\n"
    )
    with full(cdi):
        agent = stage.agent(config)
        await agent.start()
        part = "resource k8s.amazonaws.com/vgpu, nvidia.com/gpu"
        await seen_once(agent, WITHHELD, part, "No space left on device")
    await none_left(agent)


@needs_root
async def test_a_full_cdi_directory_of_grants(volcano: VolcanoStage) -> None:
    """It is noticed at a start, and is over without another start."""
    agent = await volcano.start_agent()
    cdi = volcano.folder / "cluster" / "cdi"
    with full(cdi):
        volcano.cluster.create_pod("p", asks(1, 30))
        await agent.until_logged("start.refused")
        overview = await agent.until("/debug/status", lambda found: found["problems"] != [])
        assert [problem["part"] for problem in overview["problems"]] == ["files"]
        await seen_once_outside_refusals(agent, f"in {cdi}: No space left on device")
        volcano.cluster.delete_pod("p")
        await agent.until("/debug/status", lambda found: found["refusals"] == [])
    await none_left(agent)


async def seen_once_outside_refusals(agent: AgentProcess, cause: str) -> None:
    """Check text and probe; the refused start names the cause in its own words."""
    assert (await status_text(agent)).count(cause) == 1
    code, ready = await agent.get_text("/readyz")
    assert (code, ready.count(cause)) == (200, 1)
    assert await agent.metric("vgpu_agent_problems") == 1


async def test_a_library_of_unknown_layout(volcano: VolcanoStage) -> None:
    """Three resources and a family lack the same library."""
    volcano.configure()
    volcano.deliver_library()
    library = volcano.folder / "vgpu" / "libvgpu.so"
    content = library.read_bytes()
    known, other = load_instruction(REGION_BYTES), load_instruction(REGION_BYTES + 8)
    assert known in content
    library.write_bytes(content.replace(known, other))
    agent = volcano.new_agent()
    await agent.start()
    part = f"resource volcano.sh/vgpu-cores, volcano.sh/vgpu-memory, {NUMBER}"
    await seen_once(agent, WITHHELD, part, "has a shared region of unknown layout")
    await asyncio.to_thread(volcano.deliver_library)
    await none_left(agent)


async def test_a_failed_mps_daemon(stage: Stage) -> None:
    """The one resource that it serves is withheld with the reason."""
    mps = await asyncio.to_thread(Mps, stage)
    mps.tools.misbehave(start="refuse")
    agent = stage.agent(mps.shared)
    await agent.start()
    await mps.daemon(agent, state="failed")
    await seen_once(agent, WITHHELD, "resource nvidia.com/gpu", "Insufficient permissions")
    mps.tools.behave()
    await none_left(agent)
    await agent.terminate()
    end_daemon(mps.pipe)


async def test_a_failed_mps_daemon_that_is_only_to_be_ended(stage: Stage) -> None:
    """No resource waits for it, but its GPUs are still exclusive."""
    mps = await asyncio.to_thread(Mps, stage)
    agent = await stage.ready_agent(mps.shared)
    mps.tools.misbehave(nvidia_smi="refuse")
    replace_text(stage.config, mps.config)
    await stage.allocatable(2)
    await seen_once(agent, SERVED, "mps nvidia.com/gpu", "Insufficient permissions")
    mps.tools.behave()
    await none_left(agent)
