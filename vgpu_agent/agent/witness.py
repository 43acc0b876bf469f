"""What kubelet's records say at this moment, for `allocation`: the checkpoint and pod-resources, side by side and unweighed.

Asked before every start of a container whose pod decides what it gets. Starts come in bursts and kubelet limits how often pod-resources may
be asked, so everybody who asks while a reading is under way shares the next one: a reading always begins after the question.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.allocation.proof import Testimony
from vgpu_agent.errors import CheckpointError, KubeletError
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.checkpoint import read_checkpoint
from vgpu_agent.model import Holding, Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.kubelet.checkpoint import CheckpointEntry
    from vgpu_agent.kubelet.pod_resources import PodResources


class KubeletWitness:
    """Reads both records; see `allocation.binder.Witness`.

    State: the last complete reading and its number, for those who asked before it began. One that was broken off counts for nobody.
    """

    def __init__(
        self,
        pod_resources: PodResources,
        checkpoint: Path,
        *,
        resources: Callable[[], Collection[str]],
        with_answers: Callable[[], bool],
    ) -> None:
        """Build it.

        Args:
            pod_resources: the client of kubelet's socket.
            checkpoint: the path of kubelet's file.
            resources: names of the resources that are of interest; the ids of others are not read at all.
            with_answers: whether our own stored answers are needed (early binding).
        """
        self._pod_resources = pod_resources
        self._checkpoint = checkpoint
        self._resources = resources
        self._with_answers = with_answers
        self._reading = asyncio.Lock()
        self._begun = self._finished = 0
        self._last = Testimony(None, None)

    async def __call__(self, resource: str, ids: Sequence[str]) -> Testimony:
        """What they say, read after this call began; of all resources of interest, because a reading is shared."""
        del resource, ids
        wanted = self._begun + 1
        async with self._reading:
            if self._finished < wanted:
                self._begun += 1
                number = self._begun
                self._last = await self._read()
                self._finished = number
            return self._last

    async def _read(self) -> Testimony:
        names, trouble = frozenset(self._resources()), []
        listed: tuple[Holding, ...] | None = None
        entries: tuple[CheckpointEntry, ...] | None = None
        try:
            listed = await self._pod_resources.list(names.__contains__)
        except KubeletError as err:
            trouble.append(str(err))
        try:
            # After List, which makes kubelet forget ended pods, so that fewer of them are still in the file.
            entries = await read_checkpoint(self._checkpoint, names.__contains__)
        except CheckpointError as err:
            trouble.append(str(err))
        return Testimony(
            checkpoint=None if entries is None else _holdings(entries),
            pod_resources=listed,
            answers=_answers(entries or (), trouble) if self._with_answers() else {},
            trouble="; ".join(trouble),
        )


def _holdings(entries: Iterable[CheckpointEntry]) -> tuple[Holding, ...]:
    return tuple(Holding(entry.resource_name, entry.ids, Owner(entry.container_name, entry.pod_uid)) for entry in entries)


def _answers(entries: Iterable[CheckpointEntry], trouble: list[str]) -> dict[tuple[str, str, str], Edits]:
    answers = {}
    for entry in entries:
        if not entry.alloc_resp:
            continue
        try:
            answers[entry.pod_uid, entry.container_name, entry.resource_name] = codec.decode_answer(entry.answer)
        except CheckpointError as err:
            trouble.append(str(err))
    return answers
