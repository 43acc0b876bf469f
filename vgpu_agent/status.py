"""The status of every part of the agent as plain data.

Each package keeps its own status object up to date. On request `agent` collects these objects into
one `AgentStatus`, which `web` and the command line read. So `web` needs no import of `kubelet` or
`gpu`. Collecting must stay cheap and must never block, so every field is already in memory. Times
are unix seconds.
"""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING, Any, Self

import msgspec

from vgpu_agent.model import Inventory, Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.allocation.mode import BindingMode
    from vgpu_agent.allocation.refusals import Refusal
    from vgpu_agent.concurrency import TaskReport
    from vgpu_agent.isolation.backend import LibraryLimits
    from vgpu_agent.journal import Entry
    from vgpu_agent.ledger.accounting import Overcommit
    from vgpu_agent.ledger.uses import GpuUse, HeldBack
    from vgpu_agent.model import (
        ContainerUsage,
        ControlledUse,
        DeviceRoom,
        GpuUsage,
        Grant,
        MigInstance,
    )
    from vgpu_agent.pods import Pod


class Withheld(msgspec.Struct, frozen=True):
    """The reason why a resource is not offered.

    Attributes:
        reason: one sentence, without the name of the resource.
        temporary: the reason usually goes away within seconds, such as a daemon that starts. It is
            reported as an error only when it lasts.
    """

    reason: str
    temporary: bool = False


class PluginState(enum.StrEnum):
    """The state of a plugin server and of its registration at the kubelet."""

    WAITING = "waiting for kubelet"
    SERVING = "serving, not registered"
    REGISTERED = "registered"
    DRAINING = "draining"  # it is being stopped
    STOPPED = "stopped"
    FAILED = "failed"


class PluginStatus(msgspec.Struct):
    """One device plugin server, which offers one resource."""

    resource: str
    family: str
    state: PluginState = PluginState.WAITING
    endpoint: str = ""  # the name of its socket; empty while it does not serve
    registered_at: float = 0.0
    registrations: int = 0
    registration_failures: int = 0
    stream_open: bool = False  # the kubelet has an open ListAndWatch stream
    streams_opened: int = 0
    # `ids_sent`, `healthy_sent` and `bytes_sent` are of the list that was sent last
    ids_sent: int = 0
    healthy_sent: int = 0
    bytes_sent: int = 0
    messages_sent: int = 0  # lists, in all streams
    allocations: int = 0  # calls of Allocate
    allocations_refused: int = 0
    allocate_seconds_last: float = 0.0
    allocate_seconds_sum: float = 0.0
    preferred_calls: int = 0  # of GetPreferredAllocation
    pre_starts: int = 0  # calls of PreStartContainer
    pre_starts_refused: int = 0
    pre_start_seconds_sum: float = 0.0
    last_error: str = ""
    # why the kubelet's list of allocatable devices lacks ids that we sent; empty while none is
    # missing
    not_listed: str = ""
    # a text about ids of this resource that the kubelet has from another plugin; empty if it has
    # none
    rival: str = ""

    @property
    def list_fault(self) -> str:
        """The fault in the kubelet's list of this resource's ids; empty when there is none."""
        return "; ".join(filter(None, (self.not_listed, self.rival)))

    @property
    def ready(self) -> bool:
        """Tell whether the kubelet knows the resource and reads its stream."""
        return self.state is PluginState.REGISTERED and self.stream_open


class KubeletStatus(msgspec.Struct):
    """The kubelet as seen through its sockets and files."""

    directory: str = ""
    socket_present: bool = False
    directory_trouble: str = ""  # why the directory cannot be read; empty when it can be
    restarts_seen: int = 0  # how often the kubelet has restarted since the agent started
    records_read_at: float = 0.0  # its records: the checkpoint and pod-resources
    records_trouble: str = ""  # why one of them could not be read; empty when both could


class NvmlState(enum.StrEnum):
    """The state of the driver."""

    STARTING = "starting"
    ANSWERING = "answering"
    MISSING = "driver missing"
    HUNG = "hung"
    UNUSED = "not used"  # the GPU is part of the processor (Tegra)


