"""The ledger's promises, one by one; their conjunction under any history is in test_ledger_invariants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import Meaning
from vgpu_agent.model import Grant, GrantState, Health, Holding, Inventory, KubeletRecords, Owner, Resource, Share

ILL = Health(ok=False, reason="XID 79: the GPU has fallen off the bus")
TRAIN = Owner("main", "uid-train", "default", "train")
SERVE = Owner("main", "uid-serve", "default", "serve")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Unix seconds."""
        return self.now


def replicated(count: int, *, name: str = "nvidia.com/gpu", family: str = "nvidia", prefix: str = "") -> Resource:
    """Both golden GPUs, ``count`` replicas each."""
    ids = tuple(DeviceId(f"{prefix}{uuid}::{n}", uuid, numa) for uuid, numa in ((U0, 0), (U1, 1)) for n in range(count))
    return Resource(name, family, ids, holders_per_device=count)


WHOLE = Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0, 0), DeviceId(U1, U1, 1)))


def whole_shares(ids: Sequence[str]) -> list[Share]:
    """A whole GPU for each id."""
    return [Share(id_, 40960, 100, exclusive=True) for id_ in ids]


def replica_shares(ids: Sequence[str]) -> tuple[Share, ...]:
    """A place on each GPU behind the ids."""
    return tuple(Share(uuid) for uuid in dict.fromkeys(id_.partition("::")[0] for id_ in ids))


def interpret(holding: Holding) -> Meaning | None:
    """Read a holding the way the nvidia family does."""
    if not holding.resource.startswith("nvidia.com/"):
        return None
    whole = all("::" not in id_ for id_ in holding.ids)
    return Meaning("nvidia", tuple(whole_shares(holding.ids)) if whole else replica_shares(holding.ids))


@pytest.fixture
def clock() -> Clock:
    """A clock at 1000 s."""
    return Clock()


def make(clock: Clock, *resources: Resource, inventory: Inventory | None = None) -> Ledger:
    """A ledger that knows the golden node and offers ``resources``."""
    ledger = Ledger(clock=clock)
    ledger.observe(inventory or golden_inventory())
    ledger.offer(resources)
    return ledger


def book(ledger: Ledger, *ids: str) -> Grant:
    """Reserve ids of ``nvidia.com/gpu``."""
    whole = all("::" not in id_ for id_ in ids)
    return ledger.reserve("nvidia.com/gpu", ids, whole_shares(ids) if whole else replica_shares(ids))


def reconcile(ledger: Ledger, *holdings: Holding, complete: bool = True, initial: bool = False, may_release: bool = True) -> list[str]:
    """Verify against kubelet's records; the events of the corrections."""
    corrections = ledger.reconcile(
        KubeletRecords(holdings, complete), interpret, reservation_seconds=60, initial=initial, may_release=may_release
    )
    assert ledger.audit() == []
    return [correction.event for correction in corrections]


def held(*ids: str, owner: Owner = TRAIN, resource: str = "nvidia.com/gpu") -> Holding:
    """One line of kubelet's records."""
    return Holding(resource, ids, owner)


def words(ledger: Ledger, resource: str = "nvidia.com/gpu") -> dict[str, bool]:
    """Id → healthy, as kubelet is told."""
    return {entry.id.id: entry.healthy for entry in ledger.listing(resource)}


def test_asking_twice_with_the_same_ids_gives_the_same_grant(clock: Clock) -> None:
    """kubelet contract V15: a repeated Allocate changes nothing."""
    ledger = make(clock, WHOLE)
    assert book(ledger, U0) == book(ledger, U0)
    assert len(ledger.grants) == 1


def test_a_repeated_allocate_is_waited_for_as_long_as_the_first(clock: Clock) -> None:
    """An admission that failed left the reservation; the next pod that gets the ids has all of reservationSeconds."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    clock.now += 50
    book(ledger, U0)
    clock.now += 50
    assert reconcile(ledger) == []
    clock.now += 20
    assert reconcile(ledger) == ["ledger.released"]


def test_a_device_that_holds_too_much_bars_no_other(clock: Clock) -> None:
    """kubelet's word stands even where a card now has less than was booked; the other card goes on serving."""
    ledger = make(clock, WHOLE)
    book(ledger, U1)
    first, second = golden_inventory().gpus
    ledger.observe(Inventory(gpus=(first, dataclasses.replace(second, memory_mib=1024))))
    assert book(ledger, U0).ids == (U0,)


def test_records_from_before_an_allocate_say_nothing_about_it(clock: Clock) -> None:
    """While they were read the old holder ended and kubelet gave its id away: the grant is not the old holder's."""
    ledger = make(clock, WHOLE)
    reconcile(ledger, held(U0), initial=True)
    newest = ledger.newest
    book(ledger, U0)
    assert ledger.reconcile(KubeletRecords((held(U0),)), interpret, reservation_seconds=60, newest=newest) == []
    assert ledger.grants[0].owner is None
    assert reconcile(ledger, held(U0, owner=SERVE)) == ["ledger.named"]


