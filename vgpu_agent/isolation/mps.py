"""The isolation backend `mps`: containers run on one GPU at the same time, and an MPS control
daemon limits each to its share.

Pure functions: the commands of a daemon, the edits of a container, and the reasons why a resource
cannot be shared by MPS. `vgpu_agent.mps` runs the daemons by these plans. Families add `mps_edits`
to the answer of a resource whose sharing is MPS. One daemon serves one resource. Its *clients* are
processes in containers; a *replica* is one of several ids of a GPU.

Facts: nvidia §11 and §17.3. According to NVIDIA's guide to MPS, a variable in a client can lower
the daemon's limit and never raise it.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.isolation.edits import Edits, Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.model import Gpu, Inventory, Resource

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# CUDA creates its shared memory segments here; daemon and clients must see the same ones.
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in containers, no file of the agent

# CUDA's default of PIPE_VARIABLE, for daemons and clients alike. So a daemon that the host itself
# runs most likely has its pipe here.
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA has chosen the path

# compute modes, for `nvidia-smi -c`
EXCLUSIVE = "EXCLUSIVE_PROCESS"
DEFAULT = "DEFAULT"
# commands of the control daemon; the answer to the first shows that the daemon is alive
PROBE = "get_default_active_thread_percentage"
QUIT = "quit"

VOLTA = (7, 0)  # compute capability
# The mount path, in the agent's container, of the host's directory of pipes, logs and shared
# memory; containers of clients have their pipes below the same path. As in NVIDIA's plugin.
CONTAINER_ROOT = "/mps"
# The largest number of processes that one MPS server takes (nvidia §11.2, D6).
MAX_CLIENTS = 48
MAX_CLIENTS_BEFORE_VOLTA = 16

NOT_FOR_MIG = "sharing using MPS is not supported for MIG devices"


class MpsView(msgspec.Struct, frozen=True):
    """The place where the agent and its daemons see the files that they share with containers.

    Attributes:
        root: the directory; empty for `CONTAINER_ROOT`, where the agent's container has
            ``mps.root`` mounted. An agent that runs on the node itself uses ``mps.root``.
        simulated: the GPUs are simulated, so nothing outside ``root`` may be touched.
    """

    root: str = ""
    simulated: bool = False

    @property
    def directory(self) -> str:
        """The directory, with its default."""
        return self.root or CONTAINER_ROOT

    @property
    def has_host_memory(self) -> bool:
        """Tell whether the shared memory of the daemons is that of the node itself."""
        return bool(self.root) and not self.simulated


IN_CONTAINER = MpsView()  # the view of an agent that runs in its container


class MpsOptions(msgspec.Struct, frozen=True):
    """The directories that daemons and containers share, and where the limits are set.

    Attributes:
        root: the host's directory of pipes, logs and shared memory.
        per_container_limits: a container with several replicas gets as many shares, and its limits
            in variables. A daemon has one limit for all of its clients. So that limit is the whole
            GPU, unless ``single`` is set.
        single: no container may ask for more than one replica, so the daemon's limit is always that
            of one replica.
        pipe_directory: the directory of the pipe, under the same path on the host and in
            containers; empty for one below ``root`` and ``view``.
        view: where the daemons see ``root``. Containers see their daemon's pipe under the same
            path.
    """

    root: str = "/run/nvidia/mps"
    per_container_limits: bool = False
    single: bool = False
    pipe_directory: str = ""
    view: MpsView = IN_CONTAINER

    @property
    def limits_in_containers(self) -> bool:
        """Tell whether only variables in the containers set the limits;
        the daemon then allows each container the whole GPU.
        """
        return self.per_container_limits and not self.single

    def directory(self, resource: str) -> str:
        """Return the directory with the files of that resource's daemon, as the daemon sees it."""
        return f"{self.view.directory}/{resource}"

    def pipe(self, resource: str) -> str:
        """The directory of the daemon's control pipe, as daemon and containers see it."""
        return self.pipe_directory or f"{self.directory(resource)}/pipe"

    def host_pipe(self, resource: str) -> str:
        """The directory of the daemon's control pipe, as the host sees it."""
        return self.pipe_directory or f"{self.root}/{resource}/pipe"

    @property
    def host_shared_memory(self) -> str:
        """The host's path of what containers see as `SHARED_MEMORY`."""
        return SHARED_MEMORY if self.view.has_host_memory else f"{self.root}/shm"


class DeviceLimit(msgspec.Struct, frozen=True):
    """One GPU of a daemon, and the memory limit of each client.

    Attributes:
        uuid: the name of the GPU for ``nvidia-smi``.
        index: the name of the GPU for the daemon, which counts as NVML does.
        memory_mib: the largest amount for one client; 0 for no limit, when the GPU's memory is not
            known.
    """

    uuid: str
    index: int
    memory_mib: int


