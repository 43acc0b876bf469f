"""The expected pod: the first one bound that waits for as many ids and has none of them;
and whether any pod starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

import msgspec
import pytest

from vgpu_agent.agent.records.starting_pods import StartingPods
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, Resource
from vgpu_agent.pods import Pod, PodCache, PodContainer

NUMBER, CORES = "volcano.sh/vgpu-number", "volcano.sh/vgpu-cores"


def pod(name: str, number: int = 1, *, phase: str = "Pending", started: bool = False) -> Pod:
    """A pod whose container ``main`` asks for so many."""
    return Pod(
        f"uid-{name}",
        "ns",
        name,
        phase=phase,
        containers=(PodContainer("main", limits={NUMBER: number}, started=started),),
    )


def starting(
    *pods: Pod, served: set[tuple[str, str, str]] | None = None, clock: Callable[[], float] = float
) -> StartingPods:
    """A book with these, bound in this order; by default no time passes."""
    book = PodCache()
    for each in pods:
        book.put(each)
    ledger = Ledger()
    ledger.offer(
        [
            Resource(NUMBER, "volcano-vgpu", (), decided_by=Decider.POD),
            Resource(CORES, "volcano-vgpu", (), decided_by=Decider.NOBODY),
        ]
    )
    return StartingPods(book, ledger, started=lambda: served or set(), clock=clock)


def expected(
    pods: StartingPods, count: int = 1, excluding: Collection[tuple[str, str]] = ()
) -> tuple[str, str] | None:
    """Return the container that is expected now."""
    with pods.expected(NUMBER, count, excluding=excluding) as found:
        return found


def test_pods_are_named_as_kubelet_names_them() -> None:
    """By UID; one that is not in the book has no name,
    and one that has ended none where it should live.
    """
    pods = starting(pod("a"), pod("b", phase="Succeeded"))
    assert [pods.name_of(f"uid-{each}") for each in "abc"] == [("ns", "a"), ("ns", "b"), None]
    assert [pods.name_of(f"uid-{each}", live=True) for each in "abc"] == [("ns", "a"), None, None]


def test_the_pod_that_was_bound_first_is_expected() -> None:
    """The kubelet admits pods in about that order."""
    assert expected(starting(pod("b"), pod("a"))) == ("ns", "b")


@pytest.mark.parametrize(
    "other",
    [pod("a", 2), pod("a", started=True), pod("a", phase="Failed")],
    ids=["other number", "started before", "ended"],
)
def test_a_pod_that_does_not_wait_for_as_many_is_not_expected(other: Pod) -> None:
    """Neither one that asks for more, nor one that has run, nor one that has ended."""
    assert expected(starting(other, pod("b"))) == ("ns", "b")
    assert expected(starting(other)) is None


def test_a_container_that_is_served_is_not_expected() -> None:
    """Its status follows seconds later. Until then the agent itself knows."""
    served = {("uid-a", "main", NUMBER)}
    assert expected(starting(pod("a"), pod("b"), served=served)) == ("ns", "b")


def test_a_container_that_has_other_ids_is_not_expected() -> None:
    """It was admitted before and waits for its image, maybe for long.
    The next call is another pod's.
    """
    assert expected(starting(pod("a"), pod("b")), excluding={("uid-a", "main")}) == ("ns", "b")


def test_those_who_ask_at_the_same_time_expect_different_pods() -> None:
    """Until the one has its answer; then its pod may be expected again,
    because the start may have been refused.
    """
    pods = starting(pod("a"), pod("b"))
    with contextlib.ExitStack() as asking:
        assert [asking.enter_context(pods.expected(NUMBER, 1)) for _ in range(3)] == [
            ("ns", "a"),
            ("ns", "b"),
            None,
        ]
    assert expected(pods) == ("ns", "a")


@pytest.mark.parametrize(
    ("other", "starts"),
    [
        (pod("a"), True),
        (pod("a", phase="Running"), False),
        (pod("a", phase="Failed"), False),
        (msgspec.structs.replace(pod("a"), deleting=True), False),
        (
            msgspec.structs.replace(
                pod("a"),
                containers=(PodContainer("main", limits={CORES: 1, "example.com/fast": 1}),),
            ),
            False,
        ),
    ],
    ids=["pending", "running", "ended", "deleted", "nothing that a pod decides"],
)
def test_pods_are_being_started_until_they_run(other: Pod, *, starts: bool) -> None:
    """Only those that ask for what this agent decides by the pod.
    All others are none of its business.
    """
    assert starting(pod("b", phase="Running"), other).any_starting() is starts


def test_a_pod_that_stays_pending_is_being_started_for_so_long_only() -> None:
    """After that it waits for an image, or is refused. Others are not to wait for it."""
    times = iter([5.0, 14.0, 16.0])
    pods = starting(pod("a"), clock=lambda: next(times))
    assert [pods.any_starting() for _ in range(3)] == [True, True, False]


def test_the_resources_are_the_same_until_others_are_offered() -> None:
    """A reader that keeps something for these resources notices by identity when it has
    to begin anew.
    """
    ledger = Ledger()
    pods = StartingPods(PodCache(), ledger, started=set)
    ledger.offer([Resource(NUMBER, "volcano-vgpu", (), decided_by=Decider.POD)])
    before = pods.decided_by_pod
    assert before == {NUMBER}
    ledger.offer([Resource(NUMBER, "volcano-vgpu", (), decided_by=Decider.POD)])
    assert pods.decided_by_pod is before
    ledger.offer([Resource(CORES, "volcano-vgpu", (), decided_by=Decider.POD)])
    assert pods.decided_by_pod == {CORES}
