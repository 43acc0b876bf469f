"""The `nvidia` family: GPUs and MIG instances under NVIDIA's names, whole or shared, as its own
device plugin and iktos's fork of it (k8s-gpu-sharing-plugin) offer them.

Names, ids and answers are NVIDIA's and iktos's (nvidia §3, §4, §6, §7; iktos §I.2 to §I.5), so a
cluster can switch without touching a pod. The ids name the device, so `Allocate` can answer
completely. What is offered is worked out in `offers`; here are the answers about ids. Defects are
not copied: unhealthy ids are refused (by the ledger), device nodes are listed once, every order is
deterministic.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.device_lists import (
    WSL_NODE,
    VisibleDevice,
    answer_id,
    edits_of,
    visible_device,
)
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.nvidia.ids import EVERY_GPU, device_of_each, devices_behind, has_replicas
from vgpu_agent.families.nvidia.offers import Offers, offers
from vgpu_agent.families.nvidia.options import DOMAIN, GPU_RESOURCE
from vgpu_agent.families.nvidia.settings import FAMILY
from vgpu_agent.isolation.mps import memory_share_mib, mps_edits, thread_share
from vgpu_agent.model import Share, SharingMode
from vgpu_agent.placement.mixing import ALONE
from vgpu_agent.placement.policies import ALIGNED, ONE_GPU, SPREAD, IdRequest, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.families.family import Shortfall
    from vgpu_agent.families.nvidia.options import NvidiaOptions
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Inventory, Resource
    from vgpu_agent.placement.mixing import GpuUses

# the names of another family in the same domain
_OF_VGPU_MANAGER = frozenset(f"{DOMAIN}vgpu-{what}" for what in ("number", "cores", "memory"))
# under WSL (Windows Subsystem for Linux) one id stands for all GPUs
_EVERY = {EVERY_GPU: VisibleDevice(uuid=EVERY_GPU, index=EVERY_GPU, nodes=(WSL_NODE,))}


class NvidiaFamily:
    """GPUs and MIG instances under NVIDIA's names.

    State: only a cache, the offers from the last inventory, because a burst of pods asks about one
    inventory.
    """

    name = FAMILY

    def __init__(self, options: NvidiaOptions) -> None:
        self._options = options
        self._last: tuple[Inventory, Offers] | None = None

    def owns(self, resource: str) -> Ownership:
        """Own names in NVIDIA's domain: one that is not offered today may have been before a rename
        or a change of MIG.

        A name in the domain that is not one of NVIDIA's own is only `Ownership.POSSIBLE`: `shares`
        decides on its ids, because another plugin may offer something in the same domain.
        Names of vgpu-manager are left to it: its ids look like replicas (vgpu-manager §2.1).
        """
        if not resource.startswith(DOMAIN) or resource in _OF_VGPU_MANAGER:
            return Ownership.NONE
        own = resource in (GPU_RESOURCE, f"{GPU_RESOURCE}.shared") or resource.startswith(
            f"{DOMAIN}mig-"
        )
        return Ownership.CERTAIN if own else Ownership.POSSIBLE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return what the node offers. A whole device's id is its UUID (nvidia G1), a replica's is
        ``<UUID>::<n>`` (nvidia G8) or ``<UUID>-replica-<n>`` (iktos K1).
        """
        return self._offers(inventory).resources

    def shortfall(self, inventory: Inventory) -> Shortfall:
        """Return what cannot be offered as it is configured, or as the node's MIG instances are."""
        return self._offers(inventory).shortfall

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Refuse several replicas where the operator allows only one (nvidia A22, A23), and units
        of memory that are not of one device (iktos D12).

        The first text is the one that users of NVIDIA's plugin know.
        """
        if self._options.fail_requests_greater_than_one and len(ids) > 1 and has_replicas(ids):
            setting = "mps" if resource.sharing is SharingMode.MPS else "timeSlicing"
            raise RequestRefusedError(
                "invalid request: maximum request size for shared resources is 1; found "
                f"{len(ids)} (sharing.{setting}.failRequestsGreaterThanOne; ask for 1 of "
                f"{resource.name})"
            )
        # `automatic`: iktos's resources whose number of replicas follows from the memory of a
        # device: each id is a unit of it
        if resource.name in self._options.automatic and len(devices := devices_behind(ids)) > 1:
            raise RequestRefusedError(
                f"invalid request: {len(ids)} of {resource.name} are not free on one device, and "
                f"memory of {len(devices)} is not one piece ({', '.join(devices)}); ask for less, "
                f"at most {resource.holders_per_device}, or wait until containers on one of them "
                "end"
            )

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """Return an exclusive share of all of a whole device. Each replica counts as one holder of
        its device; with MPS its share has the part of memory and compute that MPS enforces.

        Ids of earlier settings are read as well; those of other plugins are left out.
        """
        offered = self._offers(inventory).resource(resource)
        counts = collections.Counter(device_of_each(ids))  # UUID → the number of the device's ids
        behind = devices_behind(ids)  # UUID → whether one of its ids is the whole device
        # without WSL the id `EVERY_GPU` is one of another plugin
        if (any_whole := behind.pop(EVERY_GPU, None)) is not None and self._options.wsl:
            behind |= {gpu.uuid: any_whole for gpu in inventory.gpus}
        return tuple(
            self._whole(uuid, inventory)
            if whole
            else self._part(uuid, counts[uuid], offered, inventory)
            for uuid, whole in behind.items()
        )

    def prefer(
        self,
        resource: Resource,
        available: Sequence[str],
        required: Sequence[str],
        size: int,
        inventory: Inventory,
        gpu_uses: GpuUses = ALONE,
    ) -> list[str]:
        """Choose by the policy that fits the resource (see `_policy`), among the GPUs of the lowest
        ranks (`GpuUses.rank`: those that serve this family come first, and those that serve
        another family last).

        A policy for replicas that the operator has set counts before the ranks.

        Args:
            resource: the resource of the ids.
            available: the ids to choose from.
            required: the ids that must be among the chosen ones.
            size: the number of ids to choose.
            inventory: the node's GPUs.
            gpu_uses: the GPUs by the families that use them; `ALONE` if no other family shares
                them, so that all have one rank.
        """
        known = {entry.id: (place, entry.device) for place, entry in enumerate(resource.ids)}
        usable = sorted((id_ for id_ in available if id_ in known), key=lambda id_: known[id_][0])
        device_of = {id_: device for id_, (_, device) in known.items()}
        gpu_of = {
            instance.uuid: gpu.uuid for gpu in inventory.gpus for instance in gpu.mig_instances
        }
        if all(map(_is_mig_instance, device_of.values())) and len(set(device_of.values())) == len(
            device_of
        ):
            # Whole MIG instances: the operator's policies (packed, distributed) then apply to their
            # GPUs, because a GPU without a holder can serve another family.
            device_of = {id_: gpu_of.get(device, device) for id_, device in device_of.items()}
        # `totals`: the number of ids of each device, free or not
        totals, policy = collections.Counter(device_of.values()), self._policy(resource)
        as_set = self._options.policy_is_set and policy == self._options.policy
        ranks = (
            {}
            if as_set
            else gpu_uses.ranks({device: gpu_of.get(device, device) for device in totals})
        )
        return choose(
            policy,
            IdRequest(
                usable,
                required,
                size,
                device_of,
                totals=totals,
                links=inventory.links,
                ranks=ranks,
            ),
        )

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """Return the edits that name the devices, by the strategies of plugin.deviceListStrategy;
        with MPS also those for a client of its daemon. `answer_id` keeps apart the annotations of a
        container's resources.
        """
        found = [
            device
            for uuid in devices_behind(ids)
            if (device := _EVERY.get(uuid) or visible_device(uuid, inventory))
        ]
        if self._options.iktos:  # which sorts them (iktos §I.5)
            found.sort(key=_by_index if self._options.lists.id_strategy == "index" else _by_uuid)
        edits = edits_of(found, self._options.lists, answer_id=answer_id(resource.name, ids))
        if resource.sharing is SharingMode.MPS:
            edits = edits.joined(
                mps_edits(resource, device_of_each(ids), inventory, self._options.mps)
            )
        return edits

    def _offers(self, inventory: Inventory) -> Offers:
        if self._last is None or self._last[0] is not inventory:
            self._last = inventory, offers(self._options, inventory)
        return self._last[1]

    def _policy(self, resource: Resource) -> str:
        """Return the policy: units of memory on one device, well-connected whole GPUs (nvidia
        §6.1), replicas of iktos's fork spread, others as configured.
        """
        if resource.name in self._options.automatic:
            return ONE_GPU
        if resource.holders_per_device == 1 and not any(
            _is_mig_instance(entry.device) for entry in resource.ids
        ):
            return ALIGNED
        return (
            SPREAD
            if self._options.iktos and resource.holders_per_device > 1
            else self._options.policy
        )

    def _whole(self, uuid: str, inventory: Inventory) -> Share:
        return Share(uuid, _memory_mib(uuid, inventory), cores_percent=100, exclusive=True)

    def _part(self, uuid: str, count: int, offered: Resource | None, inventory: Inventory) -> Share:
        """Return the share of ``count`` replicas of a device. Time-slicing limits nothing, so
        no memory and compute are booked.
        """
        if offered is None or offered.sharing is not SharingMode.MPS:
            return Share(uuid)
        mps, replicas = self._options.mps, offered.holders_of(uuid)
        # `per_container_limits`: each container has limits of its own, in variables, for as many
        # replicas as it has. `limits_in_containers`: that, and a container may ask for several, so
        # the daemon limits nothing. Otherwise the daemon's limits apply. They are for one replica,
        # those of compute for one of the GPU with the most replicas.
        return Share(
            uuid,
            memory_mib=memory_share_mib(
                _memory_mib(uuid, inventory), replicas, count if mps.per_container_limits else 1
            ),
            cores_percent=thread_share(replicas, count)
            if mps.limits_in_containers
            else thread_share(offered.holders_per_device),
        )


def _by_index(device: VisibleDevice) -> tuple[int | str, ...]:
    """A key to sort by: the number of the GPU and, for a MIG instance (``0:1``), its own."""
    return tuple(map(int, device.index.split(":"))) if device.uuid != EVERY_GPU else ()


def _by_uuid(device: VisibleDevice) -> tuple[int | str, ...]:
    return (device.uuid,)


def _is_mig_instance(uuid: str) -> bool:
    return uuid.startswith("MIG-")


def _memory_mib(uuid: str, inventory: Inventory) -> int:
    """Return the memory of a GPU or MIG instance; 0 when the inventory does not have it."""
    found = inventory.device(uuid)
    if found is None:
        return 0
    gpu, instance = found
    return instance.memory_mib if instance else gpu.memory_mib
