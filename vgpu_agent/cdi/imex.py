"""IMEX channels: whether this node has the ones that its containers are to get,
and a CDI spec for them.

A channel is a character device that the driver makes, by which machines share GPU memory (nvidia
§9). `controller` finds the channels on the node with this module, and `generated_specs` makes their
spec.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.cdi.document import ContainerEdits, Device, DeviceNode, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.cdi.roots import Roots

_CHANNEL = "/dev/nvidia-caps-imex-channels/channel{}"


class Channels(NamedTuple):
    """The IMEX channels that were found.

    Attributes:
        ids: the channels that exist, in the order in which they are wanted.
        root: directory on the node below which their device nodes are.
        trouble: the wanted channels that do not exist, and where they were looked for; empty when
            all do.
    """

    ids: tuple[int, ...] = ()
    root: str = "/"
    trouble: str = ""


def find_channels(wanted: Sequence[int], roots: Roots) -> Channels:
    """Look for the wanted channels below the driver's device root (where its ``/dev`` is), then
    below ``/``.
    """
    if not wanted:
        return Channels()
    # directory as the agent sees it → the same on the node
    places = {"": "/"} | {roots.dev.rstrip("/"): roots.dev_on_node}
    found: tuple[int, ...] = ()
    on_node = "/"
    for seen in sorted(places, reverse=True):  # the driver's own root first
        found = tuple(
            channel for channel in wanted if _is_character_device(seen + _CHANNEL.format(channel))
        )
        on_node = places[seen]
        if found:
            break
    missing = [_CHANNEL.format(channel) for channel in wanted if channel not in found]
    if not missing:
        return Channels(found, on_node)
    looked = " and ".join(place or "/" for place in sorted(places, reverse=True))
    return Channels(
        found,
        on_node,
        f"{', '.join(missing)} is no character device below {looked}; load the driver's IMEX "
        "channels (module parameter NVreg_CreateImexChannel0=1), or take it out of "
        "plugin.imexChannelIds",
    )


def channel_spec(kind: str, channels: Sequence[int], root: str) -> Spec:
    """A spec with a device for each channel, e.g. ``0``.

    Args:
        kind: of the spec.
        channels: their numbers.
        root: directory on the node below which the device nodes are.
    """
    devices = []
    for channel in channels:
        path = _CHANNEL.format(channel)
        on_node = root.rstrip("/") + path
        node = DeviceNode(path, host_path="" if on_node == path else on_node)
        devices.append(Device(str(channel), ContainerEdits(device_nodes=(node,))))
    return Spec(cdi_version="0.5.0", kind=kind, devices=tuple(devices))


def _is_character_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
