"""The `aws` family against the golden vectors of aws §II.6 and the rows of aws §II.4
that are a matter of this family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.config.load import load
from vgpu_agent.errors import ConfigError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.isolation.edits import Edits, Mount
from vgpu_agent.isolation.mps import MpsOptions, daemon_plan
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Health, Inventory, Resource, Share, SharingMode

PIPE = "/tmp/nvidia-mps"


def _family(**options: Any) -> AwsFamily:
    return AwsFamily(AwsOptions(**options))


def _offer(family: AwsFamily, inventory: Inventory) -> Resource:
    (resource,) = family.resources(inventory)
    return resource


def _edits(ids: list[str], **options: Any) -> Edits:
    family, inventory = _family(**options), golden_inventory()
    return family.edits(_offer(family, inventory), ids, inventory)


def _with_u1(**fields: Any) -> Inventory:
    inventory = golden_inventory()
    return msgspec.structs.replace(
        inventory, gpus=(inventory.gpus[0], msgspec.structs.replace(inventory.gpus[1], **fields))
    )


def _booked(inventory: Inventory, **options: Any) -> tuple[AwsFamily, Ledger]:
    family, ledger = _family(**options), Ledger()
    ledger.observe(inventory)
    ledger.offer(family.resources(inventory))
    ledger.rebuilt = True
    return family, ledger


def test_ten_virtual_gpus_of_each_gpu_are_offered() -> None:
    """aws:W1: U0-0 to U0-9 and U1-0 to U1-9, all healthy, under AWS's name."""
    resource = _offer(_family(), golden_inventory())
    assert resource.name == "k8s.amazonaws.com/vgpu"
    assert [entry.id for entry in resource.ids] == [
        f"{uuid}-{number}" for uuid in (U0, U1) for number in range(10)
    ]
    assert not resource.pre_start_required
    _, ledger = _booked(golden_inventory())
    assert all(entry.healthy for entry in ledger.listing(resource.name))


def test_48_virtual_gpus_of_each_gpu_are_offered() -> None:
    """aws:W2: 96 ids; the last of them is U1-47."""
    resource = _offer(_family(vgpus=48), golden_inventory())
    assert len(resource.ids) == 96
    assert resource.ids[-1].id == f"{U1}-47"


@pytest.mark.parametrize("count", [49, 0, -1])
def test_more_than_mps_serves_is_refused_at_the_start(tmp_path: Path, count: int) -> None:
    """aws:W3: the flag and the key take 1 to 48;
    zero and negative counts, which upstream takes, are refused, too.
    """
    file = tmp_path / "config.yaml"
    file.write_text(f"version: v1\nfamilies: {{aws: true}}\naws: {{vgpus: {count}}}\n")
    with pytest.raises(
        ConfigError, match=f"aws.vgpus: expected an integer from 1 to 48, got {count}"
    ):
        load({"--config": str(file)}, {})
    with pytest.raises(
        ConfigError, match=f'--vgpu: expected an integer from 1 to 48, got "{count}"'
    ):
        load({"--vgpu": str(count)}, {})


def test_a_gpu_in_mig_mode_is_left_out_and_said_to_be() -> None:
    """aws:W4: upstream offers U1 although nothing would work on it.
    Here the ten of U0 are offered, with a caution about U1.
    """
    inventory = _with_u1(mig_enabled=True)
    resource = _offer(_family(), inventory)
    assert {entry.device for entry in resource.ids} == {U0}
    assert len(resource.ids) == 10
    shortfall = _family().shortfall(inventory)
    assert shortfall.refused == {}
    assert [caution.split(",")[0] for caution in shortfall.cautions] == [
        f"k8s.amazonaws.com/vgpu: GPU 1 ({U1}) is in MIG mode"
    ]


def test_one_virtual_gpu_is_told_by_one_variable() -> None:
    """aws:§II.6-1: NVIDIA_VISIBLE_DEVICES=U0 and nothing else."""
    assert _edits([f"{U0}-3"]) == Edits(environment={"NVIDIA_VISIBLE_DEVICES": U0})


def test_two_virtual_gpus_of_one_gpu_are_one_gpu() -> None:
    """aws:§II.6-2: each GPU is named once."""
    assert _edits([f"{U0}-3", f"{U0}-4"]) == Edits(environment={"NVIDIA_VISIBLE_DEVICES": U0})


def test_virtual_gpus_of_two_gpus_are_both() -> None:
    """aws:§II.6-3: in the order of the request, always the same one."""
    assert _edits([f"{U0}-3", f"{U1}-0"]) == Edits(
        environment={"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"}
    )


