"""The book of all cards: which Node a pod gets, and what pods hold."""

from __future__ import annotations

import random
from typing import Any

import pytest

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
from vgpu_agent.placement.nodes.allocation import allocate
from vgpu_agent.placement.nodes.book import Book, Choice, HeldCard, Holding
from vgpu_agent.placement.nodes.cards import NodeCards, Unfit
from vgpu_agent.placement.nodes.demand import Demand
from vgpu_agent.placement.nodes.ranking import rank
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.pods import ContainerKind, PodContainer


def demand(*containers: PodContainer, **words: str) -> Demand:
    """The demand of a pod with these containers and policies."""
    found = read_demand(pod(*containers, **words), KEYS)
    assert found is not None
    return found.demand


def node_cards(node: int, **changed: object) -> NodeCards:
    """The cards of Node ``node``, with UUIDs of its own."""
    entries = [entry(card, uuid=uuid(node, card), **changed) for card in range(2)]
    found = read_cards(node_texts(entries), 20, KEYS)
    assert isinstance(found, NodeCards)
    return found


def book_of(nodes: int, **changed: object) -> Book:
    """A book of Nodes ``n0``, ``n1``, … with two cards each."""
    book = Book()
    for node in range(nodes):
        book.put_node(f"n{node}", node_cards(node, **changed))
    return book


def held(node: int, *amounts: tuple[int, int, int]) -> Holding:
    """The holding of a pod with one main container; each amount is card, percent, MiB."""
    return Holding(
        f"n{node}",
        (ContainerKind.MAIN,),
        (tuple(HeldCard(uuid(node, card), cores, memory) for card, cores, memory in amounts),),
    )


SMALL = demand(container(cores=10, memory=1024))


def test_the_score_of_the_contract() -> None:
    """vgpu-manager §13.3: 0.036111 for binpack on an empty Node of two cards."""
    wanted = demand(container(cores=10, memory=1024), node_policy="binpack")
    _, score = rank(wanted, cards().hardware, [(0, 0, 0)] * 2, {0: (1, 1024, 10)})
    assert score == pytest.approx(0.036111, abs=1e-6)


def test_without_a_policy_the_first_node_that_fits_is_taken() -> None:
    """vgpu-manager §5.4."""
    book = book_of(3)
    book.hold("a", held(2, (0, 100, 1), (1, 100, 1)))
    assert book.choose(SMALL, ["n2", "n1", "n0", "unknown"]) == Choice(
        "n1",
        held(1, (0, 10, 1024)),
        {"n2": Reason.InsufficientVGPUCore, "unknown": Reason.NodeCacheMiss},
    )


@pytest.mark.parametrize(("policy", "expected"), [("binpack", "n1"), ("spread", "n0")])
def test_policies_over_nodes(policy: str, expected: str) -> None:
    """A tie goes to the first name in the alphabet, whatever the order in the request."""
    book = book_of(3)
    book.hold("a", held(1, (0, 10, 1024)))
    wanted = demand(container(cores=10, memory=1024), node_policy=policy)
    for names in (["n0", "n1", "n2"], ["n2", "n1", "n0"]):
        assert book.choose(wanted, names).node == expected


def test_topology_comes_before_the_policy() -> None:
    """vgpu-manager §5.4. The other Node has the better score, and the first name."""
    book = book_of(1)
    book.put_node("n9", cards(2, links={(0, 1): [1, 8]}))
    book.hold("a", held(0, (0, 10, 1024), (1, 10, 1024)))
    for mode, expected in (("link", "n9"), ("none", "n0")):
        wanted = demand(container(number=2, memory=1), topology_mode=mode, node_policy="binpack")
        assert book.choose(wanted, ["n0", "n9"]).node == expected


@pytest.mark.parametrize(
    ("types", "count", "fitness"),
    [
        ([1, 8], 2, 5),
        ([5], 2, 4),
        ([4], 2, 4),
        ([3], 2, 3),
        ([2], 2, 3),
        ([1], 2, 2),
        ([1], 3, 1),
        ([1, 8], 1, 5),
        ([1], 1, 2),
    ],
)
def test_fitness_for_links(types: list[int], count: int, fitness: int) -> None:
    """By the best links that join enough cards (vgpu-manager §5.4); card 2 has none."""
    hardware = cards(3, links={(0, 1): types}).hardware
    wanted = demand(container(number=count, memory=1), topology_mode="link")
    assert rank(wanted, hardware, [(0, 0, 0)] * 3, {}) == (fitness, 0.0)


