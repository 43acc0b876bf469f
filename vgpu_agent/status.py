"""The state of the running parts as plain data, written by each package about itself,
read by `web` and the command line.

`web` may not look into `kubelet` or `gpu`; `agent` collects these reports into one `AgentStatus` on
request. Collecting must stay cheap and must never block: every field is already in memory. Times
are unix seconds.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from vgpu_agent.model import Inventory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.allocation.mode import BindingMode
    from vgpu_agent.allocation.refusals import Refusal
    from vgpu_agent.concurrency import TaskReport
    from vgpu_agent.isolation.backend import LibraryLimits
    from vgpu_agent.journal import Entry
    from vgpu_agent.ledger.accounting import Overcommit
    from vgpu_agent.ledger.uses import GpuUse, HeldBack
    from vgpu_agent.model import ContainerUsage, DeviceRoom, GpuUsage, Grant
    from vgpu_agent.pods import Pod


@dataclasses.dataclass(frozen=True, slots=True)
class Withheld:
    """The reason why a resource is not offered.

    Attributes:
        reason: one sentence, without the name of the resource.
        temporary: it ends by itself within seconds, such as the start of a daemon. It is an error
            only when it lasts.
    """

    reason: str
    temporary: bool = False


class PluginState(enum.StrEnum):
    """The state of a plugin server towards the kubelet."""

    WAITING = "waiting for kubelet"
    SERVING = "serving, not registered"
    REGISTERED = "registered"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass
class PluginStatus:
    """One device plugin server: one resource."""

    resource: str
    family: str
    state: PluginState = PluginState.WAITING
    endpoint: str = ""
    registered_at: float = 0.0
    registrations: int = 0
    registration_failures: int = 0
    stream_open: bool = False
    streams_opened: int = 0
    ids_sent: int = 0
    healthy_sent: int = 0
    bytes_sent: int = 0
    messages_sent: int = 0
    allocations: int = 0
    allocations_refused: int = 0
    allocate_seconds_last: float = 0.0
    allocate_seconds_sum: float = 0.0
    preferred_calls: int = 0
    pre_starts: int = 0
    pre_starts_refused: int = 0
    pre_start_seconds_sum: float = 0.0
    last_error: str = ""
    # why the kubelet's own list lacks ids that we sent; empty while it has them all
    not_listed: str = ""
    # which ids of this resource the kubelet has from another plugin; empty while there are none
    rival: str = ""

    @property
    def complaint(self) -> str:
        """The fault in the kubelet's list of this resource, in words."""
        return "; ".join(filter(None, (self.not_listed, self.rival)))

    @property
    def ready(self) -> bool:
        """Tell whether the kubelet knows the resource and reads its stream."""
        return self.state is PluginState.REGISTERED and self.stream_open


@dataclasses.dataclass
class KubeletStatus:
    """The kubelet as seen through its sockets and files."""

    directory: str = ""
    socket_present: bool = False
    restarts_seen: int = 0
    records_read_at: float = 0.0
    records_trouble: str = ""


class NvmlState(enum.StrEnum):
    """The state of the driver."""

    STARTING = "starting"
    ANSWERING = "answering"
    MISSING = "driver missing"
    HUNG = "hung"
    UNUSED = "not used"  # the GPU is part of the processor


@dataclasses.dataclass
class NvmlStatus:
    """The NVML owner thread."""

    state: NvmlState = NvmlState.STARTING
    call: str = ""  # the call in flight longest, while HUNG
    gpu: str = ""  # its GPU's UUID, when it has one
    since: float = 0.0
    calls: int = 0
    errors: int = 0
    hangs: int = 0
    last_error: str = ""
    library: str = ""


@dataclasses.dataclass
class LedgerStatus:
    """The ledger in numbers, and its grants."""

    revision: int = 0
    grants: tuple[Grant, ...] = ()
    drift_total: int = 0
    drift_last: tuple[str, ...] = ()
    verified_at: float = 0.0
    unknown_ids: tuple[str, ...] = ()  # ids in the kubelet's records that this node does not offer
    capacity: dict[str, int] = dataclasses.field(default_factory=dict)  # holders allowed, by device
    # ids free and healthy, by resource
    free: dict[str, int] = dataclasses.field(default_factory=dict)
    # resources whose ids are neither booked nor answered
    only_counted: frozenset[str] = frozenset()
    # what each device has left, by resource
    rooms: dict[str, tuple[DeviceRoom, ...]] = dataclasses.field(default_factory=dict)
    # resources of which Allocate does not decide what the holder gets
    decided_by_pod: frozenset[str] = frozenset()
    # how a device is shared (`SharingMode`), by the other resources
    sharing: dict[str, str] = dataclasses.field(default_factory=dict)
    # devices of which schedulers have given out more compute or places than there are
    overcommitted: tuple[Overcommit, ...] = ()
    uses: tuple[GpuUse, ...] = ()  # which family each GPU serves, and which pods wait for it
    # ids that are not given out, by resource
    held_back: dict[str, tuple[HeldBack, ...]] = dataclasses.field(default_factory=dict)


