"""The public JSON shapes of ``/debug``: what `AgentStatus` looks like from outside.

They are types of their own, so that a change inside the agent cannot silently change what scripts
read, and so that ``vgpu-agent status`` decodes exactly what `web.debug` encodes. From 1.0.0 on,
fields may be added and are never renamed.
Unknown fields are ignored and missing ones have defaults, so an older command line reads a newer
agent and the other way round.

Times are those of `moments`. What concerns how grants are bound and the API server has views of its
own beside this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.model import GrantState
from vgpu_agent.status import NvmlState
from vgpu_agent.web import binding as how_bound
from vgpu_agent.web import mig, problems, uses
from vgpu_agent.web.binding import BindingView, RefusalView
from vgpu_agent.web.limits import Limits
from vgpu_agent.web.shapes import When, view, when
from vgpu_agent.web.uses import HeldBackView, UseView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.model import Gpu, GpuUsage, Grant, Share
    from vgpu_agent.status import AgentStatus, CdiStatus, PluginStatus


_SHOWN_IDS = 64


class UsageView(msgspec.Struct, frozen=True):
    """The load of a GPU; null where the driver gives no value."""

    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    ecc_uncorrected_total: int | None = None
    processes: tuple[dict[str, int], ...] = ()


class GpuView(msgspec.Struct, frozen=True):
    """A GPU, its health, the family that it serves, and the holders of its shares."""

    uuid: str
    index: int = 0
    minor: int = 0
    name: str = ""
    memory_mib: int = 0
    pci_bus_id: str = ""
    numa_node: int | None = None
    compute_capability: str = ""
    present: bool = True
    health: str = ""
    health_reason: str = ""
    health_changed: When = When()
    usage: UsageView | None = None
    holders: tuple[str, ...] = ()
    max_holders: int | None = None
    mig_enabled: bool = False
    mig_instances: tuple[mig.MigView, ...] = ()
    links: dict[str, dict[str, int]] = {}
    use: UseView = UseView()


class ShareView(msgspec.Struct, frozen=True):
    """A part of one device; 0 where nothing is limited."""

    device: str
    gpu: str = ""
    gpu_index: int | None = None
    memory_mib: int = 0
    cores_percent: int = 0
    exclusive: bool = False


class GrantView(msgspec.Struct, frozen=True):
    """The shares that one container holds through one resource;
    its names are empty until the kubelet's records tell them.
    """

    number: int
    family: str = ""
    resource: str = ""
    state: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    ids: tuple[str, ...] = ()  # the first of them, where there are very many
    ids_total: int = 0
    shares: tuple[ShareView, ...] = ()
    reserved: When = When()
    limit: str = ""  # a `LimitState`; empty while the container's share is not decided
    limit_reason: str = ""

    @property
    def pod_name(self) -> str:
        """``namespace/name``; the UID, or a word for "not known yet",
        until the kubelet has named the pod.
        """
        return f"{self.namespace}/{self.pod}" if self.pod else self.pod_uid or "(not named yet)"


class PodView(msgspec.Struct, frozen=True):
    """A pod and what its containers hold."""

    pod: str
    namespace: str = ""
    name: str = ""
    uid: str = ""
    grants: tuple[GrantView, ...] = ()


class ResourceView(msgspec.Struct, frozen=True):
    """A resource and its plugin server."""

    resource: str
    family: str = ""
    # how the holders of one device share it, where ids name devices: none, time-slicing, mps,
    # mps-host
    sharing: str = ""
    state: str = ""
    ready: bool = False
    stream_open: bool = False
    endpoint: str = ""
    registered: When = When()
    registrations: int = 0
    registration_failures: int = 0
    streams_opened: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    ids: int = 0
    ids_healthy: int = 0
    ids_held: int = 0
    ids_free: int | None = None
    # False: the ids are there for schedulers to count, and the GPUs show the actual use
    ids_booked: bool = True
    allocations: int = 0
    allocations_refused: int = 0
    allocate_seconds_last: float = 0.0
    allocate_seconds_sum: float = 0.0
    preferred_calls: int = 0
    pre_starts: int = 0
    pre_starts_refused: int = 0
    last_error: str = ""
    held_back: tuple[HeldBackView, ...] = ()  # why fewer ids are healthy than there are


class NvmlView(msgspec.Struct, frozen=True):
    """The thread that owns NVML; ``call``, ``gpu`` and ``hung`` describe a call
    that does not return.
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
    """One spec: its path, its devices, when it was made, and why it is not as it should be."""

    kind: str = ""
    path: str = ""
    devices: tuple[str, ...] = ()
    made: When = When()
    error: str = ""


class CdiView(msgspec.Struct, frozen=True):
    """The state of CDI; ``source`` is ``generated`` or ``toolkit``,
    and empty where containers receive no CDI names.
    """

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecView, ...] = ()


