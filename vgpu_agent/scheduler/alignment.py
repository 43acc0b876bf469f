"""Find the peers of a pod, and place it near them (vgpu-manager §5.7). Peers are the other pods of
its group: of its gang, or of its controller.

A pod asks for that by the annotation ``cross-pod-topology`` and a topology mode ``link`` or
``link-strict``. Its peers are known from the watch of pods and from promises, so this makes no
request to the API server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.placement.nodes.alignment import (
    ANYWHERE,
    ELSEWHERE,
    TOGETHER,
    Anchor,
    anchor_of,
    choose_aligned,
    survey_aligned,
    too_far,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.placement.nodes.book import Book, Choice, Survey
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.placement.nodes.reasons import Reason
    from vgpu_agent.pods import Pod
    from vgpu_agent.scheduler.known_pods import KnownPods
    from vgpu_agent.scheduler.metrics import Metrics

# How near a pod's cards are to those of its peers → the value of the metric's label. `ELSEWHERE`:
# on another Node, but in the peers' domain: on the same network rails or, where none are known, at
# the same position among the sets of NVLinked cards of their Node. `TOGETHER`: near a peer's on
# its Node.
_RESULTS = {ANYWHERE: "not_aligned", ELSEWHERE: "same_domain", TOGETHER: "same_node"}


class Alignment:
    """The placement of pods beside their peers; see the module. No state of its own."""

    def __init__(
        self, book: Book, known_pods: KnownPods, number_resource: str, metrics: Metrics
    ) -> None:
        """Build it.

        Args:
            book: the cards of all Nodes.
            known_pods: what is known of pods.
            number_resource: the resource that a pod must ask for to get cards.
            metrics: counts the results.
        """
        self._book, self._known_pods, self._number_resource = book, known_pods, number_resource
        self._metrics = metrics

    def choose(self, pod: Pod, demand: Demand, names: Iterable[str]) -> Choice:
        """Return the best of the named Nodes for a pod that holds nothing."""
        peers = self._peers(pod, demand)
        if not peers:
            return self._book.choose(demand, names)
        # peers that have no cards yet: cards with room for them, too, are preferred
        waiting = sum(self._is_waiting(uid) for uid in peers)
        choice, nearness = choose_aligned(self._book, demand, list(names), peers, waiting)
        # Peers that do not wait may have no cards either: those that ask for none.
        if choice.node and any(self._book.holding(uid) is not None for uid in peers):
            self._metrics.count_aligned(_RESULTS[nearness])
        return choice

    def survey(self, pod: Pod, demand: Demand, call_reasons: Iterable[Reason]) -> Survey:
        """Tell whether any Node of the cluster may fit a pod, and why the others do not.
        ``call_reasons`` are those of the Nodes in kube-scheduler's call. For a demand that names
        cards by UUID, the answer has only these, and says that other Nodes may fit.
        """
        return survey_aligned(self._book, demand, self._peers(pod, demand), call_reasons)

    def too_far(self, pod: Pod, demand: Demand, names: Iterable[str]) -> set[str]:
        """Return those of the named Nodes that a pod must not go to, because it would be too far
        from its peers there. According to the book, each of them has room for the pod, and the pod
        holds nothing.
        """
        return too_far(self._book, demand, names, self._peers(pod, demand))

    def anchor(self, pod: Pod, demand: Demand) -> Anchor:
        """Return where the peers of a pod are; an empty anchor where that does not matter."""
        return anchor_of(self._book, self._peers(pod, demand))

    def _peers(self, pod: Pod, demand: Demand) -> Sequence[str]:
        # not asked for, or the facts that only schedulers use could not be read
        if not demand.aligned or pod.scheduling is None:
            return ()
        return self._known_pods.peers(pod.uid, pod.scheduling.group)

    def _is_waiting(self, uid: str) -> bool:
        """Tell whether a pod asks for cards and has none yet."""
        known = self._known_pods.get(uid)
        if known is None or known.node or self._book.holding(uid) is not None:
            return False
        # `requests`: pairs of a resource and its amount
        return any(name == self._number_resource for name, _ in known.facts.requests or ())
