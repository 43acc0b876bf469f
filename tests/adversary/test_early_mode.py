"""Attacks on early binding, where Allocate has to guess its pod: pods that the kubelet never asks
for, bound before a stranger's.

kubelet admits pods one after the other. A pod that it turns away before it comes to devices (a
forbidden sysctl, more than there is) makes no call, and its status says so a little later; an
imitation of a mirror pod it does not even look at.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, MEMORY, NUMBER, Place, a_pod, wants
from tests.golden import U0, U1
from vgpu_agent.allocation.early.binding import WrongPodError
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod, PodContainer

pytestmark = pytest.mark.looptime

NOTHING = Edits({"NVIDIA_VISIBLE_DEVICES": "void"})


def placed_by_its_owner(
    name: str, *containers: PodContainer | str, annotations: dict[str, str] | None = None
) -> Pod:
    """A pod that was made with ``spec.nodeName``:
    no scheduler has looked at it, and kubelet has not reported it.
    """
    pod = a_pod(
        name,
        *containers,
        annotations=wants(main=f"{U1} 39000") if annotations is None else annotations,
    )
    return msgspec.structs.replace(pod, scheduled=False)


def stranger(name: str = "stranger") -> Pod:
    """A tenant's pod, placed by a scheduler."""
    return msgspec.structs.replace(
        a_pod(name, annotations=wants(main=f"{U0} 1000")), scheduled=True
    )


async def _is_served(place: Place, pod: Pod, ids: tuple[str, ...] = IDS[:1]) -> None:
    answer = await place.admit(pod, "main", ids)
    assert answer.environment == {"GPU": U0, "MIB": "1000"}
    await place.start(ids)


async def test_an_imitation_of_a_mirror_pod_takes_nobodys_answer() -> None:
    """The kubelet runs no pod of the API server with that annotation,
    so no Allocate can be about it.
    """
    place = Place(late=False)
    liar = placed_by_its_owner(
        "liar", annotations={**wants(main=f"{U1} 39000"), MIRROR_POD: "x", STATIC_POD_HASH: "x"}
    )
    for pod in (liar, stranger()):
        place.book.put(pod)
    began = asyncio.get_running_loop().time()
    await _is_served(place, stranger())
    assert asyncio.get_running_loop().time() == began


@pytest.mark.parametrize(
    "container",
    [
        PodContainer("main", limits={NUMBER: 1, MEMORY: 10**9}),
        PodContainer("main", limits={NUMBER: 1}, unreadable_limits={MEMORY: "lots"}),
    ],
)
async def test_a_pod_that_asks_for_more_than_there_is_takes_nobodys_answer(
    container: PodContainer,
) -> None:
    """The kubelet turns it away before any plugin is asked, or in the middle,
    and its owner can make as many as it likes.
    """
    place = Place(late=False)
    for pod in (placed_by_its_owner("greedy", container), stranger()):
        place.book.put(pod)
    began = asyncio.get_running_loop().time()
    await _is_served(place, stranger())
    assert asyncio.get_running_loop().time() == began


async def test_a_pod_that_kubelet_turns_away_takes_nobodys_answer() -> None:
    """A forbidden sysctl, for instance: kubelet has gone on to the next pod
    before its status is written.
    """
    place = Place(late=False)
    turned_away = placed_by_its_owner("turned-away")
    for pod in (turned_away, stranger()):
        place.book.put(pod)
    asyncio.get_running_loop().call_later(
        0.2, place.book.put, msgspec.structs.replace(turned_away, phase="Failed", reported=True)
    )
    await _is_served(place, stranger())


async def test_a_pod_that_its_owner_has_placed_is_served_in_its_turn() -> None:
    """It is no attack to choose a node, and the pod that comes after such a pod starts, too."""
    place = Place(late=False)
    own = placed_by_its_owner("own")
    for pod in (own, stranger()):
        place.book.put(pod)
    answer = await place.admit(own, "main", IDS[1:2])
    assert answer.environment == {"GPU": U1, "MIB": "39000"}
    await _is_served(place, stranger())
    await place.start(IDS[1:2])


@pytest.mark.parametrize("scheduled", [True, False])
async def test_nonsense_in_one_pod_does_not_fail_another_for_good(scheduled: bool) -> None:
    """An error from Allocate fails the pod of the call, which may be the next one.
    The kubelet says so only at the start.
    """
    place = Place(late=False)
    nonsense = msgspec.structs.replace(
        placed_by_its_owner("nonsense", annotations={}), scheduled=scheduled
    )
    for pod in (nonsense, stranger()):
        place.book.put(pod)
    asyncio.get_running_loop().call_later(
        0.2, place.book.put, msgspec.structs.replace(nonsense, phase="Failed", reported=True)
    )
    await _is_served(place, stranger())


async def test_where_nobody_can_tell_nothing_is_refused_for_good() -> None:
    """The status of the pod that was turned away never comes: the answer says nothing, and the
    start is refused, which kubelet retries.
    """
    place = Place(late=False)
    for pod in (placed_by_its_owner("nonsense", annotations={}), stranger()):
        place.book.put(pod)
    assert await place.admit(stranger(), "main", IDS[:1]) == NOTHING
    with pytest.raises(WrongPodError, match="delete the pod, so that a new one is created"):
        await place.start(IDS[:1])


async def test_a_pod_with_nonsense_in_it_is_told_so_itself() -> None:
    """The pod's own start is refused for its own fault, and the next pod starts normally."""
    place = Place(late=False)
    nonsense = placed_by_its_owner("nonsense", annotations={})
    for pod in (nonsense, stranger()):
        place.book.put(pod)
    assert await place.admit(nonsense, "main", IDS[1:2]) == NOTHING
    with pytest.raises(RequestRefusedError, match="default/nonsense has no annotation"):
        await place.start(IDS[1:2])
    await _is_served(place, stranger())


async def test_the_same_pod_does_not_take_every_answer_of_its_neighbours() -> None:
    """The kubelet never asks for it and never says so.
    It costs one answer, and the pod that is made anew gets its own.
    """
    place = Place(late=False)
    for pod in (placed_by_its_owner("silent"), stranger()):
        place.book.put(pod)
    await place.admit(stranger(), "main", IDS[:1])
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])
    place.book.remove(stranger())
    place.forget(stranger())
    for number in range(3):
        again = stranger(f"again-{number}")
        place.book.put(again)
        await _is_served(place, again, IDS[number + 1 : number + 2])
