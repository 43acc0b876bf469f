"""Times at which the kubelet's records are read,
and the reaction to a kubelet that has just come back; on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.agent.offers.fake_server import FakeServer
from tests.allocation.without_pods import without_pods
from tests.golden import U0, U1, golden_inventory
from tests.patience import eventually
from vgpu_agent.agent.records import verification
from vgpu_agent.agent.records.pod_ends import PodEnds
from vgpu_agent.agent.records.verification import Verification
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Holding, KubeletRecords, Owner
from vgpu_agent.pods import ContainerKind, Pod, PodCache, PodContainer
from vgpu_agent.status import KubeletStatus

GPU = "nvidia.com/gpu"
HELD = KubeletRecords((Holding(GPU, (U0,), Owner("main", "uid", "default", "train")),))
TRAIN, SERVE = (
    Pod(f"0e6e9a8c-1111-4222-8333-00000000000{number}", "default", f"pod-{number}")
    for number in (1, 2)
)


def held(*pods: Pod) -> KubeletRecords:
    """Kubelet records in which each pod has a GPU, the first U0."""
    return KubeletRecords(
        tuple(
            Holding(GPU, (id_,), Owner("main", pod.uid, pod.namespace, pod.name))
            for id_, pod in zip((U0, U1), pods, strict=False)
        )
    )


class Records:
    """The kubelet's records as the test sets them, and when they were read (loop time)."""

    def __init__(self) -> None:
        self.now = KubeletRecords()
        self.read_at: list[float] = []
        self.lists = 0  # how often pod-resources was asked
        self.seconds = 0.0  # of a reading

    async def read(
        self, pod_resources: PodResources | None, *_: object, is_wanted: object
    ) -> KubeletRecords:
        """A stand-in for `read_records`, which has tests of its own."""
        del is_wanted
        self.lists += pod_resources is not None
        self.read_at.append(round(asyncio.get_running_loop().time(), 3))
        await asyncio.sleep(self.seconds)
        return self.now


class Parts:
    """A verification over the golden node."""

    def __init__(self, records: Records, kubelet_age_seconds: float = 0.0) -> None:
        self.records = records
        self.servers: list[FakeServer] = []
        self.book = PodCache(self._clock)
        self.ledger, self.journal, self.kubelet = (
            Ledger(clock=self._clock),
            Journal(),
            KubeletStatus(),
        )
        self.allocator = Allocator(
            without_pods(
                ledger=self.ledger,
                families=Families((NvidiaFamily(NvidiaOptions()),)),
                inventory=golden_inventory,
                journal=self.journal,
            )
        )
        self.allocator.refresh_offer()
        self.allocator.confirm(KubeletRecords(entries=()), reservation_seconds=60, initial=True)
        self.verification = Verification(
            allocator=self.allocator,
            ledger=self.ledger,
            kubelet_settings=Kubelet(),
            kubelet_status=self.kubelet,
            pod_resources=PodResources(Kubelet().pod_resources_socket, timeout_seconds=1),
            pod_cache=self.book,
            journal=self.journal,
            servers=lambda: self.servers,
            kubelet_age_seconds=lambda: kubelet_age_seconds,
            clock=self._clock,
        )

    async def another(self) -> None:
        """Book an id for one more pod; the one that had it is gone."""
        for grant in self.ledger.grants:
            self.ledger.release(grant.number)
        await self.allocator.allocate(GPU, [U0])

    @staticmethod
    def _clock() -> float:
        return 1000.0 + asyncio.get_running_loop().time()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """The kubelet's records, in the place where the verification reads them."""
    records = Records()
    monkeypatch.setattr(verification, "read_records", records.read)
    return records


@contextlib.asynccontextmanager
async def verifying(records: Records) -> AsyncIterator[Parts]:
    """The parts, with the loop running in the background;
    begun inside the test, where time is virtual.
    """
    parts = Parts(records)
    task = asyncio.ensure_future(parts.verification.run(lambda: None))
    try:
        yield parts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_when_nothing_happens_the_records_are_read_every_half_minute(
    records: Records,
) -> None:
    """pod-resources is left alone: once soon after the start, then every 30 s."""
    async with verifying(records):
        await asyncio.sleep(95)
        assert records.read_at == [1, 31, 61, 91]


