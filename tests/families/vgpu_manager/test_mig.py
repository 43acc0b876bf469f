"""MIG instances under vgpu-manager's names (vgpu-manager §2.3)."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.node import INVENTORY, U0, U1
from tests.golden import golden_slices
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.mig import VgpuManagerMigFamily
from vgpu_agent.families.vgpu_manager.offer import resources_of
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Inventory, MigInstance, Share

SMALL = golden_slices("1g.10gb", 9728, 2)
LARGE = golden_slices("3g.40gb", 40192, 1, letter="d")
WITH_MEDIA = golden_slices("1g.10gb+me", 9728, 1, letter="e")


def divided(*slices: tuple[MigInstance, ...]) -> Inventory:
    """The golden node with its first GPUs divided into ``slices``."""
    gpus = list(INVENTORY.gpus)
    for place, instances in enumerate(slices):
        gpus[place] = msgspec.structs.replace(
            gpus[place], mig_enabled=True, mig_instances=instances
        )
    return msgspec.structs.replace(INVENTORY, gpus=tuple(gpus))


def family(strategy: str = "mixed", **options: object) -> VgpuManagerMigFamily:
    """The family with default options."""
    chosen = msgspec.structs.replace(
        VgpuManagerOptions(mig_strategy=strategy),
        **options,
    )
    return VgpuManagerMigFamily(chosen, ListOptions())


def names(offering: VgpuManagerMigFamily, inventory: Inventory) -> dict[str, list[str]]:
    """Resource → ids."""
    return {
        resource.name: [entry.id for entry in resource.ids]
        for resource in offering.resources(inventory)
    }


def test_each_profile_has_a_name() -> None:
    """``+`` is no character of a resource's name; ids are the instances' UUIDs."""
    assert names(family(), divided((*SMALL, *WITH_MEDIA), LARGE)) == {
        "nvidia.com/mig-1g.10gb": [each.uuid for each in SMALL],
        "nvidia.com/mig-1g.10gb.me": [WITH_MEDIA[0].uuid],
        "nvidia.com/mig-3g.40gb": [LARGE[0].uuid],
    }
    assert list(names(family(keys=Keys("example.com")), divided(SMALL))) == [
        "example.com/mig-1g.10gb"
    ]


def test_whole_cards_are_shared_beside_divided_ones() -> None:
    """``mixed``: both kinds on one node, in one ledger."""
    inventory, options = divided(SMALL), VgpuManagerOptions(offer_cores=True, offer_memory=True)
    book = Ledger()
    book.observe(inventory)
    book.offer([*family().resources(inventory), *resources_of(inventory, options)])
    assert book.free_ids("nvidia.com/mig-1g.10gb") == 2
    assert book.free_ids("nvidia.com/vgpu-number") == 10
    book.reserve("nvidia.com/mig-1g.10gb", [SMALL[0].uuid], [Share(SMALL[0].uuid, exclusive=True)])
    assert book.free_ids("nvidia.com/vgpu-number") == 10


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_instances_that_are_alike_on_all_cards(strategy: str) -> None:
    """Both strategies offer them by the name of the profile."""
    inventory = divided(SMALL, golden_slices("1g.10gb", 9728, 2, letter="d"))
    assert list(names(family(strategy), inventory)) == ["nvidia.com/mig-1g.10gb"]
    assert family(strategy).shortfall(inventory).refused == {}


def test_single_needs_all_cards_divided() -> None:
    """The reason names the card, and what to do."""
    offering = family("single")
    assert names(offering, divided(SMALL)) == {}
    assert offering.shortfall(divided(SMALL)).refused == {
        "nvidia.com/mig-1g.10gb": (
            f"the MIG strategy is single, and GPU 1 ({U1}) is not in MIG mode; divide all GPUs "
            "alike, or choose mixed (vgpuManager.migStrategy)"
        )
    }
    refused = offering.shortfall(INVENTORY).refused
    assert list(refused) == ["nvidia.com/vgpu-number"]
    assert f"GPU 0 ({U0}) and GPU 1 ({U1}) are not in MIG mode" in refused["nvidia.com/vgpu-number"]
    assert offering.shortfall(Inventory(1)).refused == {}


def test_single_needs_instances_that_are_alike() -> None:
    """Neither of the two names is offered."""
    inventory = divided(SMALL, LARGE)
    offering = family("single")
    assert names(offering, inventory) == {}
    refused = offering.shortfall(inventory).refused
    assert list(refused) == ["nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"]
    assert "this node has instances of 1g.10gb, 3g.40gb; divide" in set(refused.values()).pop()


@pytest.mark.parametrize(
    "excluded", [{"excluded_uuids": frozenset({U0})}, {"excluded_indices": frozenset({0})}]
)
def test_instances_of_an_excluded_card_are_listed_as_unhealthy(excluded: dict[str, object]) -> None:
    """Slots of an excluded card are treated in the same way. They are advertised, and no container
    gets them.
    """
    inventory = divided(SMALL)
    book = Ledger()
    book.observe(inventory)
    book.offer(family(**excluded).resources(inventory))  # type: ignore[arg-type]  # the test's own keywords
    listing = book.listing("nvidia.com/mig-1g.10gb")
    assert [entry.healthy for entry in listing] == [False, False]
    with pytest.raises(UnhealthyDeviceError, match=r"excluded by vgpuManager\.excludeDevices"):
        book.reserve("nvidia.com/mig-1g.10gb", [SMALL[0].uuid], [Share(SMALL[0].uuid)])


def test_an_answer_names_the_instances() -> None:
    """Complete in Allocate: nothing is asked of the pod."""
    inventory = divided(SMALL)
    (resource,) = family().resources(inventory)
    ids = [SMALL[1].uuid]
    assert family().edits(resource, ids, inventory).environment == {
        "NVIDIA_VISIBLE_DEVICES": SMALL[1].uuid
    }
    assert family().shares(resource.name, ids, inventory) == (
        Share(SMALL[1].uuid, 9728, 100, exclusive=True),
    )
    family().check(resource, [each.uuid for each in SMALL])


def test_instances_beside_held_ones_are_preferred() -> None:
    """So other GPUs stay free. An instance of another profile is no holder."""
    others = golden_slices("1g.10gb", 9728, 2, letter="f")
    inventory = divided(SMALL, (*others, *LARGE))
    small = family().resources(inventory)[0]
    ids = [each.uuid for each in (*SMALL, *others)]
    assert [entry.id for entry in small.ids] == ids
    assert family().prefer(small, ids, [], 1, inventory) == [SMALL[0].uuid]
    assert family().prefer(small, [*ids[:2], ids[3]], [], 1, inventory) == [ids[3]]


def test_its_names_are_owned_in_both_domains() -> None:
    """The kubelet's records may hold those from before ``--domain``."""
    offering = family(keys=Keys("example.com"))
    assert offering.owns("example.com/mig-1g.10gb") is Ownership.CERTAIN
    assert offering.owns("nvidia.com/mig-1g.10gb") is Ownership.CERTAIN
    assert offering.owns("example.com/vgpu-number") is Ownership.NONE
