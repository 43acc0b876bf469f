"""Read a scheduler's decision for a container from its pod;
check it against the pod's request and this node.

The scheduler's decision is ``volcano.sh/vgpu-ids-new``, which stays on the pod for good
(volcano-vgpu §3). It has one *segment* for each regular container that asks for GPUs, in their
order (volcano-vgpu D3): the GPUs of that container, each with its compute in percent and its memory
in units of `Offer.factor` MiB. `Offer`, from the module `offer`, describes the GPUs of this node;
`Offer.units` has the memory of each in such units.

A `Question` is about one container: it has its pod, the ids that the kubelet gave it, and what each
device has left. The container is known from the kubelet's records, not guessed. Every user who may
edit pods can write these annotations, so they never give more than the container's limits say.
Called by `family`, `mig.family` and `mig.decisions`.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError, quoted
from vgpu_agent.families.family import Question, requesting_container
from vgpu_agent.families.volcano_vgpu.pod_devices import (
    SEGMENT_END,
    Assigned,
    DevicesTextError,
    Segment,
    parse_pod_devices,
)
from vgpu_agent.families.volcano_vgpu.requests import read_request
from vgpu_agent.families.volcano_vgpu.settings import FAMILY, MIG
from vgpu_agent.model import Resource, Share
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.families.volcano_vgpu.offer import Offer
    from vgpu_agent.families.volcano_vgpu.requests import ContainerRequest, Names
    from vgpu_agent.model import Inventory
    from vgpu_agent.pods import Pod, PodContainer

# Annotations of a pod.
NODE = "volcano.sh/vgpu-node"  # the node for which the GPUs were decided
DECISION = "volcano.sh/vgpu-ids-new"
TO_ALLOCATE = "volcano.sh/devices-to-allocate"  # the segments of containers that have not started

_REMEDY = "delete the pod, so that its owner makes a new one that is scheduled anew"
# For an annotation that a pod's template may have, copied from a pod that was scheduled.
_REMEDY_IF_COPIED = f"{_REMEDY}, without this annotation in its template"


def decided_shares(question: Question, offer: Offer) -> tuple[Share, ...] | None:
    """Return the result of `decided_segment` as shares of GPUs.

    Raises:
        RequestRefusedError: see `decided_segment`.
    """
    segment = decided_segment(question, offer)
    return (
        None if segment is None else tuple(_share(assigned, offer.factor) for assigned in segment)
    )


def decided_segment(question: Question, offer: Offer) -> Segment | None:
    """Return what the pod's annotation `DECISION` says about the container, its GPUs in the order
    of the annotation: a scheduler's decision, or what the agent itself has written for a pod that
    it has placed. None if it says nothing; then the agent places the container.

    An init container has no segment (volcano-vgpu D14). It gets GPUs that a scheduler has decided
    for the containers after it. If the agent has placed these, it places the init container too, at
    each of its starts. A sidecar has no segment either, and it needs GPUs beside those of the other
    containers, so the agent places it.

    Raises:
        RequestRefusedError: the decision is malformed, is not for this node, or names what was not
            asked for or does not exist.
    """
    pod, container = question.pod, requesting_container(question)
    text = pod.annotations.get(DECISION, "")
    if not text.strip(SEGMENT_END) or container.kind is ContainerKind.SIDECAR:
        return None
    if container.kind is ContainerKind.INIT and not _is_schedulers(pod):
        return None
    if NODE not in pod.annotations:
        raise refused(
            pod,
            DECISION,
            text,
            f"no {NODE} beside it says for which node the GPUs were decided",
            _REMEDY_IF_COPIED,
        )
    if (node := pod.annotations[NODE]) != question.node:
        problem = (
            f"the GPUs were decided for a node other than {question.node}, where the pod is bound"
        )
        raise refused(pod, NODE, node, problem, _REMEDY_IF_COPIED)
    segments, asking = _segments(pod, offer.names)
    request = read_request(pod, container, offer.names)
    if container.kind is ContainerKind.INIT:
        return _segment_of_init(question, segments, request, offer)
    place = next((place for place, each in enumerate(asking) if each.name == container.name), None)
    if place is None:
        raise refused(
            pod,
            DECISION,
            text,
            f"container {container.name} asks for none of {offer.names.number} and "
            f"{offer.names.memory}",
        )
    if not segments[place]:
        return None
    _require_agreement(pod, place, len(segments))
    _require_on_node(question, segments[place], offer)
    for assigned in segments[place]:
        _require_within_request(pod, container.name, assigned, request, offer)
    if len(segments[place]) != len(question.ids):
        raise refused(
            pod,
            DECISION,
            text,
            f"{len(segments[place])} GPUs were decided for container {container.name}, and the "
            f"kubelet gave it {len(question.ids)} × {question.resource.name}",
        )
    return segments[place]


def decided_gpus(pod: Pod, inventory: Inventory, offer: Offer) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each container that a scheduler has decided for. Containers that could not
    start with that decision are left out.
    """
    if not pod.annotations.get(DECISION, "").strip(SEGMENT_END):
        return {}
    decided: dict[str, tuple[str, ...]] = {}
    units = collections.Counter[str]()
    for container in offer.names.asking(pod):
        count = container.limits.get(offer.names.number, 0)
        if not 0 < count <= len(offer.units):  # users may write any number there
            continue
        resource = Resource(offer.names.number, FAMILY, ids=())
        asked = Question(
            resource,
            pod,
            container.name,
            ids=("",) * count,  # only their number counts here
            node=pod.node,
            inventory=inventory,
            rooms=(),
        )
        try:
            segment = decided_segment(asked, offer)
        except RequestRefusedError:
            continue
        if segment:
            decided[container.name] = tuple(assigned.gpu for assigned in segment)
            for assigned in segment:
                units[assigned.gpu] += assigned.memory_units
    if any(count > offer.units[gpu] for gpu, count in units.items()):
        return {}  # more than a GPU has, so the containers can never all start
    return decided


