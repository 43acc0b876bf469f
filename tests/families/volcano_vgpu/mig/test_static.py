"""MIG instances that an administrator has made, under Volcano's names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.families.volcano_vgpu.golden import U1
from tests.families.volcano_vgpu.mig.parts import GROUP2, instance, node
from vgpu_agent.errors import CapacityError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.volcano_vgpu.mig.static import StaticMigOptions, VolcanoStaticMigFamily
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import Inventory, Resource, Share


def mixed(**options: Any) -> VolcanoStaticMigFamily:
    """The strategy mixed."""
    return VolcanoStaticMigFamily(msgspec.structs.replace(StaticMigOptions("mixed"), **options))


def single() -> VolcanoStaticMigFamily:
    """The strategy single."""
    return VolcanoStaticMigFamily(StaticMigOptions("single"))


def names(family: VolcanoStaticMigFamily, inventory: Inventory) -> dict[str, list[str]]:
    """Resource → ids."""
    return {
        resource.name: [entry.id for entry in resource.ids]
        for resource in family.resources(inventory)
    }


def test_mixed_offers_each_profile_by_its_name() -> None:
    """Cards that are not divided have nothing here. Their memory is shared as ever."""
    inventory = node(of_u1=GROUP2)
    assert names(mixed(), inventory) == {
        "volcano.sh/mig-1g.5gb": ["MIG-2-3"],
        "volcano.sh/mig-2g.10gb": ["MIG-2-0", "MIG-2-1", "MIG-2-2"],
    }


def test_the_names_before_1_12_can_be_had() -> None:
    """Up to 1.11 the strategy mixed had NVIDIA's domain.
    A ``+`` is no letter of a resource name.
    """
    u1 = msgspec.structs.replace(
        node(of_u1=GROUP2).gpus[1],
        mig_instances=(msgspec.structs.replace(instance(U1, 0, "2g.10gb"), profile="1g.5gb+me"),),
    )
    assert names(mixed(prefix="nvidia.com"), Inventory(version=1, gpus=(u1,))) == {
        "nvidia.com/mig-1g.5gb.me": ["MIG-2-0"]
    }
    assert mixed(prefix="nvidia.com").owns("nvidia.com/mig-1g.5gb")
    assert not mixed().owns("nvidia.com/mig-1g.5gb")


def test_single_offers_alike_instances_by_one_name() -> None:
    """``volcano.sh/gpu``, as the replaced plugin registers it."""
    assert names(single(), node(of_u1=("3g.20gb", "3g.20gb"))) == {
        "volcano.sh/gpu": ["MIG-2-0", "MIG-2-1"]
    }
    assert single().owns("volcano.sh/gpu")
    assert not single().owns("volcano.sh/gpu-memory")


def test_single_withholds_instances_that_differ() -> None:
    """One name cannot tell them apart. The reason begins with the name and says what to do."""
    inventory = node("3g.20gb", "3g.20gb", of_u1=GROUP2)
    assert names(single(), inventory) == {}
    ((name, reason),) = single().shortfall(inventory).refused.items()
    assert name == "volcano.sh/gpu"
    assert reason.startswith(
        "the MIG strategy is single, and this node has instances of 1g.5gb, 2g.10gb, 3g.20gb"
    )
    assert single().shortfall(node(of_u1=("3g.20gb", "3g.20gb"))).refused == {}


def test_an_instance_that_shares_its_memory_is_left_out() -> None:
    """A compute instance that is a part of its GPU instance has the memory of the others, too."""
    part = msgspec.structs.replace(
        instance(U1, 0, "2g.10gb"), profile="1c.2g.10gb", compute_slices=1
    )
    u1 = msgspec.structs.replace(node(of_u1=GROUP2).gpus[1], mig_instances=(part,))
    inventory = Inventory(version=1, gpus=(u1,))
    assert names(mixed(), inventory) == {}
    (caution,) = mixed().shortfall(inventory).cautions
    assert "MIG-2-0" in caution
    assert "1c.2g.10gb" in caution


def test_instances_that_cannot_be_read_are_told_and_those_that_can_be_are_offered() -> None:
    """The driver's part of the sentence says why, and what to do."""
    u1 = msgspec.structs.replace(node(of_u1=GROUP2).gpus[1], mig_trouble="not allowed; do this")
    inventory = Inventory(version=1, gpus=(u1,))
    assert set(names(mixed(), inventory)) == {"volcano.sh/mig-1g.5gb", "volcano.sh/mig-2g.10gb"}
    assert mixed().shortfall(inventory).cautions == (
        (
            f"MIG instances of GPU {u1.index} ({u1.uuid}) cannot be read, so they are not "
            "offered: not allowed; do this"
        ),
    )


