"""The `nvidia` family against the golden vectors of the nvidia contract (§17)."""

from __future__ import annotations

import dataclasses

import pytest

from tests.golden import U0, U1
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.nvidia import NvidiaFamily, NvidiaOptions
from vgpu_agent.isolation.edits import DeviceNode
from vgpu_agent.model import Gpu, Inventory, Link, Resource, Share

SHARED_BY_4 = NvidiaOptions(replicas=4, shared=True)
ALL_CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


def _only_resource(options: NvidiaOptions, inventory: Inventory) -> Resource:
    (resource,) = NvidiaFamily(options).resources(inventory)
    return resource


def _visible(options: NvidiaOptions, ids: list[str], inventory: Inventory) -> str:
    edits = NvidiaFamily(options).edits(_only_resource(options, inventory), ids, inventory)
    assert set(edits.environment) == {"NVIDIA_VISIBLE_DEVICES"}
    assert not edits.mounts
    assert not edits.cdi_names
    return edits.environment["NVIDIA_VISIBLE_DEVICES"]


def test_g1_whole_gpus_are_offered_by_uuid(inventory: Inventory) -> None:
    """nvidia contract G1: ``nvidia.com/gpu`` is U0 and U1, each with its NUMA node."""
    resource = _only_resource(NvidiaOptions(), inventory)
    assert resource.name == "nvidia.com/gpu"
    assert [(entry.id, entry.device, entry.numa_node) for entry in resource.ids] == [(U0, U0, 0), (U1, U1, 1)]
    assert not resource.pre_start_required


def test_g8_four_replicas_of_each_gpu_are_offered(inventory: Inventory) -> None:
    """nvidia contract G8: ``<uuid>::0`` to ``<uuid>::3`` for each GPU, under the same name."""
    resource = _only_resource(SHARED_BY_4, inventory)
    assert resource.name == "nvidia.com/gpu"
    assert [entry.id for entry in resource.ids] == [f"{uuid}::{n}" for uuid in (U0, U1) for n in range(4)]
    assert resource.holders_per_device == 4


def test_g9_renamed_replicas_replace_the_plain_name(inventory: Inventory) -> None:
    """nvidia contract G9: ``nvidia.com/gpu.shared`` with the same 8 ids, and no ``nvidia.com/gpu``."""
    resource = _only_resource(dataclasses.replace(SHARED_BY_4, rename_shared=True), inventory)
    assert resource.name == "nvidia.com/gpu.shared"
    assert len(resource.ids) == 8


def test_one_replica_is_a_whole_gpu(inventory: Inventory) -> None:
    """``replicas: 1`` is accepted and means what it says: an unshared GPU."""
    resource = _only_resource(NvidiaOptions(replicas=1, shared=True), inventory)
    assert [entry.id for entry in resource.ids] == [U0, U1]


def test_a_node_without_gpus_offers_nothing() -> None:
    """An empty inventory registers no resource at all."""
    assert NvidiaFamily(NvidiaOptions()).resources(Inventory()) == ()


def test_a1_one_gpu(inventory: Inventory) -> None:
    """nvidia contract A1: the container sees U0."""
    assert _visible(NvidiaOptions(), [U0], inventory) == U0


def test_a2_two_gpus_in_request_order(inventory: Inventory) -> None:
    """nvidia contract A2: both UUIDs, in the order of the request."""
    assert _visible(NvidiaOptions(), [U0, U1], inventory) == f"{U0},{U1}"
    assert _visible(NvidiaOptions(), [U1, U0], inventory) == f"{U1},{U0}"


def test_a3_replicas_name_each_gpu_once_in_request_order(inventory: Inventory) -> None:
    """nvidia contract A3: [U1::2, U0::1, U1::0] becomes "U1,U0"."""
    assert _visible(SHARED_BY_4, [f"{U1}::2", f"{U0}::1", f"{U1}::0"], inventory) == f"{U1},{U0}"


def test_a5_index_strategy(inventory: Inventory) -> None:
    """nvidia contract A5 (index): the container sees "0"."""
    assert _visible(NvidiaOptions(id_strategy="index"), [U0], inventory) == "0"


def test_a16_device_specs(inventory: Inventory) -> None:
    """nvidia contract A16: the control nodes that exist and ``/dev/nvidia0``, read and write."""
    options = NvidiaOptions(pass_device_specs=True, control_nodes=ALL_CONTROL_NODES)
    edits = NvidiaFamily(options).edits(_only_resource(options, inventory), [U0], inventory)
    assert edits.device_nodes == tuple(DeviceNode(path, path, "rw") for path in (*ALL_CONTROL_NODES, "/dev/nvidia0"))
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": U0}


