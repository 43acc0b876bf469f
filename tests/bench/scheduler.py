"""The scheduler extender's speed with 5,000 Nodes of eight cards, beside a real kube-scheduler.

The part ``scheduler`` of the benchmark, called by `__main__`. etcd, API server and kube-scheduler
are real (`scripts/cluster`); the Nodes are objects only. The same pods also go through
kube-scheduler alone, and through an extender that decides nothing (`empty_extender`). Pods are
created while kube-scheduler is held, so that what creates them takes no time from what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.figures import Figure, percentile
from tests.bench.processors import REFERENCE_SECONDS, seconds_for_additions
from tests.real_node.rig import Options, Rig
from tests.real_node.scheduler.checker import Verdict, judge
from tests.real_node.scheduler.objects import (
    CARDS,
    Policy,
    add_nodes,
    bound_pods,
    create,
    mixed_pods,
    remove_pods,
)
from tests.real_node.scheduler.processes import (
    PORT,
    Bound,
    Extender,
    Forwarder,
    KubeScheduler,
)

_NODES, _PODS, _OLD_PODS_A_NODE = 5000, 1000, 2
_TIMED, _TIMED_ALL, _KILLED = 300, 200, 300
# All kinds take turns: on a shared machine the same run takes half as long again from one minute to
# the next. Of pods a second the best round of each kind counts. The calls of all rounds count
# together, and the speed of the processor is measured before each.
_ROUNDS, _CALL_ROUNDS = 4, 3
_AWAY_SECONDS = 3.0
_PATIENCE_SECONDS = 300
_ALONE, _EMPTY, _OURS = "kube-scheduler alone", "empty extender", "extender"
_FILTER, _BIND = "/scheduler/filter", "/scheduler/bind"
# of one pod, without the one that creates it; LIST and WATCH are not of one pod
_REQUEST = re.compile(
    r"apiserver_request_total\{[^}]*"
    r'resource="pods",[^}]*subresource="(?P<part>[^"]*)",verb="(?P<verb>GET|POST|PATCH|PUT)"[^}]*\}'
    r" (?P<number>\S+)"
)


class _EmptyExtender(Extender):
    """The process of `empty_extender`."""

    name = "empty-extender"

    def command(self) -> list[str]:
        """See `Program`."""
        kubeconfig = str(self.rig.layout.kubeconfig())
        return [sys.executable, "-m", "tests.bench.empty_extender", kubeconfig, str(self.port)]


class _Cluster:
    """The control plane with its Nodes.

    State: a number for the names of pods.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._prefixes = itertools.count()

    @contextlib.contextmanager
    def scheduling(
        self, kind: str, *, percentage: int | None = None, through: Forwarder | None = None
    ) -> Iterator[_Run]:
        """Run kube-scheduler with an extender of that kind, or none, until the context ends; all
        pods go with it.
        """
        extender: Extender | None = None
        with contextlib.ExitStack() as stack:
            if kind != _ALONE:
                made = Extender(self.rig) if kind == _OURS else _EmptyExtender(self.rig)
                extender = stack.enter_context(made)
            port = None if extender is None else through.port if through else PORT
            scheduler = stack.enter_context(
                KubeScheduler(self.rig, port, percentage_of_nodes=percentage)
            )
            bound = stack.enter_context(Bound(self.rig))
            run = _Run(self, scheduler, extender, bound)
            try:
                # then it has read all Nodes
                run.wait(run.create(1))
                yield run
            finally:
                scheduler.kill()
                remove_pods(self.rig)

    def prefix(self) -> str:
        """A prefix that no other pods have."""
        return f"b{next(self._prefixes)}"

    def judge(self) -> Verdict:
        """Judge all claims."""
        return judge(self.rig.api.get("/api/v1/nodes")["items"], self.rig.pods())

    def requests(self) -> int:
        """Return the number of requests for single pods that the API server has answered, without
        those that create pods.
        """
        found = _REQUEST.finditer(self.rig.api.text("/metrics"))
        return round(
            sum(
                float(each["number"])
                for each in found
                if (each["verb"], each["part"]) != ("POST", "")
            )
        )


class _Run:
    """A kube-scheduler with its extender, if any."""

    def __init__(
        self,
        cluster: _Cluster,
        scheduler: KubeScheduler,
        extender: Extender | None,
        bound: Bound,
    ) -> None:
        self._cluster, self._scheduler, self._bound = cluster, scheduler, bound
        self._extender = extender

    @property
    def extender(self) -> Extender:
        """The process of the extender."""
        assert self._extender is not None
        return self._extender

    def create(self, number: int, policy: Policy = "") -> list[str]:
        """Create pods of mixed shapes."""
        return create(self._cluster.rig, mixed_pods(self._cluster.prefix(), number, policy=policy))

    def wait(self, names: Sequence[str], number: int | None = None) -> float:
        """Wait until they are bound."""
        return self._bound.wait(names, number, timeout=_PATIENCE_SECONDS)

    def seconds(self, number: int, policy: Policy = "") -> float:
        """Return how long kube-scheduler takes for so many pods that wait."""
        with self._scheduler.held():
            names = self.create(number, policy)
        began = time.monotonic()
        return self.wait(names) - began


