"""From the API server's JSON to `Pod`, `Node` and plain text, through structs that name only the fields that are used.

Called by `reflector` and the watches for each object. A node's pods are some hundred objects of which 98 % is of no interest here; msgspec
skips that without building it. What cannot be read is a `ClusterError` that names the object as far as it can be named, and nothing else
ever: one unreadable pod must not cost the others.

Fields are those of core/v1 (https://kubernetes.io/docs/reference/kubernetes-api/), which may be missing or null wherever Go omits them.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import ClusterError, quoted
from vgpu_agent.nodes import Node
from vgpu_agent.pods import ContainerKind, Pod, PodContainer, is_container_name, is_object_name, is_uid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = bytes | msgspec.Raw

T = TypeVar("T")

_Amounts = dict[str, str | int | float]


class _Struct(msgspec.Struct, rename="camel"):
    """Kubernetes writes camelCase."""


class _Metadata(_Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    continue_: str | None = msgspec.field(default=None, name="continue")  # of a list


class _Variable(_Struct):
    name: str = ""


class _Resources(_Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None


class _Container(_Struct):
    name: str = ""
    restart_policy: str | None = None
    resources: _Resources | None = None
    env: list[_Variable] | None = None


class _PodSpec(_Struct):
    node_name: str | None = None
    scheduler_name: str | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _State(_Struct):
    running: dict[str, Any] | None = None
    terminated: dict[str, Any] | None = None


class _ContainerStatus(_Struct):
    name: str = ""
    restart_count: int = 0
    state: _State | None = None
    last_state: _State | None = None


class _PodCondition(_Struct):
    type: str = ""
    status: str = ""


class _PodStatus(_Struct):
    phase: str | None = None
    start_time: str | None = None
    conditions: list[_PodCondition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class _Pod(_Struct):
    metadata: _Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _NodeInfo(_Struct):
    kubelet_version: str = ""
    container_runtime_version: str = ""


class _Condition(_Struct):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class _NodeStatus(_Struct):
    capacity: _Amounts | None = None
    allocatable: _Amounts | None = None
    conditions: list[_Condition] | None = None
    node_info: _NodeInfo | None = None


class _Node(_Struct):
    metadata: _Metadata
    status: _NodeStatus | None = None


class _ConfigMap(_Struct):
    metadata: _Metadata
    data: dict[str, str] | None = None


class _Version(_Struct):
    resource_version: str = ""


class _Versioned(_Struct):
    metadata: _Version


class _Name(_Struct):
    namespace: str = ""
    name: str = ""


class _Named(_Struct):
    metadata: _Name


class List(_Struct):
    """One page of a list; items are not yet decoded."""

    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class Event(_Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(_Struct):
    """The Status that an ERROR event carries."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


_pods = msgspec.json.Decoder(_Pod)
_nodes = msgspec.json.Decoder(_Node)
_config_maps = msgspec.json.Decoder(_ConfigMap)
_lists = msgspec.json.Decoder(List)
_events = msgspec.json.Decoder(Event)
_failures = msgspec.json.Decoder(Failure)
_versioned = msgspec.json.Decoder(_Versioned)
_named = msgspec.json.Decoder(_Named)


def pod(raw: Json) -> Pod:
    """A pod.

    Raises:
        ClusterError: it cannot be read, has no name or no UID, or has names that Kubernetes does not allow.
    """
    read = _decoded(_pods, raw, "a pod")
    metadata, spec, status = read.metadata, read.spec or _PodSpec(), read.status or _PodStatus()
    if not metadata.name or not metadata.uid:
        raise ClusterError(f"the API server sent a pod without a name or a UID ({metadata.namespace}/{metadata.name}); it is ignored")
    _check_names(metadata, spec)
    started = _started(status.init_container_statuses) | _started(status.container_statuses)
    # The API server empties the status of a pod that is made, and afterwards kubelet alone writes when it has accepted the pod.
    reported = bool(status.start_time)
    containers = [
        _container(one, ContainerKind.SIDECAR if one.restart_policy == "Always" else ContainerKind.INIT, started)
        for one in spec.init_containers or ()
    ]
    containers += [_container(one, ContainerKind.MAIN, started) for one in spec.containers or ()]
    return Pod(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        node=spec.node_name or "",
        phase=status.phase or "Pending",
        annotations=metadata.annotations or {},
        labels=metadata.labels or {},
        containers=tuple(containers),
        deleting=bool(metadata.deletion_timestamp),
        created_at=_unix_seconds(metadata.creation_timestamp),
        scheduler=spec.scheduler_name or "",
        resource_version=metadata.resource_version,
        reported=reported,
        # A Binding sets this condition; a pod that was made with spec.nodeName has it only from kubelet.
        scheduled=reported or any(one.type == "PodScheduled" and one.status == "True" for one in status.conditions or ()),
    )


