"""The state of each grant's limit, as one of the five values of `LimitState`.

It is separate from the state of the grant: *identified* means only that the owner of the share is
known. A limit is *configured* while the settings call for it and the host shows neither its effect
nor a fault. It is *in force* once there is evidence on the host; that of a MIG instance needs none.
Used by `views`, `allocations` and `readings`, and by `agent` for events.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.isolation import vgpu_control
from vgpu_agent.isolation.backend import LibraryLimits, Target
from vgpu_agent.isolation.hami_core import DISABLED_BY, may_be_disabled
from vgpu_agent.isolation.hami_region import NO_CORES_LIMIT
from vgpu_agent.isolation.registry import VGPU_CONTROL
from vgpu_agent.model import GrantState, SharingMode
from vgpu_agent.status import MpsState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vgpu_agent.model import ContainerUsage, ControlledUse, Grant, Share
    from vgpu_agent.pods import PodContainer
    from vgpu_agent.status import AgentStatus

# families whose shares an isolation backend's library can limit
_FAMILIES_WITH_LIBRARY = frozenset(family.name for family in FAMILIES if family.library)
# `missing`: why no library limits anything
_SWITCHED_OFF = LibraryLimits(missing="the family is switched off")
_MIG_UUID_PREFIX = "MIG-"
# The memory of a process's CUDA context, which the library does not count: an upper bound.
_CONTEXT_MIB = 1024


class LimitState(enum.StrEnum):
    """The state of a grant's limit."""

    WHOLE = "whole device"  # the device is not shared, so no limit is needed
    NONE = "no limit"
    CONFIGURED = "configured"
    IN_FORCE = "in force"
    NOT_IN_FORCE = "not in force"


class Limit(msgspec.Struct, frozen=True):
    """The state of a limit, with one sentence about its evidence or about what is missing."""

    state: LimitState
    reason: str


