"""Was a mixed day on a real node right, fair and prompt? From what containers wrote, what
schedulers wrote and what kubelet says.

Nothing is asked of the agent. `day` shows a `Checker` the node again and again; `Checker.report`
says what it came to.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.real_node.mixed import tools
from tests.real_node.mixed.jobs import (
    BY_IDS,
    GPUSHARE,
    RESOURCES,
    SLOTS,
    UNIT_MIB,
    VGPU_FAMILY,
    VGPU_MANAGER,
    Job,
)
from tests.real_node.mixed.tools import Sizes
from tests.real_node.vgpu_manager_node import PRE, wrong
from tests.torture.mixed import bounds
from tests.torture.mixed.judge import percentile
from vgpu_agent.sim.vgpu_manager.formats import read_claims

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FAMILY_OF = {resource: family for family, resource in RESOURCES.items()}
_ALL_CORES = 100
# The kubelet's refusal of a pod whose scheduler went by an older count of ids that name GPUs.
_OUTRUN = re.compile(r"\bOutOf(nvidia\.com/gpu|k8s\.amazonaws\.com/vgpu)\b")
_NO_NODES = "/dev/nvidia[0-9]*"  # as a shell prints a pattern that matches nothing
# What only containers of one family find.
_OWN_KEYS = (
    (VGPU_FAMILY, "CUDA_DEVICE_MEMORY_LIMIT_0"),
    (VGPU_FAMILY, "REGION_BYTES"),
    (GPUSHARE, "VOLCANO_GPU_ALLOCATED"),
    (VGPU_MANAGER, "VGPU_POD_UID"),
    (VGPU_MANAGER, "OWNER_POD"),
)

AFTER_KUBELET_P50_SECONDS = 0.5
"""The agent's part of a handover. Before it, the kubelet lets go of a pod 1.5 to 2.1 s after its
container's end, with its second look at the container runtime; so a bound on the whole would be one
on the kubelet."""

AFTER_KUBELET_P99_SECONDS = 1.5
"""The same, of the slowest ones; a short day has nine handovers, so there it is of the slowest."""

IDLE_SECONDS = bounds.IDLE_SECONDS + 2.0
"""A round of three families takes longer by what a busy API server takes for a write, twice."""

TURN_SECONDS = 1.4
"""The seconds that each further family adds to a round, with the pause after its turn."""

SHOWN_SECONDS = 5.0
"""After so long schedulers must read on the Node that a container has a GPU. The agent writes it at
once; the rest is for a busy machine."""

MARKED_SECONDS = 15.0
"""After so long a running pod must be marked as served: pods that are being started go first for
ten seconds (`cluster.startsFirstSeconds`)."""

RACE_SECONDS = 2.0
"""The time between two pods of which kubelet may admit the second by an older offer: some tenths of
a second, and kubelet writes whole seconds."""

RACED_PODS = 4
"""Pods of a day that may fail because a free GPU was offered to two families and pods of both were
bound in the same instant: the ids of one GPU (docs/mixed-nodes.md). Otherwise none may fail."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Observations of one container; times are seconds of uptime.

    Attributes:
        job: its pod.
        at: when it started.
        end: when it ended; None while it runs, or when it was killed before it could say so.
        found: its environment, and what else it wrote down.
    """

    job: Job
    at: float
    end: float | None
    found: Mapping[str, str]

    def gpus(self, uuids: Sequence[str]) -> tuple[str, ...]:
        """The GPUs that it received; ``uuids`` are those of the node in the order
        of their numbers.
        """
        told = [text for text in self.found.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if text]
        return tuple(
            uuids[int(text)] if text.isdecimal() and int(text) < len(uuids) else text
            for text in told
        )

    @property
    def memory_mib(self) -> int:
        """The memory that it may use; 0 where its family states none."""
        if self.job.family == VGPU_FAMILY:
            return int(self.found.get("CUDA_DEVICE_MEMORY_LIMIT_0", "0m").removesuffix("m"))
        if self.job.family == VGPU_MANAGER:
            return self._sum("CUDA_MEM_LIMIT_")
        return int(self.found.get("VOLCANO_GPU_ALLOCATED", "0"))

    @property
    def cores_percent(self) -> int:
        """The part of a GPU's compute that it may use; 0 where its family states none."""
        return self._sum("CUDA_CORE_LIMIT_") if self.job.family == VGPU_MANAGER else 0

    def _sum(self, prefix: str) -> int:
        """Add up its limits of single GPUs."""
        texts = (text for key, text in self.found.items() if re.fullmatch(rf"{prefix}[0-9]+", key))
        return sum(int(text.removesuffix("m") or 0) for text in texts)


