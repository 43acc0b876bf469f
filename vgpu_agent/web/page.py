"""The overview of a node, as tables for a terminal.

``vgpu-agent status`` and ``curl :9394/`` print them. Pure functions on `views.Overview`. The page
for a browser is in `dashboard`. Imports no HTTP library, because the command line uses this module
as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vgpu_agent.web.binding import FamilyView
    from vgpu_agent.web.explain import Explanation
    from vgpu_agent.web.shapes import When
    from vgpu_agent.web.views import GpuView, Overview

# The most holders in the row of a GPU. There may be 80, and the pods have a table of their own.
_SHOWN_HOLDERS = 2

SIMULATED = "SIMULATED GPUs: nothing here is real hardware"

# title, columns, rows, and the text that stands in for an empty table
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], str]


def as_text(overview: Overview) -> str:
    """Return the overview as aligned columns, for a terminal."""
    lines = [_headline(overview)]
    if overview.simulated:
        lines.append(f"*** {SIMULATED} ***")
    for title, columns, rows, text_if_empty in _tables(overview):
        lines += ["", title]
        lines += _columns((columns, *rows)) if rows else [f"  {text_if_empty}"]
    return "\n".join(lines) + "\n"


def explained(explanation: Explanation) -> str:
    """Return the answer of ``vgpu-agent status --pod``, for a terminal: sentences, the sources that
    were searched, and the last events of the pod.
    """
    lines = [
        f"pod {explanation.pod}",
        *(f"  {_one_line(sentence)}" for sentence in explanation.answer),
    ]
    lines += ["", "Sources", *(f"  {_one_line(place)}" for place in explanation.sources)]
    if explanation.events:
        rows = [
            (f"{_since(event.when)} ago", event.event, _facts(event.facts))
            for event in explanation.events
        ]
        lines += ["", "Events", *_columns(rows)]
    return "\n".join(lines) + "\n"


def _facts(facts: Mapping[str, object]) -> str:
    return _one_line(
        ", ".join(f"{name}: {value}" for name, value in facts.items() if name != "pod")
    )


def _headline(overview: Overview) -> str:
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
    return " · ".join(parts)


def _tables(overview: Overview) -> Iterator[_Table]:
    given = ("GIVEN",) if _gives_amounts(overview) else ()
    yield (
        "GPUs",
        ("INDEX", "NAME", "HEALTH", "MEMORY (MiB)", "USE", "SHARES", *given, "UUID", "HELD BY"),
        _gpu_rows(overview),
        "none",
    )
    if _has_several_families(overview):
        yield (
            "GPUs by family",
            ("GPU", "SERVES", "FOR", "PODS", "WAITING", "FREED BY"),
            _use_rows(overview),
            "none",
        )
    yield (
        "Resources",
        ("NAME", "STATE", "IDS", "HEALTHY", "HELD", "FREE"),
        _resource_rows(overview),
        "none offered",
    )
    if held_back := _held_back_rows(overview):
        yield "Held back", ("RESOURCE", "IDS", "WHY"), held_back, "none"
    if overview.binding.families:
        yield "Families", ("FAMILY", "STATE", "BOUND", "WHY"), _family_rows(overview), "none"
    yield (
        "Pods",
        ("POD", "CONTAINER", "RESOURCE", "GPU", "STATE", "LIMIT", "KNOWN FOR"),
        _pod_rows(overview),
        "no pod holds a share",
    )
    if overview.refusals:
        yield (
            "Refused starts",
            ("POD", "CONTAINER", "FOR", "TIMES", "REASON"),
            _refusal_rows(overview),
            "none",
        )
    problems: list[tuple[str, ...]] = [
        (problem.part, _one_line(problem.reason)) for problem in overview.problems
    ]
    yield "Problems", ("PART", "REASON"), problems, "none known"


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
    return [
        (
            str(gpu.index),
            gpu.use.family or "-",
            f"{_since(gpu.use.since)}{' or longer' if gpu.use.or_earlier else ''}",
            str(gpu.use.pods_total),
            _waiting(gpu),
            gpu.use.freed_by or "-",
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
            ", ".join(
                share.device if share.gpu_index is None else str(share.gpu_index)
                for share in grant.shares
            )
            or "-",
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
    return "nothing here" if family.idle else "NOT OFFERED"


def _refusal_rows(overview: Overview) -> list[tuple[str, ...]]:
    return [
        (
            refusal.pod_name,
            refusal.container,
            _since(refusal.since),
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


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())
