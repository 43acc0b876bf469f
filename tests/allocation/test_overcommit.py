"""Volcano's scheduler forgets a second container of a pod on the same GPU and overbooks compute
and slots, never memory.

Such a pod would wait for ever, for its scheduler counts it as placed. So it starts as long as
memory holds, and reported on all pages.
"""

from __future__ import annotations

import pytest

from tests.allocation.later_parts import confirm, running
from tests.allocation.volcano_place import SLOTS, VolcanoPlace, scheduled, unscheduled
from tests.golden import U0, U1
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError
from vgpu_agent.ledger.accounting import Overcommit
from vgpu_agent.model import Share

UNITS = 40
NUMBER = "volcano.sh/vgpu-number"


def left(place: VolcanoPlace, gpu: str = U0) -> tuple[int, int, int]:
    """MiB, percent and slots that the book has left of ``gpu``."""
    room = next(room for room in place.ledger.rooms(NUMBER) if room.device == gpu)
    return room.memory_free_mib, room.cores_free_percent, room.holders_free


async def test_a_pod_of_two_containers_on_one_gpu_is_served_beyond_its_compute() -> None:
    """``111 % of the cores booked of 100``, for ever:
    the scheduler counted only one of the containers of each pod.
    """
    place = VolcanoPlace()
    first, second = scheduled("first", (U0, 4, 37), (U0, 4, 37)), scheduled("second", (U0, 4, 37))
    await place.started(first)
    await place.started(second)
    assert place.refusals.current == ()
    assert place.ledger.audit() == []
    assert left(place) == ((UNITS - 12) * 1024, 0, 1)
    assert place.ledger.overcommitted == (Overcommit(NUMBER, U0, 111, 100, 3, SLOTS),)


async def test_more_containers_than_slots_are_served() -> None:
    """The same for slots: six containers of three pods, and the scheduler counted three."""
    place = VolcanoPlace()
    pods = [scheduled(f"p{number}", (U0, 2, 0), (U0, 2, 0)) for number in range(3)]
    for pod in pods:
        await place.started(pod)
    assert place.ledger.overcommitted == (Overcommit(NUMBER, U0, 0, 100, 6, SLOTS),)
    assert left(place) == ((UNITS - 12) * 1024, 100, 0)
    assert place.ledger.audit() == []


async def test_memory_is_never_overbooked_whoever_decided() -> None:
    """Compute is shared in turns; memory that is not there fails the neighbour's allocation."""
    place = VolcanoPlace()
    await place.started(scheduled("first", (U0, 30, 90)))
    with pytest.raises(
        CapacityError,
        match=(
            r"has no room: 30720 MiB booked \+ 11264 wanted, of 40960; "
            r".*binding\.refusedEvictSeconds"
        ),
    ):
        await place.started(scheduled("second", (U0, 11, 90)))
    assert place.ledger.overcommitted == ()
    (refusal,) = place.refusals.current
    assert refusal.pod.name == "second"


async def test_the_agents_own_placement_never_overcommits() -> None:
    """A pod that no GPU scheduler has placed gets what is left,
    and of an overcommitted GPU nothing is.
    """
    place = VolcanoPlace()
    await place.started(scheduled("first", (U0, 4, 60)))
    await place.started(scheduled("second", (U0, 4, 60)))
    await place.started(unscheduled("third", (4, 0)))
    (third,) = (
        grant for grant in place.ledger.grants if grant.owner and grant.owner.pod == "third"
    )
    assert [share.device for share in third.shares] == [U1]
    await place.started(unscheduled("fourth", (4, 100 - 40)))
    with pytest.raises(CapacityError, match="cannot be placed on this node"):
        await place.started(unscheduled("fifth", (4, 60)))


async def test_what_was_overcommitted_is_free_again_exactly_when_its_holders_have_gone() -> None:
    """The rest is never negative and never too much: 120 percent less 60 leave 40."""
    place = VolcanoPlace()
    first, second = scheduled("first", (U0, 4, 60)), scheduled("second", (U0, 4, 60))
    await place.started(first)
    await place.started(second)
    place.ended(first)
    confirm(place, times=2)
    assert left(place) == ((UNITS - 4) * 1024, 40, SLOTS - 1)
    assert place.ledger.overcommitted == ()
    place.ended(second)
    confirm(place, times=2)
    assert left(place) == (UNITS * 1024, 100, SLOTS)