def refused(
    pod: Pod, key: str, value: str, problem: str, remedy: str = _REMEDY
) -> RequestRefusedError:
    """Return a refusal in the form that all have: the pod, ``key`` and ``value`` of the annotation,
    what is wrong, what to do.
    """
    return RequestRefusedError(
        f"pod {pod.full_name}: annotation {key}={quoted(value)}: {problem}; {remedy}"
    )


def _is_schedulers(pod: Pod) -> bool:
    """Tell whether a scheduler has written the decision:
    each writes the annotation `TO_ALLOCATE` beside it, and the agent never adds that.
    """
    return TO_ALLOCATE in pod.annotations


def _segments(pod: Pod, names: Names) -> tuple[tuple[Segment, ...], tuple[PodContainer, ...]]:
    """Return the segments of `DECISION`, and the containers that they are for, one for each."""
    text, asking = pod.annotations[DECISION], names.asking(pod)
    try:
        segments = parse_pod_devices(text)
    except DevicesTextError as err:
        raise refused(pod, DECISION, text, str(err)) from err
    if len(segments) != len(asking):
        raise refused(
            pod,
            DECISION,
            text,
            (
                f"it has entries for {len(segments)} containers, and {len(asking)} of the pod "
                "ask for GPUs"
            ),
        )
    return segments, asking


def _require_agreement(pod: Pod, place: int, count: int) -> None:
    """Require that `TO_ALLOCATE` has the same segment for the container as `DECISION`, or an empty
    one: the scheduler writes both at once, and a start empties the container's segment.

    ``place`` is the index of the segment, and ``count`` how many segments `DECISION` has.
    """
    pending = pod.annotations.get(TO_ALLOCATE, "").split(SEGMENT_END)
    decided = pod.annotations[DECISION].split(SEGMENT_END)
    if len(pending) == count and pending[place] and pending[place] != decided[place]:
        raise refused(
            pod,
            TO_ALLOCATE,
            pending[place],
            f"{DECISION} says {quoted(decided[place])} for the same container",
        )


