"""Kubernetes events about the health of GPUs and the node's other problems: on our Node, and on the
pods that hold a dead GPU or whose program caused an error on one.

`kubectl describe node` then shows what the agent's log says, and the owner of a pod reads that its
GPU has died without access to the node. Each change is one event. GPUs that change together for the
same reason share one, because a driver that stops takes all of them. An event that repeats is the
same event with a higher count (`events`), and a GPU that keeps failing must run without errors for
longer each time before it counts as healthy (`gpu.health`), so a broken card cannot flood the API
server. An outage of the API server has no event: a thousand nodes would write it at the moment when
the API server is back.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
import collections
import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cluster.dead_gpus import (
    dead_devices,
    gpu_name,
    pod_of,
    pods_on,
    separate_devices,
)
from vgpu_agent.concurrency import Versions
from vgpu_agent.log import ChangeFilter
from vgpu_agent.model import GrantState, Remedy
from vgpu_agent.status import NvmlState, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.cluster.dead_gpus import DeadDevice, GpuFacts
    from vgpu_agent.cluster.events import Events
    from vgpu_agent.nodes import Node
    from vgpu_agent.pods import PodCache
    from vgpu_agent.status import XidSeen

# the reasons of the events
LOST, UNHEALTHY, RECOVERED, FLAPPING = "GpuLost", "GpuUnhealthy", "GpuRecovered", "GpuFlapping"
HUNG, MISSING, ANSWERING = "GpuDriverHung", "GpuDriverMissing", "GpuDriverAnswering"
LIBRARY_MISSING, PROGRAM_ERROR = "GpuLibraryMissing", "GpuProgramError"
PROBLEM, PROBLEM_OVER = "VgpuProblem", "VgpuProblemOver"

# Problems of these kinds have events of their own, or none: the agent's starts and stops are seen
# in the readiness of its pod.
_NO_PROBLEM_EVENT = frozenset(
    {ProblemKind.AGENT, ProblemKind.API_SERVER, ProblemKind.GPU, ProblemKind.NVML}
)

# How often the driver, the libraries, the grants and the problems are looked at without a change of
# the inventory; and how long a problem must last to have an event. A restart of the kubelet is over
# before that.
LOOK_SECONDS = 5.0
# A GPU that fails this often within this time is flapping.
_FLAPPING_FAILURES, _FLAPPING_SECONDS = 3, 3600.0
# More GPUs than that are named by their indices alone, so that the reason fits into the message.
_NAMED_IN_FULL = 2


class _ReportedDead(msgspec.Struct):
    """A dead device as it was reported; kept until it recovers. ``lost``: its GPU no longer answers
    or is gone; otherwise it is present and unhealthy.
    """

    name: str
    lost: bool


class _SeenProblem(msgspec.Struct):
    """A problem that exists. ``since``: when it was first seen, on the event loop's clock."""

    since: float
    text: str  # for the event of its end
    reported: bool = False  # the event of the problem was raised


