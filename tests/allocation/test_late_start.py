"""Binding late: a name in Allocate, and everything else
when the kubelet's own records name the owner of the ids.
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
    MemoryCarrier,
    Place,
    SlowPlace,
    a_pod,
    init,
    wants,
)
from tests.golden import U0, U1
from vgpu_agent.allocation.carrier import cdi_name, grant_token
from vgpu_agent.allocation.identification import START_SECONDS, NotProvenError
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.errors import CapacityError, HostFileError, RequestRefusedError, UnknownDeviceError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import GrantState, Holding, KubeletRecords, Owner, Share
from vgpu_agent.pods import DesiredPod, Pod, PodContainer


def given(place: Place, ids: tuple[str, ...]) -> dict[str, str]:
    """The environment in the spec of these ids."""
    return dict(place.carrier.specs[grant_token(NUMBER, ids)][1].edits.environment)


async def test_allocate_answers_a_name_and_nothing_else() -> None:
    """volcano-vgpu:D12 no pod, no API request, no record is looked at in Allocate.
    The ids are booked.
    """
    place = Place()
    answer = await place.allocator.allocate(NUMBER, IDS[:1])
    assert answer == Edits(cdi_names=(cdi_name(grant_token(NUMBER, IDS[:1])),))
    assert (place.readings, place.fetches) == (0, 0)
    (grant,) = place.ledger.grants
    assert (grant.state, grant.shares) == (GrantState.RESERVED, ())


async def test_an_old_kubelet_gets_the_name_as_an_annotation() -> None:
    """Before 1.29 the answer has no field for CDI names,
    and the runtime reads them from annotations.
    """
    place = Place()
    place.allocator.use_mode(BindingMode(late=True, by_annotation=True, reason="old"))
    answer = await place.allocator.allocate(NUMBER, IDS[:1])
    token = grant_token(NUMBER, IDS[:1])
    assert answer == Edits(annotations={f"cdi.k8s.io/vgpu-agent_{token}": cdi_name(token)})


async def test_a_counted_resource_answers_nothing_and_books_nothing() -> None:
    """volcano-vgpu:G9 ids that are only there to be counted cost one empty answer."""
    place = Place()
    assert (
        await place.allocator.allocate(MEMORY, [f"{U0}-memory-{place}" for place in range(3000)])
        == Edits()
    )
    assert place.ledger.grants == ()
    await place.allocator.pre_start(MEMORY, [f"{U0}-memory-0"])


def test_ids_that_decide_nothing_are_recommended_as_they_come() -> None:
    """volcano-vgpu:D10 the kubelet is asked not to call. A caller gets the required ids and then
    the first, and no warning is written.
    """
    place = Place()
    available = [*IDS[:3], f"{U1}-0"]
    assert place.allocator.preferred(NUMBER, available, [IDS[1]], 2) == [IDS[1], IDS[0]]
    assert place.allocator.preferred(MEMORY, [f"{U0}-memory-0"], [], 1) == [f"{U0}-memory-0"]
    assert place.events("preferred.simple") == []


async def test_equal_pods_admitted_in_any_order_get_their_own_shares() -> None:
    """volcano-vgpu:D2 two pods of one size in one second:
    the records identify each, whatever the order of admission and start.
    """
    place = Place()
    train = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    serve = a_pod("serve", annotations=wants(main=f"{U1} 2000"))
    place.book.replace([train, serve])
    await place.admit(serve, "main", IDS[:1])
    await place.admit(train, "main", IDS[1:2])
    await asyncio.gather(place.start(IDS[1:2]), place.start(IDS[:1]))
    assert given(place, IDS[1:2]) == {"GPU": U0, "MIB": "1000"}
    assert given(place, IDS[:1]) == {"GPU": U1, "MIB": "2000"}


async def test_the_evidence_is_kept_with_the_grant() -> None:
    """The grant and one log line name the evidence and the decider,
    under the token of the Allocate.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:1])
    (grant,) = place.ledger.grants
    assert grant.state is GrantState.IDENTIFIED
    assert grant.evidence == (
        "checkpoint: pod uid-train container main",
        "pod-resources: default/train container main",
        "decided by the test",
    )
    (bound,), (reserved,) = place.events("start.bound"), place.events("allocate.reserved")
    assert bound["token"] == reserved["token"]
    assert bound["pod"] == "default/train"


