"""The metrics of the family, which have the names of vgpu-manager's device-monitor, so that its
dashboards go on working (vgpu-manager §10.1).

They are served at an address of their own while ``vgpuManager.exporter.address`` is set: a cluster
may scrape port 3456 of all its nodes, whichever agent a node has. Grants come from
the ledger, not from annotations, so they are shown before the API server has them. An unknown value
is absent.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from vgpu_agent.families.spec import FamilyMetric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vgpu_agent.families.spec import Readings
    from vgpu_agent.model import ControlledUse, Gpu, GpuUsage, Grant, MigInstance, Share

    _Row = tuple[tuple[str, ...], float]
    _Rows = Callable[[Readings], Iterable[_Row]]
    _Held = tuple[Grant, int, Share]  # the number: the place of the share in its container

_SERVICE = "vGPU"
# the names of labels: of cards, of MIG instances, and of what containers have of both
_CARD = ("node", "device_idx", "device_uuid", "device_type")
_PHYSICAL = (*_CARD, "pci_bus_id", "minor_num", "mig_enabled", "capability", "numa_node")
_INSTANCE = ("node", "device_idx", "device_uuid", "parent_uuid", "ci_id", "gi_id", "profile")
_HOLDER = ("pod_namespace", "pod_name", "container_name")
_CONTAINER = (*_HOLDER, "vdevice_idx", "device_uuid", "node")
_ALLOCATED = ("node", "device_idx", "device_uuid", "parent_uuid", *_HOLDER)


def _metric(name: str, labels: tuple[str, ...], text: str, rows: _Rows) -> FamilyMetric:
    """Make a gauge, with the label ``service`` that all of them have."""

    def labelled(readings: Readings) -> Iterator[_Row]:
        for values, value in rows(readings):
            yield (*values, _SERVICE), value

    return FamilyMetric(name, (*labels, "service"), text, labelled)


# -- the node -------------------------------------------------------------------------------------


def _build(readings: Readings) -> Iterator[_Row]:
    where = f"linux/{platform.machine()}"
    yield (readings.node, readings.version, "", readings.commit, where, ""), 1


def _configuration(readings: Readings) -> Iterator[_Row]:
    # the family's own, with vgpu-manager's file of settings for each node
    settings = readings.in_force
    if settings:
        values = (
            settings["device_split_count"],
            settings["device_cores_scaling"],
            settings["device_memory_scaling"],
            settings["device_memory_factor"],
        )
        yield (readings.node, *(f"{value:g}" for value in values)), 1


def _driver(readings: Readings) -> Iterator[_Row]:
    inventory = readings.inventory
    if inventory.driver_version:
        versions = (inventory.driver_version, inventory.cuda_version, inventory.nvml_version)
        yield (readings.node, *versions), 1


# -- cards ----------------------------------------------------------------------------------------


def _card(readings: Readings, number: int, gpu: Gpu) -> tuple[str, ...]:
    """Return the labels of a card. ``number`` is that of `Inventory.numbered`: unlike NVML's index
    it does not change when another card is lost.
    """
    return (readings.node, str(number), gpu.uuid, gpu.name)


def _physical(value: Callable[[Gpu, GpuUsage | None], float | None]) -> _Rows:
    """Make the rows of one series per card, for those that have the value."""

    def rows(readings: Readings) -> Iterator[_Row]:
        usage = {one.uuid: one for one in readings.usage}
        for number, gpu in readings.inventory.numbered.items():
            major, minor = gpu.compute_capability
            if (found := value(gpu, usage.get(gpu.uuid))) is not None:
                yield (
                    (
                        *_card(readings, number, gpu),
                        gpu.pci_bus_id,
                        str(gpu.minor),
                        str(gpu.mig_enabled).lower(),
                        f"{major}.{minor}",
                        "-1" if gpu.numa_node is None else str(gpu.numa_node),
                    ),
                    found,
                )

    return rows


def _memory_used(_: Gpu, usage: GpuUsage | None) -> float | None:
    return None if usage is None else _bytes(usage.memory_used_mib)


def _memory_percent(gpu: Gpu, usage: GpuUsage | None) -> float | None:
    if usage is None or usage.memory_used_mib is None or not gpu.memory_mib:
        return None
    return 100 * usage.memory_used_mib / gpu.memory_mib


def _shared(readings: Readings) -> Iterator[tuple[int, Gpu]]:
    """Yield the cards that are granted in shares."""
    for number, gpu in readings.inventory.numbered.items():
        if not gpu.mig_enabled:
            yield number, gpu


def _held(readings: Readings) -> Iterator[_Held]:
    """Yield grant, place in its container and share, for each share of a card."""
    cards = {gpu.uuid for _, gpu in _shared(readings)}
    for grant in readings.grants:
        for place, share in enumerate(grant.shares):
            if share.device in cards:
                yield grant, place, share


def _scaled(readings: Readings, mib: float) -> float:
    """Return, in bytes, the memory that is offered for ``mib`` of the cards' own memory."""
    return int(_memory_scaling(readings) * mib) << 20


