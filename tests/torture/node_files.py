"""The node's disk: the specs of CDI names, as the runtime would find them at any moment.

A `Carrier` in memory. It outlives agents, loses its specs with a reboot (``/run`` is empty then),
can be full, and takes its time, so that an agent may be killed between the host's files and the
spec.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tests.torture.story import Story
from vgpu_agent.allocation.carrier import GrantRecord, cdi_name
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import Edits, Provision


class NodeFiles:
    """Specs by CDI name; what the agent under test knows as its `Carrier`."""

    def __init__(self, rng: random.Random, story: Story) -> None:
        self._rng, self._story = rng, story
        self._specs: dict[str, tuple[GrantRecord, Edits]] = {}
        self._prepared: dict[str, GrantRecord] = {}
        self.directories: set[str] = set()
        self.full = False

    # -- the runtime's side ------------------------------------------------------------------------

    def spec(self, name: str) -> Edits | None:
        """Return the edits of the CDI name at this moment; None when there are none."""
        found = self._specs.get(name)
        return found[1] if found else None

    def reboot(self) -> None:
        """``/run`` is empty; host directories stay."""
        self._specs = {}

    @property
    def left_over(self) -> list[str]:
        """Return the files that are still there at the end of an episode."""
        return [*self._specs, *(record.token for record in self._prepared.values())]

    # -- the agent's side --------------------------------------------------------------------------

    @property
    def records(self) -> tuple[GrantRecord, ...]:
        """The grants whose specs are there now, and those that were answered in Allocate."""
        return (*(record for record, _ in self._specs.values()), *self._prepared.values())

    has_outdated_spec = False

    async def has_usable_spec(self, token: str) -> bool:
        """Tell whether the spec is there; a reboot removes them all."""
        return cdi_name(token) in self._specs

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        """Host files, then the spec.

        Raises:
            HostFileError: the disk is full.
        """
        await self._make(provision)
        self._specs[cdi_name(record.token)] = record, provision.edits
        self._story.tell("spec written", record.owner.pod_uid, record.owner.container, record.token)
        await asyncio.sleep(self._rng.random() * 0.002)

    def withdraw(self, token: str) -> None:
        """Make the name undefined again."""
        self._specs.pop(cdi_name(token), None)

    async def write_host_files(self, record: GrantRecord, provision: Provision) -> None:
        """Host files only.

        Raises:
            HostFileError: the disk is full.
        """
        await self._make(provision)
        self._prepared[record.token] = record

    async def collect(self, keep: Callable[[GrantRecord], bool]) -> tuple[GrantRecord, ...]:
        """Remove what ``keep`` does not want any more."""
        removed = []
        for name, (record, _) in list(self._specs.items()):
            if not keep(record):
                await asyncio.sleep(self._rng.random() * 0.002)
                if name in self._specs and self._specs[name][0] is record:
                    del self._specs[name]
                    removed.append(record)
                    self._story.tell(
                        "spec removed", record.owner.pod_uid, record.owner.container, record.token
                    )
        for token, record in list(self._prepared.items()):
            if not keep(record):
                del self._prepared[token]
                removed.append(record)
        return tuple(removed)

    async def _make(self, provision: Provision) -> None:
        await asyncio.sleep(self._rng.random() * self._rng.choice((0.001, 0.001, 0.02)))
        if self.full:
            raise HostFileError("cannot write: no space left on device; make room")
        self.directories.update(directory.path for directory in provision.directories)
        await asyncio.sleep(0)
