"""``/debug/explain``: why a pod does not start here, or which GPU it has and how that is known, in
sentences.

For an operator who knows only the pod's name. Joins the pods, the ledger, the refusals and the
journal, and lists them as sources, also for a pod that is in none of them. Used by `debug`, and
through it by ``vgpu-agent status --pod``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.pods import ENDED
from vgpu_agent.web import allocations, binding, cluster, health, uses, xids
from vgpu_agent.web.health import span
from vgpu_agent.web.shapes import When, when

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.journal import Entry
    from vgpu_agent.pods import Pod, PodContainer
    from vgpu_agent.status import AgentStatus
    from vgpu_agent.web.allocations import AllocationView
    from vgpu_agent.web.binding import RefusalView
    from vgpu_agent.web.views import ShareView

_SHOWN_EVENTS = 20
_SHOWN_GPUS = 8
_FAILED = "Failed"  # phase of a pod
# state of a grant's limit → its words after “Its limit is”; other states are their own words
_LIMIT_WORDS = {
    "no limit": "not there",
    "whole device": "not needed",
    "configured": "configured, and not seen in force",
}


class EventView(msgspec.Struct, frozen=True):
    """One decision of the journal."""

    event: str
    when: When = When()
    facts: dict[str, object] = {}


class Explanation(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        answer: sentences, the most important first.
        sources: the sources that were searched, and how recent each of them is.
        events: the last decisions about the pod, the oldest first.
    """

    pod: str
    answer: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    events: tuple[EventView, ...] = ()


def explain(status: AgentStatus, now: float, name: str) -> Explanation:
    """Explain the pod ``namespace/name``."""
    pod = max(
        (pod for pod in status.cluster.pods if pod.full_name == name),
        key=lambda pod: pod.bound,  # its position in the order of binds
        default=None,
    )
    grants = allocations.of_pod(status, now, name)
    refusals = [refusal for refusal in binding.refusals(status, now) if refusal.pod_name == name]
    events = _events(status, name, {grant.token for grant in grants if grant.token})
    sentences = tuple(
        _about(status, now, pod, grants, refusals, events)
        if pod
        else _unknown(status, now, name, grants, refusals, events)
    )
    shown = tuple(
        EventView(event=entry.event, when=when(entry.at, now), facts=entry.facts)
        for entry in events[-_SHOWN_EVENTS:]
    )
    return Explanation(
        pod=name, answer=sentences, sources=tuple(_sources(status, now)), events=shown
    )


def pods(status: AgentStatus) -> tuple[str, ...]:
    """List the pods that can be explained: those that ask for our resources, hold some, or are
    refused.
    """
    ours = cluster.our_resources(status)
    asking = (
        pod.full_name
        for pod in status.cluster.pods
        if any(not ours.isdisjoint(container.limits) for container in pod.containers)
    )
    # `owner.pod`: the name alone, empty while only the pod's UID is known
    holding = (
        grant.owner.pod_name
        for grant in status.ledger.grants
        if grant.owner is not None and grant.owner.pod
    )
    return tuple(
        sorted({*asking, *holding, *(refusal.pod.full_name for refusal in status.binding.refusals)})
    )


