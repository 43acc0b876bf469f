"""The simulated kubelet's pod-resources service: the devices of each container, as kubelet §13
describes it.

`kubelet` in this package creates it and listens on the socket. Both use the same records and pods.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from vgpu_agent.sim.protocol import podresources_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vgpu_agent.sim.kubelet.faults import Faults
    from vgpu_agent.sim.kubelet.kubelet import Pod
    from vgpu_agent.sim.kubelet.records import Allocation, Records, ResourceDevices

_CALLS_A_SECOND, _BURST = 100.0, 10.0


class PodResources:
    """List, Get and GetAllocatableResources.

    State: the calls that the rate limit still allows, and every pod's last encoded entry.
    """

    def __init__(
        self,
        records: Records,
        pods: dict[str, Pod],
        faults: Faults,
        *,
        resource: Callable[[str], ResourceDevices],
        note: Callable[..., Awaitable[None]],
    ) -> None:
        """Answer about ``pods`` (by UID) from ``records``; ``resource`` returns a resource's
        current devices, ``note`` is called with every request, to record it for tests. ``faults``
        has the failures that a test has switched on.
        """
        self._records, self._pods, self._faults = records, pods, faults
        self._resource, self._note = resource, note
        # by UID: a pod's allocations, and their encoded form
        self._listed_pods: dict[str, tuple[tuple[Allocation, ...], bytes]] = {}
        self._tokens_left, self._asked_at = _BURST, 0.0

    def methods(self) -> dict[str, tuple[Any, Any]]:
        """Return the service's methods by name, each with the type of its request."""
        return {
            "List": (self._list, messages.ListPodResourcesRequest),
            "GetAllocatableResources": (self._allocatable, messages.AllocatableResourcesRequest),
            "Get": (self._get, messages.GetPodResourcesRequest),
        }

    async def _list(self, _: messages.ListPodResourcesRequest, context: Any) -> bytes:
        await self._note("List", "")
        await self._limit(context)
        await asyncio.sleep(self._faults.list_delay_seconds)
        if self._faults.exhausted_lists:
            self._faults.exhausted_lists -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._records.clean_up({uid for uid, pod in self._pods.items() if not pod.ended})
        return b"".join(self._listed_pod(pod) for pod in self._pods.values() if not pod.ended)

    async def _get(self, request: messages.GetPodResourcesRequest, context: Any) -> bytes:
        """Answer Get. Unlike List, it leaves the records of ended pods, and finds these pods.
        Its own errors (switched off, no such pod) have the status code UNKNOWN.
        """
        await self._note("Get", "", pod=f"{request.pod_namespace}/{request.pod_name}")
        if self._faults.no_get:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                "unknown method Get for service v1.PodResourcesLister",
            )
        await self._limit(context)
        if self._faults.exhausted_gets:
            self._faults.exhausted_gets -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        if self._faults.get_disabled:
            await context.abort(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
        wanted = request.pod_namespace, request.pod_name
        for pod in reversed(self._pods.values()):  # the newest of that name
            if (pod.namespace, pod.name) == wanted:
                return self._listed_pod(pod)
        await context.abort(
            grpc.StatusCode.UNKNOWN,
            f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
        )
        return b""  # not reached: abort raises

    async def _allocatable(self, _: messages.AllocatableResourcesRequest, context: Any) -> bytes:
        await self._note("GetAllocatableResources", "")
        await self._limit(context)
        if self._faults.no_allocatable:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "unknown method GetAllocatableResources"
            )
        # each is a whole encoded response, and so are all of them together
        return b"".join(
            self._resource(resource).allocatable_as(resource) for resource in self._records.devices
        )

    async def _limit(self, context: Any) -> None:
        """Apply the rate limit of all callers together: a token bucket of 10 calls that gains 100
        calls a second (kubelet §13).
        """
        now = time.monotonic()
        self._tokens_left = min(
            _BURST, self._tokens_left + (now - self._asked_at) * _CALLS_A_SECOND
        )
        self._asked_at = now
        if self._tokens_left < 1 and self._faults.limit_calls:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens_left -= 1

    def _listed_pod(self, pod: Pod) -> bytes:
        """Encode a ListPodResourcesResponse with this pod alone. Concatenated, several of them are
        the response with all these pods. The bytes are a valid GetPodResourcesResponse, too.
        """
        held = [self._records.of_container(pod.uid, each.name) for each in pod.containers]
        key = tuple(allocation for allocations in held for allocation in allocations)
        if pod.uid not in self._listed_pods or self._listed_pods[pod.uid][0] != key:
            response = messages.ListPodResourcesResponse()
            entry = response.pod_resources.add(name=pod.name, namespace=pod.namespace)
            for container, allocations in zip(pod.containers, held, strict=True):
                if not container.init:  # init containers that are no sidecars are not listed
                    described = entry.containers.add(name=container.name)
                    for allocation in allocations:
                        described.MergeFromString(allocation.described)  # encoded devices
            self._listed_pods[pod.uid] = (key, bytes(response.SerializeToString()))
        return self._listed_pods[pod.uid][1]
