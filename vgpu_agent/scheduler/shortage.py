"""Sentences about Nodes that cannot take a pod: one for each reason, with the figures that are
missing and the remedy.

Pure functions, used by `explain`. Like the functions of `placement.nodes.survey`, `sentences` is a
generator that yields after each small piece of work.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import shortened
from vgpu_agent.placement.nodes.demand import VIRTUAL, total
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.topology import LINK, LINK_STRICT, NUMA, NUMA_STRICT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from vgpu_agent.families.scheduling import KeyNames
    from vgpu_agent.placement.nodes.book import NodeView
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.placement.nodes.survey import Change, Changes, Group

MAX_NAMES = 5  # of Nodes, pods or product names in one sentence
_LONGEST_NAME = 100
_WHOLE_PERCENT = 100
# reasons that are about the cards that the pod selects, not about what is free on them
_MISMATCHES = (Reason.DeviceTypeMismatch, Reason.DeviceUUIDMismatch)
# topology mode of a pod, which its cards must satisfy → how the cards belong together
_HOW_TOGETHER = {
    LINK_STRICT: "joined by NVLink",
    NUMA_STRICT: "on one NUMA node",
}


class CardRoom(msgspec.Struct, frozen=True):
    """The rest of a card that can serve another container.

    Attributes:
        card: its number, which is its place among the Node's cards.
        memory_mib: free memory.
        cores_percent: free compute.
        slots: free slots.
        is_untouched: no pod has a share of it.
    """

    card: int
    memory_mib: int
    cores_percent: int
    slots: int
    is_untouched: bool


def rooms(view: NodeView, unwanted: Mapping[int, Reason]) -> list[CardRoom]:
    """Return the rest of each card of a Node that can serve another container: that is not
    blocked (unhealthy, or divided by MIG), is not in ``unwanted``, the numbers of the cards that
    the pod's lists of types or UUIDs rule out, and has a slot, memory and compute left.
    """
    if view.state is None:  # the Node can take no pod at all (`view.unfit`)
        return []
    found = []
    for number, (card, (slots, memory_mib, cores_percent)) in enumerate(
        zip(view.state.hardware.cards, view.state.taken, strict=True)
    ):
        room = CardRoom(
            card=number,
            memory_mib=card.memory_mib - memory_mib,
            cores_percent=card.cores_percent - cores_percent,
            slots=card.slots - slots,
            is_untouched=not (slots or memory_mib or cores_percent),
        )
        if (
            card.blocked is None
            and number not in unwanted
            and min(room.slots, room.memory_mib, room.cores_percent) > 0
        ):
            found.append(room)
    return found


class _Best:
    """The largest figure, such as an amount of free memory, that was offered so far, and the Node
    and the numbers of the cards that have it.
    """

    __slots__ = ("cards", "figure", "view")

    def __init__(self) -> None:
        self.figure = 0
        self.view: NodeView | None = None
        self.cards: tuple[int, ...] = ()

    def offer(self, figure: int, view: NodeView, cards: Iterable[int] = ()) -> None:
        if self.view is None or figure > self.figure:
            self.figure, self.view, self.cards = figure, view, tuple(cards)


class _Figures:
    """The best figures of the Nodes that refuse a demand for one reason."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._most = demand.most_cards  # of the container that asks for the most cards
        self.nodes = 0
        self.names: list[str] = []  # of the first `MAX_NAMES` Nodes
        # detail of why a Node can take no pod → a Node with this detail
        self.notes: dict[str, str] = {}
        # the least free amount among the `most_cards` cards of a Node that have the most free
        self.memory, self.cores = _Best(), _Best()
        # all memory and all compute of one card, whether free or not
        self.size, self.core_size = _Best(), _Best()
        # the free slots, memory and compute of all cards of a Node together
        self.slots, self.all_memory, self.all_cores = _Best(), _Best(), _Best()
        # the number of cards of a Node: not blocked; with all memory free and enough compute for
        # any container of the pod; without any pod
        self.usable, self.memory_free, self.untouched = _Best(), _Best(), _Best()
        # why cards are blocked → how many cards of these Nodes
        self.blocked: collections.Counter[Reason] = collections.Counter()

    def add(self, group: Group) -> None:
        """Count the Nodes of a group; they are alike in cards and use, so the first one's figures
        are those of all.
        """
        view, times = group.views[0], len(group.views)
        self.nodes += times
        self.names += [each.name for each in group.views[: max(MAX_NAMES - len(self.names), 0)]]
        if view.unfit is not None and view.unfit.note:
            self.notes.setdefault(view.unfit.note, view.name)
        if view.state is None:
            return
        for card in view.state.hardware.cards:
            if card.blocked is not None:
                self.blocked[card.blocked] += times
            else:
                self.size.offer(card.memory_mib, view)
                self.core_size.offer(card.cores_percent, view)
        left = rooms(view, view.unwanted(self._demand))
        self.usable.offer(sum(card.blocked is None for card in view.state.hardware.cards), view)
        self.slots.offer(sum(each.slots for each in left), view)
        self.untouched.offer(sum(each.is_untouched for each in left), view)
        self.all_memory.offer(sum(each.memory_mib for each in left), view)
        self.all_cores.offer(sum(each.cores_percent for each in left), view)
        # the numbers of the cards of which no memory is taken; the amounts taken of a card are
        # slots, memory and compute, in this order
        whole = [
            each.card
            for each in left
            if not view.state.taken[each.card][1]
            and each.cores_percent >= max(c.cores_percent for c in self._demand.containers)
        ]
        self.memory_free.offer(len(whole), view, whole)
        by_memory = sorted(left, key=lambda each: -each.memory_mib)[: self._most]
        if len(by_memory) == self._most:
            self.memory.offer(
                by_memory[-1].memory_mib, view, (each.card for each in by_memory[-1:])
            )
        by_cores = sorted(left, key=lambda each: -each.cores_percent)[: self._most]
        if len(by_cores) == self._most:
            self.cores.offer(
                by_cores[-1].cores_percent, view, (each.card for each in by_cores[-1:])
            )


