"""The `nvidia` family in iktos's words:
golden vectors, spreading and what is mended (iktos §I.9, §I.4, §I.7).
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.families.nvidia.parts import cautions, iktos, offered, only_resource, refused
from tests.golden import SLICES, U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Gpu, Health, Inventory, Link, Share, SharingMode

GPU_1_DIVIDED = with_slices(golden_inventory(), U1=golden_slices())
BOTH_DIVIDED = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=golden_slices())
K1 = iktos(("gpu", "sharedgpu", 4))
K2 = iktos(("gpu", "gpu-mem-gb", -1), unit_mib=1000)


def replicas_of(*uuids: str, count: int) -> list[str]:
    """Their ids, counted as numbers."""
    return [f"{uuid}-replica-{number}" for uuid in uuids for number in range(count)]


def prefer(
    options: NvidiaOptions, size: int, inventory: Inventory, *, available: list[str] | None = None
) -> list[str]:
    """Return the ids that suit best; all are available by default."""
    family, resource = NvidiaFamily(options), only_resource(options, inventory)
    everything = [entry.id for entry in resource.ids]
    return family.prefer(
        resource, everything if available is None else available, [], size, inventory
    )


# -- what is offered -------------------------------------------------------------------------------


def test_k1_replicas_under_a_new_name(inventory: Inventory) -> None:
    """iktos:K1: four of each GPU as ``nvidia.com/sharedgpu``."""
    assert offered(K1, inventory) == {"nvidia.com/sharedgpu": replicas_of(U0, U1, count=4)}


@pytest.mark.parametrize("unit_mib", [1000, 1024])
def test_k2_a_replica_for_each_unit_of_memory(unit_mib: int, inventory: Inventory) -> None:
    """iktos:K2 and iktos:D8: 40960 MiB are 40 of 1000 MiB as the replaced plugin counts,
    and 40 GiB.
    """
    options = msgspec.structs.replace(K2, unit_mib=unit_mib)
    assert offered(options, inventory) == {"nvidia.com/gpu-mem-gb": replicas_of(U0, U1, count=40)}


def test_a_gibibyte_is_not_1000_mebibytes(inventory: Inventory) -> None:
    """iktos:D8: 40536 MiB are 40 units of 1000 and 39 GiB."""
    gpus = tuple(msgspec.structs.replace(gpu, memory_mib=40536) for gpu in inventory.gpus)
    smaller = msgspec.structs.replace(inventory, gpus=gpus)
    counts = {
        unit: len(only_resource(msgspec.structs.replace(K2, unit_mib=unit), smaller).ids)
        for unit in (1000, 1024)
    }
    assert counts == {1000: 80, 1024: 78}


def test_k3_what_is_not_listed_stays_as_it_is(inventory: Inventory) -> None:
    """iktos:K3 and iktos:D1, mended: upstream offers no device at all.
    Here a resource that is not named is unchanged.
    """
    assert offered(iktos(), inventory) == {"nvidia.com/gpu": [U0, U1]}
    slices_only = iktos(("mig-1g.5gb", "slice", 2), mig_strategy="mixed")
    assert offered(slices_only, GPU_1_DIVIDED)["nvidia.com/gpu"] == [U0]


def test_k4_one_replica_has_a_number_too(inventory: Inventory) -> None:
    """iktos:K4: U0-replica-0, U1-replica-0."""
    assert offered(iktos(("gpu", "gpu", 1)), inventory) == {
        "nvidia.com/gpu": replicas_of(U0, U1, count=1)
    }


def test_k5_slices_get_their_new_name() -> None:
    """iktos:K5 and iktos:D2, mended: the slices are ``nvidia.com/slice``,
    which upstream ignores.
    """
    options = iktos(("gpu", "sharedgpu", 2), ("mig-1g.5gb", "slice", 2), mig_strategy="mixed")
    assert offered(options, GPU_1_DIVIDED) == {
        "nvidia.com/sharedgpu": replicas_of(U0, count=2),
        "nvidia.com/slice": replicas_of(*SLICES, count=2),
    }


def test_k6_single_refuses_a_node_with_and_without_mig() -> None:
    """iktos:K6, mended: no panic. The resource is withheld under its new name, with the reason."""
    options = iktos(("gpu", "x", 2), mig_strategy="single")
    assert offered(options, GPU_1_DIVIDED) == {}
    (problem,) = refused(options, GPU_1_DIVIDED)
    assert problem.startswith(
        "nvidia.com/x: all devices on the node must be configured with the same migEnabled value"
    )


def test_k7_single_shares_slices() -> None:
    """iktos:K7: 28 ids; and iktos:D5, mended:
    a preference among slices asks for no links and fails no pod.
    """
    options = iktos(("gpu", "x", 2), mig_strategy="single")
    resource = only_resource(options, BOTH_DIVIDED)
    assert (resource.name, len(resource.ids)) == ("nvidia.com/x", 28)
    assert prefer(options, 2, BOTH_DIVIDED) == [
        f"{golden_slices(letter='d')[place].uuid}-replica-0" for place in range(2)
    ]


def test_k8_single_without_mig_is_as_none(inventory: Inventory) -> None:
    """iktos:K8 and iktos:D3, mended: upstream calls itself until the stack is full."""
    assert offered(iktos(("gpu", "x", 2), mig_strategy="single"), inventory) == {
        "nvidia.com/x": replicas_of(U0, U1, count=2)
    }


def test_k9_without_a_strategy_mig_is_not_looked_at() -> None:
    """iktos:K9: the replicas of both GPUs, and a warning about the one in MIG mode."""
    options = iktos(("gpu", "x", 2))
    assert offered(options, GPU_1_DIVIDED) == {"nvidia.com/x": replicas_of(U0, U1, count=2)}
    assert len(cautions(options, GPU_1_DIVIDED)) == 1


def test_a_slices_own_memory_counts() -> None:
    """iktos:D7: a slice of 4864 MiB has four ids, not the forty of its GPU."""
    options = iktos(("mig-1g.5gb", "slice-gb", -1), mig_strategy="mixed")
    assert len(offered(options, GPU_1_DIVIDED)["nvidia.com/slice-gb"]) == 4 * len(SLICES)


def test_a_device_without_memory_has_no_ids(inventory: Inventory) -> None:
    """A driver that does not say costs that GPU, and says so."""
    first, second = inventory.gpus
    unknown = msgspec.structs.replace(
        inventory, gpus=(first, msgspec.structs.replace(second, memory_mib=0))
    )
    assert offered(K2, unknown) == {"nvidia.com/gpu-mem-gb": replicas_of(U0, count=40)}
    assert cautions(K2, unknown) == (
        f"nvidia.com/gpu-mem-gb: GPU 1 ({U1}) has 0 MiB, and an id stands for 1000 MiB",
    )


def test_an_ill_gpu_takes_all_its_replicas(inventory: Inventory) -> None:
    """iktos:D4: upstream marks a copy that the kubelet never receives.
    Here all four flip in one list, and come back.
    """
    ledger = Ledger()
    ledger.observe(inventory)
    ledger.offer(NvidiaFamily(K1).resources(inventory))
    ledger.observe(golden_inventory(U1=Health(ok=False, reason="XID 79")))
    listed = {entry.id.id for entry in ledger.listing("nvidia.com/sharedgpu") if not entry.healthy}
    assert listed == set(replicas_of(U1, count=4))
    ledger.observe(inventory)
    assert all(entry.healthy for entry in ledger.listing("nvidia.com/sharedgpu"))


def test_what_nothing_limits_is_not_booked(inventory: Inventory) -> None:
    """iktos:D13: replicas and units of memory are advisory, and the ledger,
    its metrics and /debug say so: 0 MiB, time-slicing.
    """
    family = NvidiaFamily(K2)
    assert family.shares("nvidia.com/gpu-mem-gb", replicas_of(U0, count=8), inventory) == (
        Share(U0),
    )
    assert only_resource(K2, inventory).sharing is SharingMode.TIME_SLICING


# -- what containers receive -----------------------------------------------------------------------

ASKED = [f"{U1}-replica-0", f"{U0}-replica-2", f"{U0}-replica-1"]


@pytest.mark.parametrize(("id_strategy", "expected"), [("uuid", f"{U0},{U1}"), ("index", "0,1")])
def test_devices_are_named_once_and_sorted(
    id_strategy: str, expected: str, inventory: Inventory
) -> None:
    """iktos §I.9, Allocate under K1: sorted, unlike NVIDIA's own plugin (iktos:K1)."""
    options = msgspec.structs.replace(K1, lists=ListOptions(id_strategy=id_strategy))
    edits = NvidiaFamily(options).edits(only_resource(options, inventory), ASKED, inventory)
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": expected}


