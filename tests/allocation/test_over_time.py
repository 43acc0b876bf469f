"""Grants over restarts of the agent, outages of the API server and changes of settings,
runtime and GPUs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from tests.allocation import binding_parts
from tests.allocation.binding_parts import (
    IDS,
    MEMORY,
    NUMBER,
    MemoryCarrier,
    NumberFamily,
    Place,
    a_pod,
    init,
    wants,
)
from tests.allocation.later_parts import booked, confirm, restarted, running
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.early.binding import WrongPodError
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.family import Ownership, Question
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.model import Inventory, Resource, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

EARLY = BindingMode(late=False, by_annotation=False, reason="binding.mode is early")
LATE = BindingMode(late=True, by_annotation=False, reason="containerd was upgraded to 2.0")


class RenamedFamily(NumberFamily):
    """The number's resource has another name by now; the old name is still its own."""

    def owns(self, resource: str) -> Ownership:
        return Ownership.CERTAIN if resource == "example.com/new" else super().owns(resource)

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        return tuple(
            _changed(each, name="example.com/new") for each in super().resources(inventory)
        )


class NarrowFamily(NumberFamily):
    """A GPU is for one container by now."""

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        return tuple(_changed(each, holders_per_device=1) for each in super().resources(inventory))


class PickyFamily(NumberFamily):
    """A family that cannot provide its decision for the pod ``unlucky``."""

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        if question.pod.name == "unlucky":
            raise RequestRefusedError("17 GPUs, and hami-core limits at most 16")
        return super().provision(question, shares)


def _changed(resource: Resource, **changes: object) -> Resource:
    # the changes are fields of a resource
    return msgspec.structs.replace(resource, **changes) if resource.name == NUMBER else resource


async def started(place: Place, pod: Pod, ids: Sequence[str]) -> None:
    """Admit and start the pod's only container."""
    place.book.put(pod)
    await place.admit(pod, "main", ids)
    await place.start(ids)


async def with_init_container(place: Place, **gpus: str) -> Pod:
    """A pod whose init container has two ids and has started;
    the main container waits for the first of them.
    """
    pod = a_pod("train", init("prepare", 2), "main", annotations=wants(**gpus))
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:2])
    return pod


async def with_two_init_containers(place: Place, gpus: dict[str, str]) -> Pod:
    """A pod whose second init container runs with two ids, which go on to a main container each;
    the first one ran as ``main``.
    """
    pod = a_pod("train", init("first"), init("prepare", 2), "main", "other", annotations=gpus)
    place.book.replace([pod])
    await place.admit(pod, "first", IDS[:1], listed=False)
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.admit(pod, "other", IDS[1:2])
    await place.start(IDS[:1])
    await place.start(IDS[:2])
    return pod


# -- the way of binding changes --------------------------------------------------------------------


async def test_a_refuted_early_answer_stays_refused_when_the_node_binds_late() -> None:
    """An upgraded runtime does not change what kubelet keeps:
    the answer of another pod, in full.
    """
    place = Place(late=False)
    first, second = (
        a_pod("first", annotations=wants(main=f"{U0} 100")),
        a_pod("second", annotations=wants(main=f"{U1} 200")),
    )
    place.book.replace([first, second])
    answer = await place.admit(second, "main", IDS[:1])
    assert answer.environment["GPU"] == U0  # the guess took the first
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])
    place.allocator.use_mode(LATE)
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


async def test_a_late_answer_stays_good_when_the_node_binds_early() -> None:
    """The container crashes after ``early`` was set: the kubelet keeps our CDI name, and the spec
    behind it is the container's own.
    """
    place = Place()
    await started(place, a_pod("train", annotations=wants(main=f"{U0} 100")), IDS[:1])
    place.allocator.use_mode(EARLY)
    await place.start(IDS[:1])
    assert booked(place) == {U0: 100}
    assert place.carrier.prepared == {}  # bound late again, not proven as a guess


async def test_what_kubelet_counted_during_late_binding_says_nothing_of_early_guesses() -> None:
    """A node that binds late for months keeps no list of calls,
    and none of them speaks for a pod when it binds early.
    """
    place = Place()
    await place.allocator.allocate(MEMORY, [f"{U0}-memory-{number}" for number in range(2)])
    small = a_pod(
        "a-small",
        PodContainer("main", limits={NUMBER: 1, MEMORY: 1}),
        annotations=wants(main=f"{U0} 1"),
    )
    large = a_pod(
        "b-large",
        PodContainer("main", limits={NUMBER: 1, MEMORY: 2}),
        annotations=wants(main=f"{U1} 2"),
    )
    place.book.replace([small, large])
    place.allocator.use_mode(EARLY)
    answer = await place.allocator.allocate(NUMBER, IDS[:1])
    assert answer.environment["GPU"] == U0


