"""Says which pods run on a device that the node no longer has, e.g. because somebody cut its GPU into other MIG instances.

Nothing can be taken from such a pod, and nothing is: its work fails or ends by itself, and kubelet keeps its ids until then. But the
operator who changed the geometry should read whom it hit. A loop of `composition`; the number of such grants is a metric of its own.

As long as the pod is there, its GPU is not given out on other terms. That is the ledger's rule; what it needs to know after a restart to
follow it is written down from here.
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
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory

_logger = log.get(__name__)

_GATHERING_SECONDS = 0.1  # a start of a container books several times, and nobody waits for what is told here
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


class VanishedDevices:
    """Watches the ledger for grants whose device is gone.

    State: what was told, so that each pod is named once for each device; after a restart it is told again.
    """

    def __init__(self, settings: Settings, ledger: Ledger, *, inventory: Callable[[], Inventory], journal: Journal) -> None:
        self._memory = SliceMemory(settings.state_directory)
        self._ledger = ledger
        self._inventory = inventory
        self._journal = journal
        self._told: dict[tuple[int, str], str] = {}  # (number of the grant, device) → pod

    async def recall(self) -> None:
        """Tell the ledger what MIG instances there were before the agent started; before anything is offered."""
        self._ledger.slices.update(await self._memory.recall())

    async def run(self) -> None:
        """Look at every change of devices or grants, for ever; a loop for the supervisor."""
        async for _ in self._ledger.revision.changes(gathering_seconds=_GATHERING_SECONDS):
            self.look()

    async def remember(self) -> None:
        """Write down what MIG instances there are, for ever; a loop of its own, because a disk may hang."""
        async for _ in self._ledger.revision.changes(gathering_seconds=_GATHERING_SECONDS):
            await self._memory.keep(self._ledger.slices)

    def look(self) -> None:
        """Tell what is new: a pod that lost its device, or a device that came back to its pod."""
        live = {grant.number: grant for grant in self._ledger.grants}
        vanished = dict(self._vanished(live.values()))
        for (number, device), grant in vanished.items():
            if (number, device) not in self._told and grant.owner is not None:  # who holds it is known a second later at the latest
                self._told[number, device] = grant.owner.pod_name
                known = self._ledger.slices.get(device)
                self._journal.record(
                    "grant.device_vanished",
                    level="warning",
                    pod=grant.owner.pod_name,
                    container=grant.owner.container,
                    resource=grant.resource,
                    device=device,
                    gpu=known.gpu if known else "",
                    ids=list(grant.ids),
                    grant=number,
                    meaning="the pod runs on a device that this node no longer has; delete it when its work has failed",
                )
        for number, device in [key for key in self._told if key not in vanished]:
            pod = self._told.pop((number, device))
            if number in live:
                self._journal.record("grant.device_back", pod=pod, device=device, grant=number)

    def _vanished(self, grants: Iterable[Grant]) -> Iterator[tuple[tuple[int, str], Grant]]:
        inventory = self._inventory()
        if not inventory.gpus:  # the driver has not answered yet, which says nothing about any device
            return
        present = inventory.devices
        for grant in grants:
            yield from (((grant.number, share.device), grant) for share in grant.shares if share.device not in present)