def _speeds(cluster: _Cluster) -> list[Figure]:
    """Pods a second, of each kind in turn, and what a pod of ours costs the API server."""
    best: dict[str, float] = {}
    requests, problems = 0, 0
    for _ in range(_ROUNDS):
        for kind in (_ALONE, _EMPTY, _OURS):
            with cluster.scheduling(kind) as run:
                before = cluster.requests()
                speed = _PODS / run.seconds(_PODS)
                if kind == _OURS:
                    requests = cluster.requests() - before
                    problems += len(cluster.judge().problems)
            print(f"{kind}: {speed:.1f} pods/s", file=sys.stderr)  # noqa: T201 - shows that it goes on
            best[kind] = max(best.get(kind, 0.0), speed)
    how = f"{_PODS:,} pods of mixed shapes, {_NODES:,} nodes × {CARDS} cards, best of {_ROUNDS}"
    return [
        *(Figure(f"pods a second: {kind}", best[kind], None, "1/s", how) for kind in best),
        Figure(
            "time for a pod / empty extender's",
            best[_EMPTY] / best[_OURS],
            1.43,
            "×",
            "0.7 × as many",
        ),
        Figure(
            "API requests a pod",
            requests / _PODS,
            2,
            "requests",
            "apiserver_request_total, no events",
        ),
        Figure("pods or cards with a wrong claim", problems, 0, "", "the tests' checker"),
    ]


def _calls(cluster: _Cluster) -> list[Figure]:
    """Times of the verbs."""
    found: dict[str, dict[str, list[float]]] = {}
    speeds = []
    for _ in range(_CALL_ROUNDS):
        for name, kind, pods, percentage in (
            ("sample", _OURS, _TIMED, None),
            ("all", _OURS, _TIMED_ALL, 100),
            ("empty", _EMPTY, _TIMED, None),
        ):
            speeds.append(seconds_for_additions())
            with Forwarder(cluster.rig, PORT) as forwarder:
                with cluster.scheduling(kind, percentage=percentage, through=forwarder) as run:
                    run.seconds(pods)
                for verb, times in forwarder.seconds().items():
                    found.setdefault(name, {}).setdefault(verb, []).extend(times)
    slower = max(1.0, statistics.mean(speeds) / REFERENCE_SECONDS)

    def figure(what: str, run: str, verb: str, percent: int, limit: float | None) -> Figure:
        times = found[run][verb]
        value = percentile(times, percent) * 1000
        how = f"{len(times)} calls of kube-scheduler in {_CALL_ROUNDS} rounds, limit × {slower:.2f}"
        return Figure(f"{what} p{percent}", value, limit, "ms", how, scaled=True)

    empty = figure("bind, empty extender", "empty", _BIND, 50, None)
    return [
        figure("filter", "sample", _FILTER, 50, round(3 * slower, 3)),
        figure("filter", "sample", _FILTER, 99, round(10 * slower, 3)),
        figure(f"filter of {_NODES:,} nodes", "all", _FILTER, 50, round(10 * slower, 3)),
        figure(f"filter of {_NODES:,} nodes", "all", _FILTER, 99, round(25 * slower, 3)),
        figure("filter, empty extender", "empty", _FILTER, 50, None),
        figure("filter, empty extender", "empty", _FILTER, 99, None),
        empty,
        figure("bind", "sample", _BIND, 50, round(empty.value + 3 * slower, 3)),
        figure("bind", "sample", _BIND, 99, None),
    ]


def _killed(cluster: _Cluster) -> list[Figure]:
    """The extender is killed in the middle, and comes back."""
    with cluster.scheduling(_OURS) as run:
        names = run.create(_KILLED)
        run.wait(names, _KILLED // 3)
        run.extender.kill()
        time.sleep(_AWAY_SECONDS)
        run.extender.start()
        ready = time.monotonic()
        later = run.wait(names) - ready
        problems = len(cluster.judge().problems)
    how = f"kill -9 in the middle of {_KILLED} pods, started again after {_AWAY_SECONDS:g} s"
    return [
        Figure("last pod after the extender was ready again", later, 5, "s", how),
        Figure("wrong claims then", problems, 0, "", "the same"),
    ]


def _packing(cluster: _Cluster) -> list[Figure]:
    """Cards in use after the same pods with binpack, with a sample of Nodes and with all."""
    used = {}
    for percentage in (None, 100):
        with cluster.scheduling(_OURS, percentage=percentage) as run:
            run.seconds(_PODS, "binpack")
            used[percentage] = len(cluster.judge().used)
    how = f"{_PODS:,} pods with binpack: {used[None]} cards in use, {used[100]} where all are named"
    return [
        Figure(
            "cards that could have stayed empty, with a sample",
            100 * (used[None] - used[100]) / used[None],
            None,
            "%",
            how,
        )
    ]


def _size(cluster: _Cluster) -> list[Figure]:
    """Start and memory with many pods."""
    rig = cluster.rig
    create(rig, bound_pods(_NODES, _OLD_PODS_A_NODE))
    with Extender(rig) as extender:
        return [
            Figure("start to ready", extender.ready_seconds, 5, "s", "process start to /readyz"),
            Figure(
                "RSS",
                extender.rss_mib(),
                250,
                "MiB",
                f"{_NODES:,} nodes, {_NODES * _OLD_PODS_A_NODE:,} pods",
            ),
            Figure("RSS, peak", extender.rss_mib("VmHWM"), None, "MiB", "VmHWM, the same"),
        ]


def _measure() -> list[Figure]:
    with Rig(options=Options(nodes=0)) as rig:
        rig.stop_component("scheduler")
        add_nodes(rig, range(_NODES))
        cluster = _Cluster(rig)
        return [
            figure
            for part in (_speeds, _calls, _killed, _packing, _size)
            for figure in _told(part(cluster))
        ]


def _told(figures: list[Figure]) -> list[Figure]:
    for figure in figures:
        print(f"  {figure.name}: {figure.line}", file=sys.stderr)  # noqa: T201 - a later part may fail
    return figures


async def measure(_folder: Path) -> list[Figure]:
    """All figures.

    Raises:
        RequirementError: this machine cannot hold a control plane.
    """
    return await asyncio.to_thread(_measure)
