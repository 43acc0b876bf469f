"""The `nvidia` family's answers about ids, against the golden vectors of nvidia §17.2;
what it offers is next door.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.nvidia.parts import iktos, only_resource, shared_by
from tests.golden import SLICES, U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.isolation.mps import MpsOptions
from vgpu_agent.model import Gpu, Inventory, Link, Resource, Share, SharingMode

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
MIXED = NvidiaOptions(mig_strategy="mixed")
GPU_1_DIVIDED = with_slices(golden_inventory(), U1=golden_slices())
M3 = SLICES[3]
MPS_BY_4 = shared_by(4, sharing=SharingMode.MPS)


def visible(
    options: NvidiaOptions, ids: list[str], inventory: Inventory, *, name: str = GPU
) -> str:
    """Return the devices that the container sees, and check that the answer has nothing else."""
    family = NvidiaFamily(options)
    edits = family.edits(resource_of(family, inventory, name), ids, inventory)
    assert set(edits.environment) == {"NVIDIA_VISIBLE_DEVICES"}
    assert (edits.mounts, edits.cdi_names, edits.device_nodes) == ((), (), ())
    return edits.environment["NVIDIA_VISIBLE_DEVICES"]


def resource_of(family: NvidiaFamily, inventory: Inventory, name: str = GPU) -> Resource:
    """One of what is offered."""
    return next(resource for resource in family.resources(inventory) if resource.name == name)


# -- what containers receive -----------------------------------------------------------------------


def test_a1_a2_gpus_in_request_order(inventory: Inventory) -> None:
    """nvidia:A1 and nvidia:A2: the UUIDs, in the order of the request."""
    assert visible(NvidiaOptions(), [U0], inventory) == U0
    assert visible(NvidiaOptions(), [U0, U1], inventory) == f"{U0},{U1}"
    assert visible(NvidiaOptions(), [U1, U0], inventory) == f"{U1},{U0}"


def test_a3_replicas_name_each_gpu_once_in_request_order(inventory: Inventory) -> None:
    """nvidia:A3: [U1::2, U0::1, U1::0] becomes "U1,U0"."""
    assert visible(shared_by(4), [f"{U1}::2", f"{U0}::1", f"{U1}::0"], inventory) == f"{U1},{U0}"


def test_a4_a_slice_by_its_uuid() -> None:
    """nvidia:A4: the container sees M3."""
    assert visible(MIXED, [M3], GPU_1_DIVIDED, name=MIG) == M3


def test_a5_by_index(inventory: Inventory) -> None:
    """nvidia:A5: "0" of a GPU, "1:3" of a slice. The order of the request stays."""
    by_index = ListOptions(id_strategy="index")
    assert visible(NvidiaOptions(lists=by_index), [U0], inventory) == "0"
    assert visible(NvidiaOptions(lists=by_index), [U1, U0], inventory) == "1,0"
    assert (
        visible(msgspec.structs.replace(MIXED, lists=by_index), [M3], GPU_1_DIVIDED, name=MIG)
        == "1:3"
    )


def test_a26_every_gpu_under_wsl(inventory: Inventory) -> None:
    """nvidia:A26: the container sees "all", and its share is of every GPU,
    so that no other family gives one of them away.
    """
    options = NvidiaOptions(wsl=True, lists=ListOptions(pass_device_specs=True))
    family = NvidiaFamily(options)
    edits = family.edits(resource_of(family, inventory), ["all"], inventory)
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert [node.container_path for node in edits.device_nodes] == ["/dev/dxg"]
    assert [
        (share.device, share.exclusive) for share in family.shares(GPU, ["all"], inventory)
    ] == [(U0, True), (U1, True)]


def test_two_replicas_of_one_gpu_list_its_node_once(inventory: Inventory) -> None:
    """nvidia:D13: device specs are free of duplicates."""
    family = NvidiaFamily(shared_by(4, lists=ListOptions(pass_device_specs=True)))
    edits = family.edits(resource_of(family, inventory), [f"{U0}::0", f"{U0}::3"], inventory)
    assert [node.container_path for node in edits.device_nodes] == ["/dev/nvidia0"]


def test_containers_of_a_resource_that_is_shared_by_mps_are_clients_of_its_daemon(
    inventory: Inventory,
) -> None:
    """nvidia:A19: the GPU, the pipe and the shared memory;
    nothing of it where GPUs are shared by time-slicing.
    """
    family = NvidiaFamily(MPS_BY_4)
    edits = family.edits(resource_of(family, inventory), [f"{U0}::1"], inventory)
    assert edits.environment == {
        "NVIDIA_VISIBLE_DEVICES": U0,
        "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
    }
    assert [mount.container_path for mount in edits.mounts] == [
        "/mps/nvidia.com/gpu/pipe",
        "/dev/shm",
    ]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        pytest.param(MPS_BY_4, "sharing.mps", id="A22"),
        pytest.param(shared_by(4), "sharing.timeSlicing", id="A23"),
    ],
)
def test_more_than_one_replica_is_refused_where_asked_for(
    options: NvidiaOptions, setting: str, inventory: Inventory
) -> None:
    """nvidia:A22 and nvidia:A23: the text that users know, and the setting that says so."""
    family = NvidiaFamily(msgspec.structs.replace(options, fail_requests_greater_than_one=True))
    resource = resource_of(family, inventory)
    with pytest.raises(RequestRefusedError) as refusal:
        family.check(resource, [f"{U0}::1", f"{U1}::0"])
    assert str(refusal.value) == (
        "invalid request: maximum request size for shared resources is 1; found 2 "
        f"({setting}.failRequestsGreaterThanOne; ask for 1 of nvidia.com/gpu)"
    )
    family.check(resource, [f"{U0}::0"])
    NvidiaFamily(options).check(resource, [f"{U0}::1", f"{U1}::0"])


def test_two_whole_gpus_are_no_shared_request(inventory: Inventory) -> None:
    """The limit of one is about replicas: whole GPUs may be asked for in any number."""
    options = NvidiaOptions(fail_requests_greater_than_one=True)
    NvidiaFamily(options).check(only_resource(options, inventory), [U0, U1])


# -- what is booked --------------------------------------------------------------------------------


def test_a_whole_device_is_exclusive_with_all_that_it_has() -> None:
    """A slice has its own memory. The memory of a slice that is gone is unknown."""
    family = NvidiaFamily(MIXED)
    assert family.shares(GPU, [U0], GPU_1_DIVIDED) == (Share(U0, 40960, 100, exclusive=True),)
    assert family.shares(MIG, [M3], GPU_1_DIVIDED) == (Share(M3, 4864, 100, exclusive=True),)
    assert family.shares(MIG, [M3], golden_inventory()) == (Share(M3, 0, 100, exclusive=True),)


def test_a_replica_books_its_place_only(inventory: Inventory) -> None:
    """Time-slicing limits nothing, and the ledger does not pretend it does."""
    assert NvidiaFamily(shared_by(4)).shares(GPU, [f"{U0}::1", f"{U0}::2"], inventory) == (
        Share(U0),
    )


def test_who_has_a_gpu_whole_has_it_whole_whatever_else_he_holds(inventory: Inventory) -> None:
    """A resource may offer both kinds, and records of two settings may exist side by side."""
    for ids in ([U0, f"{U0}::1"], [f"{U0}::1", U0]):
        assert NvidiaFamily(shared_by(4)).shares(GPU, ids, inventory) == (
            Share(U0, 40960, 100, exclusive=True),
        )


@pytest.mark.parametrize(
    ("limits_in_containers", "ids", "expected"),
    [
        (False, [f"{U0}::1"], Share(U0, 10240, 25)),
        (False, [f"{U0}::1", f"{U0}::2"], Share(U0, 10240, 25)),
        (True, [f"{U0}::1", f"{U0}::2"], Share(U0, 20480, 50)),
    ],
)
def test_a_replica_by_mps_books_the_limits_that_are_in_force(
    limits_in_containers: bool, ids: list[str], expected: Share, inventory: Inventory
) -> None:
    """nvidia:G11: 10240 MiB and 25 %. Two of them are twice as much only
    where containers get limits of their own.
    """
    family = NvidiaFamily(
        msgspec.structs.replace(MPS_BY_4, mps=MpsOptions(per_container_limits=limits_in_containers))
    )
    assert family.shares(GPU, ids, inventory) == (expected,)


@pytest.mark.parametrize("id_", [U0, f"{U0}::7", f"{U0}-replica-39"])
def test_ids_of_earlier_settings_are_read_under_any_name(id_: str, inventory: Inventory) -> None:
    """Renamed since, counted otherwise, or offered in iktos's words:
    its holder keeps its GPU over a restart.
    """
    for options in (
        NvidiaOptions(),
        shared_by(2, published="nvidia.com/other"),
        iktos(("gpu", "x", 2)),
        MPS_BY_4,
    ):
        family = NvidiaFamily(options)
        assert family.owns("nvidia.com/of-before") is Ownership.POSSIBLE
        (share,) = family.shares("nvidia.com/of-before", [id_], inventory)
        assert (share.device, share.exclusive) == (U0, id_ == U0)


@pytest.mark.parametrize(
    "id_", ["7", "GPU-x", f"{U0}-3", f"{U0}::x", f"{U0}::01", "", f"{U0}::1::2", "all", "all::0"]
)
def test_ids_of_other_plugins_come_to_nothing(id_: str, inventory: Inventory) -> None:
    """Passed-through cards of virtual machines and vGPUs have names in NVIDIA's domain, too."""
    assert (
        NvidiaFamily(NvidiaOptions()).shares("nvidia.com/GA100_A100_PCIE_40GB", [id_], inventory)
        == ()
    )


