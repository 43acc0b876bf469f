"""The resources that a node offers for `vgpu-manager`: one id for each container that may share a
card; and, for quotas, the cards' compute and memory (vgpu-manager §2.1, §2.2).

Only ids of ``vgpu-number`` are booked, and answered with a container's edits. Compute and memory
are lists of ids that only schedulers and ResourceQuotas count. Called by `family` with each
inventory.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import IdBlock, NumberedIds, list_size_bytes, why_too_long
from vgpu_agent.errors import OfferError, listed
from vgpu_agent.families.memory_units import smallest_fitting_factor
from vgpu_agent.families.mig_instances import SINGLE
from vgpu_agent.families.vgpu_manager.settings import FAMILY
from vgpu_agent.model import Decider, Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.model import Gpu, Inventory

LIBRARY_CARDS = 16
"""The number of cards of a node that libvgpu-control.so can limit: its tables have one row for each
(vgpu-manager §7.7).
"""

PACKED_CARDS = 256
"""The most cards that packed ids can tell apart: the number takes one byte of the packed value."""

_LONGEST_PACKED = 14  # characters of a varint of ten bytes, the longest that protobuf has
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")

_SETTINGS = "vgpuManager"  # the family's section of the settings


def shared_gpus(inventory: Inventory, options: VgpuManagerOptions) -> tuple[Gpu, ...]:
    """Return the GPUs that ``vgpu-number`` has ids of, in the order of `Inventory.numbered`, where
    a GPU keeps its number when another one is lost.

    Excluded ones are among them: they are advertised as unhealthy and not hidden (vgpu-manager
    §2.1). The MIG strategy `SINGLE` is for nodes whose GPUs are all divided, so there are none.
    """
    if options.mig_strategy == SINGLE:
        return ()
    return tuple(gpu for gpu in inventory.numbered.values() if not gpu.mig_enabled)


def never_granted(inventory: Inventory, options: VgpuManagerOptions) -> dict[str, str]:
    """Return the GPUs of which the family's containers never get anything: UUID → reason."""
    reasons = {}
    for number, gpu in inventory.numbered.items():
        if why := _why_excluded(number, gpu, options):
            reasons[gpu.uuid] = why
        elif number >= LIBRARY_CARDS:
            reasons[gpu.uuid] = (
                f"libvgpu-control.so knows {LIBRARY_CARDS} GPUs of a node, and this is number "
                f"{number}, counted from 0"
            )
    return reasons


def why_excluded(gpu: Gpu, inventory: Inventory, options: VgpuManagerOptions) -> str:
    """Explain why no container gets the GPU if the operator has excluded it; empty when not."""
    numbers = (number for number, each in inventory.numbered.items() if each.uuid == gpu.uuid)
    return next((_why_excluded(number, gpu, options) for number in numbers), "")


def _why_excluded(number: int, gpu: Gpu, options: VgpuManagerOptions) -> str:
    excluded = gpu.uuid in options.excluded_uuids or number in options.excluded_indices
    return f"excluded by {_SETTINGS}.excludeDevices" if excluded else ""


def memory_mib(gpu: Gpu, options: VgpuManagerOptions) -> int:
    """Return the memory that the card is offered with, which may be more than it has."""
    return int(options.memory_scaling * gpu.memory_mib)


def cores_percent(options: VgpuManagerOptions) -> int:
    """Return the compute that each card is offered with."""
    return int(options.cores_scaling * 100)


def resources_of(inventory: Inventory, options: VgpuManagerOptions) -> tuple[Resource, ...]:
    """Return ``vgpu-number``, and the lists for quotas that are on; nothing on a node without GPUs
    to share.

    A list for quotas that is too long for a message to the kubelet is left out, and `cautions_of`
    has a sentence about it.

    Raises:
        OfferError: the ids of ``vgpu-number`` alone do not fit into a message to the kubelet.
    """
    gpus = shared_gpus(inventory, options)
    if not gpus:
        return ()
    booked = _booked(gpus, inventory, options)
    if excess := _excess(booked):
        raise OfferError({booked.name: f"{excess}; {booked.ids_setting}: choose less"})
    fitting = (each for each in _counted(inventory, options) if not _excess(each))
    return (booked, *fitting)


def offered_names(inventory: Inventory, options: VgpuManagerOptions) -> frozenset[str]:
    """Return the names of `resources_of`; none where it cannot be offered as configured."""
    try:
        return frozenset(resource.name for resource in resources_of(inventory, options))
    except OfferError:
        return frozenset()


def cautions_of(inventory: Inventory, options: VgpuManagerOptions) -> tuple[str, ...]:
    """Return a sentence for each list that is too long to be offered, and for cards that the
    library cannot limit.
    """
    cautions = []
    beyond = [
        f"GPU {number} ({gpu.uuid})"
        for number, gpu in inventory.numbered.items()
        if number >= LIBRARY_CARDS and not gpu.mig_enabled
    ]
    if beyond:
        cautions.append(
            f"{listed(beyond)}: published as unhealthy and given to no container of {FAMILY}, "
            f"because libvgpu-control.so knows {LIBRARY_CARDS} GPUs of a node; offer such GPUs by "
            "another family"
        )
    cautions += [
        f"{resource.name} is not offered: {excess}; {_remedy(resource, inventory, options)}. "
        "Until then pods that ask for it wait, unless their scheduler ignores it as vgpu-manager's "
        "does"
        for resource in _counted(inventory, options)
        if (excess := _excess(resource))
    ]
    return tuple(cautions)


