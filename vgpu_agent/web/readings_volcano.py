"""The readings of the metrics of `catalogue_volcano`: rows of label values and a number, as in `readings`.

They exist only while the family `volcano-vgpu` is switched on, because a cluster that keeps its plugin may have other
exporters that use the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.web import views
from vgpu_agent.web.readings import mib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.model import GpuUsage
    from vgpu_agent.status import AgentStatus, ContainerUsage
    from vgpu_agent.web.readings import Moment, Row

_FAMILY = "volcano-vgpu"
_ZONE = "vGPU"


def memory_used(usage: GpuUsage) -> float | None:
    """Bytes in use on a card."""
    return mib(usage.memory_used_mib)


def since_last_kernel(usage: ContainerUsage, now: float) -> float | None:
    """Seconds since the container launched a kernel; the clocks of a container and ours are the same one."""
    return max(0.0, now - usage.last_kernel_at) if usage.last_kernel_at else None


def each_card(value: Callable[[GpuUsage], float | None]) -> Callable[[Moment], Iterator[Row]]:
    """Make a reading with one series a card, for those whose driver reports the value."""

    def read(moment: Moment) -> Iterator[Row]:
        index = {gpu.uuid: str(gpu.index) for gpu in moment.status.inventory.gpus}
        for usage in moment.status.usage if _on(moment.status) else ():
            if usage.uuid in index and (found := value(usage)) is not None:
                yield (index[usage.uuid], usage.uuid, _ZONE), found

    return read


def each_container(value: Callable[[ContainerUsage, float], float | None]) -> Callable[[Moment], Iterator[Row]]:
    """Make a reading with one series for each device of a container.

    The names of devices come from the container. Those that the node does not have are left out, so that no container
    can fill a database with labels.
    """

    def read(moment: Moment) -> Iterator[Row]:
        devices = views.gpu_of_devices(moment.status)
        for usage in moment.status.containers if _on(moment.status) else ():
            if usage.uuid in devices and (found := value(usage, moment.now)) is not None:
                yield (usage.namespace, usage.pod, usage.container, str(usage.index), usage.uuid, _ZONE), found

    return read


def _on(status: AgentStatus) -> bool:
    return any(family.name == _FAMILY for family in status.binding.families)
