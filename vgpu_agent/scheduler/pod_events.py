"""The extender's events on pods, which `kubectl describe pod` shows, with vgpu-manager's reasons
(vgpu-manager §5.2).

A pod that fits nowhere is filtered again and again, each time with another sample of the Nodes. So
a pod gets at most one event a minute for each reason. The events about its bind have no such limit.

An event costs the API server as much as a Binding. So while many pods are bound at once, the events
about bound pods wait in a queue: they must not delay the Bindings. The event that a Node was found
is left out then, because the event about the bind names the Node, too.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import listed, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vgpu_agent.cluster.events import Events
    from vgpu_agent.placement.nodes.book import Holding
    from vgpu_agent.placement.nodes.reasons import Reason
    from vgpu_agent.pods import Pod

MATCHED, FAILED, INVALID = "FilteringSucceed", "FilteringFailed", "ResourceInvalid"
FALLBACK, POLICY_INVALID = "TopologyFallback", "PolicyInvalid"
NOT_PREEMPTED, GANG_DISRUPTED = "PreemptionFailed", "GangDisruptedByPreemption"
BOUND, NOT_BOUND = "BindingSucceed", "BindingFailed"
REPEATED_SECONDS = 60.0
# The rate limit of events about bound pods: so many at once, and then so many a second. When more
# than `_MAX_WAITING` wait, the oldest are dropped.
BOUND_AT_ONCE, BOUND_A_SECOND = 20, 10
_MAX_WAITING = 10_000
_NAMES = 5  # of Nodes, for each reason, or of groups
_GANG_CHARACTERS = 80
_MAX_REMEMBERED = 10_000  # times of events, each of one pod and reason


class PodEvents:
    """The events about pods, raised in Kubernetes.

    State: the time of the last event of each pod and reason; the events about bound pods that
    wait, and the time from which on the next one may be raised.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: collections.deque[tuple[Pod, str]] = collections.deque(maxlen=_MAX_WAITING)
        self._next_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._last_raised: collections.OrderedDict[tuple[str, str], float] = (
            collections.OrderedDict()
        )

    def fits_nowhere(self, pod: Pod, reasons: Mapping[str, Reason]) -> None:
        """Say why a pod fits on no Node; ``reasons`` are by Node."""
        self._raise_if_due(pod, FAILED, lambda: summary(reasons))

    def invalid(self, pod: Pod, text: str) -> None:
        """Say that no Node can ever serve a pod's request."""
        self._raise_if_due(pod, INVALID, lambda: text)

    def policy_invalid(self, pod: Pod, texts: Sequence[str]) -> None:
        """Say which policies of a pod are unknown: the words in its annotations, such as
        ``binpack``, for how its Node and cards are chosen. ``texts`` has a sentence for each.
        """
        self._raise_if_due(pod, POLICY_INVALID, lambda: "; ".join(texts))

    def matched(self, pod: Pod, node: str) -> None:
        """Say on which Node cards are reserved for a pod, unless many pods are being bound."""
        now = asyncio.get_running_loop().time()
        if self._timer is None and self._next_at <= now and self._is_due(pod, MATCHED):
            self._events.raise_event(pod, MATCHED, f'Successfully matched node "{node}"', "Normal")
            self._spend(now)

    def not_preempted(self, pod: Pod, nodes: int) -> None:
        """Say that a preemption would make room for a pod on none of the Nodes, of which there are
        ``nodes``.
        """
        self._raise_if_due(
            pod,
            NOT_PREEMPTED,
            lambda: (
                f"preemption: 0/{nodes} nodes are available: on none of them would the pod get "
                "its cards if all pods that may go for it went"
            ),
        )

    def gangs_disrupted(self, pod: Pod, gangs: Collection[str]) -> None:
        """Say which groups may lose pods to a pod that preempts; ``gangs`` are ``namespace/name``.
        Groups of other namespaces are only counted: names there are not for this pod's owner.
        """
        self._raise_if_due(pod, GANG_DISRUPTED, lambda: _disruption(pod.namespace, gangs))

    def fell_back(self, pod: Pod, node: str, mode: str, fallback: str) -> None:
        """Say that a pod's topology mode could not be followed, and what its cards have instead of
        the links or the NUMA node that ``mode`` asks for (``fallback``).
        """
        self._raise_if_due(pod, FALLBACK, lambda: f"{mode} is not possible on {node}: {fallback}")

    def bound(self, pod: Pod, holding: Holding, numbers: Mapping[str, int]) -> None:
        """Say which cards a pod has got; ``numbers`` maps UUIDs of cards to their numbers."""
        cards = "; ".join(
            f"GPU {numbers.get(card.uuid, '?')} ({card.uuid}): "
            f"{f'{card.cores_percent} %' if card.cores_percent else 'no limit'} of compute, "
            f"{card.memory_mib} MiB of memory"
            for each in holding.cards  # the cards of each container
            for card in each
        )
        self._waiting.append((pod, f"Bound to {holding.node} with {cards}"))
        if self._timer is None:
            self._raise_waiting()

    def not_bound(self, pod: Pod, text: str) -> None:
        """Say why a pod was not bound."""
        self._events.raise_event(pod, NOT_BOUND, text)

    def _raise_waiting(self) -> None:
        """Raise the event that has waited longest, if the rate limit allows it; set a timer for the
        others.
        """
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        if self._waiting and self._next_at <= now:
            pod, text = self._waiting.popleft()
            self._events.raise_event(pod, BOUND, text, "Normal")
            self._spend(now)
        if self._waiting:
            self._timer = loop.call_at(self._next_at, self._raise_waiting)

    def _spend(self, now: float) -> None:
        """Count one event against the rate limit."""
        # after a pause, `BOUND_AT_ONCE` events may follow each other at once
        earliest = now - BOUND_AT_ONCE / BOUND_A_SECOND
        self._next_at = max(self._next_at, earliest) + 1 / BOUND_A_SECOND

    def _raise_if_due(self, pod: Pod, reason: str, text: Callable[[], str]) -> None:
        if self._is_due(pod, reason):
            self._events.raise_event(pod, reason, text())

    def _is_due(self, pod: Pod, reason: str) -> bool:
        """Tell whether a pod may get an event with this reason now; then it counts as raised."""
        now, key = asyncio.get_running_loop().time(), (pod.uid, reason)
        if now - self._last_raised.get(key, float("-inf")) < REPEATED_SECONDS:
            return False
        self._last_raised[key] = now
        self._last_raised.move_to_end(key)
        if len(self._last_raised) > _MAX_REMEMBERED:
            self._last_raised.popitem(last=False)
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


def _disruption(namespace: str, gangs: Collection[str]) -> str:
    own = sorted(gang for gang in gangs if gang.startswith(f"{namespace}/"))
    groups = [listed([quoted(gang, _GANG_CHARACTERS) for gang in own], _NAMES)] if own else []
    if others := len(gangs) - len(own):
        groups.append(f"{others} of other namespaces")
    return (
        "to make room for this pod, pods of groups may end that belong together: "
        f"{' and '.join(groups)}; what is left of such a group may have to start anew"
    )
