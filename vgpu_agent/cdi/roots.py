"""The translation of paths in the agent's container to paths of the node.

The driver's tree is mounted into the agent under one path and lies on the node under another
(nvidia §8, §9). The tool that makes the spec finds files in the first; the runtime, which reads the
spec, looks in the second. Called by `nvidia_ctk`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.cdi.document import ContainerEdits, DeviceNode, Hook, Spec

# Hooks that run inside the container's namespaces, so their arguments are the container's paths.
_IN_THE_CONTAINER = ("createContainer", "startContainer")


class Roots(NamedTuple):
    """The places of the driver and its device nodes, as the agent sees them and on the node.

    Attributes:
        driver: root of the driver's files for the agent.
        driver_on_node: the same on the node.
        dev: root of ``/dev`` for the agent.
        dev_on_node: the same on the node.
    """

    driver: str = "/"
    driver_on_node: str = "/"
    dev: str = "/"
    dev_on_node: str = "/"


def find_roots(*, driver_root: str, dev_root: str, container_driver_root: str) -> Roots:
    """Look in the file system for where the agent sees the driver's files and ``/dev``.

    Args:
        driver_root: on the node.
        dev_root: on the node; empty for ``driver_root``.
        container_driver_root: where the node's driver root is mounted into the agent's container,
            if it is.
    """
    dev_on_node = dev_root or driver_root
    if not os.path.isdir(container_driver_root):
        return Roots(
            driver=driver_root,
            driver_on_node=driver_root,
            dev=dev_on_node,
            dev_on_node=dev_on_node,
        )
    dev = (
        container_driver_root if os.path.isdir(os.path.join(container_driver_root, "dev")) else "/"
    )
    return Roots(
        driver=container_driver_root,
        driver_on_node=driver_root,
        dev=dev,
        dev_on_node=dev_on_node,
    )


def on_the_node(spec: Spec, roots: Roots) -> Spec:
    """Return ``spec`` with paths of the node wherever the runtime looks on the node."""
    files = _replacing(roots.driver, roots.driver_on_node)
    nodes = _replacing(roots.dev, roots.dev_on_node)
    return msgspec.structs.replace(
        spec,
        container_edits=_edits(spec.container_edits, files, nodes),
        devices=tuple(
            msgspec.structs.replace(
                device, container_edits=_edits(device.container_edits, files, nodes)
            )
            for device in spec.devices
        ),
    )


def _replacing(seen: str, on_node: str) -> Callable[[str], str]:
    seen, on_node = seen.rstrip("/"), on_node.rstrip("/")

    def replaced(path: str) -> str:
        return on_node + path[len(seen) :] if path.startswith(f"{seen}/") else path

    return replaced


def _edits(
    edits: ContainerEdits, files: Callable[[str], str], nodes: Callable[[str], str]
) -> ContainerEdits:
    return msgspec.structs.replace(
        edits,
        device_nodes=tuple(_node(node, nodes) for node in edits.device_nodes),
        mounts=tuple(
            msgspec.structs.replace(mount, host_path=files(mount.host_path))
            for mount in edits.mounts
        ),
        hooks=tuple(_hook(hook, files) for hook in edits.hooks),
    )


def _node(node: DeviceNode, nodes: Callable[[str], str]) -> DeviceNode:
    path = nodes(node.host_path or node.path)
    return msgspec.structs.replace(node, host_path="" if path == node.path else path)


def _hook(hook: Hook, files: Callable[[str], str]) -> Hook:
    """Translate a hook. Its program lies on the node in any case,
    so only arguments can have the agent's paths.
    """
    if hook.hook_name in _IN_THE_CONTAINER:
        return hook
    return msgspec.structs.replace(hook, args=tuple(files(argument) for argument in hook.args))
