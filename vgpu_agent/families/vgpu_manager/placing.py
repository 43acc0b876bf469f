"""Place a container that no extender has placed, by the rules of vgpu-manager's extender on one
node (vgpu-manager §5.5, §5.6).

The kube-scheduler has only counted ids, so the agent chooses the cards: those with room that the
pod's annotations allow, by its device policy and its topology mode. Called by `family`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CapacityError, RequestRefusedError, quoted
from vgpu_agent.families.family import Remark
from vgpu_agent.families.vgpu_manager.node_state import link_types
from vgpu_agent.families.vgpu_manager.offer import cores_percent, memory_mib, shared_gpus
from vgpu_agent.families.vgpu_manager.requests import (
    listed_texts,
    misspelt_word,
    policy_word,
    read_request,
)
from vgpu_agent.model import Share
from vgpu_agent.placement.mixing import OTHERS
from vgpu_agent.placement.rooms import DeviceDemand, fitting_rooms
from vgpu_agent.placement.selection import has_text, is_excluded, is_included, model_rule
from vgpu_agent.placement.topology import (
    MODES,
    NONE,
    NUMA_STRICT,
    POLICIES,
    Candidate,
    Chosen,
    Links,
    by_topology,
    in_order,
    policy_score,
)
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from vgpu_agent.families.family import Question
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.model import DeviceRoom
    from vgpu_agent.pods import Pod, PodContainer

# Reasons of events on the pod; the same as the extender's for pods that it places (vgpu-manager
# §5.2).
POLICY_INVALID, TOPOLOGY_FALLBACK = "PolicyInvalid", "TopologyFallback"


class Placed(msgspec.Struct, frozen=True):
    """The cards of a container, the rules that chose them (``binpack, link``; ``in order`` without
    a policy), and a remark (an event on the pod) for each annotation of the pod that was not
    followed.
    """

    shares: tuple[Share, ...]
    rules: str
    remarks: tuple[Remark, ...] = ()


def place(question: Question, container: PodContainer, options: VgpuManagerOptions) -> Placed:
    """Choose cards for the container of ``question``, which has its pod, the ids that the kubelet
    gave it, and what each device has left.

    Raises:
        RequestRefusedError: limits or annotations cannot be followed on this node.
        CapacityError: there is no room, or none that the topology mode allows.
    """
    pod, keys = question.pod, options.keys
    # `memory_factor`: MiB in one unit of the memory resource
    request = read_request(pod, container, keys, options.memory_factor)
    _refuse_other_memory_policy(pod, options)
    # the GPUs that have ids of this family's resource
    cards = {gpu.uuid: gpu for gpu in shared_gpus(question.inventory, options)}

    # of a share: a pod may ask for a percentage of the card's memory
    def memory_on(room: DeviceRoom) -> int:
        return request.memory_on(memory_mib(cards[room.device], options))

    demand = DeviceDemand(
        count=len(question.ids),
        memory_mib=memory_on,
        cores_percent=request.cores_percent,
        text=f"{len(question.ids)} × {question.resource.name} ({request.text()})",
        all_compute_is_exclusive=False,  # 100 % of the compute may share with those that ask for 0
    )
    rooms = [room for room in question.rooms if room.device in cards]
    fitting = {
        room.device: room
        for room in fitting_rooms(rooms, demand, refused=_unwanted(pod, question, options))
    }
    # (annotation, the words that it may have); a policy or mode of no such word is `NONE`
    wordings = ((keys.device_policy, POLICIES), (keys.topology_mode, MODES))
    policy, mode = (policy_word(pod, key, words) for key, words in wordings)
    remarks = [
        Remark(POLICY_INVALID, text)
        for key, words in wordings
        if (text := misspelt_word(pod, key, words))
    ]
    candidates = _in_order(question, fitting, policy, options)
    chosen = _chosen(question, candidates, container, policy, mode)
    cards_by_number = sorted(chosen.cards, key=lambda card: card.number)
    if chosen.fallback:  # the links or the place that the cards have instead of those asked for
        numbers = ", ".join(str(card.number) for card in cards_by_number)
        text = (
            f"annotation {keys.topology_mode}={mode} could not be followed with the GPUs that had "
            f"room on this node: it got GPU {numbers}: {chosen.fallback}"
        )
        remarks.append(Remark(TOPOLOGY_FALLBACK, text))
    shares = tuple(
        Share(card.key, memory_on(fitting[card.key]), request.cores_percent)
        for card in cards_by_number
    )
    rules = (policy if policy != NONE else "in order", *(() if mode == NONE else (mode,)))
    return Placed(shares, ", ".join(rules), tuple(remarks))


def _refuse_other_memory_policy(pod: Pod, options: VgpuManagerOptions) -> None:
    """Refuse a pod whose annotation asks for a node that offers more memory than its cards have
    (``virtual``), or no more (``physical``), if this node is not one of these.
    """
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
    """Map each card to why the pod does not want it, empty where it does; by the rules of the
    extender (`placement.selection`).
    """
    keys = options.keys
    # how an entry of an annotation matches a product name; `has_text` is that for UUIDs
    of_models = model_rule(substrings=options.types_match_substrings)
    types = listed_texts(pod, keys.include_type), listed_texts(pod, keys.exclude_type), of_models
    uuids = listed_texts(pod, keys.include_uuid), listed_texts(pod, keys.exclude_uuid), has_text
    reasons = {}
    for gpu in shared_gpus(question.inventory, options):
        reasons[gpu.uuid] = ""
        for what, text, (wanted, unwanted, rule) in (
            ("type", gpu.name, types),
            ("UUID", gpu.uuid, uuids),
        ):
            if not is_included(text, wanted, rule):
                reasons[gpu.uuid] = f"the pod wants another {what} of GPU"
            elif is_excluded(text, unwanted, rule):
                reasons[gpu.uuid] = f"the pod excludes this {what} of GPU"
    return reasons


def _in_order(
    question: Question, fitting: dict[str, DeviceRoom], policy: str, options: VgpuManagerOptions
) -> list[Candidate]:
    """Return the cards in the order in which the policy takes them."""
    cores = cores_percent(options)  # with which each card is offered

    def score(room: DeviceRoom) -> float:
        slots = room.holders + room.holders_free  # places for containers
        parts = (  # the free parts, 0 to 1
            room.holders_free / max(slots, 1),
            room.memory_free_mib / max(room.memory_mib, 1),
            room.cores_free_percent / max(cores, 1),
        )
        return policy_score(policy, parts)

    cards = [
        Candidate(
            key=gpu.uuid,
            number=number,
            numa=gpu.numa_node,
            rank=question.gpu_uses.rank(gpu.uuid),  # by the families that have the card
            score=score(fitting[gpu.uuid]),
        )
        for number, gpu in question.inventory.numbered.items()
        if gpu.uuid in fitting
    ]
    return in_order(cards, policy)


def _chosen(
    question: Question,
    candidates: list[Candidate],
    container: PodContainer,
    policy: str,
    mode: str,
) -> Chosen:
    """Choose cards: for an init container, first among those that the pod has already; then among
    those that no other family has or waits for; then among all.

    Raises:
        CapacityError: the topology mode cannot be followed.
    """
    count, inventory = len(question.ids), question.inventory
    links = Links(
        types={
            pair: link_types(link) for pair, link in inventory.links.items() if pair[0] != pair[1]
        },
        # also those without room: where links are asked for, a single card counts only if it is
        # linked to any card of the node
        every=[gpu.uuid for gpu in inventory.gpus],
    )
    # the cards that the pod's other containers have
    own = {share.device for shares in question.siblings.values() for share in shares}
    # `OTHERS`: the rank of a card that another family has or waits for
    narrower = [[card for card in candidates if card.rank != OTHERS]]
    if container.kind is ContainerKind.INIT:
        narrower.insert(0, [card for card in candidates if card.key in own])
    for among in narrower:
        if count <= len(among) < len(candidates) and (
            found := by_topology(among, count, policy, mode, links)
        ):
            return found
    if found := by_topology(candidates, count, policy, mode, links):
        return found
    wanted = "on one NUMA node" if mode == NUMA_STRICT else "joined by NVLinks"
    raise CapacityError(
        f"{count} × {question.resource.name} cannot be placed on this node: the pod asks for "
        f"{mode}, and of the {len(candidates)} GPUs with room not {count} are {wanted}"
    )
