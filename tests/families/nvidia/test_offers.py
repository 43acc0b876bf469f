"""Offers of the `nvidia` family: golden vectors of nvidia §17.1, MIG strategies,
patterns and replicas by device.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.families.nvidia.parts import cautions, offered, only_resource, refused, shared_by
from tests.golden import SLICES, U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions, Pattern, SharedEntry
from vgpu_agent.model import Health, Inventory, SharingMode

GPU, SHARED, MIG = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"
SINGLE, MIXED = NvidiaOptions(mig_strategy="single"), NvidiaOptions(mig_strategy="mixed")
GPU_1_DIVIDED = with_slices(golden_inventory(), U1=golden_slices())
EMPTY = with_slices(golden_inventory(), U1=())


def replicas_of(*uuids: str, count: int) -> list[str]:
    """Their ids."""
    return [f"{uuid}::{number}" for uuid in uuids for number in range(count)]


def one_slice(profile: str, **changes: Any) -> Inventory:
    """GPU 1 with a single slice of that profile."""
    (instance,) = golden_slices(count=1)
    changed = msgspec.structs.replace(instance, profile=profile, **changes)
    return with_slices(golden_inventory(), U1=(changed,))


def entries(*shared: SharedEntry, **options: Any) -> NvidiaOptions:
    """Options with several entries about sharing."""
    return NvidiaOptions(shared=shared, **options)


# -- the vectors -----------------------------------------------------------------------------------


def test_g1_whole_gpus_are_offered_by_uuid(inventory: Inventory) -> None:
    """nvidia:G1: ``nvidia.com/gpu`` is U0 and U1, each with its NUMA node."""
    resource = only_resource(NvidiaOptions(), inventory)
    assert resource.name == GPU
    assert [(entry.id, entry.device, entry.numa_node) for entry in resource.ids] == [
        (U0, U0, 0),
        (U1, U1, 1),
    ]
    assert not resource.pre_start_required


def test_g2_without_a_strategy_a_gpu_in_mig_mode_is_offered_whole() -> None:
    """nvidia:G2: U0 and U1, as upstream; but the operator reads
    that work on U1 will not get what it asks for.
    """
    assert offered(NvidiaOptions(), GPU_1_DIVIDED) == {GPU: [U0, U1]}
    (caution,) = cautions(NvidiaOptions(), GPU_1_DIVIDED)
    assert caution.startswith(
        f"GPU 1 ({U1}) is in MIG mode and offered whole, because plugin.migStrategy is none"
    )


def test_g3_single_refuses_a_node_with_and_without_mig() -> None:
    """nvidia:G3: the resource is withheld, with both GPUs and the remedy.
    The agent itself goes on.
    """
    assert offered(SINGLE, GPU_1_DIVIDED) == {}
    (problem,) = refused(SINGLE, GPU_1_DIVIDED)
    assert problem == (
        "nvidia.com/gpu: all devices on the node must be configured with the same migEnabled "
        f"value: GPU 1 ({U1}) is in MIG mode and GPU 0 ({U0}) is not; switch MIG mode alike on all "
        "GPUs, or set plugin.migStrategy: mixed"
    )


def test_g4_single_offers_slices_under_the_name_of_gpus() -> None:
    """nvidia:G4: seven slices of each GPU as ``nvidia.com/gpu``."""
    both = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=golden_slices())
    resource = only_resource(SINGLE, both)
    assert resource.name == GPU
    assert [entry.id for entry in resource.ids] == [
        slice_.uuid for slice_ in golden_slices(letter="d")
    ] + list(SLICES)
    assert [entry.numa_node for entry in resource.ids] == [0] * 7 + [1] * 7


def test_g5_single_refuses_slices_of_two_kinds() -> None:
    """nvidia:G5: 1g.5gb and 2g.10gb cannot both be ``nvidia.com/gpu``.
    The text names one of each.
    """
    larger = msgspec.structs.replace(
        golden_slices(count=1, letter="e")[0], index=1, profile="2g.10gb", memory_mib=9856
    )
    both = with_slices(
        golden_inventory(), U0=golden_slices(letter="d"), U1=(golden_slices()[0], larger)
    )
    assert offered(SINGLE, both) == {}
    (problem,) = refused(SINGLE, both)
    assert problem == (
        "nvidia.com/gpu: more than one MIG device type present on node: "
        "MIG device 0:0 (MIG-dddddddd-0000-5000-8000-000000000000) is 1g.5gb of 4864 MiB and "
        "MIG device 1:1 (MIG-eeeeeeee-0000-5000-8000-000000000000) is 2g.10gb of 9856 MiB; "
        "make all MIG instances alike, or set plugin.migStrategy: mixed"
    )


def test_g6_mixed_offers_slices_by_profile() -> None:
    """nvidia:G6: GPU 0 whole, the slices of GPU 1 as ``nvidia.com/mig-1g.5gb``,
    GPU 1 itself not at all.
    """
    assert offered(MIXED, GPU_1_DIVIDED) == {GPU: [U0], MIG: list(SLICES)}
    assert refused(MIXED, GPU_1_DIVIDED) == cautions(MIXED, GPU_1_DIVIDED) == ()


def test_g7_mixed_leaves_out_a_gpu_without_slices() -> None:
    """nvidia:G7: GPU 0 is offered, GPU 1 only warned about."""
    assert offered(MIXED, EMPTY) == {GPU: [U0]}
    assert cautions(MIXED, EMPTY) == (
        (
            f"GPU 1 ({U1}) is in MIG mode and has no MIG instances, so it is not offered; create "
            "MIG instances, or switch its MIG mode off"
        ),
    )


def _troubled(inventory: Inventory, trouble: str) -> Inventory:
    """Return the inventory with this trouble in reading the slices of GPU 1."""
    first, second = inventory.gpus
    return msgspec.structs.replace(
        inventory, gpus=(first, msgspec.structs.replace(second, mig_trouble=trouble))
    )


UNREAD = _troubled(EMPTY, "not allowed; do this")


def test_a_gpu_whose_slices_cannot_be_read_is_not_said_to_have_none() -> None:
    """nvidia:G7: creating some would not help. The caution has the driver's word and the remedy."""
    assert offered(MIXED, UNREAD) == {GPU: [U0]}
    assert cautions(MIXED, UNREAD) == (
        (
            f"MIG instances of GPU 1 ({U1}) cannot be read, so they are not offered: not allowed; "
            "do this"
        ),
    )