def test_under_wsl_the_one_id_has_no_place_to_be_sorted_by(inventory: Inventory) -> None:
    """nvidia:A26 in iktos's words: "all" is neither an index nor a UUID."""
    options = msgspec.structs.replace(
        iktos(("gpu", "gpu", 2)), wsl=True, lists=ListOptions(id_strategy="index")
    )
    family, resource = NvidiaFamily(options), only_resource(options, inventory)
    assert family.edits(resource, ["all-replica-1"], inventory).environment == {
        "NVIDIA_VISIBLE_DEVICES": "all"
    }


def test_volume_mounts_and_device_nodes(inventory: Inventory) -> None:
    """iktos §I.9: the other two ways of its table;
    cdi names, which it does not have, come from the same place (iktos:D16).
    """
    lists = ListOptions(
        ("volume-mounts", "cdi-cri"), pass_device_specs=True, control_nodes=("/dev/nvidiactl",)
    )
    options = msgspec.structs.replace(K1, lists=lists)
    edits = NvidiaFamily(options).edits(only_resource(options, inventory), ASKED, inventory)
    root = "/var/run/nvidia-container-devices"
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": root}
    assert [(mount.host_path, mount.container_path) for mount in edits.mounts] == [
        ("/dev/null", f"{root}/{uuid}") for uuid in (U0, U1)
    ]
    assert [node.container_path for node in edits.device_nodes] == [
        "/dev/nvidiactl",
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]
    assert edits.cdi_names == tuple(f"k8s.device-plugin.nvidia.com/gpu={uuid}" for uuid in (U0, U1))