def _about(
    status: AgentStatus,
    now: float,
    pod: Pod,
    grants: tuple[AllocationView, ...],
    refusals: list[RefusalView],
    events: list[Entry],
) -> Iterator[str]:
    """Explain a pod that the watch shows."""
    ours = cluster.our_resources(status)
    asking = [
        container
        for container in pod.containers
        if any(name in ours for name in (*container.limits, *container.unreadable_limits))
    ]
    if not asking:
        wanted = sorted({name for container in pod.containers for name in container.limits})
        yield (
            f"No container of {pod.full_name} asks for a resource of this node's agent "
            f"({', '.join(sorted(ours)) or 'none is offered'}); its limits name "
            f"{', '.join(wanted) or 'no extended resource'}."
        )
    for container in asking:
        yield from _container(status, now, pod, container, grants, refusals)
    if not pod.ended and not all(container.started for container in asking):
        yield from _ill(status, now)
    yield from _claims(status, pod)
    # an empty `pod_uid`: the owner is not known yet, or by its name only. `kubelet_uid`: the
    # UID that grants have, which is not the API server's for a static pod.
    ours_now = [grant for grant in grants if grant.pod_uid in {"", pod.kubelet_uid}]
    # the errors (XIDs) of the devices that the pod has, or had until its grants were released
    for held in xids.held_now(ours_now, now) or xids.held_before(status, events, now):
        yield from xids.sentences(status, now, pod.full_name, held, pod)
    if pod.ended:
        # ENDED: the pod has left the watch, and how it ended is not known
        how = f" ({pod.phase})" if pod.phase != ENDED else ""
        yield f"The pod has ended{how}; nothing of it starts again."
    elif pod.deleting:
        yield "The pod is being deleted."
    for grant in grants:
        if grant.pod_uid and grant.pod_uid != pod.kubelet_uid:
            yield (
                f"An earlier pod of that name (UID {grant.pod_uid}) still holds "
                f"{_shares(grant.shares)} in container {grant.container}."
            )
    yield (
        f"The pod has UID {pod.kubelet_uid}, phase {pod.phase}, and was placed by "
        f"{pod.scheduler or 'an unknown scheduler'}."
    )


def _claims(status: AgentStatus, pod: Pod) -> Iterator[str]:
    """Tell which GPUs the pod waits for."""
    for use in status.ledger.uses:
        for claim in use.claims:
            if claim.pod_uid == pod.kubelet_uid:
                yield from uses.waiting_for(status, claim, use)


def _held_back(status: AgentStatus, resource: str) -> Iterator[str]:
    """Explain why fewer ids of ``resource`` are available than exist."""
    plugin = next((plugin for plugin in status.plugins if plugin.resource == resource), None)
    if plugin is not None and (found := uses.held_back(status, resource)):
        free = (
            f", {status.ledger.free[resource]} of them free"
            if resource in status.ledger.free
            else ""
        )
        yield (
            f"{resource} has {plugin.ids_sent} ids here{free}; not available: "
            f"{'; '.join(each.reason for each in found)}."
        )


def _container(
    status: AgentStatus,
    now: float,
    pod: Pod,
    container: PodContainer,
    grants: tuple[AllocationView, ...],
    refusals: list[RefusalView],
) -> Iterator[str]:
    """Explain one container that asks for our resources."""
    ours = cluster.our_resources(status)
    for name, text in container.unreadable_limits.items():
        if name in ours:
            yield (
                f"Container {container.name} asks for {name} = {text[:60]!r}, which is not a "
                "whole number."
            )
    for resource in container.limits:
        yield from (
            f"Container {container.name} asks for {resource}, which {why}"
            for why in _not_offered(status, resource)
        )
    refused = [
        refusal
        for refusal in refusals
        if (refusal.pod_uid, refusal.container) == (pod.kubelet_uid, container.name)
    ]
    yield from map(_refused, refused)
    held = [
        grant
        for grant in grants
        if grant.container == container.name
        and grant.pod_uid in {"", pod.kubelet_uid}
        and grant.resource in container.limits
    ]
    for grant in held:
        if grant.shares or not refused:
            yield from _held(grant, container)
            yield from _unhealthy(status, now, grant)
            yield from _overcommitted(status, grant)
    yield from _without_number(status, container)
    if refused:
        return  # a start is refused only after the kubelet has asked for all resources of the pod
    rooms = status.ledger.rooms  # resources that only schedulers count have no room of their own
    for name in sorted(container.limits.keys() & rooms.keys() - {grant.resource for grant in held}):
        yield from _not_asked(status, now, pod, container, name)


