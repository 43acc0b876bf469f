"""The answers of ``/debug`` as text for a terminal: the overview of a node, its GPUs, pods and
events, and the explanation of a pod.

``vgpu-agent status``, ``gpus``, ``pods``, ``events``, ``explain`` and ``curl :9394/`` print them.
Pure functions on `views`. Their ``layout`` is the width of the lines, and whether there are
colours. The page for a browser is in `dashboard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_agent.web import terminal
from vgpu_agent.web.terminal import PLAIN, Layout, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.web.binding import FamilyView
    from vgpu_agent.web.explain import Explanation
    from vgpu_agent.web.shapes import When
    from vgpu_agent.web.views import GpuView, GrantView, Overview, PodView

# The most holders in the row of a GPU. There may be 80, and the pods have a table of their own.
_SHOWN_HOLDERS = 2

_HEALTHY, _PENDING = "Healthy", "Pending"  # a GPU's health, a pod's phase

SIMULATED = "SIMULATED GPUs: nothing here is real hardware"


def as_text(overview: Overview, layout: Layout = PLAIN) -> str:
    """Return the overview as tables."""
    lines = _headline(overview, layout)
    if overview.simulated:
        lines.append(f"*** {SIMULATED} ***")
    for table in _tables(overview):
        lines += ["", *terminal.table(table, layout)]
    return _joined(lines)


def explained(explanation: Explanation, layout: Layout = PLAIN) -> str:
    """Return the answer of ``vgpu-agent explain``: sentences, the sources that were searched, and
    the last events of the pod.
    """
    lines = [f"pod {explanation.pod}"]
    for sentence in explanation.answer:
        lines += terminal.sentence(_one_line(sentence), layout, indent="  ")
    lines += ["", "Sources"]
    for place in explanation.sources:
        lines += terminal.sentence(_one_line(place), layout, indent="  ")
    if explanation.events:
        rows = [
            (_age(event.when), event.event, _facts(event.facts, without="pod"))
            for event in explanation.events
        ]
        lines += ["", *terminal.table(Table("Events", ("WHEN", "EVENT", "FACTS"), rows), layout)]
    return _joined(lines)


def devices(answer: Mapping[str, Any], layout: Layout = PLAIN) -> str:
    """Return the answer of ``vgpu-agent gpus``: each GPU with its figures and its holders, its MIG
    instances, and the causes and remedies of those that are not healthy.
    """
    gpus: tuple[GpuView, ...] = answer["gpus"]
    rows = [
        (
            str(gpu.index),
            gpu.name,
            _health(gpu),
            _memory(gpu),
            _figure(gpu, "utilisation_percent", " %"),
            _figure(gpu, "temperature_celsius", " C"),
            _figure(gpu, "power_watts", " W"),
            gpu.uuid,
            gpu.pci_bus_id or "-",
            "-" if gpu.numa_node is None else str(gpu.numa_node),
            ", ".join(gpu.holders) or "-",
        )
        for gpu in gpus
    ]
    columns: tuple[str, ...] = (
        *("INDEX", "NAME", "HEALTH", "MEMORY (MiB)", "USE", "TEMP", "POWER", "UUID", "PCI", "NUMA"),
        "HELD BY",
    )
    lines = terminal.table(Table("GPUs", columns, rows), layout)
    instances = [
        (str(gpu.index), each.profile, each.health, str(each.memory_mib), each.uuid)
        for gpu in gpus
        for each in gpu.mig_instances
    ]
    if instances:
        columns = ("GPU", "PROFILE", "HEALTH", "MEMORY (MiB)", "UUID")
        lines += ["", *terminal.table(Table("MIG instances", columns, instances), layout)]
    ill = [
        (str(gpu.index), _age(gpu.health_changed), _cause(gpu), _remedy(gpu))
        for gpu in gpus
        if gpu.health != _HEALTHY or not gpu.present
    ]
    if ill:
        columns = ("GPU", "SINCE", "CAUSE", "REMEDY")
        lines += ["", *terminal.table(Table("Not healthy", columns, ill), layout)]
    if answer["failures"]:
        failed = [(_one_line(str(text)),) for text in answer["failures"]]
        lines += ["", *terminal.table(Table("Did not answer", ("REASON",), failed), layout)]
    return _joined(lines)


def pods(answer: Mapping[str, Any], layout: Layout = PLAIN) -> str:
    """Return the answer of ``vgpu-agent pods``: each container with its shares and how they are
    limited, and the pods of this node that ask for GPUs and have none yet.
    """
    held: tuple[PodView, ...] = answer["pods"]
    rows = [
        (
            pod.pod,
            grant.container or "-",
            grant.resource,
            _gpus_of(grant),
            _amounts(grant),
            grant.limit or "-",
            grant.state,
            _since(grant.reserved),  # since Allocate, or since a restarted agent found the grant
            ", ".join(dict.fromkeys(share.device for share in grant.shares)) or "-",
        )
        for pod in held
        for grant in pod.grants
    ]
    columns: tuple[str, ...] = (
        *("POD", "CONTAINER", "RESOURCE", "GPU", "SHARE", "LIMIT", "STATE", "KNOWN FOR"),
        "DEVICES",
    )
    lines = terminal.table(Table("Pods", columns, rows, "no pod holds a share"), layout)
    names = {pod.pod for pod in held}
    waiting = [
        (
            pod["pod"],
            pod["phase"],
            ", ".join(
                f"{count} {name}"
                for container in pod["containers"]
                for name, count in container["limits"].items()
            ),
        )
        for pod in answer["watched_pods"]
        if pod["pod"] not in names and pod["phase"] == _PENDING
        if any(container["limits"] for container in pod["containers"])
    ]
    if waiting:
        columns = ("POD", "PHASE", "ASKS FOR")
        lines += ["", *terminal.table(Table("Without a share", columns, waiting), layout)]
        lines.append("  vgpu-agent explain NAMESPACE/POD tells why.")
    return _joined(lines)


def events(answer: Mapping[str, Any], layout: Layout = PLAIN) -> str:
    """Return the answer of ``vgpu-agent events``: what happened and what was decided, the latest
    last.
    """
    rows = [
        (f"{_duration(event['seconds_ago'])} ago", event["event"], _facts(event["facts"]))
        for event in answer["events"]
    ]
    columns = ("WHEN", "EVENT", "FACTS")
    lines = terminal.table(
        Table("Events", columns, rows, "none of the kind that was asked"), layout
    )
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _figure(gpu: GpuView, name: str, unit: str) -> str:
    value = getattr(gpu.usage, name) if gpu.usage else None
    return "-" if value is None else f"{value:.0f}{unit}"


def _cause(gpu: GpuView) -> str:
    reason = _one_line(gpu.health_reason) or "it no longer answers"
    left = gpu.illness.offered_again_in_seconds if gpu.illness else None
    # "quiet": without a new error
    return reason if left is None else f"{reason}; offered again in {left:.0f} s if it stays quiet"


def _remedy(gpu: GpuView) -> str:
    return (_one_line(gpu.illness.remedy) if gpu.illness else "") or "-"


def _gpus_of(grant: GrantView) -> str:
    return (
        ", ".join(
            share.device if share.gpu_index is None else str(share.gpu_index)
            for share in grant.shares
        )
        or "-"
    )


def _amounts(grant: GrantView) -> str:
    memory = sum(share.memory_mib for share in grant.shares)
    cores = sum(share.cores_percent for share in grant.shares)
    limits = [f"{memory} MiB"] if memory else []
    limits += [f"{cores} %"] if cores else []
    return ", ".join(limits) or "-"


def _age(moment: When) -> str:
    return "-" if moment.seconds_ago is None else f"{_since(moment)} ago"


def _facts(facts: Mapping[str, object], *, without: str = "") -> str:
    return _one_line(
        ", ".join(f"{name}: {_fact(value)}" for name, value in facts.items() if name != without)
    )


def _fact(value: object) -> str:
    """Write a list without quotes, so that its ids can be copied."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _headline(overview: Overview, layout: Layout) -> list[str]:
    state = "ready" if overview.ready else "NOT READY" if overview.alive else "STUCK"
    parts = [
        f"node {overview.node}",
        state,
        f"vgpu-agent {overview.version}{f' ({overview.commit})' if overview.commit else ''}",
    ]
    if overview.started.seconds_ago is not None:
        parts.append(f"up {_duration(overview.started.seconds_ago)}")
    if overview.driver_version:
        cuda = f", CUDA {overview.cuda_version}" if overview.cuda_version else ""
        parts.append(f"driver {overview.driver_version}{cuda}")
    first, *others = terminal.parts(parts, " · ", layout)
    return [first.replace(f" {state}", f" {terminal.state(state, layout)}", 1), *others]


