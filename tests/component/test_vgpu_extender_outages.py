"""Pods of vgpu-manager through kills of the agent at every write, lost patches, API server outages
and restarts of the kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.killer import Killer
from tests.component.vgpu_extender import (
    NUMBER,
    PHASE,
    PRE,
    REAL,
    REGISTER,
    ExtenderStage,
    asks,
    extender_stage,
)
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.api.faults import Fault, FaultKind


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ExtenderStage]:
    """A node with two A10 in a cluster with the extender."""
    async with extender_stage(folder) as stage:
        yield stage


async def _restart_after_death(stage: ExtenderStage) -> None:
    await stage.agent.wait()
    await stage.agent.start()
    await stage.offered()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_killed_at_every_write(stage: ExtenderStage, before: bool) -> None:
    """kill -9 at each write to Node and pods, before and after it is done. The next agent finds
    what is missing and finishes it; no claim is given twice (vgpu-manager §12.3).
    """
    killer = Killer(stage)
    killer.arm(0, before=before)
    stage.configure()
    stage.deliver_library()
    stage.new_agent()
    with contextlib.suppress(SimulationError):
        await stage.agent.start()
    await _restart_after_death(stage)  # at the description of the Node
    assert killer.killed
    assert REGISTER in stage.cluster.node_object()["metadata"]["annotations"]
    served: list[str] = []
    for at in range(5):
        killer.arm(at, before=before)
        name = f"pod-{at}"
        served.append(name)
        stage.create(name, asks(1, 5 + at, 100 + at), asks(1, 5, 200 + at))

        def is_served(name: str = name) -> bool:
            running = stage.cluster.phase(name) == "Running"
            return running and stage.labels(name).get(PHASE) == "succeed"

        await stage.cluster.until(lambda: killer.killed or is_served(), "the pod, or the kill")
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


@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.LOST_ANSWER, FaultKind.RESET])
async def test_lost_patches(stage: ExtenderStage, kind: FaultKind) -> None:
    """vgpu-manager §12.3: `real-allocated` is retried until it stands, and a second container never
    gets the claim of the first.
    """
    await stage.start_agent()
    stage.cluster.hold_admission = True
    stage.create("p", asks(1, 10, 100), asks(1, 20, 200))
    await stage.cluster.until(
        lambda: bool(stage.cluster.pod("p")["spec"].get("nodeName")), "it to be bound"
    )
    fault = Fault(kind, verb="patch", resource="pods", times=4, code=500)
    stage.cluster.api.faults.append(fault)
    await stage.cluster.admit_in_order(["p"])
    await stage.cluster.running("p")
    await stage.settled("p")
    assert fault.times < 4  # it was met, and more than once where nothing was done
    stage.check()


async def test_an_api_outage_in_the_middle_of_a_storm(stage: ExtenderStage) -> None:
    """Pods that were seen start without the API server; what is to be written is written when it is
    back.
    """
    await stage.start_agent()
    names = [f"burst-{number}" for number in range(10)]
    done = stage.cluster.pull("main")
    for number, name in enumerate(names):
        stage.create(name, asks(1, 10, 100 + number))
    await stage.cluster.until(
        lambda: all(stage.cluster.pod(name)["spec"].get("nodeName") for name in names),
        "all to be bound",
    )
    await stage.watched(*names)
    assert stage.cluster.started == []
    await stage.cluster.api.down()
    done()
    await stage.cluster.running(*names)
    assert {stage.labels(name)[PHASE] for name in names} == {"allocating"}
    stage.check()
    await stage.cluster.crash("burst-0")  # needs no server either
    await asyncio.sleep(1)
    await stage.cluster.api.up()
    await stage.settled(*names)
    stage.check()


async def test_the_kubelet_restarts(stage: ExtenderStage) -> None:
    """The agent registers again; pods from before keep theirs, and new ones start."""
    await stage.start_agent()
    stage.create("before", asks(1, 10, 100))
    await stage.cluster.running("before")
    await stage.settled("before")
    lists = len(stage.cluster.kubelet.called("list", NUMBER))
    await stage.cluster.kubelet.stop()
    await stage.cluster.kubelet.restart()
    # the agent is ready, and the Node shows vGPUs, until they notice it
    await stage.cluster.until(
        lambda: len(stage.cluster.kubelet.called("list", NUMBER)) > lists, "the list to come again"
    )
    await stage.offered()
    await stage.cluster.crash("before")
    first, second = stage.cluster.starts("before")
    assert first == second
    stage.create("after", asks(1, 10, 100))
    await stage.cluster.running("after")
    await stage.settled("after")
    stage.check()


async def test_a_restart_keeps_everything(stage: ExtenderStage) -> None:
    """Ids, shares, limits and the pod's annotations are the same after it, also with the API server
    away, and nothing is written.
    """
    await stage.start_agent()
    stage.create("p", asks(1, 10, 100), asks(1, 20, 200))
    await stage.cluster.running("p")
    await stage.settled("p")
    before = stage.cluster.pod("p")
    shares = _shares(await stage.agent.get("/debug/ledger"))
    await stage.cluster.stop_extender()
    await stage.agent.kill()
    await stage.restart_agent()
    assert _shares(await stage.agent.get("/debug/ledger")) == shares
    await stage.cluster.api.down()
    await stage.agent.kill()
    await stage.agent.start()
    await stage.offered()
    assert _shares(await stage.agent.get("/debug/ledger")) == shares
    await stage.cluster.crash("p", "c1")
    first, second = stage.cluster.starts("p", "c1")
    assert first == second
    await stage.cluster.api.up()
    await stage.quiet()
    after = stage.cluster.pod("p")
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    stage.check()


def _shares(ledger: dict[str, object]) -> object:
    grants = ledger["grants"]
    assert isinstance(grants, list)
    return sorted(str((each["ids"], each["shares"], each["pod"])) for each in grants)


async def test_the_extender_is_killed_between_patch_and_binding(stage: ExtenderStage) -> None:
    """A Binding that was done although its answer was lost: the scheduler marks the pod as failed,
    which is bound all the same. It starts with its claim, and is marked as served.
    """
    await stage.start_agent()
    stage.cluster.api.faults.append(
        Fault(FaultKind.LOST_ANSWER, verb="create", resource="pods/binding", times=1)
    )
    stage.create("p", asks(1, 10, 100))
    await stage.cluster.running("p")
    await stage.settled("p")
    stage.check()
    assert stage.cluster.annotations("p")[REAL] == stage.cluster.annotations("p")[PRE]


async def test_the_node_is_created_again(stage: ExtenderStage) -> None:
    """The whole Node is deleted: it is described again, and pods go on."""
    await stage.start_agent()
    stage.create("before", asks(1, 10, 100))
    await stage.cluster.running("before")
    await stage.settled("before")
    register = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
    stage.cluster.delete_node()
    await asyncio.sleep(0.3)
    stage.cluster.create_node()
    await stage.cluster.until(
        lambda: (
            stage.cluster.node_object()["metadata"].get("annotations", {}).get(REGISTER) == register
        ),
        "the annotation on the new Node",
    )
    stage.create("after", asks(1, 10, 100))
    await stage.cluster.running("after")
    stage.check()


async def test_an_idle_node_makes_no_requests(stage: ExtenderStage) -> None:
    """The replaced plugin writes twice a minute; the agent nothing, besides watches that stay
    open.
    """
    await stage.start_agent()
    stage.create("p", asks(1, 10, 100))
    await stage.cluster.running("p")
    await stage.settled("p")
    await stage.cluster.stop_extender()
    await stage.looked_for_failed_pods()
    await stage.quiet()
    stage.cluster.api.requests.clear()
    await asyncio.sleep(4)
    assert [(request.verb, request.path) for request in stage.cluster.api.requests] == []
