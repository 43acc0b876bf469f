"""The offers of a node in the words of `volcano-vgpu`:
three resources, or four, and the unit in which memory is counted.

Ids are those of the replaced plugin, because the kubelet's checkpoint holds them for running pods
(volcano-vgpu §1.2). Its memory list outgrows the kubelet's message on large cards (volcano-vgpu
D9). Here the unit grows instead, or the agent reports which one would fit. Called by `family` with
each inventory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config.types import DEVICE_MODES
from vgpu_agent.device_ids import IdBlock, NumberedIds, list_size_bytes, why_too_long
from vgpu_agent.errors import OfferError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.memory_units import LARGEST_FACTOR, smallest_fitting_factor
from vgpu_agent.families.volcano_vgpu.mig.layouts import groups_of
from vgpu_agent.families.volcano_vgpu.requests import Names
from vgpu_agent.families.volcano_vgpu.settings import FAMILY, HAMI_CORE, MIG
from vgpu_agent.model import Decider, Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.volcano_vgpu.files import Overlay
    from vgpu_agent.families.volcano_vgpu.geometries import ModelGeometries
    from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
    from vgpu_agent.model import Gpu, Inventory

# The shortest time between two answers to the handshake: an old scheduler asks in an annotation of
# the Node whether the agent is alive, and the agent answers there.
HANDSHAKE_SECONDS = 15.0
_SETTINGS = "volcanoVgpu"  # the section of this family's settings

# All device modes, as in the replaced plugin.
ALL_MODES = ListOptions(enabled=DEVICE_MODES)


class Offer(msgspec.Struct, frozen=True):
    """The offers of this node in the family's words.

    Attributes:
        names: of the resources.
        factor: MiB in one unit of memory.
        units: GPU UUID → its memory in units, in the order in which schedulers count the GPUs.
        mode: `HAMI_CORE` or `MIG`.
    """

    names: Names
    factor: int
    units: Mapping[str, int]
    mode: str = HAMI_CORE


class VolcanoVgpuOptions(msgspec.Struct, frozen=True):
    """The settings by which this node offers its GPUs.

    Attributes:
        names: of the resources.
        offer_percentage: the percentage resource is offered as well.
        split: how many containers may share one GPU.
        factor: MiB in one unit of memory; 0 for the smallest power of two with which the list of
            the memory's ids fits into a message to the kubelet.
        memory_scaling: how many times a GPU's memory is offered.
        cores_scaling: the same for compute.
        limit_cores: compute is limited as well as booked.
        hidden_uuids: GPUs that are not offered.
        hidden_indices: the same, by number: the NVML index, which a GPU keeps here when one before
            it is lost.
        policy: ``binpack`` or ``spread``, for pods that no GPU scheduler has placed.
        handshake_seconds: shortest time between two answers to an old scheduler's handshake.
        lists: how containers get their devices.
        mode: `HAMI_CORE`, or `MIG` for shares that are MIG instances.
        geometries: how GPUs may be divided in the mode `MIG`, from the ConfigMap.
        set_in: settings that a file of the replaced plugin has set, and that file, for errors: it
            is the place to change them.
    """

    names: Names = msgspec.field(default_factory=Names)
    offer_percentage: bool = False
    split: int = 10
    factor: int = 0
    memory_scaling: float = 1.0
    cores_scaling: float = 1.0
    limit_cores: bool = True
    hidden_uuids: frozenset[str] = frozenset()
    hidden_indices: frozenset[int] = frozenset()
    policy: str = "binpack"
    handshake_seconds: float = 15.0
    lists: ListOptions = ALL_MODES
    mode: str = HAMI_CORE
    geometries: tuple[ModelGeometries, ...] = ()
    set_in: tuple[tuple[str, str], ...] = ()

    def place_of(self, setting: str) -> str:
        """Return the place where a change of ``setting`` takes effect."""
        file = dict(self.set_in).get(setting)
        return f"{setting} in {file}" if file else f"{_SETTINGS}.{setting}"

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        vgpu: VolcanoVgpu,
        *,
        lists: ListOptions,
        node_config: Overlay | None = None,
        geometries: tuple[ModelGeometries, ...] = (),
    ) -> VolcanoVgpuOptions:
        """Return the configured options.

        Args:
            settings: those of the agent.
            vgpu: the family's own, with the files of the replaced plugin already applied to them
                (`Overlay.applied_to`).
            lists: as for every family; this family's own settings choose which further devices the
                NVIDIA runtime is asked for.
            node_config: the node's own file, for the GPUs that it hides.
            geometries: those of the ConfigMap.
        """
        return cls(
            names=Names(
                number=vgpu.number_resource,
                memory=vgpu.memory_resource,
                cores=vgpu.cores_resource,
                percentage=vgpu.memory_percentage_resource,
            ),
            offer_percentage=vgpu.offer_memory_percentage,
            split=vgpu.device_split_count,
            factor=vgpu.gpu_memory_factor,
            memory_scaling=vgpu.device_memory_scaling,
            cores_scaling=vgpu.device_core_scaling,
            limit_cores=not vgpu.disable_core_limit,
            hidden_uuids=node_config.hidden_uuids if node_config else frozenset(),
            hidden_indices=node_config.hidden_indices if node_config else frozenset(),
            policy=settings.binding.policy,
            handshake_seconds=HANDSHAKE_SECONDS,
            lists=msgspec.structs.replace(lists, enabled=vgpu.device_modes),
            mode=vgpu.operating_mode,
            geometries=geometries,
        )


def visible_gpus(
    inventory: Inventory, hidden_uuids: frozenset[str], hidden_indices: frozenset[int]
) -> tuple[Gpu, ...]:
    """Return the GPUs that the node configuration, a file of the replaced plugin, does not hide.
    ``hidden_indices`` has numbers: a GPU keeps its own when one before it is lost.
    """
    return tuple(
        gpu
        for number, gpu in inventory.numbered.items()
        if gpu.uuid not in hidden_uuids and number not in hidden_indices
    )


def shared_gpus(inventory: Inventory, options: VolcanoVgpuOptions) -> tuple[Gpu, ...]:
    """Return the GPUs that are offered, by minor number,
    which is how schedulers count them (volcano-vgpu §2.1).

    Hidden ones are left out. So are GPUs in MIG mode, which cannot run anything as a whole, or,
    where the shares are MIG instances, GPUs without known geometries.
    """
    offered = (
        gpu
        for gpu in visible_gpus(inventory, options.hidden_uuids, options.hidden_indices)
        if (
            # `groups_of`: the ways in which a GPU of this model may be divided
            bool(groups_of(gpu, options.geometries)) if options.mode == MIG else not gpu.mig_enabled
        )
    )
    return tuple(sorted(offered, key=lambda gpu: (gpu.minor, gpu.index)))


def offer_of(inventory: Inventory, options: VolcanoVgpuOptions) -> Offer:
    """Return the unit of memory, and each GPU's memory in it."""
    gpus = shared_gpus(inventory, options)
    # where even `LARGEST_FACTOR`, the limit of the settings, makes the list too long, it is refused
    factor = options.factor or _fitting_factor(gpus, options) or LARGEST_FACTOR
    return Offer(
        options.names,
        factor,
        {gpu.uuid: _units(gpu, options.memory_scaling, factor) for gpu in gpus},
        options.mode,
    )