class XidSeen(msgspec.Struct, frozen=True):
    """One XID on one GPU or in one MIG instance, once or several times in a row.

    Attributes:
        xid: its number.
        text: number and meaning.
        remedy: what helps; `Remedy.APPLICATION` where a program caused it.
        ignored: it does not make the GPU Unhealthy.
        first_at: unix seconds.
        last_at: the same of the latest of them.
        count: how many there were.
        gpu_instance: the MIG GPU instance that the driver named; None for the whole GPU.
        compute_instance: the same for the MIG compute instance.
    """

    xid: int
    text: str
    remedy: Remedy
    ignored: bool
    first_at: float
    last_at: float
    count: int = 1
    gpu_instance: int | None = None
    compute_instance: int | None = None

    def concerns(self, instance: MigInstance | None) -> bool:
        """Tell whether it may concern a MIG instance, or with None the whole GPU. One without ids
        concerns all of the GPU.
        """
        if instance is None or self.gpu_instance is None:
            return True
        return self.gpu_instance == instance.gpu_instance_id and self.compute_instance in {
            None,
            instance.compute_instance_id,
        }


class Histogram(msgspec.Struct):
    """The counts of a Prometheus histogram.

    Attributes:
        bounds: the upper bounds of the buckets, ascending, without infinity.
        counts: the number of values in each bucket alone, and in one more for all above.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, *bounds: float) -> Self:
        """Make an empty histogram with these bounds."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


OTHER_XIDS = "other"
_MAX_XIDS = 256  # of all GPUs together, each with its own code


class GpuHistory(msgspec.Struct):
    """The failures and recoveries of GPUs since the start.

    Attributes:
        xids: (UUID of the GPU, empty where the driver names none; the XID, or `OTHER_XIDS` for
            codes beyond the first 256) → how many the driver has reported, ignored ones included.
        transitions: (UUID, ``healthy``, ``unhealthy`` or ``lost``) → how often the GPU became so.
        recovery_seconds: the times from the failure of a GPU to its recovery.
    """

    xids: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    transitions: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    recovery_seconds: Histogram = msgspec.field(
        default_factory=lambda: Histogram.of(
            30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0
        )
    )

    def count_xid(self, gpu: str, code: int) -> None:
        """Count an XID."""
        key = gpu, str(code)
        if key not in self.xids and len(self.xids) >= _MAX_XIDS:
            key = "", OTHER_XIDS
        self.xids[key] = self.xids.get(key, 0) + 1

    def count_transition(self, gpu: str, state: str) -> None:
        """Count a change of a GPU's state."""
        self.transitions[gpu, state] = self.transitions.get((gpu, state), 0) + 1


class NvmlStatus(msgspec.Struct):
    """The NVML owner thread, and what it has seen of the GPUs."""

    state: NvmlState = NvmlState.STARTING
    call: str = ""  # while HUNG, the oldest call without an answer
    gpu: str = ""  # the UUID of that call's GPU, for a call about one GPU
    since: float = 0.0  # when that call began
    calls: int = 0  # of NVML
    errors: int = 0  # calls that failed
    hangs: int = 0  # calls that did not return in time
    last_error: str = ""
    library: str = ""  # path or soname of the NVML library in use; empty while there is none
    # GPU UUID → the latest XIDs on it since the agent started, ignored or not, the oldest first
    xids: dict[str, tuple[XidSeen, ...]] = msgspec.field(default_factory=dict)
    history: GpuHistory = msgspec.field(default_factory=GpuHistory)


class LedgerStatus(msgspec.Struct):
    """The ledger in numbers, and its grants."""

    revision: int = 0  # advances with each change of the ledger
    grants: tuple[Grant, ...] = ()
    drift_total: int = 0  # corrections by the kubelet's records that were drift, since the start
    drift_last: tuple[str, ...] = ()  # the latest of them, as sentences
    verified_at: float = 0.0  # when it was last compared with the kubelet's records
    # ids in the kubelet's records that this node does not offer
    unknown_ids: tuple[str, ...] = ()
    # device's UUID → how many containers may share it
    capacity: dict[str, int] = msgspec.field(default_factory=dict)
    # resource → how many of its ids are free and healthy
    free: dict[str, int] = msgspec.field(default_factory=dict)
    # resources that only the scheduler counts: their ids get no grants and no edits
    only_counted: frozenset[str] = frozenset()
    # resource → what new containers can still get of each device
    rooms: dict[str, tuple[DeviceRoom, ...]] = msgspec.field(default_factory=dict)
    # resources where the pod, not the ids in Allocate, decides on the devices (`Decider.POD`)
    decided_by_pod: frozenset[str] = frozenset()
    # resource → how its devices are shared (`SharingMode`), where the ids name the devices
    sharing: dict[str, str] = msgspec.field(default_factory=dict)
    # devices for which schedulers have promised more compute, or to more containers, than there is
    overcommitted: tuple[Overcommit, ...] = ()
    uses: tuple[GpuUse, ...] = ()  # which family each GPU serves, and which pods wait for it
    # resource → ids that are not granted now, and why
    held_back: dict[str, tuple[HeldBack, ...]] = msgspec.field(default_factory=dict)
    # (namespace, pod, resource) → the amount that the pod held × seconds
    share_seconds: Mapping[tuple[str, str, str], float] = msgspec.field(default_factory=dict)