class MpsState(enum.StrEnum):
    """The state of an MPS control daemon."""

    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclasses.dataclass
class MpsStatus:
    """One MPS control daemon: one resource.

    Attributes:
        trouble: why new containers must not be sent to it, with the remedy; empty while its limits
            were seen to be in force.
        adopted: it was running already when this agent started.
        limits_seen_at: when its limits were read back last, unix seconds.
        memory_limit_mib: MiB of each GPU that a client may take, of the daemon that runs.
        clients: process ids of its clients at the last query.
        clients_lost: how many clients ended with a daemon, since the agent started.
        in_use_by_others: GPUs in use by another resource now and therefore not in exclusive mode.
    """

    resource: str
    state: MpsState = MpsState.STARTING
    trouble: str = ""
    adopted: bool = False
    running_since: float = 0.0
    limits_seen_at: float = 0.0
    thread_percentage: int = 0
    memory_limit_mib: dict[str, int] = dataclasses.field(default_factory=dict)
    clients: tuple[int, ...] = ()
    restarts: int = 0
    clients_lost: int = 0
    in_use_by_others: tuple[str, ...] = ()


@dataclasses.dataclass
class FamilyStatus:
    """One family that is switched on."""

    name: str
    by_pod: bool = False  # its pods decide what they get, so its grants are bound
    offered: bool = True
    trouble: str = ""  # why it is not offered


@dataclasses.dataclass
class BindingStatus:
    """The matching of containers with their pods, and its failures since the start."""

    mode: BindingMode | None = None  # None while it depends on a Node that has not been read
    families: tuple[FamilyStatus, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    # starts that were refused because the kubelet's records name several holders
    ambiguities: int = 0
    wrong_guesses: int = 0  # early answers that were another pod's, and whose start was refused
    # early answers that were another pod's with an equal share, and were exchanged
    exchanges: int = 0
    # containers that were started on a device of which a scheduler had given out too much
    overcommitted_starts: int = 0
    # Of families with files of a replaced plugin, the settings after those were laid over them, and
    # of those set by a file which it was.
    in_force: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    origins: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    # of families that the library of hami-core limits
    limits: Mapping[str, LibraryLimits] = dataclasses.field(default_factory=dict)
    file_problems: tuple[str, ...] = ()  # what is wrong with those files
    cautions: tuple[str, ...] = ()  # what will go wrong for some pods with what is offered
    # directories of ended containers that cannot be removed → why
    left_over: dict[str, str] = dataclasses.field(default_factory=dict)
    # how often a region that its container had made larger was cut back to its size
    regions_cut: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CdiSpecStatus:
    """One CDI spec of this node's devices.

    Attributes:
        kind: vendor and class, e.g. ``nvidia.com/gpu``.
        path: its file.
        devices: their names.
        made_at: unix seconds when its content was made (or last changed, where other software keeps
            it); 0 when it never was.
        error: why it is not as it should be; empty when it is.
    """

    kind: str
    path: str
    devices: tuple[str, ...] = ()
    made_at: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CdiStatus:
    """The CDI specs and names by which containers get devices.

    Attributes:
        source: ``generated``, ``toolkit``, or empty where no CDI names are needed.
        strategies: how containers get their devices.
        specs: those that this node's devices have.
        names: the qualified names that runtimes can resolve now.
    """

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecStatus, ...] = ()
    names: frozenset[str] = frozenset()


