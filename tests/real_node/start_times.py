"""Start times of 20 pods at once on a real node, for several kinds of pods whose rounds take turns.

The benchmark (tests/bench/real_node.py) judges by it, and `test_volcano_speed` more leniently. A
round creates 20 pods and ends when the last of them is Running for the API server. All kinds have
the same image, command and scheduler, with a pause between rounds. The **best round of each kind**
counts: starting 20 pods keeps both cores of a small machine busy from beginning to end, so any
other work of the machine makes a round longer, and nothing makes it shorter. Rounds go on until the
verdict is good, at most `MAX_ROUNDS` and always as many of each kind: more of them bring both
bests nearer to what the node itself needs, and a plugin that is too slow stays too slow. The agent
comes first: where one round of each kind is enough, what is slow only once on a new node counts
against it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.real_node.agents import NodeAgent, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import container
from tests.real_node.volcano import (
    END_WITH_PARENT,
    VGPU,
    Advertised,
    VolcanoScheduler,
    vgpu,
    volcano_pod,
)
from tests.real_node.volcano_node import (
    MEMORY_MIB,
    PLAIN_CONFIG,
    U0,
    U1,
    UNIT_MIB,
    seen_limit,
    start_vgpu,
    volcano_agent,
    waiting_reasons,
)

PODS = 20
MEMORY = [64 * (15 + each) for each in range(PODS)]  # MiB
MAX_ROUNDS = 15
WITHOUT, NOTHING, WITH = "without vGPU", "with a plugin that does nothing", "with vGPU"

_PAUSE_SECONDS = 2  # kubelet and containerd still clear up when the API server has forgotten a pod
_RUNNING_SECONDS = 90
_UNIT_LABEL = "vgpu-agent.internal/volcano-vgpu-memory-unit-mib"
_PROJECT = Path(__file__).resolve().parents[2]
_SUMS = re.compile(
    r'^kubelet_device_plugin_alloc_duration_seconds_(sum|count)\{resource_name="volcano.sh/'
    r'vgpu-(\w+)"\} '
    r"(\S+)",
    re.MULTILINE,
)


class Rounds:
    """Rounds of several kinds of pods on one node.

    State: the seconds of each kind's rounds, what kubelet's metric of Allocate grew by in them, and
    how long the agent's PreStartContainer took.
    """

    def __init__(
        self,
        rig: Rig,
        kinds: Mapping[str, int | None],
        *,
        most_later: float,
        least_rounds: int,
        at_once: float = 0,
    ) -> None:
        """Build it.

        Args:
            rig: the node.
            kinds: name → MiB in one unit of memory, None for pods that ask for no vGPU.
            most_later: as what multiple of another kind's best round a best round is good.
            least_rounds: of each kind, also where the first are good.
            at_once: one round of each kind is enough where its multiple is as low as this; by
                default it never is.
        """
        self._rig = rig
        self._kinds = kinds
        self._most_later = most_later
        self._least_rounds = least_rounds
        self._at_once = at_once
        self.seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        self._allocating: dict[str, collections.Counter[tuple[str, str]]] = {
            kind: collections.Counter() for kind in kinds
        }
        self._pre_start_milliseconds: list[float] = []

    def play(self, kind: str) -> None:
        """One round; with the agent, every container must have found its own limit."""
        unit, number = self._kinds[kind], len(self.seconds[kind])
        memory = {
            f"{kind.replace(' ', '-').lower()}-{number}-{each:02}": size
            for each, size in enumerate(MEMORY)
        }
        time.sleep(_PAUSE_SECONDS)
        before = self._allocations()
        self.seconds[kind].append(
            self._last_running(
                {name: vgpu(1, size // unit, 3) if unit else {} for name, size in memory.items()}
            )
        )
        self._allocating[kind].update(self._allocations() - before)
        for name, size in memory.items():
            limit, expected = seen_limit(self._rig, name), f"{size}m" if kind == WITH else ""
            assert limit == expected, f"{name} has the limit {limit!r} instead of {expected!r}"
        self._rig.clean()

    def heed(self, agent: NodeAgent) -> None:
        """Note what the agent says about its starts; it must not have refused any."""
        lines = agent.process.log_lines()
        assert "start.refused" not in [line["msg"] for line in lines]
        self._pre_start_milliseconds += [
            line["milliseconds"] for line in lines if line["msg"] == "start.bound"
        ]

    def later(self, kind: str, than: str) -> float:
        """The best round of one kind as a multiple of the best of another."""
        return min(self.seconds[kind]) / min(self.seconds[than])

    def enough(self, kind: str, than: str) -> bool:
        """Tell whether there is nothing to gain from more rounds."""
        rounds = min(map(len, self.seconds.values()))
        if not rounds:
            return False
        good = self._most_later if rounds >= self._least_rounds else self._at_once
        return rounds >= MAX_ROUNDS or self.later(kind, than) <= good

    @property
    def told(self) -> dict[str, str]:
        """All that was measured: what → figures with their units."""
        told = {
            f"last of {PODS} Running, {kind}": " ".join(
                f"{each:.2f}" for each in self.seconds[kind]
            )
            + " s"
            for kind in self._kinds
        }
        for kind, unit in self._kinds.items():
            if unit:
                means = [
                    f"{name} {milliseconds:.2f} ms × {calls}"
                    for name, (milliseconds, calls) in self.allocating(kind).items()
                ]
                told[f"kubelet_device_plugin_alloc_duration_seconds, {kind}"] = ", ".join(means)
        for than, kind in itertools.combinations(self._kinds, 2):
            medians = statistics.median(self.seconds[kind]) / statistics.median(self.seconds[than])
            told[f"{kind} / {than}"] = (
                f"{self.later(kind, than):.2f} by the best, {medians:.2f} by the medians"
            )
        milliseconds = self._pre_start_milliseconds
        told["PreStartContainer"] = (
            f"median {statistics.median(milliseconds):.1f} ms, worst {max(milliseconds):.1f} ms"
        )
        return told

    def allocating(self, kind: str) -> dict[str, tuple[float, int]]:
        """Return the kubelet's times for Allocate in the rounds of a kind: resource → mean in
        milliseconds, number of calls.
        """
        grown = self._allocating[kind]
        counts = {
            resource: round(count)
            for (what, resource), count in sorted(grown.items())
            if what == "count"
        }
        return {
            resource: (grown["sum", resource] / count * 1000, count)
            for resource, count in counts.items()
        }

    def _last_running(self, limits: Mapping[str, Mapping[str, int]]) -> float:
        """Seconds from the first creation until all pods run, by a watch of the API server."""
        left, path = (
            set(limits),
            "/api/v1/namespaces/default/pods?fieldSelector=status.phase=Running",
        )
        with self._rig.api.watching_names(path, timeout_seconds=_RUNNING_SECONDS) as running:
            began = time.monotonic()
            for name, each in limits.items():
                printing = container(
                    "main",
                    command='echo "LIMIT=$CUDA_DEVICE_MEMORY_LIMIT_0"; sleep 100000',
                    limits=each,
                )
                self._rig.create_pod(volcano_pod(name, containers=[printing]))
            for name in running:
                left.discard(name)
                if not left:
                    return time.monotonic() - began
        raise TimeoutError(
            "\n".join(f"{name}: {why}" for name, why in waiting_reasons(self._rig).items())
        )

    def _allocations(self) -> collections.Counter[tuple[str, str]]:
        """Sum in seconds and count of kubelet's calls of Allocate so far, by resource."""
        text = self._rig.api.text(f"/api/v1/nodes/{self._rig.node_name()}/proxy/metrics")
        return collections.Counter(
            {(what, resource): float(number) for what, resource, number in _SUMS.findall(text)}
        )


