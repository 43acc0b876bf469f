"""Other schedulers and other runtimes: Volcano before 1.15, a scheduler that is killed, and nodes
where grants must be decided early.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests import constants
from tests.component.volcano import IDS, VolcanoStage, asks, volcano_stage
from vgpu_agent.sim.volcano.scheduler import VolcanoSettings

HANDSHAKE, LOCK = "volcano.sh/node-vgpu-handshake", "hamivgpu"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with a runtime that knows CDI."""
    async with volcano_stage(folder) as stage:
        yield stage


@pytest.fixture
async def early(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node whose containerd knows no CDI, so that the answer must be complete in Allocate."""
    async with volcano_stage(folder, runtime_version="containerd://1.6.8") as stage:
        yield stage


async def test_an_old_scheduler_with_handshake_and_lock(stage: VolcanoStage) -> None:
    """volcano-vgpu:D19: annotations before the Binding, the handshake answered, and the lock given
    back, so that the next pod follows.
    """
    old = VolcanoSettings(old=True, node_lock=True, retry_seconds=0.2)
    await stage.cluster.start_volcano(old)
    await stage.start_agent()
    for number in range(3):
        await stage.serve(f"old-{number}", asks(1, 20 + number))
    await stage.settled("old-0", "old-1", "old-2")
    await stage.cluster.until(
        lambda: LOCK not in stage.cluster.node_object()["metadata"]["annotations"],
        "the lock to be given back",
    )
    stage.check()

    def answered() -> bool:
        return str(stage.cluster.node_object()["metadata"]["annotations"][HANDSHAKE]).startswith(
            "Reported"
        )

    # The scheduler writes Requesting with each round that it makes, so only without it the last
    # word stays ours.
    await stage.cluster.stop_volcano()
    await stage.cluster.until(answered, "an answer to the handshake")


async def test_a_scheduler_that_is_restarted_in_a_burst(stage: VolcanoStage) -> None:
    """Its ledger is in the annotations, and so is ours: nothing is given twice."""
    await stage.start_agent()
    names = [f"burst-{number}" for number in range(12)]
    for name in names[:6]:
        stage.cluster.create_pod(name, asks(1, 40))
    await stage.cluster.until(
        lambda: IDS in stage.cluster.annotations(names[0]), "the first to be bound"
    )
    await stage.cluster.stop_volcano()
    for name in names[6:]:
        stage.cluster.create_pod(name, asks(1, 40))
    await stage.cluster.start_volcano()
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()


async def _held_back(stage: VolcanoStage) -> Callable[[], None]:
    """Pod ``quick`` runs, which is not written to it because ``slow`` waits for its image,
    until what is returned is called.
    """
    stage.constants[constants.STARTS_FIRST] = 30
    await stage.start_agent()
    pulled = stage.cluster.pull("c0")
    stage.cluster.create_pod("slow", [asks(1, 20), {}])
    await stage.cluster.until(
        lambda: "nodeName" in stage.cluster.pod("slow")["spec"], "slow to be bound"
    )
    await stage.watched("slow")
    await stage.serve("quick", asks(1, 30))
    return pulled


async def test_pods_are_written_to_once_none_is_being_started(stage: VolcanoStage) -> None:
    """A pod that waits for its image is one of those.
    No other pod waits for what is written then.
    """
    pulled = await _held_back(stage)
    await asyncio.sleep(12)  # longer than by default
    assert stage.cluster.annotations("quick")["volcano.sh/bind-phase"] == "allocating"
    pulled()
    await stage.settled("quick", "slow")
    stage.check()


async def test_what_a_killed_agent_held_back_is_written_by_the_next(stage: VolcanoStage) -> None:
    """Nothing of it is remembered: the annotations differ from what the pod has."""
    pulled = await _held_back(stage)
    await stage.agent.kill()
    assert stage.cluster.annotations("quick")["volcano.sh/bind-phase"] == "allocating"
    await stage.restart_agent()
    pulled()
    await stage.settled("quick", "slow")
    stage.check()


async def test_early_the_same_pods(early: VolcanoStage) -> None:
    """Without CDI: every shape of a pod gets what the scheduler wrote,
    with the answer to Allocate.
    """
    await early.start_agent()
    cluster = early.cluster
    (bound,) = [
        line
        for line in await asyncio.to_thread(early.agent.log_lines)
        if line["msg"] == "binding.mode"
    ]
    assert bound["mode"] == "early"
    cluster.create_pod("one", asks(1, 10, 20))
    cluster.create_pod("two", [asks(1, 30), asks(1, 40)])
    cluster.create_pod("sidecar-first", [{}, asks(1, 50)])
    cluster.create_pod("init-same", asks(1, 60), init=[(asks(1, 60), False)])
    names = ("one", "two", "sidecar-first", "init-same")
    await cluster.running(*names)
    await early.settled(*names)
    early.check()
    assert cluster.starts("two", "c1")[0].environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2560m"
    assert not list(cluster.cdi_directory.glob("*"))


async def test_early_a_wrong_guess_never_starts(early: VolcanoStage) -> None:
    """The kubelet admits in another order than the pods were bound in:
    another's answer is refused, each that runs is right.
    """
    await early.start_agent()
    cluster = early.cluster
    cluster.hold_admission = True
    names = [f"pod-{number}" for number in range(4)]
    for number, name in enumerate(names):
        cluster.create_pod(name, asks(1, 20 + 10 * number))
        await cluster.until(
            lambda name=name: "nodeName" in cluster.pod(name)["spec"],  # type: ignore[misc]  # mypy does not infer a lambda with a default
            f"{name} to be bound",
        )
    await early.watched(*names)
    await cluster.admit_in_order(reversed(names))
    await cluster.until(
        lambda: (
            len({name for name, _, _ in cluster.refusals} | {each.pod for each in cluster.started})
            == 4
        ),
        "all starts",
    )
    early.check()
    wrong = {name for name, _, text in cluster.refusals if "delete the pod" in text}
    assert wrong
    assert not wrong & {each.pod for each in cluster.started}
    for name in sorted(wrong):
        cluster.delete_pod(name)
        await cluster.until(lambda name=name: not cluster.exists(name), f"{name} to be gone")  # type: ignore[misc]  # mypy does not infer a lambda with a default
        await early.serve(name, asks(1, 30))
    await cluster.running(*names)
    early.check()


async def test_early_a_restart_under_running_pods(early: VolcanoStage) -> None:
    """The kubelet keeps the answers: after a kill -9 a crashed container comes with what it had,
    and the next pod with its own.
    """
    await early.start_agent()
    await early.serve("p", asks(1, 30, 20))
    await early.settled("p")
    await early.agent.kill()
    await early.agent.start()
    await early.offered()
    await early.cluster.crash("p")
    first, second = early.cluster.starts("p")
    assert first == second
    await early.serve("q", asks(1, 50))
    early.check()


async def test_a_pod_that_the_agent_has_placed_starts_again_with_a_larger_init_container(
    stage: VolcanoStage,
) -> None:
    """Without Volcano's scheduler the agent writes vgpu-ids-new itself, once the last container
    has started, and init containers have no segment there. When they run again, as after a reboot,
    it is no scheduler's decision, which would give them no more than the containers after them.
    """
    await stage.start_agent()
    cluster = stage.cluster
    cluster.create_pod(
        "placed", asks(1, 10), scheduler="default-scheduler", init=[(asks(2, 20), False)]
    )
    await cluster.running("placed")
    await cluster.until(lambda: IDS in cluster.annotations("placed"), "the agent's annotation")
    await stage.agent.kill()
    await cluster.reboot()
    await stage.restart_agent()
    await cluster.until(lambda: len(cluster.starts("placed")) == 2, "the pod to start again")
    first, again = cluster.starts("placed", "init0")
    for came in (first, again):
        assert came.environment["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 2
        assert came.environment["CUDA_DEVICE_MEMORY_LIMIT_1"] == "1280m"
    assert [
        came.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] for came in cluster.starts("placed")
    ] == [
        "640m",
        "640m",
    ]
