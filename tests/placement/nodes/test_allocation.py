"""The cards of a pod's containers on one Node."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import KEYS, MEMORY_MIB, cards, container, pod
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.placement.nodes.allocation import (
    NOTHING,
    Amounts,
    CardShare,
    Placement,
    Refusal,
    add,
    allocate,
    footprint,
    some_footprint,
)
from vgpu_agent.placement.nodes.cards import NodeCards
from vgpu_agent.placement.nodes.demand import Demand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.pods import ContainerKind, PodContainer

MAIN, INIT, SIDECAR = ContainerKind.MAIN, ContainerKind.INIT, ContainerKind.SIDECAR


def demand(*containers: PodContainer, **words: str) -> Demand:
    """The demand of a pod with these containers and policies."""
    found = read_demand(pod(*containers, **words), KEYS)
    assert found is not None
    return found.demand


def placed(
    wanted: Demand, on: NodeCards | None = None, taken: dict[int, Amounts] | None = None
) -> Placement | Refusal:
    """The placement of the pod on a Node of which ``taken`` is in use, or the refusal."""
    hardware = (on or cards()).hardware
    amounts = [(taken or {}).get(card, NOTHING) for card in range(len(hardware.cards))]
    return allocate(wanted, hardware, amounts)


def numbers(found: Placement | Refusal) -> list[list[int]]:
    """The cards of each container."""
    assert isinstance(found, Placement), found
    return [[share.card for share in shares] for shares in found.shares]


def test_the_pod_of_the_contract_gets_card_0() -> None:
    """vgpu-manager §13.3."""
    assert placed(demand(container(cores=10, memory=1024))) == Placement(
        ((CardShare(0, 10, 1024),),), {0: (1, 1024, 10)}
    )


def test_memory_is_in_units_of_the_node_and_whole_cards_have_all_of_it() -> None:
    """vgpu-manager §5.3."""
    found = placed(demand(container(memory=3), container(cores=5)), cards(memoryFactor=100))
    assert isinstance(found, Placement)
    assert found.shares == ((CardShare(0, 0, 300),), (CardShare(1, 5, MEMORY_MIB),))


@pytest.mark.parametrize(
    ("policy", "expected"), [("binpack", [[1]]), ("spread", [[0]]), ("none", [[0]])]
)
def test_device_policies(policy: str, expected: list[list[int]]) -> None:
    """Card 1 is in use, card 0 is free (vgpu-manager §5.5)."""
    wanted = demand(container(cores=10, memory=1024), device_policy=policy)
    assert numbers(placed(wanted, taken={1: (1, 2048, 20)})) == expected


def test_later_containers_see_what_earlier_ones_take() -> None:
    """One card can serve several containers of a pod, as far as it reaches."""
    wanted = demand(*(container(f"c{place}", cores=60, memory=10) for place in range(2)))
    assert numbers(placed(wanted)) == [[0], [1]]
    wanted = demand(*(container(f"c{place}", cores=40, memory=10) for place in range(3)))
    assert numbers(placed(wanted)) == [[0], [0], [1]]


def test_init_containers_use_the_pods_cards_alone() -> None:
    """They run before the main containers and beside the sidecars, so a card serves one after the
    other (vgpu-manager §5.5).
    """
    found = placed(
        demand(
            container("init", cores=90, memory=100, kind=INIT),
            container("side", cores=10, memory=10, kind=SIDECAR),
            container("main", cores=80, memory=200),
        ),
        taken={0: (10, 0, 0)},
    )
    assert numbers(found) == [[1], [1], [1]]
    assert isinstance(found, Placement)
    assert found.footprint == {1: (2, 210, 100)}


def test_an_init_container_goes_to_other_cards_where_the_pods_are_too_small() -> None:
    """The pod could otherwise not start at all."""
    found = placed(
        demand(container("init", number=2, memory=5, kind=INIT), container("main", memory=5))
    )
    assert numbers(found) == [[0, 1], [0]]


@pytest.mark.parametrize(
    ("wanted", "taken", "refusal"),
    [
        (demand(container(number=3, memory=1)), {}, Refusal(Reason.InsufficientGPUCards)),
        (
            demand(container(memory=MEMORY_MIB + 1)),
            {},
            Refusal(Reason.InsufficientVGPUMemory),
        ),
        (
            demand(container(memory=1)),
            {0: (10, 0, 0), 1: (10, 0, 0)},
            Refusal(Reason.InsufficientGPUResources),
        ),
        (
            demand(container(cores=60, memory=1)),
            {0: (1, 1, 50), 1: (1, 1, 50)},
            Refusal(Reason.InsufficientVGPUCore, {Reason.InsufficientVGPUCore: 2}),
        ),
        (
            demand(container(memory=1)),
            {0: (10, 0, 0), 1: (1, 1, 100)},
            Refusal(
                Reason.InsufficientVGPUSlot,
                {Reason.InsufficientVGPUSlot: 1, Reason.InsufficientVGPUCore: 1},
            ),
        ),
        (
            demand(container(number=2, memory=10), topology_mode="numa-strict"),
            {},
            None,
        ),
        (
            demand(container(number=2, memory=10), topology_mode="link-strict"),
            {},
            Refusal(Reason.LinkTopologyUnsatisfied),
        ),
        (
            demand(container(memory=1), memory_policy="virtual"),
            {},
            Refusal(Reason.NodeMemoryTypeMismatch),
        ),
    ],
)
def test_reasons(wanted: Demand, taken: dict[int, Amounts], refusal: Refusal | None) -> None:
    """Operators know them from the replaced extender (vgpu-manager §5.2)."""
    found = placed(wanted, taken=taken)
    assert (found if isinstance(found, Refusal) else None) == refusal


def test_an_overbooked_card_does_not_hide_the_others() -> None:
    """One forged claim would otherwise make a whole Node look full."""
    wanted = demand(container(cores=10, memory=1024))
    assert numbers(placed(wanted, taken={0: (50, 9 * MEMORY_MIB, 300)})) == [[1]]


def test_an_init_container_uses_the_pods_card_although_another_is_emptier() -> None:
    """The other one stays free for others (vgpu-manager §5.5)."""
    wanted = demand(
        container("init", cores=50, memory=100, kind=INIT),
        container("main", cores=50, memory=100),
        device_policy="binpack",
    )
    assert numbers(placed(wanted, taken={0: (1, 10, 10), 1: (1, 20, 60)})) == [[0], [0]]
    wanted = demand(
        container("init", cores=20, memory=100, kind=INIT),
        container("main", cores=50, memory=100),
        device_policy="binpack",
    )
    assert numbers(placed(wanted, taken={0: (1, 10, 10), 1: (1, 20, 60)})) == [[0], [0]]


def test_an_init_container_runs_beside_the_sidecars() -> None:
    """Each fits alone, and not both on one card."""
    wanted = demand(
        container("init", cores=60, memory=1, kind=INIT),
        container("side", cores=60, memory=1, kind=SIDECAR),
    )
    assert numbers(placed(wanted)) == [[1], [0]]


def test_virtual_and_physical_memory() -> None:
    """By the Node's memoryScaling (vgpu-manager §4.1)."""
    for scaling in (1, 2):
        node = cards(memoryScaling=scaling)
        for word, oversold in (("virtual", True), ("phys", False)):
            found = placed(demand(container(memory=1), memory_policy=word), node)
            assert isinstance(found, Placement) is ((scaling > 1) is oversold)