class Limits:
    """The limits of the grants of one snapshot of the agent's state.

    State: the snapshot, its MPS daemons by resource, and its readings of regions and of containers
    under vgpu-control by (namespace, pod, container).
    """

    def __init__(self, status: AgentStatus) -> None:
        self._status = status
        self._mps = {daemon.resource: daemon for daemon in status.mps}
        self._usage_by_container: dict[tuple[str, str, str], list[ContainerUsage]] = {}
        for usage in status.containers:
            self._usage_by_container.setdefault(
                (usage.namespace, usage.pod, usage.container), []
            ).append(usage)
        self._controlled_by_container = {
            (use.namespace, use.pod, use.container): use for use in status.controlled
        }

    def of(self, grant: Grant) -> Limit | None:
        """Return the limit of ``grant``; None if it is released or has no shares yet."""
        if not grant.shares or grant.state is GrantState.RELEASED:
            return None
        if all(share.device.startswith(_MIG_UUID_PREFIX) for share in grant.shares):
            return Limit(LimitState.IN_FORCE, "the hardware limits a MIG instance")
        if grant.family in _FAMILIES_WITH_LIBRARY:
            library = self._status.binding.limits.get(grant.family, _SWITCHED_OFF)
            if library.backend == VGPU_CONTROL.name:
                return self._vgpu_control_limit(grant, library)
            return self._hami_core_limit(grant, library)
        if all(share.exclusive for share in grant.shares):
            return Limit(LimitState.WHOLE, "no other container has a share of it")
        return self._sharing_limit(grant.resource)

    def _sharing_limit(self, resource: str) -> Limit:
        sharing = self._status.ledger.sharing.get(resource, "")
        if sharing == SharingMode.MPS:
            return self._mps_limit(resource)
        if sharing == SharingMode.MPS_OF_HOST:
            return Limit(
                LimitState.NONE,
                "the host runs the MPS daemon, and its limits are not known here",
            )
        return Limit(LimitState.NONE, "the containers on the GPU take turns without limits")

    def _mps_limit(self, resource: str) -> Limit:
        daemon = self._mps.get(resource)
        if daemon is None or daemon.trouble or daemon.state is not MpsState.RUNNING:
            trouble = (daemon.trouble if daemon else "") or "its control daemon does not run"
            return Limit(LimitState.NOT_IN_FORCE, trouble)
        return Limit(LimitState.IN_FORCE, "the limits were read back from the MPS control daemon")

    def _vgpu_control_limit(self, grant: Grant, library: LibraryLimits) -> Limit:
        """Return the limit by vgpu-control, whose library obeys the container's file
        ``vgpu.config``.
        """
        owner = grant.owner
        use = (
            self._controlled_by_container.get((owner.namespace, owner.pod, owner.container))
            if owner
            else None
        )
        # where no library limits anything now, the container may have limits of an earlier one
        if library.missing and (use is None or not use.limits):
            return Limit(LimitState.NONE, library.missing)
        if self._vgpu_control_is_disabled(grant, library):
            return Limit(
                LimitState.NONE,
                f"the pod sets {vgpu_control.DISABLED_BY}, and vgpuControl.disableVariable allows "
                "it",
            )
        if use is None:
            return Limit(LimitState.CONFIGURED, "its vgpu.config has not been read yet")
        if fault := next(self._vgpu_control_faults(grant.shares, use, library), ""):
            return Limit(LimitState.NOT_IN_FORCE, fault)
        return _limit_by_evidence(use)

    def _vgpu_control_faults(
        self, shares: Sequence[Share], use: ControlledUse, library: LibraryLimits
    ) -> Iterator[str]:
        """Yield each reason why a limit by `vgpu_control` is not in force, as a sentence."""
        if use.trouble:  # its vgpu.config is not as the agent intended
            yield use.trouble
        for excess in self._excesses_in_file(shares, use, library):
            yield f"{excess}, so the container can take more than its share"
        yield from _violations(shares, use)

    def _excesses_in_file(
        self, shares: Sequence[Share], use: ControlledUse, library: LibraryLimits
    ) -> Iterator[str]:
        """Yield how the container's vgpu.config is weaker than its shares, each as the start of a
        sentence: a device that it does not name, or a limit that is too high.

        A missing limit of compute is not an error, because the agent writes none under some
        values of `vgpu_control.ComputePolicy`. Changes of the file are detected by `control_usage`,
        which reads it.
        """
        by_device = {limit.uuid: limit for limit in use.limits}
        for device, memory_mib, cores in _totals_by_device(shares):
            limit, gpu = by_device.get(device), self._status.inventory.gpu(device)
            if limit is None:
                yield f"its vgpu.config does not name {device}"
                continue
            # `memory_scaling`: how many times the memory of a card is offered
            card_mib = int(library.memory_scaling * gpu.memory_mib) if gpu else memory_mib
            if 0 < memory_mib < card_mib and not 0 < limit.memory_bytes <= memory_mib << 20:
                allowed = f"{limit.memory_bytes >> 20} MiB" if limit.memory_bytes else "all memory"
                yield f"its vgpu.config allows {allowed} of {device} instead of {memory_mib} MiB"
            # from `NO_CORES_LIMIT` percent on, the library limits no compute
            if 0 < cores < limit.cores_percent < NO_CORES_LIMIT:
                yield (
                    f"its vgpu.config allows {limit.cores_percent} % of {device} instead of "
                    f"{cores} %"
                )

    def _hami_core_limit(self, grant: Grant, library: LibraryLimits) -> Limit:
        owner = grant.owner
        used = (
            self._usage_by_container.get((owner.namespace, owner.pod, owner.container), [])
            if owner
            else []
        )
        if not used and library.missing:
            return Limit(LimitState.NONE, library.missing)
        if self._hami_core_is_disabled(grant, library):
            return Limit(
                LimitState.NONE,
                f"the pod sets {DISABLED_BY}, and hamiCore.disableVariable allows it",
            )
        if not used:
            return Limit(LimitState.CONFIGURED, "its region has not been read yet")
        if excess := next(self._excesses_in_region(grant.shares, used, library), ""):
            return Limit(
                LimitState.NOT_IN_FORCE, f"{excess}, so the container can take more than its share"
            )
        if not any(usage.processes for usage in used):
            return Limit(
                LimitState.CONFIGURED,
                "no process in the container has the library and its region open",
            )
        return Limit(
            LimitState.IN_FORCE,
            "a process in the container has the library open, and its region holds these limits",
        )

    def _excesses_in_region(
        self, shares: Sequence[Share], used: Sequence[ContainerUsage], library: LibraryLimits
    ) -> Iterator[str]:
        """Yield how the container's region is weaker than its shares, each as the start of a
        sentence: a device that it does not name, or a limit that is too high or switched off.
        """
        by_device = {usage.uuid: usage for usage in used}
        for device, shared_mib, cores in _totals_by_device(shares):
            gpu = self._status.inventory.gpu(device)
            memory_mib = shared_mib or (gpu.memory_mib if gpu else 0)
            usage = by_device.get(device)
            if usage is None:
                yield f"the region does not name {device}"
                continue
            if memory_mib and not 0 < usage.limit_bytes <= memory_mib << 20:
                allowed = f"{usage.limit_bytes >> 20} MiB" if usage.limit_bytes else "all memory"
                yield f"the region allows {allowed} of {device} instead of {memory_mib} MiB"
            # `cores`: by the settings, the library limits compute
            if library.cores and 0 < cores < NO_CORES_LIMIT:
                if not 0 < usage.cores_limit_percent <= cores:
                    yield (
                        f"the region allows {usage.cores_limit_percent or NO_CORES_LIMIT} % of "
                        f"{device} instead of {cores} %"
                    )
                elif not usage.limits_cores:
                    yield "the region's limit of compute is switched off"

    def _hami_core_is_disabled(self, grant: Grant, library: LibraryLimits) -> bool:
        """Tell whether the pod disables its limit by HAMi-core, and the settings allow that."""
        owner, container = grant.owner, self._container(grant)
        # `environment`: the names of the variables in the pod's specification that concern GPUs
        if owner is None or container is None or DISABLED_BY not in container.environment:
            return False
        pairs = tuple(
            (gpu, share)
            for share in grant.shares
            if (gpu := self._status.inventory.gpu(share.device))
        )
        # `may_be_disabled` reads only `shares`, `oversubscribed` and `unit_mib` of it; the last is
        # the smallest share of memory that the node gives
        target = Target(
            pod_uid=owner.pod_uid,
            container=owner.container,
            grant="",
            environment=container.environment,
            shares=pairs,
            oversubscribed=library.oversubscribed,
            unit_mib=library.unit_mib,
        )
        # the value of the setting, and where it came from
        setting, _ = self._status.config.get("hamiCore.disableVariable", ("whole-gpus", ""))
        return may_be_disabled(str(setting), target)

    def _vgpu_control_is_disabled(self, grant: Grant, library: LibraryLimits) -> bool:
        """Tell whether the pod disables its limit by vgpu-control, and the settings allow that."""
        container = self._container(grant)
        # `values`: the values of a few environment variables in the pod's specification
        if container is None or not vgpu_control.is_switched_on(
            container.values.get(vgpu_control.DISABLED_BY, "")
        ):
            return False
        cards = tuple(
            vgpu_control.CardLimit(
                index=0,
                uuid=gpu.uuid,
                cores_percent=share.cores_percent,
                memory_mib=share.memory_mib,
                card_memory_mib=int(library.memory_scaling * gpu.memory_mib),
            )
            for share in grant.shares
            if (gpu := self._status.inventory.gpu(share.device))
        )
        setting, _ = self._status.config.get("vgpuControl.disableVariable", ("whole-gpus", ""))
        # `may_be_disabled` reads no more of it than the cards
        target = vgpu_control.ControlTarget(
            pod_uid="", pod="", namespace="", container=container.name, ids=(), cards=cards
        )
        return vgpu_control.may_be_disabled(str(setting), target)

    def _container(self, grant: Grant) -> PodContainer | None:
        owner = grant.owner
        return next(
            (
                container
                for pod in self._status.cluster.pods
                # the API server has another UID of a static pod
                if owner and pod.kubelet_uid == owner.pod_uid
                for container in pod.containers
                if container.name == owner.container
            ),
            None,
        )