def test_an_unknown_id_is_refused_and_nothing_changes(clock: Clock) -> None:
    """kubelet contract V8 and nvidia contract A24: the error names the id, the ledger stays as it was."""
    ledger = make(clock, WHOLE)
    before = ledger.revision.value
    with pytest.raises(UnknownDeviceError, match="unknown device: GPU-x"):
        book(ledger, U0, "GPU-x")
    assert ledger.grants == ()
    assert ledger.revision.value == before


def test_an_unhealthy_id_is_refused_with_the_reason(clock: Clock) -> None:
    """nvidia contract §18.12: nothing is granted on an unhealthy device."""
    ledger = make(clock, WHOLE, inventory=golden_inventory(U0=ILL))
    with pytest.raises(UnhealthyDeviceError, match="fallen off the bus"):
        book(ledger, U0)
    assert book(ledger, U1).ids == (U1,)


def test_a_cordoned_device_is_refused_until_it_is_uncordoned(clock: Clock) -> None:
    """A cordon shows in the list and stops new holders only."""
    ledger = make(clock, WHOLE)
    ledger.cordon(U0, "fan rattles")
    assert words(ledger) == {U0: False, U1: True}
    with pytest.raises(UnhealthyDeviceError, match="fan rattles"):
        book(ledger, U0)
    ledger.uncordon(U0)
    assert book(ledger, U0).ids == (U0,)


def test_each_keeper_lifts_his_own_cordon(clock: Clock) -> None:
    """A GPU that was divided is not open as long as no runtime can name it."""
    ledger = make(clock, WHOLE)
    ledger.cordon(U0, "it is being divided", by="division")
    ledger.cordon(U0, "no CDI spec has its name yet", by="cdi")
    ledger.uncordon(U0, by="division")
    with pytest.raises(UnhealthyDeviceError, match="cordoned: no CDI spec"):
        book(ledger, U0)
    assert not ledger.has_settled(U0)
    ledger.uncordon(U0, by="cdi")
    assert book(ledger, U0).ids == (U0,)


def test_an_id_named_twice_is_refused(clock: Clock) -> None:
    """One container cannot hold one id two times."""
    with pytest.raises(CapacityError, match="named twice"):
        book(make(clock, WHOLE), U0, U0)


def test_more_memory_than_a_device_has_is_refused_and_nothing_changes(clock: Clock) -> None:
    """Per device, the memory of all shares stays within its capacity."""
    ledger = make(clock, replicated(4))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, memory_mib=30000)])
    with pytest.raises(CapacityError, match="50000 MiB booked of 40960"):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, memory_mib=20000)])
    assert [grant.ids for grant in ledger.grants] == [(f"{U0}::0",)]


def test_memory_scaling_lets_more_be_booked(clock: Clock) -> None:
    """A scaling of 1.5 turns 40960 MiB into 61440 bookable MiB, and no more."""
    ledger = make(clock, dataclasses.replace(replicated(4), memory_scaling=1.5))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, memory_mib=30000)])
    ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, memory_mib=20000)])
    with pytest.raises(CapacityError, match="of 61440"):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::2"], [Share(U0, memory_mib=20000)])


def test_more_cores_than_a_device_has_are_refused(clock: Clock) -> None:
    """Per device, the cores of all shares stay within 100 percent."""
    ledger = make(clock, replicated(4))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, cores_percent=60)])
    with pytest.raises(CapacityError, match="120 % of the cores"):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, cores_percent=60)])


def test_an_exclusive_holder_stays_alone(clock: Clock) -> None:
    """A share that is exclusive refuses every second holder of its device."""
    ledger = make(clock, replicated(4))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, exclusive=True)])
    with pytest.raises(CapacityError, match="would not be alone"):
        book(ledger, f"{U0}::1")


def test_kubelet_gives_a_held_id_to_somebody_else_and_wins(clock: Clock) -> None:
    """An id changes hands when kubelet allocates it again: the old holder has ended without a word."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::0", f"{U0}::1")
    reconcile(ledger, held(f"{U0}::0", f"{U0}::1"))
    fresh = book(ledger, f"{U0}::1")
    assert {grant.number: grant.ids for grant in ledger.grants} == {1: (f"{U0}::0",), fresh.number: (f"{U0}::1",)}
    assert ledger.audit() == []


def test_a_reservation_gets_its_container_from_kubelets_records(clock: Clock) -> None:
    """reserved → proven once checkpoint and pod-resources agree on the container; that is no drift."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    assert reconcile(ledger, held(U0)) == ["ledger.named"]
    (grant,) = ledger.grants
    assert (grant.state, grant.owner) == (GrantState.PROVEN, TRAIN)
    assert reconcile(ledger, held(U0)) == []


