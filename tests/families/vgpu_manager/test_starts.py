"""Starts of containers with claims, through the real allocator and ledger (vgpu-manager §12.3)."""

from __future__ import annotations

import pytest

from tests.allocation.binding_parts import NODE, Place
from tests.families.vgpu_manager.golden import KEYS, Targets, container
from tests.families.vgpu_manager.node import NUMBER
from tests.golden import U0, U1
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.errors import CapacityError, RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.model import Share
from vgpu_agent.pods import Pod, PodContainer

IDS = tuple(f"{uuid}::{number}" for uuid in (U0, U1) for number in range(10))


def place(**options: object) -> Place:
    """The golden node with this family, and nothing on it."""
    family = VgpuManagerFamily(VgpuManagerOptions(**options), Targets())  # type: ignore[arg-type]  # the test's own keywords
    node = Place(family=family, resource=NUMBER)
    node.book.replace([])
    return node


def a_pod(name: str, claims: str, *asking: PodContainer, node: str = NODE) -> Pod:
    """A pod that an extender has bound."""
    annotations = {KEYS.pre_allocated: claims, KEYS.predicate_node: node} if claims else {}
    return Pod(
        f"uid-{name}",
        "team",
        name,
        node=NODE,
        annotations=annotations,
        containers=asking or (container("main", number=1, cores=50, memory=30_000),),
        scheduled=True,
        scheduler="vgpu-scheduler",
    )


async def started(node: Place, pod: Pod, *ids: str) -> None:
    """The kubelet admits the containers of the pod with an id each, and starts them."""
    node.book.put(pod)
    for each, id_ in zip(pod.containers, ids, strict=True):
        await node.admit(pod, each.name, [id_])
    for id_ in ids:
        await node.start([id_])


def shares(node: Place) -> dict[tuple[str, str] | None, tuple[Share, ...]]:
    """The grants in the ledger, by container."""
    return {grant.decided_for: grant.shares for grant in node.ledger.grants}


async def test_the_claim_decides_and_not_the_id() -> None:
    """vgpu-manager:D6: the kubelet may pick an id of another card."""
    node = place()
    await started(node, a_pod("a", f"main[1_{U1}_50_30000]"), f"{U0}::4")
    assert shares(node) == {("uid-a", "main"): (Share(U1, 30_000, 50),)}
    record, provision = node.carrier.specs[grant_token(NUMBER, [f"{U0}::4"])]
    assert record.decider == f"decided by the scheduler, in {KEYS.pre_allocated}"
    assert provision.edits.environment["NVIDIA_VISIBLE_DEVICES"] == U1


def test_advice_follows_the_claim_and_changes_nothing() -> None:
    """vgpu-manager:D10: the kubelet asks again and again, also for pods that fail."""
    node = place(prefer_claimed=True)
    pod = a_pod("a", f"main[1_{U1}_50_30000]")
    node.book.put(pod)
    for _ in range(2):
        assert node.allocator.preferred(NUMBER, IDS, (), 1) == [f"{U1}::0"]
        assert node.allocator.preferred(NUMBER, IDS, (f"{U1}::7",), 1) == [f"{U1}::7"]
        assert node.allocator.preferred(NUMBER, IDS, (), 2) == list(IDS[:2])
    assert (node.ledger.grants, node.allocator.desired_pods()) == ((), {})
    read = node.book.get(pod.uid)
    assert read is not None
    assert read.annotations == pod.annotations
    (resource, *_) = node.ledger.resources
    assert resource.offers_preference
    assert not place().ledger.resources[0].offers_preference


async def test_the_oldest_time_takes_nothing() -> None:
    """vgpu-manager:D28: two pods of one shape, bound and admitted in any order."""
    node = place()
    first, second = a_pod("a", f"main[0_{U0}_50_30000]"), a_pod("b", f"main[1_{U1}_50_30000]")
    node.book.put(first)
    node.book.put(second)
    await node.admit(second, "main", [IDS[0]])
    await node.admit(first, "main", [IDS[1]])
    await node.start([IDS[1]])
    await node.start([IDS[0]])
    assert shares(node) == {
        ("uid-a", "main"): (Share(U0, 30_000, 50),),
        ("uid-b", "main"): (Share(U1, 30_000, 50),),
    }


async def test_a_lost_patch_gives_no_claim_twice() -> None:
    """vgpu-manager:D17: whatever real-allocated says, each container has the claim of its name."""
    node = place()
    claims = f"c0[0_{U0}_10_1000];c1[0_{U0}_20_2000]"
    asking = (
        container("c0", number=1, cores=10, memory=1000),
        container("c1", number=1, cores=20, memory=2000),
    )
    await started(node, a_pod("two", claims, *asking), *IDS[:2])
    assert shares(node) == {
        ("uid-two", "c0"): (Share(U0, 1000, 10),),
        ("uid-two", "c1"): (Share(U0, 2000, 20),),
    }
    (desired,) = node.allocator.desired_pods().values()
    assert desired.annotations[KEYS.real_allocated] == claims


async def test_a_forged_claim_takes_no_more_than_a_card_has_left() -> None:
    """vgpu-manager:D16: a tenant writes what a scheduler would, within his limits."""
    node = place()
    await started(node, a_pod("mine", f"main[0_{U0}_50_30000]"), IDS[0])
    with pytest.raises(CapacityError, match=r"memory is never overcommitted|MiB"):
        await started(node, a_pod("forged", f"main[0_{U0}_50_30000]"), IDS[1])
    with pytest.raises(RequestRefusedError, match="were chosen for a node other than node-a"):
        await started(node, a_pod("other", f"main[0_{U0}_50_30000]", node="node-b"), IDS[2])
    assert shares(node)["uid-mine", "main"] == (Share(U0, 30_000, 50),)
    assert node.ledger.audit() == []


async def test_a_claim_on_an_excluded_card_waits() -> None:
    """Its scheduler has not read yet that the card is unhealthy."""
    node = place(excluded_uuids=frozenset({U0}))
    with pytest.raises(UnhealthyDeviceError, match=r"excluded by vgpuManager.excludeDevices"):
        await started(node, a_pod("a", f"main[0_{U0}_50_30000]"), f"{U1}::0")