def test_one_name_for_all_slices_waits_for_those_that_cannot_be_read() -> None:
    """With `single` it is unknown whether they are alike."""
    assert offered(SINGLE, UNREAD) == {}
    assert refused(SINGLE, UNREAD) == (
        (
            f"{GPU}: MIG instances of GPU 1 ({U1}) cannot be read, so they are not offered: "
            "not allowed; do this"
        ),
    )


def test_slices_that_can_be_read_are_offered_beside_those_that_cannot() -> None:
    """One that answers nothing costs only itself, and is reported."""
    partly = _troubled(GPU_1_DIVIDED, "Unknown Error")
    assert offered(MIXED, partly) == offered(MIXED, GPU_1_DIVIDED)
    assert cautions(MIXED, partly) == (
        f"MIG instances of GPU 1 ({U1}) cannot be read, so they are not offered: Unknown Error",
    )


def test_g8_four_replicas_of_each_gpu_are_offered(inventory: Inventory) -> None:
    """nvidia:G8: ``<uuid>::0`` to ``<uuid>::3`` for each GPU, under the same name,
    by time-slicing.
    """
    resource = only_resource(shared_by(4), inventory)
    assert [entry.id for entry in resource.ids] == replicas_of(U0, U1, count=4)
    assert (resource.name, resource.holders_per_device, resource.sharing) == (
        GPU,
        4,
        SharingMode.TIME_SLICING,
    )


def test_g9_renamed_replicas_replace_the_plain_name(inventory: Inventory) -> None:
    """nvidia:G9: ``nvidia.com/gpu.shared`` with the same 8 ids, and no ``nvidia.com/gpu``."""
    assert offered(shared_by(4, published=SHARED), inventory) == {
        SHARED: replicas_of(U0, U1, count=4)
    }