def test_an_unknown_virtual_gpu_is_refused() -> None:
    """aws:§II.6-4: U9-0 is no id of this node."""
    _, ledger = _booked(golden_inventory())
    with pytest.raises(UnknownDeviceError, match="GPU-9-0"):
        ledger.reserve("k8s.amazonaws.com/vgpu", ["GPU-9-0"], [])


def test_unhealthy_virtual_gpus_are_refused() -> None:
    """aws:D6: upstream never learns of illness.
    Here all ids of the GPU turn unhealthy, and NUMA nodes are listed.
    """
    family, ledger = _booked(golden_inventory(U1=Health(ok=False, reason="XID 79")))
    listed = ledger.listing("k8s.amazonaws.com/vgpu")
    assert [entry.healthy for entry in listed] == [True] * 10 + [False] * 10
    assert [entry.id.numa_node for entry in listed] == [0] * 10 + [1] * 10
    with pytest.raises(UnhealthyDeviceError, match="XID 79"):
        ledger.reserve(
            "k8s.amazonaws.com/vgpu",
            [f"{U1}-0"],
            family.shares("", [f"{U1}-0"], golden_inventory()),
        )


def test_several_virtual_gpus_are_packed_onto_one_gpu() -> None:
    """aws:D7: two are of use on one GPU only, so the fullest with room for both is taken;
    without such a GPU as few as may be.
    """
    family, inventory = _family(vgpus=3), golden_inventory()
    resource = _offer(family, inventory)
    free = [f"{U0}-2", *(f"{U1}-{number}" for number in range(3))]
    assert family.prefer(resource, free, [], 2, inventory) == [f"{U1}-0", f"{U1}-1"]
    assert family.prefer(resource, free, [], 1, inventory) == [f"{U0}-2"]
    assert sorted(family.prefer(resource, free, [], 4, inventory)) == sorted(free)
    assert family.prefer(resource, free, [f"{U1}-2"], 2, inventory) == [f"{U1}-2", f"{U1}-0"]


def test_a_gpu_is_not_shared_with_another_family_at_the_same_time() -> None:
    """aws:D8: one ledger for the node. While AWS's pods hold a GPU it is not whole,
    and the other way round.
    """
    inventory = golden_inventory()
    family, ledger = _booked(inventory)
    whole = Resource(
        "nvidia.com/gpu",
        "nvidia",
        tuple(
            msgspec.structs.replace(entry, id=entry.device) for entry in _firsts(family, inventory)
        ),
    )
    ledger.offer([*family.resources(inventory), whole])
    ledger.reserve("k8s.amazonaws.com/vgpu", [f"{U0}-1"], family.shares("", [f"{U0}-1"], inventory))
    assert [entry.healthy for entry in ledger.listing("nvidia.com/gpu")] == [False, True]
    ledger.reserve("nvidia.com/gpu", [U1], [Share(U1, 40960, 100, exclusive=True)])
    assert [entry.healthy for entry in ledger.listing("k8s.amazonaws.com/vgpu")] == [True] * 10 + [
        False
    ] * 10


def test_other_ways_to_name_devices_are_open() -> None:
    """aws:D9: with CDI or volume mounts a pod without a request sees no GPU;
    upstream knows the variable only.
    """
    assert _edits([f"{U0}-3"], lists=ListOptions(strategies=("cdi-cri",))).cdi_names == (
        f"k8s.device-plugin.nvidia.com/gpu={U0}",
    )
    mounted = _edits([f"{U0}-3"], lists=ListOptions(strategies=("volume-mounts",)))
    assert mounted.mounts == (Mount(f"/var/run/nvidia-container-devices/{U0}", "/dev/null"),)


@pytest.mark.parametrize("mps", ["host", "supervised"])
def test_gpus_before_volta_are_refused_under_mps_with_the_reason(mps: str) -> None:
    """aws:D11: there MPS shares faults and limits nothing; beside a newer GPU they are left out,
    alone they withhold the resource.
    """
    family, old = _family(mps=mps), {"compute_capability": (6, 1), "name": "Tesla P40"}
    mixed = _with_u1(**old)
    assert {entry.device for entry in _offer(family, mixed).ids} == {U0}
    assert (
        "GPU 1 (Tesla P40, compute capability 6.1) is older than Volta"
        in family.shortfall(mixed).cautions[0]
    )
    alone = msgspec.structs.replace(mixed, gpus=mixed.gpus[1:])
    assert family.resources(alone) == ()
    assert family.shortfall(alone).refused["k8s.amazonaws.com/vgpu"].startswith("GPU 1 (Tesla P40")
    assert {entry.device for entry in _offer(family, _with_u1(compute_capability=(7, 0))).ids} == {
        U0,
        U1,
    }