def resources_of(inventory: Inventory, options: VolcanoVgpuOptions) -> tuple[Resource, ...]:
    """Return number, memory, cores, and the percentage where it is offered;
    nothing on a node without GPUs to share.

    Only the number's ids are booked and answered; the others are there for schedulers to count
    (volcano-vgpu §1, §4).

    Raises:
        OfferError: a list would not fit into a message of the kubelet; the text names what would
            (kubelet V13). Or, in the mode `MIG`, no geometry is known for any of the GPUs that are
            not hidden.
    """
    gpus, names = shared_gpus(inventory, options), options.names
    if not gpus:
        _check_geometries(inventory, options)
        return ()
    offer = offer_of(inventory, options)
    cores = int(100 * options.cores_scaling)
    number = _ids(gpus, "-", lambda _: options.split)
    resources = [
        Resource(
            names.number,
            FAMILY,
            number,
            holders_per_device=options.split,
            memory_scaling=options.memory_scaling,
            cores_scaling=options.cores_scaling,
            pre_start_required=True,  # the kubelet is to call PreStartContainer
            decided_by=Decider.POD,  # by the pod's limits and annotations, not by the ids
            offers_preference=False,  # the kubelet need not ask which ids suit best
            # named where there are too many ids
            ids_setting=options.place_of("deviceSplitCount"),
        ),
        _counted(names.memory, _memory_ids(gpus, offer), options.place_of("gpuMemoryFactor")),
        _counted(
            names.cores,
            _ids(gpus, "-core-", lambda _: cores),
            options.place_of("deviceCoreScaling"),
        ),
    ]
    if options.offer_percentage:
        # 100 percent for each container that may share the GPU (volcano-vgpu D8)
        percents = _ids(gpus, "-memory-percentage-", lambda _: 100 * options.split)
        resources.append(_counted(names.percentage, percents, options.place_of("deviceSplitCount")))
    _check_lists(resources, gpus, options)
    return tuple(resources)


