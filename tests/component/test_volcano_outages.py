"""Kills of the agent at every write, reboots, API server outages, a deleted Node and lost files,
all survived.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.conftest import until_not_ready
from tests.component.killer import Killer, by_agent
from tests.component.volcano import NODE, NUMBER, REGISTER, VolcanoStage, asks, volcano_stage
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.volcano.scheduler import VolcanoSettings

LOCK = "hamivgpu"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def _restart_after_death(stage: VolcanoStage) -> None:
    await stage.agent.wait()
    await stage.agent.start()
    await stage.offered()


def _is_served(stage: VolcanoStage, name: str) -> bool:
    return (
        stage.cluster.phase(name) == "Running"
        and stage.cluster.annotations(name)["volcano.sh/bind-phase"] == "success"
    )


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_killed_at_every_write(stage: VolcanoStage, before: bool) -> None:
    """volcano-vgpu:D24: kill -9 at each write to Node and pods.
    The next agent finds what is missing and finishes it.
    """
    killer = Killer(stage)
    killer.arm(0, before=before)
    stage.configure()
    stage.deliver_library()
    stage.new_agent()
    with contextlib.suppress(SimulationError):
        await stage.agent.start()
    await stage.agent.wait()  # at the register annotation
    await _restart_after_death(stage)
    assert killer.killed
    assert REGISTER in stage.cluster.node_object()["metadata"]["annotations"]
    served = []
    for at in range(5):
        killer.arm(at, before=before)
        name = f"pod-{at}"
        served.append(name)
        stage.cluster.create_pod(name, [asks(1, 10 + at), asks(1, 20 + at)])
        await stage.cluster.until(
            lambda: killer.killed or _is_served(stage, name),  # noqa: B023
            f"{name} to be served, or the kill",
        )
        if not killer.killed:
            break  # there are no more writes than that
        await _restart_after_death(stage)
        await stage.cluster.running(*served)
        await stage.settled(*served)
        stage.check()
    assert at >= 1  # a pod is written to at least once
    await stage.settled(*served)
    stage.check()
    assert len((await stage.agent.get("/debug/ledger"))["grants"]) == 2 * len(served)


async def test_killed_while_an_old_scheduler_waits(stage: VolcanoStage) -> None:
    """kill -9 at the first writes of a pod whose scheduler holds the node's lock: the next agent
    gives it back, and the next pod comes.
    """
    await stage.cluster.start_volcano(VolcanoSettings(old=True, node_lock=True, retry_seconds=0.2))
    await stage.start_agent()
    killer = Killer(stage)
    # An answer to the handshake may be under way during Allocate, and a kill then fails a pod for
    # good.
    killer.counts = lambda request: (
        by_agent(request) and (request.resource == "pods" or LOCK in str(request.body))
    )
    for at in range(2):
        # a lock as young as the agent itself would be given back before the Allocate, and the kill
        # cost the pod
        await asyncio.sleep(2.5)
        killer.arm(at, before=True)
        # one resource, so that the lock is never given back between two Allocates
        stage.cluster.create_pod(f"old-{at}", asks(1))
        await stage.cluster.until(lambda: killer.killed, "the kill")
        await _restart_after_death(stage)
        await stage.cluster.running(f"old-{at}")
        await stage.settled(f"old-{at}")
        await stage.cluster.until(
            lambda: LOCK not in stage.cluster.node_object()["metadata"]["annotations"],
            "the lock to be given back",
        )
    killer.arm(-1, before=True)
    stage.cluster.delete_pod("old-0")
    await stage.serve("next", asks(1))


async def test_killed_when_a_spec_appears(stage: VolcanoStage) -> None:
    """kill -9 between the spec's rename and the answer to kubelet: the next agent keeps what was
    decided, and the container starts.
    """
    await stage.start_agent()
    for number in range(3):
        name = f"spec-{number}"
        known = set(
            await asyncio.to_thread(lambda: set(stage.cluster.cdi_directory.glob("*.json")))
        )
        stage.cluster.create_pod(name, asks(1, 10 + number))
        await asyncio.to_thread(
            _kill_at_new_file, stage.cluster.cdi_directory, known, stage.agent.pid
        )
        await _restart_after_death(stage)
        await stage.cluster.running(name)
    await stage.settled("spec-0", "spec-1", "spec-2")
    stage.check()


def _kill_at_new_file(directory: Path, known: set[Path], pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not set(directory.glob("*.json")) - known:
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGKILL)


async def test_a_reboot_that_empties_the_spec_directory(stage: VolcanoStage) -> None:
    """Everything is gone but the disk: the agent writes all specs anew before kubelet needs them,
    and containers get what they had.
    """
    await stage.start_agent()
    stage.cluster.create_pod("one", asks(1, 10))
    stage.cluster.create_pod("two", [asks(1, 20), asks(1, 30)])
    await stage.cluster.running("one", "two")
    await stage.settled("one", "two")
    before = {(each.pod, each.container): each.received for each in stage.cluster.started}
    await stage.agent.kill()
    await stage.cluster.reboot()
    await stage.agent.start()
    await stage.cluster.until(
        lambda: len(stage.cluster.started) == 6, "all containers to start again"
    )
    assert {
        (each.pod, each.container): each.received for each in stage.cluster.started[3:]
    } == before
    stage.check()


async def test_an_api_outage_in_the_middle_of_a_burst(stage: VolcanoStage) -> None:
    """Pods that were seen start without the API server.
    What is to be written is written when it is back.
    """
    await stage.start_agent()
    names = [f"burst-{number}" for number in range(10)]
    done = stage.cluster.pull("main")
    for number, name in enumerate(names):
        stage.cluster.create_pod(name, asks(1, 10 + number))
    await stage.cluster.until(
        lambda: all("nodeName" in stage.cluster.pod(name)["spec"] for name in names),
        "all to be bound",
    )
    await stage.watched(*names)
    assert stage.cluster.started == []
    await stage.cluster.api.down()
    done()
    await stage.cluster.running(*names)
    assert all(
        stage.cluster.annotations(name)["volcano.sh/bind-phase"] == "allocating" for name in names
    )
    stage.check()
    await stage.cluster.crash("burst-0")  # needs no server either
    await asyncio.sleep(1)
    await stage.cluster.api.up()
    await stage.settled(*names)
    stage.check()


async def test_a_restart_during_an_api_outage(stage: VolcanoStage) -> None:
    """The agent comes back with the same ids from what it remembers,
    and knows the holder of each.
    """
    await stage.start_agent()
    await stage.serve("p", asks(1, 10, 30))
    await stage.settled("p")
    ids = stage.allocatable
    await stage.cluster.api.down()
    await stage.agent.kill()
    await stage.agent.start()
    await stage.offered()
    assert stage.allocatable == ids
    (grant,) = (await stage.agent.get("/debug/ledger"))["grants"]
    assert [(share["memory_mib"], share["cores_percent"]) for share in grant["shares"]] == [
        (640, 30)
    ]
    await stage.cluster.api.up()
    await stage.cluster.crash("p")
    first, second = stage.cluster.starts("p")
    assert first == second
    await stage.serve("q", asks(1, 20))
    stage.check()


async def test_the_node_is_deleted_and_annotations_are_removed(stage: VolcanoStage) -> None:
    """Annotations or the whole Node are deleted: they are written again, and pods go on."""
    await stage.start_agent()
    await stage.serve("before", asks(1, 10))
    await stage.settled("before")
    register = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]

    def stands() -> bool:
        return bool(
            stage.cluster.node_object()["metadata"].get("annotations", {}).get(REGISTER) == register
        )

    stage.cluster.objects.patch("nodes", NODE, {"metadata": {"annotations": {REGISTER: None}}})
    await stage.cluster.until(stands, "the annotation to be back")
    stage.cluster.delete_node()
    await asyncio.sleep(0.3)
    stage.cluster.create_node()
    await stage.cluster.until(stands, "the annotation on the new Node")
    await stage.serve("after", asks(1, 10))
    stage.check()


async def test_a_pod_is_created_again_under_its_name(stage: VolcanoStage) -> None:
    """Deleted and created at once, with another request:
    the second gets its own, and the first one's files go.
    """
    await stage.start_agent()
    first = await stage.serve("same", asks(1, 10))
    stage.cluster.delete_pod("same")
    await stage.cluster.until(lambda: not stage.cluster.exists("same"), "the first to be gone")
    second = await stage.serve("same", asks(1, 70, 40))
    assert second.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "4480m"
    stage.check()
    old, new = (Path(came.mounts["/tmp/cudevshr.cache"][0]).parent for came in (first, second))
    assert old != new
    await stage.cluster.until(lambda: not old.exists(), "the first one's directory to be collected")
    assert await asyncio.to_thread(new.exists)


async def test_without_the_library_nothing_is_offered(stage: VolcanoStage) -> None:
    """/readyz says what to deliver and where; delivered, the resources come without a restart."""
    stage.configure()
    await stage.new_agent().start()

    await until_not_ready(stage.agent, f"{stage.folder}/vgpu/libvgpu.so")
    assert NUMBER not in stage.allocatable
    stage.deliver_library()
    await stage.offered()
    await stage.serve("p", asks(1, 10))
    stage.check()


async def test_the_config_map_changes_while_it_runs(stage: VolcanoStage) -> None:
    """volcano-vgpu:D23: what Volcano's ConfigMap says is in force without a restart, nonsense is
    named, and running pods keep theirs.
    """
    await stage.start_agent()
    await stage.serve("p", asks(1, 10))

    def config_map(text: str) -> dict[str, object]:
        return {
            "metadata": {"name": "volcano-vgpu-device-config"},
            "data": {"device-config.yaml": text},
        }

    stage.cluster.objects.create(
        "configmaps", config_map("nvidia:\n  deviceSplitCount: 3\n"), "kube-system"
    )
    await stage.cluster.until(lambda: stage.allocatable[NUMBER] == "6", "three seats a card")
    changed = config_map("nvidia:\n  deviceSplitCount: many\n")
    stage.cluster.objects.patch("configmaps", "volcano-vgpu-device-config", changed, "kube-system")
    problem = await stage.agent.until_logged("config.file_problem")
    assert "deviceSplitCount" in problem["problem"]
    await stage.serve("q", asks(1, 20))
    stage.check()


async def test_an_idle_node_makes_no_requests(stage: VolcanoStage) -> None:
    """Besides the watches, which stay open, nothing at all is asked or written."""
    await stage.start_agent()
    await stage.serve("p", asks(1, 10))
    await stage.settled("p")
    await stage.cluster.stop_volcano()
    await stage.looked_for_failed_pods()
    await stage.quiet()
    stage.cluster.api.requests.clear()
    await asyncio.sleep(4)
    assert [(request.verb, request.path) for request in stage.cluster.api.requests] == []


def _forbidden(stage: VolcanoStage) -> list[dict[str, object]]:
    """Return the lines of the agent's log about refused writes."""
    return [line for line in stage.agent.log_lines() if "403" in str(line.get("error"))]


async def test_forbidden_writes_are_one_clear_line(stage: VolcanoStage) -> None:
    """Without the right to patch pods, pods run all the same, and one line says which right is
    missing; granted, it is caught up.
    """
    fault = Fault(FaultKind.STATUS, verb="patch", resource="pods", code=403, reason="Forbidden")
    stage.cluster.api.faults.append(fault)
    await stage.start_agent()
    await stage.serve("p", asks(1, 10))
    await stage.serve("q", asks(1, 20))
    await eventually(lambda: _forbidden(stage))
    await asyncio.sleep(1.5)
    lines = await asyncio.to_thread(_forbidden, stage)
    assert len(lines) == 1
    assert "patch pods" in str(lines[0])
    stage.cluster.api.faults.remove(fault)
    await stage.settled("p", "q")
    stage.check()
