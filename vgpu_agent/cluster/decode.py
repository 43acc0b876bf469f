"""The decoder of the API server's JSON: pods, Nodes, ConfigMaps, lists and watch events.

Called by `reflector` and the watches for each object. The structs have the used fields only, and
msgspec skips all others without building them, which is 98 % of a pod. Of a pod's annotations and
environment variables only those are kept that families name (`families.pod_annotations`). A user
may send 1.5 MiB of them, so what is kept is bounded. An unreadable object raises a `ClusterError`
that names it if its name can be read. No other exception leaves this module, so one unreadable pod
does not hide the others.

Fields are those of core/v1 (https://kubernetes.io/docs/reference/kubernetes-api/), which may be
missing or null wherever Go omits them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import ClusterError, quoted, shortened
from vgpu_agent.families.pod_annotations import BY_DEFAULT, VALUES, VARIABLES
from vgpu_agent.nodes import Node
from vgpu_agent.pods import (
    MAX_CONTAINERS,
    MAX_FAMILY_RESOURCES,
    ContainerKind,
    Pod,
    PodContainer,
    is_container_id,
    is_container_name,
    is_object_name,
    is_uid,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.pods import PodKeys

    Json = bytes | msgspec.Raw

T = TypeVar("T")

# Limits for what is kept of one pod. Names may be as long as Kubernetes allows. A real pod has a
# few containers, and each of them a few extended resources.
_LONGEST_NAME = 253
_LONGEST_VERSION = 256
_LONGEST_RESOURCE = 317  # DNS subdomain, slash, 63 characters
_LONGEST_AMOUNT = 64
_LONGEST_VALUE_BYTES = 64  # of an environment variable, in JSON
_MAX_RESOURCES = 128  # of all containers together, beside those of families
_ANNOTATION_BYTES = 32 * 1024  # of all values together
_LONGEST_MESSAGE = 1000  # characters of a Status
_LONGEST_TOKEN = 8 * 1024  # the continue token of a list
# Largest Node or ConfigMap that is read; etcd takes 1.5 MiB.
_LONGEST_OTHER_BYTES = 4 * 1024 * 1024

_Amounts = dict[str, str | int | float]


class _Struct(msgspec.Struct, rename="camel"):
    """The base of all structs here: their keys are in camelCase."""


class _PodMetadata(_Struct):
    """The metadata of a pod except its annotations and labels, which `_pod_type` adds."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: Any = None
    labels: Any = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class _Metadata(_Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    continue_: str | None = msgspec.field(default=None, name="continue")  # of a list


class _Variable(_Struct):
    name: str = ""
    value: msgspec.Raw = msgspec.Raw()  # undecoded: most are long and not used


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


class _Running(_Struct):
    started_at: str | None = None


class _Terminated(_Struct):
    exit_code: int = -1
    started_at: str | None = None
    finished_at: str | None = None


class _State(_Struct):
    running: _Running | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(_Struct):
    name: str = ""
    restart_count: int = 0
    container_id: str | None = msgspec.field(default=None, name="containerID")
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
    metadata: _PodMetadata
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


class _Taint(_Struct):
    key: str = ""
    effect: str = ""


class _NodeSpec(_Struct):
    taints: list[_Taint] | None = None


class _NodeStatus(_Struct):
    capacity: _Amounts | None = None
    allocatable: _Amounts | None = None
    conditions: list[_Condition] | None = None
    node_info: _NodeInfo | None = None


class _Node(_Struct):
    metadata: _Metadata
    spec: _NodeSpec | None = None
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
    """One page of a list, its items undecoded."""

    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class Event(_Struct):
    """One line of a watch, its object undecoded."""

    type: str
    object: msgspec.Raw


class Failure(_Struct):
    """The Status that an ERROR event carries."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


_nodes = msgspec.json.Decoder(_Node)
_config_maps = msgspec.json.Decoder(_ConfigMap)
_lists = msgspec.json.Decoder(List)
_events = msgspec.json.Decoder(Event)
_failures = msgspec.json.Decoder(Failure)
_versioned = msgspec.json.Decoder(_Versioned)
_named = msgspec.json.Decoder(_Named)


@functools.cache
def pods_with(keys: PodKeys) -> Callable[[Json], Pod]:
    """Return the decoder of pods that keeps just these annotations and labels; it raises as `pod`
    does.
    """
    return functools.partial(_pod, keys, msgspec.json.Decoder(_pod_type(keys)))


def pod(raw: Json) -> Pod:
    """Decode a pod with the keys that families have by default.

    Raises:
        ClusterError: it cannot be read, has no name or no UID, or has names that Kubernetes does
            not allow.
    """
    return pods_with(BY_DEFAULT)(raw)


def _pod_type(keys: PodKeys) -> type[_Pod]:
    """Build the struct of a pod with these annotations and labels and no others."""
    # Keys are no Python identifiers, so the fields are numbered: a0, a1, …
    metadata: list[tuple[str, Any, Any]] = []
    for name, of_pods in (("annotations", keys.annotations), ("labels", keys.labels)):
        fields: list[Any] = [
            (f"a{place}", str | None, msgspec.field(default=None, name=key))
            for place, key in enumerate(of_pods)
        ]
        metadata.append((name, msgspec.defstruct(f"_{name.title()}", fields) | None, None))
    whole = msgspec.defstruct("_WholeMetadata", metadata, bases=(_PodMetadata,), kw_only=True)
    return cast(
        "type[_Pod]",
        msgspec.defstruct("_WholePod", [("metadata", whole)], bases=(_Pod,), kw_only=True),
    )


def _pod(keys: PodKeys, decoder: msgspec.json.Decoder[_Pod], raw: Json) -> Pod:
    read = _decoded(decoder, raw, "a pod")
    metadata, spec, status = read.metadata, read.spec or _PodSpec(), read.status or _PodStatus()
    if not metadata.name or not metadata.uid:
        raise ClusterError(
            "the API server sent a pod without a name or a UID "
            f"({metadata.namespace}/{metadata.name}); it is ignored"
        )
    _check_names(metadata, spec)
    # Only the kubelet writes startTime, when it has accepted the pod. The API server empties the
    # status of a new pod.
    reported = bool(status.start_time)
    statuses = {
        one.name: one
        for one in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    }
    containers, has_more = _containers(spec, statuses, keys.resource_prefixes)
    return Pod(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        node=(spec.node_name or "")[:_LONGEST_NAME],
        phase=(status.phase or "Pending")[:_LONGEST_NAME],
        annotations=_kept(keys.annotations, metadata.annotations),
        labels=_kept(keys.labels, metadata.labels),
        containers=containers,
        has_more_requests=has_more,
        deleting=bool(metadata.deletion_timestamp),
        created_at=unix_seconds(metadata.creation_timestamp),
        scheduler=(spec.scheduler_name or "")[:_LONGEST_NAME],
        resource_version=metadata.resource_version[:_LONGEST_VERSION],
        reported=reported,
        # A Binding sets this condition. A pod that was created with spec.nodeName gets it from the
        # kubelet, so `scheduled` is False only for such a pod until the kubelet has accepted it,
        # and for one without a Node.
        scheduled=(
            reported
            or any(
                one.type == "PodScheduled" and one.status == "True"
                for one in status.conditions or ()
            )
        ),
        # The condition is False when the kubelet is about to create the pod's sandbox, so that no
        # container runs.
        in_new_sandbox=any(
            one.type == "PodReadyToStartContainers" and one.status == "False"
            for one in status.conditions or ()
        ),
    )


def _check_names(metadata: _PodMetadata, spec: _PodSpec) -> None:
    """Check the names of a pod, because they become parts of paths on the host and in requests.

    Raises:
        ClusterError: Kubernetes does not allow one of them.
    """
    names = [
        ("name", metadata.name, is_object_name),
        ("namespace", metadata.namespace, is_object_name),
        ("UID", metadata.uid, is_uid),
    ]
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    names += [("container name", one.name, is_container_name) for one in containers]
    for what, text, allowed in names:
        if not allowed(text):
            raise ClusterError(
                f"the API server sent a pod with the {what} {quoted(text)}, which Kubernetes does "
                "not allow; it is ignored"
            )


def node(raw: Json) -> Node:
    """Decode a Node.

    Raises:
        ClusterError: it cannot be read, or has no name.
    """
    _refuse_large(raw, "a Node")
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
        conditions={
            one.type: (one.status, one.reason or "", one.message or "")
            for one in status.conditions or ()
        },
        resource_version=metadata.resource_version,
        taints=_taints(read.spec),
    )


def _taints(spec: _NodeSpec | None) -> dict[str, str]:
    effects: dict[str, set[str]] = {}
    for taint in (spec.taints if spec is not None else None) or ():
        effects.setdefault(taint.key, set()).add(taint.effect)
    return {key: ",".join(sorted(found)) for key, found in effects.items()}


def config_map(raw: Json) -> Mapping[str, str]:
    """Decode a ConfigMap into its texts by key.

    Raises:
        ClusterError: it cannot be read.
    """
    _refuse_large(raw, "a ConfigMap")
    return _decoded(_config_maps, raw, "a ConfigMap").data or {}


def page(raw: Json) -> tuple[Sequence[msgspec.Raw], str, str]:
    """Decode one page of a list: its items, still undecoded, its resource version, and the token
    of the next page, which is empty on the last one.

    Raises:
        ClusterError: it is not a list.
    """
    read = _decoded(_lists, raw, "a list")
    version, token = read.metadata.resource_version, read.metadata.continue_ or ""
    if len(version) > _LONGEST_VERSION or len(token) > _LONGEST_TOKEN:
        text = (
            f"a resourceVersion of {len(version)} and a continue token of {len(token)} characters"
        )
        raise ClusterError(
            f"the API server sent a list with {text}; look for a proxy between this node and "
            "the API server"
        )
    return read.items or (), version, token


def event(raw: Json) -> Event:
    """Decode one line of a watch.

    Raises:
        ClusterError: it is not an event.
    """
    return _decoded(_events, raw, "a watch event")


def failure(raw: Json) -> ClusterError:
    """Decode the Status of an ERROR event into an error to raise; never raises itself."""
    try:
        read = _decoded(_failures, raw, "a Status")
    except ClusterError as err:
        return err
    text = (
        shortened(": ".join(filter(None, (read.reason, read.message))), _LONGEST_MESSAGE)
        or "it did not say why"
    )
    return ClusterError(f"the API server ended the watch: {read.code} {text}", status=read.code)


def version(raw: Json) -> str:
    """Decode only the resource version of an object.

    Raises:
        ClusterError: it has none.
    """
    found = _decoded(_versioned, raw, "an object").metadata.resource_version
    if not found or len(found) > _LONGEST_VERSION:
        text = (
            f"with a metadata.resourceVersion of {len(found)} characters"
            if found
            else "without metadata.resourceVersion"
        )
        raise ClusterError(
            f"the API server sent an object {text}; look for a proxy between this node and "
            "the API server"
        )
    return found


def _decoded(decoder: msgspec.json.Decoder[T], raw: Json, what: str) -> T:
    try:
        return decoder.decode(raw)
    # RecursionError: nested deeper than any object of Kubernetes. ValueError: an invalid number or
    # character.
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ClusterError(
            f"the API server sent {what}{_name_of(raw)} that cannot be read: "
            f"{shortened(str(err), _LONGEST_MESSAGE)}"
        ) from err


def _name_of(raw: Json) -> str:
    """Return ``" namespace/name"`` for a message; empty when not even that can be read."""
    try:
        metadata = _named.decode(raw).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return f" {metadata.namespace}/{metadata.name}"[:400] if metadata.name else ""


def _refuse_large(raw: Json, what: str) -> None:
    size = memoryview(raw).nbytes
    if size > _LONGEST_OTHER_BYTES:
        raise ClusterError(
            f"the API server sent {what}{_name_of(raw)} of {size} bytes; it is not read, since "
            f"{_LONGEST_OTHER_BYTES} are the most"
        )


def _kept(keys: Sequence[str], fields: Any) -> dict[str, str]:
    """The values of ``keys`` that the pod has, cut where they exceed `_ANNOTATION_BYTES`.
    ``fields`` is the pod's struct of annotations or labels from `_pod_type`; None where it has
    none.
    """
    kept: dict[str, str] = {}
    left = _ANNOTATION_BYTES
    for place, key in enumerate(keys if fields is not None else ()):
        text: str | None = getattr(fields, f"a{place}")
        if text is None:
            continue
        if sys.getsizeof(text) > left:
            text = shortened(text, max(left, 0) // 4)  # a character has four bytes at most
        left -= sys.getsizeof(text)
        kept[key] = text
    return kept


class _Requests(msgspec.Struct):
    """The extended resources that a container requests: resource → amount.

    Attributes:
        ours: those whose names begin as those of families do.
        others: the others, `_MAX_RESOURCES` at most.
    """

    ours: dict[str, str]
    others: dict[str, str]


def _containers(
    spec: _PodSpec, statuses: Mapping[str, _ContainerStatus], prefixes: tuple[str, ...]
) -> tuple[tuple[PodContainer, ...], bool]:
    """Return the containers of a pod, of very many only those that ask for extended resources;
    and True if there is more of what families read (`Pod.has_more_requests`). Made-up names must
    not displace a family's request, in whichever container they are. ``prefixes`` begin the names
    of the families' resources.
    """
    kinds = [
        (one, ContainerKind.SIDECAR if one.restart_policy == "Always" else ContainerKind.INIT)
        for one in spec.init_containers or ()
    ]
    kinds += [(one, ContainerKind.MAIN) for one in spec.containers or ()]
    requests = [_requested(one, prefixes) for one, _ in kinds]
    asking = [place for place, found in enumerate(requests) if found.ours]
    ours_left, others_left = MAX_FAMILY_RESOURCES, _MAX_RESOURCES
    has_more = (
        len(asking) > MAX_CONTAINERS
        or sum(len(requests[place].ours) for place in asking) > ours_left
    )
    places: Sequence[int] = range(len(kinds))
    if len(kinds) > MAX_CONTAINERS:
        others = [place for place in places if not requests[place].ours and requests[place].others]
        places = sorted([*asking, *others][:MAX_CONTAINERS])
    containers = []
    for place in places:
        one, kind = kinds[place]
        ours = dict(itertools.islice(requests[place].ours.items(), ours_left))
        others_of_it = dict(itertools.islice(requests[place].others.items(), others_left))
        ours_left -= len(ours)
        others_left -= len(others_of_it)
        status = statuses.get(one.name) or _ContainerStatus()
        containers.append(_container(one, kind, status, ours | others_of_it))
    return tuple(containers), has_more


def _requested(one: _Container, prefixes: tuple[str, ...]) -> _Requests:
    resources = one.resources or _Resources()
    found = _Requests({}, {})
    # The API server enforces that limits and requests of extended resources are equal where both
    # are set.
    for amounts in (resources.requests, resources.limits):
        for name, amount in (amounts or {}).items():
            if not _is_extended(name):
                continue
            if name.startswith(prefixes):
                found.ours[name] = _amount(amount)
            elif len(found.others) < _MAX_RESOURCES:
                found.others[name] = _amount(amount)
    return found


def _container(
    one: _Container,
    kind: ContainerKind,
    status: _ContainerStatus,
    requested: Mapping[str, str],
) -> PodContainer:
    limits: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    for name, text in requested.items():
        number = whole_number(text)
        if number is None:
            unreadable[name] = shortened(text, _LONGEST_AMOUNT)
        else:
            limits[name] = number
    # `VARIABLES`: a pattern of the names of variables about GPUs or their limits
    environment = frozenset(
        variable.name for variable in one.env or () if VARIABLES.fullmatch(variable.name)
    )
    state, last_state = status.state or _State(), status.last_state or _State()
    container_id = (status.container_id or "").rpartition("://")[2]  # the runtime is before it
    ends = [each.terminated for each in (state, last_state) if each.terminated is not None]
    runs: list[_Running | _Terminated] = [
        *ends,
        *(each.running for each in (state, last_state) if each.running is not None),
    ]
    return PodContainer(
        one.name[:_LONGEST_NAME],
        kind,
        limits,
        unreadable_limits=unreadable,
        environment=environment,
        started=bool(status.restart_count > 0 or runs),
        started_at=max((unix_seconds(run.started_at) for run in runs), default=0.0),
        running=state.running is not None,
        values=_values(one),
        completed=state.terminated is not None and state.terminated.exit_code == 0,
        ended_at=max((unix_seconds(end.finished_at) for end in ends), default=0.0),
        container_id=container_id if is_container_id(container_id) else "",
    )


def _values(one: _Container) -> dict[str, str]:
    """Return the values of those variables whose values families use (pattern `VALUES`), if they
    are short: no family uses a longer one. Of two variables with one name the later one counts, as
    in the container.
    """
    values: dict[str, str] = {}
    for variable in one.env or ():
        if not VALUES.fullmatch(variable.name):
            continue
        values.pop(variable.name, None)
        # more than two bytes: not the empty text, which is two quotation marks
        if 2 < memoryview(variable.value).nbytes <= _LONGEST_VALUE_BYTES:
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                values[variable.name] = msgspec.json.decode(variable.value, type=str)
    return values


def _extended(amounts: _Amounts | None) -> dict[str, str]:
    """Return the extended resources of a Node. Of very many, keep those of the families first, so
    that made-up names cannot displace them.
    """
    found = [(name, amount) for name, amount in (amounts or {}).items() if _is_extended(name)]
    if len(found) > _MAX_RESOURCES:
        found.sort(key=lambda each: not each[0].startswith(BY_DEFAULT.resource_prefixes))
    return {name: _amount(value) for name, value in found[:_MAX_RESOURCES]}


def _is_extended(resource: str) -> bool:
    """Tell whether it is an extended resource: those have a slash in their names."""
    return "/" in resource and len(resource) <= _LONGEST_RESOURCE


def _amount(value: str | float) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to print a number of more than 4,300 digits
        return "a number of thousands of digits"


def unix_seconds(timestamp: str | None) -> float:
    """Read a time of RFC 3339; 0 where it is missing or invalid."""
    try:
        return dt.datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
    except (ValueError, OverflowError, OSError):
        return 0.0  # counts as unknown, like a missing time