def test_fitness_for_numa_nodes() -> None:
    """Two of the three cards are on one NUMA node (vgpu-manager §5.4)."""
    for number, expected in ((1, 2), (2, 2), (3, 1)):
        wanted = demand(container(number=number, memory=1), topology_mode="numa")
        assert rank(wanted, cards(3).hardware, [(0, 0, 0)] * 3, {})[0] == expected
    unknown = cards(2, changed={card: {"numa": -1} for card in range(2)}).hardware
    wanted = demand(container(number=1, memory=1), topology_mode="numa")
    assert rank(wanted, unknown, [(0, 0, 0)] * 2, {})[0] == 0


def test_blocked_cards_count_for_no_score() -> None:
    """A Node with one healthy card that is half full is half full."""
    hardware = cards(2, changed={1: {"healthy": False}}).hardware
    taken = [(5, MEMORY_MIB // 2, 50), (0, 0, 0)]
    wanted = demand(container(cores=1, memory=1), node_policy="spread")
    assert rank(wanted, hardware, taken, {0: (1, 1, 1)}) == (0, 0.5)


def test_memory_weighs_by_its_size() -> None:
    """A pod that asks for much memory looks at memory (vgpu-manager §5.4)."""
    hardware = cards(1).hardware
    full_of_memory, full_of_slots = [(0, MEMORY_MIB // 2, 0)], [(5, 0, 0)]
    large = demand(container(cores=1, memory=10 * 1024), node_policy="spread")
    assert rank(large, hardware, full_of_memory, {}) < rank(large, hardware, full_of_slots, {})


def test_descriptions_that_no_node_has_any_more_are_forgotten() -> None:
    """A Node whose annotations change every minute must not fill the memory."""
    book = book_of(1)
    for memory in range(100):
        book.put_node("n0", node_cards(0, memory=1000 + memory))
    book.remove_node("n0")
    assert book._states == {}


def test_states_that_no_node_has_any_more_are_bounded_over_all_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster of many kinds of Nodes must not keep thousands of old states of each."""
    monkeypatch.setattr("vgpu_agent.placement.nodes.book._MAX_STATES", 20)
    book, kinds = Book(), 8
    for node in range(kinds):
        book.put_node(f"n{node}", node_cards(node, memory=MEMORY_MIB + node))

    def kept() -> int:
        return sum(len(each.by_taken) for each in book._states.values())

    for number in range(100):
        for node in range(kinds):
            book.hold(f"pod-{node}", held(node, (0, 1, 1 + number)))
            assert kept() <= 20
            assert book.taken(f"n{node}")[0] == (1, 1 + number, 1)
    for node in range(kinds):
        book.release(f"pod-{node}")
        book.remove_node(f"n{node}")
    assert kept() == 0
    for node in range(30):  # what is gone has left its room
        book.put_node(f"n{node}", node_cards(node, memory=MEMORY_MIB + node))
        book.remove_node(f"n{node}")
    book.put_node("n0", node_cards(0))
    book.put_node("n1", node_cards(1))
    ones = book.cards_in_use("n0"), book.cards_in_use("n1")
    assert ones[0] is not None
    assert ones[1] is not None
    assert ones[0].state == ones[1].state


def test_kept_verdicts_are_bounded_over_all_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of many sizes on Nodes in many states must not fill the memory; the demands that were
    asked about last keep their verdicts.
    """
    monkeypatch.setattr("vgpu_agent.placement.nodes.book._MAX_VERDICTS", 50)
    nodes = 10
    book = book_of(nodes)
    for node in range(nodes):
        book.hold(f"pod-{node}", held(node, (0, 1, 1 + node)))  # each in a state of its own
    demands = [demand(container(cores=10, memory=1024 + number)) for number in range(20)]
    for wanted in demands:
        assert book.choose(wanted, book.names()).node == "n0"
    kept = sum(map(len, book._verdicts.values()))
    assert kept == book._kept_verdicts <= 50 + nodes
    assert list(book._verdicts) == demands[-len(book._verdicts) :]
    assert len(book._verdicts) > 1


def test_one_demand_with_more_verdicts_than_are_kept_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps them: dropped at each call, they would be made anew for each pod."""
    monkeypatch.setattr("vgpu_agent.placement.nodes.book._MAX_VERDICTS", 5)
    book = book_of(10)
    for node in range(10):
        book.hold(f"pod-{node}", held(node, (0, 1, 1 + node)))
    for _ in range(3):
        assert book.choose(SMALL, book.names()).node == "n0"
        assert book._kept_verdicts == len(book._verdicts[SMALL]) == 10


@pytest.mark.parametrize(
    ("entry", "model", "is_named"),
    [
        ("a10", "NVIDIA A10", True),
        ("a10", "NVIDIA A10G", True),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("00", "NVIDIA A100-SXM4-80GB", False),
        ("a100-sxm", "NVIDIA A100-SXM4-80GB", True),
        ("rtx", "Quadro RTX6000", True),
        ("v100", "Tesla V100S", True),
        ("h100", "NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_a_part_of_a_product_name_cuts_no_number(entry: str, model: str, is_named: bool) -> None:
    """Excludes must go on excluding, and ``A10`` is no ``A100`` (vgpu-manager §12.3)."""
    book = book_of(1, type=model)
    for key, fits in (("include_type", is_named), ("exclude_type", not is_named)):
        choice = book.choose(demand(container(memory=1), **{key: entry}), ["n0"])
        assert bool(choice.node) is fits


def test_a_number_in_a_product_name_is_no_part_of_a_longer_one() -> None:
    """``A10`` matches ``A100`` in the replaced extender (vgpu-manager §12.3)."""
    book = book_of(1, type="NVIDIA A100-SXM4-80GB")
    book.put_node("n1", node_cards(1, type="NVIDIA A10"))
    choice = book.choose(demand(container(memory=1), include_type="a10"), ["n0", "n1"])
    assert (choice.node, choice.reasons) == ("n1", {"n0": Reason.DeviceTypeMismatch})
    assert book.choose(demand(container(memory=1), include_type="A100"), ["n1", "n0"]).node == "n0"
    assert book.choose(demand(container(memory=1), exclude_type="a10"), ["n1", "n0"]).node == "n0"


def test_cards_can_be_named() -> None:
    """The same texts fit on one Node and not on another one that looks the same."""
    book = book_of(2)
    choice = book.choose(demand(container(memory=1), include_uuid=uuid(1, 1)), ["n0", "n1"])
    assert choice == Choice("n1", held(1, (1, 0, 1)), {"n0": Reason.DeviceUUIDMismatch})


@pytest.mark.parametrize("policy", ["none", "binpack"])
def test_a_node_that_is_gone_is_not_chosen(policy: str) -> None:
    """kube-scheduler's call may be older than the Node's end."""
    book, wanted = (
        book_of(2),
        demand(container(cores=10, memory=1024), node_policy=policy),
    )
    assert book.choose(wanted, ["n0", "n1"]).node == "n0"
    book.remove_node("n0")
    assert book.choose(wanted, ["n0"]) == Choice("", None, {"n0": Reason.NodeCacheMiss})
    assert book.choose(wanted, ["n0", "n1"]).node == "n1"


def test_a_node_that_cannot_be_read_is_unfit_and_its_pods_count_later() -> None:
    """Its annotations may be mended while pods run there."""
    book = book_of(1)
    book.hold("a", held(0, (0, 100, MEMORY_MIB)))
    book.put_node("n0", Unfit(Reason.NodeBadVGPURegister, "no card"))
    assert book.choose(SMALL, ["n0"]) == Choice("", None, {"n0": Reason.NodeBadVGPURegister})
    book.put_node("n0", node_cards(0))
    assert book.choose(SMALL, ["n0"]).holding == held(0, (1, 10, 1024))


def test_holdings_are_known_before_their_node() -> None:
    """The watches of Nodes and pods are read in any order, and a Node may be created again."""
    book = Book()
    book.hold("a", held(0, (0, 100, MEMORY_MIB)))
    assert book.choose(SMALL, ["n0"]).reasons == {"n0": Reason.NodeCacheMiss}
    book.put_node("n0", node_cards(0))
    assert book.taken("n0") == ((1, MEMORY_MIB, 100), (0, 0, 0))
    book.remove_node("n0")
    assert book.taken("n0") == ()
    book.put_node("n0", node_cards(0))
    assert book.taken("n0") == ((1, MEMORY_MIB, 100), (0, 0, 0))
    assert book.release("a") == held(0, (0, 100, MEMORY_MIB))
    assert book.taken("n0") == ((0, 0, 0), (0, 0, 0))


def test_a_pod_that_is_moved_holds_nothing_on_its_old_node() -> None:
    """The scheduler may plan anew until it has bound the pod."""
    book = book_of(2)
    book.hold("a", held(0, (0, 10, 1024)))
    book.hold("a", held(1, (0, 10, 1024)))
    assert book.taken("n0") == ((0, 0, 0), (0, 0, 0))
    assert book.release("a") == held(1, (0, 10, 1024))
    assert book.release("a") is None


def test_cards_that_a_node_lost_count_for_nothing() -> None:
    """A pod may still claim a card that was replaced."""
    book = book_of(1)
    book.hold("a", held(0, (0, 10, 1024), (1, 10, 1024)))
    entries = [entry(0, uuid=uuid(5, 0)), entry(1, uuid=uuid(0, 1))]
    replaced = read_cards(node_texts(entries), 20, KEYS)
    assert isinstance(replaced, NodeCards)
    book.put_node("n0", replaced)
    assert book.taken("n0") == ((0, 0, 0), (1, 1024, 10))


def test_a_busy_cluster_is_never_overcommitted() -> None:
    """A thousand pods of mixed shapes come and go; their claims are added up card by card, by
    nothing that the book has computed.
    """
    chance = random.Random(16)
    book = book_of(20)
    names = [f"n{node}" for node in range(20)]
    shapes = [
        demand(container(cores=cores, memory=memory, number=number), node_policy=policy)
        for cores, memory in ((10, 1024), (0, 8000), (50, 12000), (100, 0))
        for number in (1, 2)
        for policy in ("none", "binpack", "spread")
    ]
    living: dict[str, Holding] = {}
    refused = 0
    for number in range(1000):
        if living and chance.random() < 0.4:
            uid = chance.choice(sorted(living))
            assert book.release(uid) == living.pop(uid)
        sample = chance.sample(names, 8)
        choice = book.choose(chance.choice(shapes), sample)
        if choice.holding is None:
            refused += 1
            continue
        living[f"p{number}"] = choice.holding
        book.hold(f"p{number}", choice.holding)
        sums: dict[str, list[int]] = {}
        for holding in living.values():
            for card in holding.cards[0]:
                found = sums.setdefault(card.uuid, [0, 0, 0])
                for part, amount in enumerate((1, card.memory_mib, card.cores_percent)):
                    found[part] += amount
        for slots, memory, cores in sums.values():
            assert slots <= 10
            assert memory <= MEMORY_MIB
            assert cores <= 100
    assert refused > 20  # it was full now and then


@pytest.mark.parametrize("policy", ["none", "binpack", "spread"])
def test_nodes_that_are_passed_over_as_equal_change_no_choice(policy: str) -> None:
    """The choice is that of the definition: of all Nodes on which the pod fits, the one with the
    best rank; of equal ones the first by name with a policy, else the first that is named.
    """
    chance, names = random.Random(4), [f"n{node}" for node in range(12)]
    for _ in range(40):
        book, wanted = book_of(12), demand(container(cores=30, memory=1024), node_policy=policy)
        for node in range(12):
            for card in range(chance.randrange(3)):
                cores = chance.choice([20, 80])
                book.hold(f"p{node}-{card}", held(node, (card, cores, 1024)))
        chance.shuffle(names)
        fitting, reasons = book.ranks(wanted, names)
        order = sorted(fitting) if policy != "none" else list(fitting)
        best = max(order, key=lambda name: fitting[name], default="")
        choice = book.choose(wanted, names)
        assert (choice.node, choice.reasons) == (best, reasons)


def test_a_pod_that_names_many_cards_is_compared_with_each_kind_of_node_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 UUIDs and 64 product names on 16,000 cards would hold up the extender for seconds."""
    places: list[object] = []

    def counted(*arguments: Any) -> Any:
        places.append(arguments)
        return allocate(*arguments)

    monkeypatch.setattr("vgpu_agent.placement.nodes.book.allocate", counted)
    book = book_of(50)
    wanted = demand(
        container(cores=10, memory=1024),
        include_uuid=",".join(
            [uuid(7, 1), uuid(8, 0), *(f"gpu-{each:050d}" for each in range(60))]
        ),
    )
    choice = book.choose(wanted, [f"n{node}" for node in range(50)])
    assert (choice.node, choice.holding) == ("n7", held(7, (1, 10, 1024)))
    assert set(choice.reasons) == {f"n{node}" for node in range(50)} - {"n7", "n8"}
    assert set(choice.reasons.values()) == {Reason.DeviceUUIDMismatch}
    assert len(places) <= 4  # those without a named card, those with the one or the other, and n7


def test_a_survey_compares_a_demand_with_a_few_states_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant's pod with many containers would keep the extender from all other pods for seconds.
    What was compared is known to the next survey.
    """
    monkeypatch.setattr("vgpu_agent.placement.nodes.book._MAX_SURVEYED", 4)
    book, twice = book_of(5), demand(container(cores=95), container(cores=95))
    for node in range(5):  # five states, and no Node has room for both containers
        book.hold(f"uid-{node}", held(node, (0, 10, node + 1)))
    surveys = [book.survey(twice, []) for _ in range(3)]
    assert [each.may_fit for each in surveys] == [True, True, False]
    assert surveys[2].reasons == surveys[0].reasons != ()


def test_verdicts_about_states_that_are_gone_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pod that comes or goes makes a new state of its Node. An extender that runs for weeks
    would keep thousands for each size of pod, although there are few Nodes.
    """
    monkeypatch.setattr("vgpu_agent.placement.nodes.book._LEAST_OF_A_DEMAND", 4)
    book = book_of(3)
    for memory in range(1, 100):
        book.hold("uid", held(0, (0, 1, memory)))
        assert book.choose(SMALL, ["n0", "n1", "n2"]).node
        assert len(book._verdicts[SMALL]) <= 6 + 3