# -- settings change under running containers ------------------------------------------------------


@pytest.mark.parametrize(
    "families",
    [Families(pod_families=(RenamedFamily(),)), Families(paused=(NumberFamily(),))],
    ids=["renamed", "not served now"],
)
async def test_a_running_container_keeps_its_share_whatever_is_offered_now(
    families: Families,
) -> None:
    """The kubelet lists it under a name that today's settings do not offer. Even without its spec
    it is not free, however often we look.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 40000"))
    await started(place, pod, IDS[:1])
    place.book.put(running(pod))
    place.carrier.specs.clear()
    place.allocator.use_families(families)
    place.allocator.refresh_offer()
    assert confirm(place, times=3) == []
    assert booked(place) == {U0: 40000}


async def test_narrower_settings_do_not_make_what_was_granted_unsound() -> None:
    """Three share a GPU that is for one by now.
    The ledger has them right, and no other pod gets in.
    """
    place = Place()
    for number in range(3):
        await started(
            place, a_pod(f"pod-{number}", annotations=wants(main=f"{U0} 100")), [IDS[number]]
        )
    place.allocator.use_families(Families(pod_families=(NarrowFamily(),)))
    place.allocator.refresh_offer()
    assert place.ledger.audit() == []
    with pytest.raises(CapacityError):
        await started(place, a_pod("late", annotations=wants(main=f"{U0} 100")), [IDS[3]])


async def test_one_spec_that_cannot_be_made_keeps_nobody_elses_from_being_made() -> None:
    """After a reboot all are made anew. A setting that has changed since makes one
    of them impossible.
    """
    place = Place()
    for name, ids in (("unlucky", IDS[:1]), ("lucky", IDS[1:2])):
        await started(place, a_pod(name, annotations=wants(main=f"{U0} 100")), ids)
    place.carrier.specs.clear()
    place.allocator.use_families(Families(pod_families=(PickyFamily(),)))
    assert [record.owner.pod for record, _ in place.allocator.late_start.deliveries()] == ["lucky"]


# -- the agent restarts ----------------------------------------------------------------------------


async def test_a_restart_while_an_init_container_runs_keeps_its_share_for_the_next() -> None:
    """Its ids are the main container's as well,
    which starts under the new agent and takes over what was booked.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 30000,{U1} 30000", main=f"{U0} 30000")
    after = restarted(
        before,
        msgspec.structs.replace(pod, containers=(running(pod).containers[0], pod.containers[1])),
    )
    confirm(after, initial=True)
    assert booked(after) == {U0: 30000, U1: 30000}
    await after.start(IDS[:1])
    assert booked(after) == {U0: 30000}


async def test_a_restart_does_not_forget_an_init_container_all_of_whose_ids_go_on() -> None:
    """It runs with its own share, not with those of the containers after it,
    none of which has started.
    """
    place = Place()
    pod = await with_two_init_containers(
        place, wants(prepare=f"{U0} 100,{U1} 200", main=f"{U0} 50", other=f"{U0} 20")
    )
    after = restarted(place, pod)
    confirm(after, initial=True)
    assert booked(after) == booked(place) == {U0: 100, U1: 200}
    confirm(after, times=3)
    assert booked(after) == {U0: 100, U1: 200}
    await after.start(IDS[:1])
    await after.start(IDS[1:2])
    confirm(after, times=3)
    assert booked(after) == {U0: 70}


