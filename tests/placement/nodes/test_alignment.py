"""Pods of one group near each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import (
    KEYS,
    MEMORY_MIB,
    cards,
    container,
    entry,
    node_texts,
    pod,
    uuid,
)
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes.alignment import (
    ANYWHERE,
    ELSEWHERE,
    TOGETHER,
    anchor_of,
    card_sets_near,
    choose_aligned,
    components_of,
    room_for,
    survey_aligned,
)
from vgpu_agent.placement.nodes.allocation import Amounts
from vgpu_agent.placement.nodes.book import Book, HeldCard, Holding, Survey
from vgpu_agent.placement.nodes.cards import NodeCards
from vgpu_agent.placement.nodes.demand import Demand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.pods import ContainerKind, PodContainer

PAIRS = {(0, 1): [1, 10], (2, 3): [1, 10], (1, 2): [2]}
"""The links of four cards in two components."""


def demand(*containers: PodContainer, mode: str = "link", **words: str) -> Demand:
    """The demand of a pod that is aligned with its peers."""
    found = read_demand(
        pod(*(containers or (container(),)), topology_mode=mode, cross_pod="true", **words), KEYS
    )
    assert found is not None
    assert found.demand.aligned
    return found.demand


def book_of(
    nodes: int,
    rails: Mapping[int, Sequence[str]] | None = None,
    links: Mapping[tuple[int, int], Sequence[int]] | None = None,
    count: int = 4,
) -> Book:
    """A book of Nodes ``n0``, ``n1``, … with cards in pairs; ``rails`` by Node."""
    book = Book()
    for node in range(nodes):
        texts = node_texts(
            [entry(card, uuid=uuid(node, card)) for card in range(count)],
            PAIRS if links is None else links,
        )
        if named := (rails or {}).get(node):
            texts[KEYS.node_gpu_domain] = json.dumps(
                {uuid(node, card): rail for card, rail in enumerate(named)}
            )
        found = read_cards(texts, 10 * count, KEYS)
        assert isinstance(found, NodeCards)
        book.put_node(f"n{node}", found)
    return book


def hold(book: Book, uid: str, node: int, *held: int, part: int = 100) -> None:
    """Let a pod hold parts of cards."""
    amount = MEMORY_MIB * part // 100
    claims = tuple(HeldCard(uuid(node, card), part, amount) for card in held)
    book.hold(uid, Holding(f"n{node}", (ContainerKind.MAIN,), (claims,)))


def placed(
    book: Book,
    wanted: Demand,
    names: Sequence[str],
    peers: Sequence[str] = (),
    waiting: int = 0,
) -> tuple[str, list[int], int]:
    """The Node, the cards and the nearness."""
    choice, nearness = choose_aligned(book, wanted, names, peers, waiting)
    if choice.holding is None:
        return "", [], nearness
    numbers = book.numbers(choice.node)
    return choice.node, [numbers[card.uuid] for card in choice.holding.cards[0]], nearness


def test_components_are_joined_by_nvlinks() -> None:
    """A card alone is none."""
    assert components_of(cards(4, links=PAIRS).hardware) == ((0, 1), (2, 3))
    assert components_of(cards(3, links={(0, 2): [7]}).hardware) == ((0, 2),)
    assert components_of(cards(3, links={(0, 2): [6]}).hardware) == ()
    assert components_of(cards(3).hardware) == ()


def test_the_component_of_a_peer_on_the_node() -> None:
    """vgpu-manager §5.7. Without the peer it is card 0, and the first Node."""
    book = book_of(2)
    hold(book, "peer", 1, 2)
    assert placed(book, demand(), ["n0", "n1"], ["peer"]) == ("n1", [3], TOGETHER)
    assert placed(book, demand(), ["n0", "n1"]) == ("n0", [0], ANYWHERE)
    assert placed(book, demand(), ["n0", "n1"], ["unknown"]) == ("n0", [0], ANYWHERE)


def test_what_the_cards_have_instead_of_nvlinks_is_told() -> None:
    """The same as for a pod without peers."""
    book = book_of(1)
    for uid, card in (("peer", 0), ("x", 2)):
        hold(book, uid, 0, card)
    pair = demand(container(number=2))
    choice, _ = choose_aligned(book, pair, ["n0"], ["peer"], 0)
    assert choice.fallback == book.choose(pair, ["n0"]).fallback != ""
    choice, _ = choose_aligned(book_of(1), pair, ["n0"], ["waits"], 1)
    assert (choice.node, choice.fallback) == ("n0", "")


def test_the_component_with_the_most_peers_comes_first() -> None:
    """A tie goes to the component with the lower card numbers."""
    book = book_of(1)
    hold(book, "a", 0, 0, part=10)
    hold(book, "b", 0, 2, part=10)
    small = demand(container(cores=10, memory=1))
    assert placed(book, small, ["n0"], ["a", "b"])[1] == [0]
    hold(book, "c", 0, 3, part=10)
    assert placed(book, small, ["n0"], ["a", "b", "c"])[1] == [2]
    hold(book, "full2", 0, 2, part=90)
    hold(book, "full3", 0, 3, part=90)
    assert placed(book, small, ["n0"], ["a", "b", "c"])[1] == [0]


def test_elsewhere_the_component_of_the_same_place() -> None:
    """Without known rails, components of different Nodes are matched by position: the pod gets the
    second one if its peer has the second one.
    """
    book = book_of(2)
    hold(book, "peer", 0, 2, 3)
    pair = demand(container(number=2))
    assert placed(book, pair, ["n0", "n1"], ["peer"]) == ("n1", [2, 3], ELSEWHERE)
    hold(book, "other", 1, 2)
    assert placed(book, pair, ["n0", "n1"], ["peer"]) == ("n0", [0, 1], ANYWHERE)


def test_elsewhere_the_component_of_the_same_rails() -> None:
    """The rails are matched by their names, whatever the order of the cards on the Node."""
    rails = {0: ["a", "b", "c", "d"], 1: ["d", "c", "b", "a"]}
    book = book_of(2, rails)
    hold(book, "peer", 0, 2, 3)
    pair = demand(container(number=2))
    assert placed(book, pair, ["n1"], ["peer"]) == ("n1", [0, 1], ELSEWHERE)


def test_cards_on_the_rails_of_the_peers_come_first() -> None:
    """Before their component (vgpu-manager §5.7)."""
    rails = {node: ["a", "b", "a", "b"] for node in range(2)}
    book = book_of(2, rails)
    hold(book, "peer", 0, 0, 2)
    anchor = anchor_of(book, ["peer"])
    assert anchor.rails == {"a"}
    view = book.cards_in_use("n1")
    assert view is not None
    assert card_sets_near(anchor, "n1", view) == [
        (ELSEWHERE, (0, 2)),
        (ELSEWHERE, (0, 1)),
        (ELSEWHERE, (2, 3)),
    ]
    pair = demand(container(number=2))
    assert placed(book, pair, ["n1"], ["peer"]) == ("n1", [0, 2], ELSEWHERE)


def test_most_peers_decide() -> None:
    """vgpu-manager §5.7."""
    book = book_of(4)
    hold(book, "a", 0, 0)
    hold(book, "b", 1, 2)
    hold(book, "c", 2, 3)
    assert placed(book, demand(), ["n3"], ["a", "b", "c"]) == ("n3", [2], ELSEWHERE)


def test_nodes_without_rails_and_components_without_any_are_not_alike() -> None:
    """An empty set of rails is no domain."""
    rails = {0: ["", "", "x", ""], 1: ["y", "", "", ""]}
    book = book_of(3, rails)
    hold(book, "peer", 0, 0)
    assert anchor_of(book, ["peer"]).domain is None
    assert placed(book, demand(), ["n1", "n2"], ["peer"]) == ("n1", [0], ANYWHERE)


def test_strict_pods_stay_beside_their_peers_or_wait() -> None:
    """vgpu-manager §5.7: never without the window; where there is none, anywhere."""
    book = book_of(2)
    hold(book, "peer", 0, 0)
    hold(book, "other", 0, 1)
    strict = demand(mode="link-strict")
    choice, _ = choose_aligned(book, strict, ["n0"], ["peer"], 0)
    assert choice.reasons == {"n0": Reason.LinkTopologyUnsatisfied}
    assert placed(book, demand(), ["n0"], ["peer"]) == ("n0", [2], ANYWHERE)
    assert placed(book, strict, ["n0", "n1"], ["peer"]) == ("n1", [0], ELSEWHERE)
    single = book_of(2, links={(0, 1): [10]})
    hold(single, "peer", 0, 3)
    assert placed(single, strict, ["n0", "n1"], ["peer"]) == ("n0", [0], ANYWHERE)


def test_a_survey_for_a_strict_pod_asks_where_its_peers_are() -> None:
    """It fits near to them, or away from them, or nowhere; of many Nodes that would take too long
    to tell.
    """
    strict, far = demand(mode="link-strict"), (Reason.LinkTopologyUnsatisfied,)
    book = book_of(2)
    hold(book, "peer", 0, 0)
    assert survey_aligned(book, strict, ["peer"]) == Survey(True, ())
    hold(book, "x", 0, 1)
    assert survey_aligned(book, strict, ["peer"]) == Survey(True, far)
    hold(book, "y", 1, 0, 1)
    assert survey_aligned(book, strict, ["peer"]) == Survey(False, far)
    for anywhere, peers in ((demand(), ["peer"]), (strict, ["unknown"]), (strict, [])):
        assert survey_aligned(book, anywhere, peers) == Survey(True, ())
    hold(book, "z", 1, 2, 3)
    expected = Survey(False, (Reason.InsufficientVGPUCore, *far))
    assert survey_aligned(book, strict, ["peer"]) == expected
    many = book_of(130)
    hold(many, "peer", 0, 0, 1)
    for node in range(1, 130):
        hold(many, f"x{node}", node, 0, 1)
        hold(many, f"y{node}", node, 2, part=1 + node % 90)
        hold(many, f"z{node}", node, 3, part=1 + node // 90)
    one = demand(container(cores=1, memory=1), mode="link-strict")
    assert survey_aligned(many, one, ["peer"]) == Survey(True, far)


def test_reasons_of_other_nodes_are_those_of_any_pod() -> None:
    """Alignment refuses nothing by itself."""
    book = book_of(2)
    hold(book, "peer", 0, 0, 1, 2, 3)
    choice, _ = choose_aligned(book, demand(), ["n0", "nowhere"], ["peer"], 0)
    assert (choice.node, choice.holding) == ("", None)
    assert choice.reasons == {
        "n0": Reason.InsufficientVGPUCore,
        "nowhere": Reason.NodeCacheMiss,
    }


def test_the_first_pod_goes_where_all_have_room() -> None:
    """vgpu-manager's first pod takes the first Node, and its peers find no room beside it
    (vgpu-manager §12.3).
    """
    book = book_of(3)
    hold(book, "x", 0, 0, 2)  # one card left in each component
    hold(book, "y", 1, 1, 3)
    assert placed(book, demand(), ["n0", "n1", "n2"], ["f"], waiting=1) == ("n2", [0], ANYWHERE)
    hold(book, "z", 2, 0)
    assert placed(book, demand(), ["n0", "n1", "n2"], ["f"], waiting=1) == ("n2", [2], ANYWHERE)


def test_the_first_pod_takes_the_smallest_component_that_is_large_enough() -> None:
    """The larger one stays for a larger group; where none is large enough, the largest."""
    links = {
        pair: [10] for group in ((0, 1, 2), (3, 4)) for pair in itertools.combinations(group, 2)
    }
    book = book_of(1, links=links, count=5)
    for waiting, card in ((0, 0), (1, 3), (2, 0), (9, 0)):
        assert placed(book, demand(), ["n0"], ["f"], waiting)[1] == [card]


def test_among_equally_near_places_that_with_room_for_the_rest() -> None:
    """Peers are on n0, which is full; of the others only n2 has room for two more."""
    book = book_of(3)
    hold(book, "peer", 0, 0, 1, 2, 3)
    hold(book, "x", 1, 1, 3)
    assert placed(book, demand(), ["n1", "n2"], ["peer", "f"], waiting=1) == (
        "n2",
        [0],
        ELSEWHERE,
    )


def test_more_room_than_the_group_needs_is_no_better() -> None:
    """Then the policy decides, here without one the first Node."""
    links = {pair: [10] for pair in itertools.combinations(range(4), 2)}
    book = book_of(2, links=links)
    hold(book, "x", 0, 0)
    for waiting, expected in ((1, "n0"), (2, "n0"), (3, "n1")):
        assert placed(book, demand(), ["n0", "n1"], ["f"], waiting)[0] == expected


def test_more_room_elsewhere_than_the_group_needs_is_no_better() -> None:
    """The same for those that follow."""
    links = {pair: [10] for pair in itertools.combinations(range(4), 2)}
    book = book_of(3, links=links)
    hold(book, "peer", 0, 0, 1, 2, 3)
    hold(book, "x", 1, 0)
    for waiting, expected in ((1, "n1"), (2, "n1"), (3, "n2")):
        peers = ["peer", *(f"f{place}" for place in range(waiting))]
        assert placed(book, demand(), ["n1", "n2"], peers, waiting)[0] == expected


def test_rails_on_the_node_of_a_peer_are_nearer_than_elsewhere() -> None:
    """Here without NVLinks."""
    rails = {node: ["a", "a", "b", "b"] for node in range(2)}
    book = book_of(2, rails, links={})
    hold(book, "peer", 1, 2)
    assert placed(book, demand(), ["n0", "n1"], ["peer"]) == ("n1", [3], TOGETHER)
    assert placed(book, demand(), ["n0"], ["peer"]) == ("n0", [2], ELSEWHERE)


def test_room_without_nvlinks_is_worth_less() -> None:
    """A Node with two pairs is better for a gang of four than one with four single cards; where no
    Node has NVLinks, one with room for all is.
    """
    book = book_of(1, links={})
    linked = read_cards(
        node_texts([entry(card, uuid=uuid(1, card)) for card in range(4)], PAIRS), 40, KEYS
    )
    assert isinstance(linked, NodeCards)
    book.put_node("n1", linked)
    assert placed(book, demand(), ["n0", "n1"], ["f"], waiting=3)[0] == "n1"
    book = book_of(2, links={})
    hold(book, "x", 0, 0)
    assert placed(book, demand(), ["n0", "n1"], ["f"], waiting=3)[0] == "n1"


def test_nodes_that_look_the_same_may_differ_in_their_peers() -> None:
    """On n1 the component of the peer there is full. On n0 the one of the same domain as those on
    n2 is not.
    """
    book = book_of(3)
    hold(book, "a", 1, 0)
    hold(book, "b", 2, 2)
    hold(book, "c", 2, 3)
    for uid, node, card in (("x", 1, 1), ("y", 0, 0), ("z", 0, 1)):
        hold(book, uid, node, card)
    strict = demand(mode="link-strict")
    assert placed(book, strict, ["n1", "n0"], ["a", "b", "c"]) == ("n0", [2], ELSEWHERE)


def test_the_first_strict_pod_may_need_several_components() -> None:
    """One for each of its containers."""
    wanted = demand(container("a", number=2), container("b", number=2), mode="link-strict")
    choice, _ = choose_aligned(book_of(1), wanted, ["n0"], ["f"], 1)
    assert choice.node == "n0"


@pytest.mark.parametrize(("policy", "expected"), [("binpack", "n1"), ("spread", "n0")])
def test_policies_decide_among_equally_near_nodes(policy: str, expected: str) -> None:
    """And names among equal ones."""
    book = book_of(3)
    hold(book, "x", 1, 0, part=10)
    wanted = demand(container(cores=10, memory=1), node_policy=policy)
    for names in (["n0", "n1", "n2"], ["n2", "n1", "n0"]):
        assert placed(book, wanted, names, ["unknown"])[0] == expected


def test_alignment_is_for_pods_that_ask_for_it() -> None:
    """By both annotations (vgpu-manager §4.1)."""
    for mode, word, aligned in (
        ("link", "true", True),
        ("link-strict", " True ", True),
        ("numa", "true", False),
        ("link", "yes", False),
        ("none", "true", False),
    ):
        found = read_demand(pod(topology_mode=mode, cross_pod=word), KEYS)
        assert found is not None
        assert found.demand.aligned is aligned


@pytest.mark.parametrize(
    ("text", "rails"),
    [
        ("", ()),
        ("nonsense", ()),
        ("[]", ()),
        ("{}", ()),
        ('{"GPU-x": "a"}', ()),
        (json.dumps({uuid(0, 1): "a"}), ("", "a")),
        (json.dumps({uuid(0, 1): 5}), ()),
        ("[" * 100_000, ()),
    ],
)
def test_rails_of_a_node(text: str, rails: tuple[str, ...]) -> None:
    """Written by an operator; nonsense is no reason against the Node."""
    texts = node_texts([entry(card) for card in range(2)])
    found = read_cards({**texts, KEYS.node_gpu_domain: text}, 20, KEYS)
    assert isinstance(found, NodeCards)
    assert found.rails == rails


@hypothesis.given(
    taken=st.lists(
        st.tuples(
            st.integers(0, 10), st.integers(0, 4).map(lambda part: part * MEMORY_MIB // 4),
            st.sampled_from([0, 25, 50, 75, 100]),
        ),
        min_size=3,
        max_size=3,
    ),
    number=st.integers(1, 3),
    cores=st.sampled_from([0, 20, 50, 100]),
    memory=st.sampled_from([0, MEMORY_MIB // 5, MEMORY_MIB // 2]),
    percent=st.sampled_from([30, 100]),
    alone=st.booleans(),
)  # fmt: skip
def test_room_is_counted_exactly_for_one_container(
    taken: list[Amounts], number: int, cores: int, memory: int, percent: int, alone: bool
) -> None:
    """Against all ways to place one pod after the other."""
    wanted = demand(container(number=number, cores=cores, memory=memory))
    hardware = cards(3).hardware
    each = msgspec.structs.replace(wanted.containers[0], memory_percent=percent, alone=alone)
    wanted = msgspec.structs.replace(wanted, containers=(each,))
    need = MEMORY_MIB * percent // 100 if each.memory_units is None else each.memory_units

    def most(left: tuple[Amounts, ...]) -> int:
        """The most pods that fit."""
        free = [
            card
            for card, (slots, used, cores_used) in enumerate(left)
            if slots < (1 if alone else 10)
            and used + need <= MEMORY_MIB
            and cores_used + each.cores_percent <= 100
            and cores_used < 100
        ]
        best = 0
        # one after the other on the cards with the most room is optimal
        for chosen in itertools.combinations(free, number):
            after = list(left)
            for card in chosen:
                slots, used, cores_used = after[card]
                after[card] = (slots + 1, used + need, cores_used + each.cores_percent)
            best = max(best, 1 + most_of(tuple(after)))
        return best

    known: dict[tuple[Amounts, ...], int] = {}

    def most_of(left: tuple[Amounts, ...]) -> int:
        key = tuple(sorted(left))  # the cards are equal
        if key not in known:
            known[key] = most(key)
        return known[key]

    assert room_for(wanted, hardware, taken, (0, 1, 2)) == most_of(tuple(taken))
