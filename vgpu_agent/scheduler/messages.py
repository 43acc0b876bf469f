"""The messages between kube-scheduler and an extender (k8s.io/kube-scheduler/extender/v1;
vgpu-manager §5.1). Their keys are the names of Go's fields.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from vgpu_agent.errors import RequestRefusedError, quoted, shortened
from vgpu_agent.pods import is_object_name

_LONGEST_ERROR = 500

_Arguments = TypeVar("_Arguments")


class _Metadata(msgspec.Struct):
    name: str = ""


class _Node(msgspec.Struct):
    metadata: _Metadata


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class FilterArguments(msgspec.Struct, rename="pascal"):
    """The pod, and the Nodes on which it may go, by name (``nodeCacheCapable``) or as objects."""

    pod: msgspec.Raw = msgspec.Raw()
    nodes: _NodeList | None = None
    node_names: list[str] | None = None

    @property
    def has_pod(self) -> bool:
        """Tell whether there is a pod."""
        return bytes(self.pod) not in {b"", b"null"}

    def candidates(self) -> dict[str, msgspec.Raw | None]:
        """Return the Nodes in their order: name → object, None where only names were sent.

        Raises:
            RequestRefusedError: an object has no name.
        """
        if self.node_names is not None:
            return dict.fromkeys(self.node_names)
        items = (self.nodes.items if self.nodes else None) or []
        try:
            return {msgspec.json.decode(raw, type=_Node).metadata.name: raw for raw in items}
        except (msgspec.MsgspecError, RecursionError) as err:
            raise RequestRefusedError(f"Nodes: {shortened(str(err), _LONGEST_ERROR)}") from err


class FilterResult(msgspec.Struct, rename="pascal"):
    """The Nodes that remain, in the form of the arguments, and why the others do not."""

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
    """Why the pod was not bound; empty where it was."""

    error: str = ""


def filter_arguments(body: bytes) -> FilterArguments:
    """Decode the arguments of a filter.

    Raises:
        RequestRefusedError: they are none.
    """
    return _decoded(body, FilterArguments, "ExtenderArgs")


def binding_arguments(body: bytes) -> BindingArguments:
    """Decode the arguments of a bind.

    Raises:
        RequestRefusedError: they are none, or a name is not what Kubernetes allows.
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
    except (msgspec.MsgspecError, RecursionError) as err:
        raise RequestRefusedError(f"no {name}: {shortened(str(err), _LONGEST_ERROR)}") from err
