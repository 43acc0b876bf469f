"""The binding mode: late if this node's container runtime resolves CDI names, so that a container's
edits can be written after Allocate, else early. The setting ``binding.mode`` may say otherwise.

`agent` asks once it has read its own Node, and shows the answer with its reason in the log and
under ``/debug/config``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vgpu_agent.nodes import Node

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")

# The field cdi_devices of ContainerAllocateResponse: alpha in 1.28, on by default from 1.29
# (kubelet §1). Annotations work before.
_CDI_FIELD_SINCE = (1, 29)
# container runtime → the first version that resolves CDI names without a setting for it
_RUNTIMES = {"containerd": (2, 0), "cri-o": (1, 23)}


class BindingMode(msgspec.Struct, frozen=True):
    """The way in which grants are bound on this node.

    Attributes:
        late: decide at PreStartContainer and carry by CDI; otherwise decide in Allocate, for a
            guessed pod, and prove at PreStartContainer that it was the right one.
        by_annotation: the CDI name travels as an annotation, because this kubelet has no field for
            it.
        reason: one sentence.
    """

    late: bool
    by_annotation: bool
    reason: str


def choose_mode(setting: str, node: Node | None) -> BindingMode | None:
    """The mode for ``binding.mode`` on this node;
    None while it depends on a Node that has not been read.
    """
    kubelet = _version(node.kubelet_version) if node else None
    by_annotation = kubelet is not None and kubelet < _CDI_FIELD_SINCE
    if setting != "auto":
        return BindingMode(
            late=setting == "late", by_annotation=by_annotation, reason=f"binding.mode is {setting}"
        )
    if node is None:
        return None
    runtime, _, text = node.runtime_version.partition("://")
    version, needed = _version(text), _RUNTIMES.get(runtime)
    seen = (
        f"the Node says {node.runtime_version or 'nothing about its runtime'} and the kubelet "
        f"{node.kubelet_version or 'unknown'}"
    )
    if needed is None or version is None:
        return BindingMode(
            late=False,
            by_annotation=False,
            reason=f"{seen}; only containerd and CRI-O are known to resolve CDI names",
        )
    if version < needed:
        hint = (
            "; with enable_cdi = true in its configuration, set binding.mode to late"
            if version >= (1, 7)
            else ""
        )
        return BindingMode(
            late=False,
            by_annotation=False,
            reason=(
                f"{seen}; {runtime} resolves CDI names by itself from {needed[0]}.{needed[1]}{hint}"
            ),
        )
    return BindingMode(
        late=True, by_annotation=by_annotation, reason=f"{seen}, which resolves CDI names"
    )


def _version(text: str) -> tuple[int, int] | None:
    found = _VERSION.match(text)
    return (int(found[1]), int(found[2])) if found else None