async def test_a_running_pod_is_never_taken_for_a_new_one() -> None:
    """volcano-vgpu:D4 what was written or not onto a pod that runs does not matter:
    only the records do.
    """
    place = Place()
    running = a_pod("train", annotations=wants(main=f"{U0} 1000"), phase="Running")
    new = a_pod("serve", annotations=wants(main=f"{U1} 2000"))
    place.book.replace([running, new])
    await place.admit(running, "main", IDS[:1])
    await place.start(IDS[:1])
    await place.admit(new, "main", IDS[1:2])
    await place.start(IDS[1:2])
    assert given(place, IDS[1:2])["GPU"] == U1
    assert given(place, IDS[:1])["GPU"] == U0


async def test_a_container_that_starts_again_keeps_what_it_has() -> None:
    """A crash loop decides once: even when the annotation has changed since,
    a running pod's GPU does not.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:1])
    place.book.put(msgspec.structs.replace(pod, annotations=wants(main=f"{U1} 9")))
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U0, "MIB": "1000"}
    assert len(place.ledger.grants) == 1


async def test_a_restarted_agent_remembers_by_the_spec() -> None:
    """After a restart the record beside the spec says what was decided,
    although the pod does not any more.
    """
    carrier = MemoryCarrier()
    before = Place(carrier=carrier)
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"))
    before.book.replace([pod])
    await before.admit(pod, "main", IDS[:1])
    await before.start(IDS[:1])

    after = Place(carrier=carrier)
    after.checkpoint, after.pod_resources = before.checkpoint, before.pod_resources
    holdings = (Holding(NUMBER, IDS[:1], Owner("main", pod.uid, "default", "train")),)
    after.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60, initial=True)
    (grant,) = after.ledger.grants
    assert (grant.shares, grant.state) == ((Share(U0, 1000),), GrantState.IDENTIFIED)
    after.book.replace([msgspec.structs.replace(pod, annotations={})])
    await after.start(IDS[:1])
    assert given(after, IDS[:1]) == {"GPU": U0, "MIB": "1000"}


async def test_an_init_container_and_the_one_behind_it_share_a_name_and_a_grant() -> None:
    """The kubelet hands the ids on inside the pod.
    The container that they are for decides, and nothing is booked twice.
    """
    place = Place()
    pod = a_pod("train", init("prepare"), "main", annotations=wants(main=f"{U0} 30000"))
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[:1], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:1])
    await place.start(IDS[:1])
    (grant,) = place.ledger.grants
    assert grant.decided_for == (pod.uid, "main")
    assert place.ledger.audit() == []


async def test_a_larger_init_container_makes_room_for_what_comes_after() -> None:
    """Its ids go on to the containers that start next, and so does what was booked for it."""
    place = Place()
    pod = a_pod(
        "train",
        init("prepare", 2),
        "main",
        "side",
        annotations=wants(prepare=f"{U0} 40000,{U1} 40000", main=f"{U0} 40000", side=f"{U1} 40000"),
    )
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.admit(pod, "side", IDS[1:2])
    await place.start(IDS[:2])
    assert given(place, IDS[:2])["GPU"] == f"{U0},{U1}"
    await place.start(IDS[:1])
    await place.start(IDS[1:2])
    assert {grant.decided_for: grant.shares for grant in place.ledger.grants} == {
        ("uid-train", "main"): (Share(U0, 40000),),
        ("uid-train", "side"): (Share(U1, 40000),),
    }
    # The sandbox is made anew: everything starts again from the first init container, and gets the
    # same.
    await place.start(IDS[:2])
    await place.start(IDS[:1])
    await place.start(IDS[1:2])
    assert place.ledger.audit() == []


async def test_verification_between_init_and_main_disturbs_nothing() -> None:
    """The kubelet's records list the ids under both. That is no drift."""
    place = Place()
    pod = a_pod(
        "train",
        init("prepare", 2),
        "main",
        annotations=wants(prepare=f"{U0} 1,{U1} 1", main=f"{U0} 1000"),
    )
    place.book.replace([pod])
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    holdings = (
        Holding(NUMBER, IDS[:1], Owner("main", pod.uid, "default", "train")),
        Holding(NUMBER, IDS[1:2], Owner("prepare", pod.uid, "default", "train")),
    )
    assert place.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60) == []
    await place.start(IDS[:2])
    assert place.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60) == []
    await place.start(IDS[:1])
    assert place.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60) == []
    assert [grant.shares for grant in place.ledger.grants if grant.decided_for] == [
        (Share(U0, 1000),)
    ]


