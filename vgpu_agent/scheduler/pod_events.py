"""The extender's events on pods, which `kubectl describe pod` shows, with vgpu-manager's reasons
(vgpu-manager §5.2).

A pod that fits nowhere is filtered again and again, and each time another part of the Nodes is
shown; so it gets at most one such event in a minute.

An event costs the API server as much as a Binding. So while many pods are bound at once, the events
that tell so wait: they must not hold up the pods.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.cluster.events import Events
    from vgpu_agent.placement.nodes.book import Holding
    from vgpu_agent.placement.nodes.reasons import Reason
    from vgpu_agent.pods import Pod

FAILED, INVALID = "FilteringFailed", "ResourceInvalid"
FALLBACK = "TopologyFallback"
BOUND, NOT_BOUND = "BindingSucceed", "BindingFailed"
REPEATED_SECONDS = 60.0
# Of events that a pod was bound: so many at once, and then so many a second. Of more that wait, the
# oldest are dropped.
BOUND_AT_ONCE, BOUND_A_SECOND = 20, 10
_MAX_WAITING = 10_000
_NAMES = 5  # of Nodes, for each reason
_MAX_REMEMBERED = 10_000  # pods


class PodEvents:
    """Raises the events.

    State: when a pod was last told that it fits nowhere; events that a pod was bound, which wait,
    and from when on the next one may be raised.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: collections.deque[tuple[Pod, str]] = collections.deque(maxlen=_MAX_WAITING)
        self._next_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._told: collections.OrderedDict[str, float] = collections.OrderedDict()

    def fits_nowhere(self, pod: Pod, reasons: Mapping[str, Reason]) -> None:
        """Tell why no Node takes a pod; ``reasons`` has them by Node."""
        if self._is_due(pod):
            self._events.raise_event(pod, FAILED, summary(reasons))

    def invalid(self, pod: Pod, text: str) -> None:
        """Tell that a pod asks for what no Node can ever give."""
        if self._is_due(pod):
            self._events.raise_event(pod, INVALID, text)

    def fell_back(self, pod: Pod, node: str, mode: str, instead: str) -> None:
        """Tell that a pod's topology mode could not be followed."""
        self._events.raise_event(pod, FALLBACK, f"{mode} is not possible on {node}: {instead}")

    def bound(self, pod: Pod, holding: Holding, numbers: Mapping[str, int]) -> None:
        """Tell which cards a pod has got; ``numbers`` has the numbers of the Node's cards."""
        cards = "; ".join(
            f"GPU {numbers.get(card.uuid, '?')} ({card.uuid}): "
            f"{f'{card.cores_percent} %' if card.cores_percent else 'no limit'} of compute, "
            f"{card.memory_mib} MiB of memory"
            for each in holding.cards
            for card in each
        )
        self._waiting.append((pod, f"Bound to {holding.node} with {cards}"))
        if self._timer is None:
            self._raise_waiting()

    def not_bound(self, pod: Pod, text: str) -> None:
        """Tell why a pod was not bound."""
        self._events.raise_event(pod, NOT_BOUND, text)

    def _raise_waiting(self) -> None:
        """Raise the event that has waited longest, if it is time; come back for the others."""
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        if self._waiting and self._next_at <= now:
            pod, text = self._waiting.popleft()
            self._events.raise_event(pod, BOUND, text, "Normal")
            earliest = now - BOUND_AT_ONCE / BOUND_A_SECOND
            self._next_at = max(self._next_at, earliest) + 1 / BOUND_A_SECOND
        if self._waiting:
            self._timer = loop.call_at(self._next_at, self._raise_waiting)

    def _is_due(self, pod: Pod) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._told.get(pod.uid, float("-inf")) < REPEATED_SECONDS:
            return False
        self._told[pod.uid] = now
        self._told.move_to_end(pod.uid)
        if len(self._told) > _MAX_REMEMBERED:
            self._told.popitem(last=False)
        return True


def summary(reasons: Mapping[str, Reason]) -> str:
    """Return one sentence for all Nodes, the most frequent reason first."""
    nodes: dict[Reason, list[str]] = {}
    for name, reason in reasons.items():
        nodes.setdefault(reason, []).append(name)
    parts = []
    for reason, names in sorted(nodes.items(), key=lambda each: (-len(each[1]), each[0].name)):
        shown = ", ".join(names[:_NAMES])
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        parts.append(f"{len(names)} {reason.value} ({shown}{more})")
    return f"0/{len(reasons)} nodes are available: {', '.join(parts)}"