def _require_on_node(question: Question, segment: Sequence[Assigned], offer: Offer) -> None:
    """Require, regardless of the request, that each device is of the kind that this node shares,
    that its GPU is offered and named once, and that its memory is above 0 and at most the GPU's.
    """
    pod, text = question.pod, question.pod.annotations[DECISION]
    for assigned in segment:
        if (is_instance := assigned.device != assigned.gpu) != (offer.mode == MIG):
            what, shares = (
                ("a MIG instance", "whole GPUs by memory")
                if is_instance
                else ("a whole GPU", "MIG instances")
            )
            raise refused(
                pod,
                DECISION,
                text,
                f"{quoted(assigned.device)} is {what}, and this node shares {shares}",
            )
        if assigned.gpu not in offer.units:
            offered = ", ".join(offer.units) or "none"
            raise refused(
                pod,
                DECISION,
                text,
                f"node {question.node} offers no GPU {quoted(assigned.gpu)}; it offers {offered}",
            )
        if assigned.memory_units <= 0:
            problem = f"{assigned.memory_units} units of memory would mean no limit at all"
            remedy = (
                f"ask for {offer.names.memory} as a plain number of {offer.factor} MiB, such as "
                "3000 (3Gi overflows), and for percentages use Volcano 1.14 or newer"
            )
            raise refused(pod, DECISION, text, problem, remedy)
        if assigned.memory_units > (most := offer.units[assigned.gpu]):
            problem = (
                f"{assigned.memory_units} units of {offer.factor} MiB are more than the {most} of "
                f"GPU {assigned.gpu}"
            )
            raise refused(
                pod,
                DECISION,
                text,
                problem,
                f"ask for {offer.names.memory} as a plain number of {offer.factor} MiB, at most "
                f"{most}",
            )
    if len({assigned.gpu for assigned in segment}) != len(segment):
        raise refused(pod, DECISION, text, "a GPU is named twice for one container")


def _require_within_request(
    pod: Pod, container: str, assigned: Assigned, request: ContainerRequest, offer: Offer
) -> None:
    """Require that the decision gives no more than the limits ask for."""
    # a percentage rounded up, as some schedulers do
    most = request.most_units_on(offer.units[assigned.gpu])
    if assigned.memory_units > most or not 0 <= assigned.cores_percent <= request.cores_percent:
        problem = (
            f"{assigned.memory_units} units of memory and {assigned.cores_percent} % of the "
            f"compute do not fit the request of container {container} "
            f"({request.text(offer.names)}: at most {most} units)"
        )
        raise refused(pod, DECISION, pod.annotations[DECISION], problem)


def _segment_of_init(
    question: Question, segments: Sequence[Segment], request: ContainerRequest, offer: Offer
) -> Segment | None:
    """Return GPUs that belong to the pod anyway: those of a later container that has as many as
    the init container asks for, else the first ones of all later containers.

    The init container never gets more of one GPU than the later containers have together, because
    the scheduler has reserved nothing else.
    """
    every = [assigned for segment in segments for assigned in segment]
    if not every:
        return None
    for segment in segments:
        _require_on_node(question, segment, offer)
    memory, cores = collections.Counter[str](), collections.Counter[str]()
    for assigned in every:
        memory[assigned.device] += assigned.memory_units
        cores[assigned.device] += max(0, assigned.cores_percent)
    count = len(question.ids)
    alike = next((segment for segment in segments if len(segment) == count), tuple(every))
    devices = list(dict.fromkeys(assigned.device for assigned in alike))[:count]
    if len(devices) < count:
        raise refused(
            question.pod,
            DECISION,
            question.pod.annotations[DECISION],
            f"init container {question.container} asks for {count} GPUs, and {len(devices)} were "
            "decided for the whole pod",
            f"ask for at most {len(devices)} × {question.resource.name} in init containers",
        )
    units = {assigned.device: offer.units[assigned.gpu] for assigned in every}
    return tuple(
        Assigned(
            device,
            min(request.units_on(units[device]), memory[device], units[device]),
            min(request.cores_percent, cores[device]),
        )
        for device in devices
    )


def _share(assigned: Assigned, factor: int) -> Share:
    return Share(assigned.device, assigned.memory_units * factor, assigned.cores_percent)
