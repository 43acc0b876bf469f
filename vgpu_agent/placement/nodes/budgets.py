"""PodDisruptionBudgets: the disruptions that they allow, and preemption victims beyond that.

The disruption controller keeps the number of allowed disruptions in the budget's status, and
kube-scheduler counts victims against it. So does this module. An empty selector selects all pods of
the namespace, also those without labels (policy/v1). In older kube-schedulers it selects none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vgpu_agent.pods import SchedulingFacts


class Requirement(msgspec.Struct, frozen=True):
    """One of a selector's ``matchExpressions``."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Tell whether labels meet it; an unknown operator is met by none."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
        return False


class Selector(msgspec.Struct, frozen=True):
    """A selection of pods by their labels."""

    labels: tuple[tuple[str, str], ...] = ()
    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Tell whether it selects a pod with these labels."""
        return all(labels.get(key) == value for key, value in self.labels) and all(
            each.is_met(labels) for each in self.requirements
        )


class Budget(msgspec.Struct, frozen=True):
    """A PodDisruptionBudget.

    Attributes:
        namespace: of the object and of its pods.
        name: of the object.
        selector: of the pods; None selects none.
        allowed: the number of its pods that may be disrupted now (``disruptionsAllowed``).
        disrupted: names of pods whose eviction ``allowed`` includes already (``disruptedPods``).
    """

    namespace: str
    name: str
    selector: Selector | None
    allowed: int
    disrupted: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


class Budgets:
    """All budgets of a cluster.

    State: in memory, from the watch; and the budgets by the labels that they select.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, Budget]] = {}
        # the budgets that select pods of (namespace, labels)
        self._concerning: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Budget, ...]] = {}

    def put(self, budget: Budget) -> None:
        """Record a budget that is new or has changed."""
        self._by_namespace.setdefault(budget.namespace, {})[budget.key] = budget
        self._concerning.clear()

    def forget(self, key: str) -> None:
        """Forget a budget that was deleted."""
        self._by_namespace.get(key.partition("/")[0], {}).pop(key, None)
        self._concerning.clear()

    def violating(self, pods: Iterable[SchedulingFacts]) -> set[int]:
        """Return the positions of those pods whose loss, after that of all pods before them, is
        more than a budget allows.
        """
        count = self.count()
        return {place for place, pod in enumerate(pods) if not count.lose(pod)}

    def count(self) -> LossCount:
        """Return a new count of losses."""
        return LossCount(self)

    def of(self, pod: SchedulingFacts) -> Iterable[Budget]:
        """Yield the budgets that the loss of a pod counts against; none if it is being deleted,
        because it is lost already.
        """
        if pod.deleting or pod.namespace not in self._by_namespace:
            return ()
        key = (pod.namespace, pod.labels)
        found = self._concerning.get(key)
        if found is None:
            labels = dict(pod.labels)
            found = self._concerning[key] = tuple(
                budget
                for budget in self._by_namespace[pod.namespace].values()
                if budget.selector is not None and budget.selector.matches(labels)
            )
        return (budget for budget in found if pod.name not in budget.disrupted)


class LossCount:
    """Losses of pods, counted against budgets.

    State: what is left of each budget.
    """

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._left: dict[str, int] = {}

    def can_lose(self, pod: SchedulingFacts) -> bool:
        """Tell whether all budgets allow one more loss."""
        return all(
            self._left.get(budget.key, budget.allowed) > 0 for budget in self._budgets.of(pod)
        )

    def lose(self, pod: SchedulingFacts) -> bool:
        """Count a loss, also one that is not allowed; tell whether all budgets allow it."""
        allowed = True
        for budget in self._budgets.of(pod):
            left = self._left[budget.key] = self._left.get(budget.key, budget.allowed) - 1
            allowed = allowed and left >= 0
        return allowed