def _memory_scaling(readings: Readings) -> float:
    return float(readings.in_force.get("device_memory_scaling", 1.0))


def _physical_bytes(readings: Readings, mib: int) -> float:
    """Return, in bytes, the card's own memory behind ``mib`` of the memory that is offered. That is
    less only where more is offered than the card has.
    """
    return float(int(mib / max(1.0, _memory_scaling(readings)) * (1 << 20)))


def _each_shared(value: Callable[[Readings, Gpu, list[Share]], float]) -> _Rows:
    """Make the rows of one series for each card that is granted in shares."""

    def rows(readings: Readings) -> Iterator[_Row]:
        if not readings.in_force:
            return  # the family has not been built yet
        shares: dict[str, list[Share]] = {}
        for _, _, share in _held(readings):
            shares.setdefault(share.device, []).append(share)
        for number, gpu in _shared(readings):
            found = value(readings, gpu, shares.get(gpu.uuid, []))
            yield _card(readings, number, gpu), found

    return rows


def _of_node(value: Callable[[Readings, Gpu, list[Share]], float]) -> _Rows:
    """Make the row with the sum over all cards."""
    each = _each_shared(value)

    def rows(readings: Readings) -> Iterator[_Row]:
        # version 0: nothing has been read of the GPUs yet
        if readings.in_force and readings.inventory.version:
            yield (readings.node,), sum(found for _, found in each(readings))

    return rows


def _total(readings: Readings, gpu: Gpu, _: list[Share]) -> float:
    return _scaled(readings, gpu.memory_mib)


def _total_physical(_: Readings, gpu: Gpu, __: list[Share]) -> float:
    return gpu.memory_mib << 20


def _assigned(_: Readings, __: Gpu, shares: list[Share]) -> float:
    return sum(share.memory_mib for share in shares) << 20


def _assigned_physical(readings: Readings, _: Gpu, shares: list[Share]) -> float:
    return _physical_bytes(readings, sum(share.memory_mib for share in shares))


def _cores(readings: Readings, _: Gpu, __: list[Share]) -> float:
    return int(100 * float(readings.in_force.get("device_cores_scaling", 1.0)))


def _split(readings: Readings, _: Gpu, __: list[Share]) -> float:
    return int(readings.in_force.get("device_split_count", 0))


# middle of the name, beginning of the help, value
_MEMORY_SUMS = (
    ("total_memory", "The memory that is offered", _total),
    ("total_physical_memory", "The cards' own memory", _total_physical),
    ("assigned_memory", "The memory that is given out", _assigned),
    (
        "assigned_physical_memory",
        "The cards' own memory behind what is given out",
        _assigned_physical,
    ),
)


# -- containers -----------------------------------------------------------------------------------


def _container(value: Callable[[Readings, Share], float | None]) -> _Rows:
    """Make the rows of one series for each share of a card whose holder is known by name."""
    return _container_using(lambda readings, share, _: value(readings, share))


def _container_using(
    value: Callable[[Readings, Share, ControlledUse | None], float | None],
) -> _Rows:
    """Make the same rows for a ``value`` that also gets what the container uses."""

    def rows(readings: Readings) -> Iterator[_Row]:
        # of the containers that the backend `vgpu-control` limits
        uses = {(one.namespace, one.pod, one.container): one for one in readings.controlled}
        for grant, place, share in _held(readings):
            owner = grant.owner
            if owner is None or not owner.pod:
                continue
            names = (owner.namespace, owner.pod, owner.container)
            if (found := value(readings, share, uses.get(names))) is not None:
                yield (*names, str(place), share.device, readings.node), found

    return rows


