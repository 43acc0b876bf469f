"""The compute mode of the GPUs of one daemon: exclusive while MPS shares them, so that nobody uses one past its limit.

A GPU in that mode takes one process: the MPS server. While the GPU serves another family (one at a time) it must take others, so it is
*lent*: back in the default mode until the last share of the other family is returned. Called by `daemon`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.isolation.mps import DEFAULT, EXCLUSIVE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.mps.host_tools import HostTool


class ComputeModes:
    """What was set, by GPU. Somebody else may change it; it is set anew with each start of a daemon."""

    def __init__(self, smi: HostTool) -> None:
        self._smi = smi
        self._set: dict[str, str] = {}

    def forget(self) -> None:
        """Believe nothing: the next `bring` sets every mode."""
        self._set.clear()

    async def bring(self, uuids: Iterable[str], lent: frozenset[str]) -> None:
        """Exclusive for all of ``uuids`` but the ``lent``.

        Raises:
            MpsError: a mode cannot be set; the ones before it are.
        """
        for uuid in uuids:
            await self._bring_one(uuid, DEFAULT if uuid in lent else EXCLUSIVE)

    async def release(self, uuids: Iterable[str]) -> None:
        """The default mode for all of ``uuids``.

        Raises:
            MpsError: a mode cannot be set; the ones before it are.
        """
        for uuid in uuids:
            await self._bring_one(uuid, DEFAULT)

    async def _bring_one(self, uuid: str, mode: str) -> None:
        if self._set.get(uuid) != mode:
            self._set.pop(uuid, None)
            await self._smi.run("-i", uuid, "-c", mode)
            self._set[uuid] = mode
