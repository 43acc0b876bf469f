"""The kubelet's records at the moment of a start:
read after the question, shared by all that asked meanwhile, and never stale.

pod-resources is asked about the pods that the checkpoint names, and about all pods where that does
not settle it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vgpu_agent.agent.records.reader import KubeletRecordsReader
from vgpu_agent.agent.records.starting_pods import StartingPods
from vgpu_agent.errors import KubeletError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.checkpoint import CheckpointEntry, read_checkpoint
from vgpu_agent.kubelet.pod_resources import GetNotPossibleError, PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, Holding, Owner, Resource
from vgpu_agent.pods import Pod, PodCache, PodContainer

RESOURCE = "volcano.sh/vgpu-number"


class Lister(PodResources):
    """pod-resources that answers when it is let."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), timeout_seconds=1)
        self.readings = 0
        self.asked: list[set[tuple[str, str]]] = []
        self.can_get = True
        self.holdings: list[Holding] = []
        self.let = asyncio.Event()
        self.got = asyncio.Event()
        self.silent_about: tuple[str, str] | None = None
        self.error = ""

    async def list(self, wanted: Callable[[str], bool] = lambda _: True) -> tuple[Holding, ...]:
        self.readings += 1
        seen = tuple(holding for holding in self.holdings if wanted(holding.resource))
        await self.let.wait()
        if self.error:
            raise KubeletError(self.error)
        return seen

    async def get(
        self, pods: Collection[tuple[str, str]], wanted: Callable[[str], bool] = lambda _: True
    ) -> tuple[Holding, ...]:
        self.asked.append(set(pods))
        if not self.can_get:
            raise GetNotPossibleError("no Get")
        self.got.set()
        if self.silent_about in pods:
            await asyncio.Event().wait()
        return tuple(
            held
            for held in self.holdings
            if wanted(held.resource) and (held.owner.namespace, held.owner.pod) in pods
        )


def entry(
    uid: str, container: str, *ids: str, resource: str = RESOURCE, answer: Edits | None = None
) -> dict[str, object]:
    """An entry of the checkpoint."""
    encoded = codec.encode_allocate([answer or Edits()])
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(ids)},
        # the element without its tag and length
        "AllocResp": base64.b64encode(encoded[2:]).decode(),
    }


def write(path: Path, *entries: dict[str, object]) -> Path:
    """A checkpoint with these entries."""
    path.write_bytes(
        msgspec.json.encode(
            {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 0}
        )
    )
    return path


def make(
    lister: Lister,
    checkpoint: Path,
    *,
    answers: bool = False,
    names: Mapping[str, tuple[str, str]] | None = None,
    waiting: bool = False,
) -> KubeletRecordsReader:
    """Kubelet evidence for one resource that knows these pods by UID.
    Pods in ``waiting`` wait for one id each, in this order.
    """
    book = PodCache()
    for uid, (namespace, name) in (names or {}).items():
        book.put(
            Pod(
                uid,
                namespace,
                name,
                containers=(PodContainer("main", limits={RESOURCE: 1}),) if waiting else (),
            )
        )
    ledger = Ledger()
    ledger.offer([Resource(RESOURCE, "volcano-vgpu", (), decided_by=Decider.POD)])
    pods = StartingPods(book, ledger, started=set[tuple[str, str, str]])
    return KubeletRecordsReader(lister, checkpoint, needs_all_answers=lambda: answers, pods=pods)


async def test_both_records_are_given_side_by_side(tmp_path: Path) -> None:
    """Unweighed, and only the resources of interest."""
    lister = Lister()
    lister.holdings = [
        Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p")),
        Holding("nvidia.com/gpu", ("g",), Owner("x", "", "ns", "q")),
    ]
    lister.let.set()
    checkpoint = write(
        tmp_path / "checkpoint",
        entry("uid", "main", "a"),
        entry("uid", "other", "z", resource="nvidia.com/gpu"),
    )
    kubelet_evidence = await make(lister, checkpoint)(RESOURCE, ["a"])
    assert kubelet_evidence.pod_resources == (lister.holdings[0],)
    assert kubelet_evidence.checkpoint == (Holding(RESOURCE, ("a",), Owner("main", "uid")),)
    assert kubelet_evidence.answers == {}
    assert kubelet_evidence.trouble == ""
    assert kubelet_evidence.whole