class Overview(msgspec.Struct, frozen=True):
    """The whole node on one page: ``/``, ``/debug/status`` and ``vgpu-agent status``."""

    node: str
    version: str = ""
    commit: str = ""
    simulated: bool = False
    ready: bool = False
    alive: bool = False
    started: When = When()
    driver_version: str = ""
    cuda_version: str = ""
    problems: tuple[problems.ProblemView, ...] = ()
    gpus: tuple[GpuView, ...] = ()
    resources: tuple[ResourceView, ...] = ()
    pods: tuple[PodView, ...] = ()
    binding: BindingView = BindingView()
    refusals: tuple[RefusalView, ...] = ()


def gpu_of_devices(status: AgentStatus) -> dict[str, Gpu]:
    """The GPU below each device: itself for a GPU, its parent for a MIG instance."""
    gpus = status.inventory.gpus
    return {gpu.uuid: gpu for gpu in gpus} | {
        mig.uuid: gpu for gpu in gpus for mig in gpu.mig_instances
    }


def live_grants(status: AgentStatus) -> Iterator[Grant]:
    """The grants that still hold something."""
    return (grant for grant in status.ledger.grants if grant.state is not GrantState.RELEASED)


def grants(status: AgentStatus, now: float) -> tuple[GrantView, ...]:
    """Every live grant, the oldest first."""
    known = Limits(status)
    return tuple(
        grant(status, one, now, known)
        for one in sorted(live_grants(status), key=lambda one: one.number)
    )


def grant(status: AgentStatus, one: Grant, now: float, known: Limits | None = None) -> GrantView:
    """Show one grant; ``known`` are the snapshot's limits, for callers that show many."""
    owner, devices = one.owner, gpu_of_devices(status)
    limit = (known or Limits(status)).of(one)
    return view(
        GrantView,
        one,
        now,
        namespace=owner.namespace if owner else "",
        pod=owner.pod if owner else "",
        pod_uid=owner.pod_uid if owner else "",
        container=owner.container if owner else "",
        ids=one.ids[:_SHOWN_IDS],
        ids_total=len(one.ids),
        shares=tuple(_share(share, devices.get(share.device), now) for share in one.shares),
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
    """List grants by pod. Grants that the kubelet's records do not name yet form one entry
    without a name.
    """
    by_pod: dict[tuple[str, str], list[GrantView]] = {}
    for one in grants(status, now):
        by_pod.setdefault((one.pod_name, one.pod_uid), []).append(one)
    found = []
    for (name, uid), held in sorted(by_pod.items()):
        named = held[0]
        found.append(PodView(name, named.namespace, named.pod, uid, tuple(held)))
    return tuple(found)


def gpus(status: AgentStatus, now: float) -> tuple[GpuView, ...]:
    """Every GPU by index, with health, usage and holders."""
    holders: dict[str, dict[str, None]] = {}  # a dict keeps the order and drops repetitions
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
        usage=_usage(usage, now) if usage else None,
        holders=holders,
        max_holders=max_holders(gpu, status),
        mig_instances=tuple(
            mig.instance_view(gpu, instance, now) for instance in gpu.mig_instances
        ),
        links={
            far: {
                "pci": link.pci,
                "nvlinks": link.nvlinks,
                "switch_links": link.switch_links,
            }
            for (near, far), link in status.inventory.links.items()
            if near == gpu.uuid
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
    """Count the shares that the GPU and its MIG instances may give together;
    None when the ledger offers nothing on it.
    """
    found = [
        status.ledger.capacity[uuid]
        for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig_instances))
        if uuid in status.ledger.capacity
    ]
    return sum(found) if found else None


def ids_held(status: AgentStatus) -> dict[str, int]:
    """Count the ids of each resource that containers hold."""
    held: dict[str, int] = {}
    for grant in live_grants(status):
        held[grant.resource] = held.get(grant.resource, 0) + len(grant.ids)
    return held


def resources(status: AgentStatus, now: float) -> tuple[ResourceView, ...]:
    """Every resource and its plugin server."""
    held = ids_held(status)
    return tuple(
        _resource(plugin, held.get(plugin.resource, 0), status, now) for plugin in status.plugins
    )


def withheld(status: AgentStatus) -> dict[str, str]:
    """The resources that have no plugin server, and why not."""
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
    """The NVML thread."""
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
    """The whole node on one page."""
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
        binding=how_bound.binding_view(status.binding, now),
        refusals=how_bound.refusals(status, now),
    )


def cdi(status: CdiStatus, now: float) -> CdiView:
    """Show how containers receive their devices."""
    return view(
        CdiView, status, now, specs=tuple(view(CdiSpecView, each, now) for each in status.specs)
    )


def is_simulated(status: AgentStatus) -> bool:
    """Tell whether GPUs are simulated, by the settings or by the library:
    better one warning too many.
    """
    return status.simulated or status.inventory.simulated
