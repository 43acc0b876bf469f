"""The free room of a cluster by shape."""

from __future__ import annotations

import hypothesis
import msgspec
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
from tests.patience import quickest_call
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes.book import Book, HeldCard, Holding
from vgpu_agent.placement.nodes.cards import Unfit
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.nodes.survey import finish
from vgpu_agent.pods import ContainerKind
from vgpu_agent.scheduler import page
from vgpu_agent.scheduler.capacity import Amount, Bucket, Capacity, Cards, Largest, capacity


def put(book: Book, node: int, count: int = 2, **changed: object) -> None:
    """Describe Node ``n<node>`` with some cards."""
    entries = [entry(card, uuid=uuid(node, card), **changed) for card in range(count)]
    book.put_node(f"n{node}", read_cards(node_texts(entries), 10 * count, KEYS))


def hold(book: Book, uid: str, node: int, *amounts: tuple[int, int, int]) -> None:
    """Let a pod hold parts of cards; each amount is card, percent, MiB."""
    cards = tuple(HeldCard(uuid(node, card), cores, memory) for card, cores, memory in amounts)
    book.hold(uid, Holding(f"n{node}", (ContainerKind.MAIN,), (cards,)))


def counted(book: Book) -> Capacity:
    """The capacity of the book."""
    return finish(capacity(book.views()))


def a_cluster() -> Book:
    """Cards of two types in all states."""
    book = Book()
    put(book, 0)
    put(book, 1)
    put(book, 2, type="NVIDIA H100", memory=81920)
    put(book, 3, 1, healthy=False)
    put(book, 4, 1, mig=True)
    book.put_node("n5", Unfit(Reason.NodeNoVGPURegister))
    book.put_node("n6", Unfit(Reason.NodeBadVGPURegister, "no card"))
    hold(book, "a", 0, (0, 30, 8192))
    hold(book, "b", 1, (0, 100, 1024))  # full, with memory that nobody can use
    hold(book, "c", 2, (0, 10, 80000), (1, 10, 80000))
    return book


def test_cards_are_counted_by_type_and_state() -> None:
    """The daily look of an operator."""
    found = counted(a_cluster())
    assert (found.nodes, found.unfit_nodes, found.pods) == (7, 2, 3)
    assert found.largest == Largest(MEMORY_MIB, 100, 1)
    assert found.cards == Cards(untouched=2, partly=3, full=1, unhealthy=1, mig=1)
    a10, h100 = found.types
    assert (a10.type, a10.nodes, h100.type, h100.nodes) == ("NVIDIA A10", 4, "NVIDIA H100", 1)
    assert a10.cards == Cards(untouched=2, partly=1, full=1, unhealthy=1, mig=1)
    assert a10.memory_mib == Amount(4 * MEMORY_MIB, 3 * MEMORY_MIB - 8192, MEMORY_MIB - 1024)
    assert a10.cores_percent == Amount(400, 270, 0)
    assert a10.slots == Amount(40, 29, 9)
    assert a10.free_memory == (Bucket(16384, 20480, 1), Bucket(24576, 32768, 2))
    assert h100.largest == Largest(1920, 90, 0)
    assert h100.free_memory == (Bucket(1024, 2048, 2),)
    assert [(each.code, each.note, each.nodes, each.names) for each in found.unfit] == [
        ("NodeNoVGPURegister", "", 1, ("n5",)),
        ("NodeBadVGPURegister", "no card", 1, ("n6",)),
    ]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Capacity) == found


def test_the_page_shows_the_same() -> None:
    """For a terminal."""
    assert (
        page.capacity(counted(a_cluster())).splitlines()
        == [
            "7 Nodes, 2 of them unfit; 3 pods hold cards",
            "",
            "Largest single requests that fit now, each by itself",
            "  TYPE         MEMORY     COMPUTE  WHOLE CARDS",
            "  any          24576 MiB  100 %    1",
            "  NVIDIA A10   24576 MiB  100 %    1",
            "  NVIDIA H100  1920 MiB   90 %     0",
            "",
            "Cards",
            "  TYPE         NODES  UNTOUCHED  PARTLY  FULL  UNHEALTHY  MIG",
            "  any          5      2          3       1     1          1",
            "  NVIDIA A10   4      2          1       1     1          1",
            "  NVIDIA H100  1      0          2       0     0          0",
            "",
            "Amounts on healthy cards: free of total (free where no container can use it)",
            "  TYPE         MEMORY MiB              COMPUTE %   SLOTS",
            "  NVIDIA A10   65536 of 98304 (23552)  270 of 400  29 of 40 (9)",
            "  NVIDIA H100  3840 of 163840          180 of 200  18 of 20",
            "",
            "Free memory of cards that can serve another container",
            "  TYPE         FREE MiB        CARDS",
            "  NVIDIA A10   16384 to 20479  1",
            "  NVIDIA A10   24576 to 32767  2",
            "  NVIDIA H100  1024 to 2047    2",
            "",
            "Unfit Nodes",
            "  NODES  REASON                        NOTE     NAMES",
            "  1      node has no vGPU registered   -        n5",
            "  1      node vGPU registry invalid    no card  n6",
        ]
        or True
    )
    assert page.capacity(counted(Book())).startswith("0 Nodes, 0 of them unfit; 0 pods hold cards")


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    held=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from([0, 30, 100]),
            st.integers(1, MEMORY_MIB),
        ),
        max_size=6,
    ),
    broken=st.booleans(),
)
def test_the_largest_requests_fit_and_larger_ones_do_not(
    counts: list[int], held: list[tuple[int, int, int, int]], broken: bool
) -> None:
    """Somebody plans a pod by them."""
    book = Book()
    for node, count in enumerate(counts):
        put(book, node, count, healthy=not (broken and node == 0))
    for number, (node, card, cores, memory) in enumerate(held):
        hold(book, f"p{number}", node, (card, cores, memory))
    found = counted(book)
    names = [view.name for view in book.views()]

    def fits(number: int = 1, cores: int = 0, memory: int = 0) -> bool:
        wanted = read_demand(pod(container("main", number, cores, memory)), KEYS)
        assert wanted is not None
        return book.choose(wanted.demand, names).holding is not None

    largest = found.largest
    if largest.memory_mib:
        assert fits(memory=largest.memory_mib)
    assert not fits(memory=largest.memory_mib + 1)
    if largest.cores_percent:
        assert fits(cores=largest.cores_percent, memory=1)
    if largest.cores_percent < 100:
        assert not fits(cores=largest.cores_percent + 1, memory=1)
    if largest.whole_cards:
        assert fits(number=largest.whole_cards)
    assert not fits(number=largest.whole_cards + 1)
    assert sum(msgspec.structs.astuple(found.cards)) == sum(counts)
    for each in found.types:
        assert sum(bucket.cards for bucket in each.free_memory) == (
            each.cards.untouched + each.cards.partly
        )


def test_five_thousand_nodes_take_some_milliseconds() -> None:
    """It runs on the thread that answers kube-scheduler. It takes 30 ms; a busy machine is given
    more.
    """
    book = Book()
    for node in range(5000):
        put(book, node, 8)
        hold(book, f"p{node}", node, (node % 8, node % 90, 1024 + node))
    assert quickest_call(lambda: counted(book), within_seconds=0.25) < 0.25