@pytest.mark.parametrize(
    ("name", "ownership"),
    [
        (GPU, Ownership.CERTAIN),
        ("nvidia.com/gpu.shared", Ownership.CERTAIN),
        (MIG, Ownership.CERTAIN),
        ("nvidia.com/sharedgpu", Ownership.POSSIBLE),
        ("nvidia.com/vgpu-number", Ownership.NONE),
        ("nvidia.com/vgpu-memory", Ownership.NONE),
        ("amd.com/gpu", Ownership.NONE),
    ],
)
def test_records_of_names_of_before_are_ours_unless_another_plugin_has_the_name(
    name: str, ownership: Ownership
) -> None:
    """After a rename the kubelet's records still have the old resource. Ids of vgpu-manager look
    like replicas (vgpu-manager §2.1).
    """
    assert NvidiaFamily(NvidiaOptions()).owns(name) is ownership


# -- what is preferred -----------------------------------------------------------------------------


def test_preferred_replicas_of_known_gpus_come_in_node_order(inventory: Inventory) -> None:
    """nvidia:D5: equal GPUs are taken in the order an operator counts them,
    and ids that are not ours are passed over.
    """
    family, resource = NvidiaFamily(shared_by(4)), only_resource(shared_by(4), inventory)
    available = ["GPU-other::0", *reversed([entry.id for entry in resource.ids])]
    assert family.prefer(resource, available, [], 2, inventory) == [f"{U0}::0", f"{U1}::0"]


