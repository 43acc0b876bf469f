"""Find the fellows of a pod, and place it near them (vgpu-manager §5.7).

A pod asks for that by the annotation ``cross-pod-topology`` beside a topology mode of links. Its
fellows are known from the watch of pods and from promises, so nothing is asked of the API server.
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

# Values of a label of `Metrics`.
_RESULTS = {ANYWHERE: "not_aligned", ELSEWHERE: "same_domain", TOGETHER: "same_node"}


class Alignment:
    """Places pods beside their fellows; see the module. No state of its own."""

    def __init__(self, book: Book, known: KnownPods, slots: str, metrics: Metrics) -> None:
        """Build it.

        Args:
            book: the cards of all Nodes.
            known: what is known of pods.
            slots: the resource that pods with cards ask for.
            metrics: results are counted there.
        """
        self._book, self._known, self._slots = book, known, slots
        self._metrics = metrics

    def choose(self, pod: Pod, demand: Demand, names: Iterable[str]) -> Choice:
        """Return the best of the named Nodes for a pod that holds nothing."""
        fellows = self._fellows(pod, demand)
        if not fellows:
            return self._book.choose(demand, names)
        waiting = sum(self._is_waiting(uid) for uid in fellows)
        choice, nearness = choose_aligned(self._book, demand, list(names), fellows, waiting)
        # Fellows that do not wait may have no cards either: those that ask for none.
        if choice.node and any(self._book.holding(uid) is not None for uid in fellows):
            self._metrics.count_aligned(_RESULTS[nearness])
        return choice

    def survey(self, pod: Pod, demand: Demand, named: Iterable[Reason]) -> Survey:
        """Ask all Nodes with cards, whichever a scheduler has named; see `Book.survey`."""
        return survey_aligned(self._book, demand, self._fellows(pod, demand), named)

    def too_far(self, pod: Pod, demand: Demand, names: Iterable[str]) -> set[str]:
        """Return those of the named Nodes, on which a pod fits by the book and holds nothing, that
        it must not go to, because it would be away from its fellows there.
        """
        return too_far(self._book, demand, names, self._fellows(pod, demand))

    def anchor(self, pod: Pod, demand: Demand) -> Anchor:
        """Return where the fellows of a pod are; an empty anchor where that does not matter."""
        return anchor_of(self._book, self._fellows(pod, demand))

    def _fellows(self, pod: Pod, demand: Demand) -> Sequence[str]:
        if not demand.aligned or pod.scheduling is None:
            return ()
        return self._known.fellows(pod.uid, pod.scheduling.group)

    def _is_waiting(self, uid: str) -> bool:
        """Tell whether a pod asks for cards and has none yet."""
        known = self._known.get(uid)
        if known is None or known.node or self._book.holding(uid) is not None:
            return False
        return any(name == self._slots for name, _ in known.facts.requests or ())
