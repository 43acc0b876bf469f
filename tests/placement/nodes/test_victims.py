"""The victims on a Node: the pods to be preempted for one of higher priority."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import hypothesis
import msgspec
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import KEYS, MEMORY_MIB, cards, container, pod
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.placement.nodes.allocation import NOTHING, Amounts, Placement, add, allocate
from vgpu_agent.placement.nodes.budgets import Budget, Budgets, Selector
from vgpu_agent.placement.nodes.cards import Hardware
from vgpu_agent.placement.nodes.demand import Demand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.nodes.victims import Room, Victim, choose_victims
from vgpu_agent.pods import PodContainer, SchedulingFacts, Trait

PREEMPTOR = SchedulingFacts("team", "train", priority=100)


def demand(*containers: PodContainer, **words: str) -> Demand:
    """The demand of a pod with these containers and policies."""
    found = read_demand(pod(*containers, **words), KEYS)
    assert found is not None
    return found.demand


def with_shares(wanted: Demand, shares: Sequence[tuple[int, bool]]) -> Demand:
    """The same, whose containers ask for a percentage of a card's memory where they name no amount,
    and for the card alone, in turn.
    """
    changed = tuple(
        msgspec.structs.replace(each, memory_percent=percent, alone=alone)
        for each, (percent, alone) in zip(wanted.containers, shares, strict=False)
    )
    return msgspec.structs.replace(wanted, containers=changed)


def victim(
    uid: str,
    *held: int,
    part: int = 100,
    priority: int = 0,
    started_at: float = 1.0,
    cpu: int = 1000,
    protected: str = "",
    near: bool = False,
    deleting: bool = False,
    traits: Collection[Trait] = (),
    app: str = "",
) -> Victim:
    """A pod that holds ``part`` percent of some cards; nothing of none."""
    amounts = (1, MEMORY_MIB * part // 100, part)
    return Victim(
        uid,
        SchedulingFacts(
            "team",
            uid,
            priority=priority,
            started_at=started_at,
            deleting=deleting,
            labels=(("app", app),) if app else (),
            requests=(("cpu", cpu), ("pods", 1000)),
            traits=frozenset(traits),
        ),
        dict.fromkeys(held, amounts),
        protected,
        near,
    )


def taken_by(hardware: Hardware, victims: Collection[Victim]) -> list[Amounts]:
    """The amounts that pods take of each card."""
    taken = [NOTHING] * len(hardware.cards)
    for each in victims:
        for card, amounts in each.footprint.items():
            taken[card] = add(taken[card], amounts)
    return taken


def chosen(
    wanted: Demand,
    proposed: Sequence[Victim],
    others: Sequence[Victim],
    *,
    staying: Sequence[Victim] = (),
    count: int = 2,
    budgets: Budgets | None = None,
    preemptor: SchedulingFacts = PREEMPTOR,
    ignored: Collection[str] = (),
) -> list[str] | None:
    """The UIDs of the victims on a Node of ``count`` cards; ``staying`` are pods that may not be
    touched.
    """
    hardware = cards(count).hardware
    room = Room(wanted, hardware, taken_by(hardware, [*proposed, *others, *staying]), {})
    found = choose_victims(
        room,
        proposed,
        others,
        preemptor=preemptor,
        budgets=budgets or Budgets(),
        is_counted=lambda name: name not in ignored,
    )
    return None if found is None else [each.uid for each in found]


ONE_CARD = demand(container())
BOTH_CARDS = demand(container(number=2))


def test_victims_that_are_enough_stay_as_they_are() -> None:
    """kube-scheduler has made them as few as it can, and they may free what is no card."""
    assert chosen(ONE_CARD, [victim("a", 0)], [victim("b", 1)]) == ["a"]
    assert chosen(ONE_CARD, [victim("cpu")], [], staying=[victim("b", 1)]) == ["cpu"]


def test_others_are_added_until_the_pod_fits() -> None:
    """Here kube-scheduler has counted slots, and every card has free ones."""
    assert chosen(BOTH_CARDS, [victim("a", 0)], [victim("b", 1)]) == ["a", "b"]
    assert chosen(ONE_CARD, [], [victim("a", 0), victim("b", 1)]) == ["b"]


def test_a_victim_that_does_not_help_is_not_taken() -> None:
    """vgpu-manager takes one after the other until the pod fits, so here all three (vgpu-manager
    §12.3).
    """
    small = [victim("s0", 0, part=30, priority=1), victim("s1", 0, part=30, priority=1)]
    blocker = victim("fixed", 0, part=30)
    large = victim("large", 1, priority=9)
    assert chosen(ONE_CARD, [], [*small, large], staying=[blocker]) == ["large"]
    assert chosen(ONE_CARD, [], [*small, large]) == ["s0", "s1"]


def test_a_proposed_victim_is_spared_where_an_added_one_does_for_it() -> None:
    """The pod needs a card of its own, and kube-scheduler has proposed a pod of another one."""
    proposed, other = victim("small", 0, part=10), victim("large", 1)
    blocker = victim("fixed", 0, part=50)
    assert chosen(ONE_CARD, [proposed], [other], staying=[blocker]) == ["large"]


def test_a_proposed_victim_goes_where_kube_scheduler_would_miss_it() -> None:
    """It frees more of something than the added one, or another filter may look at it. Otherwise
    kube-scheduler would propose the same victims for ever, and the pod would never start.
    """
    other, blocker = victim("large", 1, cpu=1000), victim("fixed", 0, part=50)

    def spared(proposed: Victim, preemptor: SchedulingFacts = PREEMPTOR) -> bool:
        found = chosen(ONE_CARD, [proposed], [other], staying=[blocker], preemptor=preemptor)
        assert found is not None
        assert "large" in found
        return proposed.uid not in found

    assert spared(victim("p", 0, part=10, cpu=1000))
    assert not spared(victim("p", 0, part=10, cpu=1001))
    assert not spared(victim("p", 0, part=10, traits={Trait.ANTI_AFFINITY}))
    assert not spared(Victim("p", None))
    for trait in (Trait.HOST_PORTS, Trait.VOLUMES):
        with_it = msgspec.structs.replace(PREEMPTOR, traits=frozenset({trait}))
        assert spared(victim("p", 0, part=10, traits={trait}))
        assert spared(victim("p", 0, part=10), with_it)
        assert not spared(victim("p", 0, part=10, traits={trait}), with_it)
    for trait in (Trait.SPREAD, Trait.ANTI_AFFINITY, Trait.CLAIMS):
        with_it = msgspec.structs.replace(PREEMPTOR, traits=frozenset({trait}))
        assert not spared(victim("p", 0, part=10), with_it)


def test_what_kube_scheduler_leaves_to_others_need_not_be_replaced() -> None:
    """Such as ``vgpu-cores``, which the Node does not even offer."""
    proposed, other = victim("p", 0, part=10, cpu=9), victim("large", 1, cpu=0)
    blocker = victim("fixed", 0, part=50)
    assert chosen(ONE_CARD, [proposed], [other], staying=[blocker]) == ["large", "p"]
    found = chosen(ONE_CARD, [proposed], [other], staying=[blocker], ignored={"cpu"})
    assert found == ["large"]


def test_one_added_victim_replaces_one_proposed_one() -> None:
    """Each frees one place for a pod on the Node."""
    proposed = [victim("p0", 0, part=10, priority=5), victim("p1", 0, part=10, priority=3)]
    other, blocker = victim("large", 1, cpu=9000), victim("fixed", 0, part=50)
    # the more important one is spared
    assert chosen(ONE_CARD, proposed, [other], staying=[blocker]) == ["p1", "large"]


def test_less_important_pods_go_first() -> None:
    """By priority, then those that have run for the shortest time."""
    others = [victim("high", 0, priority=9), victim("low", 1, priority=1)]
    assert chosen(ONE_CARD, [], others) == ["low"]
    others = [victim("old", 0, started_at=10.0), victim("new", 1, started_at=20.0)]
    assert chosen(ONE_CARD, [], others) == ["new"]
    others = [victim("waiting", 0, started_at=0.0), victim("new", 1, started_at=20.0)]
    assert chosen(ONE_CARD, [], others) == ["waiting"]


def test_of_equally_important_pods_as_few_as_possible_go() -> None:
    """Ten small pods on card 0, all of them younger than the one on card 1."""
    small = [victim(f"s{place}", 0, part=10, started_at=100.0 + place) for place in range(10)]
    assert chosen(ONE_CARD, [], [*small, victim("old", 1, started_at=1.0)]) == ["old"]


def test_cards_that_the_group_wants_are_emptied_first() -> None:
    """vgpu-manager §5.9, for a pod whose peers are there."""
    others = [victim("far", 0, priority=1), victim("near", 1, priority=5, near=True)]
    assert chosen(ONE_CARD, [], others) == ["near"]


def test_pods_that_go_anyhow_are_waited_for() -> None:
    """Another one would go for nothing."""
    others = [
        victim("going", 0, priority=9, deleting=True, app="web"),
        victim("low", 1, priority=1),
    ]
    budgets = Budgets()
    budgets.put(Budget("team", "b", Selector(), 0))
    assert chosen(ONE_CARD, [], others) == ["going"]
    assert chosen(ONE_CARD, [], others, budgets=budgets) == ["going"]


def test_protected_pods_stay() -> None:
    """An added one is passed over; of a proposed one only another one may take the place."""
    assert chosen(ONE_CARD, [], [victim("a", 0, protected="static"), victim("b", 1)]) == ["b"]
    assert chosen(BOTH_CARDS, [], [victim("a", 0, protected="static"), victim("b", 1)]) is None
    assert chosen(ONE_CARD, [victim("a", 0, protected="static")], [victim("b", 1)]) is None
    blocker, guarded = victim("fixed", 0, part=50), victim("a", 0, part=10, protected="static")
    assert chosen(ONE_CARD, [guarded], [victim("b", 1)], staying=[blocker]) == ["b"]


def test_a_node_on_which_nothing_helps_is_given_up() -> None:
    """Nobody goes for nothing."""
    assert chosen(BOTH_CARDS, [victim("a", 0)], [], staying=[victim("b", 1)]) is None
    assert chosen(demand(container(number=3)), [victim("a", 0)], [victim("b", 1)]) is None


def _budgets(allowed: int) -> Budgets:
    budgets = Budgets()
    budgets.put(Budget("team", "web", Selector((("app", "web"),)), allowed))
    return budgets


def test_budgets_are_kept() -> None:
    """No pod is added whose loss is more than one allows, also together with what is proposed."""
    web = [victim("w0", 0, app="web"), victim("w1", 1, app="web", started_at=9.0)]
    assert chosen(ONE_CARD, [], web, budgets=_budgets(0)) is None
    assert chosen(ONE_CARD, [], web, budgets=_budgets(1)) == ["w1"]
    assert chosen(BOTH_CARDS, [], web, budgets=_budgets(1)) is None
    assert chosen(BOTH_CARDS, web[:1], web[1:], budgets=_budgets(1)) is None
    assert chosen(BOTH_CARDS, web[:1], web[1:], budgets=_budgets(2)) == ["w0", "w1"]


def test_a_pod_without_a_budget_goes_before_one_beyond_it() -> None:
    """Although it is more important."""
    others = [
        victim("web", 0, app="web"),
        victim("free", 1, priority=9),
    ]
    assert chosen(ONE_CARD, [], others, budgets=_budgets(0)) == ["free"]
    pair = [victim("w0", 0, app="web"), victim("w1", 1, app="web")]
    three = [*pair, victim("free", 2, priority=9)]
    assert chosen(BOTH_CARDS, [], three, budgets=_budgets(1), count=3) == ["free", "w1"]


def test_a_proposed_victim_beyond_a_budget_is_spared_first() -> None:
    """kube-scheduler does so, too."""
    proposed = [
        victim("p0", 0, part=10, priority=5),
        victim("p1", 0, part=10, priority=3, app="web"),
    ]
    other, blocker = victim("large", 1), victim("fixed", 0, part=50)
    found = chosen(ONE_CARD, proposed, [other], staying=[blocker], budgets=_budgets(0))
    assert found == ["p0", "large"]


_pods = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=2, unique=True),
        st.sampled_from([10, 30, 50, 60, 100]),
        st.integers(0, 3),
        st.integers(1, 3),
        st.sampled_from([0, 1000]),
        st.booleans(),
    ),
    max_size=7,
)
_shares = st.lists(
    st.tuples(st.sampled_from([30, 50, 60, 100]), st.booleans()), min_size=2, max_size=2
)
_wanted = st.builds(
    lambda containers, mode, shares: with_shares(demand(*containers, topology_mode=mode), shares),
    st.lists(
        st.builds(
            container,
            number=st.integers(1, 3),
            cores=st.sampled_from([0, 30, 50, 100]),
            memory=st.sampled_from([0, MEMORY_MIB // 3, MEMORY_MIB // 2]),
        ),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from(["none", "numa-strict", "link-strict"]),
    _shares,
)


@hypothesis.given(pods=_pods, wanted=_wanted, allowed=st.integers(0, 4))
def test_victims_are_enough_and_none_of_them_is_too_many(
    pods: list[tuple[list[int], int, int, int, int, bool]], wanted: Demand, allowed: int
) -> None:
    """Against all subsets, with the cards added up anew, and placements by nothing that the choice
    itself has computed.
    """
    hardware = cards(3, links={(0, 1): [1, 8], (0, 2): [4], (1, 2): [2]}).hardware
    every = {
        f"v{place}": victim(
            f"v{place}",
            *held,
            part=part,
            priority=priority,
            started_at=float(started_at),
            cpu=cpu,
            app="web" if priority == 1 else "",
        )
        for place, (held, part, priority, started_at, cpu, _) in enumerate(pods)
    }
    is_proposed = {f"v{place}": each[-1] for place, each in enumerate(pods)}
    proposed = [each for uid, each in every.items() if is_proposed[uid]]
    others = [each for uid, each in every.items() if not is_proposed[uid]]

    def fits_without(gone: Collection[str]) -> bool:
        rest = [each for uid, each in every.items() if uid not in gone]
        return isinstance(allocate(wanted, hardware, taken_by(hardware, rest)), Placement)

    def is_free_for_kube_scheduler(gone: Collection[str]) -> bool:
        """The resources of those proposed are free, in sum."""
        needed = [every[each.uid] for each in proposed]
        sums: list[Mapping[str, int]] = [
            {
                name: sum(
                    dict(each.facts.requests or ()).get(name, 0) for each in group if each.facts
                )
                for name in ("cpu", "pods")
            }
            for group in (needed, [every[uid] for uid in gone])
        ]
        return all(sums[1][name] >= sums[0][name] for name in ("cpu", "pods"))

    budgets = _budgets(allowed)

    def within_budget(gone: Collection[str]) -> bool:
        """Added ones are; kube-scheduler's own may not be."""
        web = [uid for uid in gone if every[uid].priority == 1]
        return len(web) <= allowed or all(is_proposed[uid] for uid in web)

    room = Room(wanted, hardware, taken_by(hardware, list(every.values())), {})
    found = choose_victims(
        room,
        proposed,
        others,
        preemptor=PREEMPTOR,
        budgets=budgets,
        is_counted=lambda name: True,
    )
    basis = {each.uid for each in proposed}
    subsets = [
        basis | set(more)
        for size in range(len(others) + 1)
        for more in itertools.combinations([each.uid for each in others], size)
    ]
    possible = [gone for gone in subsets if fits_without(gone) and within_budget(gone)]
    if found is None:
        if room.is_simple and allowed > 3:
            assert possible == []
        return
    uids = {each.uid for each in found}
    assert len(uids) == len(found)
    assert (
        list(found) == sorted(found, key=lambda each: (-each.priority, each.started_at, each.uid))
        or uids == basis
    )
    assert fits_without(uids)
    assert is_free_for_kube_scheduler(uids)
    assert within_budget(uids)
    if uids == basis:
        return
    for uid in uids:
        assert not (fits_without(uids - {uid}) and is_free_for_kube_scheduler(uids - {uid}))
    if room.is_simple and basis <= uids:
        assert not any(gone < uids for gone in possible)


