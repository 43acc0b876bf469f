"""The judge's own worth: it finds a container with another's GPU, two families on a GPU,
an idle GPU, and a wait without end.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

import pytest

from tests.torture.api_model import LivePod
from tests.torture.dialects import CONTROL
from tests.torture.mixed import bounds
from tests.torture.mixed.day import TROUBLED, play
from tests.torture.mixed.judge import Figures, MixedJudge, Seen, Waits
from tests.torture.mixed.plan import (
    ALL_FAMILIES,
    AWS,
    BY_POD,
    CARDS,
    GPUSHARE,
    MANAGER,
    NVIDIA,
    RESOURCES,
    VOLCANO,
)
from tests.torture.plan import Ending, Kind, Origin, PlannedContainer, PlannedPod, Request
from tests.torture.scheduler_model import Slice
from tests.torture.story import Story
from vgpu_agent.isolation.edits import Edits, Mount

_U1, _U2 = CARDS[0].uuid, CARDS[1].uuid


def _pod(family: str, name: str = "p", gpu: str = "") -> LivePod:
    number, memory = (4, None) if family == GPUSHARE else (1, 4 if family in BY_POD else None)
    request = Request(number, memory, 0, RESOURCES[family])
    container = PlannedContainer("main", Kind.MAIN, request, 0.0, 1.0)
    plan = PlannedPod(
        name,
        Origin.VOLCANO if family in BY_POD else Origin.PLAIN,
        (container,),
        1.0,
        Ending.COMPLETES,
    )
    return LivePod(plan, f"uid-{name}", "ns", 0.0, {"main": (Slice(gpu, 4, 0),)} if gpu else {})


def _accusations(scene: Callable[[MixedJudge], None]) -> list[str]:
    async def played() -> list[str]:
        story = Story()
        scene(MixedJudge(story))
        return [text.splitlines()[0] for text in story.wrong]

    return asyncio.run(played())


def _start(judge: MixedJudge, pod: LivePod, told: str, id_: str) -> None:
    judge.starts(
        pod, pod.container("main"), Edits({"NVIDIA_VISIBLE_DEVICES": told}), (id_,), unasked=False
    )


def test_a_container_that_is_told_of_another_gpu_is_found() -> None:
    """The ids that kubelet gave it name its GPU."""
    assert _accusations(lambda judge: _start(judge, _pod(NVIDIA), _U1, f"{_U1}::2")) == []
    assert (
        "it was told of"
        in _accusations(lambda judge: _start(judge, _pod(NVIDIA), _U2, f"{_U1}::2"))[0]
    )
    assert (
        "it was told of" in _accusations(lambda judge: _start(judge, _pod(AWS), "", f"{_U1}-2"))[0]
    )


def test_a_container_of_gpushare_with_anothers_card_or_budget_is_found() -> None:
    """Nothing in it names its pod, so its card and its budget are compared with its pod's."""

    def start(number: str, mib: int) -> list[str]:
        edits = Edits({"NVIDIA_VISIBLE_DEVICES": number, "VOLCANO_GPU_ALLOCATED": str(mib)})
        pod = _pod(GPUSHARE, gpu=_U2)
        return _accusations(
            lambda judge: judge.starts(pod, pod.container("main"), edits, (), unasked=False)
        )

    assert start("1", 4096) == []
    assert "meant was" in start("0", 4096)[0]
    assert "meant was" in start("1", 5120)[0]
    assert "is shown the cards" in start("9", 4096)[0]


def test_a_container_of_vgpu_manager_with_anothers_claim_is_found() -> None:
    """Its directory names the container that the claim is for."""

    def start(owner: str, card: int) -> list[str]:
        pod = _pod(MANAGER, gpu=_U2)
        environment = {
            "NVIDIA_VISIBLE_DEVICES": CARDS[card].uuid,
            f"CUDA_MEM_LIMIT_{card}": "4096m",
            f"CUDA_CORE_LIMIT_{card}": "",
        }
        edits = Edits(environment, (Mount(CONTROL, f"/h/{owner}/config"),))
        return _accusations(
            lambda judge: judge.starts(pod, pod.container("main"), edits, (), unasked=False)
        )

    assert start("uid-p_main", 1) == []
    assert "its grant is that of uid-q" in start("uid-q_main", 1)[0]
    assert "meant was" in start("uid-p_main", 0)[0]


