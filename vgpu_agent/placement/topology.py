"""Choose the cards of a container among those that have room: the order of the device policy (the
fullest or the emptiest first), then the topology mode (all on one NUMA node, or joined by links).
Both are annotations of pods (vgpu-manager §5.5, §5.6).

Called where a node places a container itself, and where a scheduler chooses cards of a Node. Pure
functions. A card is identified by a key that the caller chooses.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.placement.linked import best_set, components, quality
from vgpu_agent.placement.mixing import OTHERS
from vgpu_agent.placement.rooms import BINPACK, SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NONE = "none"
NUMA, NUMA_STRICT, LINK, LINK_STRICT = "numa", "numa-strict", "link", "link-strict"
POLICIES = (BINPACK, SPREAD)
MODES = (NUMA, NUMA_STRICT, LINK, LINK_STRICT)

# A tier is a set of cards joined by links of at least this type: NVLink, PCIe switch, NUMA node,
# any; the best first (vgpu-manager §5.6).
NVLINK = 7
_TIERS = (NVLINK, 4, 2, 1)
# What the cards of a tier have instead of NVLinks: `Chosen.fallback`, a message to the pod's owner.
_FALLBACKS = {
    NVLINK: "",
    4: "no NVLinks, but a PCIe switch",
    2: "no NVLinks, but one NUMA node",
    1: "no NVLinks",
}
_SCORE_PER_NVLINK, _SCORE_PER_LINK_TYPE = 100, 10  # for the link score of a pair of cards


class Candidate(msgspec.Struct, frozen=True):
    """A card with room, as policies see it.

    Attributes:
        key: of the card, unique on its node.
        number: on the node.
        numa: its NUMA node; None where it is not known.
        rank: lowest where the family has the card already, highest where another family has it or
            waits for it (`placement.mixing.GpuUses.rank`).
        score: the device policy prefers high scores; equal for all cards without a policy.
    """

    key: str
    number: int
    numa: int | None
    rank: int
    score: float


class Links(msgspec.Struct, frozen=True):
    """The links of a node's cards.

    Attributes:
        types: (card, other card) → the types of the links between them: 1 to 6 for levels of PCIe
            and NUMA, the closer the higher, and from 7 on for NVLinks (vgpu-manager §3).
        every: the keys of all cards of the node, also of those without room.
    """

    types: Mapping[tuple[str, str], Sequence[int]]
    every: Sequence[str]


class Chosen(msgspec.Struct, frozen=True):
    """The chosen cards. ``fallback`` says what they have instead of the links or the NUMA node that
    the topology mode asks for, e.g. ``no NVLinks, but one NUMA node``; empty where the mode was
    followed.
    """

    cards: list[Candidate]
    fallback: str = ""


_SIGNS = {BINPACK: -1.0, SPREAD: 1.0}


def policy_score(policy: str, free_parts: Sequence[float]) -> float:
    """Return the score of a card for a device policy. ``free_parts`` are the free parts, from 0 to
    1, of its slots (places for containers, ``--device-split-count``), memory and compute.
    """
    sign = _SIGNS.get(policy, 0.0)
    return sign * 100 * sum(free_parts) / len(free_parts)


def in_order(candidates: Iterable[Candidate], policy: str) -> list[Candidate]:
    """Return the cards in the order in which the policy takes them."""
    if policy == NONE:
        return sorted(
            candidates,
            key=lambda card: (card.rank, -1 if card.numa is None else card.numa, card.number),
        )
    if policy == SPREAD:
        # Spreading is chosen on purpose, so rank only puts those cards last that another family has
        # or waits for (`placement.rooms.choose_rooms`).
        return sorted(candidates, key=lambda card: (card.rank == OTHERS, -card.score, card.number))
    return sorted(candidates, key=lambda card: (card.rank, -card.score, card.number))


def by_topology(
    candidates: list[Candidate], count: int, policy: str, mode: str, links: Links
) -> Chosen | None:
    """Choose ``count`` of at least as many candidates, which are `in_order`; None where a strict
    mode cannot be followed.
    """
    found: Chosen | None = None
    if mode in {NUMA, NUMA_STRICT}:
        found = _on_one_numa_node(candidates, count, policy)
    elif mode in {LINK, LINK_STRICT}:
        found = _linked(candidates, count, links, strict=mode == LINK_STRICT)
    if found is None and mode in {NUMA_STRICT, LINK_STRICT}:
        return None
    fallback = {NUMA: "not on one NUMA node", LINK: "no links are known"}
    return found or Chosen(candidates[:count], fallback.get(mode, ""))


def _on_one_numa_node(candidates: list[Candidate], count: int, policy: str) -> Chosen | None:
    groups: dict[int, list[Candidate]] = {}
    for card in candidates:
        if card.numa is not None:
            groups.setdefault(card.numa, []).append(card)
    order = sorted(groups)
    if policy != NONE:
        order.sort(key=lambda numa: -_mean_score(groups[numa]))
    fitting = (Chosen(groups[numa][:count]) for numa in order if len(groups[numa]) >= count)
    return next(fitting, None)


def _mean_score(cards: Sequence[Candidate]) -> float:
    return sum(card.score for card in cards) / len(cards)


def _linked(
    candidates: list[Candidate], count: int, links: Links, *, strict: bool
) -> Chosen | None:
    """Return cards of the best tier of links that has enough; None where no links are known, or,
    with ``strict``, not enough NVLinks.
    """
    cards = {card.key: card for card in candidates}
    types = links.types

    def score(one: str, other: str) -> int:
        there, back = types.get((one, other), ()), types.get((other, one), ())
        if len(there) != len(back):  # counts for nothing, as in vgpu-manager
            return 0
        return sum(map(_score, there))

    for tier in _TIERS[:1] if strict else _TIERS:

        def linked(one: str, other: str, least: int = tier) -> bool:
            return max(types.get((one, other), ()), default=0) >= least

        groups = components(list(cards), linked)
        fitting = [
            group
            for group in groups
            # a single card counts only if it has such a link to any card of the node
            if len(group) >= count
            and (len(group) > 1 or any(linked(group[0], other) for other in links.every))
        ]
        if fitting:
            # The highest mean score counts, then the best links; max() takes the first of equal
            # ones. The search among many cards takes long, so a single group is taken without it.
            group = fitting[0]
            if len(fitting) > 1:
                group = max(
                    fitting,
                    key=lambda group: (
                        round(_mean_score([cards[key] for key in group]), 6),
                        quality(best_set(group, count, score), score),
                    ),
                )
            return Chosen(_members([cards[key] for key in group], count, score), _FALLBACKS[tier])
        if tier == _TIERS[-1] and any(len(group) > 1 for group in groups):
            # No tier has enough cards: take those of several groups, the largest first.
            spanned = sorted(
                groups,
                key=lambda group: (-len(group), -_mean_score([cards[key] for key in group])),
            )
            chosen = [cards[key] for key in itertools.chain.from_iterable(spanned)][:count]
            return Chosen(chosen, "not all of them linked")
    return None


def _members(
    group: list[Candidate], count: int, score: Callable[[str, str], int]
) -> list[Candidate]:
    """Take the cards in runs of equal score: whole runs as long as they fit, and of the first run
    that does not fit the cards with the best links.
    """
    chosen: list[Candidate] = []
    for _, cards in itertools.groupby(group, key=lambda card: round(card.score, 6)):
        run = {card.key: card for card in cards}
        beside = [card.key for card in chosen]
        best = best_set(list(run), count - len(chosen), score, beside=beside)
        chosen += [run[key] for key in best]
        if len(chosen) == count:
            break
    return chosen


def _score(link_type: int) -> int:
    nvlinks = link_type - NVLINK + 1  # each further NVLink has the next type
    return _SCORE_PER_NVLINK * nvlinks if nvlinks > 0 else _SCORE_PER_LINK_TYPE * link_type