@pytest.mark.parametrize(
    "hidden", [{"hidden_uuids": frozenset({U1})}, {"hidden_indices": frozenset({1})}]
)
def test_hidden_cards_hide_their_instances(hidden: dict[str, object]) -> None:
    """``filterdevices`` of the node configuration counts here as well."""
    assert names(mixed(**hidden), node(of_u1=GROUP2)) == {}


def resource_of(family: VolcanoStaticMigFamily, inventory: Inventory, name: str) -> Resource:
    """The offer of that name."""
    return next(resource for resource in family.resources(inventory) if resource.name == name)


def test_d16_a_container_gets_the_instances_that_its_ids_name() -> None:
    """volcano-vgpu:D16: the replaced plugin answers nothing at all. Here the instances are passed
    and booked, whole and exclusively.
    """
    inventory = node(of_u1=GROUP2)
    offered = resource_of(mixed(), inventory, "volcano.sh/mig-2g.10gb")
    assert mixed().edits(offered, ["MIG-2-1", "MIG-2-0"], inventory).environment == {
        "NVIDIA_VISIBLE_DEVICES": "MIG-2-1,MIG-2-0"
    }
    assert mixed().shares(offered.name, ["MIG-2-1"], inventory) == (
        Share("MIG-2-1", 9856, 100, exclusive=True),
    )


def test_g10_an_instance_is_named_by_the_list_strategies() -> None:
    """volcano-vgpu:G10: the annotation names the MIG device, and the mount its UUID."""
    inventory = node(of_u1=GROUP2)
    offered = resource_of(mixed(), inventory, "volcano.sh/mig-2g.10gb")
    edits = mixed(lists=ListOptions(strategies=("cdi-annotations",))).edits(
        offered, ["MIG-2-1"], inventory
    )
    assert list(edits.annotations.values()) == ["k8s.device-plugin.nvidia.com/gpu=MIG-2-1"]
    assert edits.environment == {}
    edits = mixed(lists=ListOptions(strategies=("volume-mounts",))).edits(
        offered, ["MIG-2-1"], inventory
    )
    assert [mount.container_path for mount in edits.mounts] == [
        "/var/run/nvidia-container-devices/MIG-2-1"
    ]


def test_an_instance_that_is_gone_stays_booked() -> None:
    """Its id is still in a container's hands, and yields no share."""
    inventory = node()
    assert mixed().shares("volcano.sh/mig-2g.10gb", ["MIG-2-1"], inventory) == (
        Share("MIG-2-1", 0, 100, exclusive=True),
    )
    assert mixed().edits(
        Resource("volcano.sh/mig-2g.10gb", "x", ()), ["MIG-2-1"], inventory
    ) == Edits({"NVIDIA_VISIBLE_DEVICES": ""})


def test_cards_in_use_are_filled_first() -> None:
    """A card without holders is worth more to others."""
    inventory = node("2g.10gb", "2g.10gb", of_u1=("2g.10gb", "2g.10gb"))
    offered = resource_of(mixed(), inventory, "volcano.sh/mig-2g.10gb")
    assert mixed().prefer(offered, ["MIG-1-0", "MIG-1-1", "MIG-2-1"], [], 1, inventory) == [
        "MIG-2-1"
    ]
    assert mixed().prefer(
        offered, ["MIG-1-0", "MIG-1-1", "MIG-2-1"], ["MIG-1-1"], 2, inventory
    ) == ["MIG-1-1", "MIG-2-1"]
    with pytest.raises(CapacityError):
        mixed().prefer(offered, ["MIG-1-0"], [], 2, inventory)