def test_g10_slices_can_be_shared_and_gpus_not() -> None:
    """nvidia:G10: mixed, mig-1g.5gb twice each: GPU 0 whole and 14 replicas of slices."""
    assert offered(shared_by(2, name=MIG, mig_strategy="mixed"), GPU_1_DIVIDED) == {
        GPU: [U0],
        MIG: replicas_of(*SLICES, count=2),
    }


def test_g16_one_replica_is_a_whole_gpu(inventory: Inventory) -> None:
    """nvidia:G16, corrected: ``replicas: 1`` is accepted and means what it says."""
    resource = only_resource(shared_by(1), inventory)
    assert [entry.id for entry in resource.ids] == [U0, U1]
    assert resource.sharing is SharingMode.NONE


def test_billions_of_replicas_by_mps_are_withheld_at_once(inventory: Inventory) -> None:
    """Somebody has written the memory in bytes. To look at each id would take hours, in which the
    node serves nobody.
    """
    options = shared_by(2**31 - 1, sharing=SharingMode.MPS)
    assert offered(options, inventory) == {}
    (problem,) = refused(options, inventory)
    assert problem.startswith(f"{GPU}: ")


# -- MIG -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.5gb+me", "mig-1g.5gb.me"),
        ("1g.12gb+gfx", "mig-1g.12gb.gfx"),
        ("1g.5gb+me.all", "mig-1g.5gb.me.all"),
        ("2g.12gb-me", "mig-2g.12gb-me"),
        ("7g.40gb", "mig-7g.40gb"),
    ],
)
def test_profiles_with_a_suffix_have_names_of_their_own(profile: str, name: str) -> None:
    """nvidia §3: ``+`` becomes a dot, and nothing else changes."""
    assert list(offered(MIXED, one_slice(profile))) == [GPU, f"nvidia.com/{name}"]


def test_a_compute_instance_that_is_smaller_than_its_gpu_instance_has_a_name() -> None:
    """nvidia:D8: upstream stops altogether.
    Here it is a resource like any other, beside all that there is.
    """
    assert list(offered(MIXED, one_slice("1c.2g.10gb"))) == [GPU, "nvidia.com/mig-1c.2g.10gb"]


def test_a_profile_that_cannot_be_a_name_withholds_only_itself() -> None:
    """A driver that answers nonsense costs that slice."""
    assert offered(MIXED, one_slice("1g 5gb?")) == {GPU: [U0]}
    (problem,) = refused(MIXED, one_slice("1g 5gb?"))
    assert problem.startswith(
        "nvidia.com/mig-1g 5gb?: no resource can have this name, which MIG device 1:0 "
        f"({SLICES[0]}) would get"
    )


def test_single_withholds_what_a_gpu_without_slices_would_be() -> None:
    """nvidia §3: "device N has no MIG devices configured", with the remedy."""
    both = with_slices(golden_inventory(), U0=golden_slices(), U1=())
    assert offered(SINGLE, both) == {}
    (problem,) = refused(SINGLE, both)
    assert problem.startswith(
        f"nvidia.com/gpu: device 1 has no MIG devices configured: GPU 1 ({U1}) is in MIG mode "
        "without a MIG instance"
    )
    assert "create its MIG instances" in problem


def test_single_without_mig_is_as_none(inventory: Inventory) -> None:
    """nvidia §3, last row of the table; the same for mixed."""
    assert offered(SINGLE, inventory) == offered(MIXED, inventory) == {GPU: [U0, U1]}


def test_what_single_withholds_is_named_by_what_it_would_be_called() -> None:
    """The reason is shown at the name that users look for."""
    options = shared_by(2, published=SHARED, mig_strategy="single")
    assert [problem.partition(":")[0] for problem in refused(options, GPU_1_DIVIDED)] == [SHARED]


def test_slices_whose_nodes_nobody_knows_are_withheld() -> None:
    """Garbage in the capability file: the resource is withheld with the file's trouble,
    whole GPUs go on.
    """
    garbage = with_slices(
        golden_inventory(),
        U1=tuple(
            msgspec.structs.replace(each, trouble="mig-minors line 1: 'x'")
            for each in golden_slices()
        ),
    )
    assert offered(MIXED, garbage) == {GPU: [U0]}
    assert refused(MIXED, garbage) == (
        f"{MIG}: the device nodes of no MIG instance are known: mig-minors line 1: 'x'",
    )


