"""kubelet's pod-resources API: who is alive and holds what, by name; and which ids kubelet would give to a pod.

Called by `records` and by the agent's verification. Its List is the freshest truth there is, because kubelet forgets ended pods before it
answers; but it knows no UIDs and no plain init containers, and it limits how often it may be asked (kubelet contract §13). Never called
inside Allocate: the pod in question is recorded only after our answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import KubeletError
from vgpu_agent.kubelet import codec, grpc
from vgpu_agent.kubelet.held_ids import decode_allocatable, decode_pod_resources
from vgpu_agent.kubelet.registration import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vgpu_agent.device_ids import DeviceId
    from vgpu_agent.kubelet.held_ids import SeenNumbers
    from vgpu_agent.model import Holding

_LIST = "/v1.PodResourcesLister/List"
_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"

# How a kubelet from before 1.28 words that its feature gate KubeletPodResourcesGetAllocatable is off; it has no status code for that.
_SWITCHED_OFF = "getallocatableresources disabled"

# kubelet refills its allowance within a second (100 calls a second, 10 at once), so short pauses are enough.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


class KubeletBusyError(KubeletError):
    """kubelet has refused to answer because it was asked too often.

    Attributes:
        retry_in_seconds: how long it is left alone; calls before that fail with this error at once, without reaching kubelet.
    """

    def __init__(self, message: str, retry_in_seconds: float) -> None:
        super().__init__(message)
        self.retry_in_seconds = retry_in_seconds


class AllocatableUnsupportedError(KubeletError):
    """This kubelet does not tell what can be allocated: it is older than 1.21, or the feature is switched off."""


class PodResources:
    """The client of ``socket_path``; a connection for each call, since the socket is made anew when kubelet restarts."""

    def __init__(self, socket_path: Path, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._backoff = Backoff(_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._not_before = 0.0
        self._refusal = ""

    async def list(self, wanted: Callable[[str], bool] = lambda _: True) -> tuple[Holding, ...]:
        """What every live container of the node holds of ``wanted`` resources; the owners have no UID. Answers of any size are accepted.

        Raises:
            KubeletBusyError: kubelet wants to be left alone (V12).
            KubeletError: no socket, no such API, no answer in time, or an answer that makes no sense.
        """
        # In a thread, because a node with thousands of ids takes a tenth of a second to decode.
        return await asyncio.to_thread(decode_pod_resources, await self._call(_LIST), wanted)

    async def allocatable(self, offered: Mapping[str, Sequence[DeviceId]]) -> dict[str, frozenset[str] | SeenNumbers]:
        """The healthy ids of each ``offered`` resource as kubelet has them, held by somebody or not: what our lists have come to.

        Raises:
            AllocatableUnsupportedError: this kubelet does not tell.
            KubeletError: as for `list`, with which it shares the pauses.
        """
        return await asyncio.to_thread(decode_allocatable, await self._call(_ALLOCATABLE), offered)

    async def _call(self, method: str) -> bytes:
        if (left := self._not_before - self._clock()) > 0:
            # kubelet's refusal once more, word for word: trouble that reads the same is logged once.
            raise KubeletBusyError(self._refusal, left)
        try:
            answer = await grpc.call(self._socket_path, method, codec.EMPTY, timeout_seconds=self._timeout_seconds)
        except grpc.CallError as err:
            raise self._explained(err, method) from err
        self._backoff.reset()
        return answer

    def _explained(self, err: grpc.CallError, method: str) -> KubeletError:
        if err.status == "RESOURCE_EXHAUSTED":
            pause = self._backoff.pause()
            self._not_before = self._clock() + pause
            self._refusal = f"pod-resources: kubelet was asked too often ({err.text}); the next call is in {pause:g} s"
            return KubeletBusyError(self._refusal, pause)
        if method == _ALLOCATABLE and (err.status == "UNIMPLEMENTED" or _SWITCHED_OFF in err.text.lower()):
            return AllocatableUnsupportedError(f"pod-resources: the kubelet behind {self._socket_path} has no GetAllocatableResources")
        if err.status == "UNIMPLEMENTED":
            return KubeletError(
                f"pod-resources: the kubelet behind {self._socket_path} has no pod-resources API v1; Kubernetes 1.20 or newer is needed"
            )
        if err.status == "UNAVAILABLE":
            return KubeletError(f"pod-resources: {err}; is kubelet running, and is its pod-resources directory mounted?")
        return KubeletError(f"pod-resources: {err}")
