"""Read a scheduler's claim for a container from its pod;
check it against the pod's request and this node.

The claim is in ``pre-allocated``, by the container's name, so neither the order in which pods were
bound nor ``predicate-time`` (the time of that claim) decides anything (vgpu-manager §12.3). The
container in question is known from the kubelet's records. ``real-allocated`` is written after a
start, and no later start depends on it. Every user who may edit pods can write these annotations,
so they never give more than the container's limits say. Called by `family`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError, listed, quoted
from vgpu_agent.families.family import requesting_container
from vgpu_agent.families.vgpu_manager.claims import (
    ClaimsTextError,
    ContainerClaim,
    by_container,
    parse_claims,
)
from vgpu_agent.families.vgpu_manager.offer import memory_mib, shared_gpus
from vgpu_agent.families.vgpu_manager.requests import read_request

if TYPE_CHECKING:
    from vgpu_agent.families.family import Question
    from vgpu_agent.families.vgpu_manager.claims import DeviceClaim
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.families.vgpu_manager.requests import Request
    from vgpu_agent.pods import Pod

_REMEDY = "delete the pod, so that its owner makes a new one that is scheduled anew"
# The annotation may come from a pod template that was copied from a scheduled pod.
_COPIED = f"{_REMEDY}, without this annotation in its template"


def claimed_cards(question: Question, options: VgpuManagerOptions) -> ContainerClaim | None:
    """Return a scheduler's claim for the container; None if there is none, and the agent places the
    container.

    The annotation may name some of the pod's containers only: the agent itself adds them one by
    one, as they start.

    Raises:
        RequestRefusedError: the claim is malformed, is not for this node, names a card that does
            not exist, or names amounts that the container does not ask for.
    """
    pod, container, keys = question.pod, requesting_container(question), options.keys
    text = pod.annotations.get(keys.pre_allocated, "")
    if not text.strip():
        return None
    node = pod.annotations.get(keys.predicate_node, "")
    if not node:
        problem = f"no {keys.predicate_node} beside it says for which node the GPUs were chosen"
        raise refused(pod, keys.pre_allocated, text, problem, _COPIED)
    if node != question.node:
        problem = (
            f"the GPUs were chosen for a node other than {question.node}, where the pod is bound"
        )
        raise refused(pod, keys.predicate_node, node, problem, _COPIED)
    try:
        claim = by_container(parse_claims(text)).get(container.name)
    except ClaimsTextError as err:
        raise refused(pod, keys.pre_allocated, text, str(err)) from err
    if claim is None:
        return None
    # the factor: MiB in one unit of the memory resource
    request = read_request(pod, container, keys, options.memory_factor)
    if problem := _problem(question, claim, request, options):
        raise refused(pod, keys.pre_allocated, text, problem)
    return claim


def disagreement(claim: ContainerClaim, question: Question) -> str:
    """Explain, as the end of a sentence, which indices of a claim do not belong to its UUIDs; empty
    when all do. The UUIDs count.
    """
    # indices that cards keep when another one is lost
    numbers = {gpu.uuid: number for number, gpu in question.inventory.numbered.items()}
    wrong = [
        f"{card.index} for {card.uuid}, which is {numbers[card.uuid]}"
        for card in claim.cards
        if numbers.get(card.uuid, card.index) != card.index
    ]
    return f", which has index {listed(wrong)}; the UUID counts" if wrong else ""


def refused(
    pod: Pod, key: str, value: str, problem: str, remedy: str = _REMEDY
) -> RequestRefusedError:
    """Return a refusal in the form that all have: pod, key, value, problem, remedy."""
    return RequestRefusedError(
        f"pod {pod.full_name}: annotation {key}={quoted(value)}: {problem}; {remedy}"
    )


def _problem(
    question: Question, claim: ContainerClaim, request: Request, options: VgpuManagerOptions
) -> str:
    """Explain why the container must not get its claim; empty when it may."""
    name = claim.container
    if len(claim.cards) != len(question.ids):
        return (
            f"{len(claim.cards)} GPUs were chosen for container {name}, and the kubelet gave it "
            f"{len(question.ids)} × {question.resource.name}"
        )
    if len({card.uuid for card in claim.cards}) != len(claim.cards):
        return f"a GPU is named twice for container {name}"
    problems = (_card_problem(question, name, card, request, options) for card in claim.cards)
    return next(filter(None, problems), "")


def _card_problem(
    question: Question, name: str, card: DeviceClaim, request: Request, options: VgpuManagerOptions
) -> str:
    offered = {gpu.uuid: gpu for gpu in shared_gpus(question.inventory, options)}
    if card.uuid not in offered:
        return (
            f"node {question.node} offers no GPU {quoted(card.uuid, 80)}; it offers "
            f"{listed(offered) or 'none'}"
        )
    most = request.memory_on(memory_mib(offered[card.uuid], options))
    if card.memory_mib <= 0:
        return f"{card.memory_mib} MiB of memory for container {name} would mean no limit"
    if card.memory_mib > most:
        return (
            f"{card.memory_mib} MiB are not what container {name} asks for, {request.text()}: at "
            f"most {most} MiB of GPU {card.uuid}"
        )
    least = 1 if request.cores_percent else 0
    if not least <= card.cores_percent <= request.cores_percent:
        return (
            f"{card.cores_percent} % of the compute are not what container {name} asks for, "
            f"{request.text()}"
        )
    return ""
