"""The victims on a Node: the pods to be preempted for one of higher priority, the *preemptor*
(vgpu-manager §5.9).

kube-scheduler proposes victims. It counts resources and does not know single cards, so its victims
may not be enough. Then others are added, of lower priority than the pod and within disruption
budgets, and as few as possible: all candidates are removed from the Node, and then put back, the
most important first, as long as the pod still fits. vgpu-manager adds one after the other until the
pod fits, and keeps those that did not help (vgpu-manager §12.3).

Beside the added victims, some of the proposed ones may be superfluous. Such a pod may stay only if
the added victims free at least as much of each resource that kube-scheduler counts, and if no other
filter of kube-scheduler can depend on the pod. Otherwise kube-scheduler would find no room after
all, and propose the same victims again and again.

Pure functions on the state of one Node.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.placement.nodes.allocation import Placement, allocate, why_not
from vgpu_agent.placement.nodes.demand import PHYSICAL, VIRTUAL
from vgpu_agent.placement.topology import LINK_STRICT, NUMA_STRICT
from vgpu_agent.pods import Trait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.budgets import Budgets, LossCount
    from vgpu_agent.placement.nodes.cards import Hardware
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.placement.nodes.reasons import Reason
    from vgpu_agent.pods import SchedulingFacts

# If the preemptor has one of these, a filter of kube-scheduler may depend on any other pod. Claims
# are here those of Kubernetes (``spec.resourceClaims``).
_LOOKS_AT_OTHERS = {Trait.ANTI_AFFINITY, Trait.SPREAD, Trait.CLAIMS}
# These conflict only if both pods have them.
_SHARED_WITH_OTHERS = {Trait.HOST_PORTS, Trait.VOLUMES}
# kube-scheduler adds this to priorities, so that more victims never sum up to less.
_ABOVE_NEGATIVE = 2**31 + 1


class Victim(msgspec.Struct, frozen=True):
    """A pod that may have to be preempted.

    Attributes:
        uid: of the pod.
        facts: the facts about it; None where the watch has not shown it.
        footprint: index of a card → the amounts that it takes of it (slots, MiB of memory, percent
            of compute); empty where it holds nothing.
        protected: why it must not be preempted; empty where it may be.
        near: it is on cards near the peers of the preemptor: with NVLinks to theirs or, if the
            peers are on other Nodes, on the same network rails (the networks that cards are nearest
            to, `alignment`).
    """

    uid: str
    facts: SchedulingFacts | None
    footprint: Mapping[int, Amounts] = {}
    protected: str = ""
    near: bool = False

    @property
    def priority(self) -> int:
        """Its priority; 0 where it has none."""
        return (self.facts.priority or 0) if self.facts else 0

    @property
    def started_at(self) -> float:
        """Unix seconds; infinite where it has not started."""
        return (self.facts.started_at if self.facts else 0.0) or math.inf

    @property
    def deleting(self) -> bool:
        """Tell whether it is being deleted anyway."""
        return self.facts is not None and self.facts.deleting


def by_importance(victim: Victim) -> tuple[int, float, str]:
    """Sort the most important first: high priority, then those that run for long."""
    return -victim.priority, victim.started_at, victim.uid


class Verdicts:
    """The known results of placing one demand on cards: whether it fits.

    State: the results by hardware and by the state of the cards (`Room.fits`).
    """

    def __init__(self) -> None:
        # with the hardware itself, so that its id is not used again
        self._known: dict[int, tuple[Hardware, dict[tuple[object, ...], bool]]] = {}

    def of(self, hardware: Hardware) -> dict[tuple[object, ...], bool]:
        """Return those for the cards of one kind of Nodes."""
        return self._known.setdefault(id(hardware), (hardware, {}))[1]


class Room:
    """The cards of a Node, from which pods are taken away and put back.

    State: what is taken of each card.
    """

    def __init__(
        self,
        demand: Demand,
        hardware: Hardware,
        taken: Sequence[Amounts],
        unwanted: Mapping[int, Reason],
        verdicts: Verdicts | None = None,
    ) -> None:
        """Begin with the amounts ``taken``, one for each card. The pod cannot use cards in
        ``unwanted`` (index of a card → why). Rooms for one demand may share ``verdicts``.
        """
        self._demand, self._hardware, self._unwanted = demand, hardware, unwanted
        self._taken = list(taken)
        # A single container fits where enough cards have room; of several, one may take what
        # another would have needed, so with fewer pods they may even fit worse.
        self.is_simple = len(demand.containers) == 1
        # different cards of the container that asks for most
        self._most_cards = demand.most_cards
        self._verdicts = (verdicts or Verdicts()).of(hardware)
        self._usable = [
            # `blocked`: why no new container may get a share of it
            card.blocked is None and number not in unwanted
            for number, card in enumerate(hardware.cards)
        ]
        self._has_room = [self._fits_on(number) for number in range(len(hardware.cards))]
        # a pod may ask for Nodes that offer more memory than their cards have, or for all others
        policy = VIRTUAL if hardware.is_oversold else PHYSICAL
        self._never_fits = demand.memory_policy not in {"", policy}

    def take_away(self, victim: Victim) -> None:
        """Free the amounts that a pod takes."""
        self._change(victim.footprint, -1)

    def put_back(self, victim: Victim) -> bool:
        """Undo `take_away`. Tell whether that may change `fits`: it does not if no card of the pod
        has room without it.
        """
        return self._change(victim.footprint, 1)

    def _change(self, footprint: Mapping[int, Amounts], sign: int) -> bool:
        matters = False
        for card, (slots, memory, cores) in footprint.items():
            had_slots, had_memory, had_cores = self._taken[card]
            self._taken[card] = (
                had_slots + sign * slots,
                had_memory + sign * memory,
                had_cores + sign * cores,
            )
            if sign < 0 or self._has_room[card]:
                self._has_room[card] = self._fits_on(card)
                matters = True
        return matters

    def _fits_on(self, number: int) -> bool:
        """Tell whether a container of the demand fits on a card (vgpu-manager §5.5)."""
        if not self._usable[number]:
            return False
        hardware, taken = self._hardware, self._taken[number]
        card = hardware.cards[number]
        return any(
            why_not(container, hardware, card, taken) is None
            for container in self._demand.containers
        )

    def fits(self) -> bool:
        """Tell whether the pod fits now. The result is that of `allocate`, and known faster."""
        if self._never_fits or sum(self._has_room) < self._most_cards:
            return False
        if not self.is_simple:
            # Cards on which no container fits make no difference.
            return self._known(
                tuple(
                    taken if has_room else None
                    for taken, has_room in zip(self._taken, self._has_room, strict=True)
                )
            )
        # in these modes the cards must also be on one NUMA node, or joined by NVLinks
        if self._demand.topology_mode not in {NUMA_STRICT, LINK_STRICT}:
            return True
        return self._known(tuple(self._has_room))

    def _known(self, key: tuple[object, ...]) -> bool:
        """Tell whether `allocate` finds cards; ``key`` is all of the cards' state that matters."""
        if (found := self._verdicts.get(key)) is None:
            found = self._verdicts[key] = isinstance(
                allocate(self._demand, self._hardware, self._taken, self._unwanted), Placement
            )
        return found


