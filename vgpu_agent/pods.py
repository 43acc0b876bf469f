"""The plain data of pods from the API server, and the cache of the pods on this node.

`cluster` fills the pod cache from its watch, `allocation` looks up the container that is about to
start, families read annotations and limits, and the pod publisher compares the present state with
the desired one. The data is kept small, because a node has a few hundred pods. The watch shows pods
until they have ended. Ended pods stay in the cache a little longer.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import operator
import re
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import InvalidNameError, RequestRefusedError, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_logger = log.get(__name__)

# The kubelet keeps a static pod under the hash of its file; the API server's mirror of it has a UID
# of its own, and names the hash in the first annotation. The second one marks it as a mirror.
STATIC_POD_HASH = "kubernetes.io/config.hash"
MIRROR_POD = "kubernetes.io/config.mirror"

# The kubelet admits 110 pods by default and hardly ever more than 500; each takes a few KiB here,
# and a hostile one some hundred.
MAX_PODS = 2000
MAX_BYTES = 32 * 1024 * 1024
# Of one pod: containers that are kept, and resources with the names of families, of all of them
# together (`Pod.has_more_requests`).
MAX_CONTAINERS, MAX_FAMILY_RESOURCES = 64, 256
# names of present and earlier pods that a cache remembers, and UIDs of pods that it has left out
_MAX_NAMES = 4000
# UIDs that are remembered for one name; two are enough to know that there was another pod
_MAX_OF_A_NAME = 4
# How long and how many ended pods are remembered: their annotations may still have to be written.
_ENDED_SECONDS = 600.0
_MAX_ENDED = 256

ENDED = "Ended"
"""The phase of a pod that has left the watch: whether it succeeded or failed is not known."""

# The label of pods that hold a dead GPU (setting ``nodeStatus.podLabel``).
GPU_HEALTH_LABEL = "vgpu-agent.internal/gpu-health"
_ENDED = ("Succeeded", "Failed", ENDED)

# The API server makes UUIDs (RFC 4122), the kubelet makes 32 hexadecimal digits, and the file of a
# static pod may name any other. An underscore is in none of them, so that ``<UID>_<container>`` can
# be read back; the length leaves room for that in a file name of 255 characters.
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,127}")
_API_SERVER_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1123
_CONTAINER_ID = re.compile(r"[A-Za-z0-9]{8,128}")  # in use: 64 hexadecimal digits
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def is_uid(text: str) -> bool:
    """Tell whether ``text`` can be a pod's UID, and so the beginning of a file name."""
    return _UID.fullmatch(text) is not None


def is_container_name(text: str) -> bool:
    """Tell whether ``text`` can be a container's name, and so the end of a file name."""
    return _LABEL.fullmatch(text) is not None


