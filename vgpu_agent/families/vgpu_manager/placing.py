"""Place a container that no extender has placed, by the rules of vgpu-manager's extender on one
node (vgpu-manager §5.5, §5.6).

The kube-scheduler has only counted, so the agent chooses the cards: those with room that the pod's
annotations allow, by its device policy and its topology mode. Called by `family`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CapacityError, RequestRefusedError, listed, quoted
from vgpu_agent.families.family import Remark
from vgpu_agent.families.vgpu_manager.node_state import link_types
from vgpu_agent.families.vgpu_manager.offer import cores_percent, memory_mib, shared_gpus
from vgpu_agent.families.vgpu_manager.requests import read_request
from vgpu_agent.model import Share
from vgpu_agent.placement.linked import best_set, components, quality
from vgpu_agent.placement.mixing import OTHERS
from vgpu_agent.placement.rooms import BINPACK, SPREAD, DeviceDemand, fitting_rooms
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.families.family import Question
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.model import DeviceRoom, Inventory
    from vgpu_agent.pods import Pod, PodContainer

# Reasons of events on the pod; the same as the extender's for pods that it places (vgpu-manager
# §5.2).
POLICY_INVALID, TOPOLOGY_FALLBACK = "PolicyInvalid", "TopologyFallback"

NONE = "none"
NUMA, NUMA_STRICT, LINK, LINK_STRICT = "numa", "numa-strict", "link", "link-strict"

# A list of cards in an annotation is compared with each card.
_LONGEST_LIST = 4096

# A tier is the cards that are joined by links of at least this type: NVLink, PCIe switch, NUMA
# node, any; the best first (vgpu-manager §5.6).
_NVLINK = 7
_TIERS = (_NVLINK, 4, 2, 1)
# What the cards of a tier have instead of NVLinks, for their pod's owner.
_INSTEAD = {
    _NVLINK: "",
    4: "no NVLinks, but a PCIe switch",
    2: "no NVLinks, but one NUMA node",
    1: "no NVLinks",
}
_SCORE_PER_NVLINK, _SCORE_PER_LINK_TYPE = 100, 10  # for the link score of a pair of cards


class _Card(msgspec.Struct, frozen=True):
    """A card with room, as policies see it.

    Attributes:
        uuid: of the card.
        number: on the node.
        numa: its NUMA node; None where it is not known.
        rank: lowest where the family has the card already, highest where another family has it or
            waits for it (`placement.mixing.Neighbours.rank`).
        score: how much the device policy favours it; the same for all without one.
    """

    uuid: str
    number: int
    numa: int | None
    rank: int
    score: float


class Placed(msgspec.Struct, frozen=True):
    """The cards of a container, the rules that chose them (``binpack, link``), and a remark for
    each annotation of the pod that was not followed.
    """

    shares: tuple[Share, ...]
    rules: str
    remarks: tuple[Remark, ...] = ()


class _Chosen(msgspec.Struct, frozen=True):
    """The cards, and where the topology mode was not followed, the links that they have instead."""

    cards: list[_Card]
    instead: str = ""


def place(question: Question, container: PodContainer, options: VgpuManagerOptions) -> Placed:
    """Choose cards for the container of the question.

    Raises:
        RequestRefusedError: limits or annotations cannot be followed on this node.
        CapacityError: there is no room, or none that the topology mode allows.
    """
    pod, keys = question.pod, options.keys
    request = read_request(pod, container, keys, options.memory_factor)
    _refuse_other_memory_policy(pod, options)
    cards = {gpu.uuid: gpu for gpu in shared_gpus(question.inventory, options)}

    def memory_on(room: DeviceRoom) -> int:
        return request.memory_on(memory_mib(cards[room.device], options))

    demand = DeviceDemand(
        len(question.ids),
        memory_on,
        request.cores_percent,
        f"{len(question.ids)} × {question.resource.name} ({request.text()})",
        all_compute_is_exclusive=False,
    )
    rooms = [room for room in question.rooms if room.device in cards]
    fitting = {
        room.device: room
        for room in fitting_rooms(rooms, demand, refused=_unwanted(pod, question, options))
    }
    remarks: list[Remark] = []
    policy = _word(pod, keys.device_policy, (BINPACK, SPREAD), remarks)
    mode = _word(pod, keys.topology_mode, (NUMA, NUMA_STRICT, LINK, LINK_STRICT), remarks)
    candidates = _in_order(question, fitting, policy, options)
    chosen = _chosen(question, candidates, container, policy, mode)
    cards_by_number = sorted(chosen.cards, key=lambda card: card.number)
    if chosen.instead:
        numbers = ", ".join(str(card.number) for card in cards_by_number)
        text = (
            f"annotation {keys.topology_mode}={mode} could not be followed with the GPUs that had "
            f"room on this node: it got GPU {numbers}: {chosen.instead}"
        )
        remarks.append(Remark(TOPOLOGY_FALLBACK, text))
    shares = tuple(
        Share(card.uuid, memory_on(fitting[card.uuid]), request.cores_percent)
        for card in cards_by_number
    )
    rules = (policy if policy != NONE else "in order", *(() if mode == NONE else (mode,)))
    return Placed(shares, ", ".join(rules), tuple(remarks))


def _word(pod: Pod, key: str, words: Sequence[str], remarks: list[Remark]) -> str:
    """The word of an annotation; one that means nothing counts as none, and its pod's owner is told
    (vgpu-manager §4.1).
    """
    word = pod.annotations.get(key, "").strip().lower()
    if word and word not in {*words, NONE}:
        text = (
            f"annotation {key}={quoted(word, 40)} means nothing and counts as {NONE}; expected "
            f"{listed([*words, NONE])}"
        )
        remarks.append(Remark(POLICY_INVALID, text))
    return word if word in words else NONE


def _refuse_other_memory_policy(pod: Pod, options: VgpuManagerOptions) -> None:
    key = options.keys.memory_policy
    word = pod.annotations.get(key, "").strip().lower()
    oversold = options.memory_scaling > 1
    if (word.startswith("virt") and not oversold) or (word.startswith("phy") and oversold):
        raise RequestRefusedError(
            f"pod {pod.full_name}: annotation {key}={quoted(word)}: this node offers "
            f"{options.memory_scaling:g} times the memory of its GPUs, and the policy virtual "
            "needs more than 1, physical at most 1; choose another node, or remove the annotation"
        )


def _unwanted(pod: Pod, question: Question, options: VgpuManagerOptions) -> dict[str, str]:
    """Map each card to why the pod does not want it, empty where it does. An entry matches each
    text that contains it, in upper or lower case, so ``A10`` also matches an ``A100`` (vgpu-manager
    §4.1).
    """
    keys = options.keys

    def entries(key: str) -> tuple[str, ...]:
        text = pod.annotations.get(key, "")
        if len(text) > _LONGEST_LIST:
            raise RequestRefusedError(
                f"pod {pod.full_name}: annotation {key} has {len(text)} characters; expected a "
                f"list of at most {_LONGEST_LIST}"
            )
        return tuple(entry for each in text.lower().split(",") if (entry := each.strip()))

    rules = (
        ("type", entries(keys.include_type), entries(keys.exclude_type)),
        ("UUID", entries(keys.include_uuid), entries(keys.exclude_uuid)),
    )
    reasons = {}
    for gpu in shared_gpus(question.inventory, options):
        reasons[gpu.uuid] = ""
        for (what, wanted, unwanted), text in zip(rules, (gpu.name, gpu.uuid), strict=True):
            if wanted and not any(entry in text.lower() for entry in wanted):
                reasons[gpu.uuid] = f"the pod wants another {what} of GPU"
            elif any(entry in text.lower() for entry in unwanted):
                reasons[gpu.uuid] = f"the pod excludes this {what} of GPU"
    return reasons


def _in_order(
    question: Question, fitting: dict[str, DeviceRoom], policy: str, options: VgpuManagerOptions
) -> list[_Card]:
    """Return the cards in the order in which the policy takes them."""
    cores = cores_percent(options)

    def free(room: DeviceRoom) -> float:
        slots = room.holders + room.holders_free
        parts = (
            room.holders_free / max(slots, 1),
            room.memory_free_mib / max(room.memory_mib, 1),
            room.cores_free_percent / max(cores, 1),
        )
        return 100 * sum(parts) / len(parts)

    sign = {BINPACK: -1.0, SPREAD: 1.0}.get(policy, 0.0)
    cards = [
        _Card(
            uuid,
            number,
            gpu.numa_node,
            question.neighbours.rank(uuid),
            sign * free(fitting[uuid]),
        )
        for number, gpu in question.inventory.numbered.items()
        if (uuid := gpu.uuid) in fitting
    ]
    if policy == NONE:
        return sorted(
            cards, key=lambda card: (card.rank, -1 if card.numa is None else card.numa, card.number)
        )
    if policy == SPREAD:
        # Spreading is chosen on purpose, so rank only puts those cards last that another family has
        # or waits for (`placement.rooms.choose_rooms`).
        return sorted(cards, key=lambda card: (card.rank == OTHERS, -card.score, card.number))
    return sorted(cards, key=lambda card: (card.rank, -card.score, card.number))


def _chosen(
    question: Question, candidates: list[_Card], container: PodContainer, policy: str, mode: str
) -> _Chosen:
    """Choose among the cards that the pod has already, for an init container; then among those that
    no other family has or waits for; then among all.
    """
    count = len(question.ids)
    own = {share.device for shares in question.siblings.values() for share in shares}
    narrower = [[card for card in candidates if card.rank != OTHERS]]
    if container.kind is ContainerKind.INIT:
        narrower.insert(0, [card for card in candidates if card.uuid in own])
    for among in narrower:
        if count <= len(among) < len(candidates):
            try:
                return _by_topology(question, among, count, policy, mode)
            except CapacityError:
                continue
    return _by_topology(question, candidates, count, policy, mode)


def _by_topology(
    question: Question, candidates: list[_Card], count: int, policy: str, mode: str
) -> _Chosen:
    found: _Chosen | None = None
    if mode in {NUMA, NUMA_STRICT}:
        found = _on_one_numa_node(candidates, count, policy)
    elif mode in {LINK, LINK_STRICT}:
        found = _linked(question.inventory, candidates, count, strict=mode == LINK_STRICT)
    if found is None and mode in {NUMA_STRICT, LINK_STRICT}:
        wanted = "on one NUMA node" if mode == NUMA_STRICT else "joined by NVLinks"
        raise CapacityError(
            f"{count} × {question.resource.name} cannot be placed on this node: the pod asks for "
            f"{mode}, and of the {len(candidates)} GPUs with room not {count} are {wanted}"
        )
    instead = {NUMA: "not on one NUMA node", LINK: "no links are known"}
    return found or _Chosen(candidates[:count], instead.get(mode, ""))


def _on_one_numa_node(candidates: list[_Card], count: int, policy: str) -> _Chosen | None:
    groups: dict[int, list[_Card]] = {}
    for card in candidates:
        if card.numa is not None:
            groups.setdefault(card.numa, []).append(card)
    order = sorted(groups)
    if policy != NONE:
        order.sort(key=lambda numa: -_mean_score(groups[numa]))
    fitting = (_Chosen(groups[numa][:count]) for numa in order if len(groups[numa]) >= count)
    return next(fitting, None)


def _mean_score(cards: Sequence[_Card]) -> float:
    return sum(card.score for card in cards) / len(cards)


def _linked(
    inventory: Inventory, candidates: list[_Card], count: int, *, strict: bool
) -> _Chosen | None:
    """Return cards of the best tier of links that has enough; None where no links are known, or,
    with ``strict``, not enough NVLinks.
    """
    cards = {card.uuid: card for card in candidates}
    every = [gpu.uuid for gpu in inventory.gpus]
    types = {pair: link_types(link) for pair, link in inventory.links.items() if pair[0] != pair[1]}

    def score(one: str, other: str) -> int:
        there, back = types.get((one, other), []), types.get((other, one), [])
        if len(there) != len(back):
            return 0
        return sum(map(_score, there))

    for tier in _TIERS[:1] if strict else _TIERS:

        def linked(one: str, other: str, least: int = tier) -> bool:
            return max(types.get((one, other), ()), default=0) >= least

        groups = components(list(cards), linked)
        fitting = [
            group
            for group in groups
            if len(group) >= count
            and (len(group) > 1 or any(linked(group[0], other) for other in every))
        ]
        if fitting:
            # max() takes the first of equal ones.
            group = max(
                fitting,
                key=lambda group: (
                    round(_mean_score([cards[uuid] for uuid in group]), 6),
                    quality(best_set(group, count, score), score),
                ),
            )
            return _Chosen(_members([cards[uuid] for uuid in group], count, score), _INSTEAD[tier])
        if tier == _TIERS[-1] and any(len(group) > 1 for group in groups):
            spanned = sorted(
                groups,
                key=lambda group: (-len(group), -_mean_score([cards[uuid] for uuid in group])),
            )
            chosen = [cards[uuid] for uuid in itertools.chain.from_iterable(spanned)][:count]
            return _Chosen(chosen, "not all of them linked")
    return None


def _members(group: list[_Card], count: int, score: Callable[[str, str], int]) -> list[_Card]:
    """Take the cards in runs of equal score: whole runs as long as they fit, and of the first run
    that does not fit the cards with the best links.
    """
    chosen: list[_Card] = []
    for _, cards in itertools.groupby(group, key=lambda card: round(card.score, 6)):
        run = {card.uuid: card for card in cards}
        beside = [card.uuid for card in chosen]
        best = best_set(list(run), count - len(chosen), score, beside=beside)
        chosen += [run[uuid] for uuid in best]
        if len(chosen) == count:
            break
    return chosen


def _score(link_type: int) -> int:
    nvlinks = link_type - _NVLINK + 1
    return _SCORE_PER_NVLINK * nvlinks if nvlinks > 0 else _SCORE_PER_LINK_TYPE * link_type