# -- what is preferred -----------------------------------------------------------------------------

# Eight GPUs a…h with three replicas each, and the table of I.4: a0 is the first replica of a.
NAMED = {
    letter: f"GPU-{place:08x}-0000-4000-8000-000000000000"
    for place, letter in enumerate("abcdefgh")
}
EIGHT = Inventory(
    1,
    tuple(
        Gpu(uuid, place, place, "NVIDIA A100", 40960) for place, uuid in enumerate(NAMED.values())
    ),
)


def ids(words: str) -> list[str]:
    """``a0 b1`` in full."""
    return [f"{NAMED[word[0]]}-replica-{word[1:]}" for word in words.split()]


@pytest.mark.parametrize(
    ("available", "must", "size", "expected"),
    [
        pytest.param("a0 a1 b1", "", 1, "a0", id="I.4-1 a has more free"),
        pytest.param("a0 a1 b1", "", 2, "a0 b1", id="I.4-2"),
        pytest.param("a0 a1 a2 b1", "", 3, "a0 a1 b1", id="I.4-3 not unique"),
        pytest.param("a0 a1 b1", "b1", 1, "b1", id="I.4-4"),
        pytest.param("a0 a1 b1", "a1", 1, "a1", id="I.4-5"),
        pytest.param("a0 a1 b1", "a1", 2, "a1 b1", id="I.4-6"),
        pytest.param("a0 a1 a2 b2 b1", "a2", 3, "a0 a2 b1", id="I.4-7 b1 before b2"),
        pytest.param("a0 a1 a2 b1 c0", "a2", 3, "a2 b1 c0", id="I.4-8"),
        pytest.param("a0 a1 a2 b1", "a2 b1 a1", 3, "a1 a2 b1", id="I.4-9"),
        pytest.param("a1 b1 c1 d1 e1 f1 g1 h1", "", 1, "a1", id="I.4-10 the first of equals"),
        pytest.param("a0 a1 a2 b1", "", 0, "", id="I.4-12"),
    ],
)
def test_replicas_are_spread(available: str, must: str, size: int, expected: str) -> None:
    """iktos:§I.4-1, iktos:§I.4-2, iktos:§I.4-3, iktos:§I.4-4, iktos:§I.4-5, iktos:§I.4-6,
    iktos:§I.4-7, iktos:§I.4-8, iktos:§I.4-9, iktos:§I.4-10 and iktos:§I.4-12: over GPUs that the
    container has nothing of yet, those with the most free replicas first.
    """
    options = iktos(("gpu", "x", 3))
    chosen = NvidiaFamily(options).prefer(
        only_resource(options, EIGHT), ids(available), ids(must), size, EIGHT
    )
    assert chosen == ids(expected)


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        pytest.param("a0 a1 a2 b1", "", 5, id="I.4-11 none left"),
        pytest.param("", "", 1, id="I.4-13"),
        pytest.param("a0 a1", "a2", 1, id="I.4-14"),
        pytest.param("a0 a1", "b2", 1, id="I.4-14, another GPU"),
    ],
)
def test_what_cannot_be_had_is_said(available: str, must: str, size: int) -> None:
    """iktos:§I.4-11, iktos:§I.4-13 and iktos:§I.4-14:
    an error, which the allocator makes a simple pick of.
    """
    options = iktos(("gpu", "x", 3))
    with pytest.raises(CapacityError):
        NvidiaFamily(options).prefer(
            only_resource(options, EIGHT), ids(available), ids(must), size, EIGHT
        )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [(U0, 0)]), (2, [(U0, 0), (U1, 0)]), (3, [(U0, 0), (U0, 1), (U1, 0)])],
)
def test_preferred_under_k1(
    size: int, expected: list[tuple[str, int]], inventory: Inventory
) -> None:
    """iktos §I.9, Preferred under K1, all free (iktos:K1)."""
    assert prefer(K1, size, inventory) == [f"{uuid}-replica-{number}" for uuid, number in expected]


