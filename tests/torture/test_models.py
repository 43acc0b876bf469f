"""The torture test's own worth: its model of a node finds an agent that guesses,
and is content with one that asks.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.torture.agents import Life
from tests.torture.episode import play
from tests.torture.faults import Faults
from tests.torture.gpushare_model import GpushareModel
from tests.torture.judge import Got
from tests.torture.plan import (
    MEMORY,
    NUMBER,
    Card,
    Ending,
    Kind,
    Mix,
    Origin,
    PlannedContainer,
    PlannedPod,
    Request,
)
from tests.torture.scheduler_model import SchedulerModel, Slice
from tests.torture.stand_ins import Guesser, Reader
from tests.torture.virtual_time import run
from vgpu_agent.isolation.edits import Edits, Mount

_SCHEDULED_ONLY = Mix(plain=0.0, static=0.0, init=0.0)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_that_guesses_is_found_wrong_again_and_again(seed: int) -> None:
    """The replaced plugin guesses (volcano-vgpu:D2),
    and containers of a quiet node get other pods' shares.
    """
    outcome = play(seed, Guesser, early=True, pods=60, mix=_SCHEDULED_ONLY, faults=Faults())
    assert len(outcome.wrong) > 10
    assert "its grant is that of" in outcome.text() or "meant was" in outcome.text()


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_that_asks_kubelet_starts_every_container_right(seed: int) -> None:
    """The model leaves a way to be right: with nothing but the records, all containers of a quiet
    node start with their own shares.
    """
    outcome = play(
        seed, Reader, early=False, pods=60, mix=_SCHEDULED_ONLY, faults=Faults(), overlapping=False
    )
    assert (outcome.wrong, outcome.stuck) == ([], [])
    assert outcome.started > 60


@pytest.mark.torture
def test_the_same_seed_tells_the_same_story() -> None:
    """A seed that fails can be played again."""
    first, second = (play(7, Reader, early=False, pods=40, mix=_SCHEDULED_ONLY) for _ in range(2))
    assert (first.counts, first.virtual_seconds) == (second.counts, second.virtual_seconds)


def test_the_schedulers_annotations_are_those_of_the_contract() -> None:
    """Sizes and segments as in volcano-vgpu:G8: containers without a request leave no trace."""
    cards = (Card("GPU-0", 24), Card("GPU-1", 24))
    requests = (None, Request(1, 3, 0), None, Request(1, 4, 30))
    containers = tuple(
        PlannedContainer(f"c{place}", Kind.MAIN, request, 0.0, 0.0)
        for place, request in enumerate(requests)
    )
    scheduler = SchedulerModel(random.Random(1), cards, node="node-a")
    placement = scheduler.place(
        "uid", PlannedPod("p", Origin.VOLCANO, containers, 1.0, Ending.COMPLETES), now=1795200692.7
    )
    assert placement is not None
    segments = placement.annotations["volcano.sh/vgpu-ids-new"].split(";")
    assert [segment.split(",", 1)[1] for segment in segments] == ["NVIDIA,3,0:", "NVIDIA,4,30:"]
    assert placement.annotations["volcano.sh/vgpu-time"] == "1795200692"


def test_kubelet_needs_no_more_ids_for_init_containers_that_come_before() -> None:
    """Ids of a plain init container are used again. Only the largest of them counts."""
    containers = (
        PlannedContainer("init", Kind.INIT, Request(2, 1, 0), 0.0, 0.0),
        PlannedContainer("main", Kind.MAIN, Request(1, 3, 0), 0.0, 0.0),
        PlannedContainer("other", Kind.MAIN, Request(1, 1, 0), 0.0, 0.0),
    )
    assert PlannedPod("p", Origin.VOLCANO, containers, 1.0, Ending.COMPLETES).needs == {
        NUMBER: 2,
        MEMORY: 4,
    }


def test_gpushares_scheduler_gives_a_pod_the_first_card_with_room_for_all_of_it() -> None:
    """volcano-gpushare:S2, volcano-gpushare:S7, volcano-gpushare §8: no binpack, and containers of
    a pod are never apart.
    """

    def pod(*units: int) -> PlannedPod:
        containers = tuple(
            PlannedContainer(
                f"main-{place}",
                Kind.MAIN,
                Request(number, None, 0, "volcano.sh/gpu-memory"),
                0.0,
                0.0,
            )
            for place, number in enumerate(units)
        )
        return PlannedPod("p", Origin.VOLCANO, containers, 1.0, Ending.COMPLETES)

    model = GpushareModel((Card("A", 24), Card("B", 24)))
    placed = [model.place(str(uid), pod(units), now=2.5) for uid, units in enumerate((3, 20, 3))]
    assert [each and each.slices["main-0"][0].uuid for each in placed] == ["A", "A", "B"]
    assert placed[0] is not None
    assert placed[0].annotations == {
        "volcano.sh/gpu-index": "0",
        "volcano.sh/predicate-time": "2500000000",
    }
    assert model.place("two", pod(2, 20), now=0.0) is None
    model.take_back("1")
    assert model.place("two", pod(1, 20), now=0.0, usable={"C"}) is None
    both = model.place("two", pod(1, 20), now=0.0)
    assert both is not None
    assert both.slices == {"main-0": (Slice("A", 1, 0),), "main-1": (Slice("A", 20, 0),)}


def test_what_a_container_got_is_read_in_the_order_of_the_bus() -> None:
    """Limit 0 is that of the card that comes first on the bus,
    whatever the list of visible cards says (volcano-vgpu:D22).
    """
    environment = {
        "NVIDIA_VISIBLE_DEVICES": "B,A",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "1024m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "2048m",
    }
    got = Got.read(
        Edits(environment, (Mount("/tmp/cudevshr.cache", "/h/uid_main/a.cache"),)), ["A", "B"]
    )
    assert got == Got(("uid", "main"), frozenset({Slice("A", 1, 0), Slice("B", 2, 0)}))


def test_a_killed_agent_runs_no_last_words() -> None:
    """Code that is at an await when the process dies never runs again, not even its ``finally``."""
    said: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            said.append("bye")

    async def scene() -> None:
        life = Life()
        task = life.run(work())
        await asyncio.sleep(0.5)
        life.kill()
        await asyncio.sleep(10)
        assert task.done()
        assert said == []
        life.bury()

    run(scene())