def test_one_slice_whose_nodes_nobody_knows_keeps_its_place() -> None:
    """The ledger has it Unhealthy with the reason. The other six are offered."""
    one = with_slices(
        golden_inventory(),
        U1=(msgspec.structs.replace(golden_slices()[0], trouble="no line"), *golden_slices()[1:]),
    )
    assert offered(MIXED, one) == {GPU: [U0], MIG: list(SLICES)}


# -- patterns --------------------------------------------------------------------------------------


def test_gpus_are_named_by_the_first_pattern_that_matches(inventory: Inventory) -> None:
    """Upstream reads ``resources`` and drops it. What no pattern matches keeps the usual name."""
    first, second = inventory.gpus
    two_models = msgspec.structs.replace(
        inventory, gpus=(first, msgspec.structs.replace(second, name="NVIDIA H100 PCIe"))
    )
    patterns = (
        Pattern("*H100*", "nvidia.com/big"),
        Pattern("*H100 PCIe", "nvidia.com/late"),
        Pattern("A100", "nvidia.com/not-anchored"),
    )
    assert offered(NvidiaOptions(gpu_patterns=patterns), two_models) == {
        GPU: [U0],
        "nvidia.com/big": [U1],
    }


def test_slices_are_named_by_profile() -> None:
    """The whole profile must match: ``1g.10gb`` is not ``1g.10gb+me``, and a dot is a dot."""
    small = Pattern("1g.5gb", "nvidia.com/mig-small")
    options = NvidiaOptions(
        mig_strategy="mixed", mig_patterns=(Pattern("1gx5gb", "nvidia.com/other"), small)
    )
    assert list(offered(options, GPU_1_DIVIDED)) == [GPU, "nvidia.com/mig-small"]
    assert list(offered(options, one_slice("1g.5gb+me"))) == [GPU, "nvidia.com/mig-1g.5gb.me"]


def test_single_allows_kinds_that_patterns_tell_apart() -> None:
    """Alike must be what has one name; GPU 0 whole and the slices of GPU 1 then have two."""
    options = NvidiaOptions(mig_strategy="single", mig_patterns=(Pattern("*", "nvidia.com/slice"),))
    assert offered(options, GPU_1_DIVIDED) == {GPU: [U0], "nvidia.com/slice": list(SLICES)}


# -- replicas of some devices ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("0",), {GPU: [*replicas_of(U0, count=2), U1]}),
        ((U1,), {GPU: [U0, *replicas_of(U1, count=2)]}),
        (("1", U1), {GPU: [U0, *replicas_of(U1, count=2)]}),
        (1, {GPU: [*replicas_of(U0, count=2), U1]}),
        (2, {GPU: replicas_of(U0, U1, count=2)}),
        ("all", {GPU: replicas_of(U0, U1, count=2)}),
    ],
)
def test_only_the_devices_that_are_meant_are_shared(
    devices: str | int | tuple[str, ...], expected: dict[str, list[str]], inventory: Inventory
) -> None:
    """nvidia:D15: by index, by UUID, the first so many, or all.
    The others stay whole under the plain name.
    """
    assert offered(entries(SharedEntry(GPU, 2, GPU, devices)), inventory) == expected


@pytest.mark.parametrize("word", ["1:3", SLICES[3], f"MIG-{U1}/10/0"])
def test_slices_are_meant_by_index_or_uuid(word: str) -> None:
    """nvidia:D15: ``"1:3"`` is the fourth slice of GPU 1;
    drivers before 470 named slices by their instances.
    """
    options = entries(SharedEntry(MIG, 2, "nvidia.com/half", (word,)), mig_strategy="mixed")
    others = [uuid for uuid in SLICES if uuid != SLICES[3]]
    assert offered(options, GPU_1_DIVIDED) == {
        GPU: [U0],
        "nvidia.com/half": replicas_of(SLICES[3], count=2),
        MIG: others,
    }


