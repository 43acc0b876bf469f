"""Prove the owner of ids, from the kubelet's own records and the known pods; never guess.

`allocator` asks before every start of a container whose pod decides what it gets. There are two records. The checkpoint names the pod's UID
and the container (plain init containers too); pod-resources names namespace, pod and container of what is alive. One alone counts where it
is enough. Where they contradict each other, or two pods could be meant, the start is refused and the kubelet retries.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.errors import AgentError
from vgpu_agent.model import Owner
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Holding
    from vgpu_agent.pods import Pod, PodCache


class NotProvenError(AgentError):
    """The owner of the ids is not known yet, or not without doubt; the text is shown in the pod's status and the kubelet retries.

    Attributes:
        ambiguous: the records name two holders, which must not be; anything else is a matter of time.
        suspects: (pod, container) that may be the one, for an event when it stays so.
    """

    def __init__(self, text: str, *, ambiguous: bool = False) -> None:
        self.ambiguous = ambiguous
        self.suspects: tuple[tuple[Pod, str], ...] = ()
        super().__init__(text)


@dataclasses.dataclass(frozen=True, slots=True)
class KubeletEvidence:
    """The kubelet's records at one moment, after the question was asked.

    Attributes:
        checkpoint: the holders of the ids in question, by UID and container; None when it could not be read or understood.
        pod_resources: all holders, by namespace, pod and container; None when it did not answer.
        answers: (UID, container, resource) → the answer of our Allocate, as far as the checkpoint kept it; for the ids in question
            always, for all others in early mode.
        trouble: why a record is missing.
        whole: whether ``pod_resources`` covers every pod; otherwise only those that the checkpoint names for the ids in question.
    """

    checkpoint: tuple[Holding, ...] | None
    pod_resources: tuple[Holding, ...] | None
    answers: Mapping[tuple[str, str, str], Edits] = dataclasses.field(default_factory=dict)
    trouble: str = ""
    whole: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The records about one set of ids.

    Attributes:
        uids: the pods that may be meant, by kubelet's UID; several only when the checkpoint still names ended pods.
        named: (namespace, name) from pod-resources; None when it does not list these ids (an init container's) or did not answer.
        containers: by UID, the containers that have exactly these ids, in the order of the records; under "" when no UID is known.
        evidence: one sentence for each record.
    """

    uids: tuple[str, ...]
    named: tuple[str, str] | None
    containers: Mapping[str, tuple[str, ...]]
    evidence: tuple[str, ...]


def claim(resource: str, ids: Sequence[str], kubelet_evidence: KubeletEvidence) -> Claim:
    """Return the kubelet's records about exactly these ids.

    Raises:
        NotProvenError: they do not contain them, or name two live pods at once.
    """
    wanted = set(ids)
    if kubelet_evidence.checkpoint is None and kubelet_evidence.pod_resources is None:
        raise NotProvenError(f"neither of kubelet's records can be read ({kubelet_evidence.trouble}); kubelet will ask again")
    exact = [entry for entry in kubelet_evidence.checkpoint or () if _has_exactly(entry, resource, wanted)]
    listed = [entry for entry in kubelet_evidence.pod_resources or () if entry.resource == resource and not wanted.isdisjoint(entry.ids)]
    live = {(entry.owner.namespace, entry.owner.pod) for entry in listed}
    if len(live) > 1:
        pods = " and ".join(sorted("/".join(pod) for pod in live))
        raise NotProvenError(f"kubelet lists ids of {resource} in two pods at once, {pods}; the start is refused", ambiguous=True)
    named = next(iter(live), None)
    containers: dict[str, tuple[str, ...]] = {}
    for entry in exact:
        containers[entry.owner.pod_uid] = (*containers.get(entry.owner.pod_uid, ()), entry.owner.container)
    whole = [entry.owner.container for entry in listed if _has_exactly(entry, resource, wanted)]
    evidence = []
    if containers:
        evidence.append("checkpoint: " + ", ".join(f"pod {uid} container {'/'.join(names)}" for uid, names in containers.items()))
    if named:
        evidence.append(f"pod-resources: {'/'.join(named)}" + (f" container {whole[0]}" if whole else ""))
    if kubelet_evidence.trouble:
        evidence.append(f"silent: {kubelet_evidence.trouble}")
    if whole and containers:
        # What is listed alive by name must be what the checkpoint has by UID.
        containers = {uid: names for uid, names in containers.items() if set(whole) <= set(names)}
    if not containers:
        if kubelet_evidence.checkpoint is not None or not whole:
            raise NotProvenError(
                f"kubelet's records do not say yet who holds {_some(ids)} of {resource}"
                + (f" ({kubelet_evidence.trouble})" if kubelet_evidence.trouble else "")
                + "; kubelet will ask again"
            )
        _refuse_namesakes(resource, wanted, named, kubelet_evidence)
        containers = {"": tuple(whole)}
    return Claim(tuple(uid for uid in containers if uid), named, containers, tuple(evidence))