class MpsState(enum.StrEnum):
    """The state of an MPS control daemon."""

    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"


class MpsStatus(msgspec.Struct):
    """One MPS control daemon, which serves one resource.

    Attributes:
        trouble: why new containers must not use it, with the remedy; empty while its limits are
            known to be in force.
        adopted: it was running already when this agent started.
        limits_seen_at: when its limits were last read back.
        thread_percentage: the largest part of each GPU's compute for one client.
        memory_limit_mib: GPU UUID → how much of its memory one client may use.
        clients: the process ids of its clients at the last query.
        restarts: how often it ended or did not answer while it was in use, since the agent started.
        clients_lost: how many clients ended together with a failed daemon since the agent started.
        in_use_by_others: UUIDs of GPUs in use by another resource now and therefore not in
            exclusive mode, the compute mode in which only the daemon's clients can use a GPU.
        not_given_back: why a GPU that the daemon had may still be in exclusive mode; empty when
            none is.
    """

    resource: str
    state: MpsState = MpsState.STARTING
    trouble: str = ""
    adopted: bool = False
    running_since: float = 0.0
    limits_seen_at: float = 0.0
    thread_percentage: int = 0
    memory_limit_mib: dict[str, int] = msgspec.field(default_factory=dict)
    clients: tuple[int, ...] = ()
    restarts: int = 0
    clients_lost: int = 0
    in_use_by_others: tuple[str, ...] = ()
    not_given_back: str = ""


class FamilyStatus(msgspec.Struct):
    """One family that is switched on."""

    name: str
    # its pods decide on the devices, so each grant must be bound to a pod
    decided_by_pod: bool = False
    offered: bool = True  # it has resources that pods can ask for
    trouble: str = ""  # why it is not offered
    idle: bool = False  # it is not offered because this node has no device for it; no fault


class BindingStatus(msgspec.Struct):
    """The binding of grants to pods, and its failures since the start."""

    mode: BindingMode | None = None  # None while it depends on a Node that has not been read
    families: tuple[FamilyStatus, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    # starts that were refused because the kubelet's records name several holders
    ambiguities: int = 0
    # answers to Allocate that were meant for another pod, so that the container's start was refused
    wrong_guesses: int = 0
    # answers to Allocate that two pods with equal shares got from each other; their grants were
    # exchanged
    exchanges: int = 0
    # containers that were started on a device of which a scheduler had promised too much
    overcommitted_starts: int = 0
    # For families that read the configuration files of the plugin that they replace: family →
    # the settings in force, files included; and family → setting → the file that set it.
    in_force: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    origins: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    # family → the limits that the library of its isolation backend sets for its containers
    limits: Mapping[str, LibraryLimits] = msgspec.field(default_factory=dict)
    file_problems: tuple[str, ...] = ()  # errors in those configuration files
    cautions: tuple[str, ...] = ()  # problems that some pods will have with the offered resources
    # directories of ended containers that cannot be removed → why
    left_over: dict[str, str] = msgspec.field(default_factory=dict)
    # how often a region (HAMi-core's file of limits) that a container had enlarged was truncated
    regions_cut: int = 0


class CdiSpecStatus(msgspec.Struct, frozen=True):
    """One CDI spec of this node's devices.

    Attributes:
        kind: vendor and class, e.g. ``nvidia.com/gpu``.
        path: its file.
        devices: their names.
        made_at: when the agent made its content, or when other software last changed it; 0 when
            there is none yet.
        error: why it is missing or wrong; empty when it is in order.
    """

    kind: str
    path: str
    devices: tuple[str, ...] = ()
    made_at: float = 0.0
    error: str = ""


class CdiStatus(msgspec.Struct, frozen=True):
    """The CDI specs and names by which containers get devices.

    Attributes:
        source: ``generated`` by the agent, by NVIDIA's ``toolkit``, or empty where no CDI names are
            needed.
        strategies: the device list strategies, e.g. ``envvar`` or ``cdi-cri``.
        specs: the specs of this node's devices.
        names: the qualified names that runtimes can resolve now.
    """

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecStatus, ...] = ()
    names: frozenset[str] = frozenset()