def _check_names(metadata: _Metadata, spec: _PodSpec) -> None:
    """Names become parts of paths, on the host and in requests.

    Raises:
        ClusterError: one of them is not what Kubernetes allows.
    """
    names = [("name", metadata.name, is_object_name), ("namespace", metadata.namespace, is_object_name), ("UID", metadata.uid, is_uid)]
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    names += [("container name", one.name, is_container_name) for one in containers]
    for what, text, allowed in names:
        if not allowed(text):
            raise ClusterError(f"the API server sent a pod with the {what} {quoted(text)}, which Kubernetes does not allow; it is ignored")


def node(raw: Json) -> Node:
    """A Node.

    Raises:
        ClusterError: it cannot be read, or has no name.
    """
    read = _decoded(_nodes, raw, "a Node")
    metadata, status = read.metadata, read.status or _NodeStatus()
    info = status.node_info or _NodeInfo()
    if not metadata.name:
        raise ClusterError("the API server sent a Node without a name; it is ignored")
    return Node(
        name=metadata.name,
        uid=metadata.uid,
        annotations=metadata.annotations or {},
        labels=metadata.labels or {},
        kubelet_version=info.kubelet_version,
        runtime_version=info.container_runtime_version,
        capacity=_extended(status.capacity),
        allocatable=_extended(status.allocatable),
        conditions={one.type: (one.status, one.reason or "", one.message or "") for one in status.conditions or ()},
        resource_version=metadata.resource_version,
    )


def config_map(raw: Json) -> Mapping[str, str]:
    """The texts of a ConfigMap.

    Raises:
        ClusterError: it cannot be read.
    """
    return _decoded(_config_maps, raw, "a ConfigMap").data or {}


def page(raw: Json) -> tuple[Sequence[msgspec.Raw], str, str]:
    """The items of one page of a list, undecoded; its resource version; the token for the next page, empty on the last.

    Raises:
        ClusterError: it is no list.
    """
    read = _decoded(_lists, raw, "a list")
    return read.items or (), read.metadata.resource_version, read.metadata.continue_ or ""


def event(raw: Json) -> Event:
    """One line of a watch.

    Raises:
        ClusterError: it is no event.
    """
    return _decoded(_events, raw, "a watch event")


def failure(raw: Json) -> ClusterError:
    """What an ERROR event says; never raises."""
    try:
        read = _decoded(_failures, raw, "a Status")
    except ClusterError as err:
        return err
    said = ": ".join(filter(None, (read.reason, read.message))) or "it did not say why"
    return ClusterError(f"the API server ended the watch: {read.code} {said}", status=read.code)


def version(raw: Json) -> str:
    """The resource version of any object.

    Raises:
        ClusterError: it has none.
    """
    found = _decoded(_versioned, raw, "an object").metadata.resource_version
    if not found:
        raise ClusterError("the API server sent an object without metadata.resourceVersion; something in between is not Kubernetes")
    return found


def _decoded(decoder: msgspec.json.Decoder[T], raw: Json, what: str) -> T:
    try:
        return decoder.decode(raw)
    # RecursionError: nested deeper than any object of Kubernetes; ValueError: numbers and characters that are none.
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ClusterError(f"the API server sent {what}{_name_of(raw)} that cannot be read: {err}") from err


def _name_of(raw: Json) -> str:
    """`` namespace/name``, where at least that can be read."""
    try:
        metadata = _named.decode(raw).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return f" {metadata.namespace}/{metadata.name}"[:400] if metadata.name else ""


def _container(one: _Container, kind: ContainerKind, started: set[str]) -> PodContainer:
    resources = one.resources or _Resources()
    limits: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    # The API server sees to it that limits of extended resources equal their requests; one of the two may be all that there is.
    for name, text in (_extended(resources.requests) | _extended(resources.limits)).items():
        number = whole_number(text)
        if number is None:
            unreadable[name] = text
        else:
            limits[name] = number
    environment = frozenset(variable.name for variable in one.env or ())
    return PodContainer(one.name, kind, limits, unreadable, environment, started=one.name in started)


def _started(statuses: Sequence[_ContainerStatus] | None) -> set[str]:
    """Names of the containers that run, or ran before."""

    def ran(state: _State | None) -> bool:
        return state is not None and (state.running is not None or state.terminated is not None)

    return {one.name for one in statuses or () if one.restart_count > 0 or ran(one.state) or ran(one.last_state)}


def _extended(amounts: _Amounts | None) -> dict[str, str]:
    return {name: str(amount) for name, amount in (amounts or {}).items() if "/" in name}


def _unix_seconds(timestamp: str | None) -> float:
    try:
        return dt.datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
    except (ValueError, OverflowError, OSError):
        return 0.0  # only orders pods that nobody saw being bound
