"""The metrics with the names of vgpu-manager's device-monitor, on plain values."""

from __future__ import annotations

import platform

import msgspec
import pytest

from vgpu_agent.families.spec import Readings
from vgpu_agent.families.vgpu_manager.metrics import METRICS
from vgpu_agent.families.vgpu_manager.settings import VgpuManager
from vgpu_agent.model import (
    ControlledUse,
    Gpu,
    GpuUsage,
    Grant,
    GrantState,
    Health,
    Inventory,
    MigInstance,
    Owner,
    Share,
)

U0, U1 = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28", "GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45"
INSTANCE = MigInstance("MIG-1", 0, 7, 0, "1g.6gb", 6144)
NUMBER = "nvidia.com/vgpu-number"
MIB, GIB = 1 << 20, 1 << 30

DOCUMENTED = {
    "exporter_build_info": ["node", "version", "branch", "commit", "platform", "date"],
    "node_gpu_device_configuration_info": [
        *("node", "device_split", "cores_scaling", "memory_scaling", "memory_factor")
    ],
    "node_gpu_device_driver_version_info": [
        *("node", "driver_version", "cuda_version", "nvml_version")
    ],
    "container_mig_device_allocation_info": [
        *("node", "device_idx", "device_uuid", "parent_uuid"),
        *("pod_namespace", "pod_name", "container_name"),
    ],
}
CARD = ["node", "device_idx", "device_uuid", "device_type"]
SUMS = ("total_memory", "total_physical_memory", "assigned_memory", "assigned_physical_memory")
DOCUMENTED |= {
    f"physical_gpu_device_{name}": [
        *CARD,
        *("pci_bus_id", "minor_num", "mig_enabled", "capability", "numa_node"),
    ]
    for name in (
        *("total_memory_in_bytes", "memory_usage_in_bytes", "memory_utilization_percent"),
        *("core_utilization_percent", "health_status"),
    )
}
DOCUMENTED |= {f"node_vgpu_device_{name}_in_bytes": ["node"] for name in SUMS}
DOCUMENTED |= {f"vgpu_device_{name}_in_bytes": CARD for name in SUMS}
DOCUMENTED |= {
    f"vgpu_device_{name}_number": CARD
    for name in (
        *("total_cores", "assigned_cores", "peak_shared_containers"),
        "current_shared_containers",
    )
}
DOCUMENTED |= {
    f"container_vgpu_device_{name}": [
        *("pod_namespace", "pod_name", "container_name", "vdevice_idx", "device_uuid", "node")
    ]
    for name in (
        *("memory_limit_in_bytes", "physical_memory_limit_in_bytes", "memory_usage_in_bytes"),
        *("memory_utilization_percent", "core_utilization_percent"),
        "physical_memory_usage_in_bytes",
    )
}
DOCUMENTED |= {
    f"mig_device_{name}": [
        *("node", "device_idx", "device_uuid", "parent_uuid", "ci_id", "gi_id", "profile")
    ]
    for name in (*("total_memory_in_bytes", "memory_usage_in_bytes", "memory_utilization_percent"),)
}


def _gpu(index: int, uuid: str, **changes: object) -> Gpu:
    gpu = Gpu(
        *(uuid, index, index, "NVIDIA A10", 24576, f"0000:0{index}:00.0", index, (8, 6)),
    )
    return msgspec.structs.replace(gpu, **changes)


def _grant(pod: str, *shares: Share, known: bool = True) -> Grant:
    owner = Owner("main", f"uid-{pod}", "ml" if known else "", pod if known else "")
    return Grant(1, "vgpu-manager", NUMBER, ("x::0",), shares, GrantState.IDENTIFIED, owner)


NODE = Readings(
    grants=(
        _grant("a", Share(U0, 4096, 50), Share("GPU-gone", 1024, 10)),
        _grant("b", Share(U0, 2048, 20)),
        _grant("unnamed", Share(U0, 1024, 0), known=False),
        _grant("mig", Share("MIG-1")),
    ),
    inventory=Inventory(
        1,
        (
            _gpu(0, U0),
            _gpu(
                *(1, U1),
                mig_enabled=True,
                mig_instances=(INSTANCE,),
                numa_node=None,
                health=Health(ok=False, reason="XID 79"),
            ),
        ),
        driver_version="570.86.10",
        cuda_version="12.8",
        nvml_version="12.570.86.10",
    ),
    usage=(
        GpuUsage(
            *(U0, 6144),
            utilisation_percent=55,
            processes=((11, 256), (12, 256), (99, 4096)),
        ),
        GpuUsage(U1, instances_used_mib=(("MIG-1", 1536),)),
    ),
    containers=(),
    controlled=(
        ControlledUse(
            *("ml", "a", "main"),
            pids=(11, 12),
            spilled_bytes=((0, 512 * MIB), (5, 1)),
            cores_percent=((0, 25),),
        ),
        ControlledUse("ml", "b", "main"),
    ),
    now=1e9,
    node="n1",
    version="0.1.0",
    commit="abc",
    in_force=msgspec.structs.asdict(
        VgpuManager(device_memory_scaling=2.0, device_cores_scaling=1.5)
    ),
)
U0_LABELS = ("n1", "0", U0, "NVIDIA A10", "vGPU")
A = ("ml", "a", "main", "0", U0, "n1", "vGPU")
B = ("ml", "b", "main", "0", U0, "n1", "vGPU")


