"""The backend `mps`: several containers on one GPU at the same time,
each held to its share by an MPS control daemon.

Pure: the commands of a daemon, the edits of a container, and the reasons why a resource cannot be
shared this way. `vgpu_agent.mps` runs the daemons by it, families add `mps_edits` to the answer of
a resource whose sharing is MPS. One daemon serves one resource. Facts: nvidia §11 and §17.3;
NVIDIA's guide to MPS for what a variable in a client can do (it narrows the daemon's limit, never
widens it).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.isolation.edits import Edits, Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.model import Gpu, Inventory, Resource

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# CUDA finds its shared memory segments here; daemon and clients must see the same ones.
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the path that containers see, no file of ours

# Where CUDA looks for a daemon's pipe without the variable, and where a daemon puts it; so that of
# a daemon of the host's.
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - a path that others have chosen

EXCLUSIVE = "EXCLUSIVE_PROCESS"
DEFAULT = "DEFAULT"
PROBE = "get_default_active_thread_percentage"
QUIT = "quit"

# Processes that one MPS server takes: since Volta, and before it (nvidia §11.2; 7.0 is Volta,
# nvidia D6).
VOLTA = (7, 0)
MAX_CLIENTS = 48
MAX_CLIENTS_BEFORE_VOLTA = 16

NOT_FOR_MIG = "sharing using MPS is not supported for MIG devices"


@dataclasses.dataclass(frozen=True, slots=True)
class MpsOptions:
    """The directories through which daemons and containers meet.

    Attributes:
        root: the host's directory of pipes, logs and shared memory.
        container_root: the same directory in the agent, in the daemon and in containers.
        per_container_limits: several replicas in one container are several shares, passed to the
            container in variables. A daemon knows one limit for all of its clients, so it then
            leaves them the whole GPU where a container may ask for more than one replica.
        single: a container gets one replica only, so the daemon's own limit is that of one replica
            in any case.
        pipe_directory: another place for the pipe, under the same path on the host and in
            containers; empty for one below the roots.
    """

    root: str = "/run/nvidia/mps"
    container_root: str = "/mps"
    per_container_limits: bool = False
    single: bool = False
    pipe_directory: str = ""

    @property
    def limits_in_containers(self) -> bool:
        """Tell whether containers limit themselves by their variables,
        below a daemon that allows each of them everything.
        """
        return self.per_container_limits and not self.single

    def directory(self, resource: str) -> str:
        """Return the directory with the files of that resource's daemon, as the daemon sees it."""
        return f"{self.container_root}/{resource}"

    def pipe(self, resource: str) -> str:
        """The directory of the daemon's control pipe, as daemon and containers see it."""
        return self.pipe_directory or f"{self.container_root}/{resource}/pipe"

    def host_pipe(self, resource: str) -> str:
        """The same, as the host sees it."""
        return self.pipe_directory or f"{self.root}/{resource}/pipe"

    @property
    def host_shared_memory(self) -> str:
        """The host's path of what containers see as `SHARED_MEMORY`."""
        return f"{self.root}/shm"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLimit:
    """One GPU of a daemon.

    Attributes:
        uuid: for ``nvidia-smi``.
        index: for the daemon, which counts GPUs as NVML does.
        memory_mib: what each client may take; 0 when the GPU's memory is not known, then nothing
            limits it.
    """

    uuid: str
    index: int
    memory_mib: int


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonPlan:
    """The settings of one control daemon (nvidia §17.3), as plain values:
    two equal plans are the same daemon.

    Attributes:
        directory: its files, see `MpsOptions.directory`.
        pipe: the directory of its control pipe.
        devices: its GPUs, by index.
        thread_percentage: what each client may take of each GPU's compute.
    """

    resource: str
    directory: str
    pipe: str
    devices: tuple[DeviceLimit, ...]
    thread_percentage: int

    @property
    def log(self) -> str:
        """The directory of its logs."""
        return f"{self.directory}/log"

    @property
    def environment(self) -> dict[str, str]:
        """All of the daemon's environment; a variable more could change which GPUs it serves."""
        return {PIPE_VARIABLE: self.pipe, LOG_VARIABLE: self.log}

    def covers(self, wanted: DaemonPlan) -> bool:
        """Tell whether a daemon by this plan does all that ``wanted`` asks for.
        An additional GPU, which is gone, does no harm.

        Indices do not count: the daemon has those of its start, and NVML moves them up when a card
        is lost.
        """
        here, there = (
            {(limit.uuid, limit.memory_mib) for limit in plan.devices} for plan in (self, wanted)
        )
        return (
            dataclasses.replace(self, devices=()) == dataclasses.replace(wanted, devices=())
            and there <= here
        )

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands sent to the running daemon, one line each."""
        memory = (
            f"set_default_device_pinned_mem_limit {limit.index} {limit.memory_mib}M"
            for limit in self.devices
            if limit.memory_mib
        )
        return (*memory, f"set_default_active_thread_percentage {self.thread_percentage}")

    def commands_for(self, server: int) -> tuple[str, ...]:
        """The same for clients to come of a server that runs already, by its process id: it has the
        defaults of when it was started.
        """
        memory = (
            f"set_device_pinned_mem_limit {server} {limit.index} {limit.memory_mib}M"
            for limit in self.devices
            if limit.memory_mib
        )
        return (*memory, f"set_active_thread_percentage {server} {self.thread_percentage}")


def most_clients(gpu: Gpu) -> int:
    """Return how many processes one MPS server of that GPU takes (nvidia D6)."""
    return MAX_CLIENTS if gpu.compute_capability >= VOLTA else MAX_CLIENTS_BEFORE_VOLTA


def memory_share_mib(memory_mib: int, replicas: int, count: int = 1) -> int:
    """``count`` of ``replicas`` equal shares of a GPU's memory, rounded down to a MiB."""
    return memory_mib * min(count, replicas) // replicas


