"""``/metrics``: the metrics of the catalogue in Prometheus' text format (or OpenMetrics, when the
scraper asks for it).

Called by `web.server` for each scrape. It reads one snapshot that is already in memory and a few
counters of the process, so a hung driver or a slow kubelet can delay no scrape. Nothing is kept
between scrapes: a series vanishes with the object that it describes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.spec import Readings
from vgpu_agent.process import process_facts
from vgpu_agent.web import views
from vgpu_agent.web.catalogue import CATALOGUE
from vgpu_agent.web.metric import Kind, Metric
from vgpu_agent.web.readings import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vgpu_agent.families.spec import FamilyMetric, FamilySpec
    from vgpu_agent.status import AgentStatus
    from vgpu_agent.web.readings import Row


# The labels that name a pod or container, in our metrics and in those of the monitors that the
# agent replaces.
_POD_LABELS = frozenset(
    {"namespace", "pod", "container", "podnamespace", "podname", "ctrname"}
    | {"pod_namespace", "pod_name", "container_name"}
)


class Exposition(Collector):
    """The answers to scrapes. This object is the only collector in a registry of its own. Without
    ``pod_names``, metrics of single pods are left out.
    """

    def __init__(
        self,
        status: Callable[[], AgentStatus],
        *,
        pod_names: bool = True,
        clock: Callable[[], float] = time.time,
        metrics: Iterable[Metric] | None = None,
    ) -> None:
        self._status = status
        self._metrics = tuple(
            metric
            for metric in (catalogue() if metrics is None else metrics)
            if pod_names or not _POD_LABELS.intersection(metric.labels)
        )
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def negotiate(self, accept: str = "") -> tuple[str, Callable[[], bytes]]:
        """The content type of the answer to a scrape, and the function that makes the answer.

        Args:
            accept: the scraper's Accept header; it chooses between the text format and OpenMetrics.
        """
        encode, content_type = choose_encoder(accept)
        return content_type, lambda: encode(self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The answer to a scrape and its content type; see `negotiate`."""
        content_type, encoded = self.negotiate(accept)
        return encoded(), content_type

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every metric of the catalogue, also if it has no value; called by the registry."""
        # what the values of all metrics are read from
        moment = Moment(self._status(), process_facts(), self._clock())
        for metric in self._metrics:
            yield _metric_family(metric, moment)


def _metric_family(metric: Metric, moment: Moment) -> MetricFamily:
    """Return a metric with its values at the ``moment`` of the scrape. The metric's functions read
    rows from it: the values of the labels, and the value.
    """
    samples = MetricFamily(
        metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name,
        metric.help,
        metric.kind.value,
    )
    suffix = "_sum" if metric.kind in {Kind.SUMMARY, Kind.HISTOGRAM} else ""
    if metric.read_buckets is not None:  # before the sum, as the text format has them
        for values, value in metric.read_buckets(moment):
            samples.add_sample(
                metric.name + "_bucket",
                dict(zip((*metric.labels, "le"), values, strict=True)),
                float(value),
            )
    for values, value in metric.read(moment):
        samples.add_sample(
            metric.name + suffix, dict(zip(metric.labels, values, strict=True)), float(value)
        )
    if metric.read_count is not None:
        for values, value in metric.read_count(moment):
            samples.add_sample(
                metric.name + "_count", dict(zip(metric.labels, values, strict=True)), float(value)
            )
    return samples


def catalogue() -> tuple[Metric, ...]:
    """Return all metrics: the agent's own, and those that families declare."""
    return (*CATALOGUE, *_declared_by_families())


def exported(family: FamilySpec) -> tuple[Metric, ...]:
    """Return the metrics that the family has at an address of its own."""
    return tuple(_converted(family, family.exporter.metrics)) if family.exporter is not None else ()


def _declared_by_families() -> Iterator[Metric]:
    """Yield the metrics that families declare, as lines of the catalogue. They have values only
    while their family is on.
    """
    for family in FAMILIES:
        yield from _converted(family, family.metrics)


def _converted(family: FamilySpec, metrics: Iterable[FamilyMetric]) -> Iterator[Metric]:
    for metric in metrics:
        yield Metric(metric.name, Kind.GAUGE, metric.labels, metric.help, _reading(family, metric))


def _reading(family: FamilySpec, metric: FamilyMetric) -> Callable[[Moment], Iterable[Row]]:
    def read(moment: Moment) -> Iterable[Row]:
        status = moment.status
        # `names`: its own name and those of its parts, such as vgpu-manager-mig
        if not any(each.name in family.names for each in status.binding.families):
            return ()
        # live grants are those that are not released
        grants = [grant for grant in views.live_grants(status) if grant.family in family.names]
        return metric.rows(
            Readings(
                grants=grants,
                inventory=status.inventory,
                usage=status.usage,  # of each GPU
                containers=status.containers,  # the use that containers make of their devices
                now=moment.now,
                node=status.node,
                version=status.version,
                commit=status.commit,
                # the same for containers under `vgpu-control`, whose library reports it in another
                # form
                controlled=status.controlled,
                # attribute of the family's settings → value, with those from files of the plugin
                # that the family replaces
                in_force=status.binding.in_force.get(family.name, {}),
            )
        )

    return read
