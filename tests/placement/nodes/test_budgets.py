"""PodDisruptionBudgets, as a scheduler counts victims against them."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu_agent.placement.nodes.budgets import Budget, Budgets, Requirement, Selector
from vgpu_agent.pods import SchedulingFacts


def facts(name: str = "a", namespace: str = "team", **labels: str) -> SchedulingFacts:
    """A pod with labels."""
    return SchedulingFacts(namespace, name, labels=tuple(sorted(labels.items())))


def budget(allowed: int, selector: Selector | None, **more: Any) -> Budget:
    """A budget of the namespace ``team``."""
    return Budget("team", more.pop("name", "b"), selector, allowed, **more)


WEB = Selector((("app", "web"),))


@pytest.mark.parametrize(
    ("selector", "labels", "matches"),
    [
        (WEB, {"app": "web", "x": "y"}, True),
        (WEB, {"app": "db"}, False),
        (WEB, {}, False),
        (Selector(), {}, True),
        (Selector((), (Requirement("app", "In", frozenset({"web", "db"})),)), {"app": "db"}, True),
        (Selector((), (Requirement("app", "In", frozenset({"web"})),)), {}, False),
        (Selector((), (Requirement("app", "NotIn", frozenset({"web"})),)), {}, True),
        (Selector((), (Requirement("app", "NotIn", frozenset({"web"})),)), {"app": "web"}, False),
        (Selector((), (Requirement("app", "Exists"),)), {"app": ""}, True),
        (Selector((), (Requirement("app", "DoesNotExist"),)), {"app": ""}, False),
        (Selector((), (Requirement("app", "DoesNotExist"),)), {}, True),
        (Selector((), (Requirement("app", "Nonsense"),)), {"app": "web"}, False),
    ],
)
def test_selectors(selector: Selector, labels: dict[str, str], matches: bool) -> None:
    """Those of metav1.LabelSelector."""
    assert selector.matches(labels) is matches


def test_the_pods_beyond_the_number_are_too_many() -> None:
    """In their order, each against all budgets that select it."""
    budgets = Budgets()
    budgets.put(budget(1, WEB))
    pods = [facts("a", app="web"), facts("b", app="db"), facts("c", app="web")]
    assert budgets.violating(pods) == {2}
    assert budgets.violating(reversed(pods)) == {2}
    budgets.put(budget(0, Selector(), name="all"))
    assert budgets.violating(pods) == {0, 1, 2}
    budgets.forget("team/all")
    budgets.put(budget(2, WEB))
    assert budgets.violating(pods) == set()


def test_other_namespaces_and_missing_selectors_concern_nobody() -> None:
    """A null selector selects no pod, an empty one all of the namespace."""
    budgets = Budgets()
    budgets.put(budget(0, None))
    assert budgets.violating([facts(app="web")]) == set()
    budgets.put(budget(0, Selector()))
    assert budgets.violating([facts(app="web", namespace="other"), facts()]) == {1}


def test_a_pod_whose_eviction_is_counted_is_not_counted_again() -> None:
    """The disruption controller is behind; the number is lower already."""
    budgets = Budgets()
    budgets.put(budget(0, WEB, disrupted=frozenset({"a"})))
    assert budgets.violating([facts("a", app="web"), facts("b", app="web")]) == {1}