def test_one_source_alone_grants_but_does_not_prove(clock: Clock) -> None:
    """With pod-resources silent, the checkpoint names the UID; the name comes later and nothing is forgotten in between."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0, owner=Owner("main", pod_uid="uid-train")), complete=False)
    assert ledger.grants[0].state is GrantState.GRANTED
    reconcile(ledger, held(U0, owner=Owner("main", namespace="default", pod="train")))
    assert (ledger.grants[0].state, ledger.grants[0].owner) == (GrantState.PROVEN, TRAIN)


def test_at_start_the_ledger_is_rebuilt_from_kubelets_records(clock: Clock) -> None:
    """kubelet contract V10: what kubelet knows is in the book before anything is registered, and is no drift."""
    ledger = make(clock, replicated(4))
    corrections = ledger.reconcile(KubeletRecords((held(f"{U0}::1"),)), interpret, reservation_seconds=60, initial=True)
    assert [(item.event, item.drift) for item in corrections] == [("ledger.adopted", False)]
    assert ledger.grants[0].owner == TRAIN
    assert ledger.free_ids("nvidia.com/gpu") == 7


def test_a_holder_that_the_ledger_did_not_know_is_drift_and_is_corrected(clock: Clock) -> None:
    """kubelet wins: the book takes over what it says and counts the disagreement."""
    ledger = make(clock, WHOLE)
    ledger.reconcile(KubeletRecords(entries=()), interpret, reservation_seconds=60, initial=True)
    (correction,) = ledger.reconcile(KubeletRecords((held(U0),)), interpret, reservation_seconds=60)
    assert (correction.event, correction.drift) == ("ledger.adopted", True)


@pytest.mark.parametrize(
    ("records", "passes"),
    [
        (KubeletRecords(entries=()), 1),
        (KubeletRecords((held(U0),)), 1),
        (KubeletRecords(complete=False, trouble="both are silent"), None),
        (KubeletRecords(), 2),
    ],
    ids=["the checkpoint", "pods are listed", "nobody", "no pods are listed"],
)
def test_the_book_is_rebuilt_once_kubelet_has_told_who_holds_what(clock: Clock, records: KubeletRecords, passes: int | None) -> None:
    """An empty list alone may be that of a kubelet which has just been started; what is adopted until then is no drift."""
    ledger = make(clock, WHOLE)
    for done in range(1, 4):
        ledger.reconcile(records, interpret, reservation_seconds=60)
        assert ledger.rebuilt is (passes is not None and done >= passes)
        assert ledger.in_doubt is not ledger.rebuilt
    (correction,) = ledger.reconcile(KubeletRecords((held(U1),)), interpret, reservation_seconds=60)
    assert correction.drift is (passes is not None)


def test_another_owner_in_kubelets_records_is_drift_and_is_corrected(clock: Clock) -> None:
    """The same ids with a different pod: the book follows kubelet."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    (correction,) = ledger.reconcile(KubeletRecords((held(U0, owner=SERVE),)), interpret, reservation_seconds=60)
    assert (correction.event, correction.drift) == ("ledger.renamed", True)
    assert ledger.grants[0].owner == SERVE


def test_other_ids_in_kubelets_records_replace_the_grant(clock: Clock) -> None:
    """A container that holds one id less than booked is corrected to what kubelet says."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::0", f"{U0}::1")
    assert reconcile(ledger, held(f"{U0}::0")) == ["ledger.adopted"]
    assert {grant.ids for grant in ledger.grants} == {(f"{U0}::0",), (f"{U0}::1",)}


def test_a_pod_that_ended_is_released_after_two_passes(clock: Clock) -> None:
    """One pass without the pod may be kubelet's own gap; the second releases."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    assert reconcile(ledger) == []
    assert reconcile(ledger) == ["ledger.released"]
    assert ledger.grants == ()


def test_a_pod_that_is_back_in_the_second_pass_is_kept(clock: Clock) -> None:
    """Misses count only in a row."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    for _ in range(3):
        reconcile(ledger, held(U0))
        assert reconcile(ledger) == []


def test_an_incomplete_picture_never_takes_away(clock: Clock) -> None:
    """pod-resources silent or kubelet just restarted: grants stay, however often."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    for _ in range(3):
        assert reconcile(ledger, complete=False) == []
        assert reconcile(ledger, may_release=False) == []
    assert len(ledger.grants) == 1