class GpuEvents:
    """The task that compares the GPUs with those of the last look, and raises events for what
    differs.

    State: in memory only. A new agent raises the events of GPUs that are dead at its start.
    """

    def __init__(
        self,
        events: Events,
        facts: GpuFacts,
        pods: PodCache,
        node: Callable[[], Node | None],
    ) -> None:
        """Build the task; `run` runs it.

        Args:
            events: the queue of events.
            facts: the GPUs and their holders, the state of the driver, the missing libraries of
                isolation backends, and the node's problems.
            pods: the pods of this node.
            node: our Node, None before it was read.
        """
        self._events, self._facts, self._pods, self._node = events, facts, pods, node
        self._dead: dict[str, _ReportedDead] = {}  # GPUs and instances, by UUID
        # GPU → the last failures, in seconds of the event loop's clock
        self._failures: dict[str, collections.deque[float]] = {}
        # UID of a pod → its dead devices that were reported, by UUID
        self._on_pods: dict[str, dict[str, _ReportedDead]] = {}
        self._hung = ""  # the driver call whose hang was reported last; empty when that is over
        self._driver_missing = False
        # isolation backend → why its library is missing, as it was reported last
        self._missing_libraries = ChangeFilter()
        # the UUID of the GPU, the XID and its first time, of each error of a program that was
        # reported
        self._program_errors: set[tuple[str, int, float]] = set()
        # kind, subject and text of a problem, without numbers
        self._problems: dict[tuple[str, str, str], _SeenProblem] = {}

    async def run(self, beat: Callable[[], None]) -> None:
        """Raise events until cancelled; send a heartbeat at least every `LOOK_SECONDS`."""
        while True:
            beat()
            versions = Versions(self._facts.inventory)  # taken first, so that no change is missed
            self.look_once()
            await versions.passed(timeout_seconds=LOOK_SECONDS)  # until there is a newer inventory

    def look_once(self) -> None:
        """Raise the events of all changes since the last call."""
        if (node := self._node()) is None:
            return
        dead = dead_devices(self._facts.inventory.value)
        # Pods first: when too many events wait, the oldest are dropped, and those of the Node
        # concern everybody.
        self._look_at_pods(dead)
        self._look_at_programs()
        self._look_at_problems(node)
        self._look_at_devices(node, dead)
        self._look_at_driver(node)
        # isolation backend → why its library is missing
        for backend, why in self._facts.libraries().items():
            if self._missing_libraries.is_new(backend, why):
                self._events.raise_event(
                    node, LIBRARY_MISSING, f"containers cannot be limited by {backend}: {why}"
                )
        self._missing_libraries.keep_only(self._facts.libraries())

    # -- the Node ----------------------------------------------------------------------------------

    def _look_at_devices(self, node: Node, dead: Mapping[str, DeadDevice]) -> None:
        # (reason, why, remedy) → devices, in the order of the inventory
        failed: dict[tuple[str, str, Remedy | None], list[DeadDevice]] = {}
        # without the instances of a GPU that is dead as a whole
        for device in separate_devices(self._facts.inventory.value):
            known = self._dead.get(device.uuid)
            if known is None or (device.lost and not known.lost):
                reason = self._reason(device, is_new=known is None)
                failed.setdefault((reason, device.why, device.remedy), []).append(device)
                self._dead[device.uuid] = _ReportedDead(device.name, device.lost)
        for (reason, why, remedy), devices in failed.items():
            text = f"{_joined([device.name for device in devices])}: {why}"
            if remedy is not None:
                text += f"; {remedy.sentence(_gpus(devices))}"
            self._events.raise_event(node, reason, text)
        recovered = [uuid for uuid in self._dead if uuid not in dead]
        present = self._facts.inventory.value.devices
        # MIG instances come and go with ever new UUIDs.
        for uuid in self._failures.keys() - present:
            del self._failures[uuid]
        names = [self._dead.pop(uuid).name for uuid in recovered if uuid in present]
        for uuid in recovered:
            self._dead.pop(uuid, None)  # an instance that was removed while it was unhealthy
        if names:
            it = "it" if len(names) == 1 else "them"
            self._events.raise_event(
                node, RECOVERED, f"{_joined(names)}: new containers may use {it} again", "Normal"
            )

    def _reason(self, device: DeadDevice, *, is_new: bool) -> str:
        """Count the failure and return the event's reason."""
        if device.lost:
            return LOST
        now = asyncio.get_running_loop().time()
        failures = self._failures.setdefault(
            device.uuid, collections.deque(maxlen=_FLAPPING_FAILURES)
        )
        if is_new:
            failures.append(now)
        flaps = len(failures) == _FLAPPING_FAILURES and now - failures[0] < _FLAPPING_SECONDS
        return FLAPPING if flaps else UNHEALTHY

    def _look_at_driver(self, node: Node) -> None:
        status = self._facts.driver()
        if status.state is NvmlState.HUNG and status.call != self._hung:
            self._hung = status.call
            gpu = self._facts.inventory.value.gpu(status.gpu)
            about = f" of {gpu_name(gpu)}" if gpu is not None else ""
            self._events.raise_event(
                node,
                HUNG,
                f"the NVIDIA driver does not return from {status.call}{about}; "
                f"{Remedy.CHECK_DRIVER.sentence(status.gpu)}",
            )
        elif status.state is NvmlState.MISSING and not self._driver_missing:
            self._driver_missing = True
            # GPUs that were there before are reported as lost
            if not self._facts.inventory.value.gpus:
                self._events.raise_event(node, MISSING, " ".join(status.last_error.split()))
        elif status.state is NvmlState.ANSWERING and (self._hung or self._driver_missing):
            self._hung, self._driver_missing = "", False
            self._events.raise_event(node, ANSWERING, "the NVIDIA driver answers again", "Normal")

    def _look_at_problems(self, node: Node) -> None:
        """Raise an event for each problem that lasts, and for its end. Numbers in its text may be
        seconds that it has lasted so far.
        """
        now, libraries = asyncio.get_running_loop().time(), self._facts.libraries().values()
        present = {
            (problem.kind.value, problem.subject, re.sub(r"\d+", "", problem.text)): problem
            for problem in self._facts.problems()
            if problem.kind not in _NO_PROBLEM_EVENT
            # reported as `LIBRARY_MISSING`
            and not any(why in problem.text for why in libraries)
        }
        for key in self._problems.keys() - present.keys():
            over = self._problems.pop(key)
            if over.reported:
                self._events.raise_event(node, PROBLEM_OVER, f"over: {over.text}", "Normal")
        # `part` names the kind and the subjects of a problem, `reason` has its text and the remedy
        for key, problem in present.items():
            known = self._problems.setdefault(
                key, _SeenProblem(now, f"{problem.part}: {problem.text}")
            )
            if not known.reported and now - known.since >= LOOK_SECONDS:
                known.reported = True
                message = f"{problem.part}: {problem.reason}"
                self._events.raise_event(node, PROBLEM, " ".join(message.split()))

    # -- the pods ----------------------------------------------------------------------------------

    def _look_at_pods(self, dead: Mapping[str, DeadDevice]) -> None:
        # UID of a pod that holds a dead device → the pod, and its dead devices by UUID
        on_dead = pods_on(dead, self._facts.grants(), self._pods)
        for uid, (pod, held) in on_dead.items():
            known = self._on_pods.setdefault(uid, {})
            failed: dict[tuple[bool, str], list[str]] = {}
            for device in held.values():
                before = known.get(device.uuid)
                if before is None or (device.lost and not before.lost):
                    known[device.uuid] = _ReportedDead(device.name, device.lost)
                    failed.setdefault((device.lost, device.why), []).append(device.name)
            for (lost, why), names in failed.items():
                it, verb = ("it", "is lost") if len(names) == 1 else ("them", "are lost")
                self._events.raise_event(
                    pod,
                    LOST if lost else UNHEALTHY,
                    f"this pod holds {_joined(names)}, which {verb if lost else 'failed'}: "
                    f"{why}. It keeps {it} until it ends; delete the pod if its work has failed",
                )
        for uid in list(self._on_pods):
            self._recover(uid, on_dead[uid][1] if uid in on_dead else {}, dead)

    def _look_at_programs(self) -> None:
        """Tell the pods on a GPU of an XID that a program has caused: their owners cannot see the
        node. The same XID several times in a row is reported once: the state of the driver has it
        as one entry.
        """
        seen = {
            (gpu, each.xid, each.first_at): each
            for gpu, entries in self._facts.driver().xids.items()
            for each in entries
            # One that is not ignored makes its GPU Unhealthy, which has events of its own.
            # `APPLICATION`: the owner of a program has to look at that program's error.
            if each.ignored and each.remedy is Remedy.APPLICATION
        }
        for gpu, xid, first_at in seen.keys() - self._program_errors:
            self._tell_holders(gpu, seen[gpu, xid, first_at])
        self._program_errors = {*seen}

    def _tell_holders(self, uuid: str, seen: XidSeen) -> None:
        gpu = self._facts.inventory.value.gpu(uuid)
        if gpu is None:
            return
        hit = {uuid} | {one.uuid for one in gpu.mig_instances if seen.concerns(one)}
        holders = {
            pod.uid: pod
            for grant in self._facts.grants()
            if grant.state is not GrantState.RELEASED
            if any(share.device in hit for share in grant.shares)
            if (pod := pod_of(grant, self._pods)) is not None and not pod.ended
        }
        with_others = "" if len(holders) == 1 else " with other pods"
        for pod in holders.values():
            self._events.raise_event(
                pod,
                PROGRAM_ERROR,
                f"{seen.text}. That was reported on {gpu_name(gpu)}, which this pod "
                f"holds{with_others}; {seen.remedy.sentence(uuid)}",
            )

    def _recover(
        self, uid: str, held: Mapping[str, DeadDevice], dead: Mapping[str, DeadDevice]
    ) -> None:
        """Raise the event of the devices of a pod that work again, and forget the others that it
        no longer holds.
        """
        over = {
            device: self._on_pods[uid].pop(device)
            for device in [*self._on_pods[uid]]
            if device not in held
        }
        if not self._on_pods[uid]:
            del self._on_pods[uid]
        present = self._facts.inventory.value.devices
        names = [
            known.name for device, known in over.items() if device in present and device not in dead
        ]
        pod = next((pod for pod in self._pods.pods if pod.uid == uid), None) if names else None
        if pod is not None and not pod.ended:
            work = "works" if len(names) == 1 else "work"
            text = f"{_joined(names)}, which this pod holds, {work} again"
            self._events.raise_event(pod, RECOVERED, text, "Normal")


def _gpus(devices: Sequence[DeadDevice]) -> str:
    """Return the GPUs of devices as nvidia-smi takes them: by UUID, by index if there are more than
    `_NAMED_IN_FULL` devices.
    """
    if len(devices) <= _NAMED_IN_FULL:
        return ",".join(dict.fromkeys(device.gpu for device in devices))
    return ",".join(dict.fromkeys(str(device.index) for device in devices))


def _joined(names: list[str]) -> str:
    """Join the names of devices. If there are more than `_NAMED_IN_FULL`, each name ends before its
    bracket, so GPUs are without their UUIDs.
    """
    if len(names) <= _NAMED_IN_FULL:
        return " and ".join(names)
    # a GPU's name is "GPU 0 (GPU-…)"
    return f"{len(names)} devices: {', '.join(name.partition(' (')[0] for name in names)}"