def _without_number(status: AgentStatus, container: PodContainer) -> Iterator[str]:
    """Explain a request for memory or compute without a number of GPUs: schedulers take it as a
    request for one GPU, the kubelet for none.
    """
    # `only_counted`: resources that only schedulers count, such as memory; `decided_by_pod`: those
    # for which the pod, and not the ids, decides on the devices
    family = {plugin.resource: plugin.family for plugin in status.plugins}
    for name in sorted(container.limits.keys() & status.ledger.only_counted):
        numbers = {  # the resources of its family that request GPUs by number
            resource
            for resource in status.ledger.decided_by_pod
            if family.get(resource) == family.get(name)
        }
        if numbers and numbers.isdisjoint(container.limits):
            number = min(numbers)
            yield (
                f"Container {container.name} asks for {name} and not for {number}, so the "
                f"kubelet gives it no GPU: ask for {number}, too."
            )
            return


def _held(grant: AllocationView, container: PodContainer) -> Iterator[str]:
    if grant.shares:
        limit = (
            f" Its limit is {_LIMIT_WORDS.get(grant.limit, grant.limit)}: {grant.limit_reason}."
            if grant.limit
            else ""
        )
        yield (
            f"Container {grant.container} has {_shares(grant.shares)} through "
            f"{grant.resource}.{limit}"
        )
    elif container.started:
        yield (
            f"Container {grant.container} holds {grant.ids_total} of {grant.resource} and runs, "
            "but its devices are not known here."
        )
    else:
        yield (
            f"Container {grant.container} is promised {grant.ids_total} of {grant.resource} and "
            "has not started. Its devices are chosen when the kubelet asks for its start, after "
            "images are pulled and earlier init containers have ended."
        )
    if grant.evidence:
        yield f"That is known because: {'; '.join(grant.evidence)}."


def _not_offered(status: AgentStatus, resource: str) -> Iterator[str]:
    """Explain why nothing of ``resource`` is offered now."""
    if reason := status.unavailable.get(resource):
        yield f"is not offered now: {reason}."


def _unhealthy(status: AgentStatus, now: float, grant: AllocationView) -> Iterator[str]:
    """Explain what is wrong with the devices of a container, which is usually why it fails."""
    if not status.inventory.gpus:
        return  # none has been read
    for share in grant.shares:
        found = status.inventory.device(share.device)
        if found is None:
            yield (
                f"This node has no {share.device} any more; what runs on it fails: delete the pod, "
                "so that its owner makes a new one."
            )
            continue
        gpu, instance = found
        ill = gpu.health if instance is None or not gpu.health.ok else instance.health
        if not ill.ok or not gpu.present:
            yield f"{_called(share)} {health.trouble_text(ill, now, gone=not gpu.present)}."
            if remedy := health.remedy(ill, gpu.uuid):
                yield f"Remedy: {remedy}."
            yield (
                f"What runs on {_called(share)} will most likely fail, and no new container gets "
                "it meanwhile."
            )
        elif instance is not None and instance.trouble:
            yield (
                f"{_called(share)} is Unhealthy: {instance.trouble}. What runs on it will most "
                "likely fail, and no new container gets it meanwhile."
            )


def _overcommitted(status: AgentStatus, grant: AllocationView) -> Iterator[str]:
    """Explain why a container may be slower than it requested."""
    for each in status.ledger.overcommitted:
        if each.resource == grant.resource and any(
            share.device == each.device for share in grant.shares
        ):
            yield (
                f"Scheduler overcommitted: more of {each.device} is allocated than it has: "
                f"{each.text}. Its containers share the compute; each keeps its memory and its "
                "own limits."
            )