@pytest.mark.looptime
async def test_an_allocate_is_followed_by_a_reading_a_second_later(records: Records) -> None:
    """The owner is known soon, and then the usual pace returns."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        records.now = HELD
        await asyncio.sleep(20)
        assert records.read_at == [1, 6]
        assert parts.ledger.grants[0].owner == HELD.holdings[0].owner


@pytest.mark.looptime
async def test_a_burst_of_pods_is_verified_when_it_is_over(records: Records) -> None:
    """A reading slows down starts that are under way, so it waits until bookings pause for a
    second; but for ten seconds at most.
    """
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        for _ in range(5):
            await parts.another()
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        assert records.read_at == [1, 8]
        await asyncio.sleep(100)  # until no pod is awaited any more
        del records.read_at[:]
        began = asyncio.get_running_loop().time()
        for _ in range(30):
            await parts.another()
            await asyncio.sleep(0.5)
        await asyncio.sleep(2)
        assert [round(at - began) for at in records.read_at] == [10, 16]


@pytest.mark.looptime
async def test_an_admission_that_failed_is_asked_after_less_and_less_often_until_it_expires(
    records: Records,
) -> None:
    """1, 2, 4, 8… s, and after ``RESERVATION_SECONDS`` the ids are free."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        await asyncio.sleep(100)
        pauses = [later - earlier for earlier, later in itertools.pairwise(records.read_at[1:])]
        assert pauses[:5] == [2, 4, 8, 16, 30]
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_an_admission_that_failed_delays_nobody_else(records: Records) -> None:
    """While one reservation is waited for in vain,
    the next pod is still named a second after its Allocate.
    """
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        await asyncio.sleep(40)
        await parts.allocator.allocate(GPU, [U1])
        records.now = KubeletRecords(
            (Holding(GPU, (U1,), Owner("main", "uid", "default", "train")),)
        )
        await asyncio.sleep(1.5)
        assert [grant.owner and grant.owner.pod for grant in parts.ledger.grants] == [None, "train"]


@pytest.mark.looptime
async def test_what_is_shown_as_drift_is_the_drift(records: Records) -> None:
    """A pod that ended in the same pass is the normal course,
    and not what an operator should look into.
    """
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        records.now = KubeletRecords()
        await asyncio.sleep(30)
        records.now = KubeletRecords(
            (Holding(GPU, (U1,), Owner("main", "other", "default", "serve")),)
        )
        await asyncio.sleep(3)
        assert [entry.event for entry in parts.journal.entries][-2:] == [
            "ledger.adopted",
            "ledger.released",
        ]
        assert [text.partition(":")[0] for text in parts.verification.drift_last] == [
            "ledger.adopted"
        ]


@pytest.mark.looptime
async def test_a_pod_that_ended_is_confirmed_soon_after_it_was_missed(records: Records) -> None:
    """The second look does not wait half a minute."""
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        assert len(parts.ledger.grants) == 1
        records.now = KubeletRecords()
        await asyncio.sleep(30)
        assert parts.ledger.in_doubt
        await asyncio.sleep(2)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_a_kubelet_that_has_just_come_back_takes_nothing_away(records: Records) -> None:
    """It lists no pods until it has received them again; grants stay as reservations do."""
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        records.now = KubeletRecords()
        parts.kubelet.restarts_seen += 1
        await asyncio.sleep(60)
        assert len(parts.ledger.grants) == 1
        await asyncio.sleep(65 + 30)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_the_rebuild_at_start_is_no_drift(records: Records) -> None:
    """Grants in the kubelet's records at start are booked and not counted as drift.
    Later ones are counted.
    """
    async with verifying(records) as parts:
        records.now = HELD
        await parts.verification.rebuild()
        assert (len(parts.ledger.grants), parts.verification.drift_total) == (1, 0)
        parts.ledger.release(parts.ledger.grants[0].number)
        await asyncio.sleep(2)
        assert parts.verification.drift_total == 1
        assert "did not know" in parts.verification.drift_last[0]


@pytest.mark.looptime
async def test_ids_that_change_pods_before_a_take_over_are_no_drift(records: Records) -> None:
    """An agent that takes a node over reads the records twice before it serves, and its
    predecessor goes on granting. An update of a busy node would raise the alert on drift.
    """
    parts = Parts(records)
    for pod in (TRAIN, SERVE):
        records.now = held(pod)
        await parts.verification.rebuild()
    (grant,) = parts.ledger.grants
    assert (grant.owner and grant.owner.pod, parts.verification.drift_total) == ("pod-2", 0)


