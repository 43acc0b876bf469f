"""Starts refused for reasons besides the proof, their entries in the journal,
and containers that may start unasked.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, MEMORY, NUMBER, NumberFamily, Place, a_pod, wants
from tests.golden import U0
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import AgentError, HostFileError, RequestRefusedError
from vgpu_agent.families.family import Ownership
from vgpu_agent.model import Decider, Inventory, Resource
from vgpu_agent.pods import PodContainer

EARLY, LATE = (
    BindingMode(late=late, by_annotation=False, reason="a test") for late in (False, True)
)
LETTER, COUNTED = "example.com/letter", "example.com/letters-counted"


class LetterFamily(NumberFamily):
    """A second family whose pods decide, with ids of its own."""

    name = "letter"

    def owns(self, resource: str) -> Ownership:
        return Ownership.CERTAIN if resource in {LETTER, COUNTED} else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        letter = Resource(LETTER, self.name, (DeviceId("a", U0),), decided_by=Decider.POD)
        return letter, Resource(
            COUNTED, self.name, (DeviceId("counted-a", U0),), decided_by=Decider.NOBODY
        )


async def asking_for(**limits: int) -> Place:
    """A node with both families, and a container with these limits that has one number."""
    place = Place()
    place.allocator.use_families(Families(pod_families=(NumberFamily(), LetterFamily())))
    place.allocator.refresh_offer()
    named = {f"example.com/{name.replace('_', '-')}": count for name, count in limits.items()}
    pod = a_pod("train", PodContainer("main", limits=named), annotations=wants(main=f"{U0} 100"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    return place


async def test_a_container_that_asks_two_families_is_refused() -> None:
    """Each would tell it of other GPUs, and one would win by chance.
    The text names both resources and the remedy.
    """
    place = await asking_for(number=1, letter=1)
    with pytest.raises(
        RequestRefusedError,
        match=(
            f"default/train, container main: .* {NUMBER} and for {LETTER}, .* ask for one of them"
        ),
    ):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


async def test_a_container_of_a_pod_of_which_not_all_was_read_is_refused() -> None:
    """A limit that was left out would count as no limit."""
    place = await asking_for(number=1)
    (pod,) = place.book.pods
    place.book.put(msgspec.structs.replace(pod, has_more_requests=True))
    with pytest.raises(RequestRefusedError, match="names more GPU resources"):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


@pytest.mark.parametrize(
    "limits",
    [{"number": 1, "memory": 5}, {"number": 1, "letters_counted": 1}, {"number": 1, "letter": 0}],
)
async def test_what_is_only_counted_or_not_asked_for_is_no_second_family(
    limits: dict[str, int],
) -> None:
    """Its own memory, another family's counted ids,
    and a limit of zero tell a container of no GPU.
    """
    place = await asking_for(**limits)
    await place.start(IDS[:1])
    assert len(place.carrier.specs) == 1


async def refused(place: Place, times: int = 1) -> None:
    """The kubelet asks again and again."""
    for _ in range(times):
        with pytest.raises(AgentError):
            await place.start(IDS[:1])


async def test_the_journal_tells_once_why_a_start_is_refused() -> None:
    """The kubelet asks every quarter of a minute.
    A new reason is a new line, and each refusal still counts.
    """
    place = Place()
    pod = a_pod("train")
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    await refused(place, times=3)
    place.book.put(msgspec.structs.replace(pod, annotations=wants(main=f"{U0} 50000")))
    await refused(place, times=2)
    first, second = (str(fact["reason"]) for fact in place.events("start.refused"))
    assert "no annotation" in first
    assert "0 MiB booked + 50000 wanted, of 40960" in second
    assert [refusal.count for refusal in place.refusals.current] == [5]


async def test_a_start_in_between_makes_the_same_reason_news() -> None:
    """The disk is full again a week later."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 100"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.carrier.trouble = "the disk is full"
    await refused(place, times=2)
    place.carrier.trouble = ""
    await place.start(IDS[:1])
    place.carrier.trouble = "the disk is full"
    await refused(place, times=2)
    assert [fact["reason"] for fact in place.events("start.refused")] == ["the disk is full"] * 2


async def test_the_journal_tells_once_what_cannot_be_proven() -> None:
    """The pod of this start is unknown, so the line has the token alone.
    Each call counts as an ambiguity.
    """
    place = Place()
    pods = [a_pod(name, annotations=wants(main=f"{U0} 100")) for name in ("train", "serve")]
    place.book.replace(pods)
    for pod in pods:
        await place.admit(pod, "main", IDS[:1])
    for _ in range(3):
        with pytest.raises(NotProvenError):
            await place.start(IDS[:1])
    assert len(place.events("start.not_proven")) == 1
    assert place.allocator.late_start.ambiguities == 3


async def test_a_full_disk_is_refused_in_the_carriers_words() -> None:
    """The path and the remedy reach the pod's status, under the name of the pod."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 100"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.carrier.trouble = "cannot write /var/run/cdi/x.json: No space left on device; free some"
    with pytest.raises(
        HostFileError,
        match=r"^default/train, container main: cannot write /var/run/cdi/x\.json: No space left",
    ):
        await place.start(IDS[:1])


@pytest.mark.parametrize(
    ("mode", "number"),
    [(LATE, True), (EARLY, False), (None, False)],
    ids=["late", "early", "not chosen yet"],
)
async def test_only_a_cdi_name_lets_a_container_start_unasked(
    mode: BindingMode | None, *, number: bool
) -> None:
    """A name is its own container's or undefined.
    An early answer may be another pod's, and counted ids say nothing at all.
    """
    place = Place()
    place.allocator.use_mode(mode)
    assert place.allocator.may_start_unasked(NUMBER) is number
    assert place.allocator.may_start_unasked(MEMORY)
    assert place.allocator.may_start_unasked("example.com/not-offered-any-more")
    # a container of the version before could choose what such a spec mounts
    place.carrier.has_outdated_spec = True
    assert not place.allocator.may_start_unasked(NUMBER)