def read(name: str, readings: Readings = NODE) -> dict[tuple[str, ...], float]:
    """Return the rows of one metric."""
    (metric,) = (each for each in METRICS if each.name == name)
    return dict(metric.rows(readings))


def test_names_and_labels_are_those_of_the_replaced_monitor() -> None:
    """A dashboard asks for them by name; every one has ``service`` as well (vgpu-manager §10.1)."""
    found = {metric.name: list(metric.labels) for metric in METRICS}
    assert found == {name: [*labels, "service"] for name, labels in DOCUMENTED.items()}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_row_has_a_value_for_each_label(metric: object) -> None:
    """On a node with everything each metric has a row, and nothing but texts as labels."""
    rows = list(metric.rows(NODE))  # type: ignore[attr-defined]
    assert rows
    for values, _ in rows:
        assert len(values) == len(metric.labels)  # type: ignore[attr-defined]
        assert all(isinstance(value, str) for value in values)
        assert values[-1] == "vGPU"


def test_the_facts_of_the_node() -> None:
    """Numbers as Go prints them, so that a label is the same series as before."""
    assert read("node_gpu_device_configuration_info") == {("n1", "10", "1.5", "2", "1", "vGPU"): 1}
    assert read("node_gpu_device_driver_version_info") == {
        ("n1", "570.86.10", "12.8", "12.570.86.10", "vGPU"): 1
    }
    where = f"linux/{platform.machine()}"
    assert read("exporter_build_info") == {("n1", "0.1.0", "", "abc", where, "", "vGPU"): 1}


def test_the_cards_as_they_are() -> None:
    """A card in MIG mode is there as well; what its driver does not say is absent and not 0."""
    first = ("n1", "0", U0, "NVIDIA A10", "0000:00:00.0", "0", "false", "8.6", "0", "vGPU")
    second = ("n1", "1", U1, "NVIDIA A10", "0000:01:00.0", "1", "true", "8.6", "-1", "vGPU")
    card = "physical_gpu_device_"
    assert read(f"{card}total_memory_in_bytes") == {first: 24 * GIB, second: 24 * GIB}
    assert read(f"{card}memory_usage_in_bytes") == {first: 6 * GIB}
    assert read(f"{card}memory_utilization_percent") == {first: 25}
    assert read(f"{card}core_utilization_percent") == {first: 55}
    assert read(f"{card}health_status") == {first: 1, second: 0}


def test_what_is_offered_and_given_out() -> None:
    """By the ledger, with and without scaling. A card that is divided has no shares."""
    assert read("vgpu_device_total_memory_in_bytes") == {U0_LABELS: 48 * GIB}
    assert read("vgpu_device_total_physical_memory_in_bytes") == {U0_LABELS: 24 * GIB}
    assert read("vgpu_device_assigned_memory_in_bytes") == {U0_LABELS: 7 * GIB}
    assert read("vgpu_device_assigned_physical_memory_in_bytes") == {U0_LABELS: 3.5 * GIB}
    assert read("vgpu_device_total_cores_number") == {U0_LABELS: 150}
    assert read("vgpu_device_assigned_cores_number") == {U0_LABELS: 70}
    assert read("vgpu_device_peak_shared_containers_number") == {U0_LABELS: 10}
    assert read("vgpu_device_current_shared_containers_number") == {U0_LABELS: 3}
    for name in SUMS:
        (expected,) = read(f"vgpu_device_{name}_in_bytes").values()
        assert read(f"node_vgpu_device_{name}_in_bytes") == {("n1", "vGPU"): expected}


def test_what_containers_may_use_and_use() -> None:
    """One whose use cannot be read has its limits only, and one whose name is not known nothing."""
    container = "container_vgpu_device_"
    assert read(f"{container}memory_limit_in_bytes") == {A: 4 * GIB, B: 2 * GIB}
    assert read(f"{container}physical_memory_limit_in_bytes") == {A: 2 * GIB, B: 1 * GIB}
    assert read(f"{container}memory_usage_in_bytes") == {A: GIB}
    assert read(f"{container}physical_memory_usage_in_bytes") == {A: GIB // 2}
    assert read(f"{container}memory_utilization_percent") == {A: 25}
    assert read(f"{container}core_utilization_percent") == {A: 25}


def test_mig_instances_and_their_holders() -> None:
    """Memory by NVML, holders by the ledger."""
    labels = ("n1", "1:0", "MIG-1", U1, "0", "7", "1g.6gb", "vGPU")
    assert read("mig_device_total_memory_in_bytes") == {labels: 6144 * MIB}
    assert read("mig_device_memory_usage_in_bytes") == {labels: 1536 * MIB}
    assert read("mig_device_memory_utilization_percent") == {labels: 25}
    assert read("container_mig_device_allocation_info") == {
        ("n1", "1:0", "MIG-1", U1, "ml", "mig", "main", "vGPU"): 1
    }


def test_before_anything_is_known_nothing_is_made_up() -> None:
    """Absent rather than 0, right after the start; only the build is known."""
    empty = Readings((), Inventory(), (), (), 1e9, node="n1")
    found = {metric.name for metric in METRICS if list(metric.rows(empty))}
    assert found == {"exporter_build_info"}
