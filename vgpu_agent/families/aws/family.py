"""The `aws` family: ``k8s.amazonaws.com/vgpu``, the same number of shares of each GPU, as AWS's
virtual GPU device plugin offers it.

Names, ids and answers are those of aws §II.1, §II.2 and §II.6. The ids name the device, so
`Allocate` can answer completely. Defects of that plugin are not copied: GPUs on which shares would
not work (in MIG mode, or too old for MPS) are left out with a reason, several shares of one
container lie on one GPU where they can, and the limits of MPS follow from the share. Each way in
which containers join MPS is an entry of `_JOINING`.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError
from vgpu_agent.families.aws.settings import FAMILY, Aws
from vgpu_agent.families.device_lists import ListOptions, answer_id, edits_of, visible_device
from vgpu_agent.families.family import Ownership, Shortfall
from vgpu_agent.isolation import mps
from vgpu_agent.isolation.edits import Edits, Mount
from vgpu_agent.isolation.mps import (
    IN_CONTAINER,
    PIPE_VARIABLE,
    SHARED_MEMORY,
    VOLTA,
    MpsOptions,
    MpsView,
    memory_share_mib,
    most_clients,
    mps_edits,
    thread_share,
)
from vgpu_agent.model import Resource, Share, SharingMode
from vgpu_agent.placement.mixing import ALONE
from vgpu_agent.placement.policies import ONE_GPU, IdRequest, choose
from vgpu_agent.placement.sharing import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.model import Gpu, Inventory
    from vgpu_agent.placement.mixing import GpuUses

RESOURCE = "k8s.amazonaws.com/vgpu"

_ID = re.compile(r"(GPU-[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12})-(0|[1-9][0-9]{0,5})")


class AwsOptions(msgspec.Struct, frozen=True):
    """The settings by which this node offers its GPUs.

    Attributes:
        resource: the name of the resource.
        vgpus: how many containers share a GPU.
        mps: the way in which containers join MPS, a key of `_JOINING`.
        lists: how containers get their devices.
        paths: the directories that containers share with a daemon of ours, an MPS control daemon
            that the agent runs; its pipe is in `isolation.mps.DEFAULT_PIPE_DIRECTORY`, where pods
            written for AWS's plugin expect it.
    """

    resource: str = RESOURCE
    vgpus: int = 10
    mps: str = "none"
    lists: ListOptions = msgspec.field(default_factory=ListOptions)
    paths: MpsOptions = msgspec.field(
        default_factory=lambda: MpsOptions(pipe_directory=mps.DEFAULT_PIPE_DIRECTORY)
    )

    @classmethod
    def from_settings(
        cls, settings: Settings, *, lists: ListOptions, mps_view: MpsView = IN_CONTAINER
    ) -> AwsOptions:
        """Return the options that the configuration asks for; ``mps_view`` is where the agent sees
        the files that MPS control daemons share with containers, by default where the agent's own
        container has ``mps.root`` mounted.
        """
        aws, mps_settings = settings.section(Aws), settings.mps
        # pods written for AWS's plugin mount pipes from there (aws §II.3); empty: below mps.root
        pipes = "" if mps_view.simulated else mps.DEFAULT_PIPE_DIRECTORY
        paths = MpsOptions(
            mps_settings.root,
            per_container_limits=mps_settings.per_container_limits,
            pipe_directory=pipes,
            view=mps_view,
        )
        return cls(aws.resource_name, aws.vgpus, aws.mps, lists=lists, paths=paths)


class AwsFamily:
    """Virtual GPUs under AWS's name."""

    name = FAMILY

    def __init__(self, options: AwsOptions) -> None:
        self._options = options

    def owns(self, resource: str) -> Ownership:
        """Own AWS's name and the configured one. AWS's may be in the kubelet's records from before
        a change of settings.
        """
        return (
            Ownership.CERTAIN if resource in (RESOURCE, self._options.resource) else Ownership.NONE
        )

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return the ids ``<UUID>-0`` to ``<UUID>-<n-1>`` of each GPU that can be shared (aws W1,
        W2), as one resource.
        """
        ids = tuple(
            DeviceId(f"{gpu.uuid}-{number}", gpu.uuid, gpu.numa_node)
            for gpu in inventory.gpus
            if not self._why_unfit(gpu)
            for number in range(self._options.vgpus)
        )
        if not ids:
            return ()
        sharing = _SHARING[self._options.mps]
        return (
            Resource(
                self._options.resource,
                FAMILY,
                ids,
                holders_per_device=self._options.vgpus,
                sharing=sharing,
            ),
        )

    def shortfall(self, inventory: Inventory) -> Shortfall:
        """The GPUs that are left out; where none remains, the resource is refused with all the
        reasons.
        """
        name = self._options.resource
        reasons = [reason for gpu in inventory.gpus if (reason := self._why_unfit(gpu))]
        if reasons and len(reasons) == len(inventory.gpus):
            return Shortfall(refused={name: "; ".join(reasons)})
        return Shortfall(cautions=tuple(f"{name}: {reason}" for reason in reasons))

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Accept everything: all requests make sense in AWS's terms, and the ledger checks unknown
        and unhealthy ids.
        """
        del resource, ids

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """A share of each GPU, on which each id counts as one holder; with a daemon of ours it also
        has a part of the memory and compute, which the daemon enforces.
        """
        del resource  # the ids are enough
        counts = collections.Counter(_devices(ids))
        if self._options.mps != "supervised":
            return tuple(Share(uuid) for uuid in counts)
        return tuple(self._part(uuid, count, inventory) for uuid, count in counts.items())

    def prefer(
        self,
        resource: Resource,
        available: Sequence[str],
        required: Sequence[str],
        size: int,
        inventory: Inventory,
        gpu_uses: GpuUses = ALONE,  # no other family on the node
    ) -> list[str]:
        """Choose ids of one GPU, the fullest with room (aws D7) among those of the lowest
        `GpuUses.rank` (GPUs that serve this family come first); if none has room, of as few as
        possible.
        """
        position = {entry.id: place for place, entry in enumerate(resource.ids)}
        device_of = {entry.id: entry.device for entry in resource.ids}
        usable = sorted((id_ for id_ in available if id_ in position), key=position.__getitem__)
        totals = collections.Counter(device_of.values())
        request = IdRequest(
            usable,
            required,
            size,
            device_of,
            totals=totals,
            links=inventory.links,
            ranks=gpu_uses.ranks({gpu: gpu for gpu in totals}),  # each device is a GPU itself
        )
        try:
            return choose(ONE_GPU, request)
        except CapacityError:
            return choose(PACKED, request)

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """Return the edits that name the GPUs to the container, each once, and make it a client of
        MPS.
        """
        behind = _devices(ids)
        devices = [
            device for uuid in dict.fromkeys(behind) if (device := visible_device(uuid, inventory))
        ]
        # `answer_id`: where devices are named in an annotation, the part of its key that differs
        # from that of the container's other resources
        edits = edits_of(devices, self._options.lists, answer_id=answer_id(resource.name, ids))
        return edits.joined(
            _JOINING[self._options.mps](resource, behind, inventory, self._options.paths)
        )

    def _why_unfit(self, gpu: Gpu) -> str:
        """Explain why a GPU cannot be offered; empty when it can."""
        if gpu.integrated:
            return (
                f"GPU {gpu.index} ({gpu.uuid}) is part of the processor and has no UUID to name it "
                "by; offer it by families.nvidia"
            )
        # aws W4: AWS's plugin offers it, and the container finds nothing that works
        if gpu.mig_enabled:
            off = f"nvidia-smi -i {gpu.index} -mig 0"
            return (
                f"GPU {gpu.index} ({gpu.uuid}) is in MIG mode, so its virtual GPUs would not work; "
                f"it is left out until MIG is off ({off})"
            )
        if not (0, 0) < gpu.compute_capability < VOLTA:  # (0, 0): not known
            return ""
        capability = ".".join(map(str, gpu.compute_capability))
        old = (
            f"GPU {gpu.index} ({gpu.name}, compute capability {capability}) is older than Volta "
            "(7.0)"
        )
        if self._options.mps != "none":  # aws D11
            return (
                f"{old}: under MPS a fault of one container ends all others there, and none can be "
                "limited; it is left out, set aws.mps to none to let containers take turns on it"
            )
        # Without a daemon of ours the pods may still start one, which takes no more clients.
        if self._options.vgpus > (most := most_clients(gpu)):
            return (
                f"{old}, and MPS has at most {most} clients there; it is left out, set aws.vgpus "
                f"to {most} or fewer"
            )
        return ""

    def _part(self, uuid: str, count: int, inventory: Inventory) -> Share:
        """Return what a container with ``count`` ids of a GPU gets of it."""
        gpu, replicas = inventory.gpu(uuid), self._options.vgpus
        # Without limits of its own a container has those of the daemon, which are for one share.
        shares = count if self._options.paths.per_container_limits else 1
        return Share(
            uuid,
            memory_mib=memory_share_mib(gpu.memory_mib if gpu else 0, replicas, count=shares),
            cores_percent=thread_share(replicas, count=shares),
        )


