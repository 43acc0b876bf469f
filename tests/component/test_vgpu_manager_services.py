"""The services that the library of vgpu-manager's containers relies on, with the agent's real
process: a real process in a real cgroup registers, and GPUs are sampled while compute is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.vgpu_manager import ON, U1, ManagerStage, asks, manager_stage
from tests.patience import eventually
from tests.runtime.contained import CGROUPS, Contained, Container, Kubepods, kubepods
from tests.runtime.registered import call, encoded
from vgpu_agent.sim.processes import ProcessUse

WATCHER = ON + "vgpuManager: {featureGates: [SharedSMUtilizationWatcher=true]}\n"
SLOT, SEEN = 81_952, 32_776  # vgpu-manager §7.7


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


@pytest.fixture
def pods() -> Iterator[Kubepods]:
    """Cgroups of pods."""
    with kubepods() as made:
        yield made


def _show_cgroups(stage: ManagerStage) -> None:
    """Let the simulated node have this machine's cgroups."""
    (stage.gpus.directory / "sys" / "fs").mkdir(exist_ok=True)
    (stage.gpus.directory / "sys" / "fs" / "cgroup").symlink_to(CGROUPS)


def _show_process(stage: ManagerStage, process: Contained) -> None:
    """Let the simulated node have this process of the machine."""
    (stage.gpus.directory / "proc" / str(process.pid)).symlink_to(f"/proc/{process.pid}")


def _name_container(stage: ManagerStage, pod: str, container: Container) -> None:
    """Do what the kubelet does once the container runs."""
    named = {"name": "main", "containerID": f"containerd://{container.member.container_id}"}
    status: dict[str, Any] = {"status": {"containerStatuses": [named | {"state": {"running": {}}}]}}
    stage.cluster.objects.patch("pods", pod, status, "default", subresource="status")


async def _limit(stage: ManagerStage, pod: str, wanted: str, reason: str) -> None:
    """Wait until the one grant of the pod has that limit, for that reason."""
    await stage.agent.until(
        f"/debug/allocations?pod=default/{pod}",
        lambda answer: (
            [one["limit"] for one in answer["allocations"] if reason in one["limit_reason"]]
            == [wanted]
        ),
    )


async def test_a_limit_is_in_force_once_the_library_is_seen_and_not_while_it_is_not(
    stage: ManagerStage, pods: Kubepods
) -> None:
    """Written, seen, changed: in the answers, for a person, and in the metrics. Nothing that the
    container can write counts for it.
    """
    _show_cgroups(stage)
    await stage.start_agent()
    for name in ("kept", "left"):
        await stage.serve(name, asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    await _limit(stage, "kept", "configured", "no registered process of the container is known")
    explained = str(await stage.agent.get("/debug/explain?pod=default/kept"))
    assert "Its limit is configured, and not seen in force: no registered process" in explained

    uids = {name: stage.cluster.pod(name)["metadata"]["uid"] for name in ("kept", "left")}
    containers = {name: pods.container(uid) for name, uid in uids.items()}
    processes = {name: container.start() for name, container in containers.items()}
    for name, container in containers.items():
        _show_process(stage, processes[name])
        _name_container(stage, name, container)
    socket = stage.folder / "manager" / "registry" / "socket.sock"
    await call(socket, processes["kept"], encoded(uids["kept"], "main"))
    for process in processes.values():
        stage.gpus.add_process(1, process.pid, ProcessUse(memory_mib=500))
    await _limit(stage, "kept", "in force", "has registered, as the library does")
    pid = processes["left"].pid
    await _limit(stage, "left", "not in force", f"process {pid} of the container uses {U1} and has")
    _, metrics = await stage.agent.get_text("/metrics")
    for word in ("in force", "not in force"):
        assert f'vgpu_agent_limits{{family="vgpu-manager",limit="{word}"}} 1.0' in metrics

    file = stage.folder / "manager" / "containers" / f"{uids['kept']}_main" / "config/vgpu.config"
    await asyncio.to_thread(_raise_limit, file, 1, 2048 << 20)
    await _limit(stage, "kept", "not in force", "")
    await stage.agent.kill()
    await stage.start_agent()
    await _limit(stage, "kept", "not in force", "allows 2048 MiB of")
    told = await stage.agent.until(
        "/debug/events?event=limit", lambda answer: len(answer["events"]) == 2
    )
    assert {entry["facts"]["pod"] for entry in told["events"]} == {"default/kept", "default/left"}


def _raise_limit(file: Path, index: int, limit_bytes: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(512 + 128 * index + 56)  # vgpu-manager §7.7
        opened.write(struct.pack("<Q", limit_bytes))


async def test_a_container_registers_its_processes(stage: ManagerStage, pods: Kubepods) -> None:
    """vgpu-manager §9: over the socket in the directory that its container has mounted, once the
    pod's status names it.
    """
    _show_cgroups(stage)
    await stage.start_agent()
    await stage.serve("gpu-pod", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    uid = stage.cluster.pod("gpu-pod")["metadata"]["uid"]
    container = pods.container(uid)
    process, other = container.start(), container.start()
    _show_process(stage, process)
    socket = stage.folder / "manager" / "registry" / "socket.sock"
    await eventually(socket.exists)
    assert stat.S_IMODE(socket.stat().st_mode) == 0o666
    calling = asyncio.ensure_future(call(socket, process, encoded(uid, "main")))
    await asyncio.wait([calling], timeout=0.2)
    assert not calling.done()
    _name_container(stage, "gpu-pod", container)
    assert await calling == b""
    path = stage.folder / "manager" / "containers" / f"{uid}_main" / "config" / "pids.config"
    assert path.read_text().split() == sorted(map(str, (process.pid, other.pid)), key=int)
    assert await stage.agent.get("/debug/tasks")


async def test_gpus_are_sampled_while_the_compute_of_a_container_is_limited(
    stage: ManagerStage,
) -> None:
    """vgpu-manager §8.6: the time in the GPU's slot advances; the other GPU has none."""
    await stage.start_agent(WATCHER)
    path = stage.folder / "manager" / "watcher" / "sm_util.config"
    stage.gpus.add_process(1, 4711, ProcessUse(memory_mib=1, sm_percent=30))
    assert not path.exists()
    await stage.serve("gpu-pod", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")

    def seen(index: int) -> int:
        with contextlib.suppress(FileNotFoundError, struct.error), path.open("rb") as file:
            file.seek(index * SLOT + SEEN)
            return int(struct.unpack("<Q", file.read(8))[0])
        return 0

    await eventually(lambda: seen(1))
    first = seen(1)
    assert abs(first - (time.time() - 1) * 1_000_000) < 60_000_000
    await eventually(lambda: seen(1) > first)
    assert seen(0) == 0
    with path.open("rb") as file:
        file.seek(SLOT)
        assert struct.unpack("<I4xQ4I", file.read(32))[0] == 4711