def test_gpus_before_volta_may_take_turns_as_long_as_mps_would_serve_so_many() -> None:
    """Without MPS nothing speaks against them;
    pods may bring a daemon of their own, which has 16 clients at most.
    """
    old = _with_u1(compute_capability=(6, 1))
    assert {entry.device for entry in _offer(_family(vgpus=16), old).ids} == {U0, U1}
    assert {entry.device for entry in _offer(_family(vgpus=17), old).ids} == {U0}
    assert "at most 16 clients" in _family(vgpus=17).shortfall(old).cautions[0]


def test_the_name_can_be_set_and_the_old_one_is_still_understood() -> None:
    """aws:D12: an autoscaler that knows another name gets it;
    kubelet's records of before the change stay ours.
    """
    family = _family(resource="example.com/slice")
    assert _offer(family, golden_inventory()).name == "example.com/slice"
    assert family.owns("example.com/slice")
    assert family.owns("k8s.amazonaws.com/vgpu")
    assert not family.owns("nvidia.com/gpu")


def test_a_daemon_of_ours_has_limits_from_the_share() -> None:
    """aws:D1: a tenth of memory and compute for one of ten, and a quarter for one of four, instead
    of always ten percent of compute.
    """
    for vgpus, memory, percent in ((10, 4096, 10), (4, 10240, 25)):
        family = _family(vgpus=vgpus, mps="supervised")
        resource = _offer(family, golden_inventory())
        assert resource.sharing is SharingMode.MPS
        plan = daemon_plan(resource, golden_inventory(), MpsOptions(pipe_directory=PIPE))
        assert plan.commands[0] == f"set_default_device_pinned_mem_limit 0 {memory}M"
        assert plan.commands[-1] == f"set_default_active_thread_percentage {percent}"
        assert family.shares(resource.name, [f"{U0}-0", f"{U0}-1"], golden_inventory()) == (
            Share(U0, memory, percent),
        )


def test_a_daemon_of_ours_is_reached_with_and_without_hostipc() -> None:
    """aws:D2: pipe and shared memory are mounted, so hostIPC is not needed;
    the pipe lies where pods that still have it look.
    """
    edits = _edits([f"{U0}-3"], mps="supervised")
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": U0, "CUDA_MPS_PIPE_DIRECTORY": PIPE}
    assert edits.mounts == (Mount(PIPE, PIPE), Mount("/dev/shm", "/run/nvidia/mps/shm"))


def test_a_daemon_of_somebody_else_is_mounted_from_the_host() -> None:
    """An operator's daemon at /tmp/nvidia-mps uses the host's own shared memory.
    Nothing of ours limits, so nothing is booked.
    """
    assert _edits([f"{U0}-3"], mps="host").mounts == (
        Mount(PIPE, PIPE),
        Mount("/dev/shm", "/dev/shm"),
    )
    family = _family(mps="host")
    assert _offer(family, golden_inventory()).sharing is SharingMode.MPS_OF_HOST
    assert family.shares("", [f"{U0}-3", f"{U1}-0"], golden_inventory()) == (Share(U0), Share(U1))


def test_two_shares_are_twice_the_limit_where_limits_are_the_containers() -> None:
    """With mps.perContainerLimits a container of two has two tenths,
    in its variables and on the ledger.
    """
    paths = MpsOptions(per_container_limits=True, pipe_directory=PIPE)
    edits = _edits([f"{U0}-3", f"{U0}-4"], mps="supervised", paths=paths)
    assert edits.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert edits.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "20"
    family = _family(mps="supervised", paths=paths)
    assert family.shares("", [f"{U0}-3", f"{U0}-4"], golden_inventory()) == (Share(U0, 8192, 20),)


def test_ids_of_other_plugins_come_to_nothing() -> None:
    """The kubelet's records under this name could hold anything.
    What cannot be read is not booked on some GPU.
    """
    assert _family().shares("", [U0, f"{U0}::1", f"{U0}-x", "none"], golden_inventory()) == ()


def _firsts(family: AwsFamily, inventory: Inventory) -> list[Any]:
    return [entry for entry in _offer(family, inventory).ids if entry.id.endswith("-0")]