def _check_geometries(inventory: Inventory, options: VolcanoVgpuOptions) -> None:
    visible = visible_gpus(inventory, options.hidden_uuids, options.hidden_indices)
    if options.mode != MIG or not visible:
        return
    models = ", ".join(dict.fromkeys(gpu.name for gpu in visible))
    problem = (
        f"{options.place_of('operatingMode')} is {MIG}, and knownMigGeometries of the ConfigMap "
        f"volcano-vgpu-device-config has no entry for {models}; add one, or choose {HAMI_CORE}"
    )
    raise OfferError({options.names.number: problem})


def left_out(inventory: Inventory, options: VolcanoVgpuOptions) -> tuple[str, ...]:
    """Return a sentence for each GPU model that cannot be offered beside others that can,
    because its geometries are not known.
    """
    if options.mode != MIG or not shared_gpus(inventory, options):
        return ()
    unknown: dict[str, list[str]] = {}
    for gpu in visible_gpus(inventory, options.hidden_uuids, options.hidden_indices):
        if not groups_of(gpu, options.geometries):
            unknown.setdefault(gpu.name, []).append(f"GPU {gpu.index} ({gpu.uuid})")
    return tuple(
        f"{', '.join(gpus)}: nothing of {'it' if len(gpus) == 1 else 'them'} is offered, because "
        f"{options.place_of('operatingMode')} is {MIG}, and knownMigGeometries of the ConfigMap "
        f"volcano-vgpu-device-config has no entry for {model}; add one, or leave such GPUs out by "
        "filterdevices in the node configuration"
        for model, gpus in unknown.items()
    )


def _counted(name: str, ids: NumberedIds, ids_setting: str) -> Resource:
    """Return a resource that is only there for schedulers to count; ``ids_setting`` is the setting
    that decides how many ids it has.
    """
    return Resource(
        name,
        FAMILY,
        ids,
        decided_by=Decider.NOBODY,  # its ids are neither booked nor answered
        offers_preference=False,
        ids_setting=ids_setting,
    )


def _units(gpu: Gpu, scaling: float, factor: int) -> int:
    """Return a GPU's memory: MiB, times the scaling, in whole units."""
    return int(gpu.memory_mib * scaling) // factor


def _memory_ids(gpus: Sequence[Gpu], offer: Offer) -> NumberedIds:
    return _ids(gpus, "-memory-", lambda gpu: offer.units[gpu.uuid])


def _ids(gpus: Sequence[Gpu], infix: str, count: Callable[[Gpu], int]) -> NumberedIds:
    """Return ids ``<UUID><infix><n>``, ``count(gpu)`` for each GPU, without NUMA nodes."""
    return NumberedIds(
        tuple(
            IdBlock(f"{gpu.uuid}{infix}", count(gpu), device=gpu.uuid)
            for gpu in gpus
            if count(gpu) > 0
        )
    )


def _fitting_factor(gpus: Sequence[Gpu], options: VolcanoVgpuOptions) -> int | None:
    def size_bytes(factor: int) -> int:
        return list_size_bytes(
            _ids(gpus, "-memory-", lambda gpu: _units(gpu, options.memory_scaling, factor))
        )

    return smallest_fitting_factor(size_bytes)


def _check_lists(
    resources: Sequence[Resource], gpus: Sequence[Gpu], options: VolcanoVgpuOptions
) -> None:
    problems = {}
    for resource in resources:
        ids = resource.ids
        problem = why_too_long(list_size_bytes(ids) if isinstance(ids, NumberedIds) else 0)
        if not problem:
            continue
        remedy = f"{resource.ids_setting}: choose less"
        if resource.name == options.names.memory and (fitting := _fitting_factor(gpus, options)):
            remedy = f"{resource.ids_setting}: {fitting} would fit, or 0 to have it chosen"
        problems[resource.name] = f"{len(ids)} ids {problem}; {remedy}"
    if problems:
        raise OfferError(problems)
