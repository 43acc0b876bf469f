"""Reading what there is: each GPU that answers, with its MIG instances, its NUMA node and how it is.

A node starts with the GPUs that answer; one that does not is a line in ``failures`` and nothing more. The whole set is read again at every
poll, since a hundred calls of a few microseconds are cheaper than a second kind of reading that could disagree with the first.

Called by `session` inside the owner thread. Merging a reading with what was known before is `merge`, a pure function.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu.health import Probe
from vgpu_agent.gpu.nvml import GPU_IS_LOST
from vgpu_agent.model import Gpu, MigInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vgpu_agent.gpu.nvml import Handle, Nvml
    from vgpu_agent.model import Health

# Not a device for work: the graphics card of a DGX Station (nvidia contract §3).
_SKIPPED_NAMES = ("NVIDIA DGX Display", "DGX Display")

_NUMA_FILE_LIMIT = 8  # characters; the kernel has at most 1024 nodes, so anything longer is no number of one


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A GPU that answered: the facts, the handle for further calls, and how it is."""

    gpu: Gpu
    handle: Handle
    probe: Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs at one moment.

    Attributes:
        cards: those that answered, by index.
        failures: ``index: text`` of those that did not.
        warnings: facts that had to be left out, one sentence each; only what changed since the reading before.
    """

    cards: tuple[Card, ...] = ()
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class NumaNodes:
    """NUMA nodes from sysfs, with one warning for each change of what is wrong with a file."""

    def __init__(self, sysfs_root: Path) -> None:
        self._directory = sysfs_root / "bus" / "pci" / "devices"
        self._troubles: dict[str, str] = {}

    def node(self, pci_bus_id: str) -> tuple[int | None, str]:
        """The node of the card's slot, None when the kernel does not say, and a warning when that is news."""
        path = self._directory / pci_bus_id / "numa_node"
        node, trouble = None, ""
        try:
            with path.open(errors="replace") as file:
                text = file.read(_NUMA_FILE_LIMIT + 1).strip()
        except OSError as err:
            trouble = f"{path}: {err.strerror or err}; the GPU gets no NUMA node, check gpu.sysfsRoot"
        else:
            digits = text.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(text) <= _NUMA_FILE_LIMIT):
                trouble = f"{path}: expected a NUMA node, got {text!r}; the GPU gets none"
            elif text.startswith("-"):
                trouble = f"{path}: the kernel knows no NUMA node ({text}); the GPU gets none"
            else:
                node = int(text)
        news = trouble if trouble != self._troubles.get(pci_bus_id, "") else ""
        self._troubles[pci_bus_id] = trouble
        return node, news


def read(nvml: Nvml, numa: NumaNodes, between: Callable[[], None] = lambda: None) -> Reading:
    """Ask for every GPU; the failure of one never hides another.

    Args:
        nvml: the open driver.
        numa: where NUMA nodes come from.
        between: called before each GPU, since a reading can take long.

    Raises:
        NvmlError: not even the number of GPUs can be had.
    """
    cards: list[Card] = []
    failures: list[str] = []
    warnings: list[str] = []
    for index in range(nvml.count()):
        between()
        try:
            card = _read_card(nvml, numa, index, warnings)
        except NvmlError as err:
            failures.append(f"{index}: {err}")
        else:
            if card is not None:
                cards.append(card)
    return Reading(tuple(cards), tuple(failures), tuple(warnings))


def merge(known: Sequence[Gpu], reading: Reading, healths: Mapping[str, Health]) -> tuple[Gpu, ...]:
    """The GPUs of the next inventory: those of the reading, and at their old places those that were known and did not answer.

    Args:
        known: the GPUs of the inventory before.
        reading: what answers now.
        healths: by UUID, for every GPU of either.
    """
    answering = {card.gpu.uuid for card in reading.cards}
    gpus = [dataclasses.replace(card.gpu, health=healths[card.gpu.uuid]) for card in sorted(reading.cards, key=lambda card: card.gpu.index)]
    for gpu in sorted((gpu for gpu in known if gpu.uuid not in answering), key=lambda gpu: gpu.pci_bus_id):
        # NVML numbers cards in the order of the bus, and moves the numbers up when one is pulled; the place on the bus stays.
        place = next((place for place, other in enumerate(gpus) if other.pci_bus_id > gpu.pci_bus_id), len(gpus))
        gpus.insert(place, dataclasses.replace(gpu, present=False, health=healths[gpu.uuid]))
    return tuple(gpus)


