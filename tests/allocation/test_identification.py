"""The container that is about to start, where an answer is late, missing or ambiguous.

The proof itself is tested with late binding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, NUMBER, MemoryCarrier, Place, a_pod, wants
from tests.allocation.later_parts import booked, confirm, restarted
from tests.golden import U0, U1
from vgpu_agent.allocation.identification import KubeletEvidence, NotProvenError
from vgpu_agent.model import Holding, Owner
from vgpu_agent.pods import Pod

TRAIN = a_pod("train", annotations=wants(main=f"{U0} 1000"))
SERVE = a_pod("serve", annotations=wants(main=f"{U1} 2000"))


class DeletedSpecs(MemoryCarrier):
    """A carrier that knows what it delivered, but the files have been deleted since."""

    outdated = False

    async def has_usable_spec(self, token: str) -> bool:
        return False


class SilentPlace(Place):
    """The kubelet's records cannot be read for a very long time."""

    async def read_evidence(
        self, resource: str = NUMBER, ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        await asyncio.sleep(3600)
        return await super().read_evidence(resource, ids, whole=whole)


async def in_an_outage(carrier: MemoryCarrier | None = None) -> Place:
    """The agent has restarted and knows no pod,
    while the container of `TRAIN` crashes and starts again.
    """
    before = Place(carrier=carrier)
    before.book.replace([TRAIN])
    await before.admit(TRAIN, "main", IDS[:1])
    await before.start(IDS[:1])
    after = restarted(before)
    after.outage = True
    confirm(after, initial=True)
    return after


async def both_hold_the_same_ids(place: Place, *pods: Pod) -> None:
    """The kubelet's records contradict each other."""
    place.book.replace(pods)
    for pod in pods:
        await place.admit(pod, "main", IDS[:1])


@pytest.mark.looptime
async def test_a_container_starts_again_as_before_while_its_pod_cannot_be_asked_about() -> None:
    """A crash in an outage after a restart:
    the kubelet's records name the very container that the spec was made for.
    """
    place = await in_an_outage()
    began = asyncio.get_running_loop().time()
    await place.start(IDS[:1])
    # the watch gets its chance to show the pod
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.1)
    assert place.fetches == 0
    assert booked(place) == {U0: 1000}
    assert [(fact["pod"], fact["container"]) for fact in place.events("start.as_before")] == [
        ("default/train", "main")
    ]
    assert [grant.proven for grant in place.ledger.grants] == [True]


@pytest.mark.looptime
async def test_a_pod_that_appears_meanwhile_is_asked_about() -> None:
    """The API server's answer is better than the disk's,
    so the agent waits for it as long as for any other pod.
    """
    place = await in_an_outage()
    asyncio.get_running_loop().call_later(1.0, place.book.put, TRAIN)
    await place.start(IDS[:1])
    assert (len(place.events("start.as_before")), len(place.events("start.bound"))) == (0, 1)


@pytest.mark.looptime
async def test_without_its_spec_a_container_does_not_start_as_before() -> None:
    """The runtime would not find the name. The directory was emptied,
    and its content cannot be made without the pod.
    """
    place = await in_an_outage(DeletedSpecs())
    with pytest.raises(
        NotProvenError,
        match=(
            "default/train did not appear in the watch within 2 s, and the API server does not "
            "answer"
        ),
    ):
        await place.start(IDS[:1])
    assert place.events("start.as_before") == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("checkpoint", "listed"),
    [
        ([Owner("main", "uid-next")], Owner("main", namespace="default", pod="train")),
        (
            [Owner("main", "uid-train"), Owner("main", "uid-serve")],
            Owner("main", namespace="default", pod="train"),
        ),
        ([Owner("main", "uid-train")], Owner("main", namespace="default", pod="serve")),
        ([Owner("other", "uid-train")], Owner("other", namespace="default", pod="train")),
    ],
    ids=["another UID under its name", "two UIDs", "another name", "another container"],
)
async def test_nobody_else_starts_from_a_spec(checkpoint: list[Owner], listed: Owner) -> None:
    """A spec is its container's own: where the records name another pod besides or instead, the
    start waits for the API server.
    """
    place = await in_an_outage()
    place.checkpoint = [Holding(NUMBER, IDS[:1], owner) for owner in checkpoint]
    place.pod_resources = [Holding(NUMBER, IDS[:1], listed)]
    with pytest.raises(NotProvenError, match="the kubelet will retry"):
        await place.start(IDS[:1])
    assert place.events("start.as_before") == []


@pytest.mark.looptime
async def test_a_start_that_takes_too_long_is_refused_before_kubelet_gives_up() -> None:
    """Our own text in the pod's status instead
    of kubelet's "deadline exceeded".
    """
    place = SilentPlace()
    place.book.replace([TRAIN])
    await place.admit(TRAIN, "main", IDS[:1])
    began = asyncio.get_running_loop().time()
    with pytest.raises(
        NotProvenError,
        match="records and the API server have not answered within 20 s; the kubelet will retry",
    ):
        await place.start(IDS[:1])
    assert asyncio.get_running_loop().time() - began == pytest.approx(20.0, abs=0.1)


async def test_whoever_cannot_be_told_apart_is_refused_by_name() -> None:
    """Refusals become events after a while, so the users of both pods read why.
    A pod that starts after all is struck out.
    """
    place = Place()
    await both_hold_the_same_ids(place, TRAIN, SERVE)
    with pytest.raises(NotProvenError, match="in two pods at once"):
        await place.start(IDS[:1])
    assert {
        (refusal.pod.name, refusal.container, refusal.final) for refusal in place.refusals.current
    } == {
        ("train", "main", False),
        ("serve", "main", False),
    }
    assert {refusal.reason.partition(", ")[0] for refusal in place.refusals.current} == {
        f"the kubelet lists ids of {NUMBER} in two pods at once"
    }
    place.forget(SERVE)
    await place.start(IDS[:1])
    assert [refusal.pod.name for refusal in place.refusals.current] == ["serve"]


async def test_a_pod_that_has_ended_is_no_suspect() -> None:
    """Its entry lingers in the checkpoint, but its start is not to come."""
    place = Place()
    ended = a_pod("ended")
    await both_hold_the_same_ids(place, TRAIN, SERVE, ended)
    place.book.put(msgspec.structs.replace(ended, phase="Succeeded"))
    place.pod_resources = None
    with pytest.raises(NotProvenError, match="several pods"):
        await place.start(IDS[:1])
    assert {refusal.pod.name for refusal in place.refusals.current} == {"train", "serve"}
