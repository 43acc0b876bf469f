"""The use of each GPU as views (public JSON shapes, see `shapes`) and in sentences: the family that
it serves, since when, the pods that wait, and what frees it.

Used by `views` for every page, and by `explain`. Unlike refusals, these texts name other pods: they
are for the operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import listed
from vgpu_agent.web.shapes import When, view, when

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vgpu_agent.ledger.claims import Claim
    from vgpu_agent.ledger.uses import GpuUse, HeldBack
    from vgpu_agent.status import AgentStatus

_MAX_PODS = 64  # in a view
_NAMED_PODS = 3  # in a sentence
_MAX_CLAIMS = 64  # in a view of one GPU
_MAX_REASONS = 8  # why ids of one resource are not granted; the others are summed up in one view


class ClaimView(msgspec.Struct, frozen=True):
    """A pod that waits for a GPU, which is kept for it, and since when."""

    pod: str
    family: str = ""
    pod_uid: str = ""
    since: When = When()


class UseView(msgspec.Struct, frozen=True):
    """The use of a GPU.

    Attributes:
        family: the family that it serves; empty while no container has a share of it.
        since: when its oldest remaining share was granted.
        or_earlier: that share was found after a restart of the agent, and is older.
        pods: the first of the pods that have shares of it; ``pods_total`` counts them all, also
            those that the kubelet has not named yet.
        waiting: the first of the pods that wait for it, oldest first; ``waiting_total`` counts them
            all.
        freed_by: the event that makes it free for other families; empty while it is free.
    """

    family: str = ""
    since: When = When()
    or_earlier: bool = False
    pods: tuple[str, ...] = ()
    pods_total: int = 0
    waiting: tuple[ClaimView, ...] = ()
    waiting_total: int = 0
    freed_by: str = ""


class HeldBackView(msgspec.Struct, frozen=True):
    """Ids of a resource that are not granted, for one reason; ``gpus`` are UUIDs."""

    ids: int
    reason: str
    gpus: tuple[str, ...] = ()


def use_view(use: GpuUse, now: float) -> UseView:
    """Return the view of the use of one GPU; ``now`` is in unix seconds."""
    # `view` takes the fields that are not given from `use`, by their names
    return view(
        UseView,
        use,
        now,
        pods=use.pods[:_MAX_PODS],
        pods_total=use.holders,
        waiting=tuple(view(ClaimView, claim, now) for claim in use.claims[:_MAX_CLAIMS]),
        waiting_total=len(use.claims),
        freed_by=freed_by(use),
    )


def freed_by(use: GpuUse) -> str:
    """Name the event that makes the GPU free for other families; empty while it is free."""
    if use.family:
        return f"the end of {pods(use)}"
    if use.claims:
        return f"the start or the end of {use.claims[0].pod}, for which it is kept"
    return ""


def pods(use: GpuUse) -> str:
    """Return the number of pods that have shares, with the names of the first."""
    return (
        f"{_count(use.holders)} ({_first(use.pods, use.holders) if use.pods else 'not named yet'})"
    )


def held_back(status: AgentStatus, resource: str) -> tuple[HeldBackView, ...]:
    """Explain why ids of ``resource`` are held back: one view for each reason, the most ids
    first.
    """
    found = sorted(status.ledger.held_back.get(resource, ()), key=lambda each: -each.ids)
    views = [
        HeldBackView(ids=each.ids, reason=reason(status, each), gpus=each.gpus)
        for each in found[:_MAX_REASONS]
    ]
    if rest := found[_MAX_REASONS:]:
        gpus = tuple(dict.fromkeys(gpu for each in rest for gpu in each.gpus))
        views.append(
            HeldBackView(
                ids=sum(each.ids for each in rest),
                reason=f"{called(status, gpus)}: {len(rest)} more reasons",
                gpus=gpus,
            )
        )
    return tuple(views)


def reason(status: AgentStatus, each: HeldBack) -> str:
    """Explain why these ids are not granted, as a sentence without its full stop."""
    gpus = called(status, each.gpus)
    if not each.family:  # the reason is not that the GPUs serve a family
        return f"{gpus}: {each.reason}"
    serving = [
        use for use in status.ledger.uses if use.gpu in each.gpus and use.family == each.family
    ]
    oldest = min(serving, key=lambda use: use.since)
    # `unnamed`: grants whose pod the kubelet has not named yet; each counts as a pod
    number = len({pod for use in serving for pod in use.pods}) + sum(use.unnamed for use in serving)
    if len(each.gpus) == 1:
        return (
            f"{gpus} has served {each.family} ({_count(number)}) since {moment(oldest)}; it is "
            "free again when its last pod ends"
        )
    return (
        f"{gpus} have served {each.family} ({_count(number)}), the first since {moment(oldest)}; "
        "each is free again when its last pod ends"
    )


def waiting_for(status: AgentStatus, claim: Claim, use: GpuUse) -> Iterator[str]:
    """Yield sentences about a bound pod that claims a GPU and has no share of it yet."""
    # `order`: smaller is older
    ahead = [
        other for other in use.claims if other.family != claim.family and other.order < claim.order
    ]
    gpu = f"{called(status, (use.gpu,))} ({use.gpu})"
    if not claim.named:  # no scheduler has named the GPU: the pod needs ids, and ids name GPUs
        yield (
            f"{gpu} has been kept for the pod since {_text(claim.since)}, and stays so until the "
            "kubelet has admitted the pod."
        )
        return
    yield f"Its scheduler has named {gpu}; the pod has waited for it since {_text(claim.since)}."
    if use.family and use.family != claim.family:
        drains = "" if ahead else f"; no new pod of {use.family} gets any of it meanwhile"
        yield (
            f"That GPU has served {use.family} since {moment(use)} and is freed by the end of "
            f"{pods(use)}{drains}."
        )
        idle = [other.gpu for other in status.ledger.uses if not other.family and not other.claims]
        beside = (
            f"; {called(status, idle)} {'is' if len(idle) == 1 else 'are'} idle" if idle else ""
        )
        yield f"To have the pod scheduled anew, delete it{beside}."
    if ahead:
        names = _first([f"{other.pod} ({other.family})" for other in ahead], len(ahead))
        yield f"Pods of other families that were sent to it earlier get it first: {names}."


def called(status: AgentStatus, gpus: Sequence[str]) -> str:
    """The GPUs by index: ``GPU 0``, ``GPUs 0, 1 and 5``; by UUID where the driver no longer shows
    one.
    """
    index = {gpu.uuid: gpu.index for gpu in status.inventory.gpus}
    names = [str(place) for place in sorted(index[gpu] for gpu in gpus if gpu in index)] + [
        gpu for gpu in gpus if gpu not in index
    ]
    if len(names) == 1:
        return f"GPU {names[0]}"
    return (
        f"GPUs {listed(names[:-1])} and {names[-1]}"
        if len(names) <= 16
        else f"GPUs {listed(names)}"
    )


def moment(use: GpuUse) -> str:
    """Return the time since which the GPU serves its family, as text."""
    return f"{_text(use.since)}{' or earlier' if use.or_earlier else ''}"


def by_gpu(uses: Iterable[GpuUse]) -> dict[str, GpuUse]:
    """The uses by UUID."""
    return {use.gpu: use for use in uses}


def _text(unix_seconds: float) -> str:
    # the 0.0 stands for the present time, by which only the age is computed
    return str(when(int(unix_seconds), 0.0).at).replace(".000Z", "Z")


def _first(names: Sequence[str], total: int) -> str:
    """Return the first of ``names``, and how many more of ``total`` pods there are; some of these
    may have no known name.
    """
    shown = listed(names[:_NAMED_PODS])
    return f"{shown} and {total - _NAMED_PODS} more" if total > _NAMED_PODS else shown


def _count(number: int) -> str:
    return "1 pod" if number == 1 else f"{number} pods"