@dataclasses.dataclass(slots=True)
class WatchStatus:
    """One watch at the API server.

    Attributes:
        name: what is watched.
        synced: there was a first complete list.
        failing_since: time of the first of the failures in a row; 0 while all is well.
        essential: readiness depends on it.
        lists: complete lists that were taken over.
        watches: watches that were begun.
        events: additions, changes and deletions that came.
        errors: failures of lists and watches; 410 and a clean end are none.
        unreadable: objects that could not be read.
        last_event_at: time of the last answer of the API server, bookmarks and lists included.
        last_error: of the last failure; stays when it is over.
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


@dataclasses.dataclass(slots=True)
class WriterStatus:
    """The counts of one writer to the API server since the start.

    Attributes:
        name: what it writes about.
        written: requests that the API server has accepted.
        failed: requests that it has not, or that had no answer.
        dropped: things given up for good.
        pending: things that are not yet written, now.
        oldest_pending_seconds: age of the oldest of them; 0 when there is none.
    """

    name: str
    written: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0
    oldest_pending_seconds: float = 0.0


@dataclasses.dataclass
class ClusterStatus:
    """The API server as this agent uses it, and the pods that it has reported."""

    connected: bool = False
    disconnected_reason: str = ""
    needed: bool = False  # a family is on that needs the API server
    origin: str = ""  # where the credentials come from; they themselves are never shown
    waiting_for: str = ""  # the objects that must be read before such a family is offered
    # (verb, resource, outcome) → how many
    requests: dict[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
    watches: tuple[WatchStatus, ...] = ()
    writers: tuple[WriterStatus, ...] = ()
    evictions: dict[str, int] = dataclasses.field(default_factory=dict)  # by outcome
    config_map: str = ""  # namespace/name of the ConfigMap that was read
    # the objects from before a restart, used until the API server has answered
    remembered: dict[str, Any] = dataclasses.field(default_factory=dict)
    pods: tuple[Pod, ...] = ()
    pods_synced: bool = False
    # pods that the kubelet failed before this start because no agent was there
    failed_while_away: int = 0


class ProblemKind(enum.StrEnum):
    """The part of the agent or of the node that has a problem."""

    AGENT = "agent"
    API_SERVER = "API server"
    CONFIG = "config"
    FILES = "files"
    GPU = "gpu"
    GPUS = "gpus"  # all of them
    KUBELET = "kubelet"
    LEDGER = "ledger"
    NVML = "nvml"
    RESOURCE = "resource"
    TASK = "task"


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something that an operator should know; as well a reason why ``/readyz`` or ``/livez`` fails.

    Attributes:
        kind: the part that has it.
        subject: which of several such parts: the name of a resource or a task, the index of a GPU;
            empty where there is one only.
        text: what is wrong.
        remedy: what mends it, or where more is known; empty where ``text`` says so, or nothing is
            to be done.
    """

    kind: ProblemKind
    subject: str
    text: str
    remedy: str = ""

    @property
    def part(self) -> str:
        """The kind and the subject in words."""
        return f"{self.kind} {self.subject}".rstrip()

    @property
    def reason(self) -> str:
        """The text and the remedy in one sentence."""
        return "; ".join(filter(None, (self.text, self.remedy)))


@dataclasses.dataclass
class AgentStatus:
    """Everything at one moment."""

    node: str = ""
    version: str = ""
    commit: str = ""
    simulated: bool = False
    started_at: float = 0.0
    inventory: Inventory = dataclasses.field(default_factory=Inventory)
    usage: tuple[GpuUsage, ...] = ()
    # of those whose limits are in a region of HAMi-core
    containers: tuple[ContainerUsage, ...] = ()
    inventory_at: float = 0.0  # when the GPUs were last read, whether anything had changed or not
    usage_at: float = 0.0
    nvml: NvmlStatus = dataclasses.field(default_factory=NvmlStatus)
    kubelet: KubeletStatus = dataclasses.field(default_factory=KubeletStatus)
    plugins: tuple[PluginStatus, ...] = ()
    ledger: LedgerStatus = dataclasses.field(default_factory=LedgerStatus)
    binding: BindingStatus = dataclasses.field(default_factory=BindingStatus)
    cluster: ClusterStatus = dataclasses.field(default_factory=ClusterStatus)
    cdi: CdiStatus = dataclasses.field(default_factory=CdiStatus)
    mps: tuple[MpsStatus, ...] = ()  # one for each MPS control daemon, by resource
    tasks: tuple[TaskReport, ...] = ()
    events: tuple[Entry, ...] = ()
    loop_lag_seconds: float = 0.0
    loop_lag_max_seconds: float = 0.0
    # key path → (value, where it came from)
    config: dict[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    config_problems: tuple[str, ...] = ()  # why the newest configuration file is not in force
    config_needs_restart: tuple[str, ...] = ()
    config_collisions: tuple[str, ...] = ()  # families that take something from each other
    # the named configuration, empty where there are none
    config_named: dict[str, str] = dataclasses.field(default_factory=dict)
    not_ready: tuple[Problem, ...] = ()
    not_alive: tuple[Problem, ...] = ()

    @property
    def not_served(self) -> dict[str, str]:
        """The resources of which nothing is granted now, and why."""
        return {
            problem.subject: problem.reason
            for problem in self.not_ready
            if problem.kind is ProblemKind.RESOURCE
        }