def choose_victims(
    room: Room,
    proposed: Sequence[Victim],
    others: Sequence[Victim],
    *,
    preemptor: SchedulingFacts,
    budgets: Budgets,
    is_counted: Callable[[str], bool],
) -> tuple[Victim, ...] | None:
    """Return the victims, the most important first. None if the pod does not fit even without all
    candidates, or only without a protected pod.

    Args:
        room: the Node with all its pods.
        proposed: kube-scheduler's victims; without them the pod fits for it.
        others: pods that may be added; protected ones are skipped.
        preemptor: the facts about the pod that needs room.
        budgets: the disruption budgets of the cluster.
        is_counted: tells whether kube-scheduler counts a resource on this Node.
    """
    for victim in proposed:
        room.take_away(victim)
    if room.fits():
        return None if any(victim.protected for victim in proposed) else tuple(proposed)
    count = _counted(budgets, proposed)
    pool = [
        other
        for other in others
        if not other.protected and other.facts is not None and count.can_lose(other.facts)
    ]
    added = _added(room, pool, lambda: _counted(budgets, proposed))
    if added is None:
        return None
    for victim in added:
        room.take_away(victim)
    rest, gone = _reduced(room, proposed, added, preemptor, budgets, is_counted)
    if any(victim.protected for victim in rest):
        return None
    return tuple(sorted((*rest, *gone), key=by_importance))


def _counted(budgets: Budgets, proposed: Iterable[Victim]) -> LossCount:
    """Return a new count of losses against the disruption budgets, which the proposed victims have
    begun to use up.
    """
    count = budgets.count()
    for victim in proposed:
        if victim.facts is not None:
            count.lose(victim.facts)
    return count


def _added(
    room: Room, pool: Sequence[Victim], begin: Callable[[], LossCount]
) -> tuple[Victim, ...] | None:
    """Return the cheapest victims from the pool without which the pod fits, within budgets; None if
    there are none. The room is left as it was. ``begin`` returns a new count of losses, with only
    the proposed victims in it.
    """
    while True:
        found = [_least(room, order) for order in _orders(pool, begin())]
        # the two orders have the same pool, so the pod fits with both or with none
        least = min((each for each in found if each is not None), key=_cost, default=None)
        if least is None:
            return None
        if not (excess := _excess(least, begin())):
            return least
        pool = [victim for victim in pool if victim.uid not in excess]