def test_a_card_without_free_compute_takes_nobody() -> None:
    """Not even one who asks for no compute (vgpu-manager §5.5)."""
    assert numbers(placed(demand(container(memory=1)), taken={0: (1, 1, 100)})) == [[1]]


def test_cards_that_are_blocked_are_passed_over() -> None:
    """Unhealthy ones, and those that are divided into MIG instances."""
    node = cards(3, changed={0: {"healthy": False}, 1: {"mig": True}})
    assert numbers(placed(demand(container(memory=1)), node)) == [[2]]
    assert placed(demand(container(number=2, memory=1)), node) == Refusal(
        Reason.InsufficientGPUCards
    )


def test_linked_cards_go_together() -> None:
    """NVLink joins 0 with 3, and 1 with 2 (vgpu-manager §5.6)."""
    node = cards(4, links={(0, 3): [1, 10], (1, 2): [1, 8]})
    wanted = demand(container(number=2, memory=1), topology_mode="link-strict")
    assert numbers(placed(wanted, node)) == [[0, 3]]
    assert numbers(placed(wanted, node, {0: (10, 0, 0)})) == [[1, 2]]


_containers = st.lists(
    st.builds(
        container,
        name=st.just("c"),
        number=st.integers(1, 3),
        cores=st.integers(0, 100),
        memory=st.integers(0, MEMORY_MIB),
        kind=st.sampled_from(ContainerKind),
    ),
    min_size=1,
    max_size=4,
)
# of each of three cards
_taken = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, MEMORY_MIB), st.integers(0, 100)),
    min_size=3,
    max_size=3,
)


