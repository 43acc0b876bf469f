"""Demand: free GPUs are kept for pods by ids that are bound and
that kubelet has not admitted yet.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.test_claims import (
    GPU,
    NUMBER,
    SHARE,
    SHARE_LIMITS,
    VGPU_LIMITS,
    Node,
    share_on,
    vgpu_on,
)
from tests.golden import U0, U1
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS
from vgpu_agent.pods import MIRROR_POD, ContainerKind, PodContainer


@pytest.fixture
def node() -> Node:
    """A node on which nothing runs."""
    return Node()


@pytest.fixture
def node_of_replicas() -> Node:
    """A node on which nothing runs, with two ids of `nvidia.com/gpu` for each GPU."""
    return Node(replicas=2)


def kept(node: Node) -> list[tuple[str, str]]:
    """Each claim's GPU and pod, the oldest first."""
    return [(claim.gpu, claim.pod.partition("/")[2]) for claim in node.ledger.claims]


async def test_a_free_gpu_is_kept_until_kubelet_has_admitted_the_pod(node: Node) -> None:
    """The kubelet fails a pod for which it has no Healthy id, for good."""
    name = node.bind({GPU: 1}, {})
    assert kept(node) == [(U0, name)]
    node.wait(WITHDRAWAL_SECONDS)
    assert (node.offered(GPU), node.offered(NUMBER), node.offered(SHARE)) == ({U0, U1}, {U1}, {U1})
    await node.admit({GPU: 1}, bound=name)
    node.look()
    assert kept(node) == [], "before kubelet's records have named the pod"
    node.verify(initial=True)
    assert kept(node) == []


@pytest.mark.parametrize(
    "end", ["deleted", "ended", "deleting", "reported", "by nobody", "a mirror"]
)
def test_nothing_is_kept_for_a_pod_that_kubelet_will_not_admit_now(node: Node, end: str) -> None:
    """A pod with spec.nodeName has passed no scheduler."""
    name = node.bind({GPU: 1}, {})
    match end:
        case "deleted":
            node.end_unadmitted(name)
        case "ended":
            node.put(name, phase="Failed")
        case "deleting":
            node.put(name, deleting=True)
        case "reported":
            node.put(name, reported=True)
        case "by nobody":
            node.put(name, scheduled=False)
        case _:
            node.put(name, annotations={MIRROR_POD: "x"})
    assert kept(node) == []


def test_demand_is_served_in_the_order_of_binding_and_never_beyond_what_there_is(
    node: Node,
) -> None:
    """A pod that kubelet cannot admit, whatever is kept, claims nothing."""
    first, _too_large, second, _too_late = (node.bind({GPU: count}, {}) for count in (1, 3, 1, 1))
    assert kept(node) == [(U0, first), (U1, second)]


def test_init_containers_need_no_ids_of_their_own(node: Node) -> None:
    """The kubelet gives theirs to the containers after them."""
    init, main = (
        PodContainer(name, kind, {GPU: 1})
        for name, kind in (("i", ContainerKind.INIT), ("m", ContainerKind.MAIN))
    )
    name = node.bind({GPU: 1}, {})
    node.put(name, containers=(init, main))
    assert kept(node) == [(U0, name)]


def test_a_claim_by_annotation_of_a_moment_ago_gives_way(node: Node) -> None:
    """Its pod waits, where the other would be failed. On a node with room neither has to."""
    volcano = node.bind(VGPU_LIMITS, vgpu_on(U0))
    one = node.bind({GPU: 1}, {})
    assert kept(node) == [(U1, one), (U0, volcano)]
    two = node.bind({GPU: 1}, {})
    assert set(kept(node)) == {(U1, one), (U0, two), (U0, volcano)}
    assert "a pod of nvidia that has been bound to this node" in node.ledger.why_kept(
        U0, "volcano-vgpu"
    )
    assert not node.ledger.why_kept(U0, "nvidia")


def test_an_older_claim_by_annotation_stands(node: Node) -> None:
    """Schedulers have been shown the GPU as given away long ago."""
    volcano = node.bind(SHARE_LIMITS, share_on(0))
    (claim,) = node.ledger.claims
    node.ledger.claim([msgspec.structs.replace(claim, since=claim.since - 60)])
    node.bind({GPU: 2}, {})
    assert kept(node) == [(U0, volcano)]


async def test_ids_on_gpus_that_serve_the_family_cover_demand_first(node: Node) -> None:
    """A GPU is kept from others only where it is needed."""
    await node.admit({GPU: 1})
    node.verify(initial=True)
    name = node.bind({GPU: 1}, {})
    assert len(kept(node)) == 1
    assert kept(node)[0][1] == name
    assert kept(node)[0][0] not in {
        share.device for grant in node.ledger.grants for share in grant.shares
    }


async def test_pods_share_what_a_gpu_in_use_has_left(node_of_replicas: Node) -> None:
    """Two pods that both counted on its last free id would leave one without any."""
    node = node_of_replicas
    await node.admit({GPU: 1})
    node.verify(initial=True)
    used, free = sorted(
        (U0, U1),
        key=lambda gpu: (
            gpu not in {share.device for grant in node.ledger.grants for share in grant.shares}
        ),
    )
    node.bind({GPU: 1}, {})
    assert kept(node) == [], f"{used} has an id left"
    second = node.bind({GPU: 1}, {})
    assert kept(node) == [(free, second)]


def test_demand_is_as_it_was_after_a_restart_of_the_agent(node: Node) -> None:
    """Made from the pods before anything is offered."""
    name = node.bind({GPU: 1}, {})
    node.start_agent()
    assert kept(node) == [(U0, name)]
    assert node.offered(NUMBER) == {U1}