@dataclasses.dataclass
class Report:
    """Results of a day.

    Attributes:
        wrong: containers with another share than their ids or annotations say, as sentences.
        two_families: moments at which containers of two families had one GPU.
        overcommitted: moments at which containers had more of a GPU than it has.
        tools: what a family's own scheduler and tools read on the Node or on a pod, and is wrong.
        failed: pod → the message with which kubelet refused it for good.
        raced: the same, of pods of the instant in which another family got a free GPU.
        idle: pod → seconds that a GPU which could serve it had been idle while it waited, where
            that is too long.
        handovers: seconds from the end of a GPU's last container to healthy ids of another family
            at kubelet.
        after_kubelet: the part of them after pod-resources has listed a holder, and the API server
            has shown one running, for the last time; rounded up to a look.
        surely_after_kubelet: the same, rounded down: between the first look without a holder and
            the last look without an offer. On a busy machine a look takes a second.
        unfinished: pods that had not ended when the day was over → their status.
    """

    pods: int = 0
    started: int = 0
    seconds: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)
    two_families: list[str] = dataclasses.field(default_factory=list)
    overcommitted: list[str] = dataclasses.field(default_factory=list)
    tools: list[str] = dataclasses.field(default_factory=list)
    by_family: dict[str, int] = dataclasses.field(default_factory=dict)  # those that started
    looks: int = 0  # at the Node
    marked: int = 0  # pods seen marked as served, of families that mark them
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    raced: dict[str, str] = dataclasses.field(default_factory=dict)
    idle: dict[str, float] = dataclasses.field(default_factory=dict)
    summed: dict[str, float] = dataclasses.field(default_factory=dict)  # the same, by Volcano's sum
    handovers: list[float] = dataclasses.field(default_factory=list)
    after_kubelet: list[float] = dataclasses.field(default_factory=list)
    surely_after_kubelet: list[float] = dataclasses.field(default_factory=list)
    unfinished: dict[str, str] = dataclasses.field(default_factory=dict)

    def figures(self) -> dict[str, str]:
        """Return the measurements: name → figure."""
        p50, p99 = (percentile(self.handovers, part) for part in (0.5, 0.99))
        own_p50, own_p99 = (percentile(self.after_kubelet, part) for part in (0.5, 0.99))
        sure_p50, sure_p99 = (percentile(self.surely_after_kubelet, part) for part in (0.5, 0.99))
        longest = max(self.idle.values(), default=0.0)
        by_family = dict(collections.Counter(name.rpartition("-")[0] for name in self.idle))
        return {
            "pods": f"{self.pods}, started {self.started} {self.by_family}, {self.seconds:.0f} s",
            "wrong": f"{len(self.wrong)} {self.wrong[:3]}",
            "two families on a GPU": f"{len(self.two_families)} {self.two_families[:3]}",
            "overcommitted": f"{len(self.overcommitted)} {self.overcommitted[:3]}",
            "wrong for a family's tools": (
                f"{len(self.tools)} {self.tools[:3]}, of {self.looks} looks at the Node, "
                f"{self.marked} pods marked as served"
            ),
            "failed": f"{len(self.failed)} {self.failed}",
            "failed in the same instant as another family got a GPU": (
                f"{len(self.raced)} {self.raced}"
            ),
            "waited beside an idle GPU": (
                f"{len(self.idle)} pods, longest {longest:.1f} s, {by_family}"
            ),
            "the same, since Volcano sums up memory over the node": f"{len(self.summed)} pods",
            "handovers": f"{len(self.handovers)}, p50 {p50:.2f} s, p99 {p99:.2f} s",
            "of that, after kubelet has let go": (
                f"p50 {own_p50:.2f} s, p99 {own_p99:.2f} s, at least p50 {sure_p50:.2f} s, "
                f"p99 {sure_p99:.2f} s"
            ),
            "unfinished": (
                f"{len(self.unfinished)} {dict(itertools.islice(self.unfinished.items(), 3))}"
            ),
        }

    @property
    def faults(self) -> list[str]:
        """Everything that must never be, as sentences."""
        return [*self.wrong, *self.two_families, *self.overcommitted, *self.tools]

    @property
    def _may_fail(self) -> int:
        """Pods that may be refused because a count of ids was taken back while they were bound."""
        return int(self.pods * bounds.FAILED_OF_A_THOUSAND / 1000)

    @property
    def violations(self) -> list[str]:
        """The bounds of `tests.torture.mixed.bounds` that do not hold, as sentences."""
        found = [
            f"{pod} waited beside a GPU that had been idle for {seconds:.1f} s"
            for pod, seconds in self.idle.items()
        ]
        outrun = [pod for pod, message in self.failed.items() if _OUTRUN.search(message)]
        if len(outrun) < len(self.failed) or len(outrun) > self._may_fail:
            found += [f"{pod} failed: {message}" for pod, message in self.failed.items()]
        if len(self.raced) > RACED_PODS:
            found.append(f"{len(self.raced)} pods failed in races, at most {RACED_PODS}")
        found += [f"{pod} has not ended: {status}" for pod, status in self.unfinished.items()]
        for part, most in ((0.5, AFTER_KUBELET_P50_SECONDS), (0.99, AFTER_KUBELET_P99_SECONDS)):
            if (took := percentile(self.surely_after_kubelet, part)) > most:
                found.append(
                    f"{took:.1f} s of a handover (p{part * 100:g}) after kubelet has let go, at "
                    f"most {most:g}"
                )
        return found