async def test_what_cannot_be_granted_is_refused_with_pod_and_reason_and_asked_again() -> None:
    """The text is what the user sees in the pod's status.
    Once it is put right, the next try starts.
    """
    place = Place()
    pod = a_pod("train")
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    with pytest.raises(
        RequestRefusedError, match=r"^pod default/train has no annotation example.com/main"
    ):
        await place.start(IDS[:1])
    (refusal,) = place.refusals.current
    assert (refusal.pod.name, refusal.container, refusal.final) == ("train", "main", False)
    place.book.put(msgspec.structs.replace(pod, annotations=wants(main=f"{U0} 1")))
    await place.start(IDS[:1])
    assert place.refusals.current == ()


async def test_a_claim_to_more_than_there_is_gets_nothing() -> None:
    """A forged annotation cannot take more than the ledger has, nor another node's GPU."""
    place = Place()
    greedy, strange = (
        a_pod("greedy", annotations=wants(main=f"{U0} 40961")),
        a_pod("strange", annotations=wants(main="GPU-elsewhere 1")),
    )
    place.book.replace([greedy, strange])
    await place.admit(greedy, "main", IDS[:1])
    await place.admit(strange, "main", IDS[1:2])
    with pytest.raises(CapacityError, match=r"0 MiB booked \+ 40961 wanted, of 40960"):
        await place.start(IDS[:1])
    with pytest.raises(UnknownDeviceError, match="does not offer GPU-elsewhere"):
        await place.start(IDS[1:2])
    assert [grant.shares for grant in place.ledger.grants] == [(), ()]


async def _full(place: Place) -> Pod:
    """Start a pod that takes nearly all of a GPU, and admit a second one for the same GPU, with the
    id ``IDS[1]``. Return the first.
    """
    first, second = (
        a_pod(name, annotations=wants(main=f"{U0} 40000")) for name in ("first", "second")
    )
    place.book.replace([first, second])
    await place.admit(first, "main", IDS[:1])
    await place.start(IDS[:1])
    await place.admit(second, "main", IDS[1:2])
    return first


@pytest.mark.parametrize("can_get", [False, True])
async def test_an_ended_pod_makes_room_at_once_when_somebody_needs_it(can_get: bool) -> None:
    """Its grant goes as soon as kubelet does not list it and the API server has ended it, without
    waiting for two verifications.

    Its absence from an answer about the starting pod alone is not enough.
    """
    place = Place()
    place.can_get = can_get
    ended = await _full(place)
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    place.book.put(msgspec.structs.replace(ended, phase="Succeeded"))
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])  # kubelet lists it
    place.book.put(ended)
    place.forget(ended)
    with pytest.raises(CapacityError):
        # kubelet has forgotten it, but the API server says that it is still there
        await place.start(IDS[1:2])
    place.book.put(msgspec.structs.replace(ended, phase="Succeeded"))
    await place.start(IDS[1:2])
    assert given(place, IDS[1:2])["GPU"] == U0


@pytest.mark.looptime
async def test_a_start_without_room_is_answered_before_kubelet_gives_up() -> None:
    """Asking which pods have ended counts against the time that a start may take."""
    place = SlowPlace()
    place.can_get = True
    await _full(place)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(
        NotProvenError,
        match=r"second, container main: no room, and the kubelet has not reported within 20 s",
    ):
        await place.start(IDS[1:2])
    assert loop.time() - began == pytest.approx(START_SECONDS, abs=0.1)


async def test_a_start_without_room_and_without_the_kubelets_list_says_so() -> None:
    """An ended pod may still hold the room, so the start is not refused for good."""
    place = Place()
    await _full(place)
    place.pod_resources = None
    with pytest.raises(
        NotProvenError, match=r"no room, and the kubelet has not reported \(.*\) which"
    ):
        await place.start(IDS[1:2])


async def test_a_full_disk_refuses_the_start_and_names_itself() -> None:
    """No spec, no start. The next try with room succeeds."""
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    place.carrier.trouble = "/var/run/cdi: no space left on device; free some"
    with pytest.raises(HostFileError, match="no space left"):
        await place.start(IDS[:1])
    place.carrier.trouble = ""
    await place.start(IDS[:1])
    assert place.ledger.audit() == []