def _tables(overview: Overview) -> Iterator[Table]:
    given = ("GIVEN",) if _gives_amounts(overview) else ()
    yield Table(
        "GPUs",
        ("INDEX", "NAME", "HEALTH", "MEMORY (MiB)", "USE", "SHARES", *given, "UUID", "HELD BY"),
        _gpu_rows(overview),
        "none",
    )
    if _has_several_families(overview):
        yield Table(
            "GPUs by family",
            ("GPU", "SERVES", "FOR", "PODS", "WAITING", "FREED BY"),
            _use_rows(overview),
            "none",
        )
    yield Table(
        "Resources",
        ("NAME", "STATE", "IDS", "HEALTHY", "HELD", "FREE"),
        _resource_rows(overview),
        "none offered",
    )
    if held_back := _held_back_rows(overview):
        yield Table("Held back", ("RESOURCE", "IDS", "WHY"), held_back)
    if overview.binding.families:
        yield Table("Families", ("FAMILY", "STATE", "BOUND", "WHY"), _family_rows(overview))
    yield Table(
        "Pods",
        ("POD", "CONTAINER", "RESOURCE", "GPU", "STATE", "LIMIT", "KNOWN FOR"),
        _pod_rows(overview),
        "no pod holds a share",
        ("KNOWN FOR", "STATE"),  # left out, in this order, where the terminal is too narrow
    )
    if overview.refusals:
        yield Table(
            "Refused starts",
            ("POD", "CONTAINER", "FOR", "TIMES", "REASON"),
            _refusal_rows(overview),
            "none",
        )
    problems: list[tuple[str, ...]] = [
        (problem.part, _one_line(problem.reason)) for problem in overview.problems
    ]
    yield Table("Problems", ("PART", "REASON"), problems, "none known")


