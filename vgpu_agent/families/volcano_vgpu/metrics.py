"""The metrics of the family, which have the names of volcano-vgpu-device-plugin's monitor,
so that its dashboards keep working.

They exist only while the family is on, because a cluster that keeps its plugin may have other
exporters that use the same names. Names, labels and units are those of volcano-vgpu §6.
`Device_memory_desc_of_container` is left out: four of its labels are numbers of bytes, so that each
change of memory adds a series; its value is that of `vGPU_device_memory_usage_in_bytes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.spec import FamilyMetric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.families.spec import Readings
    from vgpu_agent.model import ContainerUsage, GpuUsage

_Row = tuple[tuple[str, ...], float]  # the values of the labels, and the metric's value

# the labels of a metric of cards, and of one of containers
_CARD = ("deviceidx", "deviceuuid", "zone")
_CONTAINER = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone")
_ZONE = "vGPU"  # the value of ``zone`` in all series of the replaced monitor


def _memory_used(usage: GpuUsage) -> float | None:
    return None if usage.memory_used_mib is None else usage.memory_used_mib << 20


def _since_last_kernel(usage: ContainerUsage, now: float) -> float | None:
    """Return the seconds since the container launched a kernel;
    a container and the agent have the same clock.
    """
    return max(0.0, now - usage.last_kernel_at) if usage.last_kernel_at else None


def _each_card(value: Callable[[GpuUsage], float | None]) -> Callable[[Readings], Iterator[_Row]]:
    """Make a reading with one series per card, for those whose driver reports the value."""

    def rows(readings: Readings) -> Iterator[_Row]:
        index = {gpu.uuid: str(gpu.index) for gpu in readings.inventory.gpus}
        for usage in readings.usage:
            if usage.uuid in index and (found := value(usage)) is not None:
                yield (index[usage.uuid], usage.uuid, _ZONE), found

    return rows


def _each_container(
    value: Callable[[ContainerUsage, float], float | None],
) -> Callable[[Readings], Iterator[_Row]]:
    """Make a reading with one series for each device of a container.

    The names of devices come from the container. Those that the node does not have are left out, so
    that no container can fill a database with labels.
    """

    def rows(readings: Readings) -> Iterator[_Row]:
        for usage in readings.containers:
            if (
                readings.inventory.device(usage.uuid)
                and (found := value(usage, readings.now)) is not None
            ):
                yield (
                    (
                        usage.namespace,
                        usage.pod,
                        usage.container,
                        str(usage.index),
                        usage.uuid,
                        _ZONE,
                    ),
                    found,
                )

    return rows


METRICS = (
    FamilyMetric(
        "HostGPUMemoryUsage",
        _CARD,
        (
            "Bytes in use on the card. This and the other names of volcano-vgpu-device-plugin's "
            "monitor are there only with families.volcanoVgpu."
        ),
        _each_card(_memory_used),
    ),
    FamilyMetric(
        "HostCoreUtilization",
        _CARD,
        "Percent of the last sample period in which a kernel ran on the card.",
        _each_card(lambda usage: usage.utilisation_percent),
    ),
    FamilyMetric(
        "vGPU_device_memory_usage_in_bytes",
        _CONTAINER,
        "Bytes that the container uses of the device, as its libvgpu.so counts; vdeviceid is the "
        "device's place in the container.",
        _each_container(lambda usage, _: usage.used_bytes),
    ),
    FamilyMetric(
        "vGPU_device_memory_limit_in_bytes",
        _CONTAINER,
        "Bytes of the device that the container may use.",
        _each_container(lambda usage, _: usage.limit_bytes),
    ),
    FamilyMetric(
        "Device_utilization_desc_of_container",
        _CONTAINER,
        "Percent of the device's compute that the container uses, as its libvgpu.so measures; 0 "
        "where it cannot.",
        _each_container(lambda usage, _: usage.cores_percent),
    ),
    FamilyMetric(
        "Device_last_kernel_of_container",
        _CONTAINER,
        "Seconds since the container launched a kernel; absent until it has.",
        _each_container(_since_last_kernel),
    ),
)
