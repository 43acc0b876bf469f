"""The verb filter-dryrun: all Nodes on which a pod would fit, and in detail why it does not fit on
the others (vgpu-manager §5.1, §5.2).

The verb is for the Cluster Autoscaler, which also asks about Nodes that it would create. Those are
in the request as objects, and the API server does not have them. No cards are kept, and nothing is
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, RequestRefusedError
from vgpu_agent.placement.nodes.allocation import Refusal
from vgpu_agent.placement.nodes.book import refusal_on
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.scheduler.extender import cards_of
from vgpu_agent.scheduler.messages import FilterResult, filter_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.families.scheduling import SchedulingFamily
    from vgpu_agent.nodes import Node
    from vgpu_agent.placement.nodes.book import Book
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.pods import Pod
    from vgpu_agent.scheduler.alignment import Alignment
    from vgpu_agent.scheduler.messages import FilterArguments


class FilterDryRun:
    """The verb; see the module. No state of its own."""

    def __init__(
        self,
        *,
        book: Book,
        family: SchedulingFamily,
        read_pod: Callable[[msgspec.Raw | bytes], Pod],
        read_node: Callable[[msgspec.Raw | bytes], Node],
        alignment: Alignment,
    ) -> None:
        """Build it.

        Args:
            book: the cards of all Nodes.
            family: reads Nodes and pods.
            read_pod: decodes a pod; it raises `ClusterError`.
            read_node: decodes a Node; it raises `ClusterError`.
            alignment: tells on which Nodes a pod would be too far from its peers.
        """
        self._alignment = alignment
        self._book, self._family = book, family
        self._read_pod, self._read_node = read_pod, read_node

    def answer(self, body: bytes) -> bytes:
        """Answer a request; every failure is a sentence in the answer."""
        try:
            result = self._answer(filter_arguments(body))
        except AgentError as err:
            result = FilterResult(error=str(err))
        return msgspec.json.encode(result)

    def _answer(self, arguments: FilterArguments) -> FilterResult:
        if not arguments.has_pod:
            raise RequestRefusedError("no Pod")
        pod = self._read_pod(arguments.pod)
        if pod.node:
            raise RequestRefusedError(f"pod {pod.full_name} is bound to {pod.node} already")
        if (wanted := self._family.read_demand(pod)) is None:  # it asks for no cards
            return FilterResult(
                nodes={"items": arguments.nodes.items or []} if arguments.nodes else None,
                node_names=arguments.node_names,
            )
        candidates = arguments.candidates()
        if not candidates:
            raise RequestRefusedError("No schedulable nodes")
        refusals = self._refusals(pod, wanted.demand, candidates)
        failed = {name: _text(refusal) for name, refusal in refusals.items() if refusal}
        fitting = [name for name in candidates if name not in failed]
        if arguments.node_names is not None:
            return FilterResult(node_names=fitting, failed_nodes=failed)
        objects = (candidates[name] for name in fitting)
        items = [each for each in objects if each is not None]
        return FilterResult(nodes={"items": items}, failed_nodes=failed)

    def _refusals(
        self, pod: Pod, demand: Demand, candidates: Mapping[str, msgspec.Raw | None]
    ) -> Mapping[str, Refusal | None]:
        """Return Node → why the pod does not fit on it, None where it fits. ``candidates`` has the
        object of each Node, or None where the request has only names.
        """
        # `without`: the pod's own cards count as free
        found = dict(self._book.refusals(demand, candidates, without=pod.uid))
        # where the pod has cards already, it is not too far from its peers
        own = self._book.node_of(pod.uid)
        fitting = [name for name, refusal in found.items() if refusal is None and name != own]
        for name in self._alignment.too_far(pod, demand, fitting):
            found[name] = Refusal(Reason.LinkTopologyUnsatisfied)
        # a Node that does not exist yet is judged by its object alone
        for name, raw in candidates.items():
            if raw is not None and not self._book.knows(name):
                cards = cards_of(self._family, self._read_node(raw))
                found[name] = refusal_on(demand, cards)
        return found


def _text(refusal: Refusal) -> str:
    """Return the reason, and the cards that it concerns."""
    text = refusal.reason.value
    if not refusal.cards:
        return text
    cards = ", ".join(f"{count} × {reason.value}" for reason, count in refusal.cards.items())
    return f"{text} (cards: {cards})"
