"""The limits of an offer over changes of settings:
what was granted under wider ones is still sound.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds
from vgpu_agent.ledger.offers import Offers, alike
from vgpu_agent.model import Decider, Resource

NAME = "example.com/number"
WIDE = Resource(
    NAME,
    "number",
    (DeviceId("a", "GPU-1"),),
    holders_per_device=10,
    memory_scaling=2.0,
    cores_scaling=1.0,
    decided_by=Decider.POD,
)
NARROW = msgspec.structs.replace(WIDE, holders_per_device=1, memory_scaling=1.0, cores_scaling=1.5)


def after(*changes: Resource, held: tuple[str, ...] = (NAME,)) -> Offers:
    """Offers that changed in this order while pods held the resources ``held``."""
    offers = Offers()
    for resource in changes:
        offers.replace([resource], held)
    return offers


def test_each_limit_is_the_widest_that_somebodys_grant_may_come_from() -> None:
    """Fewer places and less memory, but more compute:
    none of the three takes a grant's soundness away.
    """
    widest = after(WIDE, NARROW).at_its_widest(NARROW)
    assert (widest.holders_per_device, widest.memory_scaling, widest.cores_scaling) == (
        10,
        2.0,
        1.5,
    )


def test_what_is_offered_is_not_widened() -> None:
    """New grants follow today's settings."""
    assert after(WIDE, NARROW).by_name == {NAME: NARROW}


def test_the_widest_of_several_changes_counts_also_after_the_same_offer_again() -> None:
    """A node that is set to 10, 1 and 5 places: the first holders still have them."""
    between = msgspec.structs.replace(WIDE, holders_per_device=5)
    assert after(WIDE, NARROW, between, between).at_its_widest(between).holders_per_device == 10


def test_once_nobody_holds_anything_the_next_change_forgets() -> None:
    """No grant of before is left that the wider limits could excuse."""
    offers = after(WIDE, NARROW)
    between = msgspec.structs.replace(NARROW, holders_per_device=2)
    offers.replace([between])
    assert offers.at_its_widest(between) == between


def test_nothing_is_remembered_of_what_nobody_held() -> None:
    """The change came before the first grant."""
    assert after(WIDE, NARROW, held=()).at_its_widest(NARROW) == NARROW


def test_ids_that_name_their_device_have_no_wider_limits() -> None:
    """Their number is the limit, and an id that is not offered any more is reported as foreign."""
    wide, narrow = (
        msgspec.structs.replace(each, decided_by=Decider.IDS) for each in (WIDE, NARROW)
    )
    assert after(wide, narrow).at_its_widest(narrow) == narrow


def test_one_name_is_offered_once() -> None:
    """Two families by one name: the second would silently take the place of the first."""
    twin = msgspec.structs.replace(WIDE, family="other", ids=(DeviceId("b", "GPU-1"),))
    with pytest.raises(ValueError, match=r"example.com/number is offered by number and by other"):
        Offers().replace([WIDE, twin])


@pytest.mark.parametrize(
    "ids",
    [(DeviceId("a", "GPU-1"),), NumberedIds((IdBlock("", 1, "GPU-1"),))],
    ids=["listed", "numbered"],
)
def test_an_id_is_offered_once_within_a_family(ids: Sequence[DeviceId]) -> None:
    """kubelet V17: it would mix the health of the two up."""
    first = msgspec.structs.replace(WIDE, ids=ids)
    with pytest.raises(
        ValueError,
        match=r"device id (a|0) is offered by example.com/number and by example.com/memory",
    ):
        Offers().replace([first, msgspec.structs.replace(first, name="example.com/memory")])


def test_families_may_have_ids_alike() -> None:
    """Their plugins never ran on one node. The kubelet always says which resource an id is of."""
    other = msgspec.structs.replace(
        WIDE, name="example.org/gpu", family="other", ids=(DeviceId("a", "GPU-2"),)
    )
    numbered = msgspec.structs.replace(
        WIDE, name="example.net/gpu", family="third", ids=NumberedIds((IdBlock("a", 2, "GPU-3"),))
    )
    plain = msgspec.structs.replace(
        WIDE, name="example.edu/gpu", family="fourth", ids=(DeviceId("a1", "GPU-4"),)
    )
    offers = after()
    offers.replace([WIDE, other, numbered, plain])
    assert [offers.device(name, "a") for name in (NAME, "example.org/gpu", "example.net/gpu")] == [
        "GPU-1",
        "GPU-2",
        None,
    ]
    assert [offers.device(name, "a1") for name in ("example.net/gpu", "example.edu/gpu")] == [
        "GPU-3",
        "GPU-4",
    ]
    assert [(one.name, two.name, id_) for one, two, id_ in alike(offers.by_name.values())] == [
        (NAME, "example.org/gpu", "a"),
        ("example.net/gpu", "example.edu/gpu", "a1"),
    ]


def test_a_resource_offers_an_id_once() -> None:
    """Such a list would be nonsense to kubelet."""
    with pytest.raises(ValueError, match=r"example.com/number offers a device id twice"):
        Offers().replace([msgspec.structs.replace(WIDE, ids=(*WIDE.ids, *WIDE.ids))])


def test_lists_that_are_only_counted_may_have_ids_alike() -> None:
    """vgpu-manager §2.2: compute and memory of one card have the same texts. Nobody holds anything
    through them, so no health can be mixed up.
    """
    counted = msgspec.structs.replace(
        WIDE, ids=NumberedIds((IdBlock("", 2, "GPU-1"),)), decided_by=Decider.NOBODY
    )
    more = msgspec.structs.replace(counted, name="example.com/memory")
    Offers().replace(
        [WIDE, counted := msgspec.structs.replace(counted, name="example.com/cores"), more]
    )
    with pytest.raises(ValueError, match=r"device id 0 is offered by"):
        Offers().replace([counted, msgspec.structs.replace(more, decided_by=Decider.POD)])
