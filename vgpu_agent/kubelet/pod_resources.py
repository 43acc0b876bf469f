"""kubelet's pod-resources API: who is alive and holds what, by name.

Read by `records`. Its List is the freshest truth there is, because kubelet forgets ended pods before it answers; but it knows no UIDs and
no plain init containers, and it limits how often it may be asked (kubelet contract §13). Never called inside Allocate: the pod in question
is recorded only after our answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import KubeletError
from vgpu_agent.kubelet import codec, grpc
from vgpu_agent.kubelet.registration import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vgpu_agent.model import Holding

_METHOD = "/v1.PodResourcesLister/List"

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


class PodResources:
    """The client of ``socket_path``; a connection for each call, since the socket is made anew when kubelet restarts."""

    def __init__(self, socket_path: Path, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._backoff = Backoff(_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._not_before = 0.0
        self._refusal = ""

    async def list(self) -> tuple[Holding, ...]:
        """What every live container of the node holds; the owners have no UID. Answers of any size are accepted.

        Raises:
            KubeletBusyError: kubelet wants to be left alone (V12).
            KubeletError: no socket, no such API, no answer in time, or an answer that makes no sense.
        """
        if (left := self._not_before - self._clock()) > 0:
            # kubelet's refusal once more, word for word: trouble that reads the same is logged once.
            raise KubeletBusyError(self._refusal, left)
        try:
            answer = await grpc.call(self._socket_path, _METHOD, codec.EMPTY, timeout_seconds=self._timeout_seconds)
        except grpc.CallError as err:
            raise self._explained(err) from err
        self._backoff.reset()
        # In a thread, because a node with thousands of ids takes a tenth of a second to decode.
        return await asyncio.to_thread(codec.decode_pod_resources, answer)

    def _explained(self, err: grpc.CallError) -> KubeletError:
        if err.status == "RESOURCE_EXHAUSTED":
            pause = self._backoff.pause()
            self._not_before = self._clock() + pause
            self._refusal = f"kubelet's pod-resources were asked too often ({err.text}); the next call is in {pause:g} s"
            return KubeletBusyError(self._refusal, pause)
        if err.status == "UNIMPLEMENTED":
            return KubeletError(f"the kubelet behind {self._socket_path} has no pod-resources API v1; Kubernetes 1.20 or newer is needed")
        return err