def test_each_device_may_have_replicas_and_a_name_of_its_own(inventory: Inventory) -> None:
    """nvidia:D15: two entries about one resource; holders are counted by device."""
    options = entries(SharedEntry(GPU, 3, GPU, ("0",)), SharedEntry(GPU, 2, GPU, ("1",)))
    resource = only_resource(options, inventory)
    assert [entry.id for entry in resource.ids] == replicas_of(U0, count=3) + replicas_of(
        U1, count=2
    )
    assert (resource.holders_of(U0), resource.holders_of(U1)) == (3, 2)
    renamed = entries(
        SharedEntry(GPU, 3, GPU, ("0",)), SharedEntry(GPU, 1, "nvidia.com/big", ("1",))
    )
    assert offered(renamed, inventory) == {GPU: replicas_of(U0, count=3), "nvidia.com/big": [U1]}


def test_a_device_is_never_offered_twice(inventory: Inventory) -> None:
    """The later of two entries that mean one GPU is withheld whole, and the first goes on. Nothing
    of the later one is given away whole.
    """
    options = entries(
        SharedEntry(GPU, 2, "nvidia.com/a", ("0",)), SharedEntry(GPU, 4, "nvidia.com/b")
    )
    assert offered(options, inventory) == {"nvidia.com/a": replicas_of(U0, count=2)}
    assert refused(options, inventory) == (
        (
            f"nvidia.com/b: GPU 0 ({U0}) would be offered twice, by nvidia.com/a and by "
            f"nvidia.com/b; name it in one entry about {GPU} only"
        ),
    )


def test_two_entries_for_one_gpu_under_one_name_withhold_that_name(inventory: Inventory) -> None:
    """Choosing one of the two counts would be a guess."""
    options = entries(SharedEntry(GPU, 2, GPU, ("0",)), SharedEntry(GPU, 4, GPU, (U0,)))
    assert offered(options, inventory) == {}
    assert len(refused(options, inventory)) == 1


def test_words_that_mean_no_device_are_told_and_stop_nothing(inventory: Inventory) -> None:
    """A GPU that is broken today must not take the others with it."""
    options = entries(SharedEntry(GPU, 2, SHARED, ("0", "7")))
    assert offered(options, inventory) == {SHARED: replicas_of(U0, count=2), GPU: [U1]}
    assert cautions(options, inventory) == (
        f"{SHARED}: devices: 7 is not among those of {GPU} (0, 1); what else it names is shared",
    )
    assert cautions(entries(SharedEntry(GPU, 2, SHARED, 3)), inventory) == (
        f"{SHARED}: 3 devices of {GPU} are to be shared, and there are 2 (0, 1); all of them are",
    )


def test_an_entry_about_what_this_node_does_not_have_says_nothing(inventory: Inventory) -> None:
    """One configuration serves all nodes."""
    options = shared_by(2, name="nvidia.com/mig-3g.20gb", mig_strategy="mixed")
    assert offered(options, inventory) == {GPU: [U0, U1]}
    assert refused(options, inventory) == cautions(options, inventory) == ()


def test_an_entry_that_misses_gpus_by_their_new_name_is_told(inventory: Inventory) -> None:
    """Patterns come first, so an entry about the usual name shares nothing.
    On a node without GPUs all is well.
    """
    renamed = (Pattern("*", "nvidia.com/a100"),)
    options = shared_by(4, gpu_patterns=renamed)
    assert offered(options, inventory) == {"nvidia.com/a100": [U0, U1]}
    assert cautions(options, inventory) == (
        (
            f"{GPU}: no GPU is shared by the entry about {GPU}, because resources.gpus calls them "
            "nvidia.com/a100; name those in it"
        ),
    )
    assert cautions(shared_by(4, name="nvidia.com/a100", gpu_patterns=renamed), inventory) == ()
    assert cautions(options, Inventory()) == ()


def test_more_ids_than_kubelet_takes_are_not_made_one_by_one(inventory: Inventory) -> None:
    """The list is refused by its length; counting it must not take the node's memory."""
    resource = only_resource(shared_by(65536 * 4), inventory)
    assert len(resource.ids) == 524288
    assert resource.ids[0].id == f"{U0}::0"