def is_container_id(text: str) -> bool:
    """Tell whether ``text`` can be a container runtime's id of a container."""
    return _CONTAINER_ID.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Tell whether ``text`` can be the name of a pod or of its namespace."""
    return _SUBDOMAIN.fullmatch(text) is not None


def container_directory(pod_uid: str, container: str) -> str:
    """Return ``<pod UID>_<container>``, the name of a container's own directory on the host. No
    other code builds that name.

    Raises:
        InvalidNameError: one of the two could lead out of the parent directory, or into that of
            another container.
    """
    if not is_uid(pod_uid) or not is_container_name(container):
        raise InvalidNameError(
            f"pod UID {quoted(pod_uid)} and container {quoted(container)} are not what Kubernetes "
            "allows, so no directory is made for them"
        )
    return f"{pod_uid}_{container}"


class PodKeys(NamedTuple):
    """The annotations, labels and resources of pods that are read; all others are skipped.

    Attributes:
        annotations: keys, the most important of each family first. If a pod has more text than is
            kept, the values of the last keys are cut.
        labels: keys.
        resource_prefixes: the beginnings of the names of families' resources. These are kept
            whatever else a pod names, and a pod with too many of them is refused.
    """

    annotations: tuple[str, ...]
    labels: tuple[str, ...]
    resource_prefixes: tuple[str, ...]


class ContainerKind(enum.StrEnum):
    """The kind of a container in its pod, which decides when it runs."""

    # ends before the next one starts; the kubelet gives its device ids to later containers
    INIT = "init"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always: keeps its ids
    MAIN = "main"


class PodContainer(msgspec.Struct, frozen=True):
    """One container of a pod's specification.

    Attributes:
        limits: resource → whole number, for extended resources only (those with a slash in their
            name). A limit that is not a whole number is in ``unreadable_limits`` instead.
        unreadable_limits: resource → the text that could not be read as a whole number.
        environment: names of the variables in the specification that concern GPUs.
        started: the pod's status says that it runs now or ran before.
        running: the pod's status says that it runs now.
        container_id: the runtime's id of it, as the kubelet has written it into the pod's status;
            empty before.
        values: variable → its text in the specification, for the few variables whose values the
            agent uses, if the text is short.
        completed: the pod's status says that it has ended with success and has not started again.
        ended_at: unix seconds at which it ended last, by the pod's status, which leaves out
            fractions; 0 when it never did.
        started_at: unix seconds at which it started last, by the pod's status, which leaves out
            fractions; 0 when it never did, or the status does not say.
    """

    name: str
    kind: ContainerKind = ContainerKind.MAIN
    limits: Mapping[str, int] = msgspec.field(default_factory=dict)
    unreadable_limits: Mapping[str, str] = msgspec.field(default_factory=dict)
    environment: frozenset[str] = frozenset()
    started: bool = False
    container_id: str = ""
    values: Mapping[str, str] = msgspec.field(default_factory=dict)
    completed: bool = False
    ended_at: float = 0.0
    running: bool = False
    started_at: float = 0.0


class DesiredPod(msgspec.Struct, frozen=True):
    """The desired annotations and labels of a pod. The agent does not change other keys.

    Attributes:
        annotations: key → value; None for a key that must not be there.
        labels: the same.
    """

    annotations: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str | None] = msgspec.field(default_factory=dict)

    def joined(self, other: DesiredPod) -> DesiredPod:
        """Merge both; for a key that is in both, ``other`` wins."""
        return DesiredPod(
            {**self.annotations, **other.annotations}, {**self.labels, **other.labels}
        )


class Trait(enum.StrEnum):
    """A property of a pod that filters of kube-scheduler check besides the amounts of resources.
    The scheduler extender looks at it before it spares a victim that kube-scheduler has proposed.
    """

    HOST_PORTS = "host ports"
    ANTI_AFFINITY = "anti-affinity"  # to other pods
    SPREAD = "topology spread"
    VOLUMES = "volumes"  # whose number on a Node, or use on several Nodes, is limited
    CLAIMS = "resource claims"  # those of Kubernetes: ``spec.resourceClaims``


class SchedulingFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts about a pod that only schedulers use.

    Attributes:
        namespace: of the pod.
        name: of the pod.
        priority: ``spec.priority``; None where it is not set.
        may_preempt: its ``preemptionPolicy`` lets it preempt others.
        started_at: unix seconds at which the kubelet has accepted it (``status.startTime``); 0
            before.
        deleting: it has a deletion timestamp.
        labels: all of them, sorted.
        gang: ``namespace/name`` of the group that is to be scheduled together; empty where it is in
            none.
        owner: ``namespace/UID`` of its controller; empty without one.
        protected: why it must not be preempted (critical, static, of a DaemonSet); empty where it
            may be.
        requests: resource → thousandths of its unit, of the whole pod, sorted; None where they
            cannot be read.
        traits: its properties for filters other than the one for resources.
    """

    namespace: str
    name: str
    priority: int | None = None
    may_preempt: bool = True
    started_at: float = 0.0
    deleting: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    gang: str = ""
    owner: str = ""
    protected: str = ""
    requests: tuple[tuple[str, int], ...] | None = ()
    traits: frozenset[Trait] = frozenset()

    @property
    def group(self) -> str:
        """The name of its group: its gang, otherwise its controller."""
        return self.gang or self.owner


# Approximate sizes in memory.
_POD_BYTES = 2048  # a pod without annotations and containers
_CONTAINER_BYTES = 520
_RESOURCE_BYTES = 500  # one limit of a container
_VALUE_BYTES = 300  # one of `PodContainer.values`
_VARIABLE_BYTES = 180  # one of `PodContainer.environment`


