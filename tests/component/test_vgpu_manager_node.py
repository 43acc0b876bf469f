"""The Node as vgpu-manager's schedulers see it, with the agent's real process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.vgpu_manager import (
    CORES,
    MEMORY,
    NUMBER,
    ON,
    U0,
    U1,
    ManagerStage,
    manager_stage,
)
from tests.component.volcano import NODE, recover_after
from vgpu_agent.sim.kubelet import kubelet
from vgpu_agent.sim.state import SimulatedNode

REGISTER, TOPOLOGY = "nvidia.com/node-device-register", "nvidia.com/node-device-topology"
CONFIG = "nvidia.com/node-config-info"
SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"
GATED = (
    ON + "vgpuManager:\n"
    "  deviceMemoryFactor: 64\n"
    "  featureGates: [GPUCoreResourcePlugin=true, GPUMemoryResourcePlugin=true,"
    " TopologyAwareGPUAllocation=true]\n"
)


@pytest.fixture
async def stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ManagerStage]:
    """A node with two A10; its kubelet forgets a plugin that has been gone for three seconds."""
    monkeypatch.setattr(kubelet, "_STOP_GRACE_SECONDS", 3.0)
    async with manager_stage(folder) as stage:
        yield stage


def written(stage: ManagerStage) -> dict[str, str]:
    """The Node's annotations."""
    return dict(stage.cluster.node_object()["metadata"].get("annotations") or {})


def registered(stage: ManagerStage) -> list[dict[str, Any]]:
    """The GPUs as a scheduler reads them."""
    found: list[dict[str, Any]] = json.loads(written(stage).get(REGISTER, "[]"))
    return found


def quantity(stage: ManagerStage, section: str, name: str) -> str | None:
    """A quantity in the Node's status."""
    status = stage.cluster.node_object()["status"]
    return (status.get(section) or {}).get(name)


async def test_what_schedulers_read_is_there_and_follows_the_gpus(stage: ManagerStage) -> None:
    """``vgpu-manager:D9``, ``vgpu-manager:D31``: a GPU goes and comes back, in the annotation as in
    the counts. After that nothing is written.
    """
    await stage.start_agent(GATED)
    await stage.cluster.until(
        lambda: all(gpu["healthy"] for gpu in registered(stage)) and stage.slots == 20,
        "two healthy GPUs",
    )
    assert [(gpu["id"], gpu["uuid"], gpu["numa"]) for gpu in registered(stage)] == [
        (0, U0, 0),
        (1, U1, 1),
    ]
    assert json.loads(written(stage)[TOPOLOGY]) == [
        {"index": 0, "links": {"1": [1]}},
        {"index": 1, "links": {"0": [1]}},
    ]
    labels = stage.cluster.node_object()["metadata"]["labels"]
    assert {"nvidia.com/node-driver-version", "nvidia.com/node-cuda-major"} <= labels.keys()
    total = sum(gpu["memory"] // 64 for gpu in registered(stage))
    await stage.cluster.until(
        lambda: (
            quantity(stage, "allocatable", CORES) == "200"
            and quantity(stage, "allocatable", MEMORY) == str(total)
        ),
        "cores and memory",
    )
    before = written(stage)
    await recover_after(stage.agent, stage.config, 600)  # not before both have shown it
    stage.gpus.xid(U1, 79)
    await stage.cluster.until(
        lambda: [gpu["healthy"] for gpu in registered(stage)] == [True, False], "an ill GPU"
    )
    await stage.cluster.until(lambda: stage.slots == 10, "ten slots")
    await recover_after(stage.agent, stage.config, 0.5)
    await stage.cluster.until(lambda: written(stage) == before, "both GPUs again")
    await stage.cluster.until(lambda: stage.slots == 20, "all slots")
    done = len(stage.cluster.api.writes)
    await asyncio.sleep(3)
    later = [request.path for request in stage.cluster.api.writes[done:]]
    assert [path for path in later if f"/nodes/{NODE}" in path] == []


async def test_gates_that_go_off_take_their_resources_along(stage: ManagerStage) -> None:
    """vgpu-manager §2.2: also when the kubelet writes them again, for as long as it remembers the
    plugin, and at last with 0. Slots and what the kubelet has besides are left alone.
    """
    await stage.start_agent(GATED)
    await stage.cluster.until(
        lambda: quantity(stage, "allocatable", CORES) == "200", "cores on the Node"
    )
    await stage.agent.terminate()
    await stage.start_agent()
    sections = ("capacity", "allocatable")

    def is_gone() -> bool:
        return all(
            quantity(stage, section, name) is None
            for section in sections
            for name in (CORES, MEMORY)
        )

    await stage.cluster.until(
        lambda: is_gone() and stage.cluster.kubelet.has_forgotten(CORES), "cores and memory gone"
    )
    await asyncio.sleep(1.5)
    await stage.cluster.until(is_gone, "cores and memory gone for good")
    assert quantity(stage, "capacity", NUMBER) == "20"
    assert TOPOLOGY not in written(stage)
    assert json.loads(written(stage)[CONFIG])["memoryFactor"] == 1


async def test_instances_come_and_go_beside_shared_gpus(stage: ManagerStage) -> None:
    """vgpu-manager §2.3: one GPU is divided and marked, the other one shared. An instance is given
    out by its UUID, and a kind that is gone leaves the Node.
    """
    stage.gpus = await asyncio.to_thread(
        lambda: SimulatedNode.create(
            stage.folder / "ampere", model="A100-SXM4-40GB", gpus=2, uuids=[U0, U1]
        )
    )
    await asyncio.to_thread(stage.gpus.set_mig, 0, ["1g.5gb"] * 7)
    await stage.start_agent()
    await stage.cluster.until(
        lambda: quantity(stage, "allocatable", SMALL) == "7" and stage.slots == 10,
        "seven instances and ten slots",
    )
    await stage.cluster.until(
        lambda: (
            [(gpu["mig"], gpu["healthy"]) for gpu in registered(stage)]
            == [(True, True), (False, True)]
        ),
        "a divided and a shared GPU",
    )
    stage.cluster.create_pod("on-a-slice", {SMALL: 1}, scheduler="default-scheduler")
    await stage.cluster.running("on-a-slice")
    came = stage.cluster.starts("on-a-slice")[-1]
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] in stage.gpus.mig_uuids(0)
    stage.cluster.delete_pod("on-a-slice")
    await asyncio.to_thread(stage.gpus.set_mig, 0, ["3g.20gb"] * 2)
    await stage.cluster.until(
        lambda: (
            quantity(stage, "allocatable", LARGE) == "2"
            and quantity(stage, "capacity", SMALL) is None
            and quantity(stage, "allocatable", SMALL) is None
        ),
        "the new instances alone",
    )