def _limit(_: Readings, share: Share) -> float | None:
    return share.memory_mib << 20 if share.memory_mib else None


def _physical_limit(readings: Readings, share: Share) -> float | None:
    return _physical_bytes(readings, share.memory_mib) if share.memory_mib else None


def _physical_used(readings: Readings, share: Share, use: ControlledUse | None) -> float | None:
    """Return the memory that the container's processes have on the card."""
    on_card = next((one for one in readings.usage if one.uuid == share.device), None)
    if use is None or use.pids is None or on_card is None:
        return None
    own = frozenset(use.pids)
    return sum(mib for pid, mib in on_card.processes if pid in own) << 20


def _used(readings: Readings, share: Share, use: ControlledUse | None) -> float | None:
    """Return that memory, and what has spilled: memory that was allocated for the card and lies in
    the host's.
    """
    physical, gpu = _physical_used(readings, share, use), readings.inventory.gpu(share.device)
    if use is None or physical is None or gpu is None:
        return None
    return physical + dict(use.spilled_bytes).get(gpu.index, 0)


def _used_percent(readings: Readings, share: Share, use: ControlledUse | None) -> float | None:
    used, limit = _used(readings, share, use), share.memory_mib << 20
    return None if used is None or not limit else 100 * used / limit


def _compute(readings: Readings, share: Share, use: ControlledUse | None) -> float | None:
    gpu = readings.inventory.gpu(share.device)
    return None if use is None or gpu is None else dict(use.cores_percent).get(gpu.index)


# -- MIG ------------------------------------------------------------------------------------------


def _instances(readings: Readings) -> Iterator[tuple[int, Gpu, MigInstance]]:
    for number, gpu in readings.inventory.numbered.items():
        for instance in gpu.mig_instances:
            yield number, gpu, instance


def _instance(value: Callable[[MigInstance, int | None], float | None]) -> _Rows:
    """Make the rows of one series a MIG instance. ``value`` gets the instance, and its memory in
    use in MiB, None where that is not known.
    """

    def rows(readings: Readings) -> Iterator[_Row]:
        used = {uuid: mib for usage in readings.usage for uuid, mib in usage.instances_used_mib}
        for number, gpu, instance in _instances(readings):
            if (found := value(instance, used.get(instance.uuid))) is not None:
                yield (
                    (
                        readings.node,
                        f"{number}:{instance.index}",
                        instance.uuid,
                        gpu.uuid,
                        str(instance.compute_instance_id),
                        str(instance.gpu_instance_id),
                        instance.profile,
                    ),
                    found,
                )

    return rows


def _instance_percent(instance: MigInstance, used_mib: int | None) -> float | None:
    if used_mib is None or not instance.memory_mib:
        return None
    return 100 * used_mib / instance.memory_mib


def _allocated(readings: Readings) -> Iterator[_Row]:
    known = {found[2].uuid: found for found in _instances(readings)}
    for grant in readings.grants:
        owner = grant.owner
        if owner is None or not owner.pod:
            continue
        for share in grant.shares:
            if share.device in known:
                number, gpu, instance = known[share.device]
                where = (readings.node, f"{number}:{instance.index}", instance.uuid, gpu.uuid)
                yield (*where, owner.namespace, owner.pod, owner.container), 1


def _bytes(mib: int | None) -> float | None:
    return None if mib is None else mib << 20