class WatchStatus(msgspec.Struct):
    """One watch at the API server.

    Attributes:
        name: what is watched.
        synced: a first complete list has arrived.
        failing_since: time of the first of the latest failures in a row; 0 while there is none.
        essential: a failure is a problem; False where the object need not exist.
        lists: how many complete lists have arrived.
        watches: how many watches were started.
        events: how many additions, changes and deletions have arrived.
        errors: how many lists and watches failed. Status 410 and a regular end are no failures.
        unreadable: how many objects could not be decoded.
        last_event_at: time of the last answer of the API server, bookmarks and lists included.
        last_error: the text of the last failure; it stays after the failure is over.
    """

    name: str
    synced: bool = False
    failing_since: float = 0.0
    essential: bool = True
    lists: int = 0
    watches: int = 0
    events: int = 0
    errors: int = 0
    unreadable: int = 0
    last_event_at: float = 0.0
    last_error: str = ""


class WriterStatus(msgspec.Struct):
    """The counts of one writer to the API server since the start.

    Attributes:
        name: the kind of writes.
        written: requests that the API server has accepted.
        failed: requests that it has refused or not answered.
        dropped: writes that were given up.
        pending: writes that are waiting now.
        oldest_pending_seconds: age of the oldest pending write; 0 when there is none.
    """

    name: str
    written: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0
    oldest_pending_seconds: float = 0.0


class WriteFailure(msgspec.Struct, frozen=True):
    """Files of the agent that it could not write at its last attempt.

    Attributes:
        directory: their directory.
        files: the name of a file, or what the files are.
        error: the reason, as the system gives it.
        meanwhile: what is lost until they can be written.
    """

    directory: str
    files: str
    error: str
    meanwhile: str


class ClusterStatus(msgspec.Struct):
    """The connection to the API server, and the pods that it has reported."""

    connected: bool = False
    disconnected_reason: str = ""  # why there is no connection
    needed: bool = False  # a family that needs the API server is switched on
    origin: str = ""  # where the credentials come from; they themselves are never shown
    waiting_for: str = ""  # what must be read before such a family is offered
    # (verb, resource, outcome) → how many
    requests: dict[tuple[str, str, str], int] = msgspec.field(default_factory=dict)
    watches: tuple[WatchStatus, ...] = ()
    writers: tuple[WriterStatus, ...] = ()
    # outcome → number of evictions of pods that cannot start here
    evictions: dict[str, int] = msgspec.field(default_factory=dict)
    # failed pods: outcome (evicted, recreated or left alone) → their number
    rescued: dict[str, int] = msgspec.field(default_factory=dict)
    # outcome → number of evictions of pods that hold a dead GPU
    gpu_evictions: dict[str, int] = msgspec.field(default_factory=dict)
    # the rights that the API server denies → the manifest that grants them
    missing_rights: dict[str, str] = msgspec.field(default_factory=dict)
    config_map: str = ""  # namespace/name of the ConfigMap that was read
    # what the previous agent read from the API server; in use until the API server answers
    remembered: dict[str, Any] = msgspec.field(default_factory=dict)
    pods: tuple[Pod, ...] = ()
    pods_synced: bool = False
    # pods that the kubelet failed because no agent ran before this start
    failed_while_agent_down: int = 0


class ProblemKind(enum.StrEnum):
    """The part of the agent or of the node that has a problem."""

    AGENT = "agent"
    API_SERVER = "API server"
    CDI = "cdi"
    CONFIG = "config"
    FILES = "files"
    GPU = "gpu"
    GPUS = "gpus"  # all GPUs of the node
    KUBELET = "kubelet"
    LEDGER = "ledger"
    LIMITS = "limits"  # of containers
    MPS = "mps"
    NVML = "nvml"
    RESOURCE = "resource"
    TASK = "task"