def _gpu_rows(overview: Overview) -> list[tuple[str, ...]]:
    return [
        (
            str(gpu.index),
            gpu.name,
            _health(gpu),
            _memory(gpu),
            f"{gpu.usage.utilisation_percent} %"
            if gpu.usage and gpu.usage.utilisation_percent is not None
            else "-",
            str(
                sum(
                    share.gpu == gpu.uuid
                    for pod in overview.pods
                    for grant in pod.grants
                    for share in grant.shares
                )
            )
            + (f"/{gpu.max_holders}" if gpu.max_holders is not None else ""),
            *((_given(overview, gpu),) if _gives_amounts(overview) else ()),
            gpu.uuid,
            _holders(gpu),
        )
        for gpu in overview.gpus
    ]


def _has_several_families(overview: Overview) -> bool:
    """Tell whether the node has several families. With one family, a table of families by GPU adds
    nothing.
    """
    configured = {family.family for family in overview.binding.families}
    # A family that was switched off may still serve a GPU.
    serving = {gpu.use.family for gpu in overview.gpus if gpu.use.family}
    return len(configured | serving) > 1


def _use_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Return for each GPU the family that has shares of it, since when, its pods, and who waits."""
    return [
        (
            str(gpu.index),
            gpu.use.family or "-",
            f"{_since(gpu.use.since)}{' or longer' if gpu.use.or_earlier else ''}",
            str(gpu.use.pods_total),
            _waiting(gpu),
            gpu.use.freed_by or "-",  # what must end before other families get the GPU
        )
        for gpu in overview.gpus
    ]


def _waiting(gpu: GpuView) -> str:
    if not gpu.use.waiting:
        return "-"
    first = gpu.use.waiting[0]
    more = f" and {gpu.use.waiting_total - 1} more" if gpu.use.waiting_total > 1 else ""
    return f"{first.pod} ({first.family}, {_since(first.since)}){more}"


def _held_back_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Return the ids of each resource that are not granted now, counted by the reason why."""
    return [
        (
            resource.resource,
            f"{each.ids} of {resource.ids}",
            _unless_problem(overview, each.reason),
        )
        for resource in overview.resources
        for each in resource.held_back
    ]