def _excess(victims: Iterable[Victim], count: LossCount) -> set[str]:
    """Return the UIDs of the victims that are more than budgets allow. The least important ones are
    counted first.
    """
    return {
        victim.uid
        for victim in sorted(victims, key=by_importance, reverse=True)
        if victim.facts is not None and not count.lose(victim.facts)
    }


def _orders(pool: Sequence[Victim], count: LossCount) -> Iterable[list[Victim]]:
    """Yield the pool in two orders in which its pods may be put back. In both, those that are more
    than a budget allows come first; among equals, those that are not being deleted, then those that
    are not `near`, then the most important. In the second, of pods with equal priority those come
    first whose cards have the most pods of the pool, so that a card with few is emptied.
    """
    violating = _excess(pool, count)
    on_card: dict[int, int] = {}
    for victim in pool:
        for card in victim.footprint:
            on_card[card] = on_card.get(card, 0) + 1

    plain, crowded = [], []
    for victim in pool:
        first = (victim.uid not in violating, victim.deleting, victim.near)
        importance = by_importance(victim)
        crowd = -max((on_card[card] for card in victim.footprint), default=0)
        plain.append((first, importance, victim))
        crowded.append((first, importance[0], crowd, importance, victim))
    yield [victim for *_, victim in sorted(plain, key=operator.itemgetter(0, 1))]
    if len(set(on_card.values())) > 1:
        yield [victim for *_, victim in sorted(crowded, key=operator.itemgetter(0, 1, 2, 3))]


def _least(room: Room, order: Sequence[Victim]) -> tuple[Victim, ...] | None:
    """Return the pods that cannot be put back, tried in their order; None where the pod does not
    fit even without all of them. The room is left as it was.
    """
    for victim in order:
        room.take_away(victim)
    if not room.fits():
        for victim in order:
            room.put_back(victim)
        return None
    gone = []
    for victim in order:
        if room.put_back(victim) and not room.fits():
            room.take_away(victim)
            gone.append(victim)
    for victim in gone:
        room.put_back(victim)
    return tuple(gone)


def _cost(victims: Sequence[Victim]) -> tuple[int, int, int, float]:
    """Return the key by which kube-scheduler compares the victims of Nodes: the highest priority,
    the sum of priorities, the number, and the earliest start among those of the highest priority.
    """
    alive = [victim for victim in victims if not victim.deleting]
    highest = max((victim.priority for victim in alive), default=-_ABOVE_NEGATIVE)
    return (
        highest,
        sum(victim.priority + _ABOVE_NEGATIVE for victim in alive),
        len(alive),
        -min((each.started_at for each in alive if each.priority == highest), default=0.0),
    )


def _reduced(
    room: Room,
    proposed: Sequence[Victim],
    added: Sequence[Victim],
    preemptor: SchedulingFacts,
    budgets: Budgets,
    is_counted: Callable[[str], bool],
) -> tuple[list[Victim], list[Victim]]:
    """Put back proposed victims that are superfluous beside the added ones: first the protected
    ones, then those that are more than a budget allows, then the most important. Also put back
    added victims that have become superfluous. Return the remaining proposed and added victims.
    """
    ordered = sorted(proposed, key=by_importance)
    violating = _excess(proposed, budgets.count())
    ordered.sort(key=lambda each: (not each.protected, each.uid not in violating))
    rest, gone, staying = list(ordered), list(added), list[Victim]()
    changed = True
    while changed:
        changed = False
        for victim in tuple(rest):
            if _can_replace(gone, [*staying, victim], preemptor, is_counted):
                room.put_back(victim)
                if room.fits():
                    rest.remove(victim)
                    staying.append(victim)
                    changed = True
                else:
                    room.take_away(victim)
        if room.is_simple:
            break
        for victim in sorted(gone, key=by_importance):
            others = [each for each in gone if each.uid != victim.uid]
            if not staying or _can_replace(others, staying, preemptor, is_counted):
                room.put_back(victim)
                if room.fits():
                    gone = others
                    changed = True
                else:
                    room.take_away(victim)
    return rest, gone


def _can_replace(
    going: Sequence[Victim],
    staying: Sequence[Victim],
    preemptor: SchedulingFacts,
    is_counted: Callable[[str], bool],
) -> bool:
    """Tell whether kube-scheduler certainly finds room without the pods ``going``, given that it
    finds room without the pods ``staying``.
    """
    if preemptor.traits & _LOOKS_AT_OTHERS:
        return False
    amounts: dict[str, int] = {}
    for sign, victims in ((1, going), (-1, staying)):
        for victim in victims:
            facts = victim.facts
            if facts is None or facts.requests is None:
                return False
            if sign < 0 and (
                Trait.ANTI_AFFINITY in facts.traits
                or facts.traits & preemptor.traits & _SHARED_WITH_OTHERS
            ):
                return False
            for name, amount in facts.requests:
                amounts[name] = amounts.get(name, 0) + sign * amount
    return all(amount >= 0 or not is_counted(name) for name, amount in amounts.items())