async def test_ids_that_change_hands_before_a_start_belong_to_the_new_pod() -> None:
    """kubectl delete between Allocate and start:
    the ids go to the next pod, and the name behind them too.
    """
    place = Place()
    gone, new = (
        a_pod("gone", annotations=wants(main=f"{U0} 1")),
        a_pod("new", annotations=wants(main=f"{U1} 2")),
    )
    place.book.replace([gone])
    await place.admit(gone, "main", IDS[:1])
    place.forget(gone)
    place.book.replace([new])
    await place.admit(new, "main", IDS[:1])
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U1, "MIB": "2"}
    assert len(place.ledger.grants) == 1


async def test_a_static_pod_is_found_by_the_hash_of_its_file() -> None:
    """The kubelet knows it under the hash, the API server under the mirror's UID."""
    place = Place()
    mirror = {"kubernetes.io/config.mirror": "hash", "kubernetes.io/config.hash": "hash"}
    pod = a_pod("static", uid="mirrored", annotations={**wants(main=f"{U0} 1"), **mirror})
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:1])
    assert given(place, IDS[:1])["GPU"] == U0


async def test_the_desired_state_of_pods_is_what_was_done() -> None:
    """Pods get their annotations once they are proven,
    also when they ended before anything was written.
    """
    place = Place()
    pod = a_pod("train", annotations=wants(main=f"{U0} 1"))
    place.book.replace([pod])
    await place.admit(pod, "main", IDS[:1])
    assert place.allocator.desired_pods() == {}
    await place.start(IDS[:1])
    place.ledger.release(place.ledger.grants[0].number)
    assert place.allocator.desired_pods() == {"uid-train": DesiredPod({"example.com/done": "main"})}
    place.book.replace([])
    place.allocator.confirm(KubeletRecords(()), reservation_seconds=60)
    assert place.allocator.desired_pods() == {}


async def test_a_lock_from_before_the_start_is_given_back() -> None:
    """volcano-vgpu:D19: an agent that was killed between an Allocate
    and the Node's write takes back what the next one finds.
    """
    place = Place()
    assert place.allocator.allocated_at == {}
    place.allocator.confirm(KubeletRecords(()), reservation_seconds=60, initial=True)
    assert place.allocator.allocated_at.keys() >= {NUMBER}


async def test_a_node_that_has_not_been_read_serves_nobody_yet() -> None:
    """The way in which grants reach containers is not known yet, so any answer might be wrong."""
    place = Place()
    place.allocator.use_mode(None)
    with pytest.raises(RequestRefusedError, match="Node object has not been read yet"):
        await place.allocator.allocate(NUMBER, IDS[:1])


async def test_a_rebooted_node_gets_its_specs_back() -> None:
    """The directory is empty, the records and pods are there:
    what late grants need is delivered again.
    """
    place = Place()
    pod = msgspec.structs.replace(
        a_pod("train", annotations=wants(main=f"{U0} 1000"), phase="Running"),
        containers=(PodContainer("main", limits={NUMBER: 1}, started=True),),
    )
    place.book.replace([pod])
    holdings = (Holding(NUMBER, IDS[:1], Owner("main", pod.uid, "default", "train")),)
    place.allocator.confirm(KubeletRecords(holdings), reservation_seconds=60, initial=True)
    ((record, provision),) = place.allocator.late_start.deliveries()
    assert record.token == grant_token(NUMBER, IDS[:1])
    assert provision.edits.environment == {"GPU": U0, "MIB": "1000"}
    assert record.owner == Owner("main", pod.uid, "default", "train")
    assert place.book.pods[0].node == NODE


async def test_what_is_left_of_a_grants_ids_has_a_name_of_its_own() -> None:
    """A main container takes one of the two ids of the init container before it. A spec that stands
    under the name of the other id for another pod's container must go.
    """
    place = Place()
    pod = a_pod("train", init("prepare", 2), "main", annotations=wants(prepare=f"{U0} 1"))
    place.book.put(pod)
    await place.admit(pod, "prepare", IDS[:2])
    await place.start(IDS[:2])
    (record,) = place.carrier.records
    foreign_records = place.allocator.late_start.foreign_records
    assert not foreign_records([record])
    await place.admit(pod, "main", IDS[:1])
    owner = msgspec.structs.replace(record.owner, pod_uid="uid-gone")
    for left, is_foreign in ((IDS[1:2], True), (IDS[:2], False)):
        before = msgspec.structs.replace(record, token=grant_token(NUMBER, left), owner=owner)
        assert foreign_records([before]) == ([before] if is_foreign else [])