def test_a_reservation_that_kubelet_never_confirms_expires(clock: Clock) -> None:
    """An admission that failed after our answer leaves no ghost."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    clock.now += 59
    assert reconcile(ledger) == []
    clock.now += 2
    assert reconcile(ledger) == ["ledger.released"]


def test_records_of_other_plugins_are_none_of_our_business(clock: Clock) -> None:
    """A holding of another vendor's resource is neither adopted nor drift."""
    assert reconcile(make(clock, WHOLE), held("card-0", resource="amd.com/gpu")) == []


def test_all_ids_of_a_gpu_flip_together(clock: Clock) -> None:
    """kubelet contract V7: 4 replicas, one illness, 4 unhealthy ids."""
    ledger = make(clock, replicated(4))
    ledger.observe(golden_inventory(U1=ILL))
    assert [id_ for id_, healthy in words(ledger).items() if not healthy] == [f"{U1}::{n}" for n in range(4)]
    ledger.observe(golden_inventory())
    assert all(words(ledger).values())


def test_a_lost_gpu_stays_in_the_list_as_unhealthy(clock: Clock) -> None:
    """kubelet contract V16: all ids of GPU 1 stay while U1::0 is held, all Unhealthy."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U1}::0")
    whole = golden_inventory()
    ledger.observe(dataclasses.replace(whole, gpus=whole.gpus[:1]))
    assert [healthy for id_, healthy in words(ledger).items() if id_.startswith(U1)] == [False] * 4


def test_a_held_id_of_a_gpu_that_was_lost_before_the_start_is_listed_as_unhealthy(clock: Clock) -> None:
    """After a restart beside a dead card, kubelet still hears that its holder's id is ill (else pod status says Healthy)."""
    whole = golden_inventory()
    ledger = make(
        clock, Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0, 0),)), inventory=dataclasses.replace(whole, gpus=whole.gpus[:1])
    )
    reconcile(ledger, held(U1), initial=True)
    assert words(ledger) == {U0: True, U1: False}
    assert ledger.foreign_ids == (U1,)


def test_a_whole_gpu_that_is_held_is_not_shared_until_it_is_returned(clock: Clock) -> None:
    """After replicas were configured, a pod from before keeps its card to itself; the other card is shared at once."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    ledger.offer([replicated(4)])
    assert {id_: ok for id_, ok in words(ledger).items() if ok} == {f"{U1}::{n}": True for n in range(4)}
    with pytest.raises(UnhealthyDeviceError, match="earlier settings"):
        book(ledger, f"{U0}::0")
    reconcile(ledger)
    reconcile(ledger)
    assert all(words(ledger).values())


def test_a_gpu_that_is_still_shared_is_not_given_as_a_whole(clock: Clock) -> None:
    """The other direction: replicas were switched off while one is held."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::2")
    ledger.offer([WHOLE])
    assert words(ledger) == {U0: False, U1: True}


def test_a_gpu_serves_one_family_at_a_time(clock: Clock) -> None:
    """While one family holds a share, the other family's ids on that GPU are unhealthy; they return with the last share."""
    ledger = make(clock, replicated(2), replicated(2, name="volcano.sh/vgpu-number", family="volcano-vgpu", prefix="v-"))
    grant = book(ledger, f"{U0}::0")
    assert [ok for id_, ok in words(ledger, "volcano.sh/vgpu-number").items() if U0 in id_] == [False, False]
    with pytest.raises(UnhealthyDeviceError, match="serves nvidia until its last share is returned"):
        ledger.reserve("volcano.sh/vgpu-number", [f"v-{U0}::0"], [Share(U0)])
    ledger.release(grant.number)
    assert all(words(ledger, "volcano.sh/vgpu-number").values())


def test_one_id_in_two_resources_is_refused(clock: Clock) -> None:
    """kubelet contract V17: no id string occurs in both lists."""
    with pytest.raises(ValueError, match=r"offered by nvidia.com/gpu and by nvidia.com/gpu-memory"):
        make(clock, replicated(2), replicated(2, name="nvidia.com/gpu-memory"))


def test_a_resource_that_is_not_offered_names_what_is(clock: Clock) -> None:
    """The error for a wrong resource tells the right ones."""
    with pytest.raises(UnknownDeviceError, match=r"it offers nvidia\.com/gpu"):
        make(clock, WHOLE).listing("nvidia.com/gpus")


def test_observing_the_same_again_wakes_nobody(clock: Clock) -> None:
    """Streams are woken by changes only: each message makes kubelet write its checkpoint."""
    ledger = make(clock, WHOLE)
    before = ledger.revision.value
    ledger.observe(golden_inventory())
    ledger.offer([WHOLE])
    assert ledger.revision.value == before


def test_releasing_what_is_not_there_is_nothing(clock: Clock) -> None:
    """A grant may have gone by itself."""
    assert make(clock, WHOLE).release(17) is None
