"""The `nvidia` family: ``nvidia.com/gpu``, whole or replicated by time-slicing, as NVIDIA's own device plugin offers it.

Names, ids and answers are those of the nvidia contract (§3, §4, §6.2, §7; vectors G1, G8, G9, A1–A3, A5, A16, A17, A23, A24), so a cluster
can switch without touching a pod. The ids name the device, so `Allocate` can answer completely. Its defects are not copied: unhealthy ids
are refused, device nodes are listed once, every order is deterministic.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import ConfigError, RequestRefusedError
from vgpu_agent.isolation.edits import DeviceNode, Edits
from vgpu_agent.model import Resource, Share
from vgpu_agent.placement.aligned import choose_group
from vgpu_agent.placement.sharing import choose_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.model import Gpu, Inventory

FAMILY = "nvidia"
GPU_RESOURCE = "nvidia.com/gpu"
SHARED_SUFFIX = ".shared"
REPLICA_SEPARATOR = "::"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"

# More ids than any list that kubelet takes could hold (kubelet contract §10): refused before they are made, not after.
_MOST_IDS = 200_000
_BYTES_PER_ID = 70  # of a replica in the list, at worst
_LIST_BYTES = 3_670_016

# In the order in which NVIDIA's plugin lists them (nvidia contract §7, pass-device-specs); each only where the node has it.
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclasses.dataclass(frozen=True, slots=True)
class NvidiaOptions:
    """How this node offers its GPUs.

    Attributes:
        replicas: how many containers share a GPU; 1 gives whole GPUs.
        shared: sharing is configured, even with one replica.
        rename_shared: shared GPUs are offered as ``nvidia.com/gpu.shared``.
        fail_requests_greater_than_one: a container may take one replica only; more would not mean more of the GPU.
        pass_device_specs: answers also name the device nodes, so that cgroup rules survive a reload of systemd.
        id_strategy: ``uuid`` or ``index``: how `VISIBLE_DEVICES` names a GPU.
        policy: ``distributed`` or ``packed``.
        device_root: where the host keeps ``/dev`` of the driver (nvidia contract §9), ``/`` for the usual place.
        control_nodes: those of `CONTROL_NODES` that exist on this node.
    """

    replicas: int = 1
    shared: bool = False
    rename_shared: bool = False
    fail_requests_greater_than_one: bool = False
    pass_device_specs: bool = False
    id_strategy: str = "uuid"
    policy: str = "distributed"
    device_root: str = "/"
    control_nodes: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings, *, control_nodes: tuple[str, ...]) -> NvidiaOptions:
        """The options that the configuration asks for."""
        slicing = settings.sharing.time_slicing
        entry = next((entry for entry in slicing.resources if entry.name == GPU_RESOURCE), None) if slicing else None
        return cls(
            replicas=entry.replicas if entry else 1,
            shared=entry is not None,
            rename_shared=bool(slicing and slicing.rename_by_default),
            fail_requests_greater_than_one=bool(slicing and slicing.fail_requests_greater_than_one),
            pass_device_specs=settings.plugin.pass_device_specs,
            id_strategy=settings.plugin.device_id_strategy,
            policy=settings.plugin.shared_devices_allocation_policy,
            device_root=settings.gpu.dev_root or settings.gpu.driver_root,
            control_nodes=control_nodes,
        )


class NvidiaFamily:
    """Whole and time-sliced GPUs under NVIDIA's names."""

    name = FAMILY

    def __init__(self, options: NvidiaOptions) -> None:
        self._options = options
        renamed = options.shared and options.rename_shared
        self._resource_name = GPU_RESOURCE + SHARED_SUFFIX if renamed else GPU_RESOURCE

    def claims(self, resource: str) -> bool:
        """``nvidia.com/gpu`` and its shared name; both may be in kubelet's records after a change of settings."""
        return resource in (GPU_RESOURCE, GPU_RESOURCE + SHARED_SUFFIX)

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """One resource: a whole GPU's id is its UUID (G1), a replica's is ``<UUID>::<n>`` (G8); nothing on a node without GPUs.

        Raises:
            ConfigError: there would be more ids than kubelet could ever take.
        """
        if not inventory.gpus:
            return ()
        if (count := len(inventory.gpus) * self._options.replicas) > _MOST_IDS:
            fitting = _LIST_BYTES // (_BYTES_PER_ID * len(inventory.gpus))
            raise ConfigError(
                [f"{self._resource_name}: {count} ids are more than kubelet takes; replicas: at most {fitting} for each GPU would fit"]
            )
        ids = tuple(DeviceId(id_, gpu.uuid, gpu.numa_node) for gpu in inventory.gpus for id_ in self._ids_of(gpu))
        return (Resource(self._resource_name, FAMILY, ids, holders_per_device=self._options.replicas),)

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """More than one replica is refused where the operator says so (A23); the text is the one that users of NVIDIA's plugin know."""
        if self._options.shared and self._options.fail_requests_greater_than_one and len(ids) > 1:
            raise RequestRefusedError(
                f"invalid request: maximum request size for shared resources is 1; found {len(ids)} "
                f"(sharing.timeSlicing.failRequestsGreaterThanOne; ask for 1 of {resource.name})"
            )

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """A whole GPU is exclusive and books all it has; a replica limits nothing, so it books nothing but its place."""
        del resource  # the ids say it all, also those of earlier settings
        return tuple(self._share(uuid, inventory, whole=whole) for uuid, whole in _devices_behind(ids).items())

    def prefer(self, resource: Resource, available: Sequence[str], required: Sequence[str], size: int, inventory: Inventory) -> list[str]:
        """Whole GPUs that belong together (nvidia contract §6.1), whatever the policy; replicas spread or packed (§6.2)."""
        known = {entry.id: (rank, entry.device) for rank, entry in enumerate(resource.ids)}
        usable = sorted((id_ for id_ in available if id_ in known), key=lambda id_: known[id_][0])
        if all(entry.id == entry.device for entry in resource.ids):
            return choose_group(available=usable, required=required, size=size, links=inventory.links)
        totals = collections.Counter(entry.device for entry in resource.ids)
        # The tie-break is by key, and node order is what an operator expects to see: GPU 0 before GPU 1.
        order = {device: f"{position:08d}" for position, device in enumerate(totals)}
        return choose_replicas(
            totals={order[device]: count for device, count in totals.items()},
            device_of=lambda id_: order[known[id_][1]],
            available=usable,
            required=required,
            size=size,
            policy=self._options.policy,
        )

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """The environment variable that NVIDIA's container runtime reads (A1–A3, A5), and the device nodes where asked for (A16, A17)."""
        del resource  # every resource of this family answers alike
        gpus = [gpu for uuid in _devices_behind(ids) if (gpu := inventory.gpu(uuid))]
        by_index = self._options.id_strategy == "index"
        visible = ",".join(str(gpu.index) if by_index else gpu.uuid for gpu in gpus)
        return Edits(environment={VISIBLE_DEVICES: visible}, device_nodes=self._device_nodes(gpus))

    def _ids_of(self, gpu: Gpu) -> list[str]:
        if not self._options.shared or self._options.replicas == 1:
            return [gpu.uuid]
        return [f"{gpu.uuid}{REPLICA_SEPARATOR}{number}" for number in range(self._options.replicas)]

    def _share(self, uuid: str, inventory: Inventory, *, whole: bool) -> Share:
        if not whole:
            return Share(uuid)
        gpu = inventory.gpu(uuid)
        return Share(uuid, memory_mib=gpu.memory_mib if gpu else 0, cores_percent=100, exclusive=True)

    def _device_nodes(self, gpus: Sequence[Gpu]) -> tuple[DeviceNode, ...]:
        if not self._options.pass_device_specs:
            return ()
        paths = [*self._options.control_nodes, *(f"/dev/nvidia{gpu.minor}" for gpu in gpus)]
        root = self._options.device_root.rstrip("/")
        return tuple(DeviceNode(path, root + path) for path in dict.fromkeys(paths))


def _devices_behind(ids: Sequence[str]) -> dict[str, bool]:
    """UUID → whether the id stands for the whole GPU; in the order of the ids, each once (A3)."""
    devices: dict[str, bool] = {}
    for id_ in ids:
        uuid, separator, _ = id_.partition(REPLICA_SEPARATOR)
        devices[uuid] = devices.get(uuid, False) or not separator
    return devices
