"""A pod that is about to be created: its JSON read into a `Pod`, and the changes that families want
turned into a JSON Patch (RFC 6902).

The API server has decoded the pod before it calls the webhook, so fields have the right types. It
validates their values only afterwards: names may be invalid, and lists may be null.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import RequestRefusedError, shortened
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.families.admission import PodChanges
    from vgpu_agent.webhook.messages import Operation

DEFAULT_SCHEDULER = "default-scheduler"
HOSTNAME = "kubernetes.io/hostname"
# Each container costs 20 µs and each limit 9 µs, and all other reviews wait meanwhile. A pod of
# 1.5 MiB, as large as etcd takes, can have tens of thousands; no node runs a pod with a thousand.
_MAX_CONTAINERS, _MAX_LIMITS = 1000, 2000
_LONGEST_NAME = 253
_LONGEST_AMOUNT = 64
_LONGEST_ERROR = 500


class Pinned(enum.StrEnum):
    """The treatment of ``spec.nodeName`` of a new pod that only a scheduler can give GPUs."""

    AFFINITY = "affinity"  # the pod must be scheduled to the Node of that name
    HOSTNAME = "hostname"  # to a Node whose label kubernetes.io/hostname has that value
    KEEP = "keep"  # unchanged: the pod bypasses all schedulers


class _Metadata(msgspec.Struct, rename="camel"):
    name: str | None = None
    generate_name: str | None = None
    annotations: dict[str, str | None] | None = None
    labels: dict[str, str | None] | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str | None = None
    restart_policy: str | None = None
    resources: _Resources | None = None


class _NodeAffinity(msgspec.Struct, rename="camel"):
    required: dict[str, Any] | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str | None = None
    scheduler_name: str | None = None
    runtime_class_name: str | None = None
    containers: list[_Container | None] | None = None
    init_containers: list[_Container | None] | None = None
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata | None = None
    spec: _Spec | None = None


class NewPod:
    """The new pod in a review: `pod` for families, and `patch` for the answer.

    Raises:
        RequestRefusedError: it is no pod, or one with too many containers.
    """

    def __init__(self, raw: bytes | msgspec.Raw, namespace: str) -> None:
        try:
            read = msgspec.json.decode(raw, type=_Pod)
        except (msgspec.MsgspecError, ValueError, RecursionError) as err:
            raise RequestRefusedError(
                f"the pod cannot be read: {shortened(str(err), _LONGEST_ERROR)}"
            ) from err
        self._has_metadata = read.metadata is not None
        self._metadata, self._spec = read.metadata or _Metadata(), read.spec or _Spec()
        spec = self._spec
        containers = [*(spec.init_containers or ()), *(spec.containers or ())]
        count = len(containers)
        if count > _MAX_CONTAINERS:
            raise RequestRefusedError(
                f"the pod has {count} containers; expected at most {_MAX_CONTAINERS}"
            )
        resources = [each.resources for each in containers if each is not None]
        limits = sum(len(each.limits or ()) for each in resources if each is not None)
        if limits > _MAX_LIMITS:
            raise RequestRefusedError(
                f"the containers of the pod have {limits} limits; expected at most {_MAX_LIMITS}"
            )
        # path, kind and container, in the order of `Pod.containers`
        self._places = [
            *_places("initContainers", spec.init_containers, None),
            *_places("containers", spec.containers, ContainerKind.MAIN),
        ]
        self.pod = Pod(
            uid="",
            namespace=shortened(namespace, _LONGEST_NAME),
            name=shortened(
                self._metadata.name or self._metadata.generate_name or "", _LONGEST_NAME
            ),
            node=spec.node_name or "",
            annotations=_texts(self._metadata.annotations),
            labels=_texts(self._metadata.labels),
            containers=tuple(_read(each, kind) for _, kind, each in self._places),
            scheduler=spec.scheduler_name or "",
        )

    def patch(self, changes: PodChanges, pinned: Pinned) -> list[Operation]:
        """Return the operations that make ``changes``. Annotations and labels that the pod has
        already are left out; ``changes.limits`` has only what differs.
        """
        metadata, spec = self._metadata, self._spec
        operations = [
            *_on_texts("annotations", metadata.annotations, changes.annotations),
            *_on_texts("labels", metadata.labels, changes.labels),
        ]
        if operations and not self._has_metadata:
            operations.insert(0, _add("/metadata", {}))
        # the limits of all containers in their order, or none at all
        for (path, _, container), limits in zip(self._places, changes.limits, strict=False):
            operations += _on_limits(f"{path}/resources", container.resources, limits)
        if changes.scheduler and (spec.scheduler_name or DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER:
            operations.append(_add("/spec/schedulerName", changes.scheduler))
        if changes.runtime_class and spec.runtime_class_name is None:
            operations.append(_add("/spec/runtimeClassName", changes.runtime_class))
        # `needs_scheduler`: only a scheduler gives the pod GPUs
        if changes.needs_scheduler and spec.node_name and pinned is not Pinned.KEEP:
            operations += self._unpinned(spec.node_name, pinned)
        return operations

    def _unpinned(self, node: str, pinned: Pinned) -> Iterator[Operation]:
        """Yield the operations that replace ``nodeName`` with a condition for schedulers."""
        spec = self._spec
        yield {"op": "remove", "path": "/spec/nodeName"}
        if pinned is Pinned.HOSTNAME:
            if spec.node_selector is None:
                yield _add("/spec/nodeSelector", {HOSTNAME: node})
            else:
                yield _add(f"/spec/nodeSelector/{_escaped(HOSTNAME)}", node)
            return
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        node_affinity = spec.affinity.node_affinity if spec.affinity else None
        required = (node_affinity.required if node_affinity else None) or {}
        terms = required.get("nodeSelectorTerms")
        found = {**required, "nodeSelectorTerms": _with_name(terms, node)}
        if spec.affinity is None:
            yield _add("/spec/affinity", {"nodeAffinity": {key: found}})
        elif node_affinity is None:
            yield _add("/spec/affinity/nodeAffinity", {key: found})
        else:
            yield _add(f"/spec/affinity/nodeAffinity/{key}", found)


def _with_name(terms: object, node: str) -> list[Any]:
    """Return the node selector terms, each with the condition of the Node's name added. The terms
    are alternatives. An empty term selects nothing (v1.NodeSelectorTerm), and stays empty.
    """
    by_name = {"key": "metadata.name", "operator": "In", "values": [node]}
    if not isinstance(terms, list) or not terms:
        return [{"matchFields": [by_name]}]
    return [
        {**term, "matchFields": [*(term.get("matchFields") or ()), by_name]}
        if isinstance(term, dict) and any(term.values())
        else term
        for term in terms
    ]


def _places(
    field: str, containers: list[_Container | None] | None, kind: ContainerKind | None
) -> Iterator[tuple[str, ContainerKind, _Container]]:
    """Yield the path, the kind and the content of each container in ``field`` of the pod's spec;
    without ``kind``, its restart policy tells an init container from a sidecar.
    """
    for place, container in enumerate(containers or ()):
        if container is not None:
            always = container.restart_policy == "Always"
            found = kind or (ContainerKind.SIDECAR if always else ContainerKind.INIT)
            yield f"/spec/{field}/{place}", found, container


def _texts(texts: Mapping[str, str | None] | None) -> dict[str, str]:
    return {key: text or "" for key, text in (texts or {}).items()}


def _read(container: _Container, kind: ContainerKind) -> PodContainer:
    limits: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    resources = container.resources or _Resources()
    for name, amount in (resources.limits or {}).items():
        if "/" not in name:  # such as cpu: no resource of a family
            continue
        text = str(amount)
        number = whole_number(text)
        if number is None:
            unreadable[name] = shortened(text, _LONGEST_AMOUNT)
        else:
            limits[name] = number
    return PodContainer(
        shortened(container.name or "", _LONGEST_NAME),
        kind,
        limits=limits,
        unreadable_limits=unreadable,
    )


def _on_texts(
    field: str, present: Mapping[str, str | None] | None, wanted: Mapping[str, str | None]
) -> Iterator[Operation]:
    """Yield the operations that set annotations or labels as ``wanted``; None removes one."""
    path = f"/metadata/{field}"
    added = {key: text for key, text in wanted.items() if text is not None}
    if present is None:
        if added:
            yield _add(path, added)
        return
    for key, text in wanted.items():
        if text is None:
            if key in present:
                yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
        elif present.get(key) != text:
            yield _add(f"{path}/{_escaped(key)}", text)


def _on_limits(
    path: str, resources: _Resources | None, wanted: Mapping[str, int]
) -> Iterator[Operation]:
    """Yield the operations that set limits. The API server copies a limit to the requests, unless
    there is a request already. Then the request is set, too, because both must be equal.
    """
    if not wanted:
        return
    texts = {key: str(amount) for key, amount in wanted.items()}
    if resources is None:
        yield _add(path, {"limits": texts})
    elif resources.limits is None:
        yield _add(f"{path}/limits", texts)
    else:
        for key, text in texts.items():
            yield _add(f"{path}/limits/{_escaped(key)}", text)
    requests = (resources.requests if resources else None) or {}
    for key, text in texts.items():
        if key in requests:
            yield _add(f"{path}/requests/{_escaped(key)}", text)


def _add(path: str, value: object) -> Operation:
    """Return the operation that sets ``path``, whether it exists or not."""
    return {"op": "add", "path": path, "value": value}


def _escaped(key: str) -> str:
    """Return a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