async def test_a_list_waits_for_calls_of_allocate(tmp_path: Path) -> None:
    """The kubelet would forget their ids (kubelet §7)."""
    lister, idle = Lister(), asyncio.Event()
    lister.let.set()
    read_records = make(lister, write(tmp_path / "checkpoint"))
    read_records._until_idle = idle.wait  # type: ignore[assignment]  # its answer is not used
    reading = asyncio.ensure_future(read_records(RESOURCE, ["a"], whole=True))
    for _ in range(20):
        await asyncio.sleep(0)
    assert lister.readings == 0
    idle.set()
    await reading
    assert lister.readings == 1


async def test_a_burst_of_questions_costs_two_readings(tmp_path: Path) -> None:
    """A question during a reading gets the next one, which all such questions share,
    never one that began before.
    """
    lister = Lister()
    read_records = make(lister, write(tmp_path / "checkpoint"))
    first = asyncio.ensure_future(read_records(RESOURCE, ["a"], whole=True))
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(read_records(RESOURCE, ["a"], whole=True)) for _ in range(10)]
    await asyncio.sleep(0)
    lister.holdings = [Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p"))]
    lister.let.set()
    assert (await first).pod_resources == ()
    assert [
        len(kubelet_evidence.pod_resources or ())
        for kubelet_evidence in await asyncio.gather(*later)
    ] == [1] * 10
    assert lister.readings == 2


async def test_a_reading_that_was_broken_off_counts_for_nobody(tmp_path: Path) -> None:
    """The kubelet hung up while its question was being looked into.
    The next in line reads for itself.
    """
    lister = Lister()
    read_records = make(lister, write(tmp_path / "checkpoint"))
    lister.let.set()
    await read_records(RESOURCE, ["a"], whole=True)
    lister.let.clear()
    broken = asyncio.ensure_future(read_records(RESOURCE, ["a"], whole=True))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(read_records(RESOURCE, ["a"], whole=True))
    await asyncio.sleep(0)
    lister.holdings = [Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p"))]
    broken.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await broken
    lister.let.set()
    assert (await waiting).pod_resources == (lister.holdings[0],)


async def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A record that cannot be read counts as None, and the trouble says why."""
    lister = Lister()
    lister.error = "pod-resources: no answer"
    lister.let.set()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("junk")
    kubelet_evidence = await make(lister, checkpoint)(RESOURCE, ["a"])
    assert (kubelet_evidence.checkpoint, kubelet_evidence.pod_resources) == (None, None)
    assert "pod-resources: no answer" in kubelet_evidence.trouble
    assert "cannot be understood" in kubelet_evidence.trouble


async def test_stored_answers_are_read_where_they_are_needed(tmp_path: Path) -> None:
    """Those for the ids in question always, all in early binding,
    which compares what the kubelet keeps with what should be.
    """
    lister = Lister()
    lister.let.set()
    answer, others = (
        Edits(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-a"}),
        Edits(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-c"}),
    )
    checkpoint = write(
        tmp_path / "checkpoint",
        entry("uid", "main", "a", "b", answer=answer),
        entry("other", "main", "c", answer=others),
    )
    own = {("uid", "main", RESOURCE): answer}
    assert (await make(lister, checkpoint)(RESOURCE, ["b"])).answers == own
    assert (await make(lister, checkpoint, answers=True)(RESOURCE, ["b"])).answers == own | {
        ("other", "main", RESOURCE): others
    }


A, B = (
    Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p")),
    Holding(RESOURCE, ("b",), Owner("main", "", "ns", "q")),
)
NAMES = {"uid-p": ("ns", "p"), "uid-q": ("ns", "q")}


async def test_only_the_pod_that_the_checkpoint_names_is_asked_about(tmp_path: Path) -> None:
    """The whole node would be megabytes. A part of it is not taken for the whole."""
    lister = Lister()
    lister.holdings = [A, B]
    checkpoint = write(
        tmp_path / "checkpoint", entry("uid-p", "main", "a"), entry("uid-q", "main", "b")
    )
    kubelet_evidence = await make(lister, checkpoint, names=NAMES)(RESOURCE, ["a"])
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole) == ((A,), False)
    assert [entry.owner.pod_uid for entry in kubelet_evidence.checkpoint or ()] == ["uid-p"]
    assert (lister.asked, lister.readings) == ([{("ns", "p")}], 0)


async def test_an_ended_pod_that_the_checkpoint_still_names_is_asked_about_too(
    tmp_path: Path,
) -> None:
    """Both may have the ids by the file; pod-resources knows which of the two."""
    lister = Lister()
    lister.holdings = [A]
    checkpoint = write(
        tmp_path / "checkpoint", entry("uid-p", "main", "a"), entry("uid-q", "main", "a")
    )
    kubelet_evidence = await make(lister, checkpoint, names=NAMES)(RESOURCE, ["a"])
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole) == ((A,), False)
    assert lister.asked == [{("ns", "p"), ("ns", "q")}]


async def test_all_pods_are_told_of_on_request(tmp_path: Path) -> None:
    """The search for ended pods must see every pod that has not ended."""
    lister = Lister()
    lister.holdings = [A, B]
    lister.let.set()
    checkpoint = write(tmp_path / "checkpoint", entry("uid-p", "main", "a"))
    kubelet_evidence = await make(lister, checkpoint, names=NAMES)(RESOURCE, ["a"], whole=True)
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole, lister.asked) == (
        (A, B),
        True,
        [],
    )


@pytest.mark.parametrize(
    "why",
    [
        "no get",
        "unknown pod",
        "one of two unknown",
        "nobody has them",
        "two have them",
        "no entry",
        "no file",
    ],
)
async def test_all_pods_are_asked_about_where_one_does_not_settle_it(
    tmp_path: Path, why: str
) -> None:
    """Nothing is believed on less than what List would say."""
    lister = Lister()
    lister.can_get = why != "no get"
    two = Holding(RESOURCE, ("a",), Owner("main", "", "ns", "q"))
    lister.holdings = {"nobody has them": [B], "two have them": [A, two]}.get(why, [A])
    lister.let.set()
    names = {"unknown pod": {}, "one of two unknown": {"uid-p": ("ns", "p")}}.get(why, NAMES)
    entries = [entry("uid-p", "main", "a")] if why != "no entry" else [entry("uid-p", "main", "z")]
    if why in {"one of two unknown", "two have them"}:
        entries.append(entry("uid-q", "main", "a"))
    checkpoint = write(tmp_path / "checkpoint", *entries)
    if why == "no file":
        checkpoint.write_text("junk")
    kubelet_evidence = await make(lister, checkpoint, names=names)(RESOURCE, ["a"])
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole) == (
        tuple(lister.holdings),
        True,
    )
    assert lister.readings == 1


async def test_the_pod_that_is_expected_is_asked_about_while_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet waits for both, so they do not wait for each other. The checkpoint names that
    pod, so it is asked about once.
    """
    lister = Lister()
    lister.holdings = [A, B]
    checkpoint = write(
        tmp_path / "checkpoint", entry("uid-p", "main", "a"), entry("uid-q", "main", "b")
    )

    async def slowly(*arguments: Any) -> tuple[CheckpointEntry, ...]:
        await lister.got.wait()  # for ever, if it is asked about only afterwards
        return await read_checkpoint(*arguments)

    monkeypatch.setattr("vgpu_agent.agent.records.reader.read_checkpoint", slowly)
    async with asyncio.timeout(10):
        kubelet_evidence = await make(lister, checkpoint, names=NAMES, waiting=True)(
            RESOURCE, ["a"]
        )
    assert (
        kubelet_evidence.pod_resources,
        kubelet_evidence.whole,
        lister.asked,
        lister.readings,
    ) == ((A,), False, [{("ns", "p")}], 0)


async def test_what_is_said_of_another_pod_than_the_checkpoint_names_counts_for_nothing(
    tmp_path: Path,
) -> None:
    """The one bound first was expected, and it is another one that starts:
    that one is asked about too.
    """
    lister = Lister()
    # as if kubelet had given the ids to both
    lister.holdings = [Holding(RESOURCE, ("b",), Owner("main", "", "ns", "p")), B]
    checkpoint = write(tmp_path / "checkpoint", entry("uid-q", "main", "b"))
    kubelet_evidence = await make(lister, checkpoint, names=NAMES, waiting=True)(RESOURCE, ["b"])
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole) == ((B,), False)
    assert lister.asked == [{("ns", "p")}, {("ns", "q")}]


async def test_who_had_the_ids_at_the_last_reading_is_expected_before_others(
    tmp_path: Path,
) -> None:
    """In a burst the checkpoint has named later pods already.
    A container that starts again has been in it for long.
    """
    lister = Lister()
    lister.holdings = [A, B]
    checkpoint = write(
        tmp_path / "checkpoint", entry("uid-p", "main", "a"), entry("uid-q", "main", "b")
    )
    ask = make(lister, checkpoint, names=NAMES, waiting=True)
    await ask(RESOURCE, ["a"])
    await ask(RESOURCE, ["b"])
    assert lister.asked == [{("ns", "p")}, {("ns", "q")}]


async def test_a_pod_that_has_other_ids_is_not_expected(tmp_path: Path) -> None:
    """By the last reading the first in line was admitted with ids of its own, and waits for its
    image: the new ones are another pod's.
    """
    lister = Lister()
    lister.holdings = [A, B]
    checkpoint = write(tmp_path / "checkpoint", entry("uid-p", "main", "a"))
    ask = make(lister, checkpoint, names=NAMES, waiting=True)
    await ask(RESOURCE, ["a"])
    write(checkpoint, entry("uid-p", "main", "a"), entry("uid-q", "main", "b"))
    await ask(RESOURCE, ["b"])
    assert lister.asked == [{("ns", "p")}, {("ns", "q")}]


async def test_a_silent_answer_about_another_pod_than_the_checkpoint_names_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """pod-resources may be silent for seconds. Those are for the pod that counts."""
    lister = Lister()
    lister.holdings, lister.silent_about = [A, B], ("ns", "p")
    checkpoint = write(tmp_path / "checkpoint", entry("uid-q", "main", "b"))
    async with asyncio.timeout(10):
        kubelet_evidence = await make(lister, checkpoint, names=NAMES, waiting=True)(
            RESOURCE, ["b"]
        )
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole) == ((B,), False)
    assert lister.asked == [{("ns", "p")}, {("ns", "q")}]


async def test_an_expected_pod_of_which_nothing_is_said_leaves_the_question_to_list(
    tmp_path: Path,
) -> None:
    """The kubelet has no Get, has been asked too often, or is silent: it is not asked, and waited
    for, a second time before List is.
    """
    lister = Lister()
    lister.can_get, lister.holdings = False, [A]
    lister.let.set()
    checkpoint = write(tmp_path / "checkpoint", entry("uid-p", "main", "a"))
    kubelet_evidence = await make(lister, checkpoint, names=NAMES, waiting=True)(RESOURCE, ["a"])
    assert (kubelet_evidence.pod_resources, kubelet_evidence.whole, lister.readings) == (
        (A,),
        True,
        1,
    )
    assert lister.asked == [{("ns", "p")}]