@pytest.mark.parametrize("policy", ["distributed", "packed"])
def test_whole_gpus_that_belong_together_are_preferred(policy: str) -> None:
    """nvidia:§6.1: the policy is about replicas;
    of whole GPUs those with NVLinks between them go together.
    """
    gpus = tuple(Gpu(f"GPU-{place}", place, place, "NVIDIA H100", 81559) for place in range(4))
    near, far = Link(40, nvlinks=4), Link(50)
    pairs = {
        (f"GPU-{one}", f"GPU-{other}"): near if (one + other) == 3 else far
        for one in range(4)
        for other in range(4)
        if one != other
    }
    inventory = Inventory(1, gpus, pairs)
    options = NvidiaOptions(policy=policy)
    family, resource = NvidiaFamily(options), only_resource(options, inventory)
    assert family.prefer(resource, ["GPU-3", "GPU-2", "GPU-1", "GPU-0"], [], 2, inventory) == [
        "GPU-0",
        "GPU-3",
    ]
    assert family.prefer(resource, ["GPU-2", "GPU-1", "GPU-0"], ["GPU-2"], 2, inventory) == [
        "GPU-1",
        "GPU-2",
    ]


def test_a_gpu_that_is_lost_keeps_nobody_from_the_others(inventory: Inventory) -> None:
    """nvidia:D4: nothing is known of its links, and it is not among the available ones.
    The others are preferred as ever.
    """
    family, resource = NvidiaFamily(NvidiaOptions()), only_resource(NvidiaOptions(), inventory)
    first, second = inventory.gpus
    lost = msgspec.structs.replace(
        inventory, gpus=(first, msgspec.structs.replace(second, present=False)), links={}
    )
    assert family.prefer(resource, [U0], [], 1, lost) == [U0]


@pytest.mark.parametrize(("policy", "gpus"), [("distributed", [0, 1]), ("packed", [0, 0])])
def test_whole_slices_are_spread_or_packed_over_their_gpus(policy: str, gpus: list[int]) -> None:
    """To upstream each slice is a GPU of its own, and the policy means nothing;
    packed leaves whole GPUs to other families here.
    """
    both = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=golden_slices())
    options = NvidiaOptions(mig_strategy="mixed", policy=policy)
    family, resource = NvidiaFamily(options), only_resource(options, both)
    chosen = family.prefer(resource, [entry.id for entry in resource.ids], [], 2, both)
    assert [0 if id_.startswith("MIG-d") else 1 for id_ in chosen] == gpus


def test_replicas_of_slices_are_spread_over_slices() -> None:
    """A slice with two holders is as full as a GPU with two."""
    options = shared_by(2, name=MIG, mig_strategy="mixed")
    family = NvidiaFamily(options)
    resource = resource_of(family, GPU_1_DIVIDED, MIG)
    assert family.prefer(resource, [entry.id for entry in resource.ids], [], 2, GPU_1_DIVIDED) == [
        f"{SLICES[0]}::0",
        f"{SLICES[1]}::0",
    ]


def test_a_required_id_that_is_not_ours_is_said(inventory: Inventory) -> None:
    """The caller answers with a simple pick then."""
    family, resource = NvidiaFamily(shared_by(4)), only_resource(shared_by(4), inventory)
    with pytest.raises(CapacityError, match="not available: GPU-x"):
        family.prefer(resource, [f"{U0}::0"], ["GPU-x"], 2, inventory)
