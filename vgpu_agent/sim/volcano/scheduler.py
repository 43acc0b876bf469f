"""A stand-in for Volcano's scheduler, for the demo and for tests in which the real scheduler is not
available.

It selects a node and cards for each pod whose ``schedulerName`` is ``volcano``, and writes the same
as the real scheduler. By default this is the behaviour of the master branch of August 2026: the
annotations are part of the Binding. With ``old`` it is that of 1.13 to 1.14.2: the annotations are
patched onto the pod before it is bound, and there is a handshake with each node: an annotation that
the scheduler sets and the node's plugin must answer in time. Golden vectors: volcano-vgpu G3, G6,
G7, G8, G13; volcano-gpushare S2. All of its state is in the API server, so it can be killed at any
time and started on any machine.

    python -m vgpu_agent.sim.volcano.scheduler --kubeconfig F [--policy binpack] [--old] [--gpushare
    share] [--node-lock]

Intended differences from the real scheduler: a pod counts as placed as soon as its Binding is
accepted; a gang is patched and bound only when it is complete, and takes each node's lock once;
timestamps are in UTC. There are no queues, priorities, preemption or pipelining.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vgpu_agent import log
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.errors import ClusterError, SimulationError
from vgpu_agent.sim.volcano import annotations as volcano_annotations
from vgpu_agent.sim.volcano import resources
from vgpu_agent.sim.volcano.api import (
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    ApiAccess,
    ApiClient,
    Collection,
)
from vgpu_agent.sim.volcano.gpushare import GpushareLedger
from vgpu_agent.sim.volcano.ledger import Placed, Policy, VgpuLedger, group_of
from vgpu_agent.sim.volcano.node import NodeRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.sim.volcano.mig import Geometries
    from vgpu_agent.sim.volcano.resources import Object

_logger = log.get(__name__)

# volcano-vgpu §2.4.
_LOCK_TRIES = 5
_LOCK_RETRY_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class VolcanoSettings:
    """The configuration of the simulated scheduler.

    Attributes:
        scheduler_name: the ``schedulerName`` of the pods to schedule.
        policy: Volcano's deviceshare.SchedulePolicy.
        schedule_weight: Volcano's deviceshare.ScheduleWeight. With 0 all nodes have the same score,
            so the first by name is selected.
        old: behave like 1.13 to 1.14.2: patch before bind, expect a handshake from nodes, and
            accept nodes that offer only some of vgpu-number, vgpu-memory and vgpu-cores.
        gpushare: enable GPUSharingEnable (``share``) or GPUNumberEnable (``number``) instead of
            VGPUEnable (``off``).
        node_lock: Volcano's deviceshare.NodeLockEnable.
        geometries: the MIG geometries in the ConfigMap of Volcano's device plugin.
        min_members: ``namespace/group`` → the number of pods that must be placed together. The
            annotation scheduling.volcano.sh/group-min-member of a pod has the same meaning; the
            larger number is used.
        period_seconds: the shortest time between two rounds, each of which tries to place all
            waiting pods.
        retry_seconds: the longest time between two rounds, and the pause after a failure.
        request_timeout_seconds: the timeout of one request to the API server.
        watch_seconds: the duration of a watch, after which a new one is opened.
    """

    scheduler_name: str = "volcano"
    policy: Policy = "none"
    schedule_weight: int = 10
    old: bool = False
    gpushare: Literal["off", "share", "number"] = "off"
    node_lock: bool = False
    geometries: Geometries | None = None
    min_members: Mapping[str, int] = dataclasses.field(default_factory=dict)
    period_seconds: float = 0.05
    retry_seconds: float = 1.0
    request_timeout_seconds: float = 10.0
    watch_seconds: int = 240


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The node for a pod, and ``placed``: the annotations that name its cards there."""

    pod: Object
    node: str
    placed: Placed
    lock_key: str  # the annotation by which the node is locked; empty: no lock is needed


