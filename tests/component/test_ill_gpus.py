"""A night with ill GPUs, as ``vgpu-agent status`` tells it: a real agent on simulated GPUs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

from tests.component.conftest import SHARED, Stage
from vgpu_agent.sim.agent_process import AgentProcess

# long enough that no GPU comes back during a test
QUIET = """\
version: v1
gpu: {usageSeconds: 0.5, recovery: {quietSeconds: 600}}
"""


async def _status(agent: AgentProcess, *flags: str) -> str:
    """The output of ``vgpu-agent status``."""
    command = (
        *(sys.executable, "-m", "vgpu_agent", "status", "-o", "wide"),
        *("--debug-listen", agent.debug_address, *flags),
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode in (0, 1)  # 1: with problems
    return out.decode()


def _gpu(devices: dict[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = devices["gpus"][index]
    return found


async def test_a_gpu_with_two_xids_and_a_demand_is_told_in_full(stage: Stage) -> None:
    """The worst XID, the other one, the demand, and the remedy; in status, JSON, metrics and log.
    When the demand is met, the countdown appears.
    """
    agent = await stage.ready_agent(QUIET + SHARED)
    uuid = stage.node.uuids[1]
    stage.node.xid(1, 48)
    await agent.until_logged("gpu.unhealthy")
    stage.node.xid(1, 94)
    stage.node.recovery_action(1, "reset")
    devices = await agent.until(
        "/debug/devices",
        lambda found: (
            "asks for" in _gpu(found, 1)["health_reason"]
            and len(_gpu(found, 1)["illness"]["causes"]) > 2
        ),
    )

    illness = _gpu(devices, 1)["illness"]
    assert [cause["code"] for cause in illness["causes"]] == ["XID 48", "XID 94", "recovery action"]
    assert illness["answers"] is True
    assert illness["offered_again_in_seconds"] is None
    told = (
        r"gpu 1 +"
        + re.escape(uuid)
        + r" has been unhealthy since \S+Z \(\d+ s\): XID 48: GPU memory lost bits beyond what ECC "
        r"corrects; the driver asks for a GPU reset; other causes: XID 94: a memory error hit one "
        r"program only; it answers now; drain the GPU's pods and reset it \(nvidia-smi --gpu-reset "
        r"-i " + re.escape(uuid) + r"\); replace the card if the error comes back"
    )
    assert re.search(told, await _status(agent))
    _, page = await agent.get_text("/")
    assert re.search(told, page)
    _, metrics = await agent.get_text("/metrics")
    info = f'vgpu_agent_gpu_unhealthy_info{{cause="XID 48",gpu="{uuid}",remedy="reset"}} 1'
    assert info in metrics
    changed = await agent.until_logged("gpu.cause_changed")
    assert changed["remedy"].startswith("drain the GPU's pods and reset it")

    stage.node.recovery_action(1, "none")
    devices = await agent.until(
        "/debug/devices", lambda found: _gpu(found, 1)["illness"]["offered_again_in_seconds"]
    )
    illness = _gpu(devices, 1)["illness"]
    assert 500 < illness["offered_again_in_seconds"] <= 600.5
    assert illness["remedy"].startswith("nothing needs to be done unless it happens again")
    assert re.search(r"; it is offered again at \S+Z, in \d+ s, if it", await _status(agent))


async def test_pods_on_ill_gpus_and_with_errors_of_their_own_are_explained(stage: Stage) -> None:
    """One pod has caused an XID that is ignored, the GPU of another one is lost."""
    agent = await stage.ready_agent(QUIET)
    faulty, lost = await stage.admit("faulty"), await stage.admit("lost")
    place = {pod.name: stage.node.uuids.index(stage.ids(pod)[0]) for pod in (faulty, lost)}
    await agent.until(
        "/debug/allocations",
        lambda found: sum(bool(each["pod"]) for each in found["allocations"]) == 2,
    )
    before = time.time()
    stage.node.xid(place["faulty"], 31)
    await agent.until_logged("gpu.xid")
    stage.node.lose(place["lost"])
    await agent.until("/debug/devices", lambda found: not _gpu(found, place["lost"])["present"])

    text = await _status(agent, "--pod", "default/faulty")
    uuid = stage.node.uuids[place["faulty"]]
    assert re.search(
        r"XID 31: a program touched GPU memory that is not mapped\. That was reported on GPU "
        rf"{place['faulty']} \({uuid}\) while the pod had it, at \S+Z \(\d+ s ago\)\.\n"
        r"  No other pod has the GPU, so the program of container main has most likely caused it",
        text,
    )
    assert "unhealthy" not in text
    (seen,) = _gpu(await agent.get("/debug/devices"), place["faulty"])["xids"]
    assert (seen["xid"], seen["ignored"], seen["remedy"]) == (31, True, "application")
    assert before - 1 < time.time() - seen["last"]["seconds_ago"] < time.time() + 1

    text = await _status(agent, "--pod", "default/lost")
    assert re.search(r"has been gone since \S+Z \(\d+ s\): .*GPU is lost", text)
    assert "Remedy: drain the node and reboot it; if the GPU is lost again" in text
    assert "XID 31" not in text

    text = await _status(agent, "--pod", "default/never", "--json")
    assert "has been gone since" in "".join(json.loads(text)["answer"])
    await stage.allocatable(1)
