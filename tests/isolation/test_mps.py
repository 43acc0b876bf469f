"""MPS as plain values, against nvidia §11 and the golden vectors of nvidia §17."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.isolation import mps
from vgpu_agent.isolation.edits import Edits, Mount
from vgpu_agent.isolation.mps import MpsOptions
from vgpu_agent.model import Inventory, MigInstance, Resource, SharingMode

OPTIONS = MpsOptions()
PER_CONTAINER = MpsOptions(per_container_limits=True)


def _resource(
    replicas: int = 4, *, name: str = "nvidia.com/gpu", devices: tuple[str, ...] = (U0, U1)
) -> Resource:
    ids = tuple(
        DeviceId(f"{uuid}::{number}", uuid) for uuid in devices for number in range(replicas)
    )
    return Resource(name, "nvidia", ids, holders_per_device=replicas, sharing=SharingMode.MPS)


def _with(inventory: Inventory, **fields: Any) -> Inventory:
    return msgspec.structs.replace(
        inventory, gpus=tuple(msgspec.structs.replace(gpu, **fields) for gpu in inventory.gpus)
    )


def test_the_daemon_of_four_replicas_is_told_the_golden_commands() -> None:
    """nvidia:§17.3, nvidia:G11: two variables and nothing else, 10240M for each index,
    then 25 percent.
    """
    plan = mps.daemon_plan(_resource(), golden_inventory(), OPTIONS)
    assert plan.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
        "CUDA_MPS_LOG_DIRECTORY": "/mps/nvidia.com/gpu/log",
    }
    assert plan.commands == (
        "set_default_device_pinned_mem_limit 0 10240M",
        "set_default_device_pinned_mem_limit 1 10240M",
        "set_default_active_thread_percentage 25",
    )
    assert [limit.uuid for limit in plan.devices] == [U0, U1]


@pytest.mark.parametrize(
    ("memory_mib", "replicas", "limit"),
    [(40960, 4, 10240), (40960, 3, 13653), (40536, 4, 10134), (40960, 1, 40960)],
)
def test_memory_is_divided_and_rounded_down(memory_mib: int, replicas: int, limit: int) -> None:
    """nvidia:§17.3: also with three replicas, and where NVML reports 42505076736 bytes."""
    assert mps.memory_share_mib(memory_mib, replicas) == limit


@pytest.mark.parametrize(("replicas", "percent"), [(1, 100), (3, 33), (4, 25), (48, 2)])
def test_compute_is_divided_and_rounded_down(replicas: int, percent: int) -> None:
    """nvidia:§17.3: 33 percent with three replicas."""
    assert mps.thread_share(replicas) == percent


def test_a_gpu_of_unknown_memory_gets_no_memory_limit() -> None:
    """A limit of 0M would allow no allocation at all.
    NVIDIA's daemon leaves the command out, and so do we.
    """
    plan = mps.daemon_plan(_resource(), _with(golden_inventory(), memory_mib=0), OPTIONS)
    assert plan.commands == ("set_default_active_thread_percentage 25",)


def test_a_gpu_that_is_gone_is_not_in_the_plan() -> None:
    """nvidia-smi and the daemon would fail on a card that fell off the bus,
    and with it all others of the resource.
    """
    inventory = golden_inventory()
    lost = msgspec.structs.replace(
        inventory,
        gpus=(msgspec.structs.replace(inventory.gpus[0], present=False), inventory.gpus[1]),
    )
    assert [limit.uuid for limit in mps.daemon_plan(_resource(), lost, OPTIONS).devices] == [U1]


def test_the_largest_number_of_replicas_decides_about_compute() -> None:
    """A daemon has one thread percentage. With 2 replicas of one GPU and 5
    of another no client may have more than 20 percent.
    """
    mixed = msgspec.structs.replace(
        _resource(), ids=(*_resource(2, devices=(U0,)).ids, *_resource(5, devices=(U1,)).ids)
    )
    plan = mps.daemon_plan(mixed, golden_inventory(), OPTIONS)
    assert plan.commands == (
        "set_default_device_pinned_mem_limit 0 20480M",
        "set_default_device_pinned_mem_limit 1 8192M",
        "set_default_active_thread_percentage 20",
    )


def test_a_daemon_that_knows_a_lost_gpu_still_covers_the_others() -> None:
    """A card that falls off the bus must not cost the clients of the others their daemon;
    other limits must.
    """
    both = mps.daemon_plan(_resource(), golden_inventory(), OPTIONS)
    one = msgspec.structs.replace(both, devices=both.devices[1:])
    assert both.covers(one)
    assert not one.covers(both)
    assert not both.covers(msgspec.structs.replace(one, thread_percentage=50))
    # as NVML counts it now
    assert both.covers(
        msgspec.structs.replace(both, devices=(msgspec.structs.replace(both.devices[1], index=0),))
    )
    assert not both.covers(
        msgspec.structs.replace(
            both, devices=(msgspec.structs.replace(both.devices[1], memory_mib=1),)
        )
    )


def test_a_family_can_have_its_pipe_elsewhere() -> None:
    """Old clients look for the pipe in a place of their own,
    which has the same name on the host.
    """
    options = MpsOptions(pipe_directory="/tmp/nvidia-mps")
    plan = mps.daemon_plan(_resource(), golden_inventory(), options)
    assert plan.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_MPS_LOG_DIRECTORY": "/mps/nvidia.com/gpu/log",
    }
    edits = mps.mps_edits(_resource(), [U0], golden_inventory(), options)
    assert edits.mounts[0] == Mount("/tmp/nvidia-mps", "/tmp/nvidia-mps")


def test_a_container_joins_its_daemon_by_a_variable_and_two_mounts() -> None:
    """nvidia:A19: the pipe directory under the same name,
    and the shared memory of all clients as /dev/shm, both writable.
    """
    assert mps.mps_edits(_resource(), [U0], golden_inventory(), OPTIONS) == Edits(
        environment={"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"},
        mounts=(
            Mount(
                "/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/pipe", read_only=False
            ),
            Mount("/dev/shm", "/run/nvidia/mps/shm", read_only=False),
        ),
    )


def test_with_cdi_only_the_variable_of_mps_is_added() -> None:
    """nvidia:A20: joined to CDI names the container gets variable and mounts of MPS,
    and no NVIDIA_VISIBLE_DEVICES.
    """
    edits = Edits(cdi_names=("k8s.device-plugin.nvidia.com/gpu=" + U0,)).joined(
        mps.mps_edits(_resource(), [U0], golden_inventory(), OPTIONS)
    )
    assert set(edits.environment) == {"CUDA_MPS_PIPE_DIRECTORY"}
    assert len(edits.mounts) == 2
    assert edits.cdi_names == ("k8s.device-plugin.nvidia.com/gpu=" + U0,)


def test_a_renamed_resource_has_its_own_paths() -> None:
    """nvidia:A21: the paths use the name under which the resource is offered."""
    edits = mps.mps_edits(
        _resource(name="nvidia.com/gpu.shared"), [U0], golden_inventory(), OPTIONS
    )
    assert edits.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu.shared/pipe"
    assert edits.mounts[0].host_path == "/run/nvidia/mps/nvidia.com/gpu.shared/pipe"


def test_two_replicas_are_twice_the_share_with_limits_per_container() -> None:
    """Upstream gives a container of two replicas the limit of one.
    Here its own variables say two, and the daemon allows them.
    """
    edits = mps.mps_edits(_resource(), [U0, U0], golden_inventory(), PER_CONTAINER)
    assert edits.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert edits.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert mps.daemon_plan(_resource(), golden_inventory(), PER_CONTAINER).commands == (
        "set_default_device_pinned_mem_limit 0 40960M",
        "set_default_device_pinned_mem_limit 1 40960M",
        "set_default_active_thread_percentage 100",
    )


def test_the_gpus_of_a_container_are_counted_in_the_nodes_order() -> None:
    """A container that got U1 before U0 still sees U0 as its GPU 0.
    Its compute limit is that of its smaller share.
    """
    edits = mps.mps_edits(_resource(), [U1, U1, U0], golden_inventory(), PER_CONTAINER)
    assert edits.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M,1=20480M"
    assert edits.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_all_replicas_are_all_of_the_gpu() -> None:
    """Three thirds are 100 percent, not three times 33."""
    edits = mps.mps_edits(_resource(3), [U0] * 3, golden_inventory(), PER_CONTAINER)
    assert edits.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=40960M"
    assert edits.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


def test_the_daemon_keeps_its_limit_where_one_replica_is_all_that_a_container_may_have() -> None:
    """A container can change its variables,
    so the daemon's own limit is only given up where a container needs more than it.
    """
    options = MpsOptions(per_container_limits=True, single=True)
    assert (
        mps.daemon_plan(_resource(), golden_inventory(), options).commands[-1]
        == "set_default_active_thread_percentage 25"
    )


@pytest.mark.parametrize(
    ("capability", "most"), [((7, 0), 48), ((7, 5), 48), ((9, 0), 48), ((6, 1), 16), ((5, 2), 16)]
)
def test_volta_takes_48_clients(capability: tuple[int, int], most: int) -> None:
    """nvidia:D6: compute capability 7.0 is Volta; upstream gives it 16."""
    assert (
        mps.most_clients(
            msgspec.structs.replace(golden_inventory().gpus[0], compute_capability=capability)
        )
        == most
    )


def test_more_replicas_than_clients_are_refused_with_the_number_that_fits() -> None:
    """nvidia:G15: 49 replicas are one more than an MPS server takes.
    The reason says so instead of a retry every 30 seconds.
    """
    reason = mps.why_not_by_mps(_resource(49), golden_inventory())
    assert (
        "49 replicas of GPU 0 (NVIDIA A100-SXM4-40GB, compute capability 8.0) are more than the 48 "
        "clients"
    ) in reason
    assert not mps.why_not_by_mps(_resource(48), golden_inventory())
    assert "more than the 16 clients" in mps.why_not_by_mps(
        _resource(17), _with(golden_inventory(), compute_capability=(6, 1))
    )


def test_mig_devices_are_refused() -> None:
    """nvidia:G14: in upstream's words, for a slice and for a GPU whose MIG mode is on."""
    slice_ = MigInstance("MIG-1", 0, 7, 0, "1g.5gb", 4864)
    sliced = _with(golden_inventory(), mig_enabled=True, mig_instances=(slice_,))
    for device in ("MIG-1", U0):
        assert mps.why_not_by_mps(_resource(devices=(device,)), sliced).startswith(
            "sharing using MPS is not supported for MIG devices"
        )