def _not_asked(
    status: AgentStatus, now: float, pod: Pod, container: PodContainer, resource: str
) -> Iterator[str]:
    """Explain why no grant gives the container any of the ``resource`` that it asks for."""
    yield from _too_many(status, container, resource)
    # grants that were decided for this container by a guess, and whose owner is not known yet
    guessed = [
        grant
        for grant in allocations.allocations(status, now)
        if not grant.container
        and grant.decided_for == allocations.DecidedFor(pod.kubelet_uid, container.name)
    ]
    # grants of which nothing says yet for which container they are
    waiting = [
        grant
        for grant in allocations.unconfirmed(status)
        if grant.resource == resource and not grant.decided_for
    ]
    if guessed:
        yield (
            f"Container {container.name} was probably meant by an Allocate "
            f"{span(guessed[0].reserved.seconds_ago or 0)} ago; its pod is identified before "
            "the container starts."
        )
    elif waiting:
        yield (
            f"The kubelet has asked for {resource} {_ago(waiting[0].reserved_at, now)} and its "
            f"records do not say yet for which container; it may be {container.name} "
            f"(such reservations: {len(waiting)})."
        )
    elif container.started:
        yield (
            f"Container {container.name} has run, and holds nothing of {resource} any more as far "
            "as is known here."
        )
    elif pod.phase == _FAILED:
        yield (
            f"The kubelet has most likely refused the pod before anything of {resource} was "
            "given to it: kubectl describe pod says why."
        )
    elif not pod.ended:
        yield (
            f"The kubelet has not asked for {resource} for container {container.name}: the pod "
            "is not admitted yet, or was refused before; kubectl describe pod says which."
        )
        yield from _held_back(status, resource)
        yield from _rooms(status, resource)


def _too_many(status: AgentStatus, container: PodContainer, resource: str) -> Iterator[str]:
    """Explain a request for more than the node has, however much of it is free."""
    by_name = {plugin.resource: plugin for plugin in status.plugins}
    plugin = by_name.get(resource)
    if plugin is None or container.started:
        return
    # families whose pods ask for a number of GPUs, and for memory and compute by other names
    numbering = {by_name[name].family for name in status.ledger.only_counted & by_name.keys()}
    by_number = resource in status.ledger.decided_by_pod and plugin.family in numbering
    number, gpus = container.limits[resource], len(status.ledger.rooms[resource])
    if by_number and number > gpus:
        yield (
            f"Container {container.name} fits nowhere on this node: it asks for {number} of "
            f"{resource}, each of another GPU, and the node shares {gpus}."
        )
    elif number > plugin.ids_sent > 0:
        yield (
            f"Container {container.name} fits nowhere on this node: it asks for {number} of "
            f"{resource}, and the node has {plugin.ids_sent} in all."
        )


def _ill(status: AgentStatus, now: float) -> Iterator[str]:
    """Tell which GPUs of the node are not offered because of their health, and what helps."""
    ill = [gpu for gpu in status.inventory.gpus if not gpu.health.ok or not gpu.present]
    for gpu in ill[:_SHOWN_GPUS]:
        sentence = health.trouble_text(gpu.health, now, gone=not gpu.present)
        remedy = health.remedy(gpu.health, gpu.uuid)
        yield f"GPU {gpu.index} ({gpu.uuid}) {sentence}.{f' Remedy: {remedy}.' if remedy else ''}"
    if len(ill) > _SHOWN_GPUS:
        yield f"{len(ill) - _SHOWN_GPUS} more GPUs are Unhealthy: see vgpu-agent status."


def _rooms(status: AgentStatus, resource: str) -> Iterator[str]:
    """Tell what new containers of ``resource`` could get, to compare with a request."""
    if resource not in status.ledger.decided_by_pod:
        return  # its ids name the devices, or only schedulers count it
    rooms = [room for room in status.ledger.rooms.get(resource, ()) if not room.trouble]
    # one more container may share the device, and none has it for itself alone
    free = [room for room in rooms if room.holders_free > 0 and not room.exclusive]
    if not free:
        yield f"No GPU has room for a new container of {resource}."
        return
    most = max(free, key=lambda room: (room.memory_free_mib, room.cores_free_percent))
    yield (
        f"{len(free)} of {len(status.ledger.rooms[resource])} GPUs have room for a new container "
        f"of {resource}; the most is on {uses.called(status, (most.device,))}: "
        f"{most.memory_free_mib} of {most.memory_mib} MiB and {most.cores_free_percent} % of the "
        "cores. A container that asks for more of one GPU does not fit."
    )