class DaemonPlan(msgspec.Struct, frozen=True):
    """The settings of one control daemon (nvidia §17.3), as plain values:
    two equal plans are the same daemon.

    Attributes:
        directory: the directory of its files, as the daemon sees it.
        pipe: the directory of its control pipe.
        devices: its GPUs, ordered by index.
        thread_percentage: the largest part of each GPU's compute for one client.
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
        """All of the daemon's environment.
        The agent's own variables are left out, because one of them could change the daemon's GPUs.
        """
        return {PIPE_VARIABLE: self.pipe, LOG_VARIABLE: self.log}

    def covers(self, wanted: DaemonPlan) -> bool:
        """Tell whether a daemon that was started by this plan also fits ``wanted``.
        It may have more GPUs: those have been lost since.

        Indices are not compared. The daemon keeps those of its start, while NVML renumbers the GPUs
        when one is lost.
        """
        own_limits, wanted_limits = (
            {(limit.uuid, limit.memory_mib) for limit in plan.devices} for plan in (self, wanted)
        )
        return (
            msgspec.structs.replace(self, devices=()) == msgspec.structs.replace(wanted, devices=())
            and wanted_limits <= own_limits
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
        """The same commands for the MPS server with the process id ``server``, which runs already.

        A server keeps the defaults of its start, so it needs its own commands. They hold for
        clients that connect later.
        """
        memory = (
            f"set_device_pinned_mem_limit {server} {limit.index} {limit.memory_mib}M"
            for limit in self.devices
            if limit.memory_mib
        )
        return (*memory, f"set_active_thread_percentage {server} {self.thread_percentage}")


def most_clients(gpu: Gpu) -> int:
    """Return the largest number of processes for one MPS server of that GPU (nvidia D6)."""
    return MAX_CLIENTS if gpu.compute_capability >= VOLTA else MAX_CLIENTS_BEFORE_VOLTA


def memory_share_mib(memory_mib: int, replicas: int, count: int = 1) -> int:
    """Return ``count`` of ``replicas`` equal shares of a GPU's memory, rounded down to a MiB."""
    return memory_mib * min(count, replicas) // replicas


def thread_share(replicas: int, count: int = 1) -> int:
    """Return ``count`` of ``replicas`` equal shares of a GPU's compute, in percent, rounded down,
    at least 1.
    """
    return max(1, 100 * min(count, replicas) // replicas)


def replicas_of(resource: Resource) -> dict[str, int]:
    """Return the number of ids of each device, in the order of the ids."""
    counted = collections.Counter[str]()
    if isinstance(resource.ids, NumberedIds):  # there may be millions
        for block in resource.ids.blocks:
            counted[block.device] += block.count
    else:
        counted.update(entry.device for entry in resource.ids)
    return dict(counted)


def why_not_by_mps(resource: Resource, inventory: Inventory) -> str:
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

    A daemon has one thread percentage for all of its GPUs. Where these have different numbers of
    replicas, the largest number decides, so that no container gets more than its share.
    """
    replicas = replicas_of(resource)
    whole = options.limits_in_containers
    devices = [
        DeviceLimit(
            gpu.uuid,
            gpu.index,
            memory_mib=memory_share_mib(gpu.memory_mib, replicas=1 if whole else count),
        )
        for uuid, count in replicas.items()
        if (gpu := inventory.gpu(uuid)) is not None and gpu.present
    ]
    most = max(replicas.values(), default=1)
    return DaemonPlan(
        resource.name,
        directory=options.directory(resource.name),
        pipe=options.pipe(resource.name),
        devices=tuple(sorted(devices, key=lambda limit: limit.index)),
        thread_percentage=thread_share(replicas=1 if whole else most),
    )


def mps_edits(
    resource: Resource, devices: Sequence[str], inventory: Inventory, options: MpsOptions
) -> Edits:
    """Return the edits that make a container a client of its resource's daemon (nvidia A19, A20,
    A21).

    Args:
        resource: as it is offered; its ids show how many replicas a GPU has.
        devices: for each id that the container gets, the UUID of its GPU; a GPU that occurs twice
            is two shares of it.
        inventory: the node's GPUs.
        options: the directories of the daemon, and where the limits are set.
    """
    pipe = options.pipe(resource.name)
    environment = {PIPE_VARIABLE: pipe}
    if options.per_container_limits:
        environment |= _limit_variables(replicas_of(resource), devices, inventory)
    return Edits(
        environment=environment,
        mounts=(
            Mount(container_path=pipe, host_path=options.host_pipe(resource.name)),
            Mount(container_path=SHARED_MEMORY, host_path=options.host_shared_memory),
        ),
    )


def _limit_variables(
    replicas: dict[str, int], devices: Iterable[str], inventory: Inventory
) -> dict[str, str]:
    """Return the variables with the container's own limits. ``replicas`` has the number of shares
    of each GPU, and ``devices`` a GPU for each share that the container gets.

    CUDA numbers the GPUs of a container from 0 in the node's order, whatever the order of
    ``devices``.
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
    # There is one variable for all GPUs of the container. The smallest share decides, so that no
    # container gets more than its share.
    threads = min(
        (thread_share(replicas.get(gpu.uuid, 1), counts[gpu.uuid]) for gpu in gpus), default=100
    )
    return ({MEMORY_VARIABLE: ",".join(memory)} if memory else {}) | {
        THREADS_VARIABLE: str(threads)
    }
