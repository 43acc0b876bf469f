"""Claims in the ledger: which families are kept from a GPU that a scheduler has given to a pod,
and which are not.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import WHOLE, Clock, book, make, words
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.claims import Claim, in_order, oldest_by_gpu, why_kept
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS
from vgpu_agent.model import Decider, Owner, Resource, Share

VGPU, SHARE = "volcano.sh/vgpu-number", "volcano.sh/gpu-memory"
FAMILIES = {"nvidia.com/gpu": "nvidia", VGPU: "volcano-vgpu", SHARE: "volcano-gpushare"}


def counted(name: str) -> Resource:
    """A resource whose pods decide, four places on each golden GPU."""
    ids = tuple(DeviceId(f"{uuid}-{place}", uuid) for uuid in (U0, U1) for place in range(4))
    return Resource(
        name,
        FAMILIES[name],
        ids,
        holders_per_device=4,
        decided_by=Decider.POD,
        offers_preference=False,
    )


def claim(gpu: str, order: int, family: str = "volcano-vgpu", pod: str = "") -> Claim:
    """A claim of a pod that was bound at place ``order``."""
    name = pod or f"pod-{order}"
    return Claim(gpu, family, f"default/{name}", f"uid-{name}", 1000.0, order)


def start(
    ledger: Ledger,
    name: str,
    pod: str,
    *gpus: str,
    ids: tuple[str, ...] = (),
    container: str = "main",
) -> None:
    """A container is given 1000 MiB of each GPU, on the first ids of the resource that are free."""
    held = {id_ for grant in ledger.grants if grant.resource == name for id_ in grant.ids}
    free = [entry.id.id for entry in ledger.listing(name) if entry.id.id not in held]
    owner = Owner(container, f"uid-{pod}", "default", pod)
    ledger.decide(
        name,
        ids or tuple(free[: len(gpus)]),
        [Share(gpu, 1000) for gpu in gpus],
        owner,
        evidence=("a test",),
    )


def usable(ledger: Ledger, name: str) -> set[str]:
    """The GPUs with a healthy id in the list for the kubelet."""
    return {entry.id.device for entry in ledger.listing(name) if entry.healthy}


def claimed(ledger: Ledger, clock: Clock, *claims: Claim) -> None:
    """Keep GPUs for pods, and let the time pass in which the kubelet receives it."""
    ledger.claim(claims)
    clock.now += WITHDRAWAL_SECONDS
    ledger.end_turns()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """The golden node with three families, of which two let the pod decide."""
    return make(clock, WHOLE, counted(VGPU), counted(SHARE))


def test_a_claimed_gpu_is_unhealthy_towards_the_other_families_only(
    ledger: Ledger, clock: Clock
) -> None:
    """Another family must not give away a GPU that a scheduler has given away.
    A claim never bars its own family.
    """
    claimed(ledger, clock, claim(U0, 1))
    assert words(ledger) == {U0: False, U1: True}
    assert (usable(ledger, VGPU), usable(ledger, SHARE)) == ({U0, U1}, {U1})
    assert ledger.free_ids("nvidia.com/gpu") == 1
    room = next(room for room in ledger.rooms(SHARE) if room.device == U0)
    assert "kept for a pod to which a scheduler of" in room.trouble
    ledger.claim([])
    assert ledger.claims == ()


def test_claims_are_oldest_first_and_the_same_ones_change_nothing(ledger: Ledger) -> None:
    """Streams and writers wake with each revision,
    so a refresh that finds the same must not be one.
    """
    young, old = claim(U0, 7), claim(U1, 3)
    ledger.claim([young, old, young])
    assert ledger.claims == (old, young)
    revision = ledger.revision.value
    ledger.claim([old, young])
    assert ledger.revision.value == revision


def test_the_oldest_claim_on_a_gpu_decides_in_both_directions(ledger: Ledger, clock: Clock) -> None:
    """No family starves: the younger one waits, whichever it is,
    and is next when the older one has started.
    """
    first, second = claim(U0, 1, "volcano-gpushare"), claim(U0, 2, "volcano-vgpu")
    claimed(ledger, clock, first, second)
    assert (usable(ledger, SHARE), usable(ledger, VGPU)) == ({U0, U1}, {U1})
    claimed(ledger, clock, second, msgspec.structs.replace(first, order=3))
    assert (usable(ledger, SHARE), usable(ledger, VGPU)) == ({U1}, {U0, U1})


def test_a_gpu_in_use_gives_nothing_new_while_another_family_waits_for_it(
    ledger: Ledger, clock: Clock
) -> None:
    """Otherwise it would never become free, because others of that family keep coming."""
    start(ledger, VGPU, "runs", U0)
    claimed(ledger, clock, claim(U0, 5, "volcano-gpushare", "waits"))
    assert usable(ledger, VGPU) == {U1}
    with pytest.raises(
        UnhealthyDeviceError, match="kept for a pod to which a scheduler of volcano-gpushare"
    ):
        start(ledger, VGPU, "late", U0)
    start(ledger, VGPU, "elsewhere", U1)
    for number in [grant.number for grant in ledger.grants]:
        ledger.release(number)
    assert U0 in usable(ledger, SHARE)
    start(ledger, SHARE, "waits", U0)


def test_a_pod_with_an_older_claim_joins_a_gpu_for_which_a_younger_one_waits(
    ledger: Ledger, clock: Clock
) -> None:
    """It was promised the GPU first. The younger one of another family waits for its end."""
    start(ledger, VGPU, "runs", U0)
    ledger.claim(
        [claim(U0, 2, "volcano-vgpu", "second"), claim(U0, 5, "volcano-gpushare", "waits")]
    )
    start(ledger, VGPU, "second", U0)
    claimed(ledger, clock, claim(U0, 5, "volcano-gpushare", "waits"))
    assert usable(ledger, VGPU) == {U1}


def test_allocate_is_not_refused_for_a_claim_where_ids_name_devices(ledger: Ledger) -> None:
    """The kubelet fails the pod for good. The claim waits for that one holder instead."""
    ledger.claim([claim(U0, 1)])
    assert book(ledger, U0).ids == (U0,)
    with pytest.raises(UnhealthyDeviceError, match="serves nvidia"):
        start(ledger, VGPU, "pod-1", U0)


def test_a_container_that_starts_again_does_not_wait_for_a_claim(ledger: Ledger) -> None:
    """A container keeps its share, also when only records report it."""
    start(ledger, VGPU, "runs", U0)
    grant = ledger.grants[0]
    ledger.claim([claim(U0, 5, "volcano-gpushare")])
    start(ledger, VGPU, "runs", U0, ids=grant.ids)
    assert ledger.grants[0].shares == grant.shares


def test_a_pod_that_has_a_part_of_its_gpus_gets_the_rest_before_an_older_claim(
    ledger: Ledger,
) -> None:
    """The claim may wait for the GPU that the pod has:
    neither would ever have all that it needs.
    """
    start(ledger, VGPU, "half", U0, container="one")
    ledger.claim(
        [claim(U0, 1, "volcano-gpushare", "both"), claim(U1, 1, "volcano-gpushare", "both")]
    )
    assert not any(room.trouble for room in ledger.rooms(VGPU, pod_uid="uid-half"))
    assert all(room.trouble for room in ledger.rooms(VGPU))
    start(ledger, VGPU, "half", U1, container="two")
    assert {share.device for grant in ledger.grants for share in grant.shares} == {U0, U1}


def test_two_pods_with_two_gpus_each_are_served_one_after_the_other(ledger: Ledger) -> None:
    """There is one order of claims, so pods never hold what the other waits for."""
    mine = [claim(gpu, 1, "volcano-vgpu", "mine") for gpu in (U0, U1)]
    yours = [claim(gpu, 2, "volcano-gpushare", "yours") for gpu in (U1, U0)]
    for order in itertools.permutations([*mine, *yours]):
        ledger.claim(order)
        with pytest.raises(UnhealthyDeviceError):
            start(ledger, SHARE, "yours", U1)
    start(ledger, VGPU, "mine", U0, U1)
    ledger.claim(yours)
    ledger.release(ledger.grants[0].number)
    start(ledger, SHARE, "yours", U1, U0)


def test_the_rule_keeps_exactly_the_families_without_the_oldest_claim() -> None:
    """A family is kept from a GPU if another one's oldest claim is older than each of its own,
    and only then.
    """
    families = ("a", "b", "c")
    for orders in itertools.permutations(range(3)):
        for count in range(4):
            claims = in_order(
                claim("g", order, family)
                for order, family in list(zip(orders, families, strict=True))[:count]
            )
            for family in families:
                own = min((each.order for each in claims if each.family == family), default=99)
                others = min((each.order for each in claims if each.family != family), default=100)
                assert bool(why_kept("g", family, oldest_by_gpu(claims))) == (
                    others < own and others < 100
                )
