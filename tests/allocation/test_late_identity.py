"""The container that is about to start, when the watch, the API server or a kubelet record is late,
away or wrong.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, wants
from tests.allocation.later_parts import booked, confirm, running
from tests.golden import U0, U1
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.model import Holding, Owner


def given(place: Place, ids: tuple[str, ...]) -> dict[str, str]:
    """The environment in the spec of these ids."""
    return dict(place.carrier.specs[grant_token(NUMBER, ids)][1].edits.environment)


@pytest.mark.looptime
async def test_a_pod_that_the_watch_shows_a_little_later_is_waited_for() -> None:
    """The watch may be slower than the kubelet. The start waits for it and makes no request."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([])
    await place.admit(pod, "main", IDS[:1])
    asyncio.get_running_loop().call_later(1.5, place.book.put, pod)
    await place.start(IDS[:1])
    assert place.fetches == 0
    assert given(place, IDS[:1])["GPU"] == U0


@pytest.mark.looptime
async def test_a_pod_that_the_watch_does_not_show_is_asked_for_once() -> None:
    """After the bounded wait one request settles it."""
    place = Place()
    place.book.replace([])
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.on_server["default", "train"] = pod
    await place.admit(pod, "main", IDS[:1])
    began = asyncio.get_running_loop().time()
    await place.start(IDS[:1])
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.1)
    assert place.fetches == 1
    assert given(place, IDS[:1])["GPU"] == U0


@pytest.mark.looptime
async def test_a_pod_is_asked_for_at_once_while_the_first_list_is_read() -> None:
    """A list of the largest pods takes seconds, and nothing says where in it the pod is: after a
    restart no start waits for that.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.on_server["default", "train"] = pod
    await place.admit(pod, "main", IDS[:1])
    began = asyncio.get_running_loop().time()
    await place.start(IDS[:1])
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.0, abs=0.1)
    assert given(place, IDS[:1])["GPU"] == U0


@pytest.mark.looptime
async def test_an_outage_refuses_unseen_pods_only_and_says_so() -> None:
    """Pods that were seen start without the API server.
    For one that was not, the text names the outage.
    """
    place = Place()
    place.outage = True
    seen, unseen = (
        a_pod("seen", annotations=wants(main=f"{U0} 1")),
        a_pod("unseen", annotations=wants(main=f"{U0} 1")),
    )
    place.book.replace([seen])
    await place.admit(seen, "main", IDS[:1])
    await place.admit(unseen, "main", IDS[1:2])
    await place.start(IDS[:1])
    with pytest.raises(
        NotProvenError,
        match=(
            "default/unseen did not appear in the watch within 2 s, and the API server does not "
            "answer"
        ),
    ):
        await place.start(IDS[1:2])
    assert list(place.carrier.specs) == [grant_token(NUMBER, IDS[:1])]


@pytest.mark.looptime
async def test_a_pod_that_changed_its_uid_under_its_name_is_refused() -> None:
    """The kubelet starts the old pod, the API server has the new one.
    Neither gets the other's share.
    """
    place = Place()
    old, new = (
        a_pod("web-0", uid="old", annotations=wants(main=f"{U0} 1")),
        a_pod("web-0", uid="new", annotations=wants(main=f"{U1} 2")),
    )
    await place.admit(old, "main", IDS[:1])
    place.book.replace([new])
    place.on_server["default", "web-0"] = new
    with pytest.raises(NotProvenError, match="UID old, but the API server has UID new"):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


@pytest.mark.looptime
async def test_a_predecessor_that_the_watch_still_shows_is_not_the_one() -> None:
    """A StatefulSet's next pod has the name and by chance the ids of the last one, whose entry
    lingers. The unseen pod is asked for.
    """
    place = Place()
    old = a_pod("web-0", uid="old", annotations=wants(main=f"{U0} 1"), phase="Running")
    new = a_pod("web-0", uid="new", annotations=wants(main=f"{U1} 2"))
    place.book.replace([old])
    place.checkpoint = [Holding(NUMBER, IDS[:1], Owner("main", "old"))]
    await place.admit(new, "main", IDS[:1])
    place.on_server["default", "web-0"] = new
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U1, "MIB": "2"}


async def test_ids_in_two_live_pods_are_refused_and_counted() -> None:
    """An ambiguity is a bug of some component: counted, named, and never guessed."""
    place = Place()
    train, serve = (
        a_pod("train", annotations=wants(main=f"{U0} 1")),
        a_pod("serve", annotations=wants(main=f"{U1} 2")),
    )
    place.book.replace([train, serve])
    await place.admit(train, "main", IDS[:1])
    await place.admit(serve, "main", IDS[:1])
    with pytest.raises(
        NotProvenError, match="in two pods at once, default/serve and default/train"
    ):
        await place.start(IDS[:1])
    place.pod_resources = None
    with pytest.raises(NotProvenError, match="names several pods for the same ids"):
        await place.start(IDS[:1])
    assert place.allocator.late_start.ambiguities == 2
    assert place.carrier.specs == {}


@pytest.mark.looptime
async def test_an_unreadable_checkpoint_leaves_pod_resources_and_the_api_server() -> None:
    """Without UIDs only the pod that the API server has under the listed name right now is
    certain.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.checkpoint = None
    with pytest.raises(NotProvenError, match="does not exist any more"):
        await place.start(IDS[:1])
    place.on_server["default", "train"] = pod
    await place.start(IDS[:1])
    assert given(place, IDS[:1])["GPU"] == U0


