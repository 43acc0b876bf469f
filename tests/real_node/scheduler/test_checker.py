"""The checker finds what it is there for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real_node.scheduler.checker import judge, linked_groups
from tests.real_node.scheduler.objects import bound_pods, container, node, node_name, uuid

_PRE = "nvidia.com/pre-allocated"


def _bound(name: str = "old", **changed: str) -> dict[str, Any]:
    made = next(bound_pods(1, 1, name))
    made["status"] = {"phase": "Pending"}
    made["metadata"]["annotations"] |= {
        f"nvidia.com/{key.replace('_', '-')}": text for key, text in changed.items()
    }
    return made


def test_what_is_right_has_no_problem() -> None:
    """A pod that has what it asks for."""
    found = judge([node(0)], [_bound()])
    assert (found.problems, found.bound, found.waiting) == ([], ["old-00000-0"], [])
    [(key, amounts)] = found.used.items()
    assert key == (node_name(0), uuid(0, 0))
    assert (amounts.slots, amounts.cores, amounts.memory) == (1, 20, 4096)


@pytest.mark.parametrize(
    ("pods", "problem"),
    [
        ([_bound(str(number)) for number in range(6)], "its pods take"),
        ([_bound(predicate_node="other")], "predicate-node is other"),
        ([_bound(pre_allocated=f"main[0_{uuid(0, 0)}_10_4096]")], "asks for"),
        ([_bound(pre_allocated=f"main[1_{uuid(0, 0)}_20_4096]")], "has no card 1"),
        ([_bound(pre_allocated=f"main[0_{uuid(1, 0)}_20_4096]")], "has no card 0"),
        ([_bound(pre_allocated=f"other[0_{uuid(0, 0)}_20_4096]")], "claims are for"),
        ([_bound(pre_allocated="")], "no claim"),
    ],
)
def test_what_is_wrong_is_named(pods: list[dict[str, Any]], problem: str) -> None:
    """Six pods of 20 % on one card, and pods with another claim than they ask for."""
    [found] = judge([node(0)], pods).problems
    assert problem in found


def test_an_init_container_counts_where_it_takes_more() -> None:
    """vgpu-manager §4.4: sidecars, and the larger of main containers and any init container."""
    made = _bound()
    spec = made["spec"]
    spec["containers"] = [container("main", 1, 20, 4096)]
    spec["initContainers"] = [
        container("prepare", 1, 50, 1024),
        container("side", 1, 5, 256, restartPolicy="Always"),
    ]
    card = f"0_{uuid(0, 0)}"
    made["metadata"]["annotations"][_PRE] = (
        f"prepare[{card}_50_1024];side[{card}_5_256];main[{card}_20_4096]"
    )
    found = judge([node(0)], [made])
    assert found.problems == []
    [amounts] = found.used.values()
    assert (amounts.slots, amounts.cores, amounts.memory) == (2, 55, 4352)


@pytest.mark.parametrize(
    ("joined", "groups"), [(False, [{0, 1, 2, 3}, {4, 5, 6, 7}]), (True, [set(range(8))])]
)
def test_links_are_read(joined: bool, groups: list[set[int]]) -> None:
    """Cards that only share a switch or a socket are not joined."""
    found = linked_groups(node(0, joined=joined))
    assert found == [{uuid(0, card) for card in group} for group in groups]


def test_a_card_without_links_is_alone() -> None:
    """A Node without the annotation has no links."""
    made = node(0, cards=2)
    del made["metadata"]["annotations"]["nvidia.com/node-device-topology"]
    assert linked_groups(made) == [{uuid(0, 0)}, {uuid(0, 1)}]