def _is_insufficient(pod: Mapping[str, Any]) -> bool:
    """Tell whether a scheduler says that the node's sum of Volcano's memory is given out."""
    return any(
        condition["type"] == "PodScheduled"
        and "Insufficient volcano.sh/" in condition.get("message", "")
        for condition in pod.get("status", {}).get("conditions") or ()
    )


@dataclasses.dataclass
class _Released:
    """A GPU whose last container has ended:
    when, its family, and when the kubelet spoke of one of its pods as alive for the last time, in
    pod-resources or to the API server. That need not be the pod whose container ended last: the
    kubelet lets go of a deleted pod sooner than of one that has ended by itself.
    """

    at: float
    family: str
    listed_at: float
    free_at: float | None = None  # the first look after that
    looked_at: float = 0.0  # the last look


class Checker:
    """Follows one day.

    State: what containers have written, the ids and annotations of their pods, what the Node has
    shown, and since when each GPU is idle.
    """

    def __init__(self, jobs: Iterable[Job], folder: Path, sizes: Sizes) -> None:
        """``folder`` is where the jobs write; ``sizes`` are the node's."""
        self._jobs = {job.name: job for job in jobs}
        self._folder = folder
        self._sizes, self._uuids = sizes, sizes.uuids
        self._idle_limit_seconds = IDLE_SECONDS + TURN_SECONDS * max(0, len(sizes.families) - 3)
        self.views: dict[str, View] = {}
        self._by_ids: dict[str, frozenset[str]] = {}  # pod → GPUs of the ids that kubelet gave it
        self._meant: dict[str, tuple[str, ...]] = {}  # pod → GPUs that a scheduler named
        self._planned: dict[str, str] = {}  # pod → the annotation that named them, when bound
        self._pods: dict[str, tuple[float, Mapping[str, Any]]] = {}  # as last seen, and when
        self._nodes: list[tuple[float, Mapping[str, Any]]] = []  # as seen, and when
        # GPU → pods that hold ids of it by kubelet's records, those of `BY_IDS`
        self._held: Mapping[str, frozenset[str]] = {}
        self._claimed: Mapping[str, str] = {}  # GPU → a bound pod that has not started
        self._waiting_since: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}
        self._released: dict[str, _Released] = {}
        self._ended: set[str] = set()
        self._let_go: set[str] = set()  # ended pods of which the kubelet speaks no more
        self.report = Report(pods=len(self._jobs))

    # -- what the node shows -----------------------------------------------------------------------

    def read_views(self) -> None:
        """Take in what containers have written since the last time."""
        for path in self._folder.glob("*.start"):
            name = path.stem
            if name not in self.views:
                pairs = (
                    line.split("=", 1) for line in path.read_text().splitlines() if "=" in line
                )
                found = {key: value.strip() for key, value in pairs}
                self.views[name] = view = View(self._jobs[name], float(found["AT"]), None, found)
                for uuid in view.gpus(self._uuids):
                    self._released.pop(uuid, None)
        for path in self._folder.glob("*.end"):
            name, text = path.stem, path.read_text()
            if name in self.views and name not in self._ended and text.endswith("\n"):
                self.views[name] = dataclasses.replace(self.views[name], end=float(text))
                self._end(name, float(text))

    def _end(self, name: str, at: float) -> None:
        self._ended.add(name)
        view = self.views[name]
        running = {
            uuid
            for other, each in self.views.items()
            if other not in self._ended
            for uuid in each.gpus(self._uuids)
        }
        for uuid in set(view.gpus(self._uuids)) - running:
            self._released[uuid] = _Released(at, view.job.family, listed_at=at)

    def see_pods(
        self,
        pods: Iterable[Mapping[str, Any]],
        holdings: Mapping[str, Mapping[str, Sequence[str]]],
        now: float,
    ) -> None:
        """Take in the pods that have not ended, as the API server has them, and kubelet's
        pod-resources: pod → resource → ids.
        """
        held: dict[str, set[str]] = collections.defaultdict(set)
        for name, by_resource in holdings.items():
            ids = [
                id_
                for resource, listed in by_resource.items()
                if _FAMILY_OF.get(resource) in BY_IDS
                for id_ in listed
            ]
            if gpus := frozenset(found[0] for id_ in ids if (found := _UUID.match(id_))):
                self._by_ids[name] = gpus
                for uuid in gpus:
                    held[uuid].add(name)
        claimed, waiting, present = dict[str, str](), dict[str, bool](), set[str]()
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in self._jobs:
                continue
            present.add(name)
            meant = self._look_at(pod, now)
            if not pod["spec"].get("nodeName"):
                waiting[name] = _is_insufficient(pod)
            elif name not in self.views:
                claimed |= dict.fromkeys(meant, name)
        # it was killed before it could write its end
        for name in self.views.keys() - self._ended - present:
            self._end(name, now)
        self._held, self._claimed = (
            {uuid: frozenset(names) for uuid, names in held.items()},
            claimed,
        )
        running = self._running()
        blocked = any(
            held.get(uuid) or running.get(uuid, set()) - {self._jobs[name].family}
            for uuid, name in claimed.items()
        )
        self._look_for_idle(waiting, blocked, now)

    def _look_at(self, pod: Mapping[str, Any], now: float) -> tuple[str, ...]:
        """Take in one pod as the API server has it; return the GPUs that its scheduler has named.

        A scheduler may plan anew until it has bound the pod. From then on it counts by what it has
        written, which nobody else may change.
        """
        name = pod["metadata"]["name"]
        family = self._jobs[name].family
        self._pods[name] = now, pod
        meant = tools.named_gpus(family, pod, self._uuids)
        if meant:
            self._meant[name] = meant
        if pod["spec"].get("nodeName") and (key := tools.PLANS.get(family)):
            text = (pod["metadata"].get("annotations") or {}).get(key, "")
            if text != self._planned.setdefault(name, text):
                self._accuse(f"{name}: {key} was {self._planned[name]}, and is {text}")
        if pod.get("status", {}).get("phase") != "Failed":
            for problem in tools.pod_problems(family, pod):
                self._accuse(f"{name}: {problem}")
        return meant

    def _accuse(self, problem: str) -> None:
        if problem not in self.report.tools:
            self.report.tools.append(problem)

    def see_node(self, node: Mapping[str, Any], now: float) -> None:
        """Take in the Node as schedulers read it."""
        self._nodes.append((now, node))
        for problem in tools.node_problems(node, self._sizes):
            self._accuse(problem)

    def at_rest(
        self, pods: Iterable[Mapping[str, Any]], node: Mapping[str, Any], now: float
    ) -> list[str]:
        """Take in the Node and all its pods after the last of them has ended; explain what is still
        missing for the families' tools.
        """
        missing = tools.idle_problems(node, self._sizes)
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in self._jobs:
                continue
            self._look_at(pod, now)
            if name in self.views and not tools.is_marked(self._jobs[name].family, pod):
                missing.append(f"{name} has started and is not marked as served")
        return missing

    def _running(self) -> dict[str, set[str]]:
        """GPU → the families of its containers that run."""
        running: dict[str, set[str]] = {}
        for name, view in self.views.items():
            if name not in self._ended:
                for uuid in view.gpus(self._uuids):
                    running.setdefault(uuid, set()).add(view.job.family)
        return running

    def _look_for_idle(self, waiting: Mapping[str, bool], claims: bool, now: float) -> None:
        """Note the pods that wait beside an idle GPU.

        Volcano's scheduler sums up the memory of its pods over the node. So those that wait for a
        GPU of another family (``claims``) take the place of those that a free one could serve,
        which it calls insufficient memory (``waiting``). No agent can change that sum, and
        `bounds.IDLE_OF_A_THOUSAND` is about it as well; here one such moment is a fifth of a day's
        pods.
        """
        running = self._running()
        for uuid in self._uuids:
            if uuid in running or self._held.get(uuid) or uuid in self._claimed:
                self._idle_since.pop(uuid, None)
            else:
                self._idle_since.setdefault(uuid, now)
        idle = max((now - since for since in self._idle_since.values()), default=0.0)
        for name, insufficient in waiting.items():
            waited = min(idle, now - self._waiting_since.setdefault(name, now))
            if waited > self._idle_limit_seconds:
                found = self.report.summed if insufficient and claims else self.report.idle
                found[name] = max(waited, found.get(name, 0.0))

    @property
    def handing_over(self) -> bool:
        """Tell whether a GPU has lost its last holder and is not seen healthy
        for another family yet.
        """
        return bool(self._released)

    def see_healthy(
        self,
        healthy: Mapping[str, frozenset[str]],
        listed: Collection[str],
        now: float,
        *,
        shown: Collection[str] = (),
    ) -> None:
        """Take in the GPUs that have healthy ids at kubelet, by resource,
        and the pods that pod-resources lists.

        Of a pod that was deleted pod-resources forgets the ids before the kubelet reports the end;
        ``shown`` are the pods whose end the API server does not show yet.
        """
        self._let_go |= self._ended - set(listed) - set(shown)
        for uuid, released in list(self._released.items()):
            family = released.family
            holders = [
                name
                for name in sorted(self._ended - self._let_go)
                if uuid in self.views[name].gpus(self._uuids)
            ]
            if holders:
                released.listed_at, released.free_at = now, None
            elif released.free_at is None:
                released.free_at = released.looked_at = now
            offered = any(
                uuid in gpus
                for resource, gpus in healthy.items()
                if _FAMILY_OF.get(resource, family) != family
            )
            again = {
                self._jobs[name].family
                for name in self._held.get(uuid, ())
                if name not in self._ended
            }
            if offered or again - {family}:
                if offered and (still := [name for name in holders if name in listed]):
                    self.report.wrong.append(
                        f"{uuid} was offered to another family while kubelet still listed "
                        f"{', '.join(still)}"
                    )
                self.report.handovers.append(max(0.0, now - released.at))
                self.report.after_kubelet.append(max(0.0, now - released.listed_at))
                free_at = released.looked_at if released.free_at is None else released.free_at
                self.report.surely_after_kubelet.append(max(0.0, released.looked_at - free_at))
                del self._released[uuid]
            elif again:
                del self._released[uuid]
            else:
                released.looked_at = now

    def see_failed(self, failed: Mapping[str, str], admitted: Mapping[str, float]) -> None:
        """Take in the pods that kubelet refused for good: pod → message.

        ``admitted`` are the unix seconds at which kubelet looked at each pod, these among them.
        """
        for name, message in failed.items():
            family, at = self._jobs[name].family, admitted.get(name, math.inf)
            raced = any(
                other.job.family in BY_IDS
                and other.job.family != family
                and 0.0 <= at - admitted.get(pod, -math.inf) <= RACE_SECONDS
                and self._took_free_gpu(other)
                for pod, other in self.views.items()
            )
            (self.report.raced if raced and family in BY_IDS else self.report.failed)[name] = (
                message
            )

    def _took_free_gpu(self, view: View) -> bool:
        """Tell whether no other pod had the container's GPU when it started."""
        return not any(
            other.at < view.at and (other.end is None or other.end > view.at)
            for other in self.views.values()
            if set(other.gpus(self._uuids)) & set(view.gpus(self._uuids))
        )

    # -- what it came to ---------------------------------------------------------------------------

    def judge(self) -> None:
        """Compare what each container found with what was meant,
        and all of them with each other.
        """
        self.report.started = len(self.views)
        self.report.by_family = dict(
            collections.Counter(view.job.family for view in self.views.values())
        )
        for name, view in sorted(self.views.items()):
            if problem := self._problem(name, view):
                self.report.wrong.append(
                    f"{name}: {problem}; it found {view.gpus(self._uuids)}, {view.memory_mib} MiB"
                )
            self._judge_marks(name, view)
        self._judge_nodes()
        for uuid in self._uuids:
            self._judge_together(
                uuid, [view for view in self.views.values() if uuid in view.gpus(self._uuids)]
            )

    def _judge_marks(self, name: str, view: View) -> None:
        """Accuse where a pod was last seen without its mark after it had run for long enough."""
        if name not in self._pods or view.job.family not in tools.PLANS:
            return
        seen_at, pod = self._pods[name]
        if tools.is_marked(view.job.family, pod):
            self.report.marked += 1
        elif seen_at > view.at + MARKED_SECONDS:
            self._accuse(f"{name} has started and is not marked as served")

    def _judge_nodes(self) -> None:
        """Accuse where the Node has offered a GPU to one family while containers of another had
        it.
        """
        self.report.looks = len(self._nodes)
        for now, node in self._nodes:
            used: dict[str, set[str]] = {}
            for name, view in self.views.items():
                # One that was killed before it could write its end: when that was is not known.
                until = math.inf if name not in self._ended else view.end or 0.0
                if view.at + SHOWN_SECONDS <= now < until:
                    for uuid in view.gpus(self._uuids):
                        used.setdefault(uuid, set()).add(view.job.family)
            for problem in tools.busy_problems(node, self._sizes, used):
                self._accuse(f"at {now:.2f}: {problem}")

    def _problem(self, name: str, view: View) -> str:
        gpus, job = view.gpus(self._uuids), view.job
        if len(gpus) != 1 or gpus[0] not in self._uuids:
            return "it should have one GPU"
        stray = sorted(
            key for family, key in _OWN_KEYS if family != job.family and key in view.found
        )
        nodes, own = view.found["NODES"], f"/dev/nvidia{self._uuids.index(gpus[0])}"
        # Families whose pods decide may leave the nodes to NVIDIA's runtime.
        allowed = {own} if job.family in BY_IDS else {own, _NO_NODES}
        problems = {
            f"it has another family's {stray}": bool(stray),
            f"its device nodes are {nodes}": nodes not in allowed,
        }
        if job.family in BY_IDS:
            ids_of = self._by_ids.get(name, frozenset(gpus))
            problems |= {
                f"kubelet gave it ids of {sorted(ids_of)}": ids_of != set(gpus),
            }
        else:
            region = int(view.found.get("REGION_BYTES", "0"))
            problems |= {
                f"its scheduler named {self._meant.get(name)}": gpus != self._meant.get(name),
                f"it asked for {job.memory * UNIT_MIB} MiB": (
                    view.memory_mib != job.memory * UNIT_MIB
                ),
                f"it asked for {job.cores_percent} percent": (
                    view.cores_percent != job.cores_percent
                ),
                f"its region says {region} bytes": (
                    job.family == VGPU_FAMILY and region != view.memory_mib << 20
                ),
            }
        if job.family == VGPU_MANAGER:
            claim = self._claim_problem(name, view)
            problems |= {claim: bool(claim)}
        return ", ".join(problem for problem, is_wrong in problems.items() if is_wrong)

    def _claim_problem(self, name: str, view: View) -> str:
        """Explain in what a container of vgpu-manager, with the file that its library reads,
        differs from its claim.
        """
        if name not in self._pods:
            return "its pod was never seen"
        _, pod = self._pods[name]
        claims = read_claims((pod["metadata"].get("annotations") or {}).get(PRE, "")) or {}
        if list(claims) != ["main"]:
            return f"its pod claims for {sorted(claims)}"
        return wrong(view.found, pod["metadata"]["uid"], "main", claims["main"], slots=SLOTS)

    def _judge_together(self, uuid: str, views: Sequence[View]) -> None:
        # One that was killed before it could write its end counts for the moment of its start only.
        last = {
            view.job.name: view.at if view.job.name in self._ended else math.inf for view in views
        }
        known = [
            (view.at, last[view.job.name] if view.end is None else view.end, view) for view in views
        ]
        for at, _, view in known:
            now = [other for began, end, other in known if began <= at < end or other is view]
            families = {other.job.family for other in now}
            if len(families) > 1:
                names = sorted(other.job.name for other in now)
                self.report.two_families.append(f"{uuid} at {at:.2f}: {names}")
            if (told := sum(other.memory_mib for other in now)) > self._sizes.memory_mib:
                self.report.overcommitted.append(f"{uuid} at {at:.2f}: {told} MiB")
            if (percent := sum(other.cores_percent for other in now)) > _ALL_CORES:
                self.report.overcommitted.append(f"{uuid} at {at:.2f}: {percent} percent")