async def test_silent_pod_resources_leave_the_checkpoint() -> None:
    """One UID for exactly these ids is proof enough."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.pod_resources = None
    await place.start(IDS[:1])
    assert given(place, IDS[:1])["GPU"] == U0


@pytest.mark.looptime
async def test_without_any_kubelet_record_nothing_starts() -> None:
    """Both silent: refused, for as long as that lasts."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.checkpoint = place.pod_resources = None
    with pytest.raises(NotProvenError, match="neither of the kubelet's records can be read"):
        await place.start(IDS[:1])


@pytest.mark.looptime
async def test_two_pods_of_one_name_are_not_told_apart_without_the_checkpoint() -> None:
    """A predecessor that was deleted by force may still be starting.
    The API server knows only the successor.
    """
    place = Place()
    old, new = (
        a_pod("web-0", uid="old", annotations=wants(main=f"{U0} 1")),
        a_pod("web-0", uid="new", annotations=wants(main=f"{U1} 2")),
    )
    place.book.replace([old])
    await place.admit(old, "main", IDS[:1])
    place.book.replace([new])
    place.on_server["default", "web-0"] = new
    place.checkpoint = None
    with pytest.raises(NotProvenError, match="there has been another pod named default/web-0"):
        await place.start(IDS[:1])
    place.checkpoint = []
    await place.admit(new, "main", IDS[1:2])
    place.checkpoint = None
    with pytest.raises(NotProvenError, match="the kubelet lists two pods named default/web-0"):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


async def test_ids_of_a_successor_unseen_are_not_its_predecessors() -> None:
    """A pod that was deleted by force and made anew has the name of one that still runs. Without
    the checkpoint and the API server the kubelet's records tell names only, and the memory of the
    first would be booked for both.
    """
    place = Place()
    old = a_pod("web-0", uid="old", annotations=wants(main=f"{U0} 30000"))
    place.book.put(old)
    await place.admit(old, "main", IDS[:1])
    await place.start(IDS[:1])
    confirm(place)
    place.book.put(running(old))
    await place.admit(a_pod("web-0", uid="new"), "main", IDS[1:2])
    place.checkpoint = None
    for _ in range(2):
        confirm(place)
        assert booked(place) == {U0: 30000}
        assert place.ledger.audit() == []
