"""Init containers with shares of their own, whose ids the kubelet hands on to later containers."""

from __future__ import annotations

import asyncio
import time

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from tests.allocation.binding_parts import (
    IDS,
    NUMBER,
    MemoryCarrier,
    NumberFamily,
    Place,
    a_pod,
    init,
    wants,
)
from tests.allocation.later_parts import booked, confirm
from tests.golden import U0, U1
from tests.torture import virtual_time
from vgpu_agent.allocation import identification
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.allocation.shared_ids import has_containers_waiting_behind_init, starting_container
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.model import Inventory, Owner, Resource, Share
from vgpu_agent.pods import Pod, PodContainer

CLAIMS = wants(prepare=f"{U1} 500", main=f"{U0} 1000")


class OwnInitShares(NumberFamily):
    """The family of the parts, whose init containers have annotations of their own."""

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        number, memory = super().resources(inventory)
        return msgspec.structs.replace(number, init_shares=True), memory


def a_place(*, late: bool = True, carrier: MemoryCarrier | None = None) -> Place:
    """A node with that family."""
    return Place(late=late, family=OwnInitShares(), carrier=carrier)


async def admitted(place: Place, pod: Pod) -> None:
    """The kubelet gives all containers of the pod the same id."""
    place.book.put(pod)
    for each in pod.containers:
        await place.admit(pod, each.name, IDS[:1], listed=each.name == "main")


def told(pod: Pod, name: str, **status: object) -> Pod:
    """The pod with another status of one container."""
    containers = tuple(
        msgspec.structs.replace(each, **status) if each.name == name else each
        for each in pod.containers
    )
    return msgspec.structs.replace(pod, containers=containers)


def over(pod: Pod, name: str = "prepare", *, completed: bool = True, later: float = 2.0) -> Pod:
    """The pod with a container that has ended ``later`` seconds from now."""
    return told(pod, name, completed=completed, ended_at=time.time() + later, started=True)


def given(place: Place) -> str:
    """The MiB in the spec that the containers share."""
    return place.carrier.specs[grant_token(NUMBER, IDS[:1])][1].edits.environment["MIB"]


@pytest.fixture
def pod() -> Pod:
    """One GPU for each of two containers, which are not the same."""
    return a_pod("train", init("prepare"), "main", annotations=CLAIMS)


async def test_each_container_gets_its_own_shares(pod: Pod) -> None:
    """vgpu-manager §4.2: init containers have claims of their own."""
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    assert given(place) == "500"
    place.book.put(over(pod))
    await place.start(IDS[:1])
    assert given(place) == "1000"
    (grant,) = place.ledger.grants
    assert (grant.decided_for, grant.shares) == ((pod.uid, "main"), (Share(U0, 1000),))
    assert place.ledger.audit() == []


async def test_the_end_of_the_init_container_is_waited_for(pod: Pod) -> None:
    """The kubelet writes it before it starts the next one, the watch shows it a moment later."""
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    starting = asyncio.ensure_future(place.start(IDS[:1]))
    await asyncio.sleep(0.01)
    assert not starting.done()
    place.book.put(over(pod))
    await starting
    assert given(place) == "1000"
    assert place.fetches == 0


def test_the_end_of_the_init_container_may_be_shown_late(pod: Pod) -> None:
    """The kubelet writes the statuses of its pods one after the other. In a storm of twenty pods on
    a busy node the next container started more than two seconds before it had written the end, and
    got the init container's shares: once in 576 containers.
    """

    async def play() -> None:
        place = a_place()
        await admitted(place, pod)
        await place.start(IDS[:1])
        place.on_server["default", "train"] = pod
        starting = asyncio.ensure_future(place.start(IDS[:1]))
        await asyncio.sleep(12.0)
        place.book.put(over(pod))
        await starting
        assert given(place) == "1000"
        assert place.fetches == 0

    virtual_time.run(play())