class Pod(msgspec.Struct, frozen=True):
    """One pod: for an agent, one that is bound to its node; for a scheduler, any pod.

    Attributes:
        uid: as the API server has it; see `kubelet_uid`.
        node: the name of the Node that it is bound to; empty for none.
        annotations: those that families read or write; see `families.pod_annotations`.
        containers: in the order in which kubelet admits them: init containers and sidecars as
            listed, then the main ones.
        deleting: it has a deletion timestamp.
        created_at: unix seconds of its creation.
        bound: its position in the order in which the watch has shown pods bound to this node;
            smaller is earlier; set by `PodCache`, 0 outside it.
        scheduler: ``spec.schedulerName``.
        reported: the kubelet has written its status, which only the kubelet may. It never does so
            for a pod that imitates a mirror pod.
        scheduled: a scheduler has bound it, or the kubelet has reported it; otherwise its author
            has chosen the node (``spec.nodeName``).
        static_uid: of the mirror of a static pod, the kubelet's UID of that pod; set by `PodCache`
            once the mirror is confirmed.
        labels: those that families read or write.
        in_new_sandbox: when the kubelet last wrote the pod's status, it was about to create a
            sandbox for it, so none of its containers ran.
        has_more_requests: more of its containers ask for resources with the names of families, or
            for more of them, than are kept. What is kept may lack a limit, so no family serves it.
        scheduling: facts that only schedulers use; None unless it was decoded with them.
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    phase: str = "Pending"
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    containers: tuple[PodContainer, ...] = ()
    deleting: bool = False
    created_at: float = 0.0
    bound: int = 0
    scheduler: str = ""
    resource_version: str = ""
    reported: bool = False
    scheduled: bool = False
    static_uid: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    in_new_sandbox: bool = False
    has_more_requests: bool = False
    scheduling: SchedulingFacts | None = None

    @property
    def full_name(self) -> str:
        """``namespace/name``, for logs."""
        return f"{self.namespace}/{self.name}"

    def refuse_more_requests(self) -> None:
        """Raise `RequestRefusedError` if the pod asks for more than is kept of it."""
        if self.has_more_requests:
            raise RequestRefusedError(
                f"pod {self.full_name} names more GPU resources, or more containers that ask for "
                f"them, than are read ({MAX_CONTAINERS} containers, {MAX_FAMILY_RESOURCES} "
                "resources); leave out those that it does not need"
            )

    @property
    def kubelet_uid(self) -> str:
        """The UID under which kubelet keeps the pod:
        for a mirror of a static pod, the hash of its file.
        """
        return self.static_uid or self.uid

    @property
    def mirror(self) -> bool:
        """Tell whether its annotations claim that it mirrors a static pod. The kubelet never runs
        such a pod itself, even if the claim is false.
        """
        return MIRROR_POD in self.annotations

    @property
    def alleged_static_uid(self) -> str:
        """The static pod that this one says it mirrors, by the kubelet's UID;
        empty without a plausible UID.

        Every user who may create pods can write that annotation, so it counts only together with
        something that the kubelet has written. A UID as the API server makes them is never a static
        pod's.
        """
        alleged = self.annotations.get(STATIC_POD_HASH, "") if self.mirror else ""
        return alleged if is_uid(alleged) and not _API_SERVER_UID.fullmatch(alleged) else ""

    def as_static(self, uid: str) -> Pod:
        """Return this pod as the confirmed mirror of the static pod with the kubelet's ``uid``."""
        return self if self.static_uid == uid else msgspec.structs.replace(self, static_uid=uid)

    @property
    def size_bytes(self) -> int:
        """The pod's approximate size in memory."""
        texts = sum(map(sys.getsizeof, (*self.annotations.values(), *self.labels.values())))
        resources = sum([len(one.limits) + len(one.unreadable_limits) for one in self.containers])
        values = sum([len(one.values) for one in self.containers])
        variables = sum([len(one.environment) for one in self.containers])
        return (
            _POD_BYTES
            + texts
            + _CONTAINER_BYTES * len(self.containers)
            + _RESOURCE_BYTES * resources
            + _VALUE_BYTES * values
            + _VARIABLE_BYTES * variables
        )

    @property
    def ended(self) -> bool:
        """Tell whether all containers have ended and none will start again."""
        return self.phase in _ENDED

    def container(self, name: str) -> PodContainer | None:
        """The container of that name, or None."""
        return next((container for container in self.containers if container.name == name), None)