def sentences(
    demand: Demand,
    groups: Sequence[Group],
    keys: KeyNames,
    name_of: Callable[[str], str],
) -> Generator[None, None, tuple[str, ...]]:
    """Say for each reason what is missing on the Nodes that have it. Nodes that the pod could use
    come first, then those without enough cards of the types or UUIDs that it selects, then those
    that can take no pod. Nothing is said of Nodes on which it fits.

    Args:
        demand: of the pod.
        groups: all Nodes, compared with it; those with equal cards, equally in use, are one group.
        keys: the names of resources and annotations.
        name_of: returns the name of a pod with this UID.
    """
    by_reason: dict[Reason, _Figures] = {}
    for group in groups:
        if group.refusal is not None:
            reason = _reason(group, group.refusal.reason, demand)
            by_reason.setdefault(reason, _Figures(demand)).add(group)
            yield
    found = [
        f"{counted(figures.nodes, 'Node')} ({_names(figures.names, figures.nodes)}): "
        + _SENTENCES.get(reason, _unfit)(_Missing(reason, figures, demand, keys, name_of))
        for reason, figures in sorted(by_reason.items(), key=_order)
    ]
    # `names_cards`: it selects cards by UUID
    if found and (demand.names_cards or demand.include_types or demand.exclude_types):
        wanted = yield from _wanted(demand, groups, name_of)
        found.append(_existing_cards(wanted, demand, keys))
    return tuple(found)


def _order(each: tuple[Reason, _Figures]) -> tuple[bool, bool, int]:
    """Return the key by which `sentences` sorts the reasons."""
    reason, figures = each
    return reason not in _SENTENCES, reason in _MISMATCHES, -figures.nodes


def _reason(group: Group, reason: Reason, demand: Demand) -> Reason:
    """Return the reason that is useful to operators. Where too few cards have the type or UUID that
    the pod wants, the room on the others does not matter, although filter may name it.
    """
    state = group.views[0].state
    # reason → number of cards of one Node that it concerns
    mismatches = {each: group.cards.get(each, 0) for each in _MISMATCHES}
    if state is None or len(state.taken) - sum(mismatches.values()) >= demand.most_cards:
        return reason
    return (
        max(_MISMATCHES, key=lambda each: mismatches[each]) if any(mismatches.values()) else reason
    )


def possible_changes(changes: Changes, demand: Demand, keys: KeyNames) -> tuple[str, ...]:
    """Say which single changes of the pod would let it start now; each was tried."""
    if not changes.is_complete:
        return ("They could not all be tried in time; ask again when the extender is less busy.",)
    if not changes.found:
        return ("No single smaller amount or looser condition lets it fit now.",)
    return tuple(
        f"{_changed(change, demand, keys)}, it would fit on {counted(change.nodes, 'Node')} now."
        for change in changes.found
    )


