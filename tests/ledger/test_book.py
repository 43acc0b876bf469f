"""The ledger's promises about what is booked, one by one;
their conjunction under any history is in test_invariants.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import (
    ILL,
    WHOLE,
    Clock,
    book,
    held,
    make,
    reconcile,
    replicated,
    words,
)
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.model import Inventory, Share


def test_asking_twice_with_the_same_ids_gives_the_same_grant(clock: Clock) -> None:
    """kubelet V15: a repeated Allocate changes nothing."""
    ledger = make(clock, WHOLE)
    assert book(ledger, U0) == book(ledger, U0)
    assert len(ledger.grants) == 1


def test_a_repeated_allocate_is_waited_for_as_long_as_the_first(clock: Clock) -> None:
    """An admission that failed left the reservation.
    The next pod that gets the ids has all of the time for it.
    """
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    clock.now += 50
    book(ledger, U0)
    clock.now += 50
    assert reconcile(ledger) == []
    clock.now += 20
    assert reconcile(ledger) == ["ledger.released"]


def test_a_device_that_holds_too_much_bars_no_other(clock: Clock) -> None:
    """The kubelet's record counts even where a card now has less than was booked.
    The other card goes on serving.
    """
    ledger = make(clock, WHOLE)
    book(ledger, U1)
    first, second = golden_inventory().gpus
    ledger.observe(Inventory(gpus=(first, msgspec.structs.replace(second, memory_mib=1024))))
    assert book(ledger, U0).ids == (U0,)


def test_an_unknown_id_is_refused_and_nothing_changes(clock: Clock) -> None:
    """kubelet V8 and nvidia A24: the error names the id, the ledger stays as it was."""
    ledger = make(clock, WHOLE)
    before = ledger.revision.value
    with pytest.raises(UnknownDeviceError, match="unknown device: GPU-x"):
        book(ledger, U0, "GPU-x")
    assert ledger.grants == ()
    assert ledger.revision.value == before


def test_an_unhealthy_id_is_refused_with_the_reason(clock: Clock) -> None:
    """nvidia D12: nothing is granted on an unhealthy device."""
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
    with pytest.raises(
        CapacityError, match=rf"^{U0}::1 has no room: 30000 MiB booked \+ 20000 wanted, of 40960$"
    ):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, memory_mib=20000)])
    assert [grant.ids for grant in ledger.grants] == [(f"{U0}::0",)]


def test_memory_scaling_lets_more_be_booked(clock: Clock) -> None:
    """A scaling of 1.5 turns 40960 MiB into 61440 bookable MiB, and no more."""
    ledger = make(clock, msgspec.structs.replace(replicated(4), memory_scaling=1.5))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, memory_mib=30000)])
    ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, memory_mib=20000)])
    with pytest.raises(CapacityError, match=r"50000 MiB booked \+ 20000 wanted, of 61440"):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::2"], [Share(U0, memory_mib=20000)])


def test_more_cores_than_a_device_has_are_refused(clock: Clock) -> None:
    """Per device, the cores of all shares stay within 100 percent."""
    ledger = make(clock, replicated(4))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, cores_percent=60)])
    with pytest.raises(CapacityError, match=r"60 % of the compute booked \+ 60 wanted, of 100"):
        ledger.reserve("nvidia.com/gpu", [f"{U0}::1"], [Share(U0, cores_percent=60)])


def test_an_exclusive_holder_stays_alone(clock: Clock) -> None:
    """A share that is exclusive refuses every second holder of its device."""
    ledger = make(clock, replicated(4))
    ledger.reserve("nvidia.com/gpu", [f"{U0}::0"], [Share(U0, exclusive=True)])
    with pytest.raises(CapacityError, match=rf"^{U0}::1 has no room: a container holds all of it$"):
        book(ledger, f"{U0}::1")


def test_kubelet_gives_a_held_id_to_somebody_else_and_wins(clock: Clock) -> None:
    """An id changes hands when kubelet allocates it again:
    the old holder has ended without a word.
    """
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::0", f"{U0}::1")
    reconcile(ledger, held(f"{U0}::0", f"{U0}::1"))
    fresh = book(ledger, f"{U0}::1")
    assert {grant.number: grant.ids for grant in ledger.grants} == {
        1: (f"{U0}::0",),
        fresh.number: (f"{U0}::1",),
    }
    assert ledger.audit() == []


def test_one_id_in_two_resources_is_refused(clock: Clock) -> None:
    """kubelet V17: no id string occurs in both lists."""
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