async def test_a_status_in_which_the_init_container_still_runs_proves_nothing(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet starts no running container, so that status is old, however long it was waited
    for. Taken for the truth, it would give the next container the init container's shares.
    """
    monkeypatch.setattr(identification, "STATUS_WAIT_SECONDS", 0.01)
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    running = told(pod, "prepare", started=True, running=True)
    place.book.put(running)
    place.on_server["default", "train"] = running
    with pytest.raises(NotProvenError, match="still shows that its last container"):
        await place.start(IDS[:1])
    place.book.put(over(pod))
    await place.start(IDS[:1])
    assert given(place) == "1000"


async def test_an_init_container_that_failed_starts_again_with_its_own(pod: Pod) -> None:
    """Its end without success is no reason to think of the next one."""
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    place.book.put(over(pod, completed=False))
    await place.start(IDS[:1])
    assert given(place) == "500"


async def test_what_the_watch_does_not_tell_is_asked_of_the_api_server(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch may be far behind; and where nothing has ended, the same container is tried again."""
    monkeypatch.setattr(identification, "STATUS_WAIT_SECONDS", 0.01)
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    place.on_server["default", "train"] = pod
    await place.start(IDS[:1])
    assert given(place) == "500"
    place.on_server["default", "train"] = over(pod)
    await place.start(IDS[:1])
    assert given(place) == "1000"
    assert place.fetches == 2


@pytest.mark.parametrize("outage", [True, False])
async def test_nothing_starts_while_it_is_not_known_whose_turn_it_is(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, *, outage: bool
) -> None:
    """A container of the pod would get the shares of another one."""
    monkeypatch.setattr(identification, "STATUS_WAIT_SECONDS", 0.01)
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    place.outage = outage
    told = "it is not known whether .* does not answer" if outage else "does not exist any more"
    with pytest.raises(NotProvenError, match=told):
        await place.start(IDS[:1])


async def test_soon_after_an_outage_a_status_without_an_end_proves_nothing(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The init container may have ended meanwhile: the kubelet writes what it could not write at
    its next round.
    """
    monkeypatch.setattr(identification, "STATUS_WAIT_SECONDS", 0.01)
    place = a_place()
    await admitted(place, pod)
    await place.start(IDS[:1])
    place.on_server["default", "train"] = pod
    place.api_reachable_seconds = 5.0
    with pytest.raises(NotProvenError, match="the API server was away a moment ago"):
        await place.start(IDS[:1])
    place.on_server["default", "train"] = over(pod)
    await place.start(IDS[:1])
    assert given(place) == "1000"


async def test_without_the_checkpoint_no_container_of_such_a_pod_starts(pod: Pod) -> None:
    """Pod-resources hides init containers, so their ids look like those of the main one."""
    place = a_place()
    await admitted(place, pod)
    place.checkpoint = None
    place.on_server["default", "train"] = pod
    with pytest.raises(NotProvenError, match="without the kubelet's checkpoint"):
        await place.start(IDS[:1])


async def test_a_restarted_agent_goes_on_where_the_one_before_was(pod: Pod) -> None:
    """The record beside the spec says who started last."""
    before = a_place()
    await admitted(before, pod)
    await before.start(IDS[:1])
    after = a_place(carrier=before.carrier)
    await admitted(after, over(pod))
    await after.start(IDS[:1])
    assert given(after) == "1000"
    await after.start(IDS[:1])
    assert given(after) == "1000"


async def test_a_restart_without_checkpoint_finds_the_init_container_behind_the_ids(
    pod: Pod,
) -> None:
    """The kubelet's list of pods names the main container, which has not started."""
    before = a_place()
    await admitted(before, pod)
    await before.start(IDS[:1])
    for pods in ((), (pod,)):
        after = a_place(carrier=before.carrier)
        after.pod_resources, after.answers = before.pod_resources, before.answers
        if pods:
            after.book.replace(pods)
        confirm(after, initial=True)
        assert booked(after) == {U1: 500}
        assert [grant.owner and grant.owner.container for grant in after.ledger.grants] == [
            "prepare"
        ]


async def test_without_the_pod_the_record_of_a_shared_spec_is_no_proof(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an outage a container starts again from its spec, unless it may be another's."""
    monkeypatch.setattr(identification, "STATUS_WAIT_SECONDS", 0.01)
    before = a_place()
    await admitted(before, pod)
    await before.start(IDS[:1])
    after = a_place(carrier=before.carrier)
    await admitted(after, pod)
    after.book.replace([])
    after.outage = True
    with pytest.raises(NotProvenError, match="did not appear in the watch"):
        await after.start(IDS[:1])


async def test_early_answers_are_each_containers_own() -> None:
    """They are complete in Allocate, where the kubelet asks for each container."""
    pod = a_pod(
        "train",
        init("prepare"),
        "main",
        annotations=wants(prepare=f"{U0} 500", main=f"{U0} 1000"),
    )
    place = a_place(late=False)
    place.book.replace([pod])
    first = await place.admit(pod, "prepare", IDS[:1], listed=False)
    second = await place.admit(pod, "main", IDS[:1])
    assert (first.environment["MIB"], second.environment["MIB"]) == ("500", "1000")
    await place.start(IDS[:1])
    await place.start(IDS[:1])
    assert place.ledger.audit() == []


@pytest.mark.parametrize("prepare", [f"{U1} 500", f"{U0} 1001"])
async def test_early_an_init_container_gets_no_more_than_its_pod_has(prepare: str) -> None:
    """The ledger has one grant for the ids of both, that of the container after it, so what the
    init container has beyond that could be given away while it runs.
    """
    pod = a_pod(
        "train", init("prepare"), "main", annotations=wants(prepare=prepare, main=f"{U0} 1000")
    )
    place = a_place(late=False)
    place.book.replace([pod])
    with pytest.raises(RequestRefusedError, match=r"prepare has more of GPU .* binding\.mode late"):
        await place.admit(pod, "prepare", IDS[:1], listed=False)


async def test_a_spec_that_is_still_to_change_hands_lets_nothing_start_unasked(pod: Pod) -> None:
    """After a stop of the agent the main container would find the init container's spec."""
    place = a_place()
    assert place.allocator.may_start_unasked(NUMBER)
    await admitted(place, pod)
    assert not place.allocator.may_start_unasked(NUMBER)
    place.book.put(told(over(pod), "main", started=True))
    assert place.allocator.may_start_unasked(NUMBER)


def test_only_pods_with_init_containers_of_the_resource_are_waited_for() -> None:
    """Everything else has one spec for itself, and ended pods start nothing."""
    plain = a_pod("plain", PodContainer("prepare"), "main")
    only_init = a_pod("init", init("prepare"), PodContainer("main"))
    ended = a_pod("ended", init("prepare"), "main", phase="Succeeded")
    assert not has_containers_waiting_behind_init([plain, only_init, ended], NUMBER)
    assert has_containers_waiting_behind_init(
        [plain, a_pod("both", init("prepare"), "main")], NUMBER
    )


START = 100.5


def record(container: str) -> GrantRecord:
    """A start at `START`."""
    return GrantRecord("t", "f", NUMBER, 1, Owner(container, "uid-train"), (), "test", START)


ORDER = ("first", "second", "main")


@pytest.mark.parametrize(
    ("last", "status", "expected"),
    [
        (None, {}, "first"),
        ("first", {}, None),
        ("first", {"first": (True, 100.0)}, "second"),
        ("first", {"first": (True, 99.0)}, None),  # in the sandbox before
        ("first", {"first": (False, 100.0)}, None),  # perhaps the run before this one
        ("first", {"first": (False, 101.0)}, "first"),
        ("second", {"first": (True, 90.0), "second": (True, 102.0)}, "main"),
        ("second", {"first": (True, 90.0)}, None),
        ("main", {"first": (True, 90.0), "second": (True, 95.0)}, "main"),
        ("stranger", {}, "first"),
    ],
)
def test_whose_turn_it_is(
    last: str | None, status: dict[str, tuple[bool, float]], expected: str | None
) -> None:
    """The last start, and the end of that container, tell the next one."""
    pod = a_pod("train", init("first"), init("second"), "main")
    for name, (completed, ended_at) in status.items():
        pod = told(pod, name, completed=completed, ended_at=ended_at)
    since = record(last) if last else None
    assert starting_container(pod, ORDER, since, status_is_current=False) == expected
    settled = starting_container(pod, ORDER, since, status_is_current=True)
    assert settled == (expected or last)


def test_a_new_sandbox_begins_with_the_first_container() -> None:
    """After a reboot, for one. The status still has the successes of the sandbox before."""
    pod = a_pod("train", init("first"), init("second"), "main")
    pod = told(pod, "first", completed=True, ended_at=90.0)
    anew = msgspec.structs.replace(pod, in_new_sandbox=True)
    assert starting_container(anew, ORDER, record("main"), status_is_current=True) == "first"
    over = told(anew, "main", ended_at=101.0)
    assert starting_container(over, ORDER, record("main"), status_is_current=False) == "first"
    assert starting_container(anew, ORDER, record("first"), status_is_current=True) == "first"


def test_without_the_records_the_status_tells_who_is_through(pod: Pod) -> None:
    """Somebody has emptied the directory of the specs under running pods. After a boot it is empty,
    too, and then everything begins anew.
    """
    through = told(pod, "prepare", completed=True, ended_at=90.0, started=True)
    names = ("prepare", "main")
    assert (
        starting_container(through, names, None, status_is_current=False, booted_at=50.0) == "main"
    )
    assert (
        starting_container(through, names, None, status_is_current=False, booted_at=95.0)
        == "prepare"
    )
    anew = msgspec.structs.replace(through, in_new_sandbox=True)
    assert (
        starting_container(anew, names, None, status_is_current=False, booted_at=50.0) == "prepare"
    )
    assert (
        starting_container(pod, names, None, status_is_current=False, booted_at=50.0) == "prepare"
    )


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["ends", "ends", "fails", "is not created", "is killed", "ends with the pod"]
            ),
            st.floats(0.05, 3.0),
        ),
        max_size=25,
    )
)
def test_whatever_happens_each_start_is_known(steps: list[tuple[str, float]]) -> None:
    """Failures, containers that could not be created, and sandboxes made anew, in any order; the
    status is as the kubelet writes it before each start.
    """
    pod = a_pod("train", init("first"), init("second"), "main")
    last, turn, now = None, 0, START
    for what, seconds in steps:
        expected = ORDER[turn]
        told_at_once = starting_container(pod, ORDER, last, status_is_current=False)
        assert told_at_once in {None, expected}
        assert starting_container(pod, ORDER, last, status_is_current=True) == expected
        last = msgspec.structs.replace(record(expected), decided_at=now)
        now += seconds
        if what == "is not created":
            continue
        well = what.startswith("ends") and expected != "main"
        if what != "is killed":
            pod = told(pod, expected, completed=well, ended_at=float(int(now)), started=True)
        anew = what in {"is killed", "ends with the pod"}
        pod = msgspec.structs.replace(pod, in_new_sandbox=anew)
        turn = 0 if anew else turn + well
        now += 1.0  # between the end of a container and the next start


