"""Positions of GPUs: NUMA nodes, distance, NVLink, P2P, fabric."""

from __future__ import annotations

from collections import Counter

import pynvml
import pytest

from tests.sim.conftest import NodeFactory
from vgpu_agent.sim.state import SimulatedNode

LINKS = 18


def _handles() -> list[pynvml.c_nvmlDevice_t]:
    return [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]


def _links_between(first: int, second: int) -> int:
    """Return the number of NVLinks from one GPU to another, counted the way device plugins do."""
    handles = _handles()
    wanted = pynvml.nvmlDeviceGetPciInfo(handles[second]).busId
    found = Counter(
        pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handles[first], link).busId
        for link in range(LINKS)
        if _active(handles[first], link)
    )
    return found[wanted]


def _active(handle: pynvml.c_nvmlDevice_t, link: int) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError_NotSupported:
        return False


def test_cpus_and_memory_of_a_numa_node(node: SimulatedNode) -> None:
    """GPU 3 is on NUMA node 1, whose 32 CPUs follow those of node 0."""
    handle = _handles()[3]

    assert list(pynvml.nvmlDeviceGetMemoryAffinity(handle, 1, pynvml.NVML_AFFINITY_SCOPE_NODE)) == [
        0b10
    ]
    assert list(pynvml.nvmlDeviceGetCpuAffinity(handle, 2)) == [0xFFFFFFFF00000000, 0]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetNumaNodeId(handle)


def test_a_gpu_without_a_numa_node(nvml_node: NodeFactory) -> None:
    """Single-socket machines say -1 in sysfs and nothing in NVML."""
    nvml_node(gpus=1, numa=[-1])

    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetMemoryAffinity(_handles()[0], 1, pynvml.NVML_AFFINITY_SCOPE_NODE)


def test_gpus_next_to_a_cpu(node: SimulatedNode) -> None:
    """CPU 40 is on NUMA node 1."""
    found = pynvml.nvmlSystemGetTopologyGpuSet(40)

    assert [pynvml.nvmlDeviceGetIndex(handle) for handle in found] == [2, 3]


def test_distance_between_gpus(node: SimulatedNode) -> None:
    """Neighbours share PCIe switches, others only the machine."""
    handles = _handles()

    levels = [pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[0], other) for other in handles]
    nearest = pynvml.nvmlDeviceGetTopologyNearestGpus(handles[0], pynvml.NVML_TOPOLOGY_MULTIPLE)

    assert levels == [
        0,
        pynvml.NVML_TOPOLOGY_MULTIPLE,
        pynvml.NVML_TOPOLOGY_SYSTEM,
        pynvml.NVML_TOPOLOGY_SYSTEM,
    ]
    assert [pynvml.nvmlDeviceGetIndex(handle) for handle in nearest] == [1]


def test_four_a100_are_joined_directly(nvml_node: NodeFactory) -> None:
    """Twelve links, four to each of three peers."""
    nvml_node("A100-SXM4-80GB", 4)

    assert [_links_between(0, peer) for peer in (1, 2, 3)] == [4, 4, 4]


def test_eight_h100_are_joined_by_switches(nvml_node: NodeFactory) -> None:
    """Eighteen links to four NVSwitches, none to a GPU."""
    nvml_node("H100-80GB-HBM3", 8)
    handle = _handles()[0]

    kinds = {pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) for link in range(18)}
    switches = {pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId for link in range(18)}

    assert kinds == {pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH}
    assert len(switches) == 4
    assert pynvml.nvmlDeviceGetNvLinkVersion(handle, 0) == pynvml.NVML_NVLINK_VERSION_4_0
    assert _links_between(0, 1) == 0


def test_eight_v100_are_a_hybrid_cube_mesh(nvml_node: NodeFactory) -> None:
    """Uneven on purpose: placement has something to choose from."""
    nvml_node("V100-SXM2-32GB", 8)

    rows = [[_links_between(first, second) for second in range(8)] for first in range(8)]

    assert rows[0] == [0, 1, 1, 2, 2, 0, 0, 0]
    assert [sum(row) for row in rows] == [6] * 8
    assert rows == [list(column) for column in zip(*rows, strict=True)]


def test_a_card_without_nvlink(nvml_node: NodeFactory) -> None:
    """Every link number is "not supported"; beyond NVML's own maximum it is an argument error."""
    nvml_node("T4", 2)
    handle = _handles()[0]

    assert not any(_active(handle, link) for link in range(LINKS))
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetNvLinkState(handle, 99)


def test_a_single_sxm_card_has_links_that_lead_nowhere(nvml_node: NodeFactory) -> None:
    """They exist and are down."""
    nvml_node("A100-SXM4-80GB", 1)
    handle = _handles()[0]

    assert [pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(12)] == [0] * 12
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, 0)


def test_peer_to_peer_over_nvlink(nvml_node: NodeFactory) -> None:
    """Linked GPUs reach each other across NUMA nodes."""
    nvml_node("A100-SXM4-80GB", 2, numa=[0, 1])
    first, second = _handles()

    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        == pynvml.NVML_P2P_STATUS_OK
    )
    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
        == pynvml.NVML_P2P_STATUS_OK
    )


def test_peer_to_peer_over_pcie_ends_at_the_numa_node(nvml_node: NodeFactory) -> None:
    """Cards without NVLink reach neighbours only."""
    nvml_node("L40S", 3, numa=[0, 0, 1])
    first, near, far = _handles()

    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, near, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
        == pynvml.NVML_P2P_STATUS_OK
    )
    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, near, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        == pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    )
    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, far, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
        == pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
    )


def test_mig_ends_peer_to_peer(node: SimulatedNode) -> None:
    """A GPU that is cut up has no peers."""
    node.set_mig(1, ["7g.80gb"])
    first, second, *_ = _handles()

    assert (
        pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        == pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    )


@pytest.mark.parametrize(
    "structure", [pynvml.c_nvmlGpuFabricInfo_v2_t, pynvml.c_nvmlGpuFabricInfo_v3_t]
)
def test_hopper_is_registered_with_a_fabric(nvml_node: NodeFactory, structure: type) -> None:
    """Both struct versions are understood."""
    nvml_node("H200-141GB", 8)
    info = structure()

    pynvml.nvmlDeviceGetGpuFabricInfoV(_handles()[0], pynvml.byref(info))

    assert info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    assert info.status == 0


def test_ampere_knows_no_fabric(node: SimulatedNode) -> None:
    """Neither call of the two is supported."""
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuFabricInfo(
            _handles()[0], pynvml.byref(pynvml.c_nvmlGpuFabricInfo_t())
        )
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuFabricInfoV(
            _handles()[0], pynvml.byref(pynvml.c_nvmlGpuFabricInfo_v2_t())
        )


def test_an_unknown_struct_version_is_refused(nvml_node: NodeFactory) -> None:
    """The struct is not written over."""
    nvml_node("H200-141GB", 1)
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = 0x9000000 | (info.version & 0xFFFFFF)

    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetGpuFabricInfoV(_handles()[0], pynvml.byref(info))
