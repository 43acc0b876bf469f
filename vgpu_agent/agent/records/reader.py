"""Read the kubelet's records for `allocation`:
the checkpoint and pod-resources, each as it is.

Called before every start of a container whose pod decides what it gets. The checkpoint says which
pods to query at pod-resources. A query for one pod is quick; one for the whole node is not (4 MB
where each unit of memory has an id). Both sources take some milliseconds, so the probable pod is
queried while the checkpoint is being read. The answer counts if the checkpoint then names that pod
and no other. The whole node is queried where one pod is not enough: the kubelet is too old for it
or was asked too often, the pod is not known yet, or it holds other ids. Starts come in bursts, so
all callers that ask while a reading is under way share the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.errors import CheckpointError, KubeletError
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.checkpoint import read_checkpoint
from vgpu_agent.kubelet.records import as_holding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from pathlib import Path

    from vgpu_agent.agent.records.starting_pods import StartingPods
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.kubelet.checkpoint import CheckpointEntry
    from vgpu_agent.kubelet.pod_resources import PodResources
    from vgpu_agent.model import Holding


Read = TypeVar("Read")


class SharedReading(Generic[Read]):
    """The readings by ``read``, shared by all callers at the same time:
    each gets a reading that began after its call.

    State: the last complete reading and its number, for callers that asked before it began. A
    reading that was broken off does not count.
    """

    def __init__(self, read: Callable[[], Awaitable[Read]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()  # held while a reading is under way
        self._begun = 0  # the number of the reading that began last
        self._last: tuple[int, Read] | None = None

    @property
    def last(self) -> Read | None:
        """The last reading, however old; None before the first one."""
        return self._last[1] if self._last else None

    async def __call__(self) -> Read:
        """Return a reading that began after this call.

        Raises:
            Exception: whatever ``read`` raises.
        """
        wanted = self._begun + 1
        async with self._turn:
            if self._last is None or self._last[0] < wanted:
                self._begun += 1
                number = self._begun
                self._last = number, await self._read()
            return self._last[1]


class _Checkpoint(msgspec.Struct, frozen=True):
    """One reading of the file; ``entries`` is None when it could not be read.

    ``decoded`` keeps the answers that were looked at, by their encoded form. ``holders`` has, by
    resource and id, places in ``entries``, for those resources that were asked about.
    """

    entries: tuple[CheckpointEntry, ...] | None
    trouble: str = ""
    decoded: dict[str, Edits] = msgspec.field(default_factory=dict)
    holders: dict[str, dict[str, list[int]]] = msgspec.field(default_factory=dict)

    def about(self, resource: str, ids: frozenset[str]) -> list[CheckpointEntry]:
        """The entries that name any of ``ids``, a few of hundreds,
        in the order of the ids and of the file.
        """
        entries = self.entries or ()
        if resource not in self.holders:
            holders: dict[str, list[int]] = {}
            for place, entry in enumerate(entries):
                if entry.resource_name == resource:
                    # an init container's ids are also those of the container that takes them over
                    for each in entry.ids:
                        holders.setdefault(each, []).append(place)
            self.holders[resource] = holders
        places = self.holders[resource]
        return [
            entries[place]
            for place in dict.fromkeys(
                place for each in sorted(ids) for place in places.get(each, ())
            )
        ]

    def containers_with(self, resource: str) -> frozenset[tuple[str, str]]:
        """UID and container of all that have any of ``resource``."""
        return frozenset(
            (entry.pod_uid, entry.container_name)
            for entry in self.entries or ()
            if entry.resource_name == resource
        )

    def answer(self, entry: CheckpointEntry) -> Edits:
        """Return the answer that our Allocate gave for ``entry``, one of ``entries``.

        Raises:
            CheckpointError: that cannot be understood.
        """
        encoded = entry.alloc_resp or ""
        if encoded not in self.decoded:
            self.decoded[encoded] = codec.decode_answer(entry.answer)
        return self.decoded[encoded]


class _Listed(msgspec.Struct, frozen=True):
    """The answer of pod-resources; None when there was none."""

    holdings: tuple[Holding, ...] | None
    trouble: str = ""


class KubeletRecordsReader:
    """The reader of both records, a call of which returns what they say about some ids. It
    implements `allocation.context.RecordsReader`.
    """

    def __init__(
        self,
        pod_resources: PodResources,
        checkpoint: Path,
        *,
        needs_all_answers: Callable[[], bool],
        pods: StartingPods,
        until_idle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Build it.

        Args:
            pod_resources: the client of the kubelet's socket.
            checkpoint: the path of the kubelet's file.
            needs_all_answers: tells whether all stored answers are needed (early binding), not only
                those for the ids in question.
            pods: knows the names of pods, the likely next start, and the resources where pods
                decide; the ids of other resources are not read at all.
            until_idle: waits a moment for the end of calls of Allocate, whose ids the kubelet
                forgets when it is asked for its list (kubelet §7).
        """
        self._pod_resources = pod_resources
        self._path = checkpoint
        self._needs_all_answers = needs_all_answers
        self._starting_pods = pods
        self._until_idle = until_idle
        self._checkpoint = SharedReading(self._read_checkpoint)
        self._both = SharedReading(self._read_both)

    async def __call__(
        self, resource: str, ids: Sequence[str], *, whole: bool = False
    ) -> KubeletEvidence:
        """Return the records, read after this call began.

        Args:
            resource: the resource that the ids are of.
            ids: the ids whose holder is asked for.
            whole: pod-resources has to report every pod.
        """
        wanted = frozenset(ids)
        if not whole and (kubelet_evidence := await self._of_holders(resource, wanted)):
            return kubelet_evidence
        checkpoint, listed = await self._both()
        return self._evidence(checkpoint, listed, checkpoint.about(resource, wanted), whole=True)

    async def _of_holders(self, resource: str, ids: frozenset[str]) -> KubeletEvidence | None:
        """Return the records, with pod-resources only for pods that have ``ids`` by the checkpoint;
        None where that is not enough.
        """
        checkpoint, about, names, asked = await self._checkpoint_and_expected(resource, ids)
        known = [name for name in names if name is not None]
        if not known or len(known) < len(names):
            return None
        listed = asked.result() if asked else await self._get(known)
        if listed is None:
            return None  # the caller then uses List, which answers or shows what is wrong
        # the pods that have the ids by pod-resources; of several, or none, the caller asks for all
        live = {
            (held.owner.namespace, held.owner.pod)
            for held in listed
            if _concerns(held, resource, ids)
        }
        return (
            self._evidence(checkpoint, _Listed(listed), about, whole=False)
            if len(live) == 1
            else None
        )

    async def _checkpoint_and_expected(
        self, resource: str, ids: frozenset[str]
    ) -> tuple[
        _Checkpoint,
        list[CheckpointEntry],
        set[tuple[str, str] | None],
        asyncio.Task[tuple[Holding, ...] | None] | None,
    ]:
        """Return the checkpoint, its entries about ``ids``, the names of their pods (None for a pod
        that is not known yet), and the finished `_get` for these pods.

        The last is None where another pod was expected, or none.
        """
        # the pod that had the ids before, and the containers that cannot be the one that starts
        had, holders = self._by_last_reading(resource, ids)
        # `StartingPods.expected` gives no other start the same container until the block ends
        expected_now = (
            contextlib.nullcontext(had)
            if had
            else self._starting_pods.expected(resource, len(ids), excluding=holders)
        )
        with expected_now as expected:
            asked: asyncio.Task[tuple[Holding, ...] | None] | None = None
            async with asyncio.TaskGroup() as both:
                if expected is not None:
                    asked = both.create_task(
                        self._get([expected]), name="pod-resources, about the pod that is expected"
                    )
                checkpoint = await self._checkpoint()
                about = checkpoint.about(resource, ids)
                names = {self._starting_pods.name_of(entry.pod_uid) for entry in about}
                if asked is not None and names != {expected}:
                    asked.cancel()  # its answer would not count, and it may take seconds
                    asked = None
        return checkpoint, about, names, asked

    def _by_last_reading(
        self, resource: str, ids: frozenset[str]
    ) -> tuple[tuple[str, str] | None, frozenset[tuple[str, str]]]:
        """Return, by the last reading, the pod that had ``ids``,
        and UID and container of all that had any of the resource.

        In a burst of starts, a pod that had these ids is the one that starts, and a container that
        had others is not.
        """
        if (last := self._checkpoint.last) is None:
            return None, frozenset()
        uids = {entry.pod_uid for entry in last.about(resource, ids)}
        # `live`: None if it has ended
        had = self._starting_pods.name_of(uids.pop(), live=True) if len(uids) == 1 else None
        return had, last.containers_with(resource)

    async def _get(self, pods: Collection[tuple[str, str]]) -> tuple[Holding, ...] | None:
        """Return pod-resources' records of ``pods``; None when it cannot answer for single pods."""
        try:
            return await self._pod_resources.get(pods, self._is_wanted)
        except KubeletError:
            return None

    def _is_wanted(self, resource: str) -> bool:
        return resource in self._starting_pods.decided_by_pod

    async def _read_both(self) -> tuple[_Checkpoint, _Listed]:
        if self._until_idle is not None:
            await self._until_idle()
        try:
            listed = _Listed(await self._pod_resources.list(self._is_wanted))
        except KubeletError as err:
            listed = _Listed(None, str(err))
        # After List, which makes the kubelet forget ended pods, so that fewer of them are still in
        # the file.
        return await self._read_checkpoint(), listed

    async def _read_checkpoint(self) -> _Checkpoint:
        try:
            return _Checkpoint(await read_checkpoint(self._path, self._is_wanted))
        except CheckpointError as err:
            return _Checkpoint(None, str(err))

    def _evidence(
        self,
        checkpoint: _Checkpoint,
        listed: _Listed,
        about: Sequence[CheckpointEntry],
        *,
        whole: bool,
    ) -> KubeletEvidence:
        trouble = [each for each in (listed.trouble, checkpoint.trouble) if each]
        answers = {}
        for entry in checkpoint.entries or () if self._needs_all_answers() else about:
            if not entry.alloc_resp:
                continue
            try:
                answers[entry.pod_uid, entry.container_name, entry.resource_name] = (
                    checkpoint.answer(entry)
                )
            except CheckpointError as err:
                trouble.append(str(err))
        return KubeletEvidence(
            checkpoint=(
                None if checkpoint.entries is None else tuple(as_holding(entry) for entry in about)
            ),
            pod_resources=listed.holdings,
            answers=answers,
            trouble="; ".join(trouble),
            whole=whole,
        )


def _concerns(holding: Holding, resource: str, ids: frozenset[str]) -> bool:
    return holding.resource == resource and not ids.isdisjoint(holding.ids)
