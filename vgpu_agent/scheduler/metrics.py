"""The metrics of the extender, with the names that vgpu-manager gives them (vgpu-manager §5.10)."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.topology import NONE
from vgpu_agent.process import process_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric as MetricFamily

    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.status import WatchStatus

_PREFIX = "vgpu_scheduler"
# Bounds of the buckets of histograms: seconds, preempted pods, and cards.
_BUCKETS = tuple(0.0001 * 3**power for power in range(12))
_VICTIMS = (0, 1, 2, 4, 8, 16, 32, 64)
_CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 64)
FILTER, BIND, PREEMPT = "filter", "bind", "preempt"  # the verbs of kube-scheduler's calls
# The results of such a call: done, no Node for the pod, or a call that could not be answered.
SUCCESS, REFUSED, ERROR = "success", "refused", "error"


class _Process(Collector):
    """Metrics of the process, under the names that all of Prometheus's client libraries use.
    The collector of Python's client library lists /proc/self/fd for them; `process_facts` only asks
    for its size.

    State: when the process has started.
    """

    def __init__(self) -> None:
        self._started_at = time.time()

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of the process."""
        facts = process_facts()
        yield GaugeMetricFamily(
            "process_resident_memory_bytes", "Resident memory.", value=facts.resident_bytes
        )
        yield CounterMetricFamily(
            "process_cpu_seconds", "CPU time, user and system.", value=facts.cpu_seconds
        )
        if facts.open_descriptors is not None:
            yield GaugeMetricFamily(
                "process_open_fds", "File descriptors in use.", value=facts.open_descriptors
            )
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start in unix seconds.", value=self._started_at
        )


