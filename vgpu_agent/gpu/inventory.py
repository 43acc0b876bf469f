"""The reading of all GPUs: each one that answers, with its MIG instances,
its NUMA node and its health.

A node starts with the GPUs that answer; one that does not is a line in ``failures`` and nothing
more. The whole set is read again at every poll, since a hundred calls of a few microseconds are
cheaper than a second kind of reading that could disagree with the first.

Called by `session` in the thread that owns NVML. `merge`, a pure function, merges a reading with
the inventory before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import mig
from vgpu_agent.gpu.health import Probe
from vgpu_agent.gpu.mig import PERMISSION_REMEDY, MigReading
from vgpu_agent.gpu.return_codes import GPU_IS_LOST, NO_PERMISSION
from vgpu_agent.model import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vgpu_agent.gpu.capabilities import Capabilities
    from vgpu_agent.gpu.mig import Slot
    from vgpu_agent.gpu.nvml import Handle, Nvml
    from vgpu_agent.model import MigInstance

# Not a device for work: the graphics card of a DGX Station (nvidia §3).
_SKIPPED_NAMES = ("NVIDIA DGX Display", "DGX Display")

# characters; the kernel has at most 1024 nodes, so anything longer is no number of one
_NUMA_FILE_LIMIT = 8
_NO_NUMA_NODE = "-1"  # the kernel's NUMA_NO_NODE: a virtual machine, or one node for all


class Card(msgspec.Struct, frozen=True):
    """A GPU that answered.

    Attributes:
        gpu: the facts, with the MIG instances that reported all of their facts.
        handle: for further calls.
        probe: its health.
        mig: what was read about its MIG instances, with the errors.
    """

    gpu: Gpu
    handle: Handle
    probe: Probe
    mig: MigReading = msgspec.field(default_factory=MigReading)


class Reading(msgspec.Struct, frozen=True):
    """All GPUs at one moment.

    Attributes:
        cards: those that answered, by index.
        failures: ``index: text`` of those that did not.
        warnings: facts that had to be left out, one sentence each; only what changed since the
            reading before.
    """

    cards: tuple[Card, ...] = ()
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class NumaNodes:
    """NUMA nodes from sysfs, with one warning for each change of a file's error."""

    def __init__(self, sysfs_root: Path) -> None:
        self._directory = sysfs_root / "bus" / "pci" / "devices"
        self._troubles: dict[str, str] = {}

    def node(self, pci_bus_id: str) -> tuple[int | None, str]:
        """Return the NUMA node of the card at this PCI address, None when the kernel reports none
        (-1, as in a virtual machine); and a warning where there is an error that is new.
        """
        path = self._directory / pci_bus_id / "numa_node"
        node, trouble = None, ""
        try:
            with path.open(errors="replace") as file:
                text = file.read(_NUMA_FILE_LIMIT + 1).strip()
        except OSError as err:
            trouble = f"{path}: {err.strerror or err}; the GPU has no NUMA node; check /sys"
        else:
            if text.isascii() and text.isdigit() and len(text) <= _NUMA_FILE_LIMIT:
                node = int(text)
            elif text != _NO_NUMA_NODE:
                trouble = f"{path}: expected a NUMA node, got {text!r}; the GPU gets none"
        news = trouble if trouble != self._troubles.get(pci_bus_id, "") else ""
        self._troubles[pci_bus_id] = trouble
        return node, news


def read(
    nvml: Nvml,
    numa: NumaNodes,
    capabilities: Capabilities,
    between: Callable[[], None] = lambda: None,
) -> Reading:
    """Ask for every GPU; the failure of one never hides another.

    Args:
        nvml: the open driver.
        numa: where NUMA nodes come from.
        capabilities: where the device nodes of MIG instances come from.
        between: called before each GPU, to report events that are waiting: a reading can take long.

    Raises:
        NvmlError: not even the number of GPUs can be read.
    """
    cards: list[Card] = []
    failures: list[str] = []
    warnings: list[str] = []
    for index in range(nvml.count()):
        between()
        try:
            card = _read_card(nvml, numa, capabilities, index, warnings)
        except NvmlError as err:
            failures.append(f"{index}: {_explained(err)}")
        else:
            if card is not None:
                cards.append(card)
    return Reading(tuple(cards), tuple(failures), tuple(warnings))


def merge(known: Sequence[Gpu], reading: Reading) -> tuple[Gpu, ...]:
    """Return the GPUs of the next inventory: those of the reading,
    and at their old places those that were known and did not answer.

    Their health is not updated: a GPU keeps the health that it had, and a new one has the default.

    Args:
        known: the GPUs of the inventory before.
        reading: what answers now.
    """
    before = {gpu.uuid: gpu for gpu in known}
    answering = {card.gpu.uuid for card in reading.cards}
    gpus = [
        _joined(before.get(card.gpu.uuid), card)
        for card in sorted(reading.cards, key=lambda card: card.gpu.index)
    ]
    for gpu in sorted(
        (gpu for gpu in known if gpu.uuid not in answering), key=lambda gpu: gpu.pci_bus_id
    ):
        # NVML numbers cards in the order of the bus, and moves the numbers up when one is pulled;
        # the place on the bus stays.
        place = next(
            (place for place, other in enumerate(gpus) if other.pci_bus_id > gpu.pci_bus_id),
            len(gpus),
        )
        gpus.insert(place, msgspec.structs.replace(gpu, present=False))
    return tuple(gpus)


