"""A container that no extender has placed (vgpu-manager §5.5, §5.6)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tests.families.vgpu_manager.golden import (
    KEYS,
    container,
    family,
    pod,
    question,
)
from tests.families.vgpu_manager.node import INVENTORY, U0, U1, cards
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.model import DeviceRoom, Gpu, Inventory, Link, Share
from vgpu_agent.placement.mixing import GpuUses
from vgpu_agent.pods import ContainerKind, PodContainer

MIB = 81920


def linked(count: int, nvlinks: Mapping[tuple[int, int], int], *, numa: int = 4) -> Inventory:
    """A node whose cards are on NUMA nodes of ``numa`` each, with these NVLinks."""
    node = cards(count, MIB)
    gpus = tuple(msgspec.structs.replace(gpu, numa_node=gpu.index // numa) for gpu in node.gpus)
    links = {}
    for one in gpus:
        for other in gpus:
            pair = min(one.index, other.index), max(one.index, other.index)
            level = 40 if one.numa_node == other.numa_node else 50
            if one != other:
                links[one.uuid, other.uuid] = Link(level, nvlinks.get(pair, 0))
    return msgspec.structs.replace(node, gpus=gpus, links=links)


def rooms(inventory: Inventory, **free: int) -> tuple[DeviceRoom, ...]:
    """All cards free, but for the memory left of some: ``_3=1000``."""
    return tuple(
        DeviceRoom(
            gpu.uuid, "", gpu.memory_mib, free.get(f"_{gpu.index}", gpu.memory_mib), 100, 0, 10
        )
        for gpu in inventory.gpus
    )


def placed(
    asking: PodContainer,
    inventory: Inventory = INVENTORY,
    left: Sequence[DeviceRoom] | None = None,
    *,
    of: Any = None,
    more: Mapping[str, Any] | None = None,
    **annotations: str,
) -> list[int]:
    """The numbers of the cards that the container gets; annotations by the names in `Keys`."""
    about = pod(asking, annotations={getattr(KEYS, key): text for key, text in annotations.items()})
    asked = question(
        about,
        asking.name,
        inventory=inventory,
        rooms=tuple(left) if left is not None else rooms(inventory),
        of=of,
        **(more or {}),
    )
    decision = (of or family()).decide(asked)
    assert decision.by_agent
    numbers = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    return [numbers[share.device] for share in decision.shares]


ONE = container(number=1, memory=1000)
TWO = container(number=2, memory=1000)
FOUR = container(number=4, memory=1000)


def test_what_is_placed_is_what_was_asked() -> None:
    """Memory in units of the node, the whole card where none is asked."""
    of = family(memory_factor=4)
    about = question(pod(container(number=1, cores=30, memory=256)), of=of)
    assert of.decide(about).shares == (Share(U0, 1024, 30),)
    decision = family().decide(question(pod(container(number=2))))
    assert decision.shares == (Share(U0, 24576, 100), Share(U1, 24576, 100))
    assert decision.by == "the agent, in order"


def test_policies_order_the_cards() -> None:
    """vgpu-manager §5.5: the fullest, the emptiest, or by NUMA node and index."""
    node = linked(4, {}, numa=2)
    left = rooms(node, _1=40_000, _2=20_000)
    assert placed(ONE, node, left) == [0]
    assert placed(ONE, node, left, device_policy="none") == [0]
    assert placed(ONE, node, left, device_policy="Binpack") == [2]
    assert placed(ONE, node, left, device_policy="spread") == [0]
    assert placed(TWO, node, left, device_policy="spread") == [0, 3]
    assert placed(ONE, node, left, device_policy="best") == [0]


def test_numa_comes_before_the_index_without_a_policy() -> None:
    """vgpu-manager §13.3 has card 0 for that reason."""
    swapped = tuple(
        msgspec.structs.replace(gpu, numa_node=1 - (gpu.numa_node or 0)) for gpu in INVENTORY.gpus
    )
    assert placed(ONE, msgspec.structs.replace(INVENTORY, gpus=swapped)) == [1]


def test_a_whole_card_of_compute_may_stand_beside_memory_alone() -> None:
    """Free compute decides, as the extender counts."""
    shared = DeviceRoom(U0, "", 24576, 20000, 100, 1, 9)
    full = DeviceRoom(U1, "", 24576, 20000, 0, 1, 9)
    whole = container(number=1, cores=100, memory=1000)
    assert placed(whole, left=(shared, full)) == [0]
    with pytest.raises(CapacityError, match="all of its compute is in use"):
        placed(TWO, left=(shared, full))


@pytest.mark.parametrize(
    ("annotations", "numbers"),
    [
        ({"include_type": "a100"}, [1]),
        ({"include_type": "A10"}, [0]),
        ({"exclude_type": "A10"}, [1]),  # A10 is no A100
        ({"include_type": "A10", "exclude_type": "A100"}, [0]),
        ({"exclude_type": " , a100 ,"}, [0]),
        ({"include_uuid": U1[:12].lower()}, [1]),
        ({"exclude_uuid": U0}, [1]),
        ({"include_uuid": U1, "exclude_uuid": U1[4:8]}, []),
        ({"include_type": ", ,"}, [0, 1]),
    ],
)
def test_cards_are_selected_by_a_part_of_type_or_uuid(
    annotations: dict[str, Any], numbers: list[int]
) -> None:
    """vgpu-manager:D12: include and exclude both count. The rules are the extender's."""
    gpus = (INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], name="NVIDIA A100-SXM4"))
    node = msgspec.structs.replace(INVENTORY, gpus=gpus)
    asking = container(number=len(numbers) or 1, memory=1)
    if numbers:
        assert placed(asking, node, **annotations) == numbers
    else:
        with pytest.raises(CapacityError, match="of GPU"):
            placed(asking, node, **annotations)


