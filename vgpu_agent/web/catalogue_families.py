"""The metrics that families declare for themselves (`families.spec.FamilyMetric`). Each exists only while its family is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.spec import Readings
from vgpu_agent.web import views
from vgpu_agent.web.metric import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vgpu_agent.families.spec import FamilyMetric
    from vgpu_agent.web.readings import Moment, Row


def of_families() -> Iterator[Metric]:
    """Make a line of the catalogue of each."""
    for family in FAMILIES:
        for metric in family.metrics:
            yield Metric(metric.name, Kind.GAUGE, metric.labels, metric.help, _reading(family.name, metric))


def _reading(family: str, metric: FamilyMetric) -> Callable[[Moment], Iterable[Row]]:
    def read(moment: Moment) -> Iterable[Row]:
        status = moment.status
        if not any(each.name == family for each in status.binding.families):
            return ()
        grants = [grant for grant in views.live_grants(status) if grant.family == family]
        return metric.rows(Readings(grants, status.inventory, status.usage, status.containers, moment.now))

    return read
