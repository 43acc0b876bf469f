"""Binding early: the likeliest pod in Allocate,
and no start before kubelet's records have proven it right.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.allocation.binding_parts import (
    IDS,
    MEMORY,
    NODE,
    NUMBER,
    NumberFamily,
    Place,
    a_pod,
    init,
    wants,
)
from tests.allocation.later_parts import booked
from tests.golden import U0, U1
from vgpu_agent.allocation.candidates import candidates
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.early.binding import WrongPodError
from vgpu_agent.allocation.early.siblings import Siblings, likeliest
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.family import Decision, Question, Remark
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.model import Holding, KubeletRecords, Owner, Share
from vgpu_agent.pods import PodCache, PodContainer


async def test_the_only_candidate_gets_a_complete_answer() -> None:
    """One pod waits: its answer is complete in Allocate, and right at the start."""
    place = Place(late=False)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    answer = await place.admit(pod, "main", IDS[:1])
    assert answer.environment == {"GPU": U0, "MIB": "1000"}
    assert (place.readings, place.fetches) == (0, 0)
    await place.start(IDS[:1])
    assert grant_token(NUMBER, IDS[:1]) in place.carrier.prepared
    (grant,) = place.ledger.grants
    assert (grant.shares, grant.proven) == ((Share(U0, 1000),), True)


@pytest.mark.looptime
async def test_a_pod_of_which_not_all_was_read_is_refused() -> None:
    """A limit that was left out would count as no limit."""
    place = Place(late=False)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    pod = msgspec.structs.replace(pod, has_more_requests=True)
    place.book.replace([pod])
    with pytest.raises(RequestRefusedError, match="names more GPU resources"):
        await place.admit(pod, "main", IDS[:1])
    assert place.ledger.grants == ()


async def test_without_a_candidate_the_words_are_those_that_users_know() -> None:
    """volcano-vgpu:G11 no pending pod: the words of the replaced plugin, after less than a second,
    and nothing is booked.
    """
    place = Place(late=False)
    place.book.replace([])
    began = asyncio.get_running_loop().time()
    with pytest.raises(
        RequestRefusedError,
        match=r"cannot get valid pod: no pending pod on node node-a .* waits for 1 of ",
    ):
        await place.allocator.allocate(NUMBER, IDS[:1])
    assert asyncio.get_running_loop().time() - began <= 1
    assert place.ledger.grants == ()
    assert NUMBER in place.allocator.allocated_at  # so a scheduler's lock is given back


@pytest.mark.looptime
async def test_a_pod_that_the_watch_shows_within_the_wait_is_served() -> None:
    """The kubelet can be a moment quicker than our watch."""
    place = Place(late=False)
    place.book.replace([])
    asyncio.get_running_loop().call_later(
        0.3, place.book.put, a_pod("train", annotations=wants(main=f"{U0} 1000"))
    )
    answer = await place.allocator.allocate(NUMBER, IDS[:1])
    assert answer.environment["GPU"] == U0


async def test_a_wrong_guess_never_starts() -> None:
    """volcano-vgpu:D2 two pods admitted the other way round get each other's answers, and both
    starts are refused with the remedy.
    """
    place = Place(late=False)
    train, serve = (
        a_pod("train", annotations=wants(main=f"{U0} 1000")),
        a_pod("serve", annotations=wants(main=f"{U1} 2000")),
    )
    place.book.put(train)
    place.book.put(serve)
    await place.admit(serve, "main", IDS[:1])
    await place.admit(train, "main", IDS[1:2])
    for ids in (IDS[:1], IDS[1:2]):
        with pytest.raises(WrongPodError, match="delete the pod, so that a new one is created"):
            await place.start(ids)
    assert {(refusal.pod.name, refusal.final) for refusal in place.refusals.current} == {
        ("train", True),
        ("serve", True),
    }
    assert place.allocator.early.wrong_guesses == 2
    assert all(grant.shares == () for grant in place.ledger.grants)
    assert place.carrier.prepared == {}


async def test_the_refusal_names_both_pods() -> None:
    """The user sees for which pod the answer was."""
    place = Place(late=False)
    train, serve = (
        a_pod("train", annotations=wants(main=f"{U0} 1000")),
        a_pod("serve", annotations=wants(main=f"{U1} 2000")),
    )
    place.book.put(train)
    place.book.put(serve)
    await place.admit(serve, "main", IDS[:1])
    with pytest.raises(
        WrongPodError,
        match=r"default/serve, container main: .* made for the container main of default/train",
    ):
        await place.start(IDS[:1])


async def test_equal_shares_are_exchanged() -> None:
    """Two replicas of one Deployment on one GPU: each keeps what it got, and the book says so."""
    place = Place(late=False)
    first, second = (
        a_pod(name, annotations=wants(main=f"{U0} 1000")) for name in ("first", "second")
    )
    place.book.put(first)
    place.book.put(second)
    await place.admit(second, "main", IDS[:1])
    await place.admit(first, "main", IDS[1:2])
    await place.start(IDS[:1])
    await place.start(IDS[1:2])
    assert {grant.ids: grant.decided_for for grant in place.ledger.grants} == {
        IDS[:1]: ("uid-second", "main"),
        IDS[1:2]: ("uid-first", "main"),
    }
    assert all(grant.proven for grant in place.ledger.grants)
    _, provision = place.carrier.prepared[grant_token(NUMBER, IDS[:1])]
    # what the answer mounts is what is made
    assert provision.own_directory == "/own/uid-first_main"
    await place.start(IDS[:1])  # a crash


async def test_without_the_checkpoint_the_files_of_the_answer_are_made_all_the_same() -> None:
    """The answer's mounts must exist, and a restart must find the grant,
    whichever record proved the pod.
    """
    place = Place(late=False)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.checkpoint, place.answers = None, {}
    place.on_server["default", "train"] = pod  # the name alone is no proof (see test_late_identity)
    await place.start(IDS[:1])
    record, provision = place.carrier.prepared[grant_token(NUMBER, IDS[:1])]
    assert (record.owner.pod_uid, record.owner.container, provision.own_directory) == (
        pod.uid,
        "main",
        "/own/uid-train_main",
    )


async def test_an_init_container_waits_until_there_is_room_for_its_whole_pod() -> None:
    """It received a part of what its pod has on a card,
    and shares its ids with a container on another one.

    A pod that is ending still has that card, although the scheduler counts it as gone
    (volcano-vgpu:D17).
    """
    place = Place(late=False)
    ending = a_pod("ending", annotations=wants(main=f"{U0} 40000"))
    gpus = wants(prepare=f"{U0} 3000", main=f"{U1} 100", other=f"{U0} 3000")
    pod = a_pod("train", init("prepare"), "main", "other", annotations=gpus)
    place.book.replace([ending])
    await place.admit(ending, "main", IDS[2:3])
    await place.start(IDS[2:3])
    place.book.put(pod)
    await place.admit(pod, "prepare", IDS[:1], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.admit(pod, "other", IDS[1:2])
    with pytest.raises(CapacityError, match=f"default/train, container main: .*{U0}"):
        await place.start(IDS[:1])
    place.ledger.release(
        next(grant.number for grant in place.ledger.grants if grant.ids == IDS[2:3])
    )
    await place.start(IDS[:1])
    # `other` has not started, and what it will have is what `prepare` works with
    assert booked(place) == {U0: 3000, U1: 100}
    await place.start(IDS[1:2])
    assert booked(place) == {U0: 3000, U1: 100}


async def test_after_a_restart_kubelets_stored_answer_is_the_proof() -> None:
    """A new process has forgotten its guesses:
    the answer in the checkpoint is compared with what the pod should have.
    """
    before = Place(late=False)
    train, serve = (
        a_pod("train", annotations=wants(main=f"{U0} 1000")),
        a_pod("serve", annotations=wants(main=f"{U1} 2000")),
    )
    for pod in (train, serve):
        before.book.put(pod)
    await before.admit(train, "main", IDS[:1])
    await before.admit(serve, "main", IDS[1:2])
    after = Place(late=False, book=before.book)
    after.checkpoint, after.pod_resources, after.answers = (
        before.checkpoint,
        before.pod_resources,
        before.answers,
    )
    await after.start(IDS[:1])
    after.answers["uid-serve", "main", NUMBER] = after.answers["uid-train", "main", NUMBER]
    with pytest.raises(WrongPodError):
        await after.start(IDS[1:2])


async def test_a_container_without_any_stored_answer_does_not_start() -> None:
    """Neither memory nor checkpoint have its answer, so its start is refused."""
    place = Place(late=False)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.allocator.early._answers.given.clear()
    place.answers.clear()
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])


async def test_a_refused_container_keeps_no_room_for_its_life_before() -> None:
    """It ran before the node rebooted, and its pod's status still says so. Another container may
    have by now what it had then.
    """
    place = Place(late=False)
    container = PodContainer("main", limits={NUMBER: 1}, started=True)
    train = a_pod("train", container, annotations=wants(main=f"{U0} 30000"))
    serve = a_pod("serve", annotations=wants(main=f"{U0} 30000"))
    place.book.put(msgspec.structs.replace(train, containers=(a_pod("train").containers[0],)))
    await place.admit(train, "main", IDS[:1])
    place.allocator.early._answers.given.clear()  # of the agent from before the reboot
    place.answers.clear()
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])
    place.book.put(serve)
    await place.admit(serve, "main", IDS[1:2])
    await place.start(IDS[1:2])

    place.book.put(msgspec.structs.replace(train, in_new_sandbox=True))
    holdings = tuple(
        Holding(NUMBER, ids, Owner("main", pod.uid, "default", pod.name))
        for pod, ids in ((train, IDS[:1]), (serve, IDS[1:2]))
    )
    place.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60)
    assert place.ledger.audit() == []
    assert [grant.shares for grant in place.ledger.grants] == [(), (Share(U0, 30000),)]


async def test_every_container_that_has_the_ids_must_have_been_answered_rightly() -> None:
    """Init container first, then the one that takes its ids:
    both answers must be the right ones.
    """
    place = Place(late=False)
    pod = a_pod(
        "train", init("prepare"), "main", annotations=wants(prepare=f"{U0} 1000", main=f"{U0} 1000")
    )
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[:1], listed=False)
    await place.admit(pod, "main", IDS[:1])
    place.answers["uid-train", "prepare", NUMBER] = msgspec.structs.replace(
        place.answers["uid-train", "main", NUMBER], environment={"GPU": U1}
    )
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])


def test_only_pods_that_can_be_meant_are_candidates() -> None:
    """Pending, on this node, not being deleted, and the next container asks for just as many."""
    book = PodCache()
    pods = [
        a_pod("two", number=2),
        a_pod("running", phase="Running"),
        msgspec.structs.replace(a_pod("deleted"), deleting=True),
        msgspec.structs.replace(a_pod("elsewhere"), node="node-b"),
        a_pod("served"),
        a_pod("first", PodContainer("plain"), PodContainer("main", limits={NUMBER: 1})),
        a_pod("started", PodContainer("main", limits={NUMBER: 1}, started=True)),
    ]
    for pod in pods:
        book.put(pod)
    found = candidates(book.pods, {("uid-served", "main")}, NUMBER, count=1, node=NODE)
    assert [candidate.key for candidate in found] == [("uid-first", "main")]


def test_sizes_of_sibling_calls_speak_for_a_candidate() -> None:
    """The kubelet's allocations of a counted resource since the last decision distinguish two pods
    of one number.
    """
    small = a_pod("small", PodContainer("main", limits={NUMBER: 1, MEMORY: 1000}))
    large = a_pod("large", PodContainer("main", limits={NUMBER: 1, MEMORY: 2000}))
    found = candidates([small, large], set(), NUMBER, count=1, node=NODE)
    siblings = Siblings()
    assert likeliest(found, siblings) == found[0]
    siblings.note_allocated(MEMORY, 2000)
    assert likeliest(found, siblings) == found[1]
    siblings.note_decision({NUMBER: 1, MEMORY: 2000}, [MEMORY])
    siblings.note_allocated(MEMORY, 1000)
    assert likeliest(found[:1], siblings) == found[0]


def test_a_sibling_call_of_the_container_before_says_nothing() -> None:
    """The number may come first: the memory call that follows belongs to what was decided."""
    small = a_pod("small", PodContainer("main", limits={NUMBER: 1, MEMORY: 1000}))
    large = a_pod("large", PodContainer("main", limits={NUMBER: 1, MEMORY: 2000}))
    found = candidates([large], set(), NUMBER, count=1, node=NODE)
    siblings = Siblings()
    siblings.note_decision(small.containers[0].limits, [MEMORY])
    siblings.note_allocated(MEMORY, 1000)
    assert siblings.fits(found[0])
    siblings.note_allocated(MEMORY, 500)
    assert not siblings.fits(found[0])


async def test_records_that_name_the_pod_first_do_not_hide_a_wrong_guess() -> None:
    """Verification may run between Allocate and start. The guess stays what it was."""
    place = Place(late=False)
    train, serve = (
        a_pod("train", annotations=wants(main=f"{U0} 1000")),
        a_pod("serve", annotations=wants(main=f"{U1} 2000")),
    )
    place.book.put(train)
    place.book.put(serve)
    await place.admit(serve, "main", IDS[:1])
    holding = Holding(NUMBER, IDS[:1], Owner("main", serve.uid, "default", "serve"))
    place.allocator.confirm(KubeletRecords((holding,)), reservation_seconds=60)
    with pytest.raises(WrongPodError):
        await place.start(IDS[:1])


async def test_an_init_container_that_no_scheduler_decided_for_is_refused() -> None:
    """It and the container behind it would get different shares for the same ids.
    The text names the two remedies.
    """
    place = Place(late=False)
    place.family.by = "the agent, binpack"
    pod = a_pod(
        "train", init("prepare"), "main", annotations=wants(prepare=f"{U0} 1000", main=f"{U0} 1000")
    )
    place.book.replace([pod])
    with pytest.raises(
        RequestRefusedError,
        match=r"needs a scheduler that decides for the pod, or binding\.mode late",
    ):
        await place.allocator.allocate(NUMBER, IDS[:1])
    assert place.ledger.grants == ()


class _VisibleFamily(NumberFamily):
    """Tells its GPU by the variable that the NVIDIA runtime obeys,
    and a region by the one of HAMi-core.
    """

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        own = super().provision(question, shares)
        return Provision(
            Edits(
                {
                    "NVIDIA_VISIBLE_DEVICES": shares[0].device,
                    "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/x",
                }
            ),
            own_directory=own.own_directory,
        )


@pytest.mark.parametrize(
    ("variable", "started", "refused"),
    [
        ("NVIDIA_VISIBLE_DEVICES", False, True),
        ("GPU_CORE_UTILIZATION_POLICY", False, True),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", False, False),
        ("NVIDIA_DRIVER_CAPABILITIES", False, False),
        ("NVIDIA_VISIBLE_DEVICES", True, False),
    ],
)
async def test_a_pod_whose_variable_would_win_is_refused(
    variable: str, *, started: bool, refused: bool
) -> None:
    """The kubelet prefers the pod's value to the answer's.
    A container that has run before an update of the agent goes on.
    """
    place = Place(late=False)
    place.allocator.use_families(Families(pod_families=(_VisibleFamily(),)))
    place.allocator.refresh_offer()
    container = PodContainer(
        "main", limits={NUMBER: 1}, environment=frozenset({variable}), started=started
    )
    pod = a_pod("train", container, annotations=wants(main=f"{U0} 1000"))
    place.book.replace(
        [
            pod
            if not started
            else msgspec.structs.replace(
                pod, containers=(msgspec.structs.replace(container, started=False),)
            )
        ]
    )
    await place.admit(pod, "main", IDS[:1])
    place.book.replace([pod])
    if refused:
        with pytest.raises(
            RequestRefusedError,
            match=(
                rf"the pod sets {variable} for container main itself.*binding.podVariables to allow"
            ),
        ):
            await place.start(IDS[:1])
        assert place.carrier.prepared == {}
    else:
        await place.start(IDS[:1])


async def test_an_answer_stays_an_early_one_when_the_mode_changes_and_no_record_has_it() -> None:
    """The container was told of its GPU in Allocate; a CDI spec that it never heard of would leave
    it without what its answer mounts.
    """
    place = Place(late=False)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    place.on_server["default", "train"] = pod
    await place.admit(pod, "main", IDS[:1])
    place.answers.clear()
    place.checkpoint = None
    place.allocator.use_mode(BindingMode(late=True, by_annotation=False, reason="a test"))
    await place.start(IDS[:1])
    assert place.carrier.specs == {}
    assert list(place.carrier.prepared) == [grant_token(NUMBER, IDS[:1])]


class RemarkingFamily(NumberFamily):
    """A family that remarks on each decision whose it is."""

    def decide(self, question: Question) -> Decision:
        remark = Remark("WishIgnored", f"it is for {question.pod.name}")
        return msgspec.structs.replace(super().decide(question), remarks=(remark,))


def told(place: Place) -> list[tuple[str, str, str]]:
    """The messages to owners since the last look."""
    return [(one.pod.name, one.reason, one.text) for one in place.notices.take()]


@pytest.mark.parametrize("late", [True, False])
async def test_remarks_of_a_decision_are_told_once_and_only_when_the_container_starts(
    late: bool,
) -> None:
    """In early mode a decision in Allocate may be another pod's, so nothing is told before its
    start is proven.
    """
    place = Place(late=late, family=RemarkingFamily())
    place.book.replace([a_pod("train", annotations=wants(main=f"{U0} 1000"))])
    await place.admit(place.book.pods[0], "main", IDS[:1])
    assert told(place) == []
    await place.start(IDS[:1])
    assert told(place) == [("train", "WishIgnored", "container main: it is for train")]
    await place.start(IDS[:1])
    assert told(place) == []


async def test_remarks_go_with_an_exchanged_answer() -> None:
    """Each owner reads what was decided for his own pod, and no other's after a wrong guess."""
    place = Place(late=False, family=RemarkingFamily())
    train, serve = (
        a_pod(name, annotations=wants(main=f"{U0} 1000")) for name in ("train", "serve")
    )
    place.book.replace([train, serve])
    await place.admit(serve, "main", IDS[:1])
    await place.admit(train, "main", IDS[1:2])
    await place.start(IDS[:1])
    await place.start(IDS[1:2])
    assert [(name, text) for name, _, text in told(place)] == [
        ("serve", "container main: it is for serve"),
        ("train", "container main: it is for train"),
    ]
