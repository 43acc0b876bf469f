"""The compute mode of the GPUs of one MPS control daemon.

While MPS shares a GPU, its mode is ``EXCLUSIVE_PROCESS``: it takes one process, the MPS server, so
no process avoids the server and with it the limits. While containers hold the GPU through another
resource or under earlier settings, it must take any process. So it is in the ``DEFAULT`` mode until
the last of them has returned it. A GPU that has left the resource that the daemon serves gets the
default mode back, unless another daemon has it by then. Modes are set by ``nvidia-smi``. Called by
`daemon`.
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


class ModeOwners:
    """The daemon that is responsible for the mode of each GPU, shared by all daemons.

    A GPU may move to another resource, and so to another daemon. The old daemon may end later, and
    must not undo the mode that the new one has set.

    State: in memory only. `resources` is GPU UUID → the resource of the daemon, without GPUs
    whose mode was set back to the default. `locks` is GPU UUID → a lock, since two runs of
    ``nvidia-smi`` for one GPU at the same time could end in either order.
    """

    def __init__(self) -> None:
        self.resources: dict[str, str] = {}
        self.locks: collections.defaultdict[str, asyncio.Lock] = collections.defaultdict(
            asyncio.Lock
        )


class ComputeModes:
    """The setter of the compute modes for one daemon.

    State: the mode that was set last, by GPU UUID, so that no mode is set twice; empty where it is
    not known, and `DEFAULT` also where another daemon has taken the GPU. Administrators may change
    modes as well, so `daemon` calls `forget` when it starts, adopts or ends a control daemon.
    """

    def __init__(self, smi: HostTool, resource: str, owners: ModeOwners) -> None:
        """Build the setter.

        Args:
            smi: runs ``nvidia-smi``.
            resource: the resource that the daemon serves.
            owners: the record that all daemons share.
        """
        self._smi, self._resource, self._owners = smi, resource, owners
        self._last_set: dict[str, str] = {}

    def forget(self) -> None:
        """Forget all modes, so that the next `apply` or `release` sets them again, except those of
        GPUs that another daemon has by then.
        """
        self._last_set = dict.fromkeys(self._last_set, "")

    async def apply(
        self, uuids: Iterable[str], in_use_by_others: frozenset[str], former: Iterable[str] = ()
    ) -> str:
        """Set the mode of each GPU of the daemon, and the default mode for those that have left it.

        Args:
            uuids: the GPUs of the daemon; they become exclusive.
            in_use_by_others: those of them that containers hold through another resource; they get
                the default mode.
            former: GPUs that the daemon may have had earlier; those not in ``uuids`` get the
                default mode, as do those of earlier calls.

        Returns:
            The reason why the mode of one of the former GPUs could not be set, which is tried again
            at the next call; empty when all are set.

        Raises:
            MpsError: one of ``uuids`` cannot be set; all others are.
        """
        modes = {uuid: DEFAULT if uuid in in_use_by_others else EXCLUSIVE for uuid in uuids}
        not_set = await self._each(
            self._set_default(uuid)
            for uuid in list(dict.fromkeys([*former, *self._last_set]))
            if uuid not in modes
        )
        if errors := await self._each(self._apply_one(uuid, mode) for uuid, mode in modes.items()):
            raise errors[0]
        # A former GPU may have fallen off the bus. That must not keep the others from being shared.
        return str(not_set[0]) if not_set else ""

    async def release(self, uuids: Iterable[str]) -> None:
        """Set the default mode for all of ``uuids``, and for the GPUs of earlier calls. GPUs that
        another daemon has by now are left alone.

        Raises:
            MpsError: a mode cannot be set; all others are.
        """
        if errors := await self._each(
            self._set_default(uuid) for uuid in dict.fromkeys([*uuids, *self._last_set])
        ):
            raise errors[0]

    async def _each(self, changes: Iterable[Awaitable[None]]) -> list[MpsError]:
        """Await each of ``changes`` in turn, also after one has failed; return the errors."""
        errors: list[MpsError] = []
        for change in changes:
            try:
                await change
            except MpsError as err:
                errors.append(err)
        return errors

    async def _apply_one(self, uuid: str, mode: str) -> None:
        if self._last_set.get(uuid) == mode and self._owners.resources.get(uuid) == self._resource:
            return
        self._last_set[uuid] = ""
        async with self._owners.locks[uuid]:
            self._owners.resources[uuid] = self._resource
            await self._smi.run("-i", uuid, "-c", mode)
        self._last_set[uuid] = mode

    async def _set_default(self, uuid: str) -> None:
        async with self._owners.locks[uuid]:
            if self._owners.resources.get(uuid, self._resource) != self._resource:
                # nothing to do: another daemon sets this GPU's mode now
                self._last_set[uuid] = DEFAULT
                return
            if self._last_set.get(uuid) != DEFAULT:
                self._last_set[uuid] = ""
                await self._smi.run("-i", uuid, "-c", DEFAULT)
            self._last_set[uuid] = DEFAULT
            self._owners.resources.pop(uuid, None)
