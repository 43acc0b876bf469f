"""The verb preempt: the victims on each Node, which are the pods to be preempted for one of higher
priority (vgpu-manager §5.9).

kube-scheduler calls it when a pod fits nowhere, with the victims that would free enough resources.
This module adds victims that hold the cards, removes those that need not be preempted
(`placement.nodes.victims`), and drops Nodes on which no preemption helps. All facts are in memory.
Nothing is written or reserved: kube-scheduler chooses a Node, deletes the victims, and filters the
pod again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, RequestRefusedError, shortened_ids
from vgpu_agent.placement.nodes.alignment import card_sets_near
from vgpu_agent.placement.nodes.book import unwanted
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.nodes.victims import Room, Verdicts, Victim, by_importance, choose_victims
from vgpu_agent.placement.topology import LINK_STRICT
from vgpu_agent.scheduler.messages import (
    MetaPod,
    MetaVictims,
    PreemptionResult,
    preemption_arguments,
)
from vgpu_agent.scheduler.metrics import ERROR, PREEMPT, REFUSED, SUCCESS, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vgpu_agent.families.scheduling import SchedulingFamily
    from vgpu_agent.journal import Journal
    from vgpu_agent.placement.nodes.alignment import Anchor
    from vgpu_agent.placement.nodes.book import Book, CardsInUse
    from vgpu_agent.placement.nodes.budgets import Budgets
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.pods import Pod, SchedulingFacts
    from vgpu_agent.scheduler.alignment import Alignment
    from vgpu_agent.scheduler.known_pods import KnownPods
    from vgpu_agent.scheduler.messages import PreemptionArguments, Proposal
    from vgpu_agent.scheduler.pod_events import PodEvents

# After that time, other tasks of the event loop run. Most Nodes take less than a millisecond; for a
# pod with many containers, one may take a tenth of a second.
_BLOCKING_SECONDS = 0.01

# Why a pod must not be preempted, besides the reasons in `SchedulingFacts.protected`: it is
# critical, static, or of a DaemonSet. `_NOT_BOUND`: it has cards in the book, but is not known to
# be bound.
_NOT_BOUND, _SAME_GANG, _NOT_LOWER = "not_bound", "same_gang", "not_lower_priority"


class _Preemptor(msgspec.Struct, frozen=True):
    """The pod that needs room.

    Attributes:
        uid: of the pod.
        facts: facts about it that only schedulers use.
        demand: what it asks for.
        verdicts: the results of comparing it with cards, so that equal Nodes are compared once.
        anchor: the places of its peers, the other pods of its group.
        counted_as_protected: UIDs of the protected pods that the metric has counted for it. Such a
            pod may be looked at several times, for different sets of cards, and is counted once.
        gangs: the gangs of its victims on all Nodes.
    """

    uid: str
    facts: SchedulingFacts
    demand: Demand
    verdicts: Verdicts
    anchor: Anchor
    counted_as_protected: set[str]
    gangs: set[str]


class Preemption:
    """The verb preempt; see the module. No state of its own."""

    def __init__(
        self,
        *,
        book: Book,
        family: SchedulingFamily,
        read_pod: Callable[[msgspec.Raw | bytes], Pod],
        known_pods: KnownPods,
        alignment: Alignment,
        budgets: Budgets,
        resources_of_node: Callable[[str], frozenset[str]],
        journal: Journal,
        metrics: Metrics | None = None,
        events: PodEvents | None = None,
    ) -> None:
        """Build it.

        Args:
            book: the cards of all Nodes.
            family: reads what a pod asks of cards.
            read_pod: decodes a pod with `Pod.scheduling`; it raises `ClusterError`.
            known_pods: pods that are bound or in a group, with the facts that only schedulers use.
            alignment: finds the peers of a pod.
            budgets: all PodDisruptionBudgets.
            resources_of_node: Node → the extended resources that it has, which kube-scheduler may
                count.
            journal: records the answers.
            metrics: counts the answers; None where nobody reads the counts.
            events: writes events about pods; None writes none.
        """
        self._book, self._family, self._read_pod = book, family, read_pod
        self._known_pods, self._alignment = known_pods, alignment
        self._budgets, self._resources_of_node = budgets, resources_of_node
        self._journal, self._metrics, self._events = journal, metrics or Metrics(), events

    async def answer(self, body: bytes) -> bytes:
        """Answer a preemption call.

        Raises:
            AgentError: the body is no such call, or is about a bound pod; one sentence says why.
        """
        with self._metrics.timed(PREEMPT):
            try:
                victims = await self._answer(preemption_arguments(body))
            except AgentError:
                self._metrics.count(PREEMPT, ERROR)
                raise
            self._metrics.count(PREEMPT, SUCCESS if victims else REFUSED)
            return msgspec.json.encode(PreemptionResult(victims))

    async def _answer(self, arguments: PreemptionArguments) -> dict[str, MetaVictims]:
        if not arguments.has_pod:
            raise RequestRefusedError("no Pod")
        pod = self._read_pod(arguments.pod)
        if pod.node:
            raise RequestRefusedError(f"pod {pod.full_name} is bound to {pod.node} already")
        proposals = arguments.proposals()
        # asks for no card: kube-scheduler's victims are right
        if (wanted := self._family.read_demand(pod)) is None:
            return {name: _unchanged(proposal) for name, proposal in proposals.items()}
        if pod.scheduling is None:
            raise RequestRefusedError(f"pod {pod.full_name}: its priority cannot be read")
        if not pod.scheduling.may_preempt:
            return {}
        anchor = self._alignment.anchor(pod, wanted.demand)
        preemptor = _Preemptor(
            pod.uid,
            facts=pod.scheduling,
            demand=wanted.demand,
            verdicts=Verdicts(),
            anchor=anchor,
            counted_as_protected=set(),
            gangs=set(),
        )
        found: dict[str, MetaVictims] = {}
        since = time.perf_counter()
        for name, proposal in proposals.items():
            victims = self._on_node(name, proposal, preemptor)
            if victims is not None and not victims.pods:
                # A card has become free since the pod was filtered, so no preemption is needed.
                self._journal.record("scheduler.preemption_needless", pod=pod.full_name, node=name)
                return {}
            if victims is not None:
                found[name] = victims
            if time.perf_counter() - since > _BLOCKING_SECONDS:
                await asyncio.sleep(0)
                since = time.perf_counter()
        self._report(pod, len(proposals), len(found), sorted(preemptor.gangs))
        return found

    def _report(self, pod: Pod, asked: int, found: int, gangs: Sequence[str]) -> None:
        """Record the answer, and tell the pod what it may mean; ``asked`` and ``found`` are numbers
        of Nodes.
        """
        self._journal.record(
            "scheduler.preemption",
            pod=pod.full_name,
            asked=asked,
            nodes=found,
            gangs=shortened_ids(gangs),
        )
        if self._events is None:
            return
        if gangs:
            self._events.gangs_disrupted(pod, gangs)
        if asked and not found:
            self._events.not_preempted(pod, asked)

    def _on_node(self, name: str, proposal: Proposal, preemptor: _Preemptor) -> MetaVictims | None:
        """Return the victims on a Node; None where no preemption would make the pod fit.
        ``proposal`` has the victims that kube-scheduler has chosen.
        """
        view = self._book.cards_in_use(name)  # its cards, and what each pod has of them
        if view is None:  # it has no cards
            return None
        chosen = self._chosen(name, view, proposal, preemptor)
        if chosen is None:
            return None
        preemptor.gangs.update(each.facts.gang for each in chosen if each.facts and each.facts.gang)
        uids = [victim.uid for victim in chosen]
        self._metrics.count_added(len([uid for uid in uids if uid not in proposal.pods]))
        if uids == list(proposal.pods):
            return _unchanged(proposal)
        facts = [each.facts for each in chosen if each.facts is not None]
        return MetaVictims(
            [MetaPod(uid) for uid in uids], violations=len(self._budgets.violating(facts))
        )

    def _chosen(
        self, name: str, view: CardsInUse, proposal: Proposal, preemptor: _Preemptor
    ) -> Sequence[Victim] | None:
        """Return the victims on a Node; None as in `_on_node`. If the pod must be near its peers,
        only cards there are tried; otherwise victims there are preferred.
        """
        # sets of cards that are linked to each other, or near the network of the peers' cards; in
        # the order in which they are tried
        near = [cards for _, cards in card_sets_near(preemptor.anchor, name, view)]
        if near and preemptor.demand.topology_mode == LINK_STRICT:
            tried = (self._on_cards(name, view, proposal, preemptor, cards=cards) for cards in near)
            return next((each for each in tried if each is not None), None)
        return self._on_cards(
            name, view, proposal, preemptor, near={card for cards in near for card in cards}
        )

    def _on_cards(
        self,
        name: str,
        view: CardsInUse,
        proposal: Proposal,
        preemptor: _Preemptor,
        *,
        cards: Collection[int] | None = None,
        near: Collection[int] = (),
    ) -> Sequence[Victim] | None:
        """Return the victims for a pod that may use ``cards``, by default all of the Node; None as
        in `_on_node`. Victims on the cards ``near``, those near the pod's peers, are preferred.
        Cards are given by number.
        """
        every = range(len(view.hardware.cards))
        outside = set(every).difference(every if cards is None else cards)
        # the Node's cards, from which pods are taken away to see whether the pod fits then
        room = Room(
            preemptor.demand,
            view.hardware,
            view.taken,
            # card → why this pod does not get it: it is not one of ``cards``, or has a model or a
            # UUID that the pod excludes, or none of those that the pod names
            unwanted=dict.fromkeys(outside, Reason.LinkTopologyUnsatisfied)
            | unwanted(preemptor.demand, view.hardware, view.uuids),
            verdicts=preemptor.verdicts,
        )
        # `footprints`: what each pod takes of each card; that of the preemptor does not count
        if own := view.footprints.get(preemptor.uid):
            room.take_away(Victim(preemptor.uid, facts=None, footprint=own))
        proposed = [
            self._victim(uid, self._facts(uid, raw), view, preemptor, near)
            for uid, raw in proposal.pods.items()
        ]
        resources = self._resources_of_node(name)
        return choose_victims(
            room,
            proposed,
            self._others(view, proposal, preemptor, near),
            preemptor=preemptor.facts,
            budgets=self._budgets,
            # whether the Node must have enough of it for kube-scheduler, too: all native resources
            # (cpu), and extended ones that the Node has
            is_counted=lambda resource: "/" not in resource or resource in resources,
        )

    def _facts(self, uid: str, raw: msgspec.Raw | None) -> SchedulingFacts | None:
        """Return the facts about a proposed victim: from the pod in the call, otherwise from the
        watch.
        """
        if raw is not None:
            return self._read_pod(raw).scheduling
        known = self._known_pods.get(uid)
        return known.facts if known else None

    def _victim(
        self,
        uid: str,
        facts: SchedulingFacts | None,
        view: CardsInUse,
        preemptor: _Preemptor,
        near: Collection[int],
    ) -> Victim:
        protected = self._protection(uid, facts, view, preemptor)
        if protected and uid not in preemptor.counted_as_protected:
            preemptor.counted_as_protected.add(uid)
            self._metrics.count_protected(protected)
        footprint = view.footprints.get(uid, {})
        return Victim(
            uid,
            facts=facts,
            footprint=footprint,
            protected=protected,
            near=not footprint.keys().isdisjoint(near),
        )

    def _protection(
        self, uid: str, facts: SchedulingFacts | None, view: CardsInUse, preemptor: _Preemptor
    ) -> str:
        """Return why a pod must not be preempted; empty where it may be."""
        known = self._known_pods.get(uid)
        if uid in view.holdings and (known is None or not known.node):
            return _NOT_BOUND
        if facts is None:
            return ""
        if (facts.priority or 0) >= (preemptor.facts.priority or 0):
            return _NOT_LOWER
        if facts.gang and facts.gang == preemptor.facts.gang:
            return _SAME_GANG
        return "" if facts.deleting else facts.protected

    def _others(
        self, view: CardsInUse, proposal: Proposal, preemptor: _Preemptor, near: Collection[int]
    ) -> Sequence[Victim]:
        """Return the pods that hold cards of the Node and may be preempted, without those that
        kube-scheduler has proposed; the most important first.
        """
        if preemptor.facts.priority is None:
            return ()
        found = []
        for uid, footprint in view.footprints.items():
            known = self._known_pods.get(uid)
            if (
                not footprint
                or uid in proposal.pods
                or known is None
                or known.facts.priority is None
            ):
                continue
            if known.facts.priority < preemptor.facts.priority:
                found.append(self._victim(uid, known.facts, view, preemptor, near))
        return sorted((each for each in found if not each.protected), key=by_importance)


def _unchanged(proposal: Proposal) -> MetaVictims:
    return MetaVictims([MetaPod(uid) for uid in proposal.pods], violations=proposal.violations)
