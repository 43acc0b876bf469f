"""A pod's annotations and labels after its containers have started (vgpu-manager §4.3)."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.golden import (
    CLAIM,
    KEYS,
    NODE,
    ONE,
    TIME,
    container,
    grants,
    pod,
    written,
)
from tests.families.vgpu_manager.node import U0, U1
from vgpu_agent.families.vgpu_manager.pod_state import FINISHED, desired_pod
from vgpu_agent.model import Grant, Share
from vgpu_agent.pods import ContainerKind, DesiredPod, Pod

INDICES = {U0: 0, U1: 1}
BOUND = {KEYS.phase: "allocating", KEYS.metrics_node: NODE}
A, B = f"a[0_{U0}_10_1000]", f"b[1_{U1}_20_2000]"
GIVEN_A, GIVEN_B = (Share(U0, 1000, 10),), (Share(U1, 2000, 20),)
ASK_A, ASK_B = container("a", number=1), container("b", number=1)


def desired(about: Pod, given: dict[str, Grant], *, failed: bool = False) -> DesiredPod:
    """The state that the pod should have."""
    return desired_pod(about, given, KEYS, indices=INDICES, failed=failed)


def after(about: Pod, state: DesiredPod) -> Pod:
    """The pod once that is written."""

    def merged(standing: dict[str, str], wanted: dict[str, str | None]) -> dict[str, str]:
        both = {**standing, **wanted}
        return {key: text for key, text in both.items() if text is not None}

    return msgspec.structs.replace(
        about,
        annotations=merged(dict(about.annotations), dict(state.annotations)),
        labels=merged(dict(about.labels), dict(state.labels)),
    )


def test_the_golden_pod_ends_as_after_the_replaced_allocate() -> None:
    """vgpu-manager:§13.3: phase, time and real-allocated; the rest stays."""
    about, given = pod(annotations=written(), labels=BOUND), grants(default=(Share(U0, 1024, 10),))
    state = desired(about, given)
    assert state == DesiredPod(
        {KEYS.real_allocated: CLAIM, KEYS.predicate_time: FINISHED}, {KEYS.phase: "succeed"}
    )
    assert FINISHED == "9223372036854775807"
    assert desired(after(about, state), given) == DesiredPod()


def test_containers_are_appended_one_by_one_in_the_order_of_the_claims() -> None:
    """Whichever starts first."""
    about = pod(ASK_A, ASK_B, annotations=written(f"{A};{B}"), labels=BOUND)
    first = desired(about, grants(b=GIVEN_B))
    assert first == DesiredPod({KEYS.real_allocated: B}, {})
    half = after(about, first)
    assert half.annotations[KEYS.predicate_time] == TIME
    second = desired(half, grants(a=GIVEN_A, b=GIVEN_B))
    assert second.annotations == {KEYS.real_allocated: f"{A};{B}", KEYS.predicate_time: FINISHED}
    assert second.labels == {KEYS.phase: "succeed"}


def test_a_pod_that_the_agent_has_placed_gets_the_schedulers_keys() -> None:
    """So that extenders count it."""
    about = pod(ASK_A, ASK_B)
    state = desired(about, grants(a=GIVEN_A))
    assert state.annotations == {
        KEYS.pre_allocated: A,
        KEYS.predicate_node: NODE,
        KEYS.real_allocated: A,
    }
    assert state.labels == BOUND
    whole = desired(after(about, state), grants(b=GIVEN_B, a=GIVEN_A))
    assert whole.annotations == {
        KEYS.pre_allocated: f"{A};{B}",
        KEYS.real_allocated: f"{A};{B}",
        KEYS.predicate_time: FINISHED,
    }


def test_an_init_container_that_has_ended_is_not_waited_for() -> None:
    """Its write was lost, and after a restart of the agent nothing of it is in the ledger."""
    init = msgspec.structs.replace(ASK_A, kind=ContainerKind.INIT)
    about = pod(init, ASK_B, annotations=written(f"{A};{B}"), labels=BOUND)
    state = desired(about, grants(b=GIVEN_B))
    assert state.annotations == {KEYS.real_allocated: f"{A};{B}", KEYS.predicate_time: FINISHED}
    assert desired(about, grants(a=GIVEN_A)).annotations == {KEYS.real_allocated: A}


@pytest.mark.parametrize(
    "forged", [f"a[0_{U0}_100_24576]", f"x[0_{U0}_1_1]", "a[", f"{A};{A}", ";" * 10_000]
)
def test_what_a_user_writes_as_given_counts_for_nothing(forged: str) -> None:
    """vgpu-manager:D16: schedulers count by it."""
    about = pod(ASK_A, ASK_B, annotations=written(f"{A};{B}", real_allocated=forged), labels=BOUND)
    assert desired(about, grants(b=GIVEN_B)).annotations == {KEYS.real_allocated: B}


def test_a_claim_that_a_user_has_broken_later_is_written_anew() -> None:
    """The ledger knows what the container has."""
    about = pod(ONE, annotations=written("default[") | {KEYS.predicate_time: FINISHED})
    state = desired(about, grants(default=(Share(U0, 1024, 10),)))
    assert state.annotations == {KEYS.pre_allocated: CLAIM, KEYS.real_allocated: CLAIM}


def test_a_pod_without_a_started_container_is_left_alone() -> None:
    """Its scheduler may still be at work."""
    assert desired(pod(annotations=written(), labels=BOUND), {}) == DesiredPod()
    assert desired(pod(container("log")), grants(log=GIVEN_A)) == DesiredPod()


def test_a_failure_keeps_the_claim() -> None:
    """vgpu-manager §4.3: phase and time end the reservation, and the label is taken away."""
    about = pod(annotations=written(), labels=BOUND)
    state = desired(about, {}, failed=True)
    assert state == DesiredPod(
        {KEYS.predicate_time: FINISHED}, {KEYS.phase: "failed", KEYS.metrics_node: None}
    )
    assert desired(after(about, state), {}, failed=True) == DesiredPod()
    assert desired(pod(), {}, failed=True) == DesiredPod()


def test_a_long_node_name_is_no_label() -> None:
    """vgpu-manager:D14: labels have 63 characters, nodes' names 253; the patch must not fail."""
    name = "n" * 64
    about = pod(annotations=written(predicate_node=name), node=name)
    state = desired(about, grants(default=(Share(U0, 1024, 10),)))
    assert state.labels == {KEYS.phase: "succeed"}
    fits = desired(
        msgspec.structs.replace(about, node=name[1:]), grants(default=(Share(U0, 1024, 10),))
    )
    assert fits.labels[KEYS.metrics_node] == name[1:]
