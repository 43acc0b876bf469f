"""The part of the catalogue that has the names of volcano-vgpu-device-plugin's monitor, so that its dashboards go on working.

Names, labels and units are those of volcano-vgpu §6. `Device_memory_desc_of_container` is left out: four of its labels are
numbers of bytes, so that each change of memory is one more series; its value is that of `vGPU_device_memory_usage_in_bytes`. Read by
`catalogue`.
"""

from __future__ import annotations

from vgpu_agent.web import readings_volcano
from vgpu_agent.web.metric import Kind, Metric

_CARD = ("deviceidx", "deviceuuid", "zone")
_CONTAINER = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone")

VOLCANO: tuple[Metric, ...] = (
    Metric(
        "HostGPUMemoryUsage",
        Kind.GAUGE,
        _CARD,
        "Bytes in use on the card; with families.volcanoVgpu, as all names without vgpu_agent.",
        readings_volcano.each_card(readings_volcano.memory_used),
    ),
    Metric(
        "HostCoreUtilization",
        Kind.GAUGE,
        _CARD,
        "Percent of the last sample period in which a kernel ran on the card.",
        readings_volcano.each_card(lambda usage: usage.utilisation_percent),
    ),
    Metric(
        "vGPU_device_memory_usage_in_bytes",
        Kind.GAUGE,
        _CONTAINER,
        "Bytes that the container uses of the device, as its libvgpu.so counts; vdeviceid is the device's place in the container.",
        readings_volcano.each_container(lambda usage, _: usage.used_bytes),
    ),
    Metric(
        "vGPU_device_memory_limit_in_bytes",
        Kind.GAUGE,
        _CONTAINER,
        "Bytes of the device that the container may use.",
        readings_volcano.each_container(lambda usage, _: usage.limit_bytes),
    ),
    Metric(
        "Device_utilization_desc_of_container",
        Kind.GAUGE,
        _CONTAINER,
        "Percent of the device's compute that the container uses, as its libvgpu.so measures; 0 where it cannot.",
        readings_volcano.each_container(lambda usage, _: usage.cores_percent),
    ),
    Metric(
        "Device_last_kernel_of_container",
        Kind.GAUGE,
        _CONTAINER,
        "Seconds since the container launched a kernel; absent until it has.",
        readings_volcano.each_container(readings_volcano.since_last_kernel),
    ),
)