def _booked(gpus: Iterable[Gpu], inventory: Inventory, options: VgpuManagerOptions) -> Resource:
    ids = NumberedIds(
        tuple(
            IdBlock(f"{gpu.uuid}::", count=options.split, device=gpu.uuid, numa_node=gpu.numa_node)
            for gpu in gpus
        )
    )
    return Resource(
        options.keys.number,
        FAMILY,
        ids,
        holders_per_device=options.split,
        memory_scaling=options.memory_scaling,
        cores_scaling=options.cores_scaling,
        pre_start_required=True,  # the kubelet is to call PreStartContainer
        decided_by=Decider.POD,  # the pod's annotations and limits; the ids decide nothing
        # the kubelet is to prefer ids of the cards that a scheduler has planned for the pod
        offers_preference=options.prefer_claimed,
        ids_setting=f"{_SETTINGS}.deviceSplitCount",  # named where there are too many ids
        requires_mig_off=True,
        init_shares=True,  # a scheduler plans shares for init containers, too
        never_granted=never_granted(inventory, options),
    )


def _counted(inventory: Inventory, options: VgpuManagerOptions) -> list[Resource]:
    """Return the lists for quotas that are on, however long."""
    resources = []
    if options.offer_cores:
        resources.append(
            _quota(
                options.keys.cores,
                lambda _: cores_percent(options),
                "deviceCoresScaling",
                inventory,
                options,
            )
        )
    if options.offer_memory:
        resources.append(
            _quota(
                options.keys.memory,
                lambda gpu: memory_mib(gpu, options) // options.memory_factor,
                "deviceMemoryFactor",
                inventory,
                options,
            )
        )
    return resources


def _quota(
    name: str,
    count: Callable[[Gpu], int],
    setting: str,
    inventory: Inventory,
    options: VgpuManagerOptions,
) -> Resource:
    """Return the list ``name``, in which each GPU has ``count`` ids. ``setting`` is the one that
    makes them fewer, for messages.
    """
    shared = {gpu.uuid for gpu in shared_gpus(inventory, options)}
    # An id is the card's number, in one byte, and a running number, both encoded in a short text.
    # Cards from the number `PACKED_CARDS` on have no ids.
    blocks = tuple(
        IdBlock("", count(gpu), device=gpu.uuid, codec=PackedIds(number))
        for number, gpu in inventory.numbered.items()
        if gpu.uuid in shared and number < PACKED_CARDS and count(gpu) > 0
    )
    return Resource(
        name,
        FAMILY,
        NumberedIds(blocks),
        decided_by=Decider.NOBODY,  # its ids are neither booked nor answered
        offers_preference=False,
        ids_setting=f"{_SETTINGS}.{setting}",
        requires_mig_off=True,
        never_granted=never_granted(inventory, options),
    )


def _excess(resource: Resource) -> str:
    """Explain by how much the list exceeds a message to the kubelet; empty when it fits."""
    problem = why_too_long(list_size_bytes(resource.ids))
    return f"{len(resource.ids)} ids {problem}" if problem else ""


def _remedy(resource: Resource, inventory: Inventory, options: VgpuManagerOptions) -> str:
    if resource.name != options.keys.memory:
        return f"{resource.ids_setting}: choose less"

    # the size of the list with ``factor`` MiB in each unit of memory, for which there is one id
    def size_bytes(factor: int) -> int:
        changed = msgspec.structs.replace(options, memory_factor=factor)
        return sum(
            list_size_bytes(each.ids)
            for each in _counted(inventory, changed)
            if each.name == resource.name
        )

    fitting = smallest_fitting_factor(size_bytes)
    if fitting is None:
        return f"no {resource.ids_setting} makes it short enough; leave it out"
    return (
        f"{resource.ids_setting}: {fitting} would fit, and is then the MiB in a unit of every "
        "pod's limit"
    )


class PackedIds(msgspec.Struct, frozen=True):
    """The codec of one card's ids of cores or memory: ``count << 8 | card`` as a protobuf varint,
    in the URL alphabet of base64 without padding (vgpu-manager §2.2, §13.2).

    A node has hundreds of thousands of them, so `device_ids.NumberedIds` makes each on request.

    Attributes:
        card: its number on the node, below `PACKED_CARDS`.
    """

    card: int

    def text(self, number: int) -> str:
        """Return the text of the id with the count ``number``."""
        value = number << 8 | self.card
        varint = bytearray()
        while value > 0x7F:
            varint.append(value & 0x7F | 0x80)
            value >>= 7
        varint.append(value)
        return binascii.b2a_base64(varint, newline=False).rstrip(b"=").translate(_TO_URL).decode()

    def number(self, text: str) -> int | None:
        """Return the count of an id; None for a text that is not one of our ids, even if it decodes
        to such a count.
        """
        if not 0 < len(text) <= _LONGEST_PACKED or not text.isascii():
            return None
        padded = text.encode().translate(_FROM_URL) + b"=" * (-len(text) % 4)
        try:
            varint = binascii.a2b_base64(padded)
        except binascii.Error:
            return None
        value = 0
        for place, byte in enumerate(varint):
            value |= (byte & 0x7F) << 7 * place
        number = value >> 8
        return number if value & 0xFF == self.card and self.text(number) == text else None