def with_coarse_units(
    rig: Rig, *, most_later: float, least_rounds: int = 5, at_once: float = 0
) -> Rounds:
    """Pods with and without vGPU in turn, memory counted in units of 64 MiB."""
    rounds = Rounds(
        rig,
        {WITHOUT: None, WITH: UNIT_MIB},
        most_later=most_later,
        least_rounds=least_rounds,
        at_once=at_once,
    )
    with (
        _agent(rig, f"{PLAIN_CONFIG}volcanoVgpu: {{gpuMemoryFactor: {UNIT_MIB}}}\n") as agent,
        VolcanoScheduler(rig, policy="spread"),
    ):
        start_vgpu(agent, UNIT_MIB)
        while not rounds.enough(WITH, WITHOUT):
            rounds.play(WITH)
            rounds.play(WITHOUT)
        rounds.heed(agent)
    return rounds


def with_units_of_a_mib(
    rig: Rig,
    *,
    most_later: float,
    least_rounds: int = 5,
    at_once: float = 0,
    without: bool = True,
) -> Rounds:
    """Pods with an agent without configuration, with a plugin that does nothing, and without vGPU,
    in turn. Memory is counted in MiB.

    The two plugins take turns as well: a resource has one. The agent is as good as new in each of
    its rounds. The verdict is about these two, so those ``without`` vGPU may be left out.
    """
    kinds = {WITHOUT: None, NOTHING: 1, WITH: 1} if without else {NOTHING: 1, WITH: 1}
    rounds = Rounds(rig, kinds, most_later=most_later, least_rounds=least_rounds, at_once=at_once)
    with _agent(rig, PLAIN_CONFIG) as agent, VolcanoScheduler(rig, policy="spread"):
        while not rounds.enough(WITH, NOTHING):
            start_vgpu(agent)
            assert rig.node()["metadata"]["labels"][_UNIT_LABEL] == "1", (
                "the agent did not choose MiB by itself"
            )
            rounds.play(WITH)
            rounds.heed(agent)
            agent.run(agent.process.kill())
            _wait_for_nothing(rig)
            with _doing_nothing(rig, 1):
                rounds.play(NOTHING)
            if without:
                rounds.play(WITHOUT)
    return rounds


