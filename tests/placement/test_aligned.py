"""The choice of whole GPUs for a container:
that of nvidia §6.1, and that of an independent search that tries everything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import hypothesis
import pytest
from hypothesis import strategies

from tests.patience import quickest_call
from vgpu_agent.errors import CapacityError
from vgpu_agent.model import Link
from vgpu_agent.placement.aligned import choose_group

Links = dict[tuple[str, str], Link]
PCI = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}  # nvidia §6.1


def gpus(count: int) -> list[str]:
    """g00, g01…"""
    return [f"g{number:02}" for number in range(count)]


def both_ways(pairs: Mapping[tuple[str, str], Link]) -> Links:
    """The links as the inventory has them."""
    return {**pairs, **{(other, one): link for (one, other), link in pairs.items()}}


def dgx1() -> Links:
    """Two CPUs with four GPUs each, in pairs behind a switch; NVLinks within each four, and one
    from each GPU to its peer opposite.
    """
    found = {}
    for one, other in itertools.combinations(range(8), 2):
        same_cpu, same_switch = one // 4 == other // 4, one // 2 == other // 2
        nvlinks = (2 if same_switch else 1) if same_cpu else int(other - one == 4)
        found[gpus(8)[one], gpus(8)[other]] = Link(
            10 if same_switch else 30 if same_cpu else 50, nvlinks
        )
    return both_ways(found)


def worth(group: Sequence[str], links: Links) -> int:
    """The score of a group."""
    return sum(
        PCI[links[pair].pci] + 100 * links[pair].nvlinks
        for pair in itertools.combinations(group, 2)
        if pair in links
    )


def divisions(left: Sequence[str], size: int) -> Iterator[list[tuple[str, ...]]]:
    """All divisions into as few groups as can be, of ``size`` GPUs at most."""
    if not left:
        yield []
        return
    first, others = left[0], left[1:]
    groups = -(-len(left) // size)
    for count in range(1, size + 1):
        if len(left) - count > size * (groups - 1):
            continue
        for more in itertools.combinations(others, count - 1):
            for rest in divisions([each for each in others if each not in more], size):
                yield [(first, *more), *rest]


@pytest.mark.parametrize(
    ("available", "required", "size", "expected"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), (), 1, (0,)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (), 2, (0, 1)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (), 4, (0, 1, 2, 3)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (5,), 2, (4, 5)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (6,), 4, (4, 5, 6, 7)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (0, 4), 2, (0, 4)),
        ((0, 2, 3, 5), (), 2, (2, 3)),
        ((0, 2, 3, 5), (), 1, (0,)),
        ((1, 2, 3), (), 1, (1,)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        ((3, 4), (), 0, ()),
    ],
)
def test_what_belongs_together_is_chosen_together(
    available: Sequence[int], required: Sequence[int], size: int, expected: Sequence[int]
) -> None:
    """nvidia:§6.1, eight GPUs on two CPUs: a pair behind one switch, the four of one CPU, a single
    one where it tears nothing apart.
    """
    names = gpus(8)
    found = choose_group(
        available=[names[each] for each in available],
        required=[names[each] for each in required],
        size=size,
        links=dgx1(),
    )
    assert found == [names[each] for each in expected]


def test_what_remains_counts_as_much_as_what_is_given() -> None:
    """The two closest GPUs are not given away when the other two would then be strangers."""
    a, b, c, d = gpus(4)
    links = both_ways(
        {
            (a, b): Link(50),
            (c, d): Link(50),
            (a, c): Link(10),
            (b, d): Link(10),
            (a, d): Link(50),
            (b, c): Link(0),
        }
    )
    assert choose_group(available=[a, b, c, d], required=[], size=2, links=links) == [a, c]


@pytest.mark.parametrize(
    ("closer", "farther"),
    [
        (Link(40), Link(50)),
        (Link(30), Link(40)),
        (Link(20), Link(30)),
        (Link(10), Link(20)),
        (Link(0), Link(10)),
        (Link(50, 1), Link(0)),
        (Link(50, 2), Link(0, 1)),
        (Link(50, 18), Link(0, 17)),
    ],
)
def test_one_link_is_worth_more_than_the_next(closer: Link, farther: Link) -> None:
    """nvidia:§6.1, the scores: 10 another CPU, 20 the same, 30, 40, 50 by bridge and switches, 60
    one board; 100 more for each NVLink.
    """
    a, b, c = gpus(3)
    links = both_ways({(a, b): farther, (a, c): closer, (b, c): farther})
    assert choose_group(available=[a, b, c], required=[], size=2, links=links) == [a, c]


@pytest.mark.parametrize(
    ("required", "size", "text"),
    [
        ((), 5, "5 GPUs are requested"),
        (("g09",), 2, "not available: g09"),
        (("g00", "g01"), 1, "1 GPUs are"),
    ],
)
def test_what_cannot_be_had_is_said(required: Sequence[str], size: int, text: str) -> None:
    """The caller answers with a simple pick then."""
    with pytest.raises(CapacityError, match=text):
        choose_group(available=gpus(4), required=required, size=size, links={})


def test_gpus_of_which_nothing_is_known_are_taken_in_order() -> None:
    """A GPU was lost while the links were read, or the driver does not tell:
    never an error (nvidia:D4).
    """
    assert choose_group(available=gpus(6), required=["g03"], size=2, links={}) == ["g00", "g03"]


@hypothesis.given(strategies.data())
def test_up_to_eight_gpus_there_is_no_better_choice(data: strategies.DataObject) -> None:
    """Against every division there is: the answer is a whole group of one that no other beats."""
    count = data.draw(strategies.integers(1, 7))
    names, size = gpus(count), data.draw(strategies.integers(1, count))
    link = strategies.builds(Link, strategies.sampled_from(sorted(PCI)), strategies.integers(0, 4))
    links = both_ways({pair: data.draw(link) for pair in itertools.combinations(names, 2)})
    required = data.draw(
        strategies.lists(strategies.sampled_from(names), unique=True, max_size=size)
    )
    found = tuple(choose_group(available=names, required=required, size=size, links=links))
    best = -1
    for division in divisions(names, size):
        if any(len(group) == size and set(required) <= set(group) for group in division):
            best = max(best, sum(worth(group, links) for group in division))
    with_found = max(
        sum(worth(group, links) for group in division)
        for division in divisions(names, size)
        if found in division
    )
    assert set(required) <= set(found)
    assert with_found == best


@pytest.mark.parametrize(("count", "seconds"), [(8, 0.02), (16, 0.1)])
def test_many_gpus_take_no_longer_than_kubelet_may_wait(count: int, seconds: float) -> None:
    """The replaced plugin needs tens of seconds for 16.
    The limits leave room for a slow machine.
    """
    names = gpus(count)
    pairs = itertools.combinations(range(count), 2)
    links = both_ways(
        {
            (names[one], names[other]): Link(10 * (1 + (one ^ other) % 5), (one + other) % 3)
            for one, other in pairs
        }
    )
    for size in (2, 3, 4, count // 2):
        choose = functools.partial(
            choose_group, available=names, required=[], size=size, links=links
        )
        assert len(choose()) == size
        assert quickest_call(choose, within_seconds=seconds) < seconds