def _changed(change: Change, demand: Demand, keys: KeyNames) -> str:
    # of each container, in units of the memory resource; None for a percentage of a card's memory
    memory = [each.memory_units for each in demand.containers]
    cores = max(each.cores_percent for each in demand.containers)
    match change.field:
        case "memory_units" if None in memory:
            # With an amount of memory and none of compute, the pod would have no limit of compute.
            return (
                f"With {keys.memory}: {change.value} instead of a part of each card's memory, and "
                f"{keys.cores}: {cores}"
            )
        case "memory_units":
            before = max(each or 0 for each in memory)
            return f"With {keys.memory}: {change.value} instead of {before}"
        case "cores_percent":
            return f"With {keys.cores}: {change.value} instead of {cores}"
        case "card_count":
            return f"With {keys.number}: {change.value} instead of {demand.most_cards}"
        case "topology_mode":
            return f"With the annotation {keys.topology_mode}: {change.value}"
    removed = (
        f"annotation {keys.memory_policy}"
        if change.field == "memory_policy"  # the others are `types` and `uuids`
        else _selection(demand, keys, types=change.field == "types")
    )
    return f"Without the {removed}"


class _Wanted(msgspec.Struct, frozen=True):
    """The cards that a pod selects by type or UUID, over all Nodes.

    Attributes:
        cards: their number.
        nodes: the number of Nodes that have some.
        untouched: the number of these cards that are not blocked, and of which no pod has a share.
        blocked: the number of these cards that are unhealthy or divided by MIG.
        holders: the names of the first pods that have shares of these cards.
        more_holders: the number of further pods that have some.
        models: the product names of all cards, selected or not, the most frequent first.
    """

    cards: int = 0
    nodes: int = 0
    untouched: int = 0
    blocked: int = 0
    holders: tuple[str, ...] = ()
    more_holders: int = 0
    models: tuple[str, ...] = ()


def _wanted(
    demand: Demand, groups: Sequence[Group], name_of: Callable[[str], str]
) -> Generator[None, None, _Wanted]:
    """Find the cards that the pod selects, and the pods that hold them."""
    cards = nodes = untouched = blocked = 0
    holders: set[str] = set()
    models: collections.Counter[str] = collections.Counter()
    for group in groups:
        state = group.views[0].state
        if state is None:
            continue
        for card in state.hardware.cards:
            models[card.model] += len(group.views)
        unwanted = group.views[0].unwanted(demand)
        numbers = [number for number in range(len(state.taken)) if number not in unwanted]
        yield
        if not numbers:
            continue
        cards += len(numbers) * len(group.views)
        nodes += len(group.views)
        blocked += len(group.views) * sum(
            state.hardware.cards[number].blocked is not None for number in numbers
        )
        untouched += len(group.views) * sum(
            not any(state.taken[number]) and state.hardware.cards[number].blocked is None
            for number in numbers
        )
        for view in group.views:
            holders.update(_holders(view, numbers))
            yield
    names = sorted(map(name_of, sorted(holders)[: 4 * MAX_NAMES]))[:MAX_NAMES]
    return _Wanted(
        cards=cards,
        nodes=nodes,
        untouched=untouched,
        blocked=blocked,
        holders=tuple(names),
        more_holders=len(holders) - len(names),
        models=tuple(model for model, _ in models.most_common()),
    )


class _Missing(msgspec.Struct, frozen=True):
    """The parts of the sentence about a reason.

    Attributes:
        reason: why the Nodes that the sentence is about refuse the pod.
        figures: the best figures of these Nodes.
        demand: of the pod.
        keys: the names of resources and annotations.
        name_of: returns the name of a pod with this UID.
    """

    reason: Reason
    figures: _Figures
    demand: Demand
    keys: KeyNames
    name_of: Callable[[str], str]


