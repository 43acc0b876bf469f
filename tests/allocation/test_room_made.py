"""Room that ended pods leave: a start is never refused while what it needs is free at the time
of the answer.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, init, wants
from tests.golden import U0, U1
from tests.torture import virtual_time
from vgpu_agent import pods
from vgpu_agent.errors import CapacityError
from vgpu_agent.model import KubeletRecords
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod

if TYPE_CHECKING:
    # a class that pytest would take for tests
    from vgpu_agent.allocation.identification import KubeletEvidence

GPU_MIB = 40960


class UnhurriedPlace(Place):
    """A node whose kubelet takes a moment for each answer, so that starts overlap;
    ``delays`` are the next ones, in seconds.
    """

    def __init__(self, delays: Sequence[float] = ()) -> None:
        super().__init__()
        self.can_get = True
        self.delays = collections.deque(delays)

    async def read_evidence(
        self, resource: str = NUMBER, ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        said = await super().read_evidence(resource, ids, whole=whole)
        await asyncio.sleep(self.delays.popleft() if self.delays else 0.005)
        return said


async def _filled(place: Place, count: int, mib: int) -> list[Pod]:
    """``count`` running pods on GPU 0, with ``mib`` MiB each."""
    pods = [
        a_pod(f"old-{number}", annotations=wants(main=f"{U0} {mib}")) for number in range(count)
    ]
    for pod, id_ in zip(pods, IDS, strict=False):
        place.book.put(pod)
        await place.admit(pod, "main", [id_])
        await place.start([id_])
    return pods


def _ends(place: Place, pod: Pod) -> None:
    """The pod ends: kubelet forgets it, then the API server shows it."""
    place.forget(pod)
    place.book.put(msgspec.structs.replace(pod, phase="Succeeded"))


@pytest.mark.looptime
@pytest.mark.parametrize("count", [2, 5, 10])
async def test_starts_that_meet_a_full_gpu_at_once_all_get_the_room_of_ended_pods(
    count: int,
) -> None:
    """The first of them clears the ended pods away;
    the others find nothing left to clear, and room all the same.

    A refusal would be an event, a warning, and 11 to 16 s until kubelet asks again.
    """
    place, mib = UnhurriedPlace(), GPU_MIB // count
    place.book.replace([])
    old = await _filled(place, count, mib)
    for pod in old:
        _ends(place, pod)
    new = [a_pod(f"new-{number}", annotations=wants(main=f"{U0} {mib}")) for number in range(count)]
    for place_of, pod in enumerate(new):
        place.book.put(pod)
        await place.admit(pod, "main", [IDS[10 + place_of]])
    await asyncio.gather(*(place.start([IDS[10 + number]]) for number in range(count)))
    assert sorted(
        grant.owner.pod for grant in place.ledger.grants if grant.owner and grant.shares
    ) == sorted(pod.name for pod in new)
    assert place.refusals.current == ()
    assert place.ledger.audit() == []


@pytest.mark.looptime
async def test_room_that_is_made_while_kubelet_is_asked_is_used() -> None:
    """Any source of room will do. Here the pass
    that follows the kubelet's records releases the grant while the start waits.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    (old,) = await _filled(place, 1, GPU_MIB)
    new = a_pod("new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2])
    place.delays.extend([0.0, 1.0])
    start = asyncio.ensure_future(place.start(IDS[1:2]))
    await asyncio.sleep(0.5)
    (grant,) = (
        grant
        for grant in place.ledger.grants
        if grant.owner and grant.owner.pod_uid == old.kubelet_uid
    )
    place.ledger.release(grant.number)
    await start
    assert place.refusals.current == ()


@pytest.mark.looptime
async def test_a_pod_made_anew_under_the_same_name_does_not_keep_the_old_share() -> None:
    """A StatefulSet's pod keeps its name: kubelet lists the new one, and the old one's share is
    free although the name is listed.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    old = a_pod("db-0", uid="uid-old", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(old)
    await place.admit(old, "main", IDS[:1])
    await place.start(IDS[:1])
    place.forget(old)
    place.book.remove(old)
    new = a_pod("db-0", uid="uid-new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2])
    await place.start(IDS[1:2])
    (grant,) = (grant for grant in place.ledger.grants if grant.shares)
    assert grant.owner is not None
    assert grant.owner.pod_uid == "uid-new"


@pytest.mark.looptime
async def test_a_namesake_that_runs_does_not_keep_the_old_share_from_others() -> None:
    """The same for a third pod that needs the room:
    the name that kubelet lists is another pod's by now.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    old = a_pod("db-0", uid="uid-old", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(old)
    await place.admit(old, "main", IDS[:1])
    await place.start(IDS[:1])
    place.forget(old)
    place.book.remove(old)
    namesake, third = (
        a_pod("db-0", uid="uid-new", annotations=wants(main=f"{U1} 1000")),
        a_pod("third", annotations=wants(main=f"{U0} {GPU_MIB}")),
    )
    for number, pod in enumerate((namesake, third), 1):
        place.book.put(pod)
        await place.admit(pod, "main", [IDS[number]])
        await place.start([IDS[number]])
    assert {
        grant.owner.pod_uid for grant in place.ledger.grants if grant.owner and grant.shares
    } == {"uid-new", "uid-third"}


@pytest.mark.looptime
async def test_a_pod_that_kubelet_still_runs_keeps_its_share_when_its_name_has_a_new_pod() -> None:
    """Deleted by force and made anew: what kubelet lists under the name is the old pod
    with its ids, so nothing is free yet.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    old = a_pod("db-0", uid="uid-old", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(old)
    await place.admit(old, "main", IDS[:1])
    await place.start(IDS[:1])
    place.book.remove(old)
    place.book.put(a_pod("db-0", uid="uid-new"))
    third = a_pod("third", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(third)
    await place.admit(third, "main", IDS[1:2])
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    assert [
        grant.owner.pod_uid for grant in place.ledger.grants if grant.owner and grant.shares
    ] == ["uid-old"]


@pytest.mark.looptime
async def test_a_start_waits_for_the_watch_where_kubelet_has_let_go_of_a_pod() -> None:
    """The kubelet forgets an ended pod before our watch shows its end:
    a scheduler may have counted the room already.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    (old,) = await _filled(place, 1, GPU_MIB)
    place.forget(old)
    new = a_pod("new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2])
    start = asyncio.ensure_future(place.start(IDS[1:2]))
    await asyncio.sleep(0.5)
    place.book.put(a_pod("somebody"))  # a change that helps no start
    await asyncio.sleep(0.5)
    place.book.put(msgspec.structs.replace(old, phase="Succeeded"))
    await start
    assert place.refusals.current == ()


@pytest.mark.looptime
async def test_a_start_does_not_wait_for_what_will_not_come() -> None:
    """A GPU that is full of pods that run is refused at once.
    One that kubelet has let go of, after `POD_WAIT_SECONDS`.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    (old,) = await _filled(place, 1, GPU_MIB)
    new = a_pod("new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2])
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    assert loop.time() - began < 0.1
    place.forget(old)
    began = loop.time()
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    assert loop.time() - began == pytest.approx(2.0, abs=0.1)


@pytest.mark.looptime
async def test_an_init_container_that_kubelet_does_not_list_keeps_its_share() -> None:
    """pod-resources hides init containers. Their pod is alive, so nothing of it is free,
    and no start waits for its end.
    """
    place = UnhurriedPlace()
    place.book.replace([])
    pod = a_pod("train", init("warm"), annotations=wants(warm=f"{U0} {GPU_MIB}"))
    place.book.put(pod)
    await place.admit(pod, "warm", IDS[:1], listed=False)
    await place.start(IDS[:1])
    new = a_pod("new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    place.book.put(new)
    await place.admit(new, "main", IDS[1:2])
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    assert loop.time() - began < 0.1


@pytest.mark.looptime
async def test_a_static_pod_whose_mirror_was_left_out_keeps_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its init container runs, which pod-resources hides, and the pod cache has no room for the
    mirror. Neither a start that needs room nor a comparison with the records takes the share.
    """
    place = UnhurriedPlace()
    mirror = {MIRROR_POD: "x", STATIC_POD_HASH: "c0ffee00c0ffee00c0ffee00c0ffee00"}
    pod = msgspec.structs.replace(
        a_pod("static", init("warm"), annotations={**wants(warm=f"{U0} {GPU_MIB}"), **mirror}),
        scheduled=False,
        reported=True,
    )
    place.book.replace([pod])
    (known,) = place.book.pods
    assert known.kubelet_uid == mirror[STATIC_POD_HASH]
    await place.admit(known, "warm", IDS[:1], listed=False)
    await place.start(IDS[:1])
    new = a_pod("new", annotations=wants(main=f"{U0} {GPU_MIB}"))
    monkeypatch.setattr(pods, "MAX_PODS", 1)
    place.book.put(new)
    assert place.book.pods == (place.book.get(new.uid),)
    await place.admit(new, "main", IDS[1:2])
    with pytest.raises(CapacityError):
        await place.start(IDS[1:2])
    records = KubeletRecords(tuple(place.pod_resources or ()))
    for _ in range(2):  # in one reading of the records a grant may be missing
        place.allocator.confirm(records, reservation_seconds=60)
    (grant,) = (grant for grant in place.ledger.grants if grant.shares)
    assert grant.owner is not None
    assert grant.owner.pod_uid == known.kubelet_uid


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    ended=st.sets(st.integers(0, 3)),
    delays=st.lists(st.sampled_from([0.0, 0.001, 0.005, 0.02]), max_size=24),
    ends_at=st.lists(st.sampled_from([0.0, 0.002, 0.01, 0.03]), min_size=4, max_size=4),
)
def test_no_start_is_refused_while_there_is_room_at_the_time_of_the_answer(
    sizes: list[int], ended: set[int], delays: list[float], ends_at: list[float]
) -> None:
    """Four old pods with a quarter of the GPU each, of which some end at any moment,
    and up to six starts at once.

    At each refusal no pod that kubelet and API server have ended is still booked, and the bookings
    leave too little.
    """

    async def play() -> None:
        place, quarter = UnhurriedPlace(), GPU_MIB // 4
        place.book.replace([])
        old = await _filled(place, 4, quarter)
        place.delays.extend(delays)

        async def end(number: int) -> None:
            await asyncio.sleep(ends_at[number])
            _ends(place, old[number])

        async def start(number: int, size: int) -> None:
            try:
                await place.start([IDS[10 + number]])
            except CapacityError:
                booked = sum(
                    share.memory_mib
                    for grant in place.ledger.grants
                    for share in grant.shares
                    if share.device == U0
                )
                assert booked + size * quarter > GPU_MIB, (
                    "refused although there was room at the time of the answer"
                )

        for number, size in enumerate(sizes):
            pod = a_pod(f"new-{number}", annotations=wants(main=f"{U0} {size * quarter}"))
            place.book.put(pod)
            await place.admit(pod, "main", [IDS[10 + number]])
        await asyncio.gather(
            *(start(number, size) for number, size in enumerate(sizes)),
            *(end(number) for number in ended),
        )
        assert place.ledger.audit() == []
        # The shares of ended pods are free to the next start, however the starts before went.
        left = (
            4
            - sum(sizes[number] for number in range(len(sizes)) if _started(place, number))
            - (4 - len(ended))
        )
        for number, size in enumerate(sizes):
            if not _started(place, number) and size <= left:
                await place.start([IDS[10 + number]])
                left -= size

    virtual_time.run(play())


def _started(place: Place, number: int) -> bool:
    return any(
        grant.shares and grant.owner and grant.owner.pod == f"new-{number}"
        for grant in place.ledger.grants
    )