def test_a_status_from_before_the_last_start_is_not_of_a_new_sandbox(pod: Pod) -> None:
    """A watch may be behind: after a reboot it still shows that there is no sandbox when the second
    container has started in it.
    """
    pod = a_pod("train", init("first"), init("second"), "main")
    pod = told(pod, "first", completed=True, ended_at=90.0)
    pod = told(pod, "second", completed=True, ended_at=95.0)
    behind = msgspec.structs.replace(pod, in_new_sandbox=True)
    assert starting_container(behind, ORDER, record("second"), status_is_current=False) is None
    now = told(pod, "second", completed=True, ended_at=101.0)
    assert starting_container(now, ORDER, record("second"), status_is_current=False) == "main"


def test_an_init_container_without_gpu_tells_of_a_new_sandbox_too() -> None:
    """By the time the first with a GPU starts, the kubelet has written that there is a sandbox."""
    pod = a_pod("train", PodContainer("fetch", init("x").kind), init("first"), "main")
    pod = told(told(pod, "fetch", completed=True, ended_at=120.0), "first", completed=True)
    assert (
        starting_container(pod, ("first", "main"), record("main"), status_is_current=False)
        == "first"
    )


async def test_ids_that_an_ended_init_container_leaves_are_nobodys_share() -> None:
    """The kubelet's records keep all three ids of the first container, of which the second one has
    two. The third belongs to no record of the second: its memory would be booked twice.
    """
    place = a_place()
    pod = a_pod(
        "train",
        init("first", 3),
        init("second", 2),
        PodContainer("main", limits={NUMBER: 2}),
        annotations=wants(first=f"{U1} 500", second=f"{U0} 1000", main=f"{U0} 2000"),
    )
    place.book.put(pod)
    for name, count in (("first", 3), ("second", 2), ("main", 2)):
        await place.admit(pod, name, IDS[:count], listed=name == "main")
    await place.start(IDS[:3])
    place.book.put(over(pod, "first"))
    await place.start(IDS[:2])
    for _ in range(2):
        confirm(place)
        assert booked(place) == {U0: 1000}
    after = a_place(carrier=place.carrier)
    after.checkpoint, after.pod_resources = place.checkpoint, place.pod_resources
    after.book.put(over(pod, "first"))
    confirm(after, initial=True)
    assert booked(after) == {U0: 1000}
