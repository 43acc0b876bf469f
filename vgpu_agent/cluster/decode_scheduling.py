"""The decoder of what only a scheduler reads of pods: priority, groups, requests and labels; and of
PodDisruptionBudgets.

`decode` leaves these fields out, so that the agent of a node does not keep them. The scheduler
extender decodes each pod with both. Fields are those of core/v1 and policy/v1.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from vgpu_agent.cluster import decode
from vgpu_agent.cluster.quantities import thousandths
from vgpu_agent.errors import ClusterError, shortened
from vgpu_agent.families.scheduling import GANG_ANNOTATIONS, GANG_LABELS
from vgpu_agent.placement.nodes.budgets import Budget, Requirement, Selector
from vgpu_agent.pods import MIRROR_POD, SchedulingFacts, Trait

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from vgpu_agent.pods import Pod

    Json = bytes | msgspec.Raw

T = TypeVar("T")

_LONGEST_MESSAGE = 1000  # characters
_LONGEST_NAME = 253
# labels and resources of one pod, and expressions of one selector, that are read at most
_MAX_LABELS, _MAX_RESOURCES, _MAX_SELECTED = 256, 64, 256
_MAX_AMOUNTS = 1024  # limits and requests of all containers of a pod together
_SHARED = 4096  # the number of latest values that are remembered, so that equal ones are one object
_CRITICAL = 2_000_000_000  # the priority of system-cluster-critical; no user class reaches it

_POD_GROUP, _DAEMON_SET = "PodGroup", "DaemonSet"
# Keys of volumes that any number of pods of a Node may have; ``name`` is in all.
_PLAIN_VOLUMES = {
    "name", "configMap", "downwardAPI", "emptyDir", "hostPath", "image", "projected", "secret",
}  # fmt: skip

_Amounts = dict[str, str | int | float]


class _Struct(msgspec.Struct, rename="camel"):
    """The base of all structs here: their keys are in camelCase."""


class _Owner(_Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class _Annotations(msgspec.Struct):
    # only on the mirror of a static pod
    mirror: str | None = msgspec.field(default=None, name=MIRROR_POD)
    gang: str | None = msgspec.field(default=None, name=GANG_ANNOTATIONS[0])
    second_gang: str | None = msgspec.field(default=None, name=GANG_ANNOTATIONS[1])
    third_gang: str | None = msgspec.field(default=None, name=GANG_ANNOTATIONS[2])


class _Metadata(_Struct):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: _Annotations | None = None
    owner_references: list[_Owner] | None = None
    deletion_timestamp: str | None = None


class _Resources(_Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None


class _Port(_Struct):
    host_port: int | None = None


class _Container(_Struct):
    restart_policy: str | None = None
    resources: _Resources | None = None
    ports: list[_Port] | None = None


class _PodAntiAffinity(_Struct):
    required: list[msgspec.Raw] | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(_Struct):
    pod_anti_affinity: _PodAntiAffinity | None = None


class _Group(_Struct):
    pod_group_name: str | None = None


class _Spec(_Struct):
    priority: int | None = None
    preemption_policy: str | None = None
    host_network: bool | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    overhead: _Amounts | None = None
    resources: _Resources | None = None  # of the whole pod
    affinity: _Affinity | None = None
    topology_spread_constraints: list[msgspec.Raw] | None = None
    volumes: list[dict[str, msgspec.Raw]] | None = None
    resource_claims: list[msgspec.Raw] | None = None
    scheduling_group: _Group | None = None


class _Status(_Struct):
    start_time: str | None = None


class _Pod(_Struct):
    metadata: _Metadata
    spec: _Spec | None = None
    status: _Status | None = None


class _Expression(_Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _Selector(_Struct):
    match_labels: dict[str, str] | None = None
    match_expressions: list[_Expression] | None = None


class _BudgetSpec(_Struct):
    selector: _Selector | None = None


class _BudgetStatus(_Struct):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, Any] | None = None


class _Budget(_Struct):
    metadata: _Metadata
    spec: _BudgetSpec | None = None
    status: _BudgetStatus | None = None


_pods = msgspec.json.Decoder(_Pod)
_budgets = msgspec.json.Decoder(_Budget)


def with_facts(decode_pod: Callable[[Json], Pod]) -> Callable[[Json], Pod]:
    """Return a decoder of pods that adds `Pod.scheduling` to those of ``decode_pod``; it raises as
    that one does. A pod of which only these facts cannot be read is decoded without them: it still
    holds its cards, and is never preempted.
    """

    def decoded(raw: Json) -> Pod:
        pod = decode_pod(raw)
        with contextlib.suppress(ClusterError):
            return msgspec.structs.replace(pod, scheduling=facts(raw))
        return pod

    return decoded


def facts(raw: Json) -> SchedulingFacts:
    """Decode the facts of a pod that only schedulers use.

    Raises:
        ClusterError: it cannot be read.
    """
    read = _decoded(_pods, raw, "a pod")
    metadata, spec = read.metadata, read.spec or _Spec()
    annotations = metadata.annotations or _Annotations()
    # Pods of one job have equal texts, which are kept once.
    pairs = ((sys.intern(key), sys.intern(text)) for key, text in (metadata.labels or {}).items())
    labels = tuple(map(_shared, sorted(pairs)))[:_MAX_LABELS]
    namespace = sys.intern(metadata.namespace)
    owners = metadata.owner_references or ()
    controller = next((each for each in owners if each.controller), _Owner())
    gang = _gang(metadata, spec)
    # why the pod must not be preempted; empty where it may be
    if spec.priority is not None and spec.priority >= _CRITICAL:
        protected = "critical"
    elif annotations.mirror is not None:
        protected = "static"
    else:
        protected = "daemon_set" if controller.kind == _DAEMON_SET else ""
    return SchedulingFacts(
        namespace,
        metadata.name,
        priority=spec.priority,
        may_preempt=spec.preemption_policy != "Never",
        started_at=decode.unix_seconds((read.status or _Status()).start_time),
        deleting=bool(metadata.deletion_timestamp),
        labels=_shared(labels),
        gang=sys.intern(f"{namespace}/{gang}") if gang else "",
        owner=sys.intern(f"{namespace}/{controller.uid[:_LONGEST_NAME]}") if controller.uid else "",
        protected=protected,
        requests=_shared(_requests(spec)),
        traits=_shared(frozenset(_traits(spec))),
    )


def budget(raw: Json) -> Budget:
    """Decode a PodDisruptionBudget.

    Raises:
        ClusterError: it cannot be read, or has no name.
    """
    read = _decoded(_budgets, raw, "a PodDisruptionBudget")
    status = read.status or _BudgetStatus()
    if not read.metadata.name:
        raise ClusterError(
            "the API server sent a PodDisruptionBudget without a name; it is ignored"
        )
    selector = (read.spec or _BudgetSpec()).selector
    return Budget(
        read.metadata.namespace,
        read.metadata.name,
        None if selector is None else _selector(selector),
        allowed=status.disruptions_allowed,
        disrupted=frozenset(status.disrupted_pods or ()),
    )


def _gang(metadata: _Metadata, spec: _Spec) -> str:
    """Return the name of the pod's gang, the group of pods that is to be scheduled together; empty
    where it is in none.
    """
    labels, annotations = metadata.labels or {}, metadata.annotations or _Annotations()
    names = (
        *(labels.get(key) for key in GANG_LABELS),
        annotations.gang,
        annotations.second_gang,
        annotations.third_gang,
        (spec.scheduling_group or _Group()).pod_group_name,
        *(each.name for each in metadata.owner_references or () if each.kind == _POD_GROUP),
    )
    return next((name[:_LONGEST_NAME] for name in names if name), "")


def _requests(spec: _Spec) -> tuple[tuple[str, int], ...] | None:
    """Return the amounts that kube-scheduler counts for the pod, in thousandths of each resource's
    unit, and one of the resource ``pods``. Each resource by itself: the sum of sidecars and main
    containers, or the most that an init container and the sidecars before it need, if that is
    larger; and the pod's overhead. None where the amounts cannot be told.
    """
    if spec.resources is not None:
        return None  # amounts of the whole pod replace those of its containers
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    parts = [each.resources for each in containers if each.resources is not None]
    if sum(len(part.limits or ()) + len(part.requests or ()) for part in parts) > _MAX_AMOUNTS:
        return None  # to read each would take a good part of a second
    running: dict[str, int] = {}
    most: dict[str, int] = {}
    try:
        for container in spec.init_containers or ():
            amounts = _amounts(container)
            if container.restart_policy == "Always":
                _add(running, amounts)
            else:
                for name, amount in amounts.items():
                    most[name] = max(most.get(name, 0), running.get(name, 0) + amount)
        for container in spec.containers or ():
            _add(running, _amounts(container))
        for name, amount in most.items():
            running[name] = max(running.get(name, 0), amount)
        _add(running, _read(spec.overhead))
    except ValueError:
        return None
    if len(running) > _MAX_RESOURCES:
        return None
    running["pods"] = 1000
    return tuple(sorted((name, amount) for name, amount in running.items() if amount))


def _amounts(container: _Container) -> dict[str, int]:
    """Return the requests of a container; a limit counts where there is no request."""
    resources = container.resources or _Resources()
    return _read(resources.limits) | _read(resources.requests)


def _read(amounts: _Amounts | None) -> dict[str, int]:
    """Read quantities.

    Raises:
        ValueError: one of them is not a quantity.
    """
    found = {}
    for name, text in (amounts or {}).items():
        if (value := _thousandths(str(text))) is None:
            raise ValueError(name)
        found[name] = value
    return found


@functools.lru_cache(maxsize=_SHARED)
def _thousandths(text: str) -> int | None:
    return thousandths(text)


def _add(amounts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        amounts[name] = amounts.get(name, 0) + amount


def _traits(spec: _Spec) -> Iterable[Trait]:
    """Yield what kube-scheduler's filters check of the pod besides the amounts of resources."""
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    if spec.host_network or any(port.host_port for one in containers for port in one.ports or ()):
        yield Trait.HOST_PORTS
    anti_affinity = (spec.affinity or _Affinity()).pod_anti_affinity
    if anti_affinity is not None and anti_affinity.required:
        yield Trait.ANTI_AFFINITY
    if spec.topology_spread_constraints:
        yield Trait.SPREAD
    if any(key not in _PLAIN_VOLUMES for volume in spec.volumes or () for key in volume):
        yield Trait.VOLUMES
    if spec.resource_claims:
        yield Trait.CLAIMS


def _selector(read: _Selector) -> Selector:
    expressions = (read.match_expressions or [])[:_MAX_SELECTED]
    return Selector(
        tuple(sorted((read.match_labels or {}).items())),
        tuple(
            Requirement(each.key, each.operator, frozenset(each.values or ()))
            for each in expressions
        ),
    )


def _shared(value: T) -> T:
    """Return the one object for equal values: pods of one job differ in little."""
    return cast("T", _first_of_equals(value))


@functools.lru_cache(maxsize=_SHARED)
def _first_of_equals(value: Hashable) -> Hashable:
    return value


def _decoded(decoder: msgspec.json.Decoder[T], raw: Json, what: str) -> T:
    try:
        return decoder.decode(raw)
    # RecursionError: nested deeper than any object of Kubernetes. ValueError: an invalid number or
    # character.
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ClusterError(
            f"the API server sent {what} that cannot be read: "
            f"{shortened(str(err), _LONGEST_MESSAGE)}"
        ) from err
