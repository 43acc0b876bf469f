"""The values of the metrics: small functions from one `Moment` to rows of label values and a
number.

Used by the tables in `catalogue` and `catalogue_binding`. A row exists while the GPU, resource or
other object that it describes exists.
"""

from __future__ import annotations

import collections
import itertools
import platform
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.status import NvmlState, ProblemKind
from vgpu_agent.web import binding, mig, problems, views
from vgpu_agent.web.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.concurrency import TaskReport
    from vgpu_agent.model import Gpu, GpuUsage
    from vgpu_agent.process import ProcessFacts
    from vgpu_agent.status import (
        AgentStatus,
        Histogram,
        MpsStatus,
        PluginStatus,
        WatchStatus,
        WriterStatus,
    )

MIB = 1024 * 1024


class Moment(msgspec.Struct, frozen=True):
    """The input of one scrape: the snapshot, the process, and the time (unix seconds)."""

    status: AgentStatus
    process: ProcessFacts
    now: float


Row = tuple[tuple[str, ...], float]  # label values, value


def one(value: Callable[[Moment], float | None]) -> Callable[[Moment], Iterator[Row]]:
    """One series without labels; none while ``value`` is None."""

    def read(moment: Moment) -> Iterator[Row]:
        if (found := value(moment)) is not None:
            yield (), found

    return read


