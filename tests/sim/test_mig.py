"""MIG instances: what is listed, what fits, what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pynvml
import pytest

from tests.sim.conftest import NodeFactory
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.models import Model, models
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import SimulatedNode

MIB = 1 << 20
CUTTABLE = [model for model in models().values() if model.mig]


def _instances(parent: pynvml.c_nvmlDevice_t) -> list[pynvml.c_nvmlDevice_t]:
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index))
        except pynvml.NVMLError_NotFound:
            continue
    return found


@pytest.fixture
def parent(node: SimulatedNode) -> pynvml.c_nvmlDevice_t:
    """The first GPU, cut into a half, a quarter with one compute slice, and an eighth."""
    node.set_mig(0, ["3g.40gb", "1c.2g.20gb", "1g.10gb"])
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def test_a_gpu_that_is_not_cut(node: SimulatedNode) -> None:
    """MIG mode is off, and there is no instance at any index."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 7
    assert _instances(handle) == []


def test_a_model_without_mig(nvml_node: NodeFactory) -> None:
    """Mode "not supported", at most 0 instances, and it cannot be cut."""
    node = nvml_node("T4", 1)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetMigMode(handle)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0
    with pytest.raises(
        SimulationError, match="Tesla T4 cannot be cut into MIG instances; choose an A100"
    ):
        node.set_mig(0, ["1g.5gb"])


def test_instances_say_who_they_are(node: SimulatedNode, parent: pynvml.c_nvmlDevice_t) -> None:
    """Name, UUID, ids, index, parent."""
    instances = _instances(parent)

    assert [pynvml.nvmlDeviceGetName(each) for each in instances] == [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A100-SXM4-80GB MIG 1c.2g.20gb",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    ]
    assert tuple(pynvml.nvmlDeviceGetUUID(each) for each in instances) == node.mig_uuids(0)
    assert [pynvml.nvmlDeviceGetGpuInstanceId(each) for each in instances] == [1, 5, 13]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(each) for each in instances] == [0, 0, 0]
    assert [pynvml.nvmlDeviceGetIndex(each) for each in instances] == [0, 1, 2]
    assert pynvml.nvmlDeviceIsMigDeviceHandle(instances[0])
    assert not pynvml.nvmlDeviceIsMigDeviceHandle(parent)
    back = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instances[2])
    assert pynvml.nvmlDeviceGetUUID(back) == pynvml.nvmlDeviceGetUUID(parent)
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(node.mig_uuids(0)[1])) == 1


def test_instances_say_what_they_have(parent: pynvml.c_nvmlDevice_t) -> None:
    """Slices, multiprocessors and memory. A compute instance of one slice has a part of the
    multiprocessors and all of the memory.
    """
    attributes = [pynvml.nvmlDeviceGetAttributes_v2(each) for each in _instances(parent)]

    assert [
        (
            a.gpuInstanceSliceCount,
            a.computeInstanceSliceCount,
            a.multiprocessorCount,
            a.memorySizeMB,
        )
        for a in attributes
    ] == [
        (3, 3, 42, 40192),
        (2, 1, 14, 19968),
        (1, 1, 14, 9728),
    ]
    assert pynvml.nvmlDeviceGetMemoryInfo(_instances(parent)[0]).total == 40192 * MIB


def test_a_process_in_an_instance(node: SimulatedNode, parent: pynvml.c_nvmlDevice_t) -> None:
    """The parent lists it with its ids. Only its own instance lists it and loses the memory."""
    node.add_process(
        0, 100, ProcessUse(memory_mib=500, sm_percent=50, gpu_instance=1, compute_instance=0)
    )
    half, quarter, _ = _instances(parent)

    rows = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(parent)

    assert [(row.pid, row.gpuInstanceId, row.computeInstanceId) for row in rows] == [(100, 1, 0)]
    assert [row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(half)] == [100]
    assert pynvml.nvmlDeviceGetComputeRunningProcesses_v3(quarter) == []
    assert pynvml.nvmlDeviceGetMemoryInfo(half).used == 500 * MIB


def test_a_cut_gpu_does_not_report_utilisation(parent: pynvml.c_nvmlDevice_t) -> None:
    """Neither for itself nor for an instance nor for processes."""
    call: Callable[[], object]
    for call in (
        lambda: pynvml.nvmlDeviceGetUtilizationRates(parent),
        lambda: pynvml.nvmlDeviceGetUtilizationRates(_instances(parent)[0]),
        lambda: pynvml.nvmlDeviceGetProcessUtilization(parent, 0),
    ):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            call()


def test_gpu_and_compute_instances_by_id(parent: pynvml.c_nvmlDevice_t) -> None:
    """The way NVIDIA's plugin walks: instance, its profile, its compute instance,
    that one's profile.
    """
    instance = pynvml.nvmlDeviceGetGpuInstanceById(parent, 5)
    info = pynvml.nvmlGpuInstanceGetInfo(instance)
    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    compute_info = pynvml.nvmlComputeInstanceGetInfo_v2(compute)

    assert (info.id, info.profileId, info.placement.start, info.placement.size) == (5, 14, 4, 2)
    assert (compute_info.id, compute_info.profileId, compute_info.placement.size) == (0, 0, 1)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetGpuInstanceById(parent, 9)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 1)


