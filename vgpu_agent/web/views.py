"""The public JSON types of ``/debug``, and their values for an `AgentStatus`.

These types are separate from the agent's own, so that an internal change cannot silently change the
JSON that scripts read. ``vgpu-agent doctor`` decodes the same types that `web.debug` encodes. From
1.0.0 on, fields may be added but are never renamed. Unknown fields are ignored and missing ones
have defaults, so an older command line can read a newer agent, and the other way round.

Times have the type `shapes.When`. The types for binding, refusals, MIG, problems and the use of
GPUs are in modules of their own: `binding`, `mig`, `problems` and `uses`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.model import GrantState
from vgpu_agent.status import NvmlState
from vgpu_agent.web import binding as binding_views
from vgpu_agent.web import mig, problems, uses
from vgpu_agent.web.address import DEGRADED, HEALTHY, NOT_READY
from vgpu_agent.web.binding import BindingView, RefusalView
from vgpu_agent.web.health import IllnessView, illness
from vgpu_agent.web.limits import Limits
from vgpu_agent.web.shapes import When, view, when
from vgpu_agent.web.uses import HeldBackView, UseView
from vgpu_agent.web.xids import XidView, xid_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.model import Gpu, GpuUsage, Grant, Share
    from vgpu_agent.status import AgentStatus, CdiStatus, PluginStatus


_SHOWN_IDS = 64  # per grant


class UsageView(msgspec.Struct, frozen=True):
    """The load of a GPU. A field is null if the driver does not report it."""

    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    ecc_uncorrected_total: int | None = None
    processes: tuple[dict[str, int], ...] = ()  # keys: ``pid`` on the host, ``memory_mib``


class GpuView(msgspec.Struct, frozen=True):
    """A GPU, its health, the family that it serves, and the holders of its shares."""

    uuid: str
    index: int = 0  # NVML's; it shifts when a card is unplugged
    minor: int = 0  # the number in ``/dev/nvidia<minor>``
    name: str = ""
    memory_mib: int = 0
    pci_bus_id: str = ""
    numa_node: int | None = None
    compute_capability: str = ""
    present: bool = True  # False once the card no longer answers or is gone
    health: str = ""  # Healthy or Unhealthy
    health_reason: str = ""
    health_changed: When = When()
    illness: IllnessView | None = None  # the causes, with the remedy, while it is Unhealthy
    xids: tuple[XidView, ...] = ()  # the latest, ignored or not, the oldest first
    usage: UsageView | None = None
    holders: tuple[str, ...] = ()  # ``namespace/pod/container``, as far as it is known
    # how many containers may share it and its MIG instances; null if the node offers nothing of it
    max_holders: int | None = None
    mig_enabled: bool = False
    mig_instances: tuple[mig.MigView, ...] = ()
    # UUID of another GPU → the level of the common PCI ancestor (``pci``), the number of direct
    # NVLinks (``nvlinks``) and of NVLinks to NVSwitches (``switch_links``)
    links: dict[str, dict[str, int]] = {}
    use: UseView = UseView()  # the family that it serves, and the pods that have or await it


class ShareView(msgspec.Struct, frozen=True):
    """A share of one device. Memory and cores are 0 if they are not limited."""

    device: str  # UUID of a GPU or MIG instance
    gpu: str = ""  # UUID of its GPU
    gpu_index: int | None = None
    memory_mib: int = 0
    cores_percent: int = 0
    exclusive: bool = False


class GrantView(msgspec.Struct, frozen=True):
    """The shares that one container holds through one resource.

    The names of pod and container are empty until the kubelet's records have them.
    """

    number: int  # unique until the agent restarts; log lines about the grant have it
    family: str = ""
    resource: str = ""
    state: str = ""  # a `GrantState`
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    ids: tuple[str, ...] = ()  # at most the first 64; `ids_total` is the number of all
    ids_total: int = 0
    shares: tuple[ShareView, ...] = ()
    # the time of the call of Allocate, or of the restart after which the grant was found
    reserved: When = When()
    # whether the limit is in force, a `LimitState`; empty while the share is not decided
    limit: str = ""
    limit_reason: str = ""

    @property
    def pod_name(self) -> str:
        """``namespace/name`` of the pod. Until the kubelet's records have it, this is the UID, or
        "(not named yet)".
        """
        return f"{self.namespace}/{self.pod}" if self.pod else self.pod_uid or "(not named yet)"


class PodView(msgspec.Struct, frozen=True):
    """A pod and the grants of its containers."""

    pod: str
    namespace: str = ""
    name: str = ""
    uid: str = ""
    grants: tuple[GrantView, ...] = ()


class ResourceView(msgspec.Struct, frozen=True):
    """A resource and its plugin server."""

    resource: str
    family: str = ""
    # the sharing of one device, if ids name devices: none, time-slicing, mps, or mps-host (MPS
    # whose daemon others run)
    sharing: str = ""
    # the plugin server: waiting for the kubelet, serving, registered, draining, stopped or failed
    state: str = ""
    ready: bool = False
    stream_open: bool = False  # the kubelet's call of ListAndWatch
    endpoint: str = ""  # the name of the plugin's socket file
    registered: When = When()  # with the kubelet
    registrations: int = 0
    registration_failures: int = 0
    streams_opened: int = 0
    messages_sent: int = 0  # lists of ids, over ListAndWatch
    bytes_sent: int = 0  # the size of the last list
    ids: int = 0
    ids_healthy: int = 0
    ids_held: int = 0
    ids_free: int | None = None  # healthy, and held by no container; null if not known
    # False if the ids exist only for schedulers to count: the ledger books none of them, so
    # `ids_held` and `ids_free` say nothing about the use of the GPUs
    ids_booked: bool = True
    allocations: int = 0
    allocations_refused: int = 0
    allocate_seconds_last: float = 0.0
    allocate_seconds_sum: float = 0.0
    preferred_calls: int = 0  # of GetPreferredAllocation
    pre_starts: int = 0  # calls of PreStartContainer
    pre_starts_refused: int = 0
    last_error: str = ""
    held_back: tuple[HeldBackView, ...] = ()  # why some ids are not healthy


class NvmlView(msgspec.Struct, frozen=True):
    """The thread that owns NVML. ``state`` is that of the driver, an `NvmlState`. ``call``, ``gpu``
    and ``hung`` describe a call that hangs.
    """

    state: str = ""
    library: str = ""
    call: str = ""
    gpu: str = ""
    hung: When = When()
    calls: int = 0
    errors: int = 0
    hangs: int = 0
    last_error: str = ""


class CdiSpecView(msgspec.Struct, frozen=True):
    """One CDI spec; ``made`` is its creation time, and ``error`` explains why it is unusable."""

    kind: str = ""
    path: str = ""
    devices: tuple[str, ...] = ()
    made: When = When()
    error: str = ""


class CdiView(msgspec.Struct, frozen=True):
    """The state of CDI.

    ``source`` is ``generated`` (by the agent) or ``toolkit`` (by NVIDIA's), and empty if containers
    get no CDI names. ``strategies`` are the ways in which answers name devices, e.g. ``envvar`` or
    ``cdi-cri``.
    """

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecView, ...] = ()


class Overview(msgspec.Struct, frozen=True):
    """The overview of the node for ``/``, ``/debug/status`` and ``vgpu-agent status``."""

    node: str
    version: str = ""
    commit: str = ""
    simulated: bool = False
    ready: bool = False  # ``/readyz`` succeeds
    alive: bool = False  # ``/livez`` succeeds
    started: When = When()
    driver_version: str = ""
    cuda_version: str = ""
    problems: tuple[problems.ProblemView, ...] = ()
    gpus: tuple[GpuView, ...] = ()
    resources: tuple[ResourceView, ...] = ()
    pods: tuple[PodView, ...] = ()
    binding: BindingView = BindingView()
    refusals: tuple[RefusalView, ...] = ()

    @property
    def condition(self) -> str:
        """The value of the HTTP header `STATE_HEADER` of ``/debug/status``, from which
        ``vgpu-agent status`` makes its exit status.
        """
        if not self.ready:
            return NOT_READY
        return DEGRADED if self.problems else HEALTHY


def gpu_of_devices(status: AgentStatus) -> dict[str, Gpu]:
    """Return UUID of each device → its GPU: the device itself, or the GPU of a MIG instance."""
    gpus = status.inventory.gpus
    return {gpu.uuid: gpu for gpu in gpus} | {
        instance.uuid: gpu for gpu in gpus for instance in gpu.mig_instances
    }


def live_grants(status: AgentStatus) -> Iterator[Grant]:
    """Return the grants that are not released."""
    return (grant for grant in status.ledger.grants if grant.state is not GrantState.RELEASED)


def grants(status: AgentStatus, now: float) -> tuple[GrantView, ...]:
    """List every grant that is not released, oldest first."""
    limits = Limits(status)
    return tuple(
        grant_view(status, grant, now, limits)
        for grant in sorted(live_grants(status), key=lambda grant: grant.number)
    )


def grant_view(
    status: AgentStatus, grant: Grant, now: float, limits: Limits | None = None
) -> GrantView:
    """Return the view of one grant.

    Args:
        status: the snapshot that contains the grant.
        grant: the grant.
        now: unix seconds.
        limits: the limits of the snapshot, so that callers with many grants read them only once.
    """
    owner, devices = grant.owner, gpu_of_devices(status)
    limit = (limits or Limits(status)).of(grant)
    # `view` takes the other fields from the attributes of ``grant`` that have their names, a time
    # with ``_at`` or ``_since`` added; ``now`` is for the ages of times
    return view(
        GrantView,
        grant,
        now,
        namespace=owner.namespace if owner else "",
        pod=owner.pod if owner else "",
        pod_uid=owner.pod_uid if owner else "",
        container=owner.container if owner else "",
        ids=grant.ids[:_SHOWN_IDS],
        ids_total=len(grant.ids),
        shares=tuple(_share(share, devices.get(share.device), now) for share in grant.shares),
        limit=limit.state.value if limit else "",
        limit_reason=limit.reason if limit else "",
    )


def _share(share: Share, gpu: Gpu | None, now: float) -> ShareView:
    return view(
        ShareView,
        share,
        now,
        gpu=gpu.uuid if gpu else share.device,
        gpu_index=gpu.index if gpu else None,
    )


def pods(status: AgentStatus, now: float) -> tuple[PodView, ...]:
    """List the pods with grants. All grants without a known pod are one entry without a name."""
    by_pod: dict[tuple[str, str], list[GrantView]] = {}
    for grant in grants(status, now):
        by_pod.setdefault((grant.pod_name, grant.pod_uid), []).append(grant)
    found = []
    for (name, uid), held in sorted(by_pod.items()):
        first = held[0]
        found.append(
            PodView(
                pod=name, namespace=first.namespace, name=first.pod, uid=uid, grants=tuple(held)
            )
        )
    return tuple(found)


def gpus(status: AgentStatus, now: float) -> tuple[GpuView, ...]:
    """List every GPU by index, with health, usage and holders."""
    holders: dict[str, dict[str, None]] = {}  # the inner dict is an ordered set
    for grant in grants(status, now):
        holder = f"{grant.pod_name}/{grant.container}" if grant.container else grant.pod_name
        for share in grant.shares:
            holders.setdefault(share.gpu, {})[holder] = None
    usage = {used.uuid: used for used in status.usage}
    in_use = {use.gpu: uses.use_view(use, now) for use in status.ledger.uses}
    return tuple(
        _gpu(
            gpu,
            status,
            usage.get(gpu.uuid),
            tuple(holders.get(gpu.uuid, ())),
            in_use.get(gpu.uuid, UseView()),
            now,
        )
        for gpu in status.inventory.gpus
    )


def _gpu(
    gpu: Gpu,
    status: AgentStatus,
    usage: GpuUsage | None,
    holders: tuple[str, ...],
    use: UseView,
    now: float,
) -> GpuView:
    major, minor = gpu.compute_capability
    return view(
        GpuView,
        gpu,
        now,
        compute_capability=f"{major}.{minor}",
        health=gpu.health.word,
        health_reason=gpu.health.reason,
        health_changed=when(gpu.health.since, now),
        illness=illness(gpu.health, gpu.uuid, now),
        xids=tuple(xid_view(seen, now) for seen in status.nvml.xids.get(gpu.uuid, ())),
        usage=_usage(usage, now) if usage else None,
        holders=holders,
        max_holders=max_holders(gpu, status),
        mig_instances=tuple(
            mig.instance_view(gpu, instance, now) for instance in gpu.mig_instances
        ),
        links={
            peer: {
                "pci": link.pci,  # NVML's level of the common ancestor, e.g. 10: one PCIe switch
                "nvlinks": link.nvlinks,
                "switch_links": link.switch_links,
            }
            for (uuid, peer), link in status.inventory.links.items()
            if uuid == gpu.uuid
        },
        use=use,
    )


def _usage(usage: GpuUsage, now: float) -> UsageView:
    return view(
        UsageView,
        usage,
        now,
        processes=tuple(
            {"pid": pid, "memory_mib": memory_mib} for pid, memory_mib in usage.processes
        ),
    )


def max_holders(gpu: Gpu, status: AgentStatus) -> int | None:
    """Return the maximum number of holders of the GPU and its MIG instances together; None if the
    ledger offers nothing of it.
    """
    found = [
        status.ledger.capacity[uuid]
        for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.mig_instances))
        if uuid in status.ledger.capacity
    ]
    return sum(found) if found else None


def ids_held(status: AgentStatus) -> dict[str, int]:
    """Return resource → the number of its ids that containers hold."""
    held: dict[str, int] = {}
    for grant in live_grants(status):
        held[grant.resource] = held.get(grant.resource, 0) + len(grant.ids)
    return held


def resources(status: AgentStatus, now: float) -> tuple[ResourceView, ...]:
    """List every resource that has a plugin server."""
    held = ids_held(status)
    return tuple(
        _resource(plugin, held.get(plugin.resource, 0), status, now) for plugin in status.plugins
    )


def withheld(status: AgentStatus) -> dict[str, str]:
    """Return each resource without a plugin server → the reason why it has none."""
    served = {plugin.resource for plugin in status.plugins}
    return {
        resource: reason
        for resource, reason in status.unavailable.items()
        if resource not in served
    }


def _resource(plugin: PluginStatus, held: int, status: AgentStatus, now: float) -> ResourceView:
    ledger = status.ledger
    return view(
        ResourceView,
        plugin,
        now,
        sharing=ledger.sharing.get(plugin.resource, ""),
        ids=plugin.ids_sent,
        ids_healthy=plugin.healthy_sent,
        ids_held=held,
        ids_free=ledger.free.get(plugin.resource),
        ids_booked=plugin.resource not in ledger.only_counted,
        held_back=uses.held_back(status, plugin.resource),
    )


def nvml(status: AgentStatus, now: float) -> NvmlView:
    """Return the view of the thread that owns NVML."""
    found = status.nvml
    hung = found.state is NvmlState.HUNG
    return view(
        NvmlView,
        found,
        now,
        call=found.call if hung else "",
        gpu=found.gpu if hung else "",
        hung=when(found.since if hung else 0.0, now),
    )


def overview(status: AgentStatus, now: float) -> Overview:
    """Return the overview of the node."""
    return view(
        Overview,
        status,
        now,
        simulated=is_simulated(status),
        ready=not status.not_ready,
        alive=not status.not_alive,
        driver_version=status.inventory.driver_version,
        cuda_version=status.inventory.cuda_version,
        problems=tuple(
            view(problems.ProblemView, problem, now) for problem in problems.known(status, now)
        ),
        gpus=gpus(status, now),
        resources=resources(status, now),
        pods=pods(status, now),
        binding=binding_views.binding_view(status.binding, now),
        refusals=binding_views.refusals(status, now),
    )


def cdi(status: CdiStatus, now: float) -> CdiView:
    """Return the view of the CDI specs."""
    return view(
        CdiView, status, now, specs=tuple(view(CdiSpecView, each, now) for each in status.specs)
    )


def is_simulated(status: AgentStatus) -> bool:
    """Tell whether the settings or the NVML library in use simulate GPUs.

    Either is enough, so that a simulated node is never shown as a real one.
    """
    return status.simulated or status.inventory.simulated
