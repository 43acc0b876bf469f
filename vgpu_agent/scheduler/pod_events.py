"""The extender's events on pods, which `kubectl describe pod` shows, with vgpu-manager's reasons
(vgpu-manager §5.2).

A pod that fits nowhere is filtered again and again, and each time another part of the Nodes is
shown. So a pod gets one event for each reason in a minute at most, except those of its bind.

An event costs the API server as much as a Binding. So while many pods are bound at once, the events
that tell so wait: they must not hold up the pods. That a Node was found is not told at all then,
because the event of the bind names it, too.
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
# Of events that a pod was bound: so many at once, and then so many a second. Of more that wait, the
# oldest are dropped.
BOUND_AT_ONCE, BOUND_A_SECOND = 20, 10
_MAX_WAITING = 10_000
_NAMES = 5  # of Nodes, for each reason, or of groups
_GANG_CHARACTERS = 80
_MAX_REMEMBERED = 10_000  # pods, each with one reason


class PodEvents:
    """Raises the events.

    State: when a pod was last told something; events that a pod was bound, which wait, and from
    when on the next one may be raised.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: collections.deque[tuple[Pod, str]] = collections.deque(maxlen=_MAX_WAITING)
        self._next_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._told: collections.OrderedDict[tuple[str, str], float] = collections.OrderedDict()

    def fits_nowhere(self, pod: Pod, reasons: Mapping[str, Reason]) -> None:
        """Tell why no Node takes a pod; ``reasons`` has them by Node."""
        self._tell(pod, FAILED, lambda: summary(reasons))

    def invalid(self, pod: Pod, text: str) -> None:
        """Tell that a pod asks for what no Node can ever give."""
        self._tell(pod, INVALID, lambda: text)

    def policy_invalid(self, pod: Pod, texts: Sequence[str]) -> None:
        """Tell which words of a pod mean nothing."""
        self._tell(pod, POLICY_INVALID, lambda: "; ".join(texts))

    def matched(self, pod: Pod, node: str) -> None:
        """Tell on which Node cards are kept for a pod, unless many pods are being bound."""
        now = asyncio.get_running_loop().time()
        if self._timer is None and self._next_at <= now and self._is_due(pod, MATCHED):
            self._events.raise_event(pod, MATCHED, f'Successfully matched node "{node}"', "Normal")
            self._spend(now)

    def not_preempted(self, pod: Pod, nodes: int) -> None:
        """Tell that on none of the Nodes a preemption would make room for a pod."""
        self._tell(
            pod,
            NOT_PREEMPTED,
            lambda: (
                f"preemption: 0/{nodes} nodes are available: on none of them the pod would get "
                "its cards if all pods went that may go for it"
            ),
        )

    def gangs_disrupted(self, pod: Pod, gangs: Collection[str]) -> None:
        """Tell which groups may lose pods to a pod that preempts; ``gangs`` are ``namespace/name``.
        Groups of other namespaces are only counted: names there are not for this pod's owner.
        """
        self._tell(pod, GANG_DISRUPTED, lambda: _disruption(pod.namespace, gangs))

    def fell_back(self, pod: Pod, node: str, mode: str, instead: str) -> None:
        """Tell that a pod's topology mode could not be followed."""
        self._tell(pod, FALLBACK, lambda: f"{mode} is not possible on {node}: {instead}")

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
            self._spend(now)
        if self._waiting:
            self._timer = loop.call_at(self._next_at, self._raise_waiting)

    def _spend(self, now: float) -> None:
        """Note that one of the events was raised of which so many are raised a second."""
        earliest = now - BOUND_AT_ONCE / BOUND_A_SECOND
        self._next_at = max(self._next_at, earliest) + 1 / BOUND_A_SECOND

    def _tell(self, pod: Pod, reason: str, text: Callable[[], str]) -> None:
        if self._is_due(pod, reason):
            self._events.raise_event(pod, reason, text())

    def _is_due(self, pod: Pod, reason: str) -> bool:
        now, key = asyncio.get_running_loop().time(), (pod.uid, reason)
        if now - self._told.get(key, float("-inf")) < REPEATED_SECONDS:
            return False
        self._told[key] = now
        self._told.move_to_end(key)
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


def _disruption(namespace: str, gangs: Collection[str]) -> str:
    own = sorted(gang for gang in gangs if gang.startswith(f"{namespace}/"))
    groups = [listed([quoted(gang, _GANG_CHARACTERS) for gang in own], _NAMES)] if own else []
    if others := len(gangs) - len(own):
        groups.append(f"{others} of other namespaces")
    return (
        "to make room for this pod, pods of groups may end that belong together: "
        f"{' and '.join(groups)}; what is left of such a group may have to start anew"
    )
