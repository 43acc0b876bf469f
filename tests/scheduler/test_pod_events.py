"""The extender's events on pods, which `kubectl describe pod` shows."""

from __future__ import annotations

import asyncio

import pytest

from vgpu_agent.placement.nodes.book import HeldCard, Holding
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.pods import ContainerKind, Pod
from vgpu_agent.scheduler.pod_events import (
    BOUND_A_SECOND,
    BOUND_AT_ONCE,
    REPEATED_SECONDS,
    PodEvents,
    summary,
)

POD = Pod(name="train", namespace="ml", uid="uid-train")


class Raised:
    """Keeps what is raised, in the place of the queue."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def raise_event(self, regarding: Pod, reason: str, message: str, kind: str = "Warning") -> None:
        assert regarding is not None
        self.events.append((reason, message, kind))


def test_many_nodes_are_counted_and_few_are_named() -> None:
    """vgpu-manager §5.2: five names a reason."""
    reasons = {f"n{number}": Reason.InsufficientVGPUMemory for number in range(7)}
    reasons |= {"x": Reason.DeviceUnhealthy}
    assert summary(reasons) == (
        "0/8 nodes are available: 7 Insufficient vGPU memory (n0, n1, n2, n3, n4 and 2 more), "
        "1 GPU unhealthy (x)"
    )


@pytest.mark.looptime
async def test_a_pod_that_waits_is_told_once_a_minute() -> None:
    """kube-scheduler tries it many times, with other Nodes and so another text each time."""
    raised = Raised()
    events = PodEvents(raised)  # type: ignore[arg-type]  # a stand-in with the members that are used
    for number in range(10):
        events.fits_nowhere(POD, {f"n{number}": Reason.DeviceUnhealthy})
        await asyncio.sleep(REPEATED_SECONDS / 5 - 0.01)
    assert [text for _, text, _ in raised.events] == [
        "0/1 nodes are available: 1 GPU unhealthy (n0)",
        "0/1 nodes are available: 1 GPU unhealthy (n6)",
    ]


@pytest.mark.looptime
async def test_a_bound_pod_is_told_its_cards() -> None:
    """So that nobody has to read annotations for it."""
    raised = Raised()
    held = HeldCard("GPU-a", 10, 1024), HeldCard("GPU-b", 0, 2048)
    PodEvents(raised).bound(  # type: ignore[arg-type]  # a stand-in with the members that are used
        POD, Holding("n0", (ContainerKind.MAIN,), (held,)), {"GPU-a": 3}
    )
    text = (
        "Bound to n0 with GPU 3 (GPU-a): 10 % of compute, 1024 MiB of memory; "
        "GPU ? (GPU-b): no limit of compute, 2048 MiB of memory"
    )
    assert raised.events == [("BindingSucceed", text, "Normal")]


@pytest.mark.looptime
async def test_many_bound_pods_are_told_one_after_the_other() -> None:
    """The event costs as much as the Binding, and must not hold up the pods. None is lost."""
    raised, count = Raised(), BOUND_AT_ONCE + 50
    events = PodEvents(raised)  # type: ignore[arg-type]  # a stand-in with the members that are used
    for number in range(count):
        events.bound(POD, Holding(f"n{number}", (ContainerKind.MAIN,), ((),)), {})
    assert len(raised.events) <= BOUND_AT_ONCE + 1
    await asyncio.sleep(10 / BOUND_A_SECOND)
    assert len(raised.events) == pytest.approx(BOUND_AT_ONCE + 10, abs=2)
    await asyncio.sleep(count / BOUND_A_SECOND)
    assert [text.split()[2] for _, text, _ in raised.events] == [
        f"n{each}" for each in range(count)
    ]
    await asyncio.sleep(count / BOUND_A_SECOND)
    events.bound(POD, Holding("later", (ContainerKind.MAIN,), ((),)), {})
    assert len(raised.events) == count + 1


@pytest.mark.looptime
async def test_a_matched_node_is_told_only_while_no_bound_pod_has_to_wait() -> None:
    """The event costs a request, and that of the bind says the same and more."""
    raised = Raised()
    events = PodEvents(raised)  # type: ignore[arg-type]  # a stand-in with the members that are used
    events.matched(POD, "n0")
    events.matched(POD, "n0")
    assert raised.events == [("FilteringSucceed", 'Successfully matched node "n0"', "Normal")]
    for number in range(10 * BOUND_AT_ONCE):
        events.matched(Pod(name="p", namespace="ml", uid=f"uid-{number}"), "n0")
    assert len(raised.events) <= BOUND_AT_ONCE + 1
    for number in range(BOUND_AT_ONCE):
        events.bound(POD, Holding(f"n{number}", (ContainerKind.MAIN,), ((),)), {})
    before = len(raised.events)
    events.matched(Pod(name="late", namespace="ml", uid="uid-late"), "n0")
    assert len(raised.events) == before


@pytest.mark.looptime
async def test_each_reason_is_told_once_a_minute() -> None:
    """kube-scheduler asks for victims right after the filter that has failed."""
    raised = Raised()
    events = PodEvents(raised)  # type: ignore[arg-type]  # a stand-in with the members that are used
    for _ in range(3):
        events.fits_nowhere(POD, {"n0": Reason.DeviceUnhealthy})
        events.not_preempted(POD, 3)
        events.gangs_disrupted(POD, {"ml/a"})
        events.policy_invalid(POD, ["x", "y"])
        await asyncio.sleep(REPEATED_SECONDS / 4)
    assert [reason for reason, _, _ in raised.events] == [
        "FilteringFailed",
        "PreemptionFailed",
        "GangDisruptedByPreemption",
        "PolicyInvalid",
    ]


@pytest.mark.looptime
async def test_groups_of_other_namespaces_are_counted_and_not_named() -> None:
    """The owner of one pod may not list those of another namespace. An annotation names a group, so
    it may hold anything.
    """
    raised = Raised()
    gangs = {f"ml/{number}" for number in range(7)} | {"ml/a\n\x1b[31m" + "x" * 500}
    PodEvents(raised).gangs_disrupted(POD, gangs | {"bank/secret"})  # type: ignore[arg-type]  # a stand-in with the members that are used
    ((_, text, _),) = raised.events
    assert text.startswith(
        "to make room for this pod, pods of groups may end that belong together: 'ml/0', 'ml/1', "
    )
    assert "… (8 in all) and 1 of other namespaces; what is left" in text
    assert "secret" not in text
    raised.events.clear()
    other = Pod(name="other", namespace="web", uid="uid-other")
    PodEvents(raised).gangs_disrupted(other, {"ml/a\n\x1b[31m" + "x" * 500})  # type: ignore[arg-type]  # a stand-in with the members that are used
    ((_, text, _),) = raised.events
    assert "together: 1 of other namespaces; " in text
    assert len(text) < 300