def test_two_families_on_a_gpu_are_found() -> None:
    """One after the other is right, both at once is not."""

    def scene(judge: MixedJudge) -> None:
        first = _pod(NVIDIA, "a")
        _start(judge, first, _U1, f"{_U1}::0")
        judge.ends(first, "main")
        _start(judge, _pod(AWS, "b"), _U1, f"{_U1}-0")
        _start(judge, _pod(NVIDIA, "c"), _U1, f"{_U1}::0")

    found = _accusations(scene)
    assert len(found) == 1
    assert "two families on a GPU" in found[0]


def test_a_family_that_names_gpus_by_number_is_found_beside_one_that_names_uuids() -> None:
    """volcano-gpushare tells its containers of a number."""

    def scene(judge: MixedJudge) -> None:
        _start(judge, _pod(NVIDIA, "a"), _U2, f"{_U2}::0")
        edits = Edits({"NVIDIA_VISIBLE_DEVICES": "1", "VOLCANO_GPU_ALLOCATED": "4096"})
        pod = _pod(GPUSHARE, "b", gpu=_U2)
        judge.starts(pod, pod.container("main"), edits, ("0-7",), unasked=False)

    assert "two families on a GPU" in _accusations(scene)[0]


def test_a_pod_that_waits_beside_an_idle_gpu_is_noted_after_five_seconds() -> None:
    """A GPU with a holder, or named by a scheduler for a pod that has not started, is not idle."""
    waits = Waits()
    busy = {card.uuid: frozenset({AWS}) for card in CARDS}
    free = busy | {_U1: frozenset[str]()}
    waiting = {NVIDIA: [("n", 0.0)]}
    for second in range(10):
        waits.look(Seen(busy, frozenset(), waiting, (), True), float(second))
        waits.look(Seen(free, frozenset({_U1}), waiting, (), True), second + 0.5)
    assert not waits.figures.idle
    for second in range(10, 20):
        waits.look(Seen(free, frozenset(), waiting, (), True), float(second))
    assert waits.figures.idle == {"n": 9.0}


def test_what_is_bounded_of_a_thousand_pods_is_judged_once_enough_have_come() -> None:
    """A race fails several pods at once, so one race on a short day would be above the bound."""
    for pods, judged in ((bounds.PODS_OF_A_RATE - 1, False), (bounds.PODS_OF_A_RATE, True)):
        failed = Figures(pods=pods, failed=collections.Counter({"refused by Allocate": pods}))
        idle = Figures(pods=pods, idle={str(number): 9.0 for number in range(pods)})
        for figures, what in ((failed, "failed of a thousand"), (idle, "idle GPU")):
            assert any(what in each for each in figures.violations()) == judged


def test_a_wait_is_counted_in_ends_of_other_families_on_the_gpu_that_was_named() -> None:
    """Ends of one's own family and on other GPUs do not count: they cannot be helped."""
    waits, waiting = Waits(), _pod(VOLCANO, "v", _U1)
    waits.look(Seen({_U1: frozenset({NVIDIA})}, frozenset({_U1}), {}, (waiting,), True), 0.0)
    for number in range(bounds.ENDS_BEFORE_A_BOUND_POD + 1):
        waits.ended(_pod(NVIDIA, f"n{number}"), frozenset({_U1}), last_of=(), now=1.0)
        waits.ended(_pod(NVIDIA, f"m{number}"), frozenset({_U2}), last_of=(), now=1.0)
        waits.ended(_pod(VOLCANO, f"o{number}"), frozenset({_U1}), last_of=(), now=1.0)
    waits.started(waiting, 2.0)
    assert waits.figures.ends_before_bound == [bounds.ENDS_BEFORE_A_BOUND_POD + 1]
    assert waits.figures.starvation()


def test_a_handover_lasts_until_kubelet_may_give_the_gpu_to_another_family() -> None:
    """Healthy ids for the family that had it before are no handover."""
    waits = Waits()
    waits.ended(_pod(NVIDIA), frozenset({_U1}), last_of=(_U1,), now=10.0)
    waits.listed(RESOURCES[NVIDIA], NVIDIA, frozenset({_U1}), 11.0)
    waits.listed(RESOURCES[AWS], AWS, frozenset({_U2}), 12.0)
    waits.listed(RESOURCES[AWS], AWS, frozenset({_U1, _U2}), 13.5)
    assert waits.figures.handovers == [3.5]


@pytest.mark.torture
def test_the_same_seed_tells_the_same_mixed_day() -> None:
    """A seed that fails can be played again."""
    first, second = (play(7, pods=60, faults=TROUBLED, families=ALL_FAMILIES) for _ in range(2))
    assert (first.counts, first.virtual_seconds, first.figures) == (
        second.counts,
        second.virtual_seconds,
        second.figures,
    )