class Metrics:
    """All metrics of one extender. State: a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Process())
        self._verbs = self._counter(
            "verb_total", "Calls of kube-scheduler by verb and result.", ("verb", "result")
        )
        self._seconds = Histogram(
            f"{_PREFIX}_verb_duration_seconds",
            "Time until a call was answered.",
            ("verb", "stage"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._rejects = self._counter(
            "node_reject_total",
            "Nodes that could not take a pod, by the code of the reason.",
            ("verb", "code"),
        )
        self._policies = self._counter(
            "pod_policy_total",
            "Pods that got cards, by the policies that they ask for.",
            ("node_policy", "device_policy", "topology_mode"),
        )
        self._aligned = self._counter(
            "crosspod_alignment_total",
            "Pods that got cards after peers, by how near the cards are to theirs.",
            ("result",),
        )
        self._protected = self._counter(
            "preempt_protected_total",
            "Pods that were no victims of a preemption, by the reason.",
            ("reason",),
        )
        self._added = Histogram(
            f"{_PREFIX}_preempt_victims_added",
            "Victims on a Node beyond those that kube-scheduler has proposed.",
            buckets=_VICTIMS,
            registry=self._registry,
        )
        self._topology = self._counter(
            "topology_placement_total",
            "Pods that got cards, by their topology mode and whether it could be followed.",
            ("mode", "result"),
        )
        self._strict = self._counter(
            "topology_strict_reject_total",
            "Filters that found no Node, on some only because of the pod's strict topology mode.",
            ("mode",),
        )
        self._searches = self._counter(
            "link_search_total",
            "Searches for the cards with the best links, where some links are better than others.",
            ("algo",),
        )
        self._candidates = Histogram(
            f"{_PREFIX}_link_search_candidates",
            "Cards in a search for those with the best links.",
            ("algo",),
            buckets=_CANDIDATES,
            registry=self._registry,
        )
        self.promises = Gauge(
            f"{_PREFIX}_promises",
            "Pods that have cards and are not bound yet.",
            registry=self._registry,
        )
        self.leads = Gauge(
            f"{_PREFIX}_leader",
            "1 where this extender answers kube-scheduler, 0 where another one does.",
            registry=self._registry,
        )
        self._nodes = Gauge(
            f"{_PREFIX}_nodes",
            "Nodes by their state: usable, or the code of the reason why no pod fits there.",
            ("state",),
            registry=self._registry,
        )

        self._failing = Gauge(
            f"{_PREFIX}_watch_failing_seconds",
            "How long a watch of the API server has been failing; 0 while it works.",
            ("watch",),
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(
            f"{_PREFIX}_{name.removesuffix('_total')}", text, labels, registry=self._registry
        )

    @contextlib.contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Measure how long one call of kube-scheduler takes, the body of the ``with`` block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            # the only stage that is measured
            self._seconds.labels(verb, "total").observe(time.perf_counter() - began)

    def count(self, verb: str, result: str) -> None:
        """Count one call of kube-scheduler; ``result`` is `SUCCESS`, `REFUSED` or `ERROR`."""
        self._verbs.labels(verb, result).inc()

    def count_refused_nodes(self, verb: str, reasons: Mapping[Reason, int]) -> None:
        """Count the Nodes that could not take a pod: reason → how many Nodes."""
        for reason, number in reasons.items():
            self._rejects.labels(verb, reason.name).inc(number)

    def count_placed(self, demand: Demand, fallback: str = "") -> None:
        """Count a pod that got cards. ``fallback`` says what these have instead of the links or the
        NUMA node that its topology mode asks for; it is empty where the mode was followed. The
        label values are bounded: an unknown policy or mode counts as ``none``.
        """
        self._policies.labels(demand.node_policy, demand.device_policy, demand.topology_mode).inc()
        if demand.topology_mode != NONE:  # the pod asks for one
            result = "fallback" if fallback else "satisfied"
            self._topology.labels(demand.topology_mode, result).inc()

    def count_strict_refusal(self, demand: Demand, reasons: Iterable[Reason]) -> None:
        """Count a filter that found no Node, if one of the ``reasons`` is that the pod's strict
        topology mode could not be followed.
        """
        if not {Reason.LinkTopologyUnsatisfied, Reason.NUMATopologyUnsatisfied}.isdisjoint(reasons):
            self._strict.labels(demand.topology_mode).inc()

    def count_search(self, algorithm: str, candidates: int) -> None:
        """Count a search among ``candidates`` cards; ``algorithm`` is ``exhaustive`` or ``greedy``
        (`placement.linked.searches_seen_by`).
        """
        self._searches.labels(algorithm).inc()
        self._candidates.labels(algorithm).observe(candidates)

    def count_aligned(self, result: str) -> None:
        """Count a pod that got cards when peers of it had some already. ``result``: ``same_node``,
        ``same_domain`` or ``not_aligned``, by how near its cards are to theirs; see `_RESULTS` in
        `scheduler.alignment`.
        """
        self._aligned.labels(result).inc()

    def count_protected(self, reason: str) -> None:
        """Count a pod that a call has spared, by the reason."""
        self._protected.labels(reason).inc()

    def count_added(self, victims: int) -> None:
        """Count the victims on one Node that kube-scheduler had not proposed."""
        self._added.observe(victims)

    def show_nodes(self, states: Mapping[str, int]) -> None:
        """Show the number of Nodes in each state, instead of what an earlier call has shown."""
        self._nodes.clear()
        for state, number in states.items():
            self._nodes.labels(state).set(number)

    def show_watches(self, watches: Mapping[str, WatchStatus], now: float) -> None:
        """Show how long each watch has been failing; ``now`` is in unix seconds."""
        for name, watch in watches.items():
            # 0 while it works
            seconds = max(now - watch.failing_since, 0.0) if watch.failing_since else 0.0
            self._failing.labels(name).set(seconds)

    def text(self, accepted: str) -> tuple[bytes, str]:
        """Return the answer to a scrape and its content type; ``accepted`` is the ``Accept`` of the
        scraper.
        """
        encode, content_type = choose_encoder(accepted)
        return encode(self._registry), content_type
