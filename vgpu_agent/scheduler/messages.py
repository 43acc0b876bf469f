"""The messages between kube-scheduler and an extender (k8s.io/kube-scheduler/extender/v1;
vgpu-manager §5.1). Their keys are the names of Go's fields.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from vgpu_agent.errors import RequestRefusedError, quoted, shortened
from vgpu_agent.pods import is_object_name

MAX_NODES = 50_000
"""Ten times the Nodes of the largest cluster that Kubernetes supports; a call with many more would
delay all others.
"""

_LONGEST_ERROR = 500

_Arguments = TypeVar("_Arguments")


class _Metadata(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class _Node(msgspec.Struct):
    metadata: _Metadata


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class _VersionMetadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class _PodVersion(msgspec.Struct):
    metadata: _VersionMetadata


class FilterArguments(msgspec.Struct, rename="pascal"):
    """The pod, and the Nodes on which it may go: by name, if kube-scheduler's configuration says
    ``nodeCacheCapable``, or as objects.
    """

    pod: msgspec.Raw = msgspec.Raw()
    nodes: _NodeList | None = None
    node_names: list[str] | None = None

    @property
    def has_pod(self) -> bool:
        """Tell whether there is a pod."""
        return bytes(self.pod) not in {b"", b"null"}

    def pod_version(self) -> tuple[str, str]:
        """Return the pod's UID and ``resourceVersion``; two empty texts where it cannot be read."""
        try:
            metadata = msgspec.json.decode(self.pod, type=_PodVersion).metadata
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return "", ""
        return metadata.uid, metadata.resource_version

    def candidates(self) -> dict[str, msgspec.Raw | None]:
        """Return the Nodes in their order: name → object, None where only names were sent.

        Raises:
            RequestRefusedError: there are more than any cluster has, or an object has no name.
        """
        items = (self.nodes.items if self.nodes else None) or []
        number = len(items if self.node_names is None else self.node_names)
        if number > MAX_NODES:
            raise RequestRefusedError(f"{number} Nodes; expected at most {MAX_NODES}")
        if self.node_names is not None:
            return dict.fromkeys(self.node_names)
        try:
            return {msgspec.json.decode(raw, type=_Node).metadata.name: raw for raw in items}
        except (msgspec.MsgspecError, ValueError, RecursionError) as err:
            raise RequestRefusedError(f"Nodes: {shortened(str(err), _LONGEST_ERROR)}") from err


class FilterResult(msgspec.Struct, rename="pascal"):
    """The Nodes that remain, in the form of the arguments, and why the others do not.
    ``failed_and_unresolvable_nodes``, for those where preemption would not help, is not used.
    """

    nodes: dict[str, list[msgspec.Raw]] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""


class BindingArguments(msgspec.Struct):
    """A pod, and the Node on which it is to run."""

    pod_name: str = msgspec.field(name="PodName")
    pod_namespace: str = msgspec.field(name="PodNamespace")
    node: str = msgspec.field(name="Node")
    pod_uid: str = msgspec.field(name="PodUID", default="")


class BindingResult(msgspec.Struct, rename="pascal"):
    """The reason why the pod was not bound; empty where it was."""

    error: str = ""


class _UidMetadata(msgspec.Struct):
    uid: str = ""


class _PodWithUid(msgspec.Struct):
    metadata: _UidMetadata


class _Victims(msgspec.Struct):
    pods: list[msgspec.Raw] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class MetaPod(msgspec.Struct):
    """A pod by its UID."""

    uid: str = msgspec.field(name="UID", default="")


class MetaVictims(msgspec.Struct):
    """The victims on one Node by their UIDs, and how many of them are more than
    PodDisruptionBudgets allow.
    """

    pods: list[MetaPod] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class Proposal(msgspec.Struct, frozen=True):
    """kube-scheduler's victims on one Node.

    Attributes:
        pods: UID → the pod; None where only its UID was sent.
        violations: how many of them are more than PodDisruptionBudgets allow.
    """

    pods: dict[str, msgspec.Raw | None]
    violations: int


class PreemptionArguments(msgspec.Struct, rename="pascal"):
    """The pod that needs room, and the victims on each Node, as pods or, with ``nodeCacheCapable``,
    by their UIDs.
    """

    pod: msgspec.Raw = msgspec.Raw()
    node_name_to_victims: dict[str, _Victims | None] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims | None] | None = None

    @property
    def has_pod(self) -> bool:
        """Tell whether there is a pod."""
        return bytes(self.pod) not in {b"", b"null"}

    def proposals(self) -> dict[str, Proposal]:
        """Return the victims by Node.

        Raises:
            RequestRefusedError: there are none in either form, or a pod has no UID.
        """
        found: dict[str, Proposal] = {}
        if self.node_name_to_meta_victims is not None:
            for name, meta in self.node_name_to_meta_victims.items():
                uids = [pod.uid for pod in (meta.pods if meta else None) or ()]
                found[name] = Proposal(dict.fromkeys(uids), meta.violations if meta else 0)
        elif self.node_name_to_victims is not None:
            for name, victims in self.node_name_to_victims.items():
                pods = (victims.pods if victims else None) or ()
                by_uid = {_uid_of(raw): raw for raw in pods}
                found[name] = Proposal({**by_uid}, victims.violations if victims else 0)
        else:
            raise RequestRefusedError("neither NodeNameToVictims nor NodeNameToMetaVictims")
        if name := next((name for name, each in found.items() if "" in each.pods), ""):
            raise RequestRefusedError(f"a victim on Node {quoted(name)} has no UID")
        return found


class PreemptionResult(msgspec.Struct, rename="pascal"):
    """The victims on each Node on which the pod would then fit."""

    node_name_to_meta_victims: dict[str, MetaVictims]


def _uid_of(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=_PodWithUid).metadata.uid
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:  # ValueError: no UTF-8
        raise RequestRefusedError(f"a victim: {shortened(str(err), _LONGEST_ERROR)}") from err


def preemption_arguments(body: bytes) -> PreemptionArguments:
    """Decode the arguments of a preemption.

    Raises:
        RequestRefusedError: the body has none.
    """
    return _decoded(body, PreemptionArguments, "ExtenderPreemptionArgs")


def filter_arguments(body: bytes) -> FilterArguments:
    """Decode the arguments of a filter.

    Raises:
        RequestRefusedError: the body has none.
    """
    return _decoded(body, FilterArguments, "ExtenderArgs")


def binding_arguments(body: bytes) -> BindingArguments:
    """Decode the arguments of a bind.

    Raises:
        RequestRefusedError: the body has none, or a name is not what Kubernetes allows.
    """
    found = _decoded(body, BindingArguments, "ExtenderBindingArgs")
    for name in (found.pod_namespace, found.pod_name, found.node):  # parts of a request's path
        if not is_object_name(name):
            raise RequestRefusedError(
                f"{quoted(name)} is not a name that Kubernetes allows; nothing is bound"
            )
    return found


def _decoded(body: bytes, form: type[_Arguments], name: str) -> _Arguments:
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:  # ValueError: no UTF-8
        raise RequestRefusedError(f"no {name}: {shortened(str(err), _LONGEST_ERROR)}") from err