def test_the_old_rule_for_product_names_takes_a_part_of_a_number() -> None:
    """vgpu-manager:D12: for annotations that were written for it, as with ``--type-match
    substring`` of the extender. By default a container that wants two A10 waits.
    """
    gpus = (INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], name="NVIDIA A100-SXM4"))
    node = msgspec.structs.replace(INVENTORY, gpus=gpus)
    old = family(types_match_substrings=True)
    assert placed(TWO, node, of=old, include_type="A10") == [0, 1]
    with pytest.raises(CapacityError, match="the pod wants another type of GPU"):
        placed(TWO, node, include_type="A10")


def test_an_endless_list_of_cards_is_refused() -> None:
    """It is compared with each card."""
    with pytest.raises(RequestRefusedError, match=r"include-gpu-type has 100000 characters"):
        placed(ONE, include_type="a," * 50_000)


@pytest.mark.parametrize(
    ("scaling", "word", "refused"),
    [(1.0, "virtual", True), (2.0, "virtual", False), (1.0, "physical", False),
     (2.0, "PHY", True), (1.0, "virt", True), (1.0, "any", False), (2.0, "x" * 999, False)],
)  # fmt: skip
def test_memory_policy_takes_a_node_that_oversells_or_does_not(
    scaling: float, word: str, *, refused: bool
) -> None:
    """vgpu-manager §4.1."""
    of = family(memory_scaling=scaling)
    if not refused:
        assert placed(ONE, of=of, memory_policy=word) == [0]
        return
    with pytest.raises(RequestRefusedError, match=f"this node offers {scaling:g} times"):
        placed(ONE, of=of, memory_policy=word)


def test_numa_keeps_the_cards_together() -> None:
    """By ascending node, or by what the policy favours."""
    node = linked(8, {})
    left = rooms(node, _0=10, _1=10, _5=40_000)
    assert placed(TWO, node, left, topology_mode="numa") == [2, 3]
    assert placed(TWO, node, left, topology_mode="numa", device_policy="binpack") == [4, 5]
    assert placed(FOUR, node, left, topology_mode="numa-strict") == [4, 5, 6, 7]