@pytest.mark.looptime
async def test_ids_that_change_pods_while_the_agent_serves_are_drift(records: Records) -> None:
    """Also when it is a rebuild that notices it, for a resource that is offered from now on."""
    async with verifying(records) as parts:
        await asyncio.sleep(0)
        for pod in (TRAIN, SERVE):
            records.now = held(pod)
            await parts.verification.rebuild()
        assert parts.verification.drift_total == 1


def from_checkpoint(*entries: Holding) -> KubeletRecords:
    """The records as read without pod-resources."""
    return KubeletRecords(entries, complete=False, entries=entries)


@pytest.mark.looptime
async def test_after_a_hand_over_the_checkpoint_alone_is_read(records: Records) -> None:
    """A List would make the kubelet forget the ids of a call that waits (kubelet §7). A pod that
    the watch has not shown yet is one that the other agent has served in the last moment. What
    ended pods left in the file is not adopted, and what is no longer there is left to a List.
    """
    parts = Parts(records)
    parts.book.replace([TRAIN])
    records.now = held(TRAIN)
    await parts.verification.rebuild()
    (before,) = parts.ledger.grants
    records.lists = 0
    parts.book.replace([TRAIN, msgspec.structs.replace(SERVE, phase="Succeeded")])
    records.now = from_checkpoint(*checkpointed(TRAIN, SERVE))
    assert await parts.verification.catch_up()
    assert parts.ledger.grants == (before,)
    parts.book.replace([TRAIN])
    assert await parts.verification.catch_up()
    assert {grant.ids: grant.owner and grant.owner.pod_uid for grant in parts.ledger.grants} == {
        (U0,): TRAIN.uid,
        (U1,): SERVE.uid,
    }
    records.now = from_checkpoint()
    assert await parts.verification.catch_up()
    assert len(parts.ledger.grants) == 2
    assert records.lists == 0
    assert not parts.verification.drift_total


@pytest.mark.looptime
async def test_after_a_hand_over_what_an_earlier_pod_left_in_the_checkpoint_is_not_adopted(
    records: Records,
) -> None:
    """A list has shown before that no pod has it any more, which the watch may not tell."""
    parts = Parts(records, kubelet_age_seconds=3600)
    parts.book.replace([TRAIN])
    records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
    await parts.verification.rebuild()
    records.now = from_checkpoint(*checkpointed(TRAIN, SERVE))
    assert await parts.verification.catch_up()
    assert [grant.ids for grant in parts.ledger.grants] == [(U0,)]