def silent_instances(gpu: Gpu, card: Card) -> dict[str, str]:
    """Return the MIG instances of ``gpu``, of the inventory before, whose facts the driver did not
    give in the reading of its ``card``: UUID → the driver's error.
    """
    if card.mig.layout.unread_reason:  # the driver's error where it lists none of them
        return {instance.uuid: card.mig.layout.unread_reason for instance in gpu.mig_instances}
    known = {instance.index: instance for instance in gpu.mig_instances}
    return {
        known[slot.index].uuid: problem
        for slot, problem in card.mig.failures
        if _is_of(slot, known.get(slot.index))
    }


def _joined(known: Gpu | None, card: Card) -> Gpu:
    """Return the GPU of a card that answered, with those facts that it keeps from the inventory
    before, where it was ``known``.
    """
    if known is None:
        return card.gpu
    # Not settled: it was divided anew while it was read, so this reading of its instances is void,
    # and the old ones are nearer to the truth.
    if not card.mig.settled:
        return msgspec.structs.replace(
            card.gpu,
            health=known.health,
            mig_enabled=known.mig_enabled,
            mig_instances=known.mig_instances,
        )
    if card.mig.layout.unread_reason:
        return msgspec.structs.replace(
            card.gpu, health=known.health, mig_instances=known.mig_instances
        )
    silent = [
        instance
        for instance in known.mig_instances
        for slot, _ in card.mig.failures
        if _is_of(slot, instance)
    ]
    instances = sorted([*card.gpu.mig_instances, *silent], key=lambda instance: instance.index)
    # The error of a known instance makes that instance unhealthy (`silent_instances`). Only other
    # errors mean that the GPU may have instances that are not known.
    trouble = "" if len(silent) == len(card.mig.failures) else card.gpu.mig_trouble
    return msgspec.structs.replace(
        card.gpu, health=known.health, mig_instances=tuple(instances), mig_trouble=trouble
    )


def _is_of(slot: Slot, instance: MigInstance | None) -> bool:
    """Tell whether the slot, a place in NVML's list of the GPU's MIG devices, holds this instance,
    as far as the slot identifies it.
    """
    return (
        instance is not None and slot.index == instance.index and slot.uuid in {"", instance.uuid}
    )


def _read_card(
    nvml: Nvml, numa: NumaNodes, capabilities: Capabilities, index: int, warnings: list[str]
) -> Card | None:
    """Read one GPU; None for a card that is not for work. Facts that have to be left out are added
    to ``warnings``.
    """
    handle = nvml.handle(index)
    # with `index`: later calls about this GPU, of which one may hang, are recorded with the UUID
    uuid = nvml.uuid(handle, index=index)
    name = nvml.name(handle)
    if name in _SKIPPED_NAMES:
        return None
    pci_bus_id = nvml.pci_bus_id(handle)
    # `watched`: counts as a call in flight, since sysfs may hang like a driver call
    with nvml.watched("read numa_node", uuid):
        numa_node, warning = numa.node(pci_bus_id)
    if warning:
        warnings.append(warning)
    memory_mib, _ = nvml.memory_mib(handle)
    minor = nvml.minor(handle)
    instances = mig.read(
        nvml, handle, memory_mib=memory_mib, minor=minor, capabilities=capabilities
    )
    gpu = Gpu(
        uuid=uuid,
        index=index,
        minor=minor,
        name=name,
        memory_mib=memory_mib,
        pci_bus_id=pci_bus_id,
        numa_node=numa_node,
        compute_capability=nvml.compute_capability(handle),
        mig_enabled=instances.layout.enabled,
        mig_instances=instances.instances,
        mig_trouble=instances.trouble,
        mig_capable=instances.layout.capable,
    )
    return Card(gpu, handle, _probe(nvml, handle), instances)


def _explained(err: NvmlError) -> str:
    """The error of a card that did not answer, with what can be done about it."""
    if err.code != NO_PERMISSION:
        return str(err)
    return (
        f"{err}; the agent's container may not open this GPU, which needs a permission in MIG "
        f"mode: {PERMISSION_REMEDY}"
    )


def _probe(nvml: Nvml, handle: Handle) -> Probe:
    """Probe the card's health. The driver answers the other calls of `_read_card` from its memory,
    but for the temperature it has to ask the card.

    Raises:
        NvmlError: the card is lost; any other failure is the probe's result.
    """
    try:
        nvml.temperature_celsius(handle)
        return Probe(
            recovery_action=nvml.recovery_action(handle), remap_pending=nvml.remap_pending(handle)
        )
    except NvmlError as err:
        if err.code == GPU_IS_LOST:
            raise
        return Probe(trouble=str(err))