def test_numa_falls_back_unless_it_is_strict() -> None:
    """A preference does not keep a pod waiting, a demand does."""
    node = linked(8, {})
    left = rooms(node, _0=10, _5=10)
    assert placed(FOUR, node, left, topology_mode="numa") == [1, 2, 3, 4]
    told = "asks for numa-strict, and of the 6 GPUs with room not 4 are on one NUMA node"
    with pytest.raises(CapacityError, match=re.escape(told)):
        placed(FOUR, node, left, topology_mode="numa-strict")


PAIRS = {(0, 4): 4, (1, 5): 4, (2, 6): 2, (3, 7): 4, (2, 3): 4}


def test_link_takes_the_best_linked() -> None:
    """NVLinks before PCIe, and of groups the one with the best pairs."""
    node = linked(8, PAIRS)
    assert placed(TWO, node, topology_mode="link") == [2, 3]  # of four links, on one processor
    assert placed(TWO, node, rooms(node, _2=10), topology_mode="link") == [0, 4]
    assert placed(TWO, node, rooms(node, _0=10, _1=10, _3=10), topology_mode="link") == [2, 6]
    assert placed(FOUR, node, topology_mode="link-strict") == [2, 3, 6, 7]


def test_link_goes_down_the_tiers() -> None:
    """Cards of one processor where no NVLinks are, then any."""
    node = linked(8, {})
    assert placed(FOUR, node, rooms(node, _1=10), topology_mode="link") == [4, 5, 6, 7]
    six = container(number=6, memory=1000)
    assert placed(six, node, rooms(node, _1=10), topology_mode="link") == [0, 2, 4, 5, 6, 7]
    unknown = msgspec.structs.replace(node, links={})
    assert placed(TWO, unknown, topology_mode="link") == [0, 1]


def test_link_strict_takes_nvlinks_or_nothing() -> None:
    """vgpu-manager §5.6: one component of NVLinks; a single card needs a peer, busy or not."""
    node = linked(8, {(0, 1): 2, (6, 7): 2})
    assert placed(TWO, node, rooms(node, _0=10), topology_mode="link-strict") == [6, 7]
    assert placed(ONE, node, rooms(node, _0=10), topology_mode="link-strict") == [1]
    left = rooms(node, _0=10, _7=10)
    with pytest.raises(CapacityError, match=r"link-strict, and of the 6 .* not 2 are joined by"):
        placed(TWO, node, left, topology_mode="link-strict")
    busy = rooms(node, _0=10, _1=10, _6=10, _7=10)
    with pytest.raises(CapacityError, match="not 1 are joined by NVLinks"):
        placed(ONE, node, busy, topology_mode="link-strict")


def test_the_policy_beats_the_links_within_a_group() -> None:
    """Links decide only among cards that the policy holds equal."""
    node = linked(4, {(0, 1): 1, (1, 2): 8, (2, 3): 1, (0, 3): 1})
    left = rooms(node, _3=40_000)
    chosen = placed(TWO, node, left, topology_mode="link", device_policy="binpack")
    assert chosen == [0, 3]
    assert placed(TWO, node, left, topology_mode="link") == [1, 2]


def test_a_pair_whose_directions_differ_is_worth_nothing() -> None:
    """A reading that went wrong must not decide."""
    node = linked(4, {(0, 1): 8, (2, 3): 1})
    a, b = node.gpus[0].uuid, node.gpus[1].uuid
    broken = msgspec.structs.replace(node, links={**node.links, (b, a): Link(40)})
    assert placed(TWO, broken, topology_mode="link") == [2, 3]


def test_an_init_container_begins_with_the_pods_cards() -> None:
    """vgpu-manager §5.5: it is alone, so it needs none of its own while they suffice."""
    asking = container("init", ContainerKind.INIT, number=1, memory=1000)
    siblings = {"siblings": {"side": (Share(U1, 100, 0),)}}
    assert placed(asking, more=siblings) == [1]
    assert placed(msgspec.structs.replace(asking, kind=ContainerKind.MAIN), more=siblings) == [0]
    full = (ROOM0, msgspec.structs.replace(ROOM1, memory_free_mib=10))
    assert placed(asking, left=full, more=siblings) == [0]


ROOM0, ROOM1 = rooms(INVENTORY)


