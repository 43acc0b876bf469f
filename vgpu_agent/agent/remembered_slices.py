"""Of which GPU each MIG instance was, kept in a file of the node: after a restart nobody else could tell of one that is gone.

Somebody may cut a GPU anew while pods hold its instances, and kubelet's records name those by their UUIDs only. A process of such a pod may
still be at work, so the GPU is not given out whole or to another family, before a restart and after it. The file is a cache in
``stateDirectory``: where it is lost, such an instance holds up nothing. Used by `vanished`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.ledger.accounting import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_logger = log.get(__name__)

_FILE = "slices.json"
_REMEDY = (
    "make stateDirectory a directory with room in which the agent can write; until then a restart forgets of which GPU a MIG instance was "
    "that is gone"
)


class RememberedSlice(msgspec.Struct, frozen=True, rename="camel"):
    """One MIG instance that this node has or had: its UUID, its GPU's, and its memory."""

    uuid: str
    gpu: str
    memory_mib: int


class SliceMemory:
    """The file in ``directory``; what cannot be written is logged once, and tried again at the next change."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / _FILE
        self._written: tuple[RememberedSlice, ...] = ()
        self._complained = False

    async def recall(self) -> dict[str, Device]:
        """The instances that were written last, the newest last; none where there is no file or it is damaged."""
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            self._written = msgspec.json.decode(content, type=tuple[RememberedSlice, ...])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            remedy = "it is written anew; pods on MIG instances that were cut away hold up nothing until then"
            _logger.warning("memory.unreadable", path=str(self._path), error=str(err), remedy=remedy)
            return {}
        return {each.uuid: Device(each.uuid, each.gpu, each.memory_mib) for each in self._written}

    async def keep(self, slices: Mapping[str, Device]) -> None:
        """Write ``slices``, when they differ from what was written last."""
        if slices.keys() == {each.uuid for each in self._written}:  # what an instance was never changes
            return
        facts = tuple(_facts(slices.values()))
        try:
            await asyncio.to_thread(self._write, msgspec.json.encode(facts))
        except OSError as err:
            if not self._complained:
                _logger.warning("memory.not_written", path=str(self._path), error=str(err), remedy=_REMEDY)
            self._complained = True
            return
        self._written, self._complained = facts, False

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".new")
        unfinished.write_bytes(content)
        os.replace(unfinished, self._path)


def _facts(slices: Iterable[Device]) -> Iterable[RememberedSlice]:
    return (RememberedSlice(each.uuid, each.gpu, each.memory_mib) for each in slices)