@contextlib.contextmanager
def _agent(rig: Rig, config: str) -> Iterator[NodeAgent]:
    """An agent of its own, not started."""
    made = volcano_agent(rig, config, constants={})
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def _doing_nothing(rig: Rig, unit_mib: int) -> Iterator[None]:
    """The agent's resources offered by `idle_plugin`, and registered for the scheduler."""
    units = MEMORY_MIB // unit_mib
    counts = {"number": ("-", 10), "memory": ("-memory-", units), "cores": ("-core-", 100)}
    offers = {
        VGPU + name: {f"{uuid}{infix}": count for uuid in (U0, U1)}
        for name, (infix, count) in counts.items()
    }
    register = "".join(f"{uuid},10,{units},NVIDIA-NVIDIA A10,true,hami-core:" for uuid in (U0, U1))
    command = [
        *END_WITH_PARENT,
        sys.executable,
        "-m",
        "tests.real_node.idle_plugin",
        str(rig.kubelet_dir()),
        json.dumps(offers),
    ]
    with (
        Advertised(rig, {}, {"volcano.sh/node-vgpu-register": register}),
        subprocess.Popen(command, cwd=_PROJECT) as plugin,
    ):
        try:
            for name, (_, count) in counts.items():
                wait_allocatable(rig, 2 * count, resource=VGPU + name)
            yield
        finally:
            plugin.kill()
            plugin.wait()
    _wait_for_nothing(rig)


def _wait_for_nothing(rig: Rig) -> None:
    for name in ("number", "memory", "cores"):
        wait_allocatable(rig, 0, resource=VGPU + name)