@hypothesis.given(
    taken=st.lists(
        st.tuples(
            st.sampled_from([0, 9, 10, 11]),
            st.sampled_from([0, 0, MEMORY_MIB // 2, 2 * MEMORY_MIB]),
            st.sampled_from([0, 50, 100, 100, 150]),
        ),
        min_size=3,
        max_size=3,
    ),
    wanted=_wanted,
    blocked=st.sampled_from([{}, {}, {0: {"healthy": False}}, {1: {"mig": True}}]),
    unwanted=st.sampled_from([{}, {2: Reason.DeviceTypeMismatch}]),
    memory_policy=st.sampled_from(["", "virtual", "physical"]),
)
def test_room_is_what_a_placement_finds(
    taken: list[Amounts],
    wanted: Demand,
    blocked: dict[int, dict[str, bool]],
    unwanted: dict[int, Reason],
    memory_policy: str,
) -> None:
    """It is only faster."""
    hardware = cards(3, links={(0, 1): [1, 8], (0, 2): [4]}, changed=blocked).hardware
    wanted = msgspec.structs.replace(wanted, memory_policy=memory_policy)
    placed = allocate(wanted, hardware, taken, unwanted)
    assert Room(wanted, hardware, taken, unwanted).fits() is isinstance(placed, Placement)


def test_a_card_without_free_compute_takes_nobody() -> None:
    """Not even one who asks for no compute (vgpu-manager §5.5)."""
    wanted = demand(container(memory=1))
    hardware = cards(1).hardware
    assert not Room(wanted, hardware, [(1, 1, 100)], {}).fits()
    assert Room(wanted, hardware, [(1, 1, 99)], {}).fits()


def test_a_percentage_of_memory_needs_no_whole_card() -> None:
    """One that asks for 30 % of it takes the place of one pod, not of all on the card."""
    wanted = with_shares(demand(container(cores=10)), [(30, False)])
    others = [victim("low", 0, part=40, priority=1), victim("high", 0, part=60, priority=9)]
    assert chosen(wanted, [], others, count=1) == ["low"]


def test_one_that_wants_a_card_alone_fits_beside_nobody() -> None:
    """Otherwise a pod went for nothing: here the one that was proposed, with one staying."""
    wanted = with_shares(demand(container(cores=10, memory=1)), [(100, True)])
    proposed, blocker = victim("a", 0, part=50), victim("fixed", 0, part=50)
    assert chosen(wanted, [proposed], [], staying=[blocker], count=1) is None
    assert chosen(wanted, [proposed], [victim("b", 0, part=50)], count=1) == ["a", "b"]


def _holding(
    uid: str, card: int, memory_percent: int, cores: int, priority: int, cpu: int = 1000
) -> Victim:
    held = {card: (1, MEMORY_MIB * memory_percent // 100, cores)}
    return msgspec.structs.replace(victim(uid, priority=priority, cpu=cpu), footprint=held)


_MUCH_MEMORY = container("a", cores=10, memory=MEMORY_MIB * 9 // 10)
_MUCH_COMPUTE = container("b", cores=95, memory=1)


def test_a_pod_that_fits_worse_with_more_room_loses_no_victim_too_many() -> None:
    """With more room on card 0, container ``a`` goes there, and ``b`` has to go to card 1. So one
    try to put victims back is not enough.
    """
    others = [
        _holding("compute", 1, 0, 20, priority=3),
        _holding("memory", 0, 50, 0, priority=2),
        _holding("needed", 0, 0, 50, priority=1),
    ]
    assert chosen(demand(_MUCH_MEMORY, _MUCH_COMPUTE), [], others) == ["needed"]


def test_a_spared_victim_may_make_an_added_one_superfluous() -> None:
    """For the same reason."""
    wanted = demand(_MUCH_MEMORY, _MUCH_COMPUTE, container("c", cores=100, memory=1))
    proposed = [_holding("memory", 0, 50, 0, priority=2)]
    others = [
        _holding("compute", 1, 0, 20, priority=3),
        _holding("needed", 2, 0, 10, priority=1),
    ]
    assert chosen(wanted, proposed, others, count=3) == ["needed"]
