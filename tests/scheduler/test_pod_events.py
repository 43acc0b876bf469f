"""What `kubectl describe pod` shows of the extender."""

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
    events = PodEvents(raised)  # type: ignore[arg-type]
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
    PodEvents(raised).bound(  # type: ignore[arg-type]
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
    events = PodEvents(raised)  # type: ignore[arg-type]
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
