"""A stand-in for kube-scheduler with an extender, for the demo: it takes the pods that name
``vgpu-scheduler`` one after the other, and asks the extender over HTTP for filter and bind, as the
configuration in manifests/components/scheduler has it (vgpu-manager §5.1).

Its own part is small: it leaves out Nodes that are cordoned or lack ids of the resource, and writes
the condition ``PodScheduled`` of a pod that fits nowhere. It hands over all Nodes that remain,
without sampling. It shares no code with the extender, and reads and changes the object store
directly, without requests to the simulated API server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from vgpu_agent.sim.api.objects import ApiRefusalError
from vgpu_agent.sim.volcano import resources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.sim.api.objects import Object, ObjectStore

NAME = "vgpu-scheduler"
# the number of cards; the extender's other resources have ignoredByScheduler, so that only the
# extender counts them
_RESOURCE = "nvidia.com/vgpu-number"
_TIMEOUT = aiohttp.ClientTimeout(total=30)
_RETRY_SECONDS = 0.1


class KubeScheduler:
    """The stand-in that the module describes; `run` starts it.

    State: the last refusals. A pod that was refused is tried again when anything has changed, and
    after a call that failed.

    Attributes:
        refusals: pod (``namespace/name``) → Node → why not, of those that fit nowhere.
    """

    def __init__(self, objects: ObjectStore, extender: str) -> None:
        """Build it.

        Args:
            objects: the cluster.
            extender: ``urlPrefix`` of the extender.
        """
        self._objects, self._extender = objects, extender
        self.refusals: dict[str, Mapping[str, str]] = {}
        self._failed = False  # a call of this round has failed

    async def run(self) -> None:
        """Schedule until cancelled."""
        revision = self._objects.revision
        async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as http:
            while True:
                seen = revision.version
                await self._round(http)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_SECONDS if self._failed else None):
                        await revision.newer_than(seen)

    async def _round(self, http: aiohttp.ClientSession) -> None:
        """Try each pod that waits once, the oldest first."""
        self._failed = False
        waiting = [pod for pod in self._objects.list("pods") if _waits(pod)]
        for pod in sorted(waiting, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
            with contextlib.suppress(ApiRefusalError):  # the pod was deleted meanwhile
                await self._place(http, pod)

    async def _place(self, http: aiohttp.ClientSession, pod: Object) -> None:
        metadata = pod["metadata"]
        refused = dict(self._own_refusals(pod))
        names = [
            node["metadata"]["name"]
            for node in self._objects.list("nodes")
            if node["metadata"]["name"] not in refused
        ]
        chosen = ""
        if names:
            answer = await self._call(http, "filter", {"Pod": pod, "NodeNames": names})
            if answer["Error"]:
                self._write_condition(pod, answer["Error"])
                return
            refused |= answer.get("FailedNodes") or {}
            chosen = next(iter(answer.get("NodeNames") or ()), "")
        if not chosen:
            self.refusals[resources.key(pod)] = refused
            self._write_condition(pod, _message(refused))
            return
        binding = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": chosen,
        }
        if not (await self._call(http, "bind", binding))["Error"]:
            self.refusals.pop(resources.key(pod), None)

    def _own_refusals(self, pod: Object) -> Sequence[tuple[str, str]]:
        """Return the Nodes that the pod cannot have whatever the extender says, with the reason."""
        wanted = {
            name: number for name, number in resources.requests(pod).items() if name == _RESOURCE
        }
        # Node → the pods on it
        beside = collections.defaultdict[str, list[Any]](list)
        for other in self._objects.list("pods"):
            beside[other["spec"].get("nodeName", "")].append(other)
        refused = []
        for node in self._objects.list("nodes"):
            name = node["metadata"]["name"]
            # ready, not cordoned, and with the labels of the pod's nodeSelector
            if not resources.may_hold(node, pod):
                refused.append((name, "node(s) were unschedulable"))
            elif resources.lacking(resources.free(node, beside[name]), wanted):
                refused.append((name, f"Insufficient {_RESOURCE}"))
        return refused

    async def _call(self, http: aiohttp.ClientSession, verb: str, body: Any) -> dict[str, Any]:
        """Return the extender's answer, or one with an error of our own."""
        try:
            async with http.post(
                f"{self._extender}/{verb}",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                raise_for_status=True,
            ) as response:
                answer = msgspec.json.decode(await response.read(), type=dict[str, Any])
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as err:
            answer = {"Error": f"{verb} failed: {str(err) or type(err).__name__}"}
        answer.setdefault("Error", "")
        self._failed = self._failed or bool(answer["Error"])
        return answer

    def _write_condition(self, pod: Object, message: str) -> None:
        """Write why the pod waits; the same message again changes nothing."""
        metadata = pod["metadata"]
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
        }
        self._objects.set_status(
            "pods", metadata["name"], {"conditions": [condition]}, metadata["namespace"]
        )


def _waits(pod: Object) -> bool:
    return (
        pod["spec"].get("schedulerName") == NAME
        and not pod["spec"].get("nodeName")
        and not resources.is_terminated(pod)
        and not resources.is_terminating(pod)
    )


def _message(refused: Mapping[str, str]) -> str:
    """Return the text that kube-scheduler writes into the condition."""
    counts = collections.Counter(refused.values())
    reasons = ", ".join(sorted(f"{number} {reason}" for reason, number in counts.items()))
    return f"0/{len(refused)} nodes are available: {reasons}."