def holder(found: Claim, book: PodCache, fetched: Pod | None = None) -> tuple[Pod, Owner] | None:
    """Return the pod and container of the claim; None while the pod is not known.

    Args:
        found: see `claim`.
        book: the pods of this node.
        fetched: the pod that the API server has under the claimed name now, if it was queried.

    Raises:
        NotProvenError: more than one pod can be meant, or the name belongs to another pod by now.
    """
    if not found.uids:
        return _holder_by_name(found, book, fetched) if fetched is not None else None
    known = {uid: pod for uid in found.uids if (pod := _known(uid, found.named, book, fetched)) is not None}
    strangers = [uid for uid in found.uids if uid not in known]
    if strangers and fetched is None:
        return None  # with a pod unseen, even a known one may be the predecessor that had these ids
    candidates = {uid: pod for uid, pod in known.items() if not pod.ended}
    if found.named:
        candidates = {uid: pod for uid, pod in candidates.items() if (pod.namespace, pod.name) == found.named}
    if fetched is not None:
        # One name, one pod: an earlier pod of the name that the API server has now is gone.
        same_name = {uid for uid, pod in candidates.items() if (pod.namespace, pod.name) == (fetched.namespace, fetched.name)}
        candidates = {uid: pod for uid, pod in candidates.items() if uid not in same_name or pod.uid == fetched.uid}
    if len(candidates) > 1 or (candidates and strangers and not found.named):
        pods = ", ".join(sorted([*(f"{pod.full_name} ({uid})" for uid, pod in candidates.items()), *strangers]))
        raise NotProvenError(f"kubelet's checkpoint names several pods for the same ids: {pods}; the start is refused", ambiguous=True)
    if not candidates:
        if fetched is not None:
            raise NotProvenError(
                f"kubelet starts pod {fetched.full_name} with UID {', '.join(found.uids)}, but the API server has UID "
                f"{fetched.claimed_uid or fetched.uid} under that name; the pod was replaced, kubelet will notice"
            )
        return None
    uid, pod = next(iter(candidates.items()))
    return pod, _owner(pod, found.containers[uid], uid)


def _holder_by_name(found: Claim, book: PodCache, fetched: Pod) -> tuple[Pod, Owner]:
    """The same without the checkpoint: only a pod that the API server has just named is certain to be the one of that name.

    Raises:
        NotProvenError: there has been another pod of that name.
    """
    if not book.one_of_its_name(fetched):
        raise NotProvenError(
            f"there has been another pod named {fetched.full_name}, and without kubelet's checkpoint it is not certain which of them "
            "starts; kubelet will ask again"
        )
    # pod-resources names it, and kubelet runs no pod that claims to be a mirror, so it runs the static pod of that name.
    pod = fetched.as_static(fetched.claimed_uid)
    return pod, _owner(pod, found.containers[""])


def suspects(resource: str, ids: Sequence[str], kubelet_evidence: KubeletEvidence, book: PodCache) -> tuple[tuple[Pod, str], ...]:
    """The pods and containers that the records name for any of ``ids``, as far as they are known and have not ended."""
    wanted, found = set(ids), {}
    for entry in (*(kubelet_evidence.checkpoint or ()), *(kubelet_evidence.pod_resources or ())):
        if entry.resource == resource and not wanted.isdisjoint(entry.ids):
            owner = entry.owner
            pod = book.get(owner.pod_uid) if owner.pod_uid else book.named(owner.namespace, owner.pod)
            if pod is not None and not pod.ended:
                found[pod.kubelet_uid, owner.container] = (pod, owner.container)
    return tuple(found.values())


def _refuse_namesakes(resource: str, wanted: set[str], named: tuple[str, str] | None, kubelet_evidence: KubeletEvidence) -> None:
    """Refuse when two pods have one name, the older deleted by force: without UIDs they cannot be distinguished."""
    mine = [entry for entry in kubelet_evidence.pod_resources or () if entry.resource == resource and set(entry.ids) == wanted]
    same = {(entry.owner.namespace, entry.owner.pod, entry.owner.container) for entry in mine}
    for entry in kubelet_evidence.pod_resources or ():
        owner = entry.owner
        if entry.resource == resource and (owner.namespace, owner.pod, owner.container) in same and set(entry.ids) != wanted:
            raise NotProvenError(
                f"kubelet lists two pods named {'/'.join(named or ())}, and without its checkpoint it is not certain which of them starts",
                ambiguous=True,
            )


def _known(uid: str, named: tuple[str, str] | None, book: PodCache, fetched: Pod | None) -> Pod | None:
    """Return the pod that the kubelet knows as ``uid``; for a static pod, its mirror.

    A pod's own annotations are no proof. A mirror counts when the kubelet has written its status, as the pod cache shows, or when
    pod-resources has named it: the kubelet runs no pod of the API server that claims to be a mirror, so that name is a static pod's.
    """
    known = book.get(uid)
    if fetched is None:
        return known or (book.static(uid, *named) if named else None)
    if fetched.uid == uid:
        return fetched
    name = (fetched.namespace, fetched.name)
    # A mirror that was made anew has another UID of the API server's, and the name of the one before.
    believed = known is not None and known.uid != uid and (known.namespace, known.name) == name
    return fetched.as_static(uid) if fetched.claimed_uid == uid and (believed or (known is None and named == name)) else known


def _owner(pod: Pod, names: Iterable[str], uid: str = "") -> Owner:
    """Return, of containers with the same ids, the one that has them last: the ids are for it, and the others come before it."""
    in_pod = {container.name: (container.kind is not ContainerKind.INIT, place) for place, container in enumerate(pod.containers)}
    known = [name for name in names if name in in_pod]
    if not known:
        raise NotProvenError(f"pod {pod.full_name} has no container {', '.join(names)}, which kubelet names; the start is refused")
    return Owner(max(known, key=lambda name: in_pod[name]), uid or pod.kubelet_uid, pod.namespace, pod.name)


def _has_exactly(entry: Holding, resource: str, wanted: set[str]) -> bool:
    return entry.resource == resource and len(entry.ids) == len(wanted) and set(entry.ids) == wanted


def _some(ids: Sequence[str]) -> str:
    return f"{ids[0]} and {len(ids) - 1} more ids" if len(ids) > 1 else f"id {ids[0]}"