def _refused(refusal: RefusalView) -> str:
    times = "once" if refusal.count == 1 else f"{refusal.count} times"
    after = (
        "; trying again cannot help"
        if refusal.final
        else ""
        if refusal.advice  # the remedies, which `text` includes
        else "; the kubelet tries again by itself"
    )
    return (
        f"Container {refusal.container} may not start: {refusal.text.rstrip('.')}. "
        f"Refused {times}, first {span(refusal.since.seconds_ago or 0)} ago{after}."
    )


def _unknown(
    status: AgentStatus,
    now: float,
    name: str,
    grants: tuple[AllocationView, ...],
    refusals: list[RefusalView],
    events: list[Entry],
) -> Iterator[str]:
    """Explain a pod that the watch does not show."""
    for refusal in refusals:
        yield _refused(refusal)
    for grant in grants:
        yield (f"Container {grant.container} has {_shares(grant.shares)} through {grant.resource}.")
        yield from _unhealthy(status, now, grant)
        if grant.evidence:
            yield f"That is known because: {'; '.join(grant.evidence)}."
    for held in xids.held_now(grants, now) or xids.held_before(status, events, now):
        yield from xids.sentences(status, now, name, held)
    for resource in dict.fromkeys(grant.resource for grant in grants):
        yield from (f"{resource} {why}" for why in _not_offered(status, resource))
    if grants:
        shown = "known from the kubelet's records only"
        if status.cluster.pods_synced:
            shown = "not shown by the watch: it has ended, or the watch is behind"
        yield f"The pod itself is {shown}."
    elif events:
        yield f"There is no pod {name} on this node now; it was here, see the events."
    else:
        yield (
            f"Nothing is known of a pod {name} on node {status.node or '(unnamed)'}. "
            "It may be on another node or on none yet: kubectl get pod -o wide says where."
        )
        for plugin in status.plugins:
            yield from _held_back(status, plugin.resource)
            yield from _rooms(status, plugin.resource)
        yield from _ill(status, now)


def _sources(status: AgentStatus, now: float) -> Iterator[str]:
    api_server = status.cluster
    if not api_server.connected:
        reason = api_server.disconnected_reason or "the agent is starting"
        yield f"the watch of pods: there is none, because {reason}"
    else:
        # the first is the watch of pods
        watch = api_server.watches[0] if api_server.watches else None
        last_answer = (
            f", last answer {_ago(watch.last_event_at, now)}"
            if watch and watch.last_event_at
            else ""
        )
        failing = (
            f", failing for {span(now - watch.failing_since)}: {watch.last_error}"
            if watch and watch.failing_since
            else ""
        )
        yield (
            f"the watch of pods: {len(api_server.pods)} pods, "
            f"{'complete' if api_server.pods_synced else 'not complete yet'}{last_answer}{failing}"
        )
    verified = (
        f"compared with the kubelet's records {_ago(status.ledger.verified_at, now)}"
        if status.ledger.verified_at
        else "never verified"
    )
    yield f"the ledger: {len(status.ledger.grants)} grants, {verified}"
    yield f"the refusals: {len(status.binding.refusals)}"
    oldest = f", the oldest {_ago(status.events[0].at, now)}" if status.events else ""
    yield f"the journal: {len(status.events)} events{oldest}"


def _events(status: AgentStatus, name: str, tokens: set[str]) -> list[Entry]:
    """List the journal's entries about the pod,
    found by its name or by the tokens of its grants.
    """
    return [
        entry
        for entry in status.events
        if entry.facts.get("pod") == name or entry.facts.get("token") in tokens
    ]


def _shares(shares: tuple[ShareView, ...]) -> str:
    return " and ".join(_share(share) for share in shares) or "nothing"


def _called(share: ShareView) -> str:
    return share.device if share.gpu_index is None else f"GPU {share.gpu_index} ({share.device})"


def _share(share: ShareView) -> str:
    called = _called(share)
    limits = [f"{share.memory_mib} MiB"] if share.memory_mib else []
    limits += [f"{share.cores_percent} % of the cores"] if share.cores_percent else []
    return f"{' and '.join(limits)} of {called}" if limits else f"{called} without a limit"


def _ago(unix_seconds: float, now: float) -> str:
    return f"{span(now - unix_seconds)} ago"