def test_replicas_are_counted_as_numbers(inventory: Inventory) -> None:
    """iktos:D14: the third replica is 2. By text it would be 10."""
    options = iktos(("gpu", "x", 12))
    numbers = [id_.rpartition("-")[2] for id_ in prefer(options, 6, inventory)]
    assert numbers == ["0", "1", "2"] * 2


def test_one_replica_a_gpu_is_preferred_by_its_advertised_id() -> None:
    """iktos:D6: upstream answers with bare UUIDs, which kubelet throws away; here GPUs that belong
    together, by ids that are offered.
    """
    gpus = tuple(msgspec.structs.replace(gpu) for gpu in EIGHT.gpus[:4])
    uuids = [gpu.uuid for gpu in gpus]
    links = {
        pair: Link(10, 4) if {uuids.index(one) for one in pair} == {1, 3} else Link(50)
        for pair in itertools.permutations(uuids, 2)
    }
    assert prefer(iktos(("gpu", "gpu", 1)), 2, Inventory(1, gpus, links)) == ids("b0 d0")


# -- memory in units -------------------------------------------------------------------------------


def test_units_of_memory_are_taken_from_one_gpu(inventory: Inventory) -> None:
    """iktos:D12: upstream spreads 8 GB over two GPUs, four and four."""
    assert prefer(K2, 8, inventory) == replicas_of(U0, count=8)


def test_the_fullest_gpu_that_has_enough_is_taken(inventory: Inventory) -> None:
    """iktos:D12: what is whole stays whole for larger requests."""
    available = replicas_of(U0, count=40) + replicas_of(U1, count=10)
    assert prefer(K2, 8, inventory, available=available) == replicas_of(U1, count=8)
    assert prefer(K2, 11, inventory, available=available) == replicas_of(U0, count=11)


def test_units_of_memory_that_must_be_in_decide_for_their_gpu(inventory: Inventory) -> None:
    """iktos:D12: an init container's ids are handed on, and the rest must lie beside them."""
    family, resource = NvidiaFamily(K2), only_resource(K2, inventory)
    everything = [entry.id for entry in resource.ids]
    must = [f"{U1}-replica-5"]
    assert family.prefer(resource, everything, must, 3, inventory) == [
        *must,
        f"{U1}-replica-0",
        f"{U1}-replica-1",
    ]
    with pytest.raises(CapacityError, match="are of 2 devices"):
        family.prefer(resource, everything, [*must, f"{U0}-replica-0"], 3, inventory)


def test_units_of_memory_of_two_gpus_are_refused(inventory: Inventory) -> None:
    """iktos:D12: kubelet had no eight on one GPU. The text says what can be asked for."""
    family, resource = NvidiaFamily(K2), only_resource(K2, inventory)
    with pytest.raises(
        CapacityError, match="81 ids of one device are requested, no device has more than 40"
    ):
        family.prefer(resource, [entry.id for entry in resource.ids], [], 81, inventory)
    with pytest.raises(RequestRefusedError) as refusal:
        family.check(resource, [f"{U0}-replica-38", f"{U0}-replica-39", f"{U1}-replica-0"])
    assert str(refusal.value) == (
        "invalid request: 3 of nvidia.com/gpu-mem-gb are not free on one device, and memory of 2 "
        f"is not one piece ({U0}, {U1}); ask for less, at most 40, or wait until containers on one "
        "of them end"
    )
    family.check(resource, replicas_of(U1, count=40))


def test_replicas_that_are_no_memory_may_be_of_several_gpus(inventory: Inventory) -> None:
    """iktos §I.4: spreading is what they are for."""
    NvidiaFamily(K1).check(only_resource(K1, inventory), ASKED)