@pytest.mark.parametrize("late", [True, False])
async def test_a_restarted_agent_keeps_what_was_overcommitted(*, late: bool) -> None:
    """By the records of the grants, or by the pods:
    nothing is called unsound, dropped or refused, and containers start again.
    """
    place = VolcanoPlace(late=late)
    pods = [scheduled(f"p{number}", (U0, 4, 60)) for number in range(2)]
    for pod in pods:
        await place.started(pod)
        place.book.put(running(pod))
    after = VolcanoPlace(late=late, before=place)
    confirm(after, initial=True)
    assert after.ledger.audit() == []
    assert after.ledger.overcommitted == (Overcommit(NUMBER, U0, 120, 100, 2, SLOTS),)
    for pod in pods:
        await after.start(after.ids[pod.kubelet_uid, "c0"])
    assert after.refusals.current == ()


async def test_a_container_that_starts_again_is_not_refused_for_its_neighbours() -> None:
    """The agent placed it where there was room.
    A scheduler overcommitted the GPU since, and the agent was restarted.
    """
    place = VolcanoPlace()
    placed, other = unscheduled("placed", (4, 60)), scheduled("other", (U0, 4, 60))
    await place.started(placed)
    await place.started(other)
    after = VolcanoPlace(before=place)
    confirm(after, initial=True)
    await after.start(after.ids["uid-placed", "c0"])
    assert after.refusals.current == ()
    assert after.ledger.audit() == []


async def test_the_operator_can_refuse_instead() -> None:
    """`binding.schedulerOvercommit: refuse` is the strict rule,
    and the refusal names the setting.
    """
    place = VolcanoPlace(binding=Binding(scheduler_overcommit="refuse"))
    await place.started(scheduled("first", (U0, 4, 60)))
    with pytest.raises(
        CapacityError,
        match=r"60 % of the compute booked \+ 60 wanted, of 100; .*binding\.schedulerOvercommit",
    ):
        await place.started(scheduled("second", (U0, 4, 60)))


async def test_who_was_served_beyond_the_card_keeps_it_when_the_operator_changes_his_mind() -> None:
    """The setting is about new pods. What runs would otherwise fail at its next crash."""
    place = VolcanoPlace()
    for name in ("first", "second"):
        await place.started(scheduled(name, (U0, 4, 60)))
    after = VolcanoPlace(before=place, binding=Binding(scheduler_overcommit="refuse"))
    confirm(after, initial=True)
    await after.start(after.ids["uid-second", "c0"])
    assert after.refusals.current == ()


async def test_nothing_else_is_overlooked_for_a_scheduler() -> None:
    """An ill or cordoned GPU is refused although a scheduler decided for it."""
    place = VolcanoPlace()
    await place.started(scheduled("first", (U0, 4, 60)))
    place.ledger.cordon(U0, "for repair")
    with pytest.raises(UnhealthyDeviceError, match="for repair"):
        await place.started(scheduled("second", (U0, 4, 60)))


async def test_the_pod_is_told_once_what_it_shares() -> None:
    """An event on the pod whose start went beyond the card, a line in the journal, a count;
    not again when it starts again.
    """
    place = VolcanoPlace()
    await place.started(scheduled("first", (U0, 4, 60)))
    assert place.events("start.overcommitted") == []
    second = scheduled("second", (U0, 4, 60))
    await place.started(second)
    await place.start(place.ids["uid-second", "c0"])
    (told,) = place.events("start.overcommitted")
    assert told["pod"] == "team/second"
    ((pod, container, reason, text),) = place.notices.take()
    assert (pod.name, container, reason) == ("second", "c0", "VgpuOvercommitted")
    assert text == (
        f"container c0 was started although its scheduler has given out more of GPU {U0} than it "
        "has: 120 % of the compute of 100, 2 containers of 4. Memory is not overcommitted. See "
        "binding.schedulerOvercommit"
    )
    assert place.overcommits.total == 1


async def test_each_container_keeps_its_own_limit() -> None:
    """The library receives each container's request, whatever else is booked of the card."""
    place = VolcanoPlace()
    for name in ("first", "second"):
        await place.started(scheduled(name, (U0, 4, 60)))
    assert [grant.shares for grant in place.ledger.grants] == [(Share(U0, 4096, 60),)] * 2
    assert [
        provision.edits.environment["CORES_0"] for _, provision in place.carrier.specs.values()
    ] == ["60", "60"]
