"""The MIG instances of a GPU, read so that the result was true at one moment.

The division of a GPU may change while it is read: then handles die between two calls, or a slot,
NVML's index of a MIG device, holds a different instance at the next call. So a reading counts only
when the layout after it is the one that was read. Otherwise it is made again. If the layout keeps
changing, the caller keeps the previous one and reads again soon. A change of layout is never a
fault of the GPU.

Called by `inventory` for each GPU, and by `session` for the quick check between two readings
whether the division has changed (`look`); in the thread that owns NVML.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu.return_codes import GPU_IS_LOST, INVALID_ARGUMENT, NO_PERMISSION, NOT_FOUND
from vgpu_agent.model import MigInstance

if TYPE_CHECKING:
    from vgpu_agent.gpu.capabilities import Capabilities, CapabilityMinors
    from vgpu_agent.gpu.nvml import Handle, Nvml

_TRIES = 3
# Between two tries. A tool that divides a GPU may take longer than all tries; then the caller reads
# again soon.
_PAUSE_SECONDS = 0.002

# The errors of a call about an instance that has just been destroyed.
_GONE = frozenset({NOT_FOUND, INVALID_ARGUMENT})

# NVIDIA's container runtime lets a container read MIG instances only if it sets this variable.
PERMISSION_REMEDY = (
    "give it NVIDIA_MIG_MONITOR_DEVICES=all and the capability SYS_ADMIN (components/mig-monitor)"
)


class Slot(msgspec.Struct, frozen=True):
    """One MIG device of a GPU: its place and identity.
    The UUID is empty and the ids are -1 where the driver reports none.
    """

    index: int
    uuid: str = ""
    gpu_instance_id: int = -1
    compute_instance_id: int = -1


class Layout(msgspec.Struct, frozen=True):
    """The division of a GPU: what a quick check compares with the reading before.

    Attributes:
        capable: the card supports MIG at all; one that does not never will.
        enabled: MIG mode is on now.
        slots: the instances there are.
        unread_reason: why the slots are not known; empty when they are.
    """

    capable: bool = False
    enabled: bool = False
    slots: tuple[Slot, ...] = ()
    unread_reason: str = ""


class MigReading(msgspec.Struct, frozen=True):
    """The instances of a GPU.

    Attributes:
        layout: its division.
        instances: those whose facts could all be read, by index.
        failures: the slots of the others, each with the reason.
        settled: the division did not change meanwhile; if it did, nothing else here is valid.
    """

    layout: Layout = msgspec.field(default_factory=Layout)
    instances: tuple[MigInstance, ...] = ()
    failures: tuple[tuple[Slot, str], ...] = ()
    settled: bool = True

    @property
    def trouble(self) -> str:
        """The reason why there may be more instances than ``instances``;
        empty when all were read.
        """
        return self.layout.unread_reason or "; ".join(
            dict.fromkeys(problem for _, problem in self.failures)
        )


class _LayoutMovedError(Exception):
    """An instance went away between two calls."""


def look(nvml: Nvml, handle: Handle) -> Layout | None:
    """Return the GPU's division now; None when it changed during the look.

    Raises:
        NvmlError: the card is lost, or the driver does not report whether MIG mode is on.
    """
    try:
        return _look(nvml, handle)
    except _LayoutMovedError:
        return None


def read(
    nvml: Nvml, handle: Handle, *, memory_mib: int, minor: int, capabilities: Capabilities
) -> MigReading:
    """Read the GPU's instances with all their facts.

    Args:
        nvml: the open driver.
        handle: the GPU.
        memory_mib: of the whole GPU, for names of profiles.
        minor: of the GPU; by it the driver lists the numbers of the instances' device nodes in
            /dev/nvidia-caps.
        capabilities: the driver's list of these numbers.

    Raises:
        NvmlError: the card is lost, or the driver does not report whether MIG mode is on; faults of
            one instance are in ``failures``.
    """
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        try:
            layout = _look(nvml, handle)
            if not layout.slots:
                return MigReading(layout)
            instances, failures = _describe(
                nvml, handle, layout, memory_mib, minor, capabilities.read()
            )
            if _look(nvml, handle) == layout:
                return MigReading(layout, instances, failures)
        except _LayoutMovedError:
            continue
    return MigReading(Layout(capable=True, enabled=True), settled=False)


def profile_name(
    name: str, gpu_slices: int, compute_slices: int, memory_mib: int, gpu_memory_mib: int
) -> str:
    """Return the profile, e.g. ``1g.10gb``: the text after ``MIG`` in the device's name or, where
    the name has none, the result of NVIDIA's formula for its size.

    ``gpu_slices`` are the compute slices of the GPU instance, ``compute_slices`` those of the
    compute instance in it. The gigabytes of the formula are the eighths of the GPU's memory that
    the instance takes, times the GPU's memory in whole GiB (nvidia §3); a compute instance smaller
    than its GPU instance has its own slices in front, as in ``1c.3g.20gb``.
    """
    _, found, profile = name.partition(" MIG ")
    if found and profile.strip():
        return profile.strip()
    eighths = math.ceil(8 * memory_mib / gpu_memory_mib) / 8 if gpu_memory_mib else 0.0
    gigabytes = round(eighths * math.ceil(gpu_memory_mib / 1024))
    profile = f"{gpu_slices}g.{gigabytes}gb"
    return profile if compute_slices == gpu_slices else f"{compute_slices}c.{profile}"


def _look(nvml: Nvml, handle: Handle) -> Layout:
    enabled = nvml.mig_mode(handle)
    if not enabled:
        return Layout(capable=enabled is not None)
    slots: list[Slot] = []
    try:
        count = nvml.mig_slots(handle)
    except NvmlError as err:
        if err.code != NO_PERMISSION:
            raise
        return Layout(capable=True, enabled=True, unread_reason=_explained(err))
    for index in range(count):
        slot = Slot(index)
        try:
            mig = nvml.mig_handle(handle, index)
            if mig is None:
                continue
            slot = Slot(index, nvml.uuid(mig), *nvml.mig_instance_ids(mig))
        except NvmlError as err:
            _raise_if_gone(err)  # otherwise the slot is kept, with what is known of it
        slots.append(slot)
    return Layout(capable=True, enabled=True, slots=tuple(slots))


def _describe(
    nvml: Nvml,
    handle: Handle,
    layout: Layout,
    gpu_memory_mib: int,
    minor: int,
    minors: CapabilityMinors,
) -> tuple[tuple[MigInstance, ...], tuple[tuple[Slot, str], ...]]:
    """Read all facts of the instances in ``layout``,
    and the errors of those that do not report them.
    """
    instances: list[MigInstance] = []
    failures: list[tuple[Slot, str]] = []
    for slot in layout.slots:
        try:
            mig = nvml.mig_handle(handle, slot.index)
            if mig is None:
                raise _LayoutMovedError
            uuid, ids = nvml.uuid(mig), nvml.mig_instance_ids(mig)
            gpu_slices, compute_slices, memory_mib = nvml.mig_slices(mig)
            name = nvml.name(mig)
        except NvmlError as err:
            _raise_if_gone(err)
            failures.append((slot, _explained(err)))
            continue
        # the two device nodes that open the instance to a container, or why they are not known
        nodes, trouble = minors.nodes(minor, *ids)
        instances.append(
            MigInstance(
                uuid=uuid,
                index=slot.index,
                gpu_instance_id=ids[0],
                compute_instance_id=ids[1],
                profile=profile_name(name, gpu_slices, compute_slices, memory_mib, gpu_memory_mib),
                memory_mib=memory_mib,
                gpu_slices=gpu_slices,
                compute_slices=compute_slices,
                capability_nodes=nodes,
                trouble=trouble,
            )
        )
    return tuple(instances), tuple(failures)


def _explained(err: NvmlError) -> str:
    """The error of a call about an instance, with what can be done about it."""
    return (
        f"{err}; the agent's container may not read MIG instances: {PERMISSION_REMEDY}"
        if err.code == NO_PERMISSION
        else str(err)
    )


def _raise_if_gone(err: NvmlError) -> None:
    """Return if the error concerns one fact of an instance that is still there.

    Raises:
        NvmlError: the whole card is lost.
        _LayoutMovedError: the instance has been destroyed.
    """
    if err.code == GPU_IS_LOST:
        raise err
    if err.code in _GONE:
        raise _LayoutMovedError from err