@pytest.mark.looptime
async def test_a_pod_admitted_between_the_list_and_the_file_is_adopted_after_a_hand_over(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the file alone, like what an ended pod left there; but it was not there before."""
    parts = Parts(records, kubelet_age_seconds=3600)
    parts.book.replace([TRAIN])
    seen = [
        from_checkpoint(*checkpointed(TRAIN)),
        msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE)),
        from_checkpoint(*checkpointed(TRAIN, SERVE)),
    ]

    async def read(*_: object, is_wanted: object) -> KubeletRecords:
        del is_wanted
        return seen.pop(0)

    monkeypatch.setattr(verification, "read_records", read)
    await parts.verification.rebuild()
    assert [grant.ids for grant in parts.ledger.grants] == [(U0,)]
    assert await parts.verification.catch_up()
    assert [grant.ids for grant in parts.ledger.grants] == [(U0,), (U1,)]


@pytest.mark.looptime
@pytest.mark.parametrize("ids_of_init", [(U0,), (U0, U1)], ids=["the same", "more"])
async def test_after_a_hand_over_an_init_container_takes_nothing_from_the_one_that_runs(
    records: Records, ids_of_init: tuple[str, ...]
) -> None:
    """pod-resources hides it, and the checkpoint shows it; both have the same ids."""
    parts = Parts(records)
    pod = msgspec.structs.replace(
        TRAIN,
        containers=(
            PodContainer("a-init", ContainerKind.INIT),
            PodContainer("main"),
        ),
    )
    parts.book.replace([pod])
    init = Holding(GPU, ids_of_init, Owner("a-init", pod.uid))
    (main,) = checkpointed(pod)
    for known in (True, False):
        if known:
            records.now = held(pod)
            await parts.verification.rebuild()
        else:
            for grant in parts.ledger.grants:
                parts.ledger.release(grant.number)
        records.now = from_checkpoint(init, main)
        assert await parts.verification.catch_up()
        owners = {grant.owner.container: grant.ids for grant in parts.ledger.grants if grant.owner}
        assert owners["main"] == (U0,)
        assert owners.get("a-init", (U1,)) == (U1,)


@pytest.mark.looptime
async def test_after_a_hand_over_no_owner_changes_within_a_pod_that_the_watch_has_not_shown(
    records: Records,
) -> None:
    """Nothing tells then which of its containers is an init container."""
    parts = Parts(records)
    records.now = held(TRAIN)
    await parts.verification.rebuild()
    before = parts.ledger.grants
    init = Holding(GPU, (U0,), Owner("a-init", TRAIN.uid))
    records.now = from_checkpoint(init, *checkpointed(TRAIN))
    assert await parts.verification.catch_up()
    assert parts.ledger.grants == before


@pytest.mark.looptime
async def test_after_a_hand_over_an_ended_pods_entry_takes_nothing_from_a_live_ones(
    records: Records,
) -> None:
    """The file may name two pods for an id (kubelet §7)."""
    parts = Parts(records)
    parts.book.replace([msgspec.structs.replace(TRAIN, phase="Failed"), SERVE])
    records.now = from_checkpoint(
        Holding(GPU, (U0, U1), Owner("main", TRAIN.uid)),
        Holding(GPU, (U0,), Owner("main", SERVE.uid)),
    )
    assert await parts.verification.catch_up()
    (grant,) = parts.ledger.grants
    assert (grant.ids, grant.owner) == ((U0,), Owner("main", SERVE.uid, "default", SERVE.name))


@pytest.mark.looptime
async def test_a_checkpoint_that_cannot_be_read_after_a_hand_over_is_said(
    records: Records,
) -> None:
    """Then the caller lists pod-resources all the same."""
    parts = Parts(records)
    records.now = KubeletRecords(complete=False, trouble="an unknown format")
    assert not await parts.verification.catch_up()
    assert parts.kubelet.records_trouble == "an unknown format"


@pytest.mark.looptime
@pytest.mark.parametrize(("busy_seconds", "waits_seconds"), [(0.4, 0.4), (math.inf, 1.0)])
async def test_a_reading_waits_a_moment_for_calls_that_are_under_way(
    records: Records, busy_seconds: float, waits_seconds: float
) -> None:
    """The kubelet forgets their ids if it is asked meanwhile (kubelet §7)."""
    async with verifying(records) as parts:
        await asyncio.sleep(20)
        last, loop = records.read_at[-1], asyncio.get_running_loop()
        parts.allocator.ready.clear()
        call = asyncio.ensure_future(parts.allocator.allocate(GPU, [U0]))
        if busy_seconds < math.inf:
            due = last + verification.VERIFY_SECONDS - loop.time()
            loop.call_later(due + busy_seconds, parts.allocator.ready.set)
        await asyncio.sleep(verification.VERIFY_SECONDS)
        # the next reading after that one follows a second after the booking
        assert verification.VERIFY_SECONDS + waits_seconds in {at - last for at in records.read_at}
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.looptime
async def test_trouble_with_the_records_is_said_once(records: Records) -> None:
    """An hour without pod-resources is one line, not a hundred and twenty."""
    async with verifying(records) as parts:
        records.now = KubeletRecords(complete=False, trouble="no socket")
        await asyncio.sleep(3600)
        assert [entry.event for entry in parts.journal.entries] == ["kubelet.records_incomplete"]
        assert parts.kubelet.records_trouble == "no socket"
        assert parts.verification.verified_at == 0.0


@pytest.fixture
def allocatable(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the times at which the kubelet was asked what can be allocated.
    It answers that nothing can.
    """
    asked_at: list[float] = []

    async def nothing(*_: object) -> dict[str, frozenset[str]]:
        asked_at.append(round(asyncio.get_running_loop().time(), 3))
        return {}

    monkeypatch.setattr(PodResources, "allocatable", nothing)
    return asked_at


@pytest.mark.looptime
async def test_ids_that_kubelet_does_not_list_are_looked_at_again_soon_and_registered_again(
    records: Records, allocatable: list[float]
) -> None:
    """A second look 2 s after the first, one new registration, then the usual pace:
    never more calls than passes.
    """
    async with verifying(records) as parts:
        parts.servers = [FakeServer()]
        await asyncio.sleep(30)
        assert allocatable == [1, 3]
        assert len(parts.servers[0].again) == 1
        assert set(allocatable) <= set(records.read_at)


@pytest.mark.looptime
async def test_a_silent_pod_resources_is_not_asked_a_second_question(
    records: Records, allocatable: list[float]
) -> None:
    """The pass whose first call failed makes no second one, so that a timeout costs one."""
    async with verifying(records) as parts:
        parts.servers = [FakeServer()]
        records.now = KubeletRecords(complete=False, trouble="no socket")
        await asyncio.sleep(60)
        assert allocatable == []


@contextlib.asynccontextmanager
async def holding(records: Records, *pods: Pod) -> AsyncIterator[Parts]:
    """A verification that has found each pod with a GPU, in kubelet's records and in the watch;
    now is second 5.
    """
    async with verifying(records) as parts:
        parts.book.replace(pods)
        records.now = held(*pods)
        await asyncio.sleep(5)
        assert len(parts.ledger.grants) == len(pods)
        yield parts


def holders(parts: Parts) -> list[str]:
    """The pods that the ledger has something for."""
    return [grant.owner.pod for grant in parts.ledger.grants if grant.owner]


@pytest.mark.looptime
@pytest.mark.parametrize("gone", [False, True])
async def test_the_end_of_a_pod_is_looked_for_at_once(records: Records, *, gone: bool) -> None:
    """API server and kubelet both say that it has ended, so its GPU is free without a second look.
    The usual pace stays.
    """
    async with holding(records, TRAIN) as parts:
        records.now = KubeletRecords()
        (parts.book.remove if gone else parts.book.end)(TRAIN)
        await asyncio.sleep(0.1)
        assert not parts.ledger.grants
        await asyncio.sleep(30)
        assert records.read_at == [1, 5, 31]


@pytest.mark.looptime
async def test_nothing_is_released_while_kubelet_still_has_it(records: Records) -> None:
    """The API server's word alone is not enough, however long kubelet takes.
    It is asked less and less often meanwhile.
    """
    async with holding(records, TRAIN) as parts:
        parts.book.end(TRAIN)
        await asyncio.sleep(1)
        assert records.read_at == pytest.approx([1, 5, 5.25, 5.562, 5.953], abs=0.001)
        assert holders(parts) == ["pod-1"]
        records.now = KubeletRecords()
        await asyncio.sleep(0.5)
        assert records.read_at[5:] == pytest.approx([6.441], abs=0.001)
        assert not parts.ledger.grants


@pytest.mark.looptime
@pytest.mark.parametrize("kept_seconds", [0.6, 1.0, 1.5, 2.0, 3.0, 10.0])
async def test_a_look_is_late_by_no_more_than_a_quarter_of_the_time_that_the_kubelet_takes(
    records: Records, kept_seconds: float
) -> None:
    """The kubelet keeps a pod for up to two seconds after the API server shows its end,
    and another family waits for the GPU.
    """
    async with holding(records, TRAIN) as parts:
        ended_at = asyncio.get_running_loop().time()
        parts.book.end(TRAIN)
        await asyncio.sleep(kept_seconds)
        assert holders(parts) == ["pod-1"]
        records.now = KubeletRecords()
        await eventually(lambda: not parts.ledger.grants)
        assert asyncio.get_running_loop().time() - ended_at <= 1.25 * kept_seconds + 0.3


@pytest.mark.looptime
async def test_an_ended_pod_that_kubelet_keeps_is_asked_for_ever_at_the_usual_pace(
    records: Records,
) -> None:
    """Two dozen looks more in two minutes, and then two a minute as always."""
    async with holding(records, TRAIN) as parts:
        parts.book.end(TRAIN)
        await asyncio.sleep(180)
        assert len(records.read_at) <= 32
        del records.read_at[:]
        await asyncio.sleep(600)
        assert len(records.read_at) == 20
        assert holders(parts) == ["pod-1"]


@pytest.mark.looptime
async def test_a_look_for_an_ended_pod_takes_nothing_from_one_that_runs(records: Records) -> None:
    """One gap in kubelet's records is no end,
    and two looks within a second would meet the same gap.
    """
    async with holding(records, TRAIN, SERVE) as parts:
        records.now = held(TRAIN)
        parts.book.end(TRAIN)
        await asyncio.sleep(1)
        assert len(records.read_at) == 5
        records.now = KubeletRecords()
        await asyncio.sleep(1)
        assert holders(parts) == ["pod-2"]
        assert not parts.ledger.in_doubt


@pytest.mark.looptime
async def test_a_busy_kubelet_delays_the_release_by_a_second_at_most(records: Records) -> None:
    """A rest of nine times the reading would keep a GPU from its next pod for four seconds."""
    async with holding(records, TRAIN) as parts:
        records.seconds = 0.5
        parts.book.end(TRAIN)
        await asyncio.sleep(0.6)
        records.now = KubeletRecords()
        await asyncio.sleep(1.5)
        assert not parts.ledger.grants
        assert records.read_at[1:] == pytest.approx([5.0, 6.5], abs=0.001)


@pytest.mark.looptime
async def test_pods_that_end_together_are_looked_for_together(records: Records) -> None:
    """pod-resources takes ten calls at once from all programs of the node together;
    sixty ends in two seconds are fewer.
    """
    async with holding(records, TRAIN) as parts:
        began = len(records.read_at)
        for number in range(60):
            pod = Pod(f"0e6e9a8c-1111-4222-8333-{number:012}", "default", f"many-{number}")
            parts.book.put(pod)
            parts.ledger.reconcile(
                held(pod), parts.allocator._interpretation, reservation_seconds=60
            )
            records.now = KubeletRecords()
            parts.book.end(pod)
            await asyncio.sleep(2 / 60)
        await asyncio.sleep(0.3)
        assert not parts.ledger.grants
        assert len(records.read_at) - began <= 9


@pytest.mark.looptime
async def test_a_storm_of_events_is_not_searched_for_ends_one_by_one(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search goes through all grants. A burst of starts changes pods a hundred times a second,
    and waits for what the event loop does.
    """
    searches: list[float] = []
    search = PodEnds.pending

    def counted(ends: PodEnds) -> frozenset[str]:
        searches.append(asyncio.get_running_loop().time())
        return search(ends)

    monkeypatch.setattr(PodEnds, "pending", counted)
    async with holding(records, TRAIN) as parts:
        del searches[:]
        for number in range(100):
            parts.book.put(msgspec.structs.replace(SERVE, annotations={"written": str(number)}))
            await asyncio.sleep(0.01)
        assert 5 < len(searches) <= 30
        records.now = KubeletRecords()
        parts.book.end(TRAIN)
        await asyncio.sleep(0.25)
        assert not parts.ledger.grants, "an end in a storm is seen a moment later"


@pytest.mark.looptime
async def test_without_the_watch_the_usual_two_looks_decide(records: Records) -> None:
    """Without an API server nothing reports a pod's end,
    so the kubelet's records alone release its grant, as before.
    """
    async with verifying(records) as parts:
        records.now = held(TRAIN)
        await asyncio.sleep(5)
        records.now = KubeletRecords()
        await asyncio.sleep(27)
        assert holders(parts) == ["pod-1"]
        await asyncio.sleep(1.5)
        assert records.read_at == [1, 31, 33]
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_records_that_are_incomplete_release_no_ended_pod(records: Records) -> None:
    """A checkpoint alone does not say which pods are alive.
    As soon as pod-resources answers, the pod goes.
    """
    async with holding(records, TRAIN) as parts:
        records.now = KubeletRecords(complete=False, trouble="the kubelet was asked too often")
        parts.book.end(TRAIN)
        await asyncio.sleep(0.4)
        assert holders(parts) == ["pod-1"]
        records.now = KubeletRecords()
        await asyncio.sleep(0.5)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_an_end_during_a_restart_of_kubelet_waits_until_its_records_count_again(
    records: Records,
) -> None:
    """A kubelet that has just come back lists no pods,
    and the API server may show an end that the kubelet has not finished.
    """
    async with holding(records, TRAIN) as parts:
        parts.kubelet.restarts_seen += 1
        records.now = KubeletRecords()
        parts.book.end(TRAIN)
        await asyncio.sleep(60)
        assert holders(parts) == ["pod-1"]
        await asyncio.sleep(35)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_a_static_pod_without_its_mirror_has_not_ended(records: Records) -> None:
    """Deleting the mirror of a static pod ends nothing:
    the kubelet runs it on, and makes another mirror.
    """
    async with verifying(records) as parts:
        parts.book.replace([])
        records.now = HELD  # its UID is not one of the API server's
        await asyncio.sleep(20)
        assert records.read_at == [1]
        assert holders(parts) == ["train"]


def checkpointed(*pods: Pod) -> tuple[Holding, ...]:
    """The lines of the checkpoint in which each pod has a GPU, the first U0;
    they name pods by their UIDs only.
    """
    return tuple(
        Holding(GPU, (id_,), Owner("main", pod.uid))
        for id_, pod in zip((U0, U1), pods, strict=False)
    )


@pytest.mark.looptime
async def test_what_a_kubelet_that_starts_has_not_listed_yet_is_held_by_its_checkpoint(
    records: Records,
) -> None:
    """After a reboot it lists pods one after the other;
    until then a GPU would be offered that a pod is about to use again.
    """
    parts = Parts(records)
    parts.book.replace([TRAIN, SERVE])
    records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
    await parts.verification.rebuild()
    owners = {grant.ids: grant.owner for grant in parts.ledger.grants}
    assert owners == {
        (U0,): held(TRAIN, SERVE).holdings[0].owner,
        (U1,): held(TRAIN, SERVE).holdings[1].owner,
    }


@pytest.mark.looptime
async def test_what_an_ended_pod_left_in_the_checkpoint_is_not_held(records: Records) -> None:
    """The kubelet rewrites that file late, and the API server says that the pod is gone."""
    parts = Parts(records)
    parts.book.replace([TRAIN])
    records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
    await parts.verification.rebuild()
    assert [grant.ids for grant in parts.ledger.grants] == [(U0,)]


@pytest.mark.looptime
@pytest.mark.parametrize("listed_later", [True, False])
async def test_a_grant_from_the_checkpoint_waits_seconds_for_the_kubelet_to_list_its_pod(
    records: Records, *, listed_later: bool
) -> None:
    """Two readings without it prove nothing while the kubelet starts,
    and a pod that it never lists keeps nothing for long.
    """
    parts = Parts(records)
    parts.book.replace([TRAIN, SERVE])
    records.now = KubeletRecords(
        checkpointed(TRAIN, SERVE), complete=False, entries=checkpointed(TRAIN, SERVE)
    )
    await parts.verification.rebuild()
    task = asyncio.ensure_future(parts.verification.run(lambda: None))
    try:
        await asyncio.sleep(300)
        records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
        await eventually(lambda: bool(parts.verification.verified_at))
        await asyncio.sleep(9)
        assert len(parts.ledger.grants) == 2
        if listed_later:
            records.now = msgspec.structs.replace(
                held(TRAIN, SERVE), entries=checkpointed(TRAIN, SERVE)
            )
        await asyncio.sleep(6)
        assert len(parts.ledger.grants) == 1 + listed_later
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
@pytest.mark.parametrize(("age_seconds", "held_grants"), [(0, 2), (9, 2), (11, 1), (86400, 1)])
async def test_a_kubelet_that_runs_for_long_has_listed_its_pods(
    records: Records, age_seconds: float, held_grants: int
) -> None:
    """The rest of its checkpoint is then what ended pods left,
    which without an API server no other source can tell.
    """
    parts = Parts(records, kubelet_age_seconds=age_seconds)
    records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
    await parts.verification.rebuild()
    assert len(parts.ledger.grants) == held_grants


@pytest.mark.looptime
async def test_a_grant_from_the_checkpoint_goes_with_the_end_of_its_pod(records: Records) -> None:
    """The API server and the kubelet both say so."""
    parts = Parts(records)
    parts.book.replace([TRAIN, SERVE])
    records.now = msgspec.structs.replace(held(TRAIN), entries=checkpointed(TRAIN, SERVE))
    await parts.verification.rebuild()
    task = asyncio.ensure_future(parts.verification.run(lambda: None))
    try:
        await asyncio.sleep(5)
        parts.book.end(SERVE)
        await asyncio.sleep(1)
        assert [grant.ids for grant in parts.ledger.grants] == [(U0,)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