def test_an_instance_that_is_gone(node: SimulatedNode, parent: pynvml.c_nvmlDevice_t) -> None:
    """A handle to it says "not found" from then on."""
    instance = _instances(parent)[0]
    node.set_mig(0, [])

    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetUUID(instance)
    assert pynvml.nvmlDeviceGetMigMode(parent) == [0, 0]


@pytest.mark.parametrize("model", CUTTABLE, ids=lambda model: model.key)
def test_the_profile_table_comes_through(nvml_node: NodeFactory, model: Model) -> None:
    """Each profile by its number, with its placements."""
    nvml_node(model.key, 1)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    for profile in model.mig:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile.profile)
        count = ctypes.c_uint(8)
        places = (pynvml.c_nvmlGpuInstancePlacement_t * 8)()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(
            handle, profile.id, places, ctypes.byref(count)
        )
        assert (info.id, info.sliceCount, info.instanceCount, info.memorySizeMB) == (
            profile.id,
            profile.slices,
            profile.instances,
            profile.memory_mib,
        )
        assert info.name == f"MIG {profile.name}"
        assert tuple(place.start for place in places[: count.value]) == profile.starts


def test_a_profile_that_the_model_has_not(parent: pynvml.c_nvmlDevice_t) -> None:
    """It is "not supported"; beyond NVML's own numbers an argument error."""
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(parent, pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(parent, 99)


@pytest.mark.parametrize("version", [1, 2])
def test_compute_instance_profiles(parent: pynvml.c_nvmlDevice_t, version: int) -> None:
    """A half can hold three compute instances of one slice, and none of four."""
    instance = pynvml.nvmlDeviceGetGpuInstanceById(parent, 1)

    info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 0, 0, version)

    assert (info.sliceCount, info.instanceCount, info.multiprocessorCount) == (1, 3, 14)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 3, 0, version)


def test_seven_small_instances_have_the_numbers_of_the_contract(nvml_node: NodeFactory) -> None:
    """Instances 7 to 13 (nvidia §17: seven 1g.5gb slices, M0…M6), with given UUIDs."""
    node = nvml_node("A100-SXM4-40GB", 2)
    uuids = [f"MIG-cccccccc-0000-5000-8000-00000000000{number}" for number in range(7)]
    node.set_mig(1, ["1g.5gb"] * 7, uuids=uuids)

    instances = _instances(pynvml.nvmlDeviceGetHandleByIndex(1))

    assert [pynvml.nvmlDeviceGetGpuInstanceId(each) for each in instances] == [
        7,
        8,
        9,
        10,
        11,
        12,
        13,
    ]
    assert [pynvml.nvmlDeviceGetUUID(each) for each in instances] == uuids


def test_profiles_with_suffixes(nvml_node: NodeFactory) -> None:
    """nvidia §3: +me, +gfx, +me.all and -me are part of the profile's name,
    and of the instance's.
    """
    node = nvml_node("RTX-PRO-6000", 1)
    profiles = ["1g.24gb+me.all", "1g.24gb-me", "2g.48gb+gfx"]
    node.set_mig(0, profiles)

    names = [
        pynvml.nvmlDeviceGetName(each) for each in _instances(pynvml.nvmlDeviceGetHandleByIndex(0))
    ]

    assert [name.partition(" MIG ")[2] for name in names] == profiles


@pytest.mark.parametrize(
    "order",
    [["1g.10gb", "1g.10gb", "1g.10gb", "4g.40gb"], ["2g.20gb", "1g.20gb", "4g.40gb"]],
    ids=str,
)
def test_the_order_of_profiles_does_not_decide_what_fits(
    node: SimulatedNode, order: list[str]
) -> None:
    """The large ones are placed first, whatever was named first."""
    node.set_mig(0, order)

    assert node.describe()[0].mig_devices == tuple(order)


@pytest.mark.parametrize(
    ("profiles", "complaint"),
    [
        (["9g.99gb"], "no MIG profile '9g.99gb'; it has 1g.10gb, 2g.20gb"),
        (["4c.3g.40gb"], "a 3g.40gb instance has 3 compute slices"),
        (["4g.40gb", "4g.40gb"], "need more than the GPU's 7 compute slices"),
        (["3g.40gb", "3g.40gb", "1g.10gb"], "do not fit on one GPU: no place for 1g.10gb"),
        (["1g.10gb+me", "1g.10gb+me"], "do not fit on one GPU: no place for 1g.10gb\\+me"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    node: SimulatedNode, profiles: list[str], complaint: str
) -> None:
    """One sentence names the request, and the old instances stay."""
    node.set_mig(0, ["7g.80gb"])

    with pytest.raises(SimulationError, match=complaint):
        node.set_mig(0, profiles)

    assert node.describe()[0].mig_devices == ("7g.80gb",)


def test_a_wrong_number_of_uuids_is_refused(node: SimulatedNode) -> None:
    """One for each instance."""
    with pytest.raises(SimulationError, match="1 UUIDs for 2 MIG instances"):
        node.set_mig(0, ["1g.10gb", "1g.10gb"], uuids=["MIG-x"])