# -- MPS -------------------------------------------------------------------------------------------


def test_mps_is_a_way_of_sharing(inventory: Inventory) -> None:
    """The same ids as by time-slicing. One replica is a whole GPU with a daemon of its own."""
    resource = only_resource(shared_by(4, sharing=SharingMode.MPS), inventory)
    assert [entry.id for entry in resource.ids] == replicas_of(U0, U1, count=4)
    assert resource.sharing is SharingMode.MPS
    one = only_resource(shared_by(1, sharing=SharingMode.MPS), inventory)
    assert ([entry.id for entry in one.ids], one.sharing) == ([U0, U1], SharingMode.MPS)


def test_mps_is_not_for_slices() -> None:
    """The resource is withheld with upstream's words, and GPUs without MIG are offered."""
    options = shared_by(2, name=MIG, mig_strategy="mixed", sharing=SharingMode.MPS)
    assert offered(options, GPU_1_DIVIDED) == {GPU: [U0]}
    (problem,) = refused(options, GPU_1_DIVIDED)
    assert problem.startswith(
        f"{MIG}: sharing using MPS is not supported for MIG devices ({SLICES[0]})"
    )


def test_whole_gpus_have_another_name_than_those_that_are_shared_by_mps(
    inventory: Inventory,
) -> None:
    """A daemon serves all GPUs of a resource,
    so a container with a whole one would be its client.
    """
    options = entries(SharedEntry(GPU, 2, GPU, ("0",)), sharing=SharingMode.MPS)
    assert offered(options, inventory) == {}
    assert refused(options, inventory)[0].startswith(
        f"{GPU}: GPU 1 ({U1}) would be offered whole under the name of those"
    )
    renamed = entries(SharedEntry(GPU, 2, SHARED, ("0",)), sharing=SharingMode.MPS)
    assert offered(renamed, inventory) == {SHARED: replicas_of(U0, count=2), GPU: [U1]}


# -- what holds for all ----------------------------------------------------------------------------


def test_a_node_without_gpus_offers_nothing() -> None:
    """An empty inventory registers no resource at all."""
    assert offered(NvidiaOptions(), Inventory()) == {}


def test_under_wsl_there_is_one_id_for_all_gpus(inventory: Inventory) -> None:
    """nvidia §4: containers get all GPUs or none there.
    One that is ill is in every container, so the id is ill.
    """
    options = NvidiaOptions(wsl=True, mig_strategy="mixed")
    assert offered(options, inventory) == {GPU: ["all"]}
    assert offered(shared_by(2, wsl=True), inventory) == {GPU: ["all::0", "all::1"]}
    assert (
        only_resource(options, golden_inventory(U1=Health(ok=False, reason="XID 79"))).ids[0].device
        == U1
    )
    assert offered(options, Inventory()) == {}


def test_lists_have_one_order() -> None:
    """nvidia:D5: the same node gives the same lists, in node order, whatever order entries have."""
    options = entries(SharedEntry(GPU, 2, GPU, ("1",)), SharedEntry(GPU, 3, GPU, ("0",)))
    expected = replicas_of(U0, count=3) + replicas_of(U1, count=2)
    assert [offered(options, golden_inventory())[GPU] for _ in range(3)] == [expected] * 3


def test_a_change_of_the_inventory_changes_the_offer() -> None:
    """nvidia:D9: slices that come while the agent runs are offered by the same family."""
    family = NvidiaFamily(MIXED)
    assert [resource.name for resource in family.resources(golden_inventory())] == [GPU]
    assert [resource.name for resource in family.resources(GPU_1_DIVIDED)] == [GPU, MIG]
    assert [resource.name for resource in family.resources(golden_inventory())] == [GPU]


def test_a_slice_keeps_the_numa_node_of_its_gpu() -> None:
    """nvidia §4: MIG uses its parent."""
    numa = {
        entry.numa_node
        for resource in NvidiaFamily(MIXED).resources(GPU_1_DIVIDED)
        if resource.name == MIG
        for entry in resource.ids
    }
    assert numa == {1}