async def test_a_restart_without_the_checkpoint_does_not_forget_an_init_container() -> None:
    """Only the checkpoint names init containers. Forgotten, one that runs has its GPU granted to
    another pod as well.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 40000,{U1} 40000", main=f"{U0} 1")
    after = restarted(before, pod)
    after.checkpoint, checkpoint = None, before.checkpoint
    confirm(after, initial=True)
    assert booked(after) == {U0: 40000, U1: 40000}
    after.checkpoint = checkpoint
    confirm(after, times=3)
    assert booked(after) == {U0: 40000, U1: 40000}
    await after.start(IDS[:1])
    confirm(after, times=3)
    assert booked(after) == {U0: 1}
    assert after.ledger.audit() == []


async def test_without_the_checkpoint_a_sidecar_keeps_its_share_beside_an_init_container() -> None:
    """The sidecar runs with its own ids. Only a container that is still to start can have those of
    an init container that runs.
    """
    before = Place()
    sidecar = PodContainer("side", ContainerKind.SIDECAR, {NUMBER: 1})
    pod = a_pod(
        "train",
        sidecar,
        init("prepare", 2),
        "main",
        annotations=wants(side=f"{U1} 500", prepare=f"{U0} 100,{U1} 100", main=f"{U0} 1"),
    )
    before.book.replace([pod])
    await before.admit(pod, "side", IDS[3:4])
    await before.admit(pod, "prepare", IDS[:2], listed=False)
    await before.admit(pod, "main", IDS[:1])
    await before.start(IDS[3:4])
    await before.start(IDS[:2])
    after = restarted(before, pod)
    after.checkpoint = None
    confirm(after, initial=True)
    confirm(after, times=2)
    assert booked(after) == booked(before) == {U0: 100, U1: 600}


async def with_ids_of_its_own(place: Place, *mains: str) -> Pod:
    """A pod whose init container has started with two ids that no later container has."""
    pod = a_pod(
        "train", init("prepare", 2), *mains, annotations=wants(prepare=f"{U0} 100,{U1} 100")
    )
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[3:5], listed=False)
    for position, name in enumerate(mains):
        await place.admit(pod, name, IDS[position : position + 1])
    await place.start(IDS[3:5])
    return pod


async def test_a_checkpoint_that_fails_later_books_no_init_container_twice() -> None:
    """The ledger knows it already, under its own ids."""
    place = Place()
    await with_ids_of_its_own(place, "main")
    place.checkpoint = None
    confirm(place, times=2)
    assert booked(place) == {U0: 100, U1: 100}


async def test_an_init_container_takes_no_ids_for_which_something_was_decided() -> None:
    """During an outage the main container was booked by its record of an earlier sandbox. The ids
    of the other one are still free for the init container that runs.
    """
    before = Place()
    pod = a_pod(
        "train",
        init("prepare", 2),
        "main",
        "other",
        annotations=wants(prepare=f"{U0} 100,{U1} 100", main=f"{U0} 7"),
    )
    before.book.replace([pod])
    await before.admit(pod, "prepare", IDS[3:5], listed=False)
    await before.admit(pod, "main", IDS[:1])
    await before.admit(pod, "other", IDS[1:2])
    await before.start(IDS[3:5])
    await before.start(IDS[:1])
    await before.start(IDS[3:5])
    after = restarted(before)
    after.checkpoint = None
    confirm(after, initial=True)
    assert booked(after) == {U0: 7}
    after.book.replace([pod])
    confirm(after, times=2)
    assert booked(after) == {U0: 107, U1: 100}


async def test_an_init_container_found_without_the_checkpoint_gives_nobody_its_spec() -> None:
    """The kubelet starts the main container without the agent if the agent has stopped. The name
    that it has must not stand for the init container's devices then.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 40000,{U1} 40000", main=f"{U0} 1")
    after = restarted(before, pod)
    after.checkpoint = None
    confirm(after, initial=True)
    assert booked(after) == {U0: 40000, U1: 40000}
    assert after.allocator.late_start.deliveries() == []