METRICS = (
    _metric(
        "exporter_build_info",
        ("node", "version", "branch", "commit", "platform", "date"),
        "The running build of the agent; always 1. `branch` and `date` are empty.",
        _build,
    ),
    _metric(
        "physical_gpu_device_total_memory_in_bytes",
        _PHYSICAL,
        "Bytes of memory of the card.",
        _physical(lambda gpu, _: gpu.memory_mib << 20),
    ),
    _metric(
        "physical_gpu_device_memory_usage_in_bytes",
        _PHYSICAL,
        "Bytes in use on the card.",
        _physical(_memory_used),
    ),
    _metric(
        "physical_gpu_device_memory_utilization_percent",
        _PHYSICAL,
        "Percent of the card's memory in use.",
        _physical(_memory_percent),
    ),
    _metric(
        "physical_gpu_device_core_utilization_percent",
        _PHYSICAL,
        "Percent of the last sample period in which a kernel ran on the card.",
        _physical(lambda _, usage: None if usage is None else usage.utilisation_percent),
    ),
    _metric(
        "physical_gpu_device_health_status",
        _PHYSICAL,
        (
            "1 when the driver reports the card healthy, 0 when not. A card that is excluded, "
            "cordoned or serves another family may be healthy."
        ),
        _physical(lambda gpu, _: gpu.present and gpu.health.ok),
    ),
    _metric(
        "node_gpu_device_configuration_info",
        ("node", "device_split", "cores_scaling", "memory_scaling", "memory_factor"),
        "The settings in force; always 1.",
        _configuration,
    ),
    _metric(
        "node_gpu_device_driver_version_info",
        ("node", "driver_version", "cuda_version", "nvml_version"),
        "The NVIDIA driver, the newest CUDA that it serves, and its NVML; always 1.",
        _driver,
    ),
    *(
        _metric(
            f"node_vgpu_device_{name}_in_bytes",
            ("node",),
            f"{text}, in bytes, over all cards that are given out in shares.",
            _of_node(value),
        )
        for name, text, value in _MEMORY_SUMS
    ),
    _metric(
        "vgpu_device_total_cores_number",
        _CARD,
        "Percent of compute that is offered.",
        _each_shared(_cores),
    ),
    _metric(
        "vgpu_device_assigned_cores_number",
        _CARD,
        "Percent of compute that is given out.",
        _each_shared(lambda _, __, shares: sum(share.cores_percent for share in shares)),
    ),
    _metric(
        "vgpu_device_peak_shared_containers_number",
        _CARD,
        "How many containers may share the card.",
        _each_shared(_split),
    ),
    _metric(
        "vgpu_device_current_shared_containers_number",
        _CARD,
        "How many containers share the card.",
        _each_shared(lambda _, __, shares: len(shares)),
    ),
    *(
        _metric(
            f"vgpu_device_{name}_in_bytes",
            _CARD,
            f"{text}, in bytes.",
            _each_shared(value),
        )
        for name, text, value in _MEMORY_SUMS
    ),
    _metric(
        "container_vgpu_device_memory_limit_in_bytes",
        _CONTAINER,
        "Bytes that the container may use of the card as it is offered; vdevice_idx is the card's "
        "place in the container.",
        _container(_limit),
    ),
    _metric(
        "container_vgpu_device_physical_memory_limit_in_bytes",
        _CONTAINER,
        "Bytes of the card's own memory behind the container's limit.",
        _container(_physical_limit),
    ),
    _metric(
        "container_vgpu_device_memory_usage_in_bytes",
        _CONTAINER,
        "Bytes that the container uses of the card; absent while they cannot be read.",
        _container_using(_used),
    ),
    _metric(
        "container_vgpu_device_physical_memory_usage_in_bytes",
        _CONTAINER,
        "Bytes of the card's own memory that the container uses.",
        _container_using(_physical_used),
    ),
    _metric(
        "container_vgpu_device_memory_utilization_percent",
        _CONTAINER,
        "The memory in use in percent of the limit.",
        _container_using(_used_percent),
    ),
    _metric(
        "container_vgpu_device_core_utilization_percent",
        _CONTAINER,
        "Percent of the card's compute that the container uses; absent while it cannot be read.",
        _container_using(_compute),
    ),
    _metric(
        "mig_device_total_memory_in_bytes",
        _INSTANCE,
        "Bytes of memory of the MIG instance.",
        _instance(lambda instance, _: instance.memory_mib << 20),
    ),
    _metric(
        "mig_device_memory_usage_in_bytes",
        _INSTANCE,
        "Bytes in use on the MIG instance.",
        _instance(lambda _, used_mib: _bytes(used_mib)),
    ),
    _metric(
        "mig_device_memory_utilization_percent",
        _INSTANCE,
        "Percent of the MIG instance's memory in use.",
        _instance(_instance_percent),
    ),
    _metric(
        "container_mig_device_allocation_info",
        _ALLOCATED,
        "A MIG instance that a container holds; always 1.",
        _allocated,
    ),
)