class VolcanoScheduler:
    """One scheduler on one API server.

    State: copies of nodes and pods, and the pods whose Binding the watch has not shown yet. `run`
    may be called again after it has returned.
    """

    def __init__(
        self,
        access: ApiAccess,
        settings: VolcanoSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the scheduler; ``clock`` returns unix seconds."""
        self.settings = settings or VolcanoSettings()
        self._clock = clock
        self._client = ApiClient(access, timeout_seconds=self.settings.request_timeout_seconds)
        self._changed = asyncio.Event()
        self._bound: dict[str, Object] = {}  # by UID, as the watch will show them
        self._locked: set[str] = set()  # the nodes that this round has locked
        self._nodes, self._pods = (
            Collection(
                self._client,
                f"/api/v1/{kind}",
                self._changed.set,
                watch_seconds=self.settings.watch_seconds,
                retry_seconds=self.settings.retry_seconds,
            )
            for kind in ("nodes", "pods")
        )

    async def run(self) -> None:
        """Schedule until cancelled."""
        pause = self.settings.retry_seconds
        async with (
            self._client,
            Supervisor(backoff_min_seconds=pause, backoff_max_seconds=pause) as supervisor,
        ):
            supervisor.start("watch nodes", self._nodes.run)
            supervisor.start("watch pods", self._pods.run)
            supervisor.start("schedule", self._schedule)
            await asyncio.Event().wait()

    async def _schedule(self) -> None:
        announced = False
        while True:
            self._changed.clear()
            if self._nodes.synced and self._pods.synced:
                if not announced:
                    announced = True
                    _logger.info(
                        "sim.volcano.started",
                        nodes=len(self._nodes.items),
                        pods=len(self._pods.items),
                    )
                try:
                    await self._round()
                except ClusterError as err:
                    # The outcome of the write is unknown, so list everything again.
                    _logger.warning("sim.volcano.round_broken", error=str(err))
                    self._bound.clear()
                    self._pods.invalidate()
                    self._nodes.invalidate()
                    await asyncio.sleep(self.settings.retry_seconds)
            await asyncio.sleep(self.settings.period_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.retry_seconds):
                    await self._changed.wait()

    async def _round(self) -> None:
        """Try to place every waiting pod once; the pods of a gang are placed together.

        Raises:
            ClusterError: a write had no clear outcome.
        """
        now = self._clock()
        self._locked.clear()
        pods = self._current_pods()
        waiting = [pod for pod in pods if self._is_waiting(pod)]
        usable = await self._usable_nodes(now)
        if not waiting:
            return
        rooms = {room.name: room for room in self._rooms(pods, usable)}
        waiting.sort(
            key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", resources.key(pod))
        )
        gangs: dict[str, list[Object]] = collections.defaultdict(list)
        for pod in waiting:
            gangs[group_of(pod) or f"pod {resources.key(pod)}"].append(pod)
        for group, members in gangs.items():
            placed_before = sum(
                1
                for pod in pods
                if group_of(pod) == group and _node_of(pod) and not resources.is_terminated(pod)
            )
            await self._place(
                rooms, members, self._min_members(group, members) - placed_before, now
            )

    async def _place(
        self, rooms: dict[str, NodeRoom], members: Sequence[Object], needed: int, now: float
    ) -> None:
        """Place and bind the pods of ``members`` that fit, or none if fewer than ``needed`` fit.

        The room that they take is subtracted in ``rooms``.
        """
        trial, choices, refused = dict(rooms), list[_Choice](), dict[str, str]()
        for pod in members:
            choice = self._choose(trial, pod, now)
            if isinstance(choice, str):
                refused[pod["metadata"]["uid"]] = choice
            else:
                choices.append(choice)
        if len(choices) < needed:
            for choice in choices:
                refused[choice.pod["metadata"]["uid"]] = (
                    f"pod group is not ready, {len(choices)} can be placed, {needed} are needed."
                )
        elif locked := await self._lock_all(choices):
            refused.update({choice.pod["metadata"]["uid"]: locked for choice in choices})
        else:
            rooms.update(trial)
            for choice in choices:
                await self._bind(choice)
        for pod in members:
            if pod["metadata"]["uid"] in refused:
                await self._report_unschedulable(pod, refused[pod["metadata"]["uid"]])

    def _choose(self, rooms: dict[str, NodeRoom], pod: Object, now: float) -> _Choice | str:
        """Choose the best node for the pod, and subtract its room in ``rooms``.

        Returns:
            the choice, or Volcano's message if the pod fits on no node.
        """
        best: tuple[float, NodeRoom, Placed] | None = None
        reasons: collections.Counter[str] = collections.Counter()
        for _, room in sorted(rooms.items()):
            candidate = room.copy()
            placed = candidate.place(pod, now)
            if not isinstance(placed, Placed):
                reasons.update(placed)
            elif best is None or placed.score * self.settings.schedule_weight > best[0]:
                best = (placed.score * self.settings.schedule_weight, candidate, placed)
        if best is None:
            causes = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
            return f"0/{len(rooms)} nodes are unavailable: {causes or 'the cluster has no nodes'}."
        _, room, placed = best
        rooms[room.name] = room
        return _Choice(
            pod, room.name, placed, room.lock_key(pod) if self.settings.node_lock else ""
        )

    def _current_pods(self) -> list[Object]:
        """Return all pods; a pod that was just bound already has its node and annotations."""
        items = self._pods.items
        self._bound = {
            uid: pod
            for uid, pod in self._bound.items()
            if uid in items and not _node_of(items[uid])
        }
        return [self._bound.get(uid, pod) for uid, pod in items.items()]

    def _is_waiting(self, pod: Object) -> bool:
        spec = pod.get("spec") or {}
        ours = spec.get("schedulerName") == self.settings.scheduler_name and not spec.get(
            "schedulingGates"
        )
        return (
            ours
            and not spec.get("nodeName")
            and not resources.is_terminated(pod)
            and not resources.is_terminating(pod)
        )

    async def _usable_nodes(self, now: float) -> list[Object]:
        """Return the nodes whose device annotations are used.

        With ``old``, the scheduler's side of the handshake is written first, and only nodes that
        have answered in time are returned.
        """
        nodes = list(self._nodes.items.values())
        if not self.settings.old or self.settings.gpushare != "off":
            return nodes
        alive = []
        for node in nodes:
            usable, answer = volcano_annotations.judge_handshake(
                resources.annotations_of(node).get(volcano_annotations.HANDSHAKE), now
            )
            if answer is not None:
                await self._annotate(
                    f"/api/v1/nodes/{node['metadata']['name']}",
                    node,
                    {volcano_annotations.HANDSHAKE: answer},
                    self._nodes,
                )
            if usable:
                alive.append(node)
        return alive

    def _rooms(self, pods: Iterable[Object], usable: Iterable[Object]) -> Iterable[NodeRoom]:
        """Yield what is free on each node; cards only of the nodes in ``usable``."""
        on_node: dict[str, list[Object]] = collections.defaultdict(list)
        for pod in pods:
            on_node[_node_of(pod)].append(pod)
        usable_names = {node["metadata"]["name"] for node in usable}
        for node in self._nodes.items.values():
            name = node["metadata"]["name"]
            devices = self._ledger(node, on_node[name]) if name in usable_names else None
            yield NodeRoom(node, resources.free(node, on_node[name]), devices)

    def _ledger(self, node: Object, pods: Sequence[Object]) -> VgpuLedger | GpushareLedger | None:
        """Return the scheduler's accounts of a node's cards, of which ``pods`` have their parts;
        None where it finds no cards to share.
        """
        if self.settings.gpushare == "off":
            return VgpuLedger.of(
                node,
                pods,
                policy=self.settings.policy,
                requires_resources=not self.settings.old,
                geometries=self.settings.geometries,
            )
        return GpushareLedger.of(node, pods, strategy=self.settings.gpushare)

    def _min_members(self, group: str, members: Iterable[Object]) -> int:
        numbers = [self.settings.min_members.get(group, 1)]
        numbers += [
            int(
                resources.amount(
                    resources.annotations_of(pod).get(volcano_annotations.GROUP_MIN_MEMBER, 1)
                )
            )
            for pod in members
        ]
        return max(numbers)

    async def _lock_all(self, choices: Iterable[_Choice]) -> str:
        """Take the locks of all nodes that the choices need.

        Returns:
            The reason if a lock cannot be taken; otherwise "".
        """
        for name, key in sorted(
            {(choice.node, choice.lock_key) for choice in choices if choice.lock_key}
        ):
            if failure := await self._lock(name, key):
                return failure
        return ""

    async def _lock(self, name: str, key: str) -> str:
        """Take the lock of one node, its annotation ``key``, in the way of the real scheduler: read
        the Node, then write.

        A round of the real scheduler takes the locks for all its pods before it binds any of them.
        So a second pod of the round cannot take the same lock.

        Returns:
            The reason if the lock cannot be taken; otherwise "".
        """
        if name in self._locked:
            return f"node {name} has been locked within 5 minutes"
        for _ in range(_LOCK_TRIES):
            node = await self._client.request("GET", f"/api/v1/nodes/{name}")
            now = self._clock()
            taken = resources.annotations_of(node).get(key)
            age = (
                volcano_annotations.lock_age(taken, now)
                if taken is not None
                else volcano_annotations.LOCK_SECONDS
            )
            # None: the time in the annotation cannot be read; this counts as locked
            if age is None or age < volcano_annotations.LOCK_SECONDS:
                return f"node {name} has been locked within 5 minutes"
            version = node["metadata"]["resourceVersion"]
            if await self._annotate(
                f"/api/v1/nodes/{name}",
                node,
                {key: volcano_annotations.lock_stamp(now)},
                self._nodes,
                version=version,
            ):
                self._locked.add(name)
                return ""
            await asyncio.sleep(_LOCK_RETRY_SECONDS)
        return f"node {name} could not be locked"

    async def _bind(self, choice: _Choice) -> None:
        pod, metadata = choice.pod, choice.pod["metadata"]
        path = _path(pod)
        written = choice.placed.annotations
        if (
            self.settings.old
            and written
            and not await self._annotate(path, pod, written, self._pods)
        ):
            return
        all_annotations = {**resources.annotations_of(pod), **written}
        identity = {
            "name": metadata["name"],
            "namespace": metadata.get("namespace", "default"),
            "uid": metadata["uid"],
        }
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": (
                identity if self.settings.old else {**identity, "annotations": all_annotations}
            ),
            "target": {"apiVersion": "v1", "kind": "Node", "name": choice.node},
        }
        if await self._write("POST", f"{path}/binding", binding) is None:
            return
        spec = {**pod["spec"], "nodeName": choice.node}
        self._bound[metadata["uid"]] = {
            **pod,
            "metadata": {**metadata, "annotations": all_annotations},
            "spec": spec,
        }
        _logger.info(
            "sim.volcano.bound", pod=resources.key(pod), node=choice.node, annotations=written
        )

    async def _report_unschedulable(self, pod: Object, why: str) -> None:
        """Write ``why`` into the pod's status and an event, unless the status already has it."""
        conditions = (pod.get("status") or {}).get("conditions") or ()
        if any(
            condition.get("type") == "PodScheduled" and condition.get("message") == why
            for condition in conditions
        ):
            return
        stamp = volcano_annotations.lock_stamp(self._clock())
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": why,
            "lastTransitionTime": stamp,
        }
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [condition]}}
        answer = await self._write("PATCH", f"{_path(pod)}/status", body, STRATEGIC_MERGE_PATCH)
        if answer is None:
            return
        self._pods.put(answer)
        _logger.info("sim.volcano.unschedulable", pod=resources.key(pod), why=why)
        name, namespace = pod["metadata"]["name"], pod["metadata"].get("namespace", "default")
        event = {
            "metadata": {"generateName": f"{name}.", "namespace": namespace},
            "involvedObject": {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": name,
                "namespace": namespace,
                "uid": pod["metadata"]["uid"],
            },
            "type": "Warning",
            "reason": "FailedScheduling",
            "message": why,
            "source": {"component": self.settings.scheduler_name},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        await self._write("POST", f"/api/v1/namespaces/{namespace}/events", event)

    async def _annotate(
        self,
        path: str,
        thing: Object,
        written: Mapping[str, str],
        into: Collection,
        *,
        version: str = "",
    ) -> bool:
        """Add annotations to the object at ``path``.

        Args:
            path: the path in the API.
            thing: the object as it was read; the write fails for another object of that name.
            written: the annotations.
            into: the collection that gets the new object.
            version: the resource version that the object must still have; "" for any.

        Returns:
            True if the API server has accepted the write.
        """
        metadata = {"uid": thing["metadata"]["uid"], "annotations": dict(written)} | (
            {"resourceVersion": version} if version else {}
        )
        answer = await self._write("PATCH", path, {"metadata": metadata}, MERGE_PATCH)
        if answer is not None:
            into.put(answer)
        return answer is not None

    async def _write(
        self, method: str, path: str, body: Object, content_type: str = "application/json"
    ) -> Object | None:
        """Write to the API server; return None if it refuses this write, so that others can go on.

        Raises:
            ClusterError: there was no answer, or an error that is not specific to this write.
        """
        try:
            return await self._client.request(method, path, body, content_type=content_type)
        except ClusterError as err:
            if err.status in (400, 403, 404, 409, 422):
                _logger.info("sim.volcano.refused", error=str(err))
                return None
            raise


def _node_of(pod: Object) -> str:
    return (pod.get("spec") or {}).get("nodeName") or ""


def _path(pod: Object) -> str:
    return (
        f"/api/v1/namespaces/{pod['metadata'].get('namespace', 'default')}/pods/"
        f"{pod['metadata']['name']}"
    )


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu_agent.sim.volcano.scheduler",
        description="A stand-in for Volcano's scheduler.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True, help="the kubeconfig file")
    parser.add_argument(
        "--scheduler-name", default="volcano", help="schedulerName of the pods to schedule"
    )
    parser.add_argument(
        "--policy",
        choices=("none", "binpack", "spread"),
        default="none",
        help="the order in which cards are tried",
    )
    parser.add_argument(
        "--old",
        action="store_true",
        help="behave like Volcano 1.13 to 1.14.2: patch before bind, handshake",
    )
    parser.add_argument(
        "--gpushare",
        choices=("off", "share", "number"),
        default="off",
        help="schedule GPU share instead of vGPU",
    )
    parser.add_argument(
        "--node-lock",
        action="store_true",
        help="lock the node for each pod, as NodeLockEnable does",
    )
    gang = "NAMESPACE/GROUP=NUMBER"
    parser.add_argument(
        "--min-member",
        action="append",
        default=[],
        type=_min_member,
        metavar=gang,
        help="size of a gang",
    )
    parser.add_argument("--log-level", choices=log.LEVELS, default="info")
    return parser.parse_args(given)


def _min_member(text: str) -> tuple[str, int]:
    group, _, number = text.partition("=")
    try:
        return group, int(number)
    except ValueError as err:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no number; write NAMESPACE/GROUP=NUMBER"
        ) from err


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a scheduler until a signal ends the process. There is no state to save."""
    given = _arguments(arguments)
    try:
        access = ApiAccess.from_kubeconfig(given.kubeconfig)
    except SimulationError as err:
        sys.exit(str(err))
    log.configure(level=given.log_level)
    settings = VolcanoSettings(
        scheduler_name=given.scheduler_name,
        policy=given.policy,
        old=given.old,
        gpushare=given.gpushare,
        node_lock=given.node_lock,
        min_members=dict(given.min_member),
    )
    scheduler = VolcanoScheduler(access, settings)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(scheduler.run())


if __name__ == "__main__":
    main()
