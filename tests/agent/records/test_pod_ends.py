"""Grants of ended pods, above all of pods that end before the kubelet's records have named them."""

from __future__ import annotations

import pytest

from tests.allocation.without_pods import without_pods
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.agent.records.pod_ends import PodEnds
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Holding, KubeletRecords, Owner
from vgpu_agent.pods import MIRROR_POD, Pod, PodCache, PodContainer

GPU = "nvidia.com/gpu"
ENDED, NEXT = (
    Pod(
        f"0e6e9a8c-1111-4222-8333-00000000000{number}",
        "default",
        f"pod-{number}",
        containers=(PodContainer("main", limits={GPU: 1}),),
    )
    for number in (1, 2)
)


class Node:
    """A ledger in which U0 is booked for an unknown pod,
    and a pod cache in which ENDED has ended.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.ledger, self.book = Ledger(clock=lambda: self.now), PodCache(lambda: self.now)
        allocator = Allocator(
            without_pods(
                ledger=self.ledger,
                families=Families((NvidiaFamily(NvidiaOptions()),)),
                inventory=golden_inventory,
                journal=Journal(),
            )
        )
        allocator.refresh_offer()
        self.ends = PodEnds(self.ledger, self.book, lambda: self.now)
        self.book.replace([ENDED])

    def booked(self) -> None:
        """Allocate has come for U0, two seconds ago."""
        self.ledger.reserve(GPU, [U0], ())
        self.now += 2

    def ended(self, records: KubeletRecords) -> bool:
        """Tell whether the one grant's pod has ended."""
        (grant,) = self.ledger.grants
        return self.ends.has_ended(grant, records)


@pytest.fixture
def node() -> Node:
    """A node on which U0 was booked for a pod that ended before its name was known."""
    node = Node()
    node.booked()
    node.book.end(ENDED)
    return node


def checkpoint(*pods: Pod, listed: tuple[Pod, ...] = ()) -> KubeletRecords:
    """Kubelet records in which the checkpoint has U0 for ``pods``,
    and pod-resources lists U1 for ``listed``.
    """
    holdings = tuple(
        Holding(GPU, (U1,), Owner("main", "", pod.namespace, pod.name)) for pod in listed
    )
    return KubeletRecords(
        holdings, entries=tuple(Holding(GPU, (U0,), Owner("main", pod.uid)) for pod in pods)
    )


@pytest.mark.parametrize("records", [checkpoint(), checkpoint(ENDED), checkpoint(listed=(NEXT,))])
def test_a_pod_that_ended_before_anybody_knew_it_is_known_by_what_is_left(
    node: Node, records: KubeletRecords
) -> None:
    """Otherwise the GPU of a job of a few seconds would wait for the end of its reservation,
    a minute.
    """
    if records.holdings:
        node.book.put(NEXT)
    assert node.ended(records)


@pytest.mark.parametrize(
    "records", [checkpoint(), checkpoint(ENDED), checkpoint(NEXT), checkpoint(ENDED, NEXT)]
)
def test_the_reservation_stays_while_a_pod_may_be_on_its_way_with_the_ids(
    node: Node, records: KubeletRecords
) -> None:
    """kubelet may be admitting it, while the checkpoint still names the holder before; or its init
    container has them, which is hidden.
    """
    node.book.put(NEXT)
    assert not node.ended(records)


def test_without_the_word_of_the_watch_the_reservation_stays() -> None:
    """No end since the booking says nothing, be it that the watch is broken."""
    node = Node()
    node.book.end(ENDED)
    node.ends.pending()
    node.booked()
    assert not node.ended(checkpoint())


def test_a_reservation_of_this_moment_is_left_alone(node: Node) -> None:
    """The watch may not have shown the pod yet that kubelet admits."""
    node.booked()
    node.now -= 1.5
    assert not node.ended(checkpoint(ENDED))


def test_an_imitation_of_a_mirror_pod_keeps_no_gpu(node: Node) -> None:
    """The kubelet admits no such pod of the API server's, and any user may create one."""
    node.book.put(
        Pod(NEXT.uid, "default", "fake", annotations={MIRROR_POD: "x"}, containers=NEXT.containers)
    )
    assert node.ended(checkpoint(ENDED))


def test_each_end_is_new_while_a_grant_has_no_name_and_none_when_all_have() -> None:
    """Any pod may have been the one. A look follows each end,
    and the ends before the booking are over.
    """
    node = Node()
    node.book.end(ENDED)
    assert node.ends.pending() == frozenset()
    node.booked()
    assert node.ends.pending() == frozenset()
    node.book.put(NEXT)
    node.book.remove(NEXT)
    first = node.ends.pending()
    assert len(first) == 1
    node.book.put(NEXT)
    node.book.end(NEXT)
    assert not node.ends.pending() <= first
    node.ledger.release(node.ledger.grants[0].number)
    assert node.ends.pending() == frozenset()


def test_a_grant_with_a_name_goes_by_its_own_pod(node: Node) -> None:
    """The end of another says nothing about it."""
    records = KubeletRecords((Holding(GPU, (U0,), Owner("main", NEXT.uid, "default", NEXT.name)),))
    node.book.put(NEXT)
    node.ledger.reconcile(
        records, lambda _: InterpretedHolding("nvidia", ()), reservation_seconds=60
    )
    assert not node.ended(checkpoint(ENDED))
    assert node.ends.pending() == frozenset()
    node.book.end(NEXT)
    assert node.ended(checkpoint(ENDED))
    assert node.ends.pending() == {NEXT.uid}
