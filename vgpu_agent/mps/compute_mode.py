"""The compute mode of the GPUs of one daemon:
exclusive while MPS shares them, so that no process exceeds its limit.

A GPU in that mode takes one process: the MPS server. While the GPU serves another family (one at a
time) it must take others, so it is in the default mode until the last share of the other family is
returned (``lent``). A GPU that has left the daemon's resource gets the default mode for good,
unless another daemon has it by then. Called by `daemon`.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import MpsError
from vgpu_agent.isolation.mps import DEFAULT, EXCLUSIVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from vgpu_agent.mps.host_tools import HostTool


class Claims:
    """The daemon that made each GPU exclusive last: one that ends late must not undo the mode of
    its successor under another name.

    State: resource by GPU, and a lock by GPU, since two programs that set one mode at the same time
    could end in either order.
    """

    def __init__(self) -> None:
        self.resource: dict[str, str] = {}
        self.lock: collections.defaultdict[str, asyncio.Lock] = collections.defaultdict(
            asyncio.Lock
        )


class ComputeModes:
    """The compute modes that were set, by GPU; empty where unsure.
    Others may change them, so each daemon start sets them.
    """

    def __init__(self, smi: HostTool, resource: str, claims: Claims) -> None:
        self._smi, self._resource, self._claims = smi, resource, claims
        self._set: dict[str, str] = {}

    def forget(self) -> None:
        """Forget all modes: the next `bring` sets every mode."""
        self._set = dict.fromkeys(self._set, "")

    async def bring(
        self, uuids: Iterable[str], lent: frozenset[str], others: Iterable[str] = ()
    ) -> str:
        """Make all of ``uuids`` but the ``lent`` exclusive,
        and reset ``others`` and those that were exclusive before.

        Args:
            uuids: the GPUs of the daemon.
            lent: those of them that are in use by another family now.
            others: GPUs that get the default mode.

        Returns:
            why one of the others could not be given back, which is tried again the next time; empty
            when all are.

        Raises:
            MpsError: one of ``uuids`` cannot be set; all others are.
        """
        wanted = {uuid: DEFAULT if uuid in lent else EXCLUSIVE for uuid in uuids}
        kept = await self._each(
            self._give_back(uuid)
            for uuid in list(dict.fromkeys([*others, *self._set]))
            if uuid not in wanted
        )
        if errors := await self._each(self._bring_one(uuid, mode) for uuid, mode in wanted.items()):
            raise errors[0]
        # one that is lost must not keep the others from being shared
        return str(kept[0]) if kept else ""

    async def release(self, uuids: Iterable[str]) -> None:
        """The default mode for all of ``uuids``, and for those that were given to `bring` before.

        Raises:
            MpsError: a mode cannot be set; all others are.
        """
        if errors := await self._each(
            self._give_back(uuid) for uuid in dict.fromkeys([*uuids, *self._set])
        ):
            raise errors[0]

    async def _each(self, changes: Iterable[Awaitable[None]]) -> list[MpsError]:
        """Do all of them, whether or not one fails."""
        errors: list[MpsError] = []
        for change in changes:
            try:
                await change
            except MpsError as err:
                errors.append(err)
        return errors

    async def _bring_one(self, uuid: str, mode: str) -> None:
        if self._set.get(uuid) == mode and self._claims.resource.get(uuid) == self._resource:
            return
        self._set[uuid] = ""
        async with self._claims.lock[uuid]:
            self._claims.resource[uuid] = self._resource
            await self._smi.run("-i", uuid, "-c", mode)
        self._set[uuid] = mode

    async def _give_back(self, uuid: str) -> None:
        async with self._claims.lock[uuid]:
            if self._claims.resource.get(uuid, self._resource) != self._resource:
                self._set[uuid] = DEFAULT  # it is another daemon's, which sees to it
                return
            if self._set.get(uuid) != DEFAULT:
                self._set[uuid] = ""
                await self._smi.run("-i", uuid, "-c", DEFAULT)
            self._set[uuid] = DEFAULT
            self._claims.resource.pop(uuid, None)
