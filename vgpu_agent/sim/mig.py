"""Cutting a simulated GPU into MIG instances: which profile goes where.

`SimulatedNode.set_mig` calls it. Follows the driver in what fits (memory slices, number of
instances, compute slices) and in the numbers that instances get; the driver's preference among free
places is not imitated.
"""

from __future__ import annotations

import ctypes
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.layout import MIG_DEVICES, Gpu, MigProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY_SLICES: Final = 8
_COMPUTE_SLICES: Final = 7
# By the number of memory slices, the id of the first instance of that size in the driver. GPU
# instances are numbered as nodes of a binary tree over the memory slices: 0 is the whole, 1 and
# 2 the halves, and so on.
_FIRST_ID_OF_SIZE: Final = {8: 0, 4: 1, 2: 3, 1: 7}
# number of compute slices → NVML's number of the compute instance profile
_COMPUTE_PROFILE_OF_SLICES: Final = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
_PROFILE = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<name>\d+g\.\d+gb.*)")


@dataclass(frozen=True, slots=True)
class Request:
    """One requested instance.

    Attributes:
        text: the profile as it was asked for, e.g. ``1c.2g.20gb``.
        row: the place of the profile among those of the GPU.
        profile: the profile of the GPU instance.
        compute_slices: of its one compute instance.
    """

    text: str
    row: int
    profile: MigProfile
    compute_slices: int


def cut(gpu: Gpu, profiles: Sequence[str], uuids: Sequence[str] | None) -> None:
    """Replace the GPU's instances by these, e.g. ``["3g.40gb", "1c.2g.20gb"]``;
    an empty list switches MIG mode off.

    ``uuids`` are those of the instances, in the same order; None to derive them from the GPU's UUID
    and the place of the instance, so that they are the same each time.

    Raises:
        SimulationError: the model has no MIG, does not know a profile, or they do not fit together;
            nothing is changed then.
    """
    if not gpu.mig_capable and profiles:
        raise SimulationError(
            f"{gpu.name.decode()} cannot be cut into MIG instances; choose an A100, H100, H200, "
            "B200 or RTX-PRO-6000"
        )
    requests = [_request(gpu, text) for text in profiles]
    starts = _place(requests)
    chosen_uuids = (
        list(uuids)
        if uuids is not None
        else [_uuid(gpu, start, request) for start, request in zip(starts, requests, strict=True)]
    )
    if len(chosen_uuids) != len(requests):
        raise SimulationError(
            f"{len(chosen_uuids)} UUIDs for {len(requests)} MIG instances; give one for each, or "
            "none at all"
        )
    ctypes.memset(ctypes.byref(gpu.mig_devices), 0, ctypes.sizeof(gpu.mig_devices))
    gpu.mig_current = gpu.mig_pending = int(bool(requests))
    # `slot`: the place in the GPU's table of instances
    for slot, (request, start, mig_uuid) in enumerate(
        zip(requests, starts, chosen_uuids, strict=True)
    ):
        _fill(gpu, slot, request, start, mig_uuid)


def copy(source: Gpu, target: Gpu) -> None:
    """Cut ``target``, which processes that use the simulated NVML may be reading, as ``source`` is
    cut; nothing else of it is touched.
    """
    field = Gpu.mig_devices
    ctypes.memmove(
        ctypes.byref(target, field.offset), ctypes.byref(source, field.offset), field.size
    )
    target.mig_current, target.mig_pending = source.mig_current, source.mig_pending


def _request(gpu: Gpu, text: str) -> Request:
    match = _PROFILE.fullmatch(text.removeprefix("MIG ").strip())
    for row, profile in enumerate(gpu.profiles):
        if match is None or not profile.valid or profile.name.decode() != match["name"]:
            continue
        slices = int(match["compute"] or profile.slices)
        if slices not in _COMPUTE_PROFILE_OF_SLICES or slices > profile.slices:
            raise SimulationError(
                f"MIG profile {text!r}: a {match['name']} instance has {profile.slices} compute "
                "slices"
            )
        return Request(text, row, profile, slices)
    known = ", ".join(profile.name.decode() for profile in gpu.profiles if profile.valid)
    raise SimulationError(f"{gpu.name.decode()} has no MIG profile {text!r}; it has {known}")


def _place(requests: Sequence[Request]) -> list[int]:
    """Find a first memory slice for each request, the largest placed first."""
    wanted = ", ".join(request.text for request in requests)
    # `MIG_DEVICES`: the length of the GPU's table of instances
    if (
        sum(request.profile.slices for request in requests) > _COMPUTE_SLICES
        or len(requests) > MIG_DEVICES
    ):
        raise SimulationError(
            f"MIG instances {wanted} need more than the GPU's {_COMPUTE_SLICES} compute slices; "
            "ask for fewer"
        )
    taken: set[int] = set()
    starts = [0] * len(requests)
    for number in sorted(
        range(len(requests)), key=lambda each: -requests[each].profile.placement_size
    ):
        profile = requests[number].profile
        same = sum(request.row == requests[number].row for request in requests)
        places = [
            range(start, start + profile.placement_size)
            for start in profile.placement_start[: profile.placement_count]
        ]
        free = [place for place in places if taken.isdisjoint(place)]
        if not free or same > profile.instances:
            raise SimulationError(
                f"MIG instances {wanted} do not fit on one GPU: no place for "
                f"{requests[number].text}"
            )
        starts[number] = free[0].start
        taken.update(slice_ for slice_ in free[0] if slice_ < _MEMORY_SLICES)
    return starts


def _uuid(gpu: Gpu, start: int, request: Request) -> str:
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'{gpu.uuid.decode()}/{start}/{request.text}')}"


def _fill(gpu: Gpu, slot: int, request: Request, start: int, mig_uuid: str) -> None:
    profile, device = request.profile, gpu.mig_devices[slot]
    whole = request.compute_slices == profile.slices
    shown = profile.name.decode() if whole else f"{request.compute_slices}c.{profile.name.decode()}"
    device.gpu_instance = (
        _FIRST_ID_OF_SIZE[profile.placement_size] + start // profile.placement_size
    )
    device.compute_instance = 0
    device.gpu_instance_profile = profile.id
    device.compute_instance_profile = _COMPUTE_PROFILE_OF_SLICES[request.compute_slices]
    device.gpu_instance_slices = profile.slices
    device.compute_instance_slices = request.compute_slices
    device.multiprocessors = profile.multiprocessors * request.compute_slices // profile.slices
    for engines in ("copy_engines", "decoders", "encoders", "jpegs", "ofas", "memory_mib"):
        setattr(device, engines, getattr(profile, engines))
    device.placement_start, device.placement_size = start, profile.placement_size
    device.uuid = mig_uuid.encode()
    device.name = f"{gpu.name.decode()} MIG {shown}".encode()
    device.used = 1