async def test_main_containers_that_start_again_without_the_agent_stay_booked() -> None:
    """The sandbox was lost, the init container started with the agent, and the agent stopped. The
    main container has no newer record, but the status shows its start.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 1,{U1} 1", main=f"{U0} 20000")
    await before.start(IDS[:1])
    await before.start(IDS[:2])
    shown = msgspec.structs.replace(
        running(pod),
        containers=tuple(
            msgspec.structs.replace(each, started=True, started_at=time.time() + 60)
            for each in pod.containers
        ),
    )
    for pods in ((), (shown,)):
        after = restarted(before, *pods)
        confirm(after, initial=True)
        assert booked(after)[U0] >= 20000
    assert booked(after) == {U0: 20000}


async def test_a_restart_does_not_forget_an_init_container_whose_sidecar_started_again() -> None:
    """The sidecar comes before it and runs on beside it,
    so that its crash says nothing about the init container.
    """
    place = Place()
    gpus = wants(proxy=f"{U0} 10", prepare=f"{U0} 100,{U1} 200", main=f"{U0} 50", other=f"{U0} 20")
    proxy = PodContainer("proxy", ContainerKind.SIDECAR, {NUMBER: 1})
    pod = a_pod("train", proxy, init("prepare", 2), "main", "other", annotations=gpus)
    place.book.replace([pod])
    await place.admit(pod, "proxy", IDS[2:3])
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.admit(pod, "other", IDS[1:2])
    for ids in (IDS[2:3], IDS[:2], IDS[2:3]):
        await place.start(ids)
    after = restarted(place, pod)
    confirm(after, initial=True)
    assert booked(after) == booked(place) == {U0: 110, U1: 200}
    confirm(after, times=3)
    assert booked(after) == {U0: 110, U1: 200}


async def test_a_restart_finds_an_init_container_at_work_whose_pod_was_made_anew() -> None:
    """A static pod keeps its UID. What tells
    that its containers have ended are the youngest records of their starts.
    """
    place = Place()
    pod = a_pod(
        "static",
        init("prepare"),
        "main",
        annotations=wants(prepare=f"{U0} 100", main=f"{U0} 50"),
        uid="hash",
    )
    place.book.replace([pod])
    for life, starting in (((IDS[:2], IDS[:1]), 2), ((IDS[2:4], IDS[2:3]), 1)):
        place.forget(pod)
        await place.admit(pod, "prepare", life[0], listed=False)
        await place.admit(pod, "main", life[1])
        for ids in life[:starting]:
            await place.start(ids)
    # a new agent reads them in the order of their names
    place.carrier.specs = dict(reversed(place.carrier.specs.items()))
    after = restarted(place, pod)
    confirm(after, initial=True, times=3)
    assert booked(after) == {U0: 100}


async def test_what_an_init_container_had_is_not_held_back_for_the_container_with_its_ids() -> None:
    """Its record is of a start before the next init container's.
    What the container after it gets is decided when that starts.
    """
    place = Place()
    gpus = wants(prepare=f"{U0} 100,{U1} 100", main=f"{U0} 30000", other=f"{U0} 20000")
    pod = await with_two_init_containers(place, gpus)
    await place.start(IDS[1:2])
    assert booked(place) == {U0: 20000}
    after = restarted(place, pod)
    confirm(after, initial=True)
    assert booked(after) == {U0: 20000}
    changed = msgspec.structs.replace(pod, annotations={**gpus, **wants(main=f"{U1} 30000")})
    after.book.replace([changed])
    await after.start(IDS[:1])
    assert booked(after) == {U0: 20000, U1: 30000}


async def test_nothing_new_is_decided_before_kubelet_has_told_who_holds_what() -> None:
    """Both kubelet records were unreadable when the agent started. An answer about the starting pod
    alone does not say what is free.
    """
    place = Place()
    first, second = (
        a_pod(name, annotations=wants(main=f"{U0} 30000")) for name in ("first", "second")
    )
    await started(place, first, IDS[:1])
    after = restarted(place, first, second)
    after.ledger.rebuilt = False
    await after.admit(second, "main", IDS[1:2])
    with pytest.raises(
        NotProvenError,
        match="second, container main: the holders of ids from before the start of this agent",
    ):
        await after.start(IDS[1:2])
    confirm(after)
    with pytest.raises(CapacityError):
        await after.start(IDS[1:2])
    assert booked(after) == {U0: 30000}


async def test_nothing_is_decided_between_the_first_look_at_pods_and_the_next_at_records() -> None:
    """A share from the replaced plugin is recorded in its pod alone,
    which was unreadable when the kubelet's records were read.
    """
    place = Place()
    old = running(a_pod("old", annotations=wants(main=f"{U0} 30000")))
    await place.admit(old, "main", IDS[:1])
    ours = a_pod("ours", annotations=wants(main=f"{U1} 100"))
    await started(place, ours, IDS[2:3])
    after, new = restarted(place), a_pod("new", annotations=wants(main=f"{U0} 30000"))
    confirm(after, initial=True)
    after.book.replace([old, ours, new])
    await after.admit(new, "main", IDS[1:2])
    await after.start(IDS[2:3])  # what it was given, it keeps
    with pytest.raises(
        NotProvenError,
        match="new, container main: the agent has just learned of pods that run on this node",
    ):
        await after.start(IDS[1:2])
    confirm(after)
    with pytest.raises(CapacityError):
        await after.start(IDS[1:2])
    assert booked(after) == {U0: 30000, U1: 100}


async def test_an_init_container_that_ended_under_the_new_agent_holds_nothing_back() -> None:
    """Passes over the records do not bring back what it had:
    the entry in the checkpoint stays for as long as the pod.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 10000,{U1} 10000", main=f"{U0} 10000")
    after = restarted(
        before,
        msgspec.structs.replace(pod, containers=(running(pod).containers[0], pod.containers[1])),
    )
    confirm(after, initial=True)
    await after.start(IDS[:1])
    after.book.put(running(pod))
    confirm(after, times=5)
    assert booked(after) == {U0: 10000}