def _gives_amounts(overview: Overview) -> bool:
    """Tell whether a family of the node grants amounts of memory and compute. Grants of whole GPUs
    and of time-slicing replicas have no such figures.
    """
    return any(family.decided_by == "pod" for family in overview.binding.families)


def _given(overview: Overview, gpu: GpuView) -> str:
    """The memory and compute that all shares of the GPU have together."""
    shares = [
        share
        for pod in overview.pods
        for grant in pod.grants
        for share in grant.shares
        if share.gpu == gpu.uuid
    ]
    return (
        f"{sum(share.memory_mib for share in shares)} MiB, "
        f"{sum(share.cores_percent for share in shares)} %"
    )


def _health(gpu: GpuView) -> str:
    # The reason is in the table of problems. A sentence would make this column too wide.
    return gpu.health if gpu.present else "Gone"


def _holders(gpu: GpuView) -> str:
    more = len(gpu.holders) - _SHOWN_HOLDERS
    return (
        ", ".join(gpu.holders[:_SHOWN_HOLDERS]) + (f" and {more} more" if more > 0 else "") or "-"
    )


def _memory(gpu: GpuView) -> str:
    used = gpu.usage.memory_used_mib if gpu.usage else None
    return f"{'-' if used is None else used}/{gpu.memory_mib or '-'}"


def _resource_rows(overview: Overview) -> list[tuple[str, ...]]:
    return [
        (
            resource.resource,
            resource.state
            if resource.stream_open or not resource.registered.at
            else f"{resource.state}, stream closed",
            str(resource.ids),
            str(resource.ids_healthy),
            # ids that only schedulers count are not booked
            str(resource.ids_held) if resource.ids_booked else "-",
            str(resource.ids_free)
            if resource.ids_booked and resource.ids_free is not None
            else "-",
        )
        for resource in overview.resources
    ]


def _pod_rows(overview: Overview) -> list[tuple[str, ...]]:
    return [
        (
            pod.pod,
            grant.container or "-",
            grant.resource,
            _gpus_of(grant),
            grant.state,
            grant.limit or "-",
            _since(grant.reserved),
        )
        for pod in overview.pods
        for grant in pod.grants
    ]


def _family_rows(overview: Overview) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for family in overview.binding.families:
        by_pod = family.decided_by == "pod"
        # when a container's shares are decided
        bound = (overview.binding.mode or "not known yet") if by_pod else "in Allocate"
        why = overview.binding.reason if by_pod else "its ids name the GPU"
        rows.append(
            (
                family.family,
                _state_of(family),
                bound,
                _unless_problem(overview, family.trouble) or _one_line(why) or "-",
            )
        )
    return rows


def _unless_problem(overview: Overview, text: str) -> str:
    """Return ``text``, or a reference to the table of problems if that has it already."""
    if any(problem.reason in text for problem in overview.problems):
        return "see Problems"
    return _one_line(text)


def _state_of(family: FamilyView) -> str:
    if family.offered:
        return "offered"
    # `idle`: the node has no device for it, which is no fault
    return "nothing here" if family.idle else "NOT OFFERED"


def _refusal_rows(overview: Overview) -> list[tuple[str, ...]]:
    return [
        (
            refusal.pod_name,
            refusal.container,
            _since(refusal.since),
            # `final`: trying again cannot help
            f"{refusal.count}, final" if refusal.final else str(refusal.count),
            _one_line(refusal.text),
        )
        for refusal in overview.refusals
    ]


def _since(moment: When) -> str:
    return "-" if moment.seconds_ago is None else _duration(moment.seconds_ago)


def _duration(seconds: float) -> str:
    """Format a duration: ``42s``, ``5m00s``, ``3h20m``, ``12d4h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if days < 1 else f"{days}d{hours % 24}h"


def _one_line(text: str) -> str:
    return " ".join(text.split())