def _limit_by_evidence(use: ControlledUse) -> Limit:
    """Return the limit of a container whose vgpu.config has the right limits."""
    if not use.registers_processes:
        return Limit(
            LimitState.CONFIGURED,
            "its vgpu.config holds these limits; whether a process has the library is not known, "
            "because processes register only with vgpuControl.processes client",
        )
    if not use.pids:
        return Limit(
            LimitState.CONFIGURED,
            "no registered process of the container is known; each that has the library registers "
            "before it uses a GPU",
        )
    return Limit(
        LimitState.IN_FORCE,
        "a process in the container has registered, as the library does, and its vgpu.config "
        "holds these limits",
    )


def _violations(shares: Sequence[Share], use: ControlledUse) -> Iterator[str]:
    """Yield each use of a card by the container's processes that the limit should prevent."""
    for device, memory_mib, _ in _totals_by_device(shares):
        # process id on the host, and its MiB on the card
        own = [(pid, used) for card, pid, used in use.on_cards if card == device]
        if own and use.registers_processes and not use.pids:
            yield (
                f"process {own[0][0]} of the container uses {device} and has not registered, so it "
                "runs without the library"
            )
        used_mib = sum(used for _, used in own)
        if 0 < memory_mib < used_mib - _CONTEXT_MIB * len(own):
            yield (
                f"processes of the container have {used_mib} MiB of {device}, and its limit is "
                f"{memory_mib} MiB"
            )


def _totals_by_device(shares: Sequence[Share]) -> Iterator[tuple[str, int, int]]:
    """Yield (UUID, memory in MiB, compute in percent) of each device, summed over its shares.

    A memory of 0 is the whole memory of the device.
    """
    for device in dict.fromkeys(share.device for share in shares):
        own = [share for share in shares if share.device == device]
        whole = any(share.memory_mib <= 0 for share in own)
        memory_mib = 0 if whole else sum(share.memory_mib for share in own)
        yield device, memory_mib, sum(share.cores_percent for share in own)