def _devices(ids: Iterable[str]) -> list[str]:
    """Return the UUID of the GPU behind each id; ids that are not AWS's are left out."""
    return [found[1] for id_ in ids if (found := _ID.fullmatch(id_))]


def _join_none(
    resource: Resource, devices: Sequence[str], inventory: Inventory, paths: MpsOptions
) -> Edits:
    """Add nothing, like AWS's plugin: the pod sets up MPS itself."""
    del resource, devices, inventory, paths
    return Edits()


def _join_host(
    resource: Resource, devices: Sequence[str], inventory: Inventory, paths: MpsOptions
) -> Edits:
    """Join the host's own daemon: its pipe and the host's shared memory, so that the pod needs
    neither mount nor hostIPC.
    """
    del resource, devices, inventory, paths
    mounts = (
        Mount(mps.DEFAULT_PIPE_DIRECTORY, mps.DEFAULT_PIPE_DIRECTORY),
        Mount(SHARED_MEMORY, SHARED_MEMORY),
    )
    return Edits(environment={PIPE_VARIABLE: mps.DEFAULT_PIPE_DIRECTORY}, mounts=mounts)


_SHARING: Mapping[str, SharingMode] = {
    "none": SharingMode.TIME_SLICING,
    "host": SharingMode.MPS_OF_HOST,
    "supervised": SharingMode.MPS,  # the agent runs the MPS control daemon
}
# ``aws.mps`` → the edits with which a container joins MPS; the UUIDs are those behind its ids
_JOINING: Mapping[str, Callable[[Resource, Sequence[str], Inventory, MpsOptions], Edits]] = {
    "none": _join_none,
    "host": _join_host,
    "supervised": mps_edits,
}