def profile_name(name: str, gpu_slices: int, compute_slices: int, memory_mib: int, gpu_memory_mib: int) -> str:
    """``1g.10gb``: what follows ``MIG`` in the device's name, or what NVIDIA's formula makes of its size where the name has none.

    The gigabytes of the formula are the eighths of the GPU's memory that the slice takes, times the GPU's memory in whole GiB
    (nvidia contract §3); a compute instance smaller than its GPU instance is put in front.
    """
    _, found, profile = name.partition(" MIG ")
    if found and profile.strip():
        return profile.strip()
    eighths = math.ceil(8 * memory_mib / gpu_memory_mib) / 8 if gpu_memory_mib else 0.0
    gigabytes = round(eighths * math.ceil(gpu_memory_mib / 1024))
    profile = f"{gpu_slices}g.{gigabytes}gb"
    return profile if compute_slices == gpu_slices else f"{compute_slices}c.{profile}"


def _read_card(nvml: Nvml, numa: NumaNodes, index: int, warnings: list[str]) -> Card | None:
    """One GPU, None for a card that is not for work."""
    handle = nvml.handle(index)
    uuid = nvml.uuid(handle, index=index)
    name = nvml.name(handle)
    if name in _SKIPPED_NAMES:
        return None
    pci_bus_id = nvml.pci_bus_id(handle)
    with nvml.watched("read numa_node", uuid):
        numa_node, warning = numa.node(pci_bus_id)
    if warning:
        warnings.append(warning)
    memory_mib, _ = nvml.memory_mib(handle)
    mig_enabled = nvml.mig_enabled(handle)
    gpu = Gpu(
        uuid=uuid,
        index=index,
        minor=nvml.minor(handle),
        name=name,
        memory_mib=memory_mib,
        pci_bus_id=pci_bus_id,
        numa_node=numa_node,
        compute_capability=nvml.compute_capability(handle),
        mig_enabled=mig_enabled,
        mig_instances=_read_mig(nvml, handle, memory_mib) if mig_enabled else (),
    )
    return Card(gpu, handle, _probe(nvml, handle))


def _read_mig(nvml: Nvml, handle: Handle, gpu_memory_mib: int) -> tuple[MigInstance, ...]:
    instances: list[MigInstance] = []
    for index in range(nvml.mig_slots(handle)):
        mig = nvml.mig_handle(handle, index)
        if mig is None:
            continue
        gpu_instance_id, compute_instance_id = nvml.mig_instance_ids(mig)
        gpu_slices, compute_slices, memory_mib = nvml.mig_slices(mig)
        instances.append(
            MigInstance(
                uuid=nvml.uuid(mig),
                index=index,
                gpu_instance_id=gpu_instance_id,
                compute_instance_id=compute_instance_id,
                profile=profile_name(nvml.name(mig), gpu_slices, compute_slices, memory_mib, gpu_memory_mib),
                memory_mib=memory_mib,
            )
        )
    return tuple(instances)


def _probe(nvml: Nvml, handle: Handle) -> Probe:
    """How the card is. The facts before came from what the driver remembers; the temperature has to come from the card.

    Raises:
        NvmlError: the card is lost; any other failure is the probe's result.
    """
    try:
        nvml.temperature_celsius(handle)
        return Probe(recovery_action=nvml.recovery_action(handle), remap_pending=nvml.remap_pending(handle))
    except NvmlError as err:
        if err.code == GPU_IS_LOST:
            raise
        return Probe(trouble=str(err))
