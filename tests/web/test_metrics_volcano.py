"""The metrics that have the names of the replaced plugin's monitor."""

from __future__ import annotations

import msgspec
import pytest

from tests.web.test_metrics import scrape
from vgpu_agent.model import ContainerUsage
from vgpu_agent.status import AgentStatus

SERVED = (
    "ctrname=main",
    "deviceuuid=GPU-0",
    "podname=served",
    "podnamespace=ml",
    "vdeviceid=0",
    "zone=vGPU",
)
CARD = ("deviceidx=0", "deviceuuid=GPU-0", "zone=vGPU")
NAMES = ("vGPU_", "Device_", "Host")


def of_the_monitor(status: AgentStatus) -> dict[tuple[str, ...], float]:
    """The series with the monitor's names."""
    return {key: value for key, value in scrape(status).items() if key[0].startswith(NAMES)}


def test_a_dashboard_of_the_replaced_plugin_finds_its_series(volcano_node: AgentStatus) -> None:
    """volcano-vgpu:D7: names, labels, units and zone of volcano-vgpu §6;
    GPU-1's driver says nothing, so it has none.
    """
    assert of_the_monitor(volcano_node) == {
        ("HostGPUMemoryUsage", *CARD): 1 << 30,
        ("HostCoreUtilization", *CARD): 55,
        ("vGPU_device_memory_usage_in_bytes", *SERVED): 1 << 30,
        ("vGPU_device_memory_limit_in_bytes", *SERVED): 4 << 30,
        ("Device_utilization_desc_of_container", *SERVED): 25,
        ("Device_last_kernel_of_container", *SERVED): 8,
    }


def test_without_the_family_the_names_are_somebody_else_s(volcano_node: AgentStatus) -> None:
    """The replaced plugin may run beside an agent that serves other families."""
    volcano_node.binding.families = tuple(
        family for family in volcano_node.binding.families if family.name != "volcano-vgpu"
    )
    assert of_the_monitor(volcano_node) == {}


@pytest.mark.parametrize(("last", "ages"), [(0, []), (1_800_000_100, [0])])
def test_a_last_kernel_that_never_was_or_is_to_come(
    volcano_node: AgentStatus, last: int, ages: list[float]
) -> None:
    """Absent rather than half a century; and never negative,
    whatever the container has written there.
    """
    volcano_node.containers = tuple(
        msgspec.structs.replace(usage, last_kernel_at=last) for usage in volcano_node.containers
    )
    found = of_the_monitor(volcano_node)
    assert [
        value for key, value in found.items() if key[0] == "Device_last_kernel_of_container"
    ] == ages


def test_a_device_that_the_node_does_not_have_is_no_label(volcano_node: AgentStatus) -> None:
    """The container owns the file with the names.
    By writing others it must not be able to fill a database.
    """
    made_up = ContainerUsage("ml", "served", "main", 1, "GPU-made-up", 5, 6, 7, 8)
    volcano_node.containers = (*volcano_node.containers, made_up)
    assert not [key for key in of_the_monitor(volcano_node) if "deviceuuid=GPU-made-up" in key]
