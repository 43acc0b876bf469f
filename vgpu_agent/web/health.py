"""The trouble of an Unhealthy GPU or MIG instance, as JSON and in sentences: since when, the
causes, whether it answers, when it is offered again, and the remedy.

Used by `views`, `mig`, `problems` and `explain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.web.shapes import When, when

if TYPE_CHECKING:
    from vgpu_agent.model import Health


class CauseView(msgspec.Struct, frozen=True):
    """One cause. ``code`` is its short name, such as ``XID 79``; ``remedy`` is the short name of
    what helps against this cause alone.
    """

    code: str
    text: str = ""
    remedy: str = ""
    since: When = When()


class IllnessView(msgspec.Struct, frozen=True):
    """The trouble of an Unhealthy device.

    Attributes:
        causes: the worst first.
        remedy: a sentence.
        answers: it answered the last reading of its state (by NVML); null when there was none since
            its last new error.
        offered_again: the time from which new containers get it if nothing else happens; null while
            it needs more than time, such as a reset.
        offered_again_in_seconds: the same as a countdown; 0 when it is due.
    """

    causes: tuple[CauseView, ...] = ()
    remedy: str = ""
    answers: bool | None = None
    offered_again: When = When()
    offered_again_in_seconds: float | None = None


def illness(health: Health, gpu: str, now: float) -> IllnessView | None:
    """Return the view of the trouble; None for a healthy device.

    Args:
        health: of the device.
        gpu: the UUID of the device's GPU.
        now: unix seconds.
    """
    if health.ok:
        return None
    return IllnessView(
        causes=tuple(
            CauseView(
                code=cause.code,
                text=cause.text,
                remedy=cause.remedy.value,
                since=when(cause.since, now),
            )
            for cause in health.causes
        ),
        remedy=remedy(health, gpu),
        answers=health.answers,
        offered_again=when(health.offered_at, now),
        offered_again_in_seconds=(
            round(max(0.0, health.offered_at - now), 3) if health.offered_at else None
        ),
    )


def remedy(health: Health, gpu: str) -> str:
    """Return the remedy as a sentence without its full stop; empty where there is none."""
    return health.remedy.sentence(gpu) if health.remedy else ""


def trouble_text(health: Health, now: float, *, gone: bool = False) -> str:
    """Tell the trouble of a device: the predicate of a sentence, without its full stop and without
    the remedy.

    Args:
        health: of the device, which is not healthy or gone.
        now: unix seconds.
        gone: the driver no longer lists it.

    In the text a GPU "stays quiet" while it has no new error.
    """
    state = "gone" if gone else "unhealthy"
    if health.since and not health.ok:
        state = f"has been {state} since {clock(health.since)} ({span(now - health.since)})"
    else:
        state = f"is {state}"
    parts = [f"{state}: {health.reason or 'it no longer answers'}"]
    others = [cause.text for cause in health.causes[1:] if cause.text not in health.reason]
    if others:
        parts.append(f"other causes: {', '.join(others)}")
    if health.answers is not None:
        parts.append("it answers now" if health.answers else "it does not answer")
    if health.offered_at > now:
        parts.append(
            f"it is offered again at {clock(health.offered_at)}, in "
            f"{span(health.offered_at - now)}, if it stays quiet"
        )
    elif health.offered_at:
        parts.append("it is offered again after the next reading, if it stays quiet")
    return "; ".join(parts)


def clock(unix_seconds: float) -> str:
    """Return the time in UTC, in whole seconds."""
    return str(when(int(unix_seconds), 0.0).at).replace(".000Z", "Z")


def span(seconds: float) -> str:
    """Return a duration in its largest useful unit."""
    whole = max(0, int(seconds))
    return (
        f"{whole} s"
        if whole < 600
        else f"{whole // 60} min"
        if whole < 36000
        else f"{whole // 3600} h"
    )
