"""A demand against all Nodes: reasons, how many pods fit, and what would fit instead."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import (
    KEYS,
    MEMORY_MIB,
    container,
    entry,
    node_texts,
    pod,
    uuid,
)
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes import survey
from vgpu_agent.placement.nodes.allocation import Refusal
from vgpu_agent.placement.nodes.book import Book, HeldCard, Holding
from vgpu_agent.placement.nodes.cards import Unfit
from vgpu_agent.placement.nodes.demand import Demand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.nodes.survey import Change, finish
from vgpu_agent.pods import ContainerKind, PodContainer


def demand(*containers: PodContainer, **words: str) -> Demand:
    """The demand of a pod with these containers and policies."""
    found = read_demand(pod(*containers, **words), KEYS)
    assert found is not None
    return found.demand


def put(book: Book, node: int, count: int = 2, **changed: object) -> None:
    """Describe Node ``n<node>`` with some cards."""
    entries = [entry(card, uuid=uuid(node, card), **changed) for card in range(count)]
    book.put_node(f"n{node}", read_cards(node_texts(entries), 10 * count, KEYS))


def hold(book: Book, uid: str, node: int, *amounts: tuple[int, int, int]) -> None:
    """Let a pod hold parts of cards; each amount is card, percent, MiB."""
    cards = tuple(HeldCard(uuid(node, card), cores, memory) for card, cores, memory in amounts)
    book.hold(uid, Holding(f"n{node}", (ContainerKind.MAIN,), (cards,)))


def test_a_view_does_not_change_with_the_book() -> None:
    """The work on it takes longer than the event loop may be held up."""
    book = Book()
    put(book, 0)
    hold(book, "a", 0, (0, 10, 1024))
    (view,) = book.views()
    hold(book, "b", 0, (1, 100, MEMORY_MIB))
    book.release("a")
    assert view.state is not None
    assert view.state.taken == ((1, 1024, 10), (0, 0, 0))
    assert list(view.holdings) == ["a"]
    assert book.holding("a") is None
    assert book.holding("b") is not None


def test_the_note_about_a_node_is_kept_for_people() -> None:
    """The phrase alone does not say which text is wrong."""
    book = Book()
    book.put_node("n0", Unfit(Reason.NodeBadVGPURegister, "no card"))
    (view,) = book.views()
    assert view.unfit == Unfit(Reason.NodeBadVGPURegister, "no card")
    assert view.place(demand()) == Refusal(Reason.NodeBadVGPURegister)


def test_nodes_alike_are_compared_once() -> None:
    """A cluster has a handful of kinds of Nodes, and thousands of Nodes."""
    book = Book()
    for node in range(50):
        put(book, node)
    hold(book, "a", 3, (0, 60, 1024), (1, 60, 1024))
    groups = finish(survey.grouped(demand(container(cores=50, memory=1)), book.views()))
    assert [(len(group.views), group.fits) for group in groups] == [(49, True), (1, False)]
    assert groups[1].refusal == Refusal(
        Reason.InsufficientVGPUCore, {Reason.InsufficientVGPUCore: 2}
    )


def test_cards_have_reasons_although_the_node_is_refused_as_a_whole() -> None:
    """The cheap checks refuse a Node without a look at its cards."""
    book = Book()
    put(book, 0)
    hold(book, "a", 0, (0, 100, 1024), (1, 10, MEMORY_MIB))
    (group,) = finish(survey.grouped(demand(container(number=2, cores=100)), book.views()))
    assert group.refusal == Refusal(Reason.InsufficientVGPUCore)
    assert group.cards == {Reason.InsufficientVGPUMemory: 2}
    wanted = demand(container(memory=1), exclude_type="a10")
    (group,) = finish(survey.grouped(wanted, book.views()))
    assert group.cards == {Reason.DeviceTypeMismatch: 2}  # and not also that one is full


def test_counting_stops_when_the_time_is_over() -> None:
    """A cluster may have room for hundreds of thousands of small pods."""
    book = Book()
    put(book, 0)
    wanted = demand(container(number=2, cores=1, memory=1))
    groups = finish(survey.grouped(wanted, book.views()))
    calls = iter([False, False, True])
    assert finish(survey.copies(groups, wanted, lambda: next(calls))) == survey.Copies(
        3, is_exact=False
    )
    found = finish(survey.changes(demand(container(number=3)), book.views(), lambda: True))
    assert found == survey.Changes((), is_complete=False)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (demand(container(memory=MEMORY_MIB)), Change("memory_units", MEMORY_MIB - 1024, 1)),
        (demand(container(cores=95, memory=1)), Change("cores_percent", 90, 1)),
        (demand(container(number=3, memory=1)), Change("card_count", 2, 1)),
        (demand(container(memory=1), include_type="h100"), Change("types", "", 1)),
        (demand(container(memory=1), exclude_uuid="gpu-"), Change("uuids", "", 1)),
        (demand(container(memory=1), memory_policy="virtual"), Change("memory_policy", "", 1)),
        (
            demand(container(number=2, memory=1), topology_mode="link-strict"),
            Change("topology_mode", "link", 1),
        ),
    ],
)
def test_one_change_with_which_the_pod_would_fit(wanted: Demand, expected: Change) -> None:
    """The largest amount that fits, or the condition that is in the way."""
    book = Book()
    put(book, 0)
    hold(book, "a", 0, (0, 10, 1024), (1, 10, 1024))
    assert expected in finish(survey.changes(wanted, book.views())).found


_containers = st.lists(
    st.builds(
        container,
        name=st.just("c"),
        number=st.integers(1, 3),
        cores=st.sampled_from([0, 10, 50, 100]),
        memory=st.sampled_from([0, 1024, 8000, MEMORY_MIB]),
        kind=st.sampled_from(ContainerKind),
    ),
    min_size=1,
    max_size=3,
)
_words = st.fixed_dictionaries(
    {},
    optional={
        "node_policy": st.sampled_from(["binpack", "spread"]),
        "device_policy": st.sampled_from(["binpack", "spread"]),
        "topology_mode": st.sampled_from(["numa", "numa-strict", "link", "link-strict"]),
        "memory_policy": st.sampled_from(["virtual", "physical"]),
        "include_type": st.sampled_from(["a10", "h100"]),
        "exclude_uuid": st.sampled_from([uuid(0, 0), uuid(1, 1)]),
    },
)
_held = st.tuples(
    st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 30, 100]), st.integers(1, MEMORY_MIB)
)


def _cluster(counts: list[int], held: list[tuple[int, int, int, int]], kind: str) -> Book:
    """Nodes of three kinds, and pods on the first four."""
    book = Book()
    for node, count in enumerate(counts):
        put(book, node, count, type=kind if node == 1 else "NVIDIA A10", healthy=node != 2)
    book.put_node("bad", Unfit(Reason.NodeNoVGPURegister))
    for number, (node, card, cores, memory) in enumerate(held):
        hold(book, f"p{number}", node, (card, cores, memory))
    return book


def test_as_many_pods_fit_as_the_book_places_one_after_the_other() -> None:
    """Somebody starts that many because of it. All kinds of demands, on Nodes of which some are
    alike.
    """
    chance, counts, links = random.Random(16), list[int](), {(0, 1): [1, 8]}
    for _ in range(150):
        book, size = Book(), chance.randint(1, 3)
        for node in range(6):
            entries = [
                entry(
                    card,
                    uuid=uuid(node, card),
                    type=chance.choice(["NVIDIA A10", "NVIDIA A10", "NVIDIA H100"]),
                    number=3,
                )
                for card in range(size)
            ]
            texts = node_texts(entries, links if node % 2 and size > 1 else None)
            book.put_node(f"n{node}", read_cards(texts, 10, KEYS))
        for number in range(chance.randint(0, 4)):
            hold(
                book,
                f"p{number}",
                chance.randrange(6),
                (chance.randrange(size), chance.choice([0, 30, 100]), chance.choice([512, 9000])),
            )
        wanted = demand(
            *(
                container(
                    f"c{number}",
                    number=chance.choice([1, 1, 2]),
                    cores=chance.choice([0, 10, 40, 100]),
                    memory=chance.choice([0, 1024, 8000]),
                    kind=chance.choice(list(ContainerKind)),
                )
                for number in range(chance.choice([1, 1, 1, 2]))
            ),
            **chance.choice(
                [
                    {},
                    {},
                    {"include_type": "a10"},
                    {"exclude_uuid": uuid(0, 0)},
                    {"topology_mode": "link-strict"},
                    {"topology_mode": "link", "node_policy": "binpack"},
                ]
            ),
        )
        names = [view.name for view in book.views()]
        groups = finish(survey.grouped(wanted, book.views()))
        found = finish(survey.copies(groups, wanted))
        placed = 0
        while (choice := book.choose(wanted, names)).holding is not None:
            book.hold(f"copy{placed}", choice.holding)
            placed += 1
        assert found == survey.Copies(placed, is_exact=True)
        counts.append(placed)
    assert sum(each > 6 for each in counts) > 30  # more than one on a Node, now and then
    assert 0 in counts


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    containers=_containers,
    words=_words,
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    held=st.lists(_held, max_size=6),
)
def test_reasons_and_numbers_are_those_of_the_book(
    containers: list[PodContainer],
    words: dict[str, str],
    counts: list[int],
    held: list[tuple[int, int, int, int]],
) -> None:
    """People compare the table with the events that come from filter. As many pods as promised are
    placed by the book one after the other, and no more.
    """
    book = _cluster(counts, held, "NVIDIA H100")
    wanted = demand(*containers, **words)
    names = [view.name for view in book.views()]
    groups = finish(survey.grouped(wanted, book.views()))
    reasons = {
        view.name: group.refusal.reason if group.refusal else None
        for group in groups
        for view in group.views
    }
    assert sorted(reasons) == names
    for name in names:
        assert book.choose(wanted, [name]).reasons.get(name) == reasons[name]
    found = finish(survey.copies(groups, wanted))
    for number in range(found.count):
        choice = book.choose(wanted, names)
        assert choice.holding is not None
        book.hold(f"copy{number}", choice.holding)
    assert book.choose(wanted, names).holding is None
    assert found.is_exact


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    containers=_containers,
    words=_words,
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    held=st.lists(_held, max_size=6),
)
def test_a_proposed_change_is_true(
    containers: list[PodContainer],
    words: dict[str, str],
    counts: list[int],
    held: list[tuple[int, int, int, int]],
) -> None:
    """Someone edits a pod at night because of it."""
    book = _cluster(counts, held, "NVIDIA H100")
    wanted = demand(*containers, **words)
    names = [view.name for view in book.views()]
    hypothesis.assume(book.choose(wanted, names).holding is None)
    for change in finish(survey.changes(wanted, book.views())).found:
        changed = _changed(wanted, change)
        nodes = [name for name in names if book.choose(changed, [name]).node]
        assert len(nodes) == change.nodes > 0


def _changed(wanted: Demand, change: Change) -> Demand:
    if isinstance(change.value, int):
        return survey._capped(wanted, change.field, change.value)
    return next(demand for field, _, demand in survey._relaxed(wanted) if field == change.field)