def _slots(missing: _Missing) -> str:
    demand, best = missing.demand, missing.figures.slots
    if any(each.alone for each in demand.containers):  # with no other pod on its cards
        best = missing.figures.untouched
        return (
            f"the pod wants {counted(demand.most_cards, 'card')} of one Node for itself; the most "
            f"cards without any pod on one are {best.figure}{_on(best)}. Wait until pods there end."
        )
    # what the pod takes in all: slots, MiB and percent; the arguments matter for the MiB only
    slots, _, _ = total(demand, memory_factor=1, whole_card_mib=0)
    return (
        f"slots are missing. The pod takes {counted(slots, 'slot')} of cards of "
        f"one Node; the most that are left for it on one are {best.figure}{_on(best)}. Wait until "
        "pods there end, or let the cards be split into more slots (node configuration)."
    )


def _cards(missing: _Missing) -> str:
    best, blocked = missing.figures.usable, _blocked(missing.figures.blocked)
    return (
        f"cards are missing. A container asks for {missing.demand.most_cards} different cards of "
        f"one Node ({missing.keys.number}); the most that are usable on one are {best.figure}"
        f"{_on(best)}{blocked and f'; {blocked} there'}. Ask for fewer, or repair or add cards."
    )


def _out_of_use(missing: _Missing) -> str:
    # A family may declare a Node unfit for this reason; then it has no cards here to be counted.
    blocked = _blocked(missing.figures.blocked)
    what = f"{blocked}, so too few are left" if blocked else "no card is of use to the pod"
    return (
        f"{what}.{_notes(missing)} `vgpu-agent status` on such a Node says why; cards with MIG "
        "instances serve only pods that ask for instances."
    )


def _topology(missing: _Missing) -> str:
    demand = missing.demand
    how = _HOW_TOGETHER.get(demand.topology_mode, "that belong together")
    # the mode that prefers the same cards, and does not demand them
    looser = LINK if missing.reason is Reason.LinkTopologyUnsatisfied else NUMA
    return (
        f"no {counted(demand.most_cards, 'free card')} {how}, as the annotation "
        f"{missing.keys.topology_mode}: {demand.topology_mode} demands. Wait until pods there "
        f"end, or write {looser}, which prefers such cards and takes others."
    )


def _memory_policy(missing: _Missing) -> str:
    # with `VIRTUAL`, the pod wants a Node that offers more memory than its cards have
    policy = missing.demand.memory_policy
    return (
        f"the memory of the cards is {'physical' if policy == VIRTUAL else 'virtual'}, and the "
        f"pod wants {policy} (annotation {missing.keys.memory_policy}). Remove the annotation, or "
        "change the memory scaling of Nodes."
    )


def _notes(missing: _Missing) -> str:
    """Return the details besides the reason, each with one Node that has it."""
    return "".join(
        f" {shortened(name, _LONGEST_NAME)} has: {note}."
        for note, name in list(missing.figures.notes.items())[:MAX_NAMES]
    )


def _unfit(missing: _Missing) -> str:
    """Say what is wrong with Nodes that can take no pod at all."""
    keys, notes = missing.keys, _notes(missing)
    match missing.reason:
        case Reason.NodeNotVGPUEnabled:
            return (
                f"no {keys.number} in status.allocatable. Either there are no GPUs to share, or "
                f"the agent does not run or offers nothing there.{notes}"
            )
        case Reason.NodeNoVGPURegister:
            return (
                f"{keys.number} is offered, but the annotation {keys.node_register} is missing. "
                "Look at the agent's log there: it writes the annotation before it registers."
            )
        case Reason.NodeNoVGPUConfig:
            return (
                f"the annotation {keys.node_config} is missing. Look at the agent's log there: it "
                "writes the annotation before it registers."
            )
        case Reason.NodeBadVGPURegister:
            return _malformed(keys.node_register, notes)
        case Reason.NodeBadVGPUConfig | Reason.NodeBadMemoryFactor:
            return _malformed(keys.node_config, notes)
        case _:
            return (
                "pods hold cards there, but the API server shows no such Node. It was deleted; "
                "its pods go, too, once the control plane notices."
            )


def _malformed(key: str, notes: str) -> str:
    return (
        f"the annotation {key} cannot be read.{notes} Remove the annotation and restart the agent "
        "there, which writes it anew."
    )