def test_cards_of_other_families_come_last() -> None:
    """On a node with several families, however well they are linked."""
    node = linked(4, {(0, 1): 4, (2, 3): 1})
    shared = frozenset(gpu.uuid for gpu in node.gpus)
    around = {"gpu_uses": GpuUses(shared, others=frozenset({node.gpus[0].uuid}))}
    assert placed(ONE, node, more=around) == [1]
    assert placed(TWO, node, more=around, topology_mode="link") == [2, 3]
    assert placed(FOUR, node, more=around) == [0, 1, 2, 3]


def test_no_room_is_told_card_by_card() -> None:
    """The user learns what each card lacks."""
    with pytest.raises(CapacityError) as caught:
        placed(container(number=1, cores=10, memory=30_000))
    text = str(caught.value)
    assert "1 × nvidia.com/vgpu-number (30000 MiB and 10 % of the compute) cannot be placed" in text
    assert "24576 MiB free of 24576, 30000 wanted" in text


def test_a_node_of_sixteen_cards_is_searched_in_no_time() -> None:
    """12,870 sets of eight are the most; the agent answers others meanwhile."""
    nvlinks = {(one, other): one % 3 for one in range(16) for other in range(one + 1, 16)}
    node = linked(16, nvlinks, numa=8)
    assert isinstance(node.gpus[0], Gpu)
    assert len(placed(container(number=8, memory=1), node, topology_mode="link")) == 8


def remarks(
    asking: PodContainer, inventory: Inventory = INVENTORY, **annotations: str
) -> list[tuple[str, str]]:
    """The events that the pod's owner gets, as (reason, text)."""
    about = pod(asking, annotations={getattr(KEYS, key): text for key, text in annotations.items()})
    asked = question(about, asking.name, inventory=inventory, rooms=rooms(inventory))
    return [(one.reason, one.text) for one in family().decide(asked).remarks]


@pytest.mark.parametrize("word", ["packed", "x" * 1000])
def test_a_word_that_means_nothing_is_told_to_the_pods_owner(word: str) -> None:
    """vgpu-manager §4.1: event PolicyInvalid, and treated as none. Also a topology mode, whose
    mistyped ``-strict`` would be missed.
    """
    ((reason, text),) = remarks(ONE, device_policy=word)
    assert reason == "PolicyInvalid"
    assert f"annotation {KEYS.device_policy}=" in text
    assert text.endswith("means nothing and counts as none; expected binpack, spread, none")
    assert len(text) < 250
    ((reason, text),) = remarks(ONE, topology_mode="numa-strct")
    assert (reason, KEYS.topology_mode in text) == ("PolicyInvalid", True)


def test_a_word_that_means_something_needs_no_remark() -> None:
    """Also in capitals, and with no annotation at all."""
    for policy in ("", "none", "Binpack", " spread "):
        assert remarks(ONE, device_policy=policy) == []


def test_a_topology_that_could_not_be_kept_is_told_to_the_pods_owner() -> None:
    """vgpu-manager §5.6: strict modes refuse, the others give the event TopologyFallback."""
    apart = linked(2, {}, numa=1)
    ((reason, text),) = remarks(TWO, apart, topology_mode="numa")
    assert reason == "TopologyFallback"
    assert text == (
        f"annotation {KEYS.topology_mode}=numa could not be followed with the GPUs that had room "
        "on this node: it got GPU 0, 1: not on one NUMA node"
    )
    ((reason, text),) = remarks(TWO, apart, topology_mode="link")
    assert (reason, text.endswith("GPU 0, 1: no NVLinks")) == ("TopologyFallback", True)
    unknown = msgspec.structs.replace(apart, links={})
    ((_, text),) = remarks(TWO, unknown, topology_mode="link")
    assert text.endswith("GPU 0, 1: no links are known")


def test_a_topology_that_is_kept_needs_no_remark() -> None:
    """NVLinks for link, one NUMA node for numa."""
    node = linked(4, {(0, 1): 4}, numa=2)
    assert remarks(TWO, node, topology_mode="link") == []
    assert remarks(TWO, node, topology_mode="numa") == []
    assert remarks(TWO, node) == []