async def test_an_init_container_that_ended_in_an_outage_holds_nothing_back() -> None:
    """While no pod is known, the records beside the specs say that the next one has started.
    Booked beside it, what both had could be more than their GPU has.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U0} 10000,{U1} 10000", main=f"{U0} 10000")
    await before.start(IDS[:1])
    after = restarted(before)
    confirm(after, initial=True)
    assert booked(after) == {U0: 10000}
    after.book.replace([running(pod)])
    confirm(after, times=5)
    assert booked(after) == {U0: 10000}


async def test_a_container_with_its_init_containers_ids_keeps_its_share_over_an_outage() -> None:
    """At first the spec may be for either of the two.
    No other pod gets the GPU in the meantime or later.
    """
    before = Place()
    pod = a_pod("train", init("fetch"), "main", annotations=wants(main=f"{U0} 40000"))
    before.book.replace([pod])
    await before.admit(pod, "fetch", IDS[:1], listed=False)
    await before.admit(pod, "main", IDS[:1])
    await before.start(IDS[:1])
    after = restarted(before)
    confirm(after, initial=True)
    assert booked(after) == {U0: 40000}
    after.book.replace([running(pod)])
    confirm(after, times=5)
    with pytest.raises(CapacityError):
        await started(after, a_pod("next", annotations=wants(main=f"{U0} 40000")), IDS[1:2])
    assert booked(after) == {U0: 40000}


@pytest.mark.parametrize("since", [-60.0, +60.0])
async def test_a_status_from_before_a_reboot_books_nothing(since: float) -> None:
    """It shows a main container that is still to start: the init container before it has started
    since. Its share may have been granted to another pod in the meantime.
    """
    before = Place()
    pod = await with_init_container(before, prepare=f"{U1} 10000,{U0} 1", main=f"{U0} 20000")
    shown = msgspec.structs.replace(
        running(pod),
        containers=tuple(
            msgspec.structs.replace(each, started=True, started_at=time.time() + since)
            for each in pod.containers
        ),
    )
    after = restarted(before, shown)
    after.checkpoint = [line for line in before.checkpoint or () if line.owner.container == "main"]
    confirm(after, initial=True)
    assert booked(after) == ({} if since < 0 else {U0: 20000})


async def test_of_two_records_of_one_container_the_youngest_counts() -> None:
    """A static pod that is made anew keeps its UID and may get other ids and another share.
    The first spec still lies there.
    """
    before = Place()
    pod = a_pod("static", annotations=wants(main=f"{U0} 10000"))
    await started(before, pod, IDS[:1])
    before.forget(pod)
    anew = msgspec.structs.replace(pod, annotations=wants(main=f"{U1} 20000"))
    await started(before, anew, IDS[1:2])
    after = restarted(before, running(anew))
    confirm(after, initial=True)
    assert booked(after) == {U1: 20000}


async def test_grants_are_known_before_the_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver answers after the start: what the records beside the specs say is booked the
    moment the resource is offered.
    """
    before = Place()
    train = a_pod("train", annotations=wants(main=f"{U0} 40000"))
    await started(before, train, IDS[:1])
    found = Inventory()
    monkeypatch.setattr(binding_parts, "golden_inventory", lambda: found)
    after = restarted(before, train)
    confirm(after, initial=True)
    found = golden_inventory()
    after.allocator.refresh_offer()
    with pytest.raises(CapacityError):
        await started(after, a_pod("next", annotations=wants(main=f"{U0} 40000")), IDS[1:2])


# -- several starts at once ------------------------------------------------------------------------


class SlowCarrier(MemoryCarrier):
    """Takes some turns of the loop for a delivery, and counts how many are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        await super().deliver(record, provision)
        self.now -= 1


async def test_starts_of_the_same_ids_come_one_after_the_other() -> None:
    """A call that kubelet gave up and its next one meet;
    also a third, and while pods that are gone are forgotten.
    """
    place = Place(carrier=SlowCarrier())
    pod = a_pod("train", annotations=wants(main=f"{U0} 100"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    starts = [asyncio.ensure_future(place.start(IDS[:1])) for _ in range(2)]
    await starts[0]
    confirm(place)
    starts.append(asyncio.ensure_future(place.start(IDS[:1])))
    await asyncio.gather(*starts)
    assert isinstance(place.carrier, SlowCarrier)
    assert place.carrier.most == 1
    assert list(place.carrier.specs) == [grant_token(NUMBER, IDS[:1])]
