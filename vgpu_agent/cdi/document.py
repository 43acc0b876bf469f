"""A CDI spec as a value: read from what a tool printed or a file holds,
and written for the runtime.

`nvidia_ctk` and `toolkit_specs` read with it, `generated_specs` reads and writes. The fields are
those of the CDI specification up to 1.1 (https://github.com/cncf-tags/container-device-interface);
a runtime refuses a whole file over one field that it does not know, and we do the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from vgpu_agent.errors import CdiError

# A spec of eight GPUs in seven MIG instances each is below 200 KiB, so what is larger than this is
# something else.
LARGEST_BYTES = 8 * 1024 * 1024

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DeviceNode(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A device node of the container; ``host_path`` is empty where it is the same on the host."""

    path: str
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class Mount(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A mount of the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


class Hook(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A program that the runtime runs at one point of a container's life (an OCI hook); ``timeout``
    in seconds.
    """

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class ContainerEdits(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """The changes that a device, or every device of a spec, makes in a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[dict[str, Any], ...] = ()
    hooks: tuple[Hook, ...] = ()
    mounts: tuple[Mount, ...] = ()
    intel_rdt: dict[str, Any] | None = None
    additional_gids: tuple[int, ...] = ()


class Device(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """One device of a spec: a name, and what a container that asks for it gets."""

    name: str
    container_edits: ContainerEdits = ContainerEdits()
    annotations: dict[str, str] = {}


class Spec(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """One spec, the content of one file; ``container_edits`` go with each of its devices."""

    cdi_version: str
    kind: str
    devices: tuple[Device, ...] = ()
    annotations: dict[str, str] = {}
    container_edits: ContainerEdits = ContainerEdits()

    @property
    def names(self) -> tuple[str, ...]:
        """The qualified names of its devices."""
        return tuple(f"{self.kind}={device.name}" for device in self.devices)


def decode(content: bytes, *, is_yaml: bool = False) -> Spec:
    """Read the spec in these bytes, not yet checked by `rules`.

    Raises:
        CdiError: it is not a spec; the message is the end of a sentence that names its source.
    """
    if len(content) > LARGEST_BYTES:
        raise CdiError(f"is larger than {LARGEST_BYTES >> 20} MiB")
    try:
        if is_yaml:
            # it is one of PyYAML's safe loaders
            return msgspec.convert(yaml.load(content, Loader=_Loader), Spec)  # noqa: S506
        return msgspec.json.decode(content, type=Spec)
    except (msgspec.MsgspecError, yaml.YAMLError, UnicodeError, RecursionError) as err:
        raise CdiError(f"is not a CDI spec: {' '.join(str(err).split())[:300]}") from err


def encode(spec: Spec) -> bytes:
    """Return the spec as the bytes of a file; equal specs give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n"
