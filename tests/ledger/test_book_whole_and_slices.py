"""A GPU and its slices in the book: never both are given out, each slice is a device of its own,
and devices may differ in replicas.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import SLICES, U0, U1, golden_inventory, golden_slices, with_slices
from tests.ledger.book_parts import TRAIN, WHOLE, Clock, make, replicated, whole_shares, words
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Holding, KubeletRecords, Resource, Share

M0, M1 = SLICES[:2]
MIG = Resource("nvidia.com/mig-1g.5gb", "nvidia", tuple(DeviceId(uuid, uuid, 1) for uuid in SLICES))
GPU_0 = Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0, 0),))
IN_MIG_MODE = with_slices(golden_inventory(), U1=golden_slices())


def slice_share(uuid: str) -> Share:
    """All of a slice."""
    return Share(uuid, 4864, 100, exclusive=True)


def divided(clock: Clock) -> Ledger:
    """GPU 0 whole, GPU 1 in seven slices."""
    return make(clock, GPU_0, MIG, inventory=IN_MIG_MODE)


def test_slices_of_a_gpu_that_somebody_has_whole_wait_for_it(clock: Clock) -> None:
    """nvidia:D9: a container that got the GPU before it was divided keeps it.
    Its slices are Unhealthy until that ends.
    """
    ledger = make(clock, WHOLE)
    grant = ledger.reserve(WHOLE.name, [U1], whole_shares([U1]))
    ledger.observe(IN_MIG_MODE)
    ledger.offer([GPU_0, MIG])
    assert not any(words(ledger, MIG.name).values())
    with pytest.raises(UnhealthyDeviceError, match=f"still holds the whole GPU .{U1}"):
        ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    ledger.release(grant.number)
    assert all(words(ledger, MIG.name).values())


def test_a_gpu_of_which_somebody_has_a_slice_is_not_given_whole(clock: Clock) -> None:
    """The other way round, also while the slice is gone already: its container has not ended."""
    ledger = divided(clock)
    grant = ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    for inventory in (IN_MIG_MODE, golden_inventory()):
        ledger.observe(inventory)
        ledger.offer([WHOLE])
        assert words(ledger, WHOLE.name) == {U0: True, U1: False}
        with pytest.raises(UnhealthyDeviceError, match=f"still holds the MIG instance {M0}"):
            ledger.reserve(WHOLE.name, [U1], whole_shares([U1]))
    ledger.release(grant.number)
    ledger.observe(golden_inventory())
    assert words(ledger, WHOLE.name) == {U0: True, U1: True}


@pytest.mark.parametrize("remembers", [True, False])
def test_a_restart_does_not_forget_whose_part_a_held_slice_was(
    clock: Clock, *, remembers: bool
) -> None:
    """nvidia:D9: kubelet's records name the slice only; of which GPU it was cut is what the agent
    remembers. Lost, it holds up nothing.
    """
    ledger = Ledger(clock=clock)
    ledger.mig_instances.update(divided(clock).mig_instances if remembers else {})
    records = KubeletRecords((Holding(MIG.name, (M0,), TRAIN),))

    ledger.observe(golden_inventory())
    ledger.offer([WHOLE])
    ledger.reconcile(
        records,
        lambda _: InterpretedHolding("nvidia", (Share(M0),)),
        reservation_seconds=60,
        initial=True,
    )

    assert words(ledger, WHOLE.name) == {U0: True, U1: not remembers}
    assert ledger.audit() == []
    ledger.observe(golden_inventory())
    assert words(ledger, WHOLE.name) == {U0: True, U1: not remembers}


def test_a_slice_that_a_pod_is_found_to_hold_late_is_known_by_its_gpu(clock: Clock) -> None:
    """Cut away between Allocate's answer in a former life and the first complete records:
    there was an inventory in between.
    """
    ledger = divided(clock)
    ledger.observe(golden_inventory())
    ledger.offer([WHOLE])
    records = KubeletRecords((Holding(MIG.name, (M0,), TRAIN),))
    ledger.reconcile(
        records,
        lambda _: InterpretedHolding("nvidia", (Share(M0, 4864),)),
        reservation_seconds=60,
        initial=True,
    )
    assert words(ledger, WHOLE.name) == {U0: True, U1: False}


def test_only_so_many_slices_are_remembered(clock: Clock) -> None:
    """A node that is divided anew all the time: the oldest go, but none that is there or held."""
    ledger = divided(clock)
    ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    for number in range(150):
        ledger.observe(with_slices(golden_inventory(), U1=golden_slices(letter=f"{number:03}")))
    assert len(ledger.mig_instances) == 1000
    assert M0 in ledger.mig_instances
    assert M1 not in ledger.mig_instances
    assert list(ledger.mig_instances)[-7:] == [each.uuid for each in golden_slices(letter="149")]


def test_slices_of_one_gpu_have_holders_of_their_own(clock: Clock) -> None:
    """Each is exclusive, and none is company for another."""
    ledger = divided(clock)
    ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    ledger.reserve(MIG.name, [M1], [slice_share(M1)])
    assert ledger.audit() == []
    assert ledger.free_ids(MIG.name) == 5


def test_the_memory_of_a_slice_is_its_own(clock: Clock) -> None:
    """Not that of the GPU around it."""
    ledger = divided(clock)
    assert {room.memory_mib for room in ledger.rooms(MIG.name)} == {4864}
    with pytest.raises(CapacityError, match=r"0 MiB booked \+ 4865 wanted, of 4864"):
        ledger.reserve(MIG.name, [M0], [Share(M0, 4865)])


def test_another_family_sees_the_gpu_busy_while_a_slice_is_held_and_gets_it_back(
    clock: Clock,
) -> None:
    """A GPU serves one family at a time, in parts as well as whole."""
    ledger = divided(clock)
    other = replicated(2, name="volcano.sh/vgpu-number", family="volcano-vgpu", prefix="v-")
    ledger.offer([GPU_0, MIG, other])
    grant = ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    assert words(ledger, other.name) == {f"v-{U0}::{n}": True for n in range(2)} | {
        f"v-{U1}::{n}": False for n in range(2)
    }
    ledger.release(grant.number)
    assert all(words(ledger, other.name).values())


def test_slices_wait_while_another_family_has_their_gpu(clock: Clock) -> None:
    """The other family gave it away before it was divided."""
    ledger = divided(clock)
    other = replicated(2, name="volcano.sh/vgpu-number", family="volcano-vgpu", prefix="v-")
    ledger.offer([GPU_0, MIG, other])
    ledger.reserve(other.name, [f"v-{U1}::0"], [Share(U1)])
    assert not any(words(ledger, MIG.name).values())


def test_a_slice_that_vanished_is_listed_while_it_is_held_and_released_with_its_pod(
    clock: Clock,
) -> None:
    """nvidia:D9: other slices are offered in its place at once.
    The old id stays, Unhealthy, until kubelet's records forget it.
    """
    ledger = divided(clock)
    ledger.reserve(MIG.name, [M0], [slice_share(M0)])
    records = KubeletRecords((Holding(MIG.name, (M0,), TRAIN),))

    def pass_over(held: KubeletRecords) -> None:
        ledger.reconcile(
            held, lambda _: InterpretedHolding("nvidia", (slice_share(M0),)), reservation_seconds=60
        )

    pass_over(records)
    fresh = golden_slices(count=2, letter="d")
    ledger.observe(with_slices(golden_inventory(), U1=fresh))
    ledger.offer(
        [
            GPU_0,
            msgspec.structs.replace(
                MIG, ids=tuple(DeviceId(each.uuid, each.uuid, 1) for each in fresh)
            ),
        ]
    )
    assert words(ledger, MIG.name) == {fresh[0].uuid: True, fresh[1].uuid: True, M0: False}
    pass_over(records)
    assert ledger.foreign_ids == (M0,)
    pass_over(KubeletRecords())
    pass_over(KubeletRecords())
    assert words(ledger, MIG.name) == {fresh[0].uuid: True, fresh[1].uuid: True}


def test_devices_of_one_resource_may_differ_in_replicas(clock: Clock) -> None:
    """nvidia:D15: GPU 0 three times, GPU 1 whole, under one name."""
    ids = (*(DeviceId(f"{U0}::{n}", U0, 0) for n in range(3)), DeviceId(U1, U1, 1))
    ledger = make(
        clock,
        Resource("nvidia.com/gpu", "nvidia", ids, holders_per_device=3, holders={U0: 3, U1: 1}),
    )
    assert [(room.device, room.holders_free) for room in ledger.rooms("nvidia.com/gpu")] == [
        (U0, 3),
        (U1, 1),
    ]
    for number in range(3):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::{number}"], [Share(U0)])
    ledger.reserve("nvidia.com/gpu", [U1], whole_shares([U1]))
    assert ledger.audit() == []


def test_a_gpu_that_is_given_whole_now_waits_for_replicas_of_before(clock: Clock) -> None:
    """Another GPU of the same resource still has replicas, this one has none any more."""
    ledger = make(clock, replicated(3))
    ledger.reserve("nvidia.com/gpu", [f"{U1}::0"], [Share(U1)])
    ids = (*(DeviceId(f"{U0}::{n}", U0, 0) for n in range(3)), DeviceId(U1, U1, 1))
    ledger.offer(
        [Resource("nvidia.com/gpu", "nvidia", ids, holders_per_device=3, holders={U0: 3, U1: 1})]
    )
    with pytest.raises(UnhealthyDeviceError, match="earlier settings"):
        ledger.reserve("nvidia.com/gpu", [U1], whole_shares([U1]))


def test_a_whole_gpu_beside_its_slices_is_unsound(clock: Clock) -> None:
    """The kubelet's record is followed even then, and the audit says so."""
    ledger = divided(clock)

    def meaning(holding: Holding) -> InterpretedHolding:
        whole = holding.ids[0].startswith("GPU-")
        return InterpretedHolding(
            "nvidia",
            tuple(whole_shares(holding.ids)) if whole else tuple(map(slice_share, holding.ids)),
        )

    held = (
        Holding("nvidia.com/gpu", (U1,), TRAIN),
        Holding(MIG.name, (M0,), msgspec.structs.replace(TRAIN, pod="other", pod_uid="uid-other")),
    )
    ledger.reconcile(KubeletRecords(held), meaning, reservation_seconds=60, initial=True)
    assert ledger.audit() == [f"{U1} has an exclusive holder and 1 more"]