def thread_share(replicas: int, count: int = 1) -> int:
    """``count`` of ``replicas`` equal shares of a GPU's compute, in percent, rounded down,
    at least 1.
    """
    return max(1, 100 * min(count, replicas) // replicas)


def replicas_of(resource: Resource) -> dict[str, int]:
    """Return how many ids each device has, in the order of the ids."""
    return dict(collections.Counter(entry.device for entry in resource.ids))


def why_not(resource: Resource, inventory: Inventory) -> str:
    """Explain why ``resource`` cannot be shared by MPS as it is offered, with the remedy; empty
    when it can (nvidia G14, G15).
    """
    for uuid, replicas in replicas_of(resource).items():
        found = inventory.device(uuid)
        if found is None:
            continue
        gpu, instance = found
        if gpu.integrated:
            return (
                f"GPU {gpu.index} ({uuid}) is part of the processor, where MPS cannot limit its "
                "clients; share it by time-slicing"
            )
        if instance is not None or gpu.mig_enabled:
            return (
                f"{NOT_FOR_MIG} ({uuid}); share it by time-slicing, or switch MIG off on GPU "
                f"{gpu.index}"
            )
        if replicas > (most := most_clients(gpu)):
            capability = ".".join(map(str, gpu.compute_capability))
            return (
                f"{replicas} replicas of GPU {gpu.index} ({gpu.name}, compute capability "
                f"{capability}) are more than the {most} clients that its MPS server takes; set "
                f"replicas to {most} or fewer"
            )
    return ""


def daemon_plan(resource: Resource, inventory: Inventory, options: MpsOptions) -> DaemonPlan:
    """Return the settings for the daemon of ``resource``; GPUs that are gone are left out.

    Where GPUs have different numbers of replicas, the daemon's one thread percentage is that of the
    largest number, so that no container gets more than its share.
    """
    replicas = replicas_of(resource)
    whole = options.limits_in_containers
    devices = [
        DeviceLimit(gpu.uuid, gpu.index, memory_share_mib(gpu.memory_mib, 1 if whole else count))
        for uuid, count in replicas.items()
        if (gpu := inventory.gpu(uuid)) is not None and gpu.present
    ]
    most = max(replicas.values(), default=1)
    return DaemonPlan(
        resource.name,
        options.directory(resource.name),
        options.pipe(resource.name),
        tuple(sorted(devices, key=lambda limit: limit.index)),
        thread_share(1 if whole else most),
    )


def mps_edits(
    resource: Resource, devices: Sequence[str], inventory: Inventory, options: MpsOptions
) -> Edits:
    """Return the edits that make a container a client of its resource's daemon (nvidia A19, A20,
    A21).

    Args:
        resource: as it is offered; its ids show how many replicas a GPU has.
        devices: UUID of the GPU behind each id that the container gets, one a id: a GPU twice is
            two shares of it.
        inventory: the node's GPUs.
        options: where the daemon is, and whether shares add up.
    """
    pipe = options.pipe(resource.name)
    environment = {PIPE_VARIABLE: pipe}
    if options.per_container_limits:
        environment |= _limits(replicas_of(resource), devices, inventory)
    return Edits(
        environment=environment,
        mounts=(
            Mount(pipe, options.host_pipe(resource.name)),
            Mount(SHARED_MEMORY, options.host_shared_memory),
        ),
    )


def _limits(
    replicas: dict[str, int], devices: Iterable[str], inventory: Inventory
) -> dict[str, str]:
    """The container's own limits; it counts its GPUs from 0 in the node's order,
    whichever order they were asked for in.
    """
    counts = collections.Counter(devices)
    gpus = sorted(
        (gpu for uuid in counts if (gpu := inventory.gpu(uuid))), key=lambda gpu: gpu.index
    )
    memory = [
        f"{place}={memory_share_mib(gpu.memory_mib, replicas.get(gpu.uuid, 1), counts[gpu.uuid])}M"
        for place, gpu in enumerate(gpus)
        if gpu.memory_mib
    ]
    # One variable for all GPUs of the container: the least of them, so that no container gets more
    # than its share.
    threads = min(
        (thread_share(replicas.get(gpu.uuid, 1), counts[gpu.uuid]) for gpu in gpus), default=100
    )
    return ({MEMORY_VARIABLE: ",".join(memory)} if memory else {}) | {
        THREADS_VARIABLE: str(threads)
    }
