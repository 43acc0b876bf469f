"""The readings of the metrics of `catalogue_binding`: rows of label values and a number, as in `readings`."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.web import binding, views
from vgpu_agent.web.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.status import WatchStatus, WriterStatus
    from vgpu_agent.web.readings import Moment, Row


def binding_info(moment: Moment) -> Iterator[Row]:
    """Late or early, where a family is on whose grants are bound."""
    if any(family.by_pod for family in moment.status.binding.families):
        yield (binding.mode_word(moment.status.binding) or "unknown",), 1


def family_offered(moment: Moment) -> Iterator[Row]:
    """Tell of each family whether it is offered."""
    return (((family.name,), family.offered) for family in moment.status.binding.families)


def grants(moment: Moment) -> Iterator[Row]:
    """Grants that hold something, counted."""
    counts = collections.Counter((grant.family, grant.state.value) for grant in views.live_grants(moment.status))
    return iter(counts.items())


def limits(moment: Moment) -> Iterator[Row]:
    """Grants whose shares are decided, by the state of their limit."""
    known = Limits(moment.status)
    found = ((grant.family, known.of(grant)) for grant in views.live_grants(moment.status))
    counts = collections.Counter((family, limit.state.value) for family, limit in found if limit is not None)
    return iter(counts.items())


def pre_starts(moment: Moment) -> Iterator[Row]:
    """PreStartContainer calls by result; the plugin counts the refused ones among all."""
    for plugin in moment.status.plugins:
        yield (plugin.resource, "granted"), plugin.pre_starts - plugin.pre_starts_refused
        yield (plugin.resource, "refused"), plugin.pre_starts_refused


def refused_starts(moment: Moment) -> Iterator[Row]:
    """Both series always, so that an alert can be written on them."""
    final = sum(refusal.final for refusal in moment.status.binding.refusals)
    yield ("true",), final
    yield ("false",), len(moment.status.binding.refusals) - final


def overcommitted(moment: Moment) -> Iterator[Row]:
    """Yield two series for each overcommitted GPU."""
    for each in moment.status.ledger.overcommitted:
        yield (each.resource, each.device, "cores"), max(0, each.cores_percent - each.cores_limit_percent)
        yield (each.resource, each.device, "holders"), max(0, each.holders - each.slots)


def api_requests(moment: Moment) -> Iterator[Row]:
    """Requests as the client has counted them."""
    return iter(moment.status.cluster.requests.items())


def each_watch(value: Callable[[WatchStatus, float], float | None]) -> Callable[[Moment], Iterator[Row]]:
    """One series a watch; none while ``value`` is None."""

    def read(moment: Moment) -> Iterator[Row]:
        for watch in moment.status.cluster.watches:
            if (found := value(watch, moment.now)) is not None:
                yield (watch.name,), found

    return read


def each_writer(value: Callable[[WriterStatus], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series a writer."""
    return lambda moment: (((writer.name,), value(writer)) for writer in moment.status.cluster.writers)


def writes(moment: Moment) -> Iterator[Row]:
    """Writes by result."""
    for writer in moment.status.cluster.writers:
        yield (writer.name, "written"), writer.written
        yield (writer.name, "failed"), writer.failed
        yield (writer.name, "dropped"), writer.dropped


def evictions(moment: Moment) -> Iterator[Row]:
    """Evictions by result."""
    return (((result,), count) for result, count in moment.status.cluster.evictions.items())