def each_gpu(value: Callable[[Gpu], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series per GPU."""
    return lambda moment: (((gpu.uuid,), value(gpu)) for gpu in moment.status.inventory.gpus)


def each_usage(value: Callable[[GpuUsage], float | None]) -> Callable[[Moment], Iterator[Row]]:
    """One series per GPU whose driver reports the value."""

    def read(moment: Moment) -> Iterator[Row]:
        for usage in moment.status.usage:
            if (found := value(usage)) is not None:
                yield (usage.uuid,), found

    return read


def each_plugin(value: Callable[[PluginStatus], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series per resource."""
    return lambda moment: (((plugin.resource,), value(plugin)) for plugin in moment.status.plugins)


def each_task(value: Callable[[TaskReport, float], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series per loop of the agent."""
    return lambda moment: (((task.name,), value(task, moment.now)) for task in moment.status.tasks)


def histogram(
    histogram_of: Callable[[AgentStatus], Histogram],
) -> tuple[Callable[[Moment], Iterator[Row]], ...]:
    """Return the readers of a histogram without labels: of its sum, its count and its buckets."""

    def buckets(moment: Moment) -> Iterator[Row]:
        found = histogram_of(moment.status)
        bounds = (*map(str, found.bounds), "+Inf")
        yield from (
            ((bound,), number)
            for bound, number in zip(bounds, itertools.accumulate(found.counts), strict=True)
        )

    return (
        one(lambda moment: histogram_of(moment.status).total),
        one(lambda moment: sum(histogram_of(moment.status).counts)),
        buckets,
    )


def xids(moment: Moment) -> Iterator[Row]:
    """Yield how often each XID was reported for each GPU."""
    yield from moment.status.nvml.history.xids.items()


def health_transitions(moment: Moment) -> Iterator[Row]:
    """Yield how often each GPU changed to each state; 0 for the states that it never had."""
    counted = moment.status.nvml.history.transitions
    for gpu in moment.status.inventory.gpus:
        for state in ("healthy", "unhealthy", "lost"):
            yield (gpu.uuid, state), counted.get((gpu.uuid, state), 0)


def share_seconds(moment: Moment) -> Iterator[Row]:
    """Yield how much each pod has held of each resource: its number of ids × seconds, summed."""
    yield from moment.status.ledger.share_seconds.items()


def build_info(moment: Moment) -> Iterator[Row]:
    """The running build."""
    yield (moment.status.version, moment.status.commit, platform.python_version()), 1


def problems_by_kind(moment: Moment) -> Iterator[Row]:
    """Count the problems of each kind, also of kinds without any."""
    found = collections.Counter(
        problem.kind for problem in problems.known(moment.status, moment.now)
    )
    return (((kind.value,), found[kind]) for kind in ProblemKind)


def driver_info(moment: Moment) -> Iterator[Row]:
    """The driver, once it has answered."""
    if moment.status.inventory.driver_version:
        yield (moment.status.inventory.driver_version, moment.status.inventory.cuda_version), 1


def gpu_info(moment: Moment) -> Iterator[Row]:
    """Describe each GPU in labels."""
    for gpu in moment.status.inventory.gpus:
        numa = "" if gpu.numa_node is None else str(gpu.numa_node)
        minor = "" if gpu.minor < 0 else str(gpu.minor)
        yield (
            (
                gpu.uuid,
                str(gpu.index),
                minor,
                gpu.name,
                gpu.pci_bus_id,
                numa,
                "true" if gpu.mig_enabled else "false",
            ),
            1,
        )


def gpu_unhealthy_info(moment: Moment) -> Iterator[Row]:
    """Describe the worst cause of each Unhealthy GPU, and what helps, in labels."""
    for gpu in moment.status.inventory.gpus:
        health = gpu.health
        if health.causes and health.remedy:
            yield (gpu.uuid, health.causes[0].code, health.remedy.value), 1


def gpu_offered_again(moment: Moment) -> Iterator[Row]:
    """Yield the time at which each Unhealthy GPU is offered again, where it only has to go on
    without errors until then.
    """
    for gpu in moment.status.inventory.gpus:
        if gpu.health.offered_at:
            yield (gpu.uuid,), gpu.health.offered_at


def gpu_memory_total(moment: Moment) -> Iterator[Row]:
    """Yield the memory of each GPU that has memory of its own."""
    return (
        ((gpu.uuid,), gpu.memory_mib * MIB)
        for gpu in moment.status.inventory.gpus
        if not gpu.integrated
    )


def mig_instances_healthy(moment: Moment) -> Iterator[Row]:
    """Yield 1 for each MIG instance that may be granted, else 0."""
    for gpu in moment.status.inventory.gpus:
        for instance in gpu.mig_instances:
            yield (
                (gpu.uuid, instance.uuid, instance.profile),
                not mig.why_withheld(gpu, instance),
            )


def grants_on_missing_devices(moment: Moment) -> Iterator[Row]:
    """Grants on devices that the node no longer has, by resource, including resources that are no
    longer offered.
    """
    counts = collections.Counter(
        grant.resource for grant, _ in mig.on_missing_devices(moment.status)
    )
    names = {plugin.resource for plugin in moment.status.plugins} | counts.keys()
    return (((name,), counts[name]) for name in sorted(names))


def gpu_grants(moment: Moment) -> Iterator[Row]:
    """Shares held of each GPU, MIG instances included."""
    devices = views.gpu_of_devices(moment.status)
    held = dict.fromkeys((gpu.uuid for gpu in moment.status.inventory.gpus), 0)
    for grant in views.live_grants(moment.status):
        for share in grant.shares:
            uuid = devices[share.device].uuid if share.device in devices else share.device
            held[uuid] = held.get(uuid, 0) + 1
    return (((uuid,), count) for uuid, count in held.items())


def gpu_serves_since(moment: Moment) -> Iterator[Row]:
    """Yield the time since which each GPU with a grant has served its family."""
    return (((use.gpu, use.family), use.since) for use in moment.status.ledger.uses if use.family)


def gpu_claims(moment: Moment) -> Iterator[Row]:
    """Pods that wait, by GPU and family."""
    return ((labels, len(since)) for labels, since in _claims(moment).items())


def gpu_claims_oldest(moment: Moment) -> Iterator[Row]:
    """Yield how long the oldest claim has been waiting."""
    return (
        (labels, max(0.0, moment.now - min(since))) for labels, since in _claims(moment).items()
    )


def _claims(moment: Moment) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for use in moment.status.ledger.uses:
        for claim in use.claims:
            found.setdefault((use.gpu, claim.family), []).append(claim.since)
    return found


def gpu_grants_allowed(moment: Moment) -> Iterator[Row]:
    """The maximum number of holders of each GPU."""
    for gpu in moment.status.inventory.gpus:
        if (allowed := views.max_holders(gpu, moment.status)) is not None:
            yield (gpu.uuid,), allowed


def grant_info(moment: Moment) -> Iterator[Row]:
    """Shares by their labels. The value is a count, because two grants may have equal labels:
    grants without an owner, or of a StatefulSet pod and its predecessor.
    """
    devices = views.gpu_of_devices(moment.status)
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for grant in views.live_grants(moment.status):
        owner = grant.owner
        who = (
            (owner.namespace, owner.pod or owner.pod_uid, owner.container)
            if owner
            else ("", "", "")
        )
        for share in grant.shares:
            gpu = devices[share.device].uuid if share.device in devices else share.device
            counts[*who, grant.resource, gpu, share.device, grant.state.value] += 1
    return ((labels, count) for labels, count in counts.items())


def ids_held(moment: Moment) -> Iterator[Row]:
    """Ids in use, by resource."""
    held = views.ids_held(moment.status)
    return (((plugin.resource,), held.get(plugin.resource, 0)) for plugin in moment.status.plugins)


def ids_free(moment: Moment) -> Iterator[Row]:
    """Free ids by resource."""
    return (((resource,), free) for resource, free in moment.status.ledger.free.items())


def allocations(moment: Moment) -> Iterator[Row]:
    """Allocate calls by result; the plugin counts the refused ones among all."""
    for plugin in moment.status.plugins:
        yield (plugin.resource, "granted"), plugin.allocations - plugin.allocations_refused
        yield (plugin.resource, "refused"), plugin.allocations_refused


def nvml_up(moment: Moment) -> float | None:
    """Tell whether the driver answers. None where it is not used: on a Tegra processor."""
    state = moment.status.nvml.state
    return None if state is NvmlState.UNUSED else state is NvmlState.ANSWERING


def nvml_hung_seconds(moment: Moment) -> float:
    """Return how long a call has been hanging."""
    nvml = moment.status.nvml
    return max(0.0, moment.now - nvml.since) if nvml.state is NvmlState.HUNG else 0.0


def inventory_age(moment: Moment) -> float | None:
    """Seconds since the GPUs were enumerated."""
    return max(0.0, moment.now - moment.status.inventory_at) if moment.status.inventory_at else None


def usage_age(moment: Moment) -> float | None:
    """Seconds since usage was read."""
    return max(0.0, moment.now - moment.status.usage_at) if moment.status.usage_at else None


def binding_info(moment: Moment) -> Iterator[Row]:
    """The binding mode, while a family whose pods decide is on; ``unknown`` while it depends
    on the Node, and that has not been read yet.
    """
    if any(family.decided_by_pod for family in moment.status.binding.families):
        yield (binding.mode_word(moment.status.binding) or "unknown",), 1


def family_offered(moment: Moment) -> Iterator[Row]:
    """Yield 1 for each family that is offered, else 0."""
    return (((family.name,), family.offered) for family in moment.status.binding.families)


def grants(moment: Moment) -> Iterator[Row]:
    """Live grants by family and state."""
    counts = collections.Counter(
        (grant.family, grant.state.value) for grant in views.live_grants(moment.status)
    )
    return iter(counts.items())


def limits(moment: Moment) -> Iterator[Row]:
    """Grants whose shares are decided, by the state of their limit, such as in force, not in force,
    or only configured.
    """
    limits_of_grants = Limits(moment.status)
    found = (
        (grant.family, limits_of_grants.of(grant)) for grant in views.live_grants(moment.status)
    )
    counts = collections.Counter(
        (family, limit.state.value) for family, limit in found if limit is not None
    )
    return iter(counts.items())


def pre_starts(moment: Moment) -> Iterator[Row]:
    """PreStartContainer calls by result; the plugin counts the refused ones among all."""
    for plugin in moment.status.plugins:
        yield (plugin.resource, "granted"), plugin.pre_starts - plugin.pre_starts_refused
        yield (plugin.resource, "refused"), plugin.pre_starts_refused


def refused_starts(moment: Moment) -> Iterator[Row]:
    """Containers whose start is refused now, for good ("true") or to be tried again. Both series
    always exist, so that an alert can use them.
    """
    final = sum(refusal.final for refusal in moment.status.binding.refusals)
    yield ("true",), final
    yield ("false",), len(moment.status.binding.refusals) - final


def overcommitted(moment: Moment) -> Iterator[Row]:
    """Yield two series for each overcommitted GPU: the percent of compute, and the number of
    holders, that schedulers have assigned beyond what it has.
    """
    for each in moment.status.ledger.overcommitted:
        yield (
            (each.resource, each.device, "cores"),
            max(0, each.cores_percent - each.cores_limit_percent),
        )
        yield (each.resource, each.device, "holders"), max(0, each.holders - each.holders_limit)


def api_requests(moment: Moment) -> Iterator[Row]:
    """Requests to the API server by verb, resource and outcome."""
    return iter(moment.status.cluster.requests.items())


def each_watch(
    value: Callable[[WatchStatus, float], float | None],
) -> Callable[[Moment], Iterator[Row]]:
    """One series per watch; none while ``value`` is None."""

    def read(moment: Moment) -> Iterator[Row]:
        for watch in moment.status.cluster.watches:
            if (found := value(watch, moment.now)) is not None:
                yield (watch.name,), found

    return read


def each_writer(value: Callable[[WriterStatus], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series per kind of writes to the API server."""
    return lambda moment: (
        ((writer.name,), value(writer)) for writer in moment.status.cluster.writers
    )


def writes(moment: Moment) -> Iterator[Row]:
    """Writes to the API server by result; a dropped one was given up."""
    for writer in moment.status.cluster.writers:
        yield (writer.name, "written"), writer.written
        yield (writer.name, "failed"), writer.failed
        yield (writer.name, "dropped"), writer.dropped


def evictions(moment: Moment) -> Iterator[Row]:
    """Evictions of pods that cannot start on this node, by result."""
    return (((result,), count) for result, count in moment.status.cluster.evictions.items())


def gpu_evictions(moment: Moment) -> Iterator[Row]:
    """Evictions of pods that hold a dead GPU, i.e. one that is lost or Unhealthy, by result."""
    return (((result,), count) for result, count in moment.status.cluster.gpu_evictions.items())


def rescued(moment: Moment) -> Iterator[Row]:
    """Failed pods of this node by result: evicted, recreated, or left alone."""
    return (((result,), count) for result, count in moment.status.cluster.rescued.items())


def each_daemon(value: Callable[[MpsStatus], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series for each MPS control daemon;
    none on a node without a resource that is shared with MPS.
    """
    return lambda moment: (((daemon.resource,), value(daemon)) for daemon in moment.status.mps)


def mib(value: int | None) -> float | None:
    """Convert MiB to bytes; None stays None."""
    return None if value is None else value * MIB
