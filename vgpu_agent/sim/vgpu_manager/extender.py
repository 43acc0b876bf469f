"""A stand-in for vgpu-manager's scheduler, kube-scheduler and extender together, for tests and the
demo.

It gives pods whose ``schedulerName`` is ``vgpu-scheduler`` a node and cards on it, and writes as
the real one does: a patch when a pod is filtered, another before it is bound, then the Binding
(vgpu-manager §4.3, §5.2, §5.8, §13.3). Filtering is one pod after the other; Bindings to one node
are kept apart by 30 ms. All that it must not forget is in the API server, so it may be killed and
started at any moment.

A claim here is vgpu-manager's: the share of one card that is planned for one container, as the
annotation ``pre-allocated`` names it. It is not a claim of the agent's ledger.

    python -m vgpu_agent.sim.vgpu_manager.extender --kubeconfig F [--device-policy binpack]

Not simulated: events, preemption, topology, choice among nodes. A gang needs nothing more: its
members are placed one by one (vgpu-manager §5.7).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import datetime as dt
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import ClusterError, SimulationError
from vgpu_agent.sim.vgpu_manager import formats
from vgpu_agent.sim.vgpu_manager.formats import Keys
from vgpu_agent.sim.vgpu_manager.ledger import (
    MAX_CARDS,
    NodeLedger,
    asked_by,
    holds_claim,
    node_of,
)
from vgpu_agent.sim.volcano import resources
from vgpu_agent.sim.volcano.api import (
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    ApiAccess,
    ApiClient,
    Collection,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.sim.vgpu_manager.formats import Claims
    from vgpu_agent.sim.vgpu_manager.ledger import Reason
    from vgpu_agent.sim.volcano.resources import Object

SCHEDULER_NAME = "vgpu-scheduler"
POLICIES = ("none", "binpack", "spread")  # for the choice of cards

_PERIOD_SECONDS = 0.02  # the shortest pause between two rounds
_MAX_CORES = 100  # percent of a card's compute
# HTTP statuses with which it is certain that a write was not done
_REFUSALS = (400, 403, 404, 409, 422)
_logger = log.get(__name__)


@dataclasses.dataclass(frozen=True)
class ExtenderSettings:
    """The configuration of the simulated scheduler.

    Attributes:
        scheduler_name: whose pods to take.
        domain: of all keys.
        device_policy: the policy of pods that name none. In a real cluster vgpu-manager's webhook
            writes it into the pod.
        bind_seconds: how long a Binding keeps the next one to its node waiting.
        retry_seconds: the pause after a failure, and the longest time between two rounds.
        request_timeout_seconds: of one request to the API server.
        watch_seconds: after which a watch is begun again.
    """

    scheduler_name: str = SCHEDULER_NAME
    domain: str = "nvidia.com"
    device_policy: str = "binpack"
    bind_seconds: float = 0.03
    retry_seconds: float = 1.0
    request_timeout_seconds: float = 10.0
    watch_seconds: int = 240


class VgpuExtender:
    """One scheduler on one API server.

    State: copies of nodes and pods; the pods that are being bound; the pods that were bound and are
    not yet shown as bound by the watch. `run` may be called again after it has ended.
    """

    def __init__(
        self,
        access: ApiAccess,
        settings: ExtenderSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build it; ``clock`` in unix seconds."""
        self.settings = settings or ExtenderSettings()
        self._keys = Keys(self.settings.domain)  # name → key: nvidia.com/pre-allocated
        self._clock = clock
        self._client = ApiClient(access, timeout_seconds=self.settings.request_timeout_seconds)
        self._changed = asyncio.Event()
        # by UID: pods that are bound, before the watch shows it, and the tasks that bind pods
        self._bound: dict[str, Object] = {}
        self._binding: dict[str, asyncio.Task[None]] = {}
        # by node: its Bindings come one after the other
        self._locks: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
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
        async with self._client, asyncio.TaskGroup() as group:
            for each in (self._nodes, self._pods):
                group.create_task(each.run())
            announced = False
            while True:
                self._changed.clear()
                if self._nodes.synced and self._pods.synced:
                    if not announced:
                        announced = True
                        _logger.info("sim.vgpu_extender.started", nodes=len(self._nodes.items))
                    await self._round(group)
                await asyncio.sleep(_PERIOD_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.retry_seconds):
                        await self._changed.wait()

    async def _round(self, group: asyncio.TaskGroup) -> None:
        """Filter every waiting pod once; each one that fits is bound meanwhile."""
        seen = self._seen_pods()
        waiting = [pod for uid, pod in seen.items() if self._is_waiting(uid, pod)]
        waiting.sort(
            key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", resources.key(pod))
        )
        for pod in waiting:
            uid = pod["metadata"]["uid"]
            try:
                chosen = await self._filter(pod)
                if chosen.node:
                    self._binding[uid] = group.create_task(self._bind(uid, pod, chosen.node))
                else:
                    await self._report_unschedulable(pod, chosen.why)
            except ClusterError as err:
                # It is not known whether the write was done, so no pod is filtered before pods and
                # nodes have been listed again.
                _logger.warning("sim.vgpu_extender.broken", error=str(err))
                self._pods.invalidate()
                self._nodes.invalidate()
                await asyncio.sleep(self.settings.retry_seconds)
                return

    async def _filter(self, pod: Object) -> _Chosen:
        """Choose node and cards, and write them into the pod.

        Raises:
            ClusterError: whether they are written is not known.
        """
        keys, now = self._keys, self._clock()
        pods = self._seen_pods()
        # the requests of its containers, by kind; `names`: the containers that ask for cards
        asked = asked_by(pod, keys)
        if any(
            each.cores > _MAX_CORES or each.number > MAX_CARDS
            for each in (*asked.init, *asked.sidecars, *asked.apps)
        ):
            return _Chosen(why="a container asks for more than 100 cores or 16 GPUs")
        annotations = resources.annotations_of(pod)
        planned = annotations.get(keys("predicate-node"), "")
        claim = formats.read_claims(annotations.get(keys("pre-allocated"), ""))
        # the pod asks for cards, and its claim of an earlier filtering still counts
        if asked.names and planned and claim and holds_claim(pod, keys, now):
            return _Chosen(node=planned)
        others = [other for uid, other in pods.items() if uid != pod["metadata"]["uid"]]
        reasons: list[str] = []
        for node in sorted(self._nodes.items.values(), key=lambda node: node["metadata"]["name"]):
            claims = self._place(node, pod, others, now)
            if isinstance(claims, str):
                reasons.append(claims)
            elif not claims or await self._plan(pod, node["metadata"]["name"], claims):
                return _Chosen(node=node["metadata"]["name"])
        causes = ", ".join(
            f"{number} {reason}" for reason, number in sorted(collections.Counter(reasons).items())
        )
        return _Chosen(why=f"0/{len(self._nodes.items)} nodes are available: {causes}")

    def _place(
        self, node: Object, pod: Object, others: Sequence[Object], now: float
    ) -> Claims | Reason:
        """Return the pod's claims on the node, none for a pod that asks for no cards; or why it
        does not fit, as a phrase for the message ``0/3 nodes are available: …``.
        """
        keys = self._keys
        if not resources.may_hold(node, pod):
            return "node not ready, cordoned or not selected"
        if not self._counts_fit(node, others, pod):
            return f"Insufficient {keys('vgpu-number')}"
        if not asked_by(pod, keys).names:
            return {}
        ledger = NodeLedger.of(node, others, keys, now)
        if isinstance(ledger, str):
            return ledger
        return ledger.place(pod, keys, policy=self.settings.device_policy)

    async def _plan(self, pod: Object, node: str, claims: Claims) -> bool:
        """Write the claims into the pod; False when it was refused.

        Raises:
            ClusterError: whether they are written is not known.
        """
        keys = self._keys
        # `predicate-time`: when the pod was last filtered or bound. `real-allocated`: the claims
        # that the device plugin has granted. `metrics-node`: the node on which the pod's use is
        # measured.
        return await self._patch(
            pod,
            annotations={
                keys("pre-allocated"): formats.write_claims(claims),
                keys("predicate-node"): node,
                keys("predicate-time"): self._stamp(),
                keys("real-allocated"): "",
            },
            labels={keys("assigned-phase"): formats.FILTERING, keys("metrics-node"): node},
        )

    async def _bind(self, uid: str, pod: Object, node: str) -> None:
        keys = self._keys
        try:
            async with self._locks[node]:
                claiming = bool(asked_by(pod, keys).names)
                pod = self._pods.items.get(uid, pod)
                if claiming and (
                    node_of(pod, keys) != node or not holds_claim(pod, keys, self._clock())
                ):
                    await self._fail(pod)
                    return
                if claiming and not await self._patch(
                    pod,
                    annotations={keys("predicate-time"): self._stamp()},
                    labels={
                        keys("assigned-phase"): formats.ALLOCATING,
                        keys("metrics-node"): node,
                    },
                ):
                    return
                await self._post_binding(pod, node)
                await asyncio.sleep(self.settings.bind_seconds)
        except ClusterError as err:
            _logger.warning("sim.vgpu_extender.not_bound", pod=resources.key(pod), error=str(err))
            with contextlib.suppress(ClusterError):
                await self._fail(pod)
            self._pods.invalidate()
        finally:
            del self._binding[uid]
            self._changed.set()

    async def _post_binding(self, pod: Object, node: str) -> None:
        """Bind the pod; it counts as bound before the watch shows it.

        Raises:
            ClusterError: it was refused, or whether it was done is not known.
        """
        metadata = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata.get("namespace", "default"),
                "uid": metadata["uid"],
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._client.request("POST", f"{_path(pod)}/binding", binding)
        # With the annotations of our last patch.
        newest = self._pods.items.get(metadata["uid"], pod)
        self._bound[metadata["uid"]] = {**newest, "spec": {**newest["spec"], "nodeName": node}}
        _logger.info("sim.vgpu_extender.bound", pod=resources.key(pod), node=node)

    async def _fail(self, pod: Object) -> None:
        """Write that the attempt has failed; the claim stays written and counts no more."""
        keys = self._keys
        await self._patch(
            pod,
            # instead of a time: the allocation is over
            annotations={keys("predicate-time"): formats.FINISHED_TIME},
            labels={keys("assigned-phase"): formats.FAILED, keys("metrics-node"): None},
        )

    def _seen_pods(self) -> dict[str, Object]:
        """All pods by UID; one that we have bound has its node also before the watch shows it."""
        items = self._pods.items
        self._bound = {
            uid: pod
            for uid, pod in self._bound.items()
            if uid in items and not items[uid]["spec"].get("nodeName")
        }
        return {uid: self._bound.get(uid, pod) for uid, pod in items.items()}

    def _is_waiting(self, uid: str, pod: Object) -> bool:
        spec = pod.get("spec") or {}
        return (
            uid not in self._binding
            and spec.get("schedulerName") == self.settings.scheduler_name
            and not spec.get("nodeName")
            and not spec.get("schedulingGates")
            and not resources.is_terminated(pod)
            and not resources.is_terminating(pod)
        )

    def _counts_fit(self, node: Object, others: Sequence[Object], pod: Object) -> bool:
        """Apply kube-scheduler's own arithmetic: the ids that pods ask for, whichever card they are
        planned on.
        """
        number, name = self._keys("vgpu-number"), node["metadata"]["name"]
        offered = ((node.get("status") or {}).get("allocatable") or {}).get(number, 0)
        taken = sum(
            _ids(other, self._keys)
            for other in others
            if node_of(other, self._keys) == name and not resources.is_terminated(other)
        )
        return taken + _ids(pod, self._keys) <= resources.amount(offered)

    def _stamp(self) -> str:
        return str(int(self._clock() * 1e9))

    async def _patch(
        self,
        pod: Object,
        *,
        annotations: Mapping[str, str | None],
        labels: Mapping[str, str | None],
    ) -> bool:
        body = {
            "metadata": {
                "uid": pod["metadata"]["uid"],
                "annotations": dict(annotations),
                "labels": dict(labels),
            }
        }
        return await self._write(_path(pod), body, MERGE_PATCH)

    async def _report_unschedulable(self, pod: Object, why: str) -> None:
        """Write into the pod's status why it waits, when that is news."""
        conditions = (pod.get("status") or {}).get("conditions") or ()
        if any(
            condition.get("type") == "PodScheduled" and condition.get("message") == why
            for condition in conditions
        ):
            return
        stamp = dt.datetime.fromtimestamp(self._clock(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": why,
            "lastTransitionTime": stamp,
        }
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [condition]}}
        if await self._write(f"{_path(pod)}/status", body, STRATEGIC_MERGE_PATCH):
            _logger.info("sim.vgpu_extender.unschedulable", pod=resources.key(pod), why=why)

    async def _write(self, path: str, body: Object, content_type: str) -> bool:
        """Patch, and take over the answer; False when this very write was refused.

        Raises:
            ClusterError: whether it was done is not known.
        """
        try:
            answer = await self._client.request("PATCH", path, body, content_type=content_type)
        except ClusterError as err:
            if err.status in _REFUSALS:
                _logger.info("sim.vgpu_extender.refused", error=str(err))
                return False
            raise
        self._pods.put(answer)
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    """A node, or why there is none."""

    node: str = ""
    why: str = ""


def _ids(pod: Object, keys: Keys) -> int:
    """Return how many ids the pod needs at most; each init container is counted as if all sidecars
    ran beside it.
    """
    asked = asked_by(pod, keys)
    largest = max((each.number for each in asked.init), default=0)
    return sum(each.number for each in asked.sidecars) + max(
        largest, sum(each.number for each in asked.apps)
    )


def _path(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata.get('namespace', 'default')}/pods/{metadata['name']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a scheduler until the process is ended;
    any signal will do, for there is nothing to save.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vgpu_agent.sim.vgpu_manager.extender",
        description="A stand-in for vgpu-manager's scheduler.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True, help="where the API server is")
    parser.add_argument("--device-policy", choices=POLICIES, default="binpack")
    parser.add_argument("--log-level", choices=log.LEVELS, default="info")
    given = parser.parse_args(arguments)
    try:
        access = ApiAccess.from_kubeconfig(given.kubeconfig)
    except SimulationError as err:
        sys.exit(str(err))
    log.configure(level=given.log_level)
    extender = VgpuExtender(access, ExtenderSettings(device_policy=given.device_policy))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(extender.run())


if __name__ == "__main__":
    main()
