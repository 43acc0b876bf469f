"""The ways in which a container gets its devices:
the list strategies of NVIDIA's device plugin, an entry of `STRATEGIES` for each.

Every family that grants devices calls `edits_of` with them, and gets the variables, mounts,
device nodes, annotations and CDI names of the strategies that the operator has chosen (nvidia §7,
A1 to A18 and A25; volcano-vgpu §4.2). The errors of NVIDIA's plugin are not copied: a device node
is listed once, and paths of IMEX channels (device nodes by which machines share GPU memory) on the
host are below the host's device root.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config.types import DEVICE_MODES
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.model import Inventory

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
IMEX_CHANNELS = "NVIDIA_IMEX_CHANNELS"
# the value of a variable such as NVIDIA_GDS, which gives a container other devices besides its GPUs
ENABLED = "enabled"

# Mounts below this directory name the devices. Only those who may add mounts can use it, while any
# image can set a variable.
VOLUME_MOUNTS = "/var/run/nvidia-container-devices"

# NVIDIA's device nodes that belong to no GPU, in the order in which its plugin lists them (nvidia
# §7, pass-device-specs); each only where the node has it.
CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
# under WSL (Windows Subsystem for Linux) one device node leads to all GPUs (nvidia §4)
WSL_NODE = "/dev/dxg"

GENERATED_KIND = "k8s.device-plugin.nvidia.com/gpu"  # of the specs that the agent generates
TOOLKIT_KIND = "nvidia.com/gpu"  # of a spec that the container toolkit keeps


class VisibleDevice(msgspec.Struct, frozen=True):
    """A device as it is named to a container.

    Attributes:
        uuid: ``GPU-…`` or ``MIG-…``.
        index: the driver's index: ``0`` of a GPU, ``1:3`` of the MIG instance 3 of GPU 1.
        nodes: paths of the device nodes that open it, e.g. ``/dev/nvidia1``,
            ``/dev/nvidia-caps/nvidia-cap228``.
    """

    uuid: str
    index: str
    nodes: tuple[str, ...]


class ListOptions(msgspec.Struct, frozen=True):
    """The ways in which containers of this node get their devices.

    Attributes:
        strategies: names in `STRATEGIES`; their order does not matter.
        id_strategy: ``uuid`` or ``index``: the names that containers get.
        cdi_id_strategy: how the CDI specs name devices; empty for the same.
        cdi_annotation_prefix: before the name of the annotation with CDI names; runtimes look for
            ``cdi.k8s.io/``.
        cdi_kind: vendor and class of the GPUs' CDI names; names of other classes have the same
            vendor.
        pass_device_specs: answers also name the device nodes, so that cgroup rules survive a reload
            of systemd.
        device_root: where the host keeps ``/dev`` of the driver (nvidia §9), ``/`` for the usual
            place.
        control_nodes: those of NVIDIA's control nodes that exist on this node.
        imex_channels: the numbers of those on this node that each container is to be given.
        imex_root: directory on the node below which their device nodes are; empty for
            ``device_root``.
        enabled: those of `config.types.DEVICE_MODES` that are switched on: devices beside the GPUs,
            such as ``gds``.
        cdi_modes: those of ``enabled`` for which there is a CDI spec.
    """

    strategies: tuple[str, ...] = ("envvar",)
    id_strategy: str = "uuid"
    cdi_id_strategy: str = ""
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    cdi_kind: str = GENERATED_KIND
    pass_device_specs: bool = False
    device_root: str = "/"
    control_nodes: tuple[str, ...] = ()
    imex_channels: tuple[int, ...] = ()
    imex_root: str = ""
    enabled: tuple[str, ...] = ()
    cdi_modes: tuple[str, ...] = ()

    @property
    def names_nodes(self) -> bool:
        """Tell whether answers name device nodes; not with CDI alone, whose specs name them."""
        return self.pass_device_specs and not all(
            name in CDI_STRATEGIES for name in self.strategies
        )


def visible_device(uuid: str, inventory: Inventory) -> VisibleDevice | None:
    """The GPU or MIG instance of that UUID; None when the driver does not show it."""
    found = inventory.device(uuid)
    if found is None:
        return None
    gpu, instance = found
    if gpu.minor < 0:  # it has no node of its own (nvidia §4)
        return VisibleDevice(uuid, str(gpu.index), ())
    node = f"/dev/nvidia{gpu.minor}"
    if instance is None:
        return VisibleDevice(uuid, str(gpu.index), (node,))
    return VisibleDevice(uuid, f"{gpu.index}:{instance.index}", (node, *instance.capability_nodes))


def edits_of(devices: Sequence[VisibleDevice], options: ListOptions, *, answer_id: str) -> Edits:
    """Return the edits that give ``devices`` to a container, by all chosen strategies together.

    Args:
        devices: in the order in which the container is to see them, each once.
        options: of this node.
        answer_id: a UUID that distinguishes the annotations of several resources of one container;
            see the function of that name.
    """
    edits = Edits(
        {f"NVIDIA_{mode.upper()}": ENABLED for mode in DEVICE_MODES if mode in options.enabled}
    )
    for name, strategy in STRATEGIES.items():
        if name in options.strategies:
            edits = edits.joined(strategy(devices, options, answer_id))
    if options.names_nodes:
        edits = edits.joined(Edits(device_nodes=_device_nodes(devices, options)))
    return edits


def answer_id(resource: str, ids: Iterable[str]) -> str:
    """A UUID for the answer to an Allocate of these ids, in any order:
    NVIDIA's plugin draws a random one, here a repeated call gets the same.
    """
    digest = hashlib.sha256("\0".join([resource, *sorted(ids)]).encode()).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))


def cdi_names(devices: Sequence[VisibleDevice], options: ListOptions) -> tuple[str, ...]:
    """Return the CDI names of ``devices`` and their accessories:
    GPUs, IMEX channels, then those of the device modes, such as ``gds`` (nvidia A11).
    """
    vendor = options.cdi_kind.partition("/")[0]
    return (
        *(
            f"{options.cdi_kind}={_id_of(device, options.cdi_id_strategy or options.id_strategy)}"
            for device in devices
        ),
        *(f"{vendor}/imex-channel={channel}" for channel in options.imex_channels),
        *(
            f"{vendor}/{mode}=all"
            for mode in DEVICE_MODES
            if mode in options.enabled and mode in options.cdi_modes
        ),
    )


def _by_annotation(devices: Sequence[VisibleDevice], options: ListOptions, answer_id: str) -> Edits:
    if not (names := cdi_names(devices, options)):
        return Edits()
    return Edits(
        annotations={
            f"{options.cdi_annotation_prefix}nvidia-device-plugin_{answer_id}": ",".join(names)
        }
    )


def _by_cdi_field(devices: Sequence[VisibleDevice], options: ListOptions, answer_id: str) -> Edits:
    del answer_id
    return Edits(cdi_names=cdi_names(devices, options))


def _by_variable(devices: Sequence[VisibleDevice], options: ListOptions, answer_id: str) -> Edits:
    del answer_id
    environment = {
        VISIBLE_DEVICES: ",".join(_id_of(device, options.id_strategy) for device in devices)
    }
    if options.imex_channels:
        environment[IMEX_CHANNELS] = ",".join(str(channel) for channel in options.imex_channels)
    return Edits(environment)


def _by_mounts(devices: Sequence[VisibleDevice], options: ListOptions, answer_id: str) -> Edits:
    del answer_id
    names = [
        *(_id_of(device, options.id_strategy) for device in devices),
        *(f"imex/{channel}" for channel in options.imex_channels),
    ]
    return Edits(
        {VISIBLE_DEVICES: VOLUME_MOUNTS},
        mounts=tuple(
            Mount(container_path=f"{VOLUME_MOUNTS}/{name}", host_path="/dev/null") for name in names
        ),
    )


# In the order in which answers are put together: where two set the same variable, the later one
# wins (nvidia A15).
STRATEGIES: Mapping[str, Callable[[Sequence[VisibleDevice], ListOptions, str], Edits]] = {
    "cdi-annotations": _by_annotation,
    "cdi-cri": _by_cdi_field,
    "envvar": _by_variable,
    "volume-mounts": _by_mounts,
}
CDI_STRATEGIES = ("cdi-annotations", "cdi-cri")


def _id_of(device: VisibleDevice, strategy: str) -> str:
    return device.index if strategy == "index" else device.uuid


def _device_nodes(devices: Sequence[VisibleDevice], options: ListOptions) -> tuple[DeviceNode, ...]:
    """Control nodes, then those of the devices, then IMEX channels; each once, even where
    two MIG instances share the node of their GPU (nvidia D13).
    """
    root = options.device_root.rstrip("/")
    paths = (*options.control_nodes, *(node for device in devices for node in device.nodes))
    nodes = {path: DeviceNode(path, host_path=root + path) for path in paths}
    for channel in options.imex_channels:
        path = f"/dev/nvidia-caps-imex-channels/channel{channel}"
        nodes[path] = DeviceNode(
            path, host_path=(options.imex_root or options.device_root).rstrip("/") + path
        )
    return tuple(nodes.values())