# Remedies that the log and the list of problems have in common.
START_KUBELET = "start the kubelet, or correct the directory in which its socket is looked for"
CORRECT_CONFIGURATION = "correct it, nothing has to be restarted"
MAKE_ROOM = "make it a directory with room in which the agent can write"
BRING_API_SERVER_BACK = "bring the API server back; nothing has to be restarted"

# The most subjects in the words of a problem. A node with MIG may have a dozen resources.
_NAMED_SUBJECTS = 4


class Problem(msgspec.Struct, frozen=True):
    """A problem that an operator should know about, such as a reason why ``/readyz`` or ``/livez``
    fails.

    Attributes:
        kind: the part that has the problem.
        subject: the name of the resource or task, or the index of the GPU; empty for a kind of
            which there is only one.
        text: what is wrong.
        remedy: what to do, or where to find more; empty when ``text`` has it, or when there is
            nothing to do.
        also: further subjects of the same kind that have the same problem.
    """

    kind: ProblemKind
    subject: str
    text: str
    remedy: str = ""
    also: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """The kind and the subjects in words."""
        names = [self.subject, *self.also[: _NAMED_SUBJECTS - 1]]
        hidden = 1 + len(self.also) - len(names)
        more = f" and {hidden} more" if hidden else ""
        return f"{self.kind} {', '.join(names)}{more}".rstrip()

    @property
    def reason(self) -> str:
        """The text and the remedy in one sentence."""
        return "; ".join(filter(None, (self.text, self.remedy)))


class AgentStatus(msgspec.Struct):
    """The status of the whole agent at one moment."""

    node: str = ""
    version: str = ""
    commit: str = ""
    simulated: bool = False
    started_at: float = 0.0
    inventory: Inventory = msgspec.field(default_factory=Inventory)
    usage: tuple[GpuUsage, ...] = ()  # the load of each GPU, as NVML measures it
    # the use by containers whose limits are in a region of HAMi-core, and by those of vgpu-control
    containers: tuple[ContainerUsage, ...] = ()
    controlled: tuple[ControlledUse, ...] = ()
    inventory_at: float = 0.0  # when the GPUs were last read, even if nothing changed
    usage_at: float = 0.0  # when `usage` was last measured
    nvml: NvmlStatus = msgspec.field(default_factory=NvmlStatus)
    kubelet: KubeletStatus = msgspec.field(default_factory=KubeletStatus)
    plugins: tuple[PluginStatus, ...] = ()
    ledger: LedgerStatus = msgspec.field(default_factory=LedgerStatus)
    binding: BindingStatus = msgspec.field(default_factory=BindingStatus)
    cluster: ClusterStatus = msgspec.field(default_factory=ClusterStatus)
    cdi: CdiStatus = msgspec.field(default_factory=CdiStatus)
    mps: tuple[MpsStatus, ...] = ()  # one for each MPS control daemon, by resource
    write_failures: tuple[WriteFailure, ...] = ()
    # namespace/pod/container → why the region with its limits cannot be read
    unreadable_regions: Mapping[str, str] = msgspec.field(default_factory=dict)
    tasks: tuple[TaskReport, ...] = ()
    events: tuple[Entry, ...] = ()
    # how late the event loop woke up in the last minute: the 99th percentile, and the worst
    loop_lag_seconds: float = 0.0
    loop_lag_max_seconds: float = 0.0
    # key path → (value, where it came from)
    config: dict[str, tuple[Any, str]] = msgspec.field(default_factory=dict)
    config_problems: tuple[str, ...] = ()  # why the newest configuration file is not in force
    config_needs_restart: tuple[str, ...] = ()  # changed settings that a restart puts in force
    config_collisions: tuple[str, ...] = ()  # conflicts between families that are switched on
    # the choice among the named configurations and its reason; empty where there are none
    config_named: dict[str, str] = msgspec.field(default_factory=dict)
    # why ``/readyz`` and ``/livez`` fail; empty while they do not
    not_ready: tuple[Problem, ...] = ()
    not_alive: tuple[Problem, ...] = ()

    @property
    def unavailable(self) -> dict[str, str]:
        """The resources that cannot be granted now, with the reason."""
        return {
            problem.subject: problem.reason
            for problem in self.not_ready
            if problem.kind is ProblemKind.RESOURCE
        }