def test_a16_only_control_nodes_that_exist_are_named(inventory: Inventory) -> None:
    """nvidia contract A16: a node that this machine lacks is left out."""
    options = NvidiaOptions(pass_device_specs=True, control_nodes=("/dev/nvidiactl",))
    edits = NvidiaFamily(options).edits(_only_resource(options, inventory), [U1], inventory)
    assert [node.container_path for node in edits.device_nodes] == ["/dev/nvidiactl", "/dev/nvidia1"]


def test_a17_device_specs_below_a_driver_root(inventory: Inventory) -> None:
    """nvidia contract A17: container ``/dev/nvidia0``, host ``/run/nvidia/driver/dev/nvidia0``."""
    options = NvidiaOptions(pass_device_specs=True, device_root="/run/nvidia/driver")
    edits = NvidiaFamily(options).edits(_only_resource(options, inventory), [U0], inventory)
    assert edits.device_nodes == (DeviceNode("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0", "rw"),)


def test_two_replicas_of_one_gpu_list_its_node_once(inventory: Inventory) -> None:
    """nvidia contract §18.13: device specs are free of duplicates."""
    options = dataclasses.replace(SHARED_BY_4, pass_device_specs=True)
    edits = NvidiaFamily(options).edits(_only_resource(options, inventory), [f"{U0}::0", f"{U0}::3"], inventory)
    assert [node.container_path for node in edits.device_nodes] == ["/dev/nvidia0"]


def test_a23_more_than_one_replica_is_refused_where_asked_for(inventory: Inventory) -> None:
    """nvidia contract A23: with failRequestsGreaterThanOne, 2 ids are refused with the known text."""
    options = dataclasses.replace(SHARED_BY_4, fail_requests_greater_than_one=True)
    family, resource = NvidiaFamily(options), _only_resource(options, inventory)
    with pytest.raises(RequestRefusedError, match=r"maximum request size for shared resources is 1; found 2"):
        family.check(resource, [f"{U0}::0", f"{U1}::0"])
    family.check(resource, [f"{U0}::0"])


def test_two_whole_gpus_are_no_shared_request(inventory: Inventory) -> None:
    """The limit of one is about replicas: whole GPUs may be asked for in any number."""
    options = NvidiaOptions(fail_requests_greater_than_one=True)
    NvidiaFamily(options).check(_only_resource(options, inventory), [U0, U1])


def test_a_whole_gpu_is_exclusive_and_a_replica_books_its_place_only(inventory: Inventory) -> None:
    """Time-slicing limits nothing, and the ledger does not pretend it does."""
    family = NvidiaFamily(SHARED_BY_4)
    assert family.shares("nvidia.com/gpu", [U0], inventory) == (Share(U0, 40960, 100, exclusive=True),)
    assert family.shares("nvidia.com/gpu", [f"{U0}::1", f"{U0}::2"], inventory) == (Share(U0),)


def test_preferred_replicas_of_known_gpus_come_in_node_order(inventory: Inventory) -> None:
    """Equal GPUs are taken in the order an operator counts them, and ids that are not ours are passed over."""
    family, resource = NvidiaFamily(SHARED_BY_4), _only_resource(SHARED_BY_4, inventory)
    available = ["GPU-other::0", *reversed([entry.id for entry in resource.ids])]
    assert family.prefer(resource, available, [], 2, inventory) == [f"{U0}::0", f"{U1}::0"]


@pytest.mark.parametrize("policy", ["distributed", "packed"])
def test_whole_gpus_that_belong_together_are_preferred(policy: str) -> None:
    """The policy is about replicas; of whole GPUs those with NVLinks between them go together (nvidia contract §6.1)."""
    gpus = tuple(Gpu(f"GPU-{place}", place, place, "NVIDIA H100", 81559) for place in range(4))
    near, far = Link(40, nvlinks=4), Link(50)
    pairs = {(f"GPU-{one}", f"GPU-{other}"): near if (one + other) == 3 else far for one in range(4) for other in range(4) if one != other}
    inventory = Inventory(1, gpus, pairs)
    options = NvidiaOptions(policy=policy)
    family, resource = NvidiaFamily(options), _only_resource(options, inventory)
    assert family.prefer(resource, ["GPU-3", "GPU-2", "GPU-1", "GPU-0"], [], 2, inventory) == ["GPU-0", "GPU-3"]
    assert family.prefer(resource, ["GPU-2", "GPU-1", "GPU-0"], ["GPU-2"], 2, inventory) == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize(("name", "ours"), [("nvidia.com/gpu", True), ("nvidia.com/gpu.shared", True), ("amd.com/gpu", False)])
def test_records_of_both_names_are_ours(name: str, ours: bool) -> None:
    """After a change of renameByDefault, kubelet's records still name the old resource."""
    assert NvidiaFamily(NvidiaOptions()).claims(name) is ours