def _memory(missing: _Missing) -> str:
    figures, demand, keys = missing.figures, missing.demand, missing.keys
    units = [each.memory_units for each in demand.containers]  # None for a percentage of a card
    # percentage of a card's memory → number of cards of which a container asks for it
    parts = {
        each.memory_percent: each.card_count
        for each in demand.containers
        if each.memory_units is None
    }
    most = max((each or 0 for each in units), default=0)  # units on one card
    view = figures.size.view
    # how many MiB one unit of the memory resource is
    factor = view.state.hardware.memory_factor if view is not None and view.state else 1
    asked = most * factor
    if asked > figures.size.figure:
        return (
            f"no card there has more than {figures.size.figure} MiB in all; the pod asks for "
            f"{asked} MiB on each of its cards. Lower {keys.memory}, or add larger cards."
        )
    part = max(parts, default=0)
    if part == _WHOLE_PERCENT and figures.memory_free.figure < parts[part]:
        return (
            f"the pod asks for all memory of {counted(parts[part], 'card')} of one Node, so no "
            "other pod may have memory of them; the most such cards of one Node are "
            f"{figures.memory_free.figure}{_on(figures.memory_free)}. Wait until pods there end, "
            f"or set {keys.memory}."
        )
    if part and not most:
        return (
            f"the pod asks for {part} % of the memory of {counted(parts[part], 'card')} of one "
            f"Node; the largest share that is free for it on any card is {figures.memory.figure} "
            f"MiB{_card_of(figures.memory, missing.name_of)}. Wait until pods there end, or ask "
            "for less."
        )
    if figures.memory.figure < asked:
        return (
            f"the largest share that is free for it on any card is {figures.memory.figure} MiB"
            f"{_card_of(figures.memory, missing.name_of)}; the pod asks for {asked} MiB."
            if demand.most_cards == 1
            else f"{_best_node(figures.memory, 'MiB', demand)}; the pod asks for {asked} MiB on "
            f"each of {demand.most_cards} cards of one Node."
        )
    # in MiB, summed over the pod's cards; a percentage of a card counts as 0 here
    _, needed, _ = total(demand, memory_factor=factor, whole_card_mib=0)
    return (
        f"not enough memory for the whole pod, which takes {needed} MiB of cards of one Node; the "
        f"most that is free on one is {figures.all_memory.figure} MiB{_on(figures.all_memory)}. "
        "Cards with that memory may lack compute or slots."
    )


def _cores(missing: _Missing) -> str:
    figures, demand = missing.figures, missing.demand
    asked = max((each.cores_percent for each in demand.containers), default=0)
    if asked > figures.core_size.figure:
        return (
            f"no card there has more than {figures.core_size.figure} % of compute in all; the pod "
            f"asks for {asked} % on each of its cards. Lower {missing.keys.cores}."
        )
    least = max(asked, 1)  # a card without free compute serves nobody
    if figures.cores.figure < least:
        none = "" if asked else " A card of which all compute is taken serves no other pod."
        return (
            f"the most compute that is free for it on any card is {figures.cores.figure} %"
            f"{_card_of(figures.cores, missing.name_of)}; the pod asks for {asked} %.{none}"
            if demand.most_cards == 1
            else f"{_best_node(figures.cores, '% of compute', demand)}; the pod asks for {asked} % "
            f"on each of {demand.most_cards} cards of one Node.{none}"
        )
    _, _, needed = total(demand, memory_factor=1, whole_card_mib=0)
    return (
        f"not enough compute for the whole pod, which takes {needed} % of cards of one Node; the "
        f"most that is free on one is {figures.all_cores.figure} %{_on(figures.all_cores)}. Cards "
        "with that compute may lack memory or slots."
    )


def _types(missing: _Missing) -> str:
    return _mismatch(missing, "of a type", types=True)


def _uuids(missing: _Missing) -> str:
    return _mismatch(missing, "with a UUID", types=False)


def _mismatch(missing: _Missing, what: str, *, types: bool) -> str:
    selection = _selection(missing.demand, missing.keys, types=types)
    most = missing.demand.most_cards
    cards = "no card" if most == 1 else f"fewer than {most} cards"
    return f"{cards} {what} that the pod wants ({selection})."


_SENTENCES: Mapping[Reason, Callable[[_Missing], str]] = {
    Reason.InsufficientVGPUMemory: _memory,
    Reason.InsufficientVGPUCore: _cores,
    Reason.InsufficientVGPUSlot: _slots,  # on single cards
    Reason.InsufficientGPUResources: _slots,  # on all cards of the Node together
    Reason.InsufficientGPUCards: _cards,
    Reason.DeviceTypeMismatch: _types,
    Reason.DeviceUUIDMismatch: _uuids,
    Reason.DeviceUnhealthy: _out_of_use,
    Reason.DeviceMIGEnabled: _out_of_use,
    Reason.LinkTopologyUnsatisfied: _topology,
    Reason.NUMATopologyUnsatisfied: _topology,
    Reason.NodeMemoryTypeMismatch: _memory_policy,
}


