"""The list of containers that may not start now."""

from __future__ import annotations

import msgspec

from vgpu_agent.allocation.refusals import LONGEST_REASON, Refusals
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod

POD = Pod("uid-1", "default", "train")
NUMBER = "volcano.sh/vgpu-number"


class Clock:
    """Unix seconds as the test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_repeated_refusal_counts_and_keeps_its_first_time() -> None:
    """The kubelet asks again; since when it was refused decides about event and eviction,
    and the last reason is shown.
    """
    clock = Clock()
    refusals = Refusals(clock)
    refusals.refuse(POD, "main", NUMBER, "the pod has not been seen yet")
    clock.now = 1014.0
    refusals.refuse(POD, "main", NUMBER, "no GPU has 8000 MiB left")
    (refusal,) = refusals.current
    assert (refusal.since, refusal.count, refusal.reason) == (1000.0, 2, "no GPU has 8000 MiB left")


def test_the_text_is_the_reason_and_the_advice_and_both_are_bounded() -> None:
    """A thousand refusals are kept, and some of what they quote was written by tenants."""
    refusals = Refusals(Clock())
    refusals.refuse(POD, "main", NUMBER, "full", advice="Wait.")
    refusals.refuse(POD, "other", NUMBER, "x" * 5000, advice="y" * 5000)
    short, long = refusals.current
    assert short.text == "full. Wait."
    assert max(len(long.reason), len(long.advice)) < LONGEST_REASON + 30


def test_a_final_refusal_stays_final() -> None:
    """A later refusal for a passing reason does not make a wrong early guess right."""
    refusals = Refusals(Clock())
    refusals.refuse(POD, "main", NUMBER, "the guess was wrong", final=True)
    refusals.refuse(POD, "main", NUMBER, "the pod has not been seen yet")
    assert refusals.current[0].final


def test_a_container_that_starts_is_struck_out_and_its_sibling_stays() -> None:
    """Each container has a refusal of its own."""
    refusals = Refusals(Clock())
    refusals.refuse(POD, "one", NUMBER, "full")
    refusals.refuse(POD, "two", NUMBER, "full")
    refusals.clear("uid-1", "one")
    assert [refusal.container for refusal in refusals.current] == ["two"]


def test_the_longest_refused_comes_first() -> None:
    """The pod that waits longest gets the next chance first."""
    clock = Clock()
    refusals = Refusals(clock)
    refusals.refuse(POD, "late", NUMBER, "full")
    clock.now = 900.0  # the wall clock was set back
    refusals.refuse(POD, "early", NUMBER, "full")
    assert [refusal.container for refusal in refusals.current] == ["early", "late"]


def test_what_is_known_of_a_static_pod_goes_by_kubelets_uid() -> None:
    """The kubelet's records name a static pod by its hash, so that is what strikes it out."""
    refusals = Refusals(Clock())
    pod = Pod(
        "api-uid",
        "default",
        "static",
        annotations={MIRROR_POD: "h", STATIC_POD_HASH: "h"},
        static_uid="h",
    )
    refusals.refuse(pod, "main", NUMBER, "full")
    refusals.clear("h", "main")
    assert refusals.current == ()


def test_pods_that_are_gone_or_have_ended_are_forgotten_and_the_others_refreshed() -> None:
    """A pod that no longer exists is not evicted, and a deletion that has begun is seen."""
    refusals = Refusals(Clock())
    gone, ended = Pod("uid-2", "default", "gone"), Pod("uid-3", "default", "ended")
    for pod in (POD, gone, ended):
        refusals.refuse(pod, "main", NUMBER, "full")
    deleting = msgspec.structs.replace(POD, deleting=True)
    refusals.forget_absent([deleting, msgspec.structs.replace(ended, phase="Failed")])
    assert [refusal.pod for refusal in refusals.current] == [deleting]


def test_the_revision_moves_with_changes_only() -> None:
    """Striking out a missing entry wakes no reader."""
    refusals = Refusals(Clock())
    refusals.refuse(POD, "main", NUMBER, "full")
    refusals.clear("uid-1", "other")
    refusals.forget_absent([POD])
    assert refusals.revision.value == 1
