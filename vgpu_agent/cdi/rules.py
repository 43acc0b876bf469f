"""The checks of a CDI spec against the rules of container runtimes,
before it is put where all runtimes of the node look.

One invalid file keeps every container that uses one of its devices from starting. So nothing is
written that these rules refuse, and no invalid spec of another program is used. Rules: the CDI
specification and the checks of its reference implementation. Called by `nvidia_ctk`,
`generated_specs`, `toolkit_specs` and `inlining`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.cdi.document import ContainerEdits, DeviceNode, Hook, Spec

_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_KIND = re.compile(r"[A-Za-z][-A-Za-z0-9_.]*[A-Za-z0-9]/[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]*[A-Za-z0-9])?")
_ANNOTATION = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_NODE_TYPES = ("", "b", "c", "u", "p")
_PERMISSIONS = frozenset("rwm")


def problems(spec: Spec) -> list[str]:
    """List why runtimes would refuse the spec; one sentence each, empty when they take it."""
    return list(_problems(spec))


def least_version(*edits: ContainerEdits, annotated: bool = False) -> str:
    """Return the lowest version of CDI that knows all that is used in ``edits``; a runtime refuses
    versions that are newer than itself.

    With ``annotated`` the spec has annotations, or a kind whose class has a dot in it; the same
    version introduced both.
    """
    nodes = [node for each in edits for node in each.device_nodes]
    if any(each.net_devices for each in edits):
        return "1.1.0"
    if any(each.intel_rdt is not None or each.additional_gids for each in edits):
        return "0.7.0"
    if annotated:
        return "0.6.0"
    if any(node.host_path for node in nodes):
        return "0.5.0"
    return "0.4.0" if any(mount.type for each in edits for mount in each.mounts) else "0.3.0"


def with_sufficient_version(spec: Spec) -> Spec:
    """Return ``spec`` with a version that knows all that is used;
    an unknown version is left as it is, and `problems` reports it.
    """
    least = _least_version_of(spec)
    if spec.cdi_version in _VERSIONS and _VERSIONS.index(spec.cdi_version) < _VERSIONS.index(least):
        return msgspec.structs.replace(spec, cdi_version=least)
    return spec


def _problems(spec: Spec) -> Iterator[str]:
    if spec.cdi_version not in _VERSIONS:
        yield f"cdiVersion {spec.cdi_version!r} is none of {', '.join(_VERSIONS)}"
    elif _VERSIONS.index(spec.cdi_version) < _VERSIONS.index(least := _least_version_of(spec)):
        yield f"cdiVersion {spec.cdi_version} does not know all that is used, which takes {least}"
    if not _KIND.fullmatch(spec.kind):
        yield f"kind {spec.kind!r} is not of the form vendor.com/class"
    if not spec.devices:
        yield "there are no devices"
    yield from _annotation_problems("annotations", spec.annotations)
    yield from _edit_problems("containerEdits", spec.container_edits)
    seen: set[str] = set()
    for device in spec.devices:
        if not _NAME.fullmatch(device.name):
            yield f"device name {device.name!r} has characters that no name may have"
        if device.name in seen:
            yield f"device {device.name} appears twice"
        seen.add(device.name)
        if is_empty(device.container_edits):
            yield f"device {device.name} changes nothing in a container"
        yield from _annotation_problems(f"device {device.name}", device.annotations)
        yield from _edit_problems(f"device {device.name}", device.container_edits)


def is_empty(edits: ContainerEdits) -> bool:
    """Tell whether the edits change nothing."""
    return edits == type(edits)()


def _least_version_of(spec: Spec) -> str:
    annotated = (
        bool(spec.annotations)
        or any(device.annotations for device in spec.devices)
        or "." in spec.kind.partition("/")[2]
    )
    least = least_version(
        spec.container_edits,
        *(device.container_edits for device in spec.devices),
        annotated=annotated,
    )
    # names that begin with a digit: since 0.5.0
    if _VERSIONS.index(least) < _VERSIONS.index("0.5.0") and any(
        device.name[:1].isdigit() for device in spec.devices
    ):
        return "0.5.0"
    return least


def _annotation_problems(where: str, annotations: dict[str, str]) -> Iterator[str]:
    for key in annotations:
        if not _ANNOTATION.fullmatch(key):
            yield f"{where}: {key!r} is not an annotation key"


def _edit_problems(where: str, edits: ContainerEdits) -> Iterator[str]:
    for line in edits.env:
        if not line.partition("=")[0] or "=" not in line:
            yield f"{where}: env {line!r} is not of the form NAME=value"
    for node in edits.device_nodes:
        yield from _node_problems(where, node)
    for mount in edits.mounts:
        if not mount.host_path or not mount.container_path.startswith("/"):
            yield (
                f"{where}: a mount of {mount.host_path!r} at {mount.container_path!r} needs a "
                "host path and an absolute container path"
            )
    for hook in edits.hooks:
        yield from _hook_problems(where, hook)


def _node_problems(where: str, node: DeviceNode) -> Iterator[str]:
    if not node.path.startswith("/"):
        yield f"{where}: device node {node.path!r} is not an absolute path"
    if node.type not in _NODE_TYPES:
        yield f"{where}: device node {node.path} is of type {node.type!r}"
    if not _PERMISSIONS.issuperset(node.permissions):
        yield f"{where}: device node {node.path} has the permissions {node.permissions!r}"


def _hook_problems(where: str, hook: Hook) -> Iterator[str]:
    if hook.hook_name not in _HOOKS:
        yield f"{where}: hook {hook.hook_name!r} is none of {', '.join(_HOOKS)}"
    if not hook.path.startswith("/"):
        yield f"{where}: hook program {hook.path!r} is not an absolute path"