def _existing_cards(wanted: _Wanted, demand: Demand, keys: KeyNames) -> str:
    """Say which cards the pod selects in the whole cluster, and which pods hold them."""
    selection = " and ".join(
        filter(None, (_selection(demand, keys, types=types) for types in (True, False)))
    )
    if not wanted.cards:
        models = [shortened(model, _LONGEST_NAME) for model in wanted.models]
        return (
            f"No card of the cluster is one that the pod wants ({selection}). The types of cards "
            f"are: {_names(models, len(models)) or 'none'}. Correct the annotation, or add such "
            "cards."
        )
    exist = "exists" if wanted.cards == 1 else "exist"
    blocked = f", {wanted.blocked} unhealthy or divided by MIG" * bool(wanted.blocked)
    in_use = wanted.cards - wanted.untouched - wanted.blocked
    held = (
        f"; held by pods {_names(wanted.holders, len(wanted.holders) + wanted.more_holders)}"
        if wanted.holders
        else ""
    )
    return (
        f"{counted(wanted.cards, 'card')} that the pod wants ({selection}) {exist} on "
        f"{counted(wanted.nodes, 'Node')}: {wanted.untouched} untouched, {in_use} in use{blocked}"
        f"{held}."
    )


def _selection(demand: Demand, keys: KeyNames, *, types: bool) -> str:
    """Name the annotations by which the pod selects cards: by ``types``, or else by UUIDs."""
    pairs = (
        ((keys.include_types, demand.include_types), (keys.exclude_types, demand.exclude_types))
        if types
        else (
            (keys.include_uuids, demand.include_uuids),
            (keys.exclude_uuids, demand.exclude_uuids),
        )
    )
    return " and ".join(
        f"annotation {key}: {shortened(','.join(entries), _LONGEST_NAME)}"
        for key, entries in pairs
        if entries
    )


def _blocked(blocked: collections.Counter[Reason]) -> str:
    """Say how many cards are blocked, and why; empty if none are."""
    texts = {
        Reason.DeviceUnhealthy: "unhealthy",
        Reason.DeviceMIGEnabled: "divided by MIG",
    }
    return " and ".join(
        f"{counted(cards, 'card')} {'is' if cards == 1 else 'are'} {texts[reason]}"
        for reason, cards in blocked.most_common()
    )


def _card_of(best: _Best, name_of: Callable[[str], str]) -> str:
    """Name the card that has the figure, and the pods that hold parts of it."""
    if best.view is None or not best.cards:
        return ""
    holders = sorted(map(name_of, _holders(best.view, best.cards)))
    held = f", held by {_names(holders, len(holders))}" if holders else ""
    return f" (card {best.cards[0]} of {best.view.name}{held})"


def _best_node(best: _Best, unit: str, demand: Demand) -> str:
    """Name the Node that comes closest to a pod with several cards."""
    if best.view is None or not best.figure:
        return f"no Node has {demand.most_cards} cards that can serve it"
    return (
        f"{best.view.name} comes closest, with {best.figure} {unit} free on each of "
        f"{demand.most_cards} cards"
    )


def _on(best: _Best) -> str:
    """Name the Node that has the figure, in parentheses; empty if the figure is 0."""
    return f" (on {best.view.name})" if best.view is not None and best.figure else ""


def _holders(view: NodeView, numbers: Iterable[int]) -> list[str]:
    """Return the UIDs of the pods that hold one of the cards of a Node, given by numbers."""
    uuids = {view.uuids[number] for number in numbers}
    return [
        uid
        for uid, holding in view.holdings.items()
        if any(card.uuid in uuids for of_container in holding.cards for card in of_container)
    ]


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where that is right."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(names: Sequence[str], count: int) -> str:
    """List the first names; ``count`` is how many there are in all."""
    shown = ", ".join(names[:MAX_NAMES])
    more = max(count, len(names)) - min(len(names), MAX_NAMES)
    return f"{shown} and {more} more" if more else shown