@hypothesis.given(
    containers=_containers,
    taken=_taken,
    policy=st.sampled_from(["none", "binpack", "spread"]),
    mode=st.sampled_from(["none", "numa", "numa-strict", "link", "link-strict"]),
)
def test_no_card_ever_gives_more_than_it_has(
    containers: list[PodContainer], taken: list[Amounts], policy: str, mode: str
) -> None:
    """At no time in the life of the pod: while an init container runs beside the sidecars, and when
    all main containers do.
    """
    node = cards(3, links={(0, 1): [1, 8], (0, 2): [4], (1, 2): [2]})
    wanted = demand(*containers, device_policy=policy, topology_mode=mode)
    found = allocate(wanted, node.hardware, taken)
    if isinstance(found, Refusal):
        return
    kinds = [each.kind for each in wanted.containers]
    assert found.footprint == footprint(kinds, found.shares)
    sides = [shares for kind, shares in zip(kinds, found.shares, strict=True) if kind is SIDECAR]
    mains = [shares for kind, shares in zip(kinds, found.shares, strict=True) if kind is MAIN]
    inits = [shares for kind, shares in zip(kinds, found.shares, strict=True) if kind is INIT]
    for running in ([*sides, *mains], *([*sides, shares] for shares in inits)):
        left = list(taken)
        for shares in running:
            assert len({share.card for share in shares}) == len(shares)
            for share in shares:
                left[share.card] = add(left[share.card], (1, share.memory_mib, share.cores_percent))
                slots, memory, cores = left[share.card]
                assert slots <= 10
                assert memory <= MEMORY_MIB
                assert cores <= 100
    for each, shares in zip(wanted.containers, found.shares, strict=True):
        assert len(shares) == each.card_count


@hypothesis.given(
    containers=_containers,
    taken=_taken,
    sizes=st.lists(st.sampled_from([MEMORY_MIB // 2, MEMORY_MIB]), min_size=3, max_size=3),
    blocked=st.lists(st.booleans(), min_size=3, max_size=3),
    unwanted=st.dictionaries(st.integers(0, 2), st.just(Reason.DeviceTypeMismatch)),
    policy=st.sampled_from(["none", "binpack", "spread"]),
    mode=st.sampled_from(["none", "numa", "link-strict"]),
)
@hypothesis.example(  # all of the memory of a card, of which the larger one is emptier
    containers=[container(cores=10)],
    taken=[(1, 0, 0), NOTHING, NOTHING],
    sizes=[MEMORY_MIB // 2, MEMORY_MIB, MEMORY_MIB],
    blocked=[False, False, False],
    unwanted={},
    policy="spread",
    mode="none",
)
@hypothesis.example(  # the cards that are free are not joined by NVLinks
    containers=[container(number=2)],
    taken=[NOTHING, NOTHING, NOTHING],
    sizes=[MEMORY_MIB, MEMORY_MIB, MEMORY_MIB],
    blocked=[False, True, False],
    unwanted={},
    policy="none",
    mode="link-strict",
)
def test_nodes_are_compared_as_if_the_cards_had_been_chosen(
    containers: list[PodContainer],
    taken: list[Amounts],
    sizes: list[int],
    blocked: list[bool],
    unwanted: dict[int, Reason],
    policy: str,
    mode: str,
) -> None:
    """The refusal is the same, and so is what the Node would have left."""
    hardware = cards(3, links={(0, 1): [1, 8], (0, 2): [4], (1, 2): [2]}).hardware
    described = [
        msgspec.structs.replace(
            card, memory_mib=size, blocked=Reason.DeviceUnhealthy if is_blocked else None
        )
        for card, size, is_blocked in zip(hardware.cards, sizes, blocked, strict=True)
    ]
    hardware = msgspec.structs.replace(hardware, cards=tuple(described))
    wanted = demand(*containers, device_policy=policy, topology_mode=mode)
    chosen = allocate(wanted, hardware, taken, unwanted)
    found = some_footprint(wanted, hardware, taken, unwanted)
    if isinstance(chosen, Refusal) or isinstance(found, Refusal):
        assert found == chosen
        return

    def total(of: Mapping[int, Amounts]) -> Amounts:
        return functools.reduce(add, of.values(), NOTHING)

    assert total(found) == total(chosen.footprint)
    assert len(found) == len(chosen.footprint)
