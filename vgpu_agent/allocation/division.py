"""Divide a GPU for a container that is about to start, and keep the GPU from all others meanwhile.

A GPU is divided into other MIG instances only while it has no holder of any family. From that check
until the end the ledger has it cordoned. The work itself belongs to a loop of `agent`. It goes on
when a waiting call is cancelled or has waited long enough: the kubelet retries in a moment and
finds the GPU divided. Called by `late_start`; a `Divider` does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import MigError, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.allocation.context import Context, Divider
    from vgpu_agent.families.family import MigLayout

_CORDON_OWNER = "division"  # by whom the ledger's cordons are set and lifted


class _Change(msgspec.Struct, frozen=True):
    """One GPU while it is divided for ``pod`` (``namespace/name``); ``outcome`` becomes ""
    when it is divided, or the reason why that failed.
    """

    layout: MigLayout
    pod: str
    outcome: asyncio.Future[str]


class Division:
    """The changes of how GPUs are divided, one at a time for each GPU.

    State: the changes under way, each with a cordon in the ledger that ends with it. A restart
    forgets both: the next start looks at the GPU as it is then.
    """

    def __init__(self, context: Context) -> None:
        self._ledger = context.ledger
        self._inventory = context.inventory
        self._journal = context.journal
        self._divider = context.divider
        self._under_way: dict[str, _Change] = {}  # by the UUID of the GPU

    async def bring_about(
        self, layouts: Sequence[MigLayout], family: str, pod: str, until: float
    ) -> None:
        """Return when all of ``layouts`` are in force.

        Args:
            layouts: different GPUs, each with the MIG instances that it is to have.
            family: the family in whose vocabulary the pod asks.
            pod: ``namespace/name`` of the pod that needs the division, for the messages to other
                pods.
            until: the loop's time by which the caller must have an answer; the change goes on after
                it.

        Raises:
            MigError: a GPU has a holder or is kept for another family's pod, is being divided for
                another pod, could not be divided, or not in this time.
        """
        if self._divider is None:
            raise MigError("this agent does not divide GPUs; only the operating mode mig does")
        for layout in layouts:
            self._require_free(layout, family)
        changes = [
            self._under_way.get(layout.gpu) or self._begin(layout, pod, self._divider)
            for layout in layouts
        ]
        left = until - asyncio.get_running_loop().time()
        _, waiting = await asyncio.wait(
            [change.outcome for change in changes], timeout=max(0.0, left)
        )
        for change in changes:
            if change.outcome in waiting:
                raise MigError(
                    f"GPU {change.layout.gpu} is still being divided into "
                    f"{_shown(change.layout)}; the kubelet will retry"
                )
            if reason := change.outcome.result():
                raise MigError(
                    f"GPU {change.layout.gpu} could not be divided into {_shown(change.layout)}: "
                    f"{reason}; the kubelet will retry"
                )
        await self._wait_until_settled([layout.gpu for layout in layouts], until)

    async def _wait_until_settled(self, gpus: Sequence[str], until: float) -> None:
        """Return when the new instances are in the ledger without a cordon, or when time is up. An
        instance has a cordon as long as it has no CDI name, for example.

        When time is up, the booking of the shares, which follows, reports what is wrong.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while True:
                    version, known = self._ledger.revision.version, map(self._inventory().gpu, gpus)
                    if all(
                        self._ledger.has_settled(instance.uuid)
                        for gpu in known
                        if gpu
                        for instance in gpu.mig_instances
                    ):
                        return
                    await self._ledger.revision.newer_than(version)

    def _require_free(self, layout: MigLayout, family: str) -> None:
        """Refuse a GPU that has a holder, that is kept for another family's pod,
        or that is being divided into other instances.
        """
        change = self._under_way.get(layout.gpu)
        if change is not None:
            if sorted(change.layout.profiles) != sorted(layout.profiles):
                raise MigError(
                    f"GPU {layout.gpu} is to be divided into {_shown(layout)}, and is being "
                    f"divided into {_shown(change.layout)} for {change.pod}; the kubelet will "
                    "retry"
                )
            return
        gpu = self._inventory().gpu(layout.gpu)
        if gpu is None or not gpu.present or not gpu.health.ok:
            reason = (gpu.health.reason if gpu else "") or "it does not answer"
            raise MigError(
                f"GPU {layout.gpu} cannot be divided into {_shown(layout)}: {reason}; the "
                "kubelet will retry"
            )
        devices = {gpu.uuid, *(instance.uuid for instance in gpu.mig_instances)}
        for grant in self._ledger.grants:
            if not devices.isdisjoint(share.device for share in grant.shares):
                holder = (
                    grant.owner.pod_name if grant.owner else f"a container with {listed(grant.ids)}"
                )
                raise MigError(
                    f"GPU {gpu.uuid} cannot be divided into {_shown(layout)}: {holder} has a "
                    "part of it; the kubelet will retry"
                )
        if reason := self._ledger.why_kept(gpu.uuid, family):
            raise MigError(
                f"GPU {gpu.uuid} cannot be divided into {_shown(layout)}: {reason}; the kubelet "
                "will retry"
            )

    def _begin(self, layout: MigLayout, pod: str, divider: Divider) -> _Change:
        change = self._under_way[layout.gpu] = _Change(
            layout, pod, asyncio.get_running_loop().create_future()
        )
        self._ledger.cordon(
            layout.gpu, f"it is being divided into {_shown(layout)} for {pod}", by=_CORDON_OWNER
        )
        self._journal.record(
            "mig.dividing", gpu=layout.gpu, profiles=list(layout.profiles), pod=pod
        )
        divider.divide(layout, lambda reason: self._end(change, reason))
        return change

    def _end(self, change: _Change, reason: str) -> None:
        del self._under_way[change.layout.gpu]
        self._ledger.uncordon(change.layout.gpu, by=_CORDON_OWNER)
        gpu, profiles = change.layout.gpu, list(change.layout.profiles)
        if reason:
            self._journal.record(
                "mig.not_divided",
                level="error",
                gpu=gpu,
                profiles=profiles,
                pod=change.pod,
                reason=reason,
            )
        else:
            self._journal.record("mig.divided", gpu=gpu, profiles=profiles, pod=change.pod)
        if not change.outcome.done():
            change.outcome.set_result(reason)


def _shown(layout: MigLayout) -> str:
    return ", ".join(
        f"{layout.profiles.count(profile)} × {profile}"
        for profile in dict.fromkeys(layout.profiles)
    )
