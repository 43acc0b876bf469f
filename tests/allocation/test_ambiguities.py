"""Ids that the kubelet has given to two pods (kubelet §7): which of them gives way, and that nobody
else does.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, init, wants
from tests.allocation.later_parts import booked, confirm
from tests.golden import U0
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.errors import AgentError
from vgpu_agent.pods import MIRROR_POD, Pod, PodContainer

pytestmark = pytest.mark.looptime

OTHER = "example.com/other"


async def refused(place: Place) -> None:
    """The kubelet asks, and asks again after a quarter of a minute."""
    with pytest.raises(AgentError):
        await place.start(IDS[:1])
    await asyncio.sleep(15)


async def given_twice(
    *pods: Pod, place: Place | None = None, container: str = "main"
) -> tuple[Place, list[Pod]]:
    """A node whose kubelet has given the same ids to all of these pods, in this order."""
    place = place or Place()
    for pod in pods:
        place.book.put(pod)
        await place.admit(pod, container, IDS[:1])
    return place, list(pods)


def plain(name: str, *containers: PodContainer | str) -> Pod:
    """A pod that asks for a GPU."""
    return a_pod(name, *containers, annotations=wants(main=f"{U0} 100"))


def told(pod: Pod, name: str = "main", **status: object) -> Pod:
    """The pod with another status of one container."""
    return msgspec.structs.replace(
        pod,
        containers=tuple(
            msgspec.structs.replace(each, **status) if each.name == name else each
            for each in pod.containers
        ),
    )


def final(place: Place) -> list[str]:
    """The pods that are refused for good."""
    return [refusal.pod.name for refusal in place.refusals.current if refusal.final]


async def test_the_later_of_two_waiting_pods_gives_way() -> None:
    """The kubelet takes the ids from neither, so without that both would wait for ever. One reading
    may be unlucky, so the first refusal decides nothing.
    """
    place, (train, serve) = await given_twice(plain("train"), plain("serve"))
    await refused(place)
    assert final(place) == []
    await refused(place)
    assert final(place) == ["serve"]
    (refusal,) = (refusal for refusal in place.refusals.current if refusal.final)
    assert "in two pods at once" in refusal.text
    assert "delete this one" in refusal.text
    place.forget(serve)
    place.book.replace([train])
    await place.start(IDS[:1])
    assert [grant.decided_for for grant in place.ledger.grants] == [("uid-train", "main")]
    assert [refusal.pod.name for refusal in place.refusals.current] == ["serve"]


async def test_a_pod_that_has_started_keeps_its_ids_and_is_not_refused() -> None:
    """It is the later one here; its work must not be lost for a fault of the kubelet."""
    place, (train, serve) = await given_twice(plain("train"), plain("serve"))
    both = place.checkpoint, place.pod_resources
    place.forget(train)
    await place.start(IDS[:1])
    place.checkpoint, place.pod_resources = both
    await refused(place)
    await refused(place)
    assert final(place) == ["train"]
    place.refusals.forget_absent([])
    place.book.put(told(serve, started=True, running=True))
    await refused(place)
    assert [refusal.pod.name for refusal in place.refusals.current] == ["train"]


async def test_a_container_that_crashed_before_the_agents_restart_has_begun() -> None:
    """The new agent knows that by the pod's status only, and after its start all pods are in the
    order of their creation.
    """
    begun = told(plain("serve"), started=True)
    place, _ = await given_twice(plain("train"), begun)
    await refused(place)
    await refused(place)
    assert final(place) == ["train"]


async def test_a_pod_of_which_another_container_has_begun_keeps_its_ids() -> None:
    """Its work would be lost with it."""
    two = a_pod("serve", "one", "main", annotations=wants(main=f"{U0} 100"))
    place, _ = await given_twice(plain("train"), told(two, "one", started=True, running=True))
    await refused(place)
    await refused(place)
    assert final(place) == ["train"]


async def test_a_container_without_gpus_is_no_beginning() -> None:
    """Most pods have an init container that runs before any GPU is used."""
    helped = plain("serve", PodContainer("proxy", limits={OTHER: 1}), "main")
    place, _ = await given_twice(plain("train"), told(helped, "proxy", started=True, running=True))
    await refused(place)
    await refused(place)
    assert final(place) == ["serve"]


async def test_where_both_have_begun_a_person_decides() -> None:
    """Neither can start again, and each has work to lose."""
    place, _ = await given_twice(*(told(plain(name), started=True) for name in ("train", "serve")))
    for _ in range(4):
        await refused(place)
    assert final(place) == []
    assert len(place.refusals.current) == 2


async def test_nobody_gives_way_to_a_pod_that_is_being_deleted() -> None:
    """Its ids are free in some seconds, also when a user has followed the advice and deleted it."""
    deleting = msgspec.structs.replace(plain("train"), deleting=True)
    place, _ = await given_twice(deleting, plain("serve"))
    for _ in range(4):
        await refused(place)
    assert final(place) == []


async def test_a_static_pod_gives_way_to_nobody() -> None:
    """The API server has its mirror only, whose end would end nothing."""
    static = msgspec.structs.replace(plain("serve"), annotations={MIRROR_POD: "x"})
    place, _ = await given_twice(plain("train"), static)
    await refused(place)
    await refused(place)
    assert final(place) == ["train"]


async def test_a_pod_alone_never_gives_way() -> None:
    """The other one may be gone already, since nothing is known of it."""
    place, (train, _) = await given_twice(plain("train"), plain("serve"))
    place.book.replace([train])
    for _ in range(3):
        await refused(place)
    assert final(place) == []


async def test_a_further_pod_with_the_same_ids_is_given_a_second_reading_too() -> None:
    """Whatever was before it."""
    place, (_, serve) = await given_twice(plain("train"), plain("serve"))
    await refused(place)
    place.forget(serve)
    place.book.remove(serve)
    await given_twice(plain("third"), place=place)
    await refused(place)
    assert final(place) == []
    await refused(place)
    assert final(place) == ["third"]


async def test_an_ambiguity_of_an_hour_ago_is_over() -> None:
    """The refused container has crashed meanwhile or was started again, so nobody has asked."""
    place, _ = await given_twice(plain("train"), plain("serve"))
    await refused(place)
    await asyncio.sleep(3600)
    await refused(place)
    assert final(place) == []


async def test_an_identified_start_ends_the_ambiguity() -> None:
    """An earlier reading of the records is no part of a later ambiguity."""
    place, (_, serve) = await given_twice(plain("train"), plain("serve"))
    both = place.checkpoint, place.pod_resources
    await refused(place)
    place.forget(serve)
    place.carrier.trouble = "the disk is full"
    await refused(place)
    place.checkpoint, place.pod_resources = both
    await refused(place)
    assert final(place) == []


async def test_a_container_that_was_allowed_to_start_a_moment_ago_has_begun() -> None:
    """The kubelet has not written its status yet, and the ids were given again since."""
    place, train, serve = Place(), plain("train"), plain("serve")
    place.book.replace([train, serve])
    await place.admit(serve, "main", IDS[:1])
    await place.start(IDS[:1])
    await place.admit(train, "main", IDS[:1])
    await refused(place)
    await refused(place)
    assert final(place) == ["train"]


async def test_a_pod_that_gave_way_is_not_lost_when_the_other_one_ends() -> None:
    """It has the ids alone then. If it waits for something else, such as room, it is not ended."""
    place, (train, _) = await given_twice(
        plain("train"), a_pod("serve", annotations=wants(main=f"{U0} 50000"))
    )
    await refused(place)
    await refused(place)
    assert final(place) == ["serve"]
    place.forget(train)
    place.book.remove(train)
    await refused(place)
    assert "50000 wanted" in place.refusals.current[-1].reason
    assert final(place) == []


async def test_an_init_container_that_is_over_is_not_refused() -> None:
    """It has the ids in the kubelet's records for as long as its pod lives, and its refusal would
    never be taken back: the pod, which runs, would be evicted.
    """
    pod = plain("train", init("prepare"), "main")
    over = told(told(pod, "prepare", started=True, completed=True), started=True, running=True)
    place = Place()
    place.book.put(over)
    await place.admit(pod, "prepare", IDS[:1], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await given_twice(plain("serve"), place=place)
    await refused(place)
    await refused(place)
    assert [(each.pod.name, each.final) for each in place.refusals.current] == [("serve", True)]


async def test_no_refusal_of_another_container_stays_when_one_starts() -> None:
    """All containers with the ids were suspects; one of them has started."""
    pod = plain("train", init("prepare"), "main")
    place = Place()
    place.book.put(pod)
    await place.admit(pod, "prepare", IDS[:1], listed=False)
    await place.admit(pod, "main", IDS[:1])
    _, (serve,) = await given_twice(plain("serve"), place=place)
    await refused(place)
    assert len(place.refusals.current) == 3
    place.forget(serve)
    place.book.replace([pod])
    await place.start(IDS[:1])
    assert [refusal.pod.name for refusal in place.refusals.current] == ["serve"]


async def test_a_successor_of_the_same_name_is_no_suspect() -> None:
    """The kubelet still has the pod before it, deleted by force, and the successor other ids."""
    place, (_, old) = await given_twice(plain("train"), plain("serve"))
    new = msgspec.structs.replace(plain("serve"), uid="new")
    place.book.remove(old)
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2], listed=False)
    for _ in range(3):
        await refused(place)
    assert [refusal.pod.uid for refusal in place.refusals.current] == ["uid-train"]
    assert final(place) == []


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("name_is_reused", [False, True])
async def test_a_running_container_keeps_its_room(is_reversed: bool, name_is_reused: bool) -> None:
    """Its record is withdrawn when its ids are given again, as is that of any earlier holder, so
    the pod's status has to say that it runs. Its memory must not look free.
    """
    place = Place()
    train, serve = (
        a_pod(name, annotations=wants(main=f"{U0} 40960")) for name in ("train", "serve")
    )
    if name_is_reused:
        place.book.put(msgspec.structs.replace(serve, uid="before"))
    place.book.put(train)
    await place.admit(train, "main", IDS[:1])
    await place.start(IDS[:1])
    place.book.put(told(train, started=True, running=True, started_at=1.0))
    await given_twice(serve, place=place)
    assert place.checkpoint is not None
    if is_reversed:
        place.checkpoint.reverse()
    for _ in range(3):
        for token, (record, _) in list(place.carrier.specs.items()):
            if place.allocator.late_start.foreign_records([record]):
                del place.carrier.specs[token]
        confirm(place)
        assert booked(place) == {U0: 40960}
        assert [grant.decided_for for grant in place.ledger.grants if grant.shares] == [
            (train.uid, "main")
        ]
        assert place.allocator.late_start.deliveries() == []


async def test_the_count_is_of_refusals() -> None:
    """For the metric."""
    place, _ = await given_twice(plain("train"), plain("serve"))
    for _ in range(3):
        with pytest.raises(NotProvenError, match=NUMBER):
            await place.start(IDS[:1])
    assert place.allocator.late_start.ambiguities == 3