class PodCache:
    """The pods of this node, as the watch has shown them.

    A pod is known by the UID that the API server gave it. The kubelet keeps a static pod under
    another one, which only the annotations of its mirror show, and every user can write those. So a
    mirror counts once the kubelet has written its status, which it does only for the mirror of a
    pod that it runs. A mirror that claims the UID of another pod in the API server does not count.

    State: replaced by `replace` after each list, changed by `put`, `end` and `remove` with each
    event. `revision` advances with every change. Only the event loop's thread may change it.

    Bounds: `MAX_PODS` and about `MAX_BYTES`. What is beyond is left out and counted: first pods
    that no scheduler has bound, then the largest. The API server is asked for a pod that is
    left out when it starts, and the pod does not count as ended.

    Attributes:
        left_out: how often a pod was not taken into the cache or was dropped from it, because there
            are too many or it is too large.
        ends: the number of pods whose end or removal was seen; readers look for ended pods again
            when it has changed.
        synced: set after the first complete list.
        lists: the number of complete lists; between two lists, pods may have come and gone unseen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = self.ends = self.lists = 0
        self._clock = clock
        self.revision = Revision()
        self.synced = asyncio.Event()
        self._pods: dict[str, Pod] = {}  # by the API server's UID
        self._sizes: dict[str, int] = {}  # of `_pods`, in bytes
        self._bytes = 0  # the sum of those
        # API server's UID of each pod that was left out, the latest at the end → the kubelet's UID
        # if it is the mirror of a static pod, otherwise empty.
        self._left_out_uids: dict[str, str] = {}
        # by the kubelet's UID, and since when
        self._ended: collections.OrderedDict[str, tuple[Pod, float]] = collections.OrderedDict()
        # `pods`, asked for many times between two changes
        self._in_order: tuple[Pod, ...] | None = None
        self._static: dict[str, Pod] | None = None  # the confirmed mirrors, by the kubelet's UID
        self._static_before: dict[str, Pod] = {}  # the same, as found the time before
        self._bound: dict[str, int] = {}  # the API server's UID → `Pod.bound`
        self._last_bound = 0  # the greatest of these so far
        # the UIDs seen under each name, the last used name at the end
        self._uids: collections.OrderedDict[tuple[str, str], set[str]] = collections.OrderedDict()
        # the API server's UIDs of `_pods`
        self._by_name: dict[tuple[str, str], dict[str, None]] = {}

    @property
    def pods(self) -> tuple[Pod, ...]:
        """All pods, in the order in which the watch saw them bound;
        also those that have just ended.
        """
        if self._in_order is None:
            mirrors = {pod.uid: pod for pod in self._confirmed_mirrors().values()}
            ended = (pod for pod, _ in self._ended.values())
            known = (mirrors.get(pod.uid, pod) for pod in self._pods.values())
            self._in_order = tuple(sorted((*known, *ended), key=operator.attrgetter("bound")))
        return self._in_order

    def get(self, kubelet_uid: str) -> Pod | None:
        """The pod that the kubelet knows under that UID."""
        known = self._pods.get(kubelet_uid) or self._confirmed_mirrors().get(kubelet_uid)
        return known or self._ended.get(kubelet_uid, (None, 0.0))[0]

    def named(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name; when one was replaced by another, the one that was bound last."""
        found = [self._pods[uid] for uid in self._by_name.get((namespace, name), ())]
        found += [
            pod for pod, _ in self._ended.values() if (pod.namespace, pod.name) == (namespace, name)
        ]
        last = max(found, key=lambda pod: pod.bound, default=None)
        return (
            self._confirmed_mirrors().get(last.alleged_static_uid, last)
            if last is not None and last.mirror
            else last
        )

    def was_left_out(self, kubelet_uid: str) -> bool:
        """Tell whether a pod with that UID of the kubelet's was left out, so that `get` does not
        find it.
        """
        return kubelet_uid in self._left_out_uids or (
            kubelet_uid != "" and kubelet_uid in self._left_out_uids.values()
        )

    def has_ended(self, kubelet_uid: str) -> bool:
        """Tell whether, by the API server, the pod with that UID of the kubelet's has ended
        or is gone.

        A static pod has not ended because its mirror is gone: the kubelet runs it whether the API
        server has the mirror or not.
        """
        if not self.synced.is_set() or self.was_left_out(kubelet_uid):
            return False
        pod = self.get(kubelet_uid)
        return _API_SERVER_UID.fullmatch(kubelet_uid) is not None if pod is None else pod.ended

    def static(self, kubelet_uid: str, namespace: str, name: str) -> Pod | None:
        """The mirror of the static pod that the kubelet knows under that UID, when the kubelet
        itself has named namespace and name of that pod.
        """
        pod = self.named(namespace, name)
        return (
            pod.as_static(kubelet_uid)
            if pod and pod.alleged_static_uid == kubelet_uid and kubelet_uid not in self._pods
            else None
        )

    def is_only_one_of_its_name(self, pod: Pod) -> bool:
        """Tell whether this is the only pod seen under its name. Otherwise the kubelet may still
        have another one, which was deleted by force.
        """
        return self._uids.get((pod.namespace, pod.name), set()) <= {
            pod.alleged_static_uid or pod.uid
        }

    def replace(self, pods: Iterable[Pod]) -> None:
        """Replace all pods by a complete list: pods that are not in it are gone.

        Pods that a list shows for the first time are ordered by creation, because the watch did not
        see them being bound.
        """
        listed = {
            pod.uid: pod
            for pod in sorted(pods, key=lambda pod: (pod.created_at, pod.namespace, pod.name))
        }
        self._bound = {uid: place for uid, place in self._bound.items() if uid in listed}
        before = self._pods
        self._pods, self._by_name, self._sizes, self._bytes = {}, {}, {}, 0
        self._left_out_uids = {
            uid: static_uid for uid, static_uid in self._left_out_uids.items() if uid not in listed
        }
        for pod in self.fitting(listed.values()):
            self._keep(self._placed(pod))
            self._forget_ended(pod.uid)
        self.ends += len(before.keys() - listed.keys())
        self.lists += 1
        if self._pods != before or not self.synced.is_set():
            self._changed()
        self.synced.set()

    def put(self, pod: Pod) -> None:
        """Store a pod that was added or has changed."""
        known, pods = self._pods.get(pod.uid), len(self._pods)
        if not self._has_room(pod, known):
            self._leave_out([pod])
            if len(self._pods) != pods:
                self._changed()
            return
        self._left_out_uids.pop(pod.uid, None)
        placed = self._placed(pod)
        if known != placed:
            self._drop(pod.uid)
            self._keep(placed)
            self._forget_ended(pod.uid)
            self._changed()

    def end(self, pod: Pod) -> None:
        """Record that a pod has ended; it stays in the cache for a while."""
        self._left_out_uids.pop(pod.uid, None)
        if pod.uid not in self._pods:
            self._bound.pop(pod.uid, None)
            return
        mirror = self._confirmed_mirrors().get(pod.alleged_static_uid)
        static_uid = mirror.static_uid if mirror is not None and mirror.uid == pod.uid else ""
        now, placed = self._clock(), self._placed(pod).as_static(static_uid)
        self._drop(pod.uid)
        self._bound.pop(pod.uid, None)
        self.ends += 1
        self._ended[placed.kubelet_uid] = (
            placed if placed.ended else msgspec.structs.replace(placed, phase=ENDED),
            now,
        )
        self._changed()

    def remove(self, pod: Pod) -> None:
        """Forget a pod that the API server has deleted."""
        self._bound.pop(pod.uid, None)
        self._left_out_uids.pop(pod.uid, None)
        dropped, forgotten = self._drop(pod.uid), self._forget_ended(pod.uid)
        self.ends += dropped
        if dropped or forgotten:
            self._changed()

    def _has_room(self, pod: Pod, known: Pod | None) -> bool:
        """Tell whether a pod fits into the cache. For a pod that a scheduler has bound, drop pods
        whose owners chose the node if need be, the largest first.
        """
        needed = pod.size_bytes - self._sizes.get(pod.uid, 0)
        while self._bytes + needed > MAX_BYTES or len(self._pods) + (known is None) > MAX_PODS:
            others = (
                [other for other in self._pods.values() if not other.scheduled]
                if pod.scheduled
                else []
            )
            displaced = max(
                (other for other in others if other.uid != pod.uid),
                key=lambda other: self._sizes[other.uid],
                default=None,
            )
            if displaced is None:
                return False
            self._drop(displaced.uid)
            self._bound.pop(displaced.uid, None)
            self._leave_out([displaced])
        return True

    def fitting(self, pods: Collection[Pod]) -> list[Pod]:
        """Return those pods that fit into the cache, in their order, and count the others as left
        out. Pods that a scheduler has bound come before those whose owners chose the node.
        """
        left = MAX_BYTES
        fitting = set[str]()
        for pod in sorted(pods, key=lambda pod: (not pod.scheduled, pod.size_bytes))[:MAX_PODS]:
            left -= pod.size_bytes
            if left < 0:
                break
            fitting.add(pod.uid)
        self._leave_out([pod for pod in pods if pod.uid not in fitting])
        return [pod for pod in pods if pod.uid in fitting]

    def _leave_out(self, pods: Sequence[Pod]) -> None:
        if not pods:
            return
        if not self.left_out:
            remedy = (
                "delete pods with extremely many containers, resources or annotations from this "
                "node"
            )
            _logger.error(
                "pods.left_out",
                pod=pods[0].full_name,
                most_pods=MAX_PODS,
                most_bytes=MAX_BYTES,
                remedy=remedy,
            )
        self.left_out += len(pods)
        for pod in pods:
            self._left_out_uids.pop(pod.uid, None)
            # without a status by the kubelet, any user may have written the annotation
            self._left_out_uids[pod.uid] = pod.alleged_static_uid if pod.reported else ""
            if len(self._left_out_uids) > _MAX_NAMES:
                del self._left_out_uids[next(iter(self._left_out_uids))]

    def _forget_ended(self, uid: str) -> bool:
        """Remove the pod from those that have ended, by the API server's UID;
        tell whether it was among them.
        """
        gone = [key for key, (pod, _) in self._ended.items() if pod.uid == uid]
        for key in gone:
            del self._ended[key]
        return bool(gone)

    def _keep(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod
        size = self._sizes[pod.uid] = pod.size_bytes
        self._bytes += size
        self._by_name.setdefault((pod.namespace, pod.name), {})[pod.uid] = None

    def _drop(self, uid: str) -> bool:
        """Remove the pod; tell whether it was there."""
        pod = self._pods.pop(uid, None)
        if pod is None:
            return False
        self._bytes -= self._sizes.pop(uid)
        of_name = self._by_name[pod.namespace, pod.name]
        del of_name[uid]
        if not of_name:
            del self._by_name[pod.namespace, pod.name]
        return True

    def _placed(self, pod: Pod) -> Pod:
        """Return the pod with its place in the order of binding (`Pod.bound`)."""
        name = (pod.namespace, pod.name)
        of_name = self._uids.setdefault(name, set())
        if len(of_name) < _MAX_OF_A_NAME:
            of_name.add(pod.alleged_static_uid or pod.uid)
        self._uids.move_to_end(name)
        if len(self._uids) > _MAX_NAMES:
            self._uids.popitem(last=False)
        if pod.uid not in self._bound:
            self._last_bound += 1
            self._bound[pod.uid] = self._last_bound
        return msgspec.structs.replace(pod, bound=self._bound[pod.uid], static_uid="")

    def _confirmed_mirrors(self) -> Mapping[str, Pod]:
        """The mirrors of static pods that the kubelet has confirmed, by the kubelet's UID."""
        if self._static is None:
            found: dict[str, Pod] = {}
            for pod in self._pods.values():
                alleged = (
                    pod.alleged_static_uid if pod.reported and MIRROR_POD in pod.annotations else ""
                )
                if alleged and alleged not in self._pods:
                    # A recreated mirror pod has the same hash and a new API-server UID. Both may be
                    # there for a moment.
                    known = found.get(alleged)
                    if known is None or known.bound < pod.bound:
                        found[alleged] = pod.as_static(alleged)
            # The same object as long as nothing about it has changed, because what was computed
            # from a pod is kept as long as its object is the same (`allocation.desired_state`).
            before = self._static_before
            self._static = {
                uid: before[uid] if before.get(uid) == pod else pod for uid, pod in found.items()
            }
            self._static_before = self._static
        return self._static

    def _changed(self) -> None:
        now = self._clock()
        while self._ended and (
            len(self._ended) > _MAX_ENDED
            or now - next(iter(self._ended.values()))[1] > _ENDED_SECONDS
        ):
            self._ended.popitem(last=False)
        self._in_order = self._static = None
        self.revision.advance()
