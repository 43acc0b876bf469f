"""The kubelet's pod-resources API: live containers and their resources, by name,
and the ids that it would give to a pod.

Called by `records` and by `agent.records`. List gives the freshest state, because the
kubelet forgets ended pods before it answers. But it has no UIDs and no plain init containers, and
its rate is limited (kubelet §13). Never called inside Allocate: the pod in question is recorded
only after our answer.

List returns all pods, which is megabytes where memory is counted in ids. Get returns one, in a
hundredth of the time. But older kubelets do not have it, a start of many pods would use up the
kubelet's rate, and other programs on the node ask too. So Get may be refused at any time, and the
caller then uses List.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Backoff
from vgpu_agent.errors import KubeletError
from vgpu_agent.grpc.client import Caller, CallError
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.held_ids import PodResourcesReader, decode_allocatable, decode_pod_resources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from vgpu_agent.device_ids import DeviceId
    from vgpu_agent.kubelet.held_ids import SeenNumbers
    from vgpu_agent.model import Holding

# How long one call may take.
TIMEOUT_SECONDS = 5.0

_LIST = "/v1.PodResourcesLister/List"
_GET = "/v1.PodResourcesLister/Get"
_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"

# A part of the error text of a kubelet from before 1.28 whose feature gate
# KubeletPodResourcesGetAllocatable is off; there is no status code for that.
_SWITCHED_OFF = "getallocatableresources disabled"
# The same where KubeletPodResourcesGet is off (alpha in 1.27, on by default from 1.34), and where
# there is no such pod; neither has a status code.
_GET_SWITCHED_OFF = "get method disabled"
_NO_SUCH_POD = " not found"

# The kubelet's rate limiter refills within a second (100 calls a second, 10 at once), so short
# pauses are enough.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0

# Of the kubelet's 10 calls at once and 100 a second, Get leaves some to List and to other programs.
_GETS_AT_ONCE, _GETS_A_SECOND = 8, 80.0
# The kubelet allows another call 10 ms after a refusal.
_AFTER_A_REFUSED_GET_SECONDS = 0.02

# How long a connection is kept: starts come in bursts, and each of them asks.
_KEPT_SECONDS = 1.0


class RateLimiter:
    """A token bucket: at most ``at_once`` calls in a moment, and ``a_second`` in the long run.

    It counts as the kubelet does (kubelet §13), so that the kubelet's rate is never exceeded. When
    it is empty, the caller uses List, which is slower but needs one call.

    State: how many calls are left, and when that was counted.
    """

    def __init__(self, at_once: int, a_second: float, clock: Callable[[], float]) -> None:
        """Begin with a full bucket; ``clock`` in seconds."""
        self._at_once = at_once
        self._a_second = a_second
        self._clock = clock
        self._left, self._counted_at = float(at_once), clock()

    def take_if_left(self, calls: int) -> bool:
        """Take that many calls if they are left, else none; return whether they were left."""
        self._refill()
        if self._left < calls:
            return False
        self._left -= calls
        return True

    def take_anyway(self, calls: int) -> None:
        """Take that many calls, or as many as are left: they are made in any case."""
        self._refill()
        self._left = max(0.0, self._left - calls)

    def empty(self) -> None:
        """Empty the bucket: another client has used the rate."""
        self._left, self._counted_at = 0.0, self._clock()

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._counted_at) * self._a_second)
        self._counted_at = now


class KubeletBusyError(KubeletError):
    """The kubelet has refused to answer because it was asked too often.

    Attributes:
        retry_in_seconds: how long it is left alone; calls before that fail with this error at once,
            without reaching the kubelet.
    """

    def __init__(self, message: str, retry_in_seconds: float) -> None:
        super().__init__(message)
        self.retry_in_seconds = retry_in_seconds


class AllocatableUnsupportedError(KubeletError):
    """This kubelet does not report what can be allocated:
    it is older than 1.21, or the feature is switched off.
    """


class GetNotPossibleError(KubeletError):
    """Get cannot be asked now, but List may be.

    Attributes:
        for_good: this kubelet does not have it; otherwise it was asked as often as it allows.
    """

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class PodUnknownError(KubeletError):
    """The kubelet has no pod of that name."""


class PodResources:
    """The client of ``socket_path``.

    State: a connection for a second after each call; whether lists are forbidden; when the kubelet
    may be asked again; the identity of the socket file if the kubelet behind it has no Get (device,
    inode, time of change).

    Attributes:
        lists_answered: how often List was answered since the start.
        gets_answered: how often Get was.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket_path = socket_path
        self._caller = Caller(socket_path, kept_seconds=_KEPT_SECONDS)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._backoff = Backoff(_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._no_call_before = 0.0
        self._get_refused_until = 0.0  # the kubelet has refused a Get, and would refuse a List, too
        self._refusal = ""  # the message for calls before `_no_call_before`
        self._get_limiter = RateLimiter(_GETS_AT_ONCE, _GETS_A_SECOND, clock)
        self._socket_without_get: tuple[int, int, int] | None = None
        # of Get; kept, because it reads an entry faster if it has read one of the same resource and
        # length before
        self._reader: PodResourcesReader | None = None
        self.lists_answered = self.gets_answered = 0
        self._no_lists = ""

    def forbid_lists(self, why: str) -> None:
        """Let each `list` fail with the reason ``why``, until `allow_lists`. During a hand-over, a
        List could make the kubelet forget the ids of waiting calls (kubelet §7).
        """
        self._no_lists = why

    @property
    def lists_forbidden(self) -> bool:
        """Tell whether `forbid_lists` is in force."""
        return bool(self._no_lists)

    def allow_lists(self) -> None:
        """Undo `forbid_lists`."""
        self._no_lists = ""

    def close(self) -> None:
        """Drop the connection that is kept between calls."""
        self._caller.close()

    async def list(self, is_wanted: Callable[[str], bool] = lambda _: True) -> tuple[Holding, ...]:
        """List what every live container of the node has of the resources that ``is_wanted``
        accepts by name. The owners have no UID. Answers of any size are accepted.

        Raises:
            KubeletBusyError: the kubelet refuses calls for a while (kubelet V12).
            KubeletError: no socket, no such API, no answer in time, or an answer that makes no
                sense; or lists are forbidden.
        """
        if self._no_lists:
            raise KubeletError(f"pod-resources is not listed: {self._no_lists}")
        self._get_limiter.take_anyway(1)
        if (left := self._get_refused_until - self._clock()) > 0:
            await asyncio.sleep(left)
        answer = await self._call(_LIST)
        self.lists_answered += 1
        # In a thread, because a node with thousands of ids takes a tenth of a second to decode.
        return await asyncio.to_thread(decode_pod_resources, answer, is_wanted)

    async def get(
        self, pods: Collection[tuple[str, str]], is_wanted: Callable[[str], bool] = lambda _: True
    ) -> tuple[Holding, ...]:
        """Return what these pods, (namespace, name), have of the resources that ``is_wanted``
        accepts by name. A pod unknown to the kubelet has none.

        Unlike List it may still show the ids of a pod that has ended, until another pod gets them.

        Raises:
            GetNotPossibleError: List has to be asked instead.
            KubeletBusyError: the kubelet refuses calls for a while (kubelet V12).
            KubeletError: no socket, no answer in time, or an answer that makes no sense.
        """
        if (
            self._socket_without_get is not None
            and self._socket_without_get == await asyncio.to_thread(_identity, self._socket_path)
        ):
            raise GetNotPossibleError(
                f"pod-resources: the kubelet behind {self._socket_path} has no Get", for_good=True
            )
        self._socket_without_get = None
        if self._clock() < self._get_refused_until or not self._get_limiter.take_if_left(len(pods)):
            raise GetNotPossibleError(
                "pod-resources: the kubelet has been asked as often as it allows"
            )
        answers = [await self._get(*pod) for pod in pods]  # hardly ever more than one
        self.gets_answered += len(answers)
        if self._reader is None or self._reader.is_wanted != is_wanted:
            self._reader = PodResourcesReader(is_wanted)
        return tuple(holding for answer in answers for holding in self._reader.read(answer))

    async def _get(self, namespace: str, name: str) -> bytes:
        """Return the GetPodResourcesResponse, which reads like a list of one pod;
        empty when there is no such pod.
        """
        try:
            return await self._call(_GET, codec.encode_get(namespace, name))
        except PodUnknownError:
            return b""
        except GetNotPossibleError as err:
            if err.for_good:
                # A kubelet makes a new socket when it starts, and a newer kubelet may have Get.
                self._socket_without_get = await asyncio.to_thread(_identity, self._socket_path)
            raise

    async def allocatable(
        self, offered: Mapping[str, Sequence[DeviceId]]
    ) -> dict[str, frozenset[str] | SeenNumbers]:
        """List the healthy ids of each ``offered`` resource as the kubelet has them, held or free:
        the result of the lists that the agent sent. ``offered`` has the ids that the agent offers,
        by resource. Where these differ in a number only, many for each device (`NumberedIds`), the
        healthy ones are marked in one byte for each (`SeenNumbers`) and not returned as texts.

        Raises:
            AllocatableUnsupportedError: this kubelet does not report them.
            KubeletError: as for `list`, with which it shares the pauses.
        """
        return await asyncio.to_thread(decode_allocatable, await self._call(_ALLOCATABLE), offered)

    async def _call(self, method: str, request: bytes = codec.EMPTY) -> bytes:
        if (left := self._no_call_before - self._clock()) > 0:
            # The text of the last refusal, unchanged: trouble with the same text is logged once.
            raise KubeletBusyError(self._refusal, left)
        try:
            answer = await self._caller.call(method, request, timeout_seconds=self._timeout_seconds)
        except CallError as err:
            raise self._explained(err, method) from err
        self._backoff.reset()
        return answer

    def _explained(self, err: CallError, method: str) -> KubeletError:
        """Return the error for callers; after a refusal, also begin a pause."""
        if method == _GET and (special := self._explained_get(err)):
            return special
        if err.status == "RESOURCE_EXHAUSTED":
            pause = self._backoff.pause()
            self._no_call_before = self._clock() + pause
            self._refusal = (
                f"pod-resources: the kubelet was asked too often ({err.text}); the next call is "
                f"in {pause:g} s"
            )
            return KubeletBusyError(self._refusal, pause)
        if method == _ALLOCATABLE and (
            err.status == "UNIMPLEMENTED" or _SWITCHED_OFF in err.text.lower()
        ):
            return AllocatableUnsupportedError(
                f"pod-resources: the kubelet behind {self._socket_path} has no "
                "GetAllocatableResources"
            )
        if err.status == "UNIMPLEMENTED":
            return KubeletError(
                f"pod-resources: the kubelet behind {self._socket_path} has no pod-resources API "
                "v1; Kubernetes 1.20 or newer is needed"
            )
        if err.status == "UNAVAILABLE":
            return KubeletError(
                f"pod-resources: {err}; is the kubelet running, and is its pod-resources "
                "directory mounted?"
            )
        return KubeletError(f"pod-resources: {err}")

    def _explained_get(self, err: CallError) -> KubeletError | None:
        """Return the error if it means something else for Get than for other calls, None otherwise;
        after a refusal, also stop Get for a while.
        """
        if err.status == "UNIMPLEMENTED" or _GET_SWITCHED_OFF in err.text.lower():
            return GetNotPossibleError(
                f"pod-resources: the kubelet behind {self._socket_path} has no Get", for_good=True
            )
        if err.status == "RESOURCE_EXHAUSTED":
            # Other programs ask too. List is the better use of the remaining calls.
            self._get_refused_until = self._clock() + _AFTER_A_REFUSED_GET_SECONDS
            self._get_limiter.empty()
            return GetNotPossibleError(
                f"pod-resources: the kubelet was asked too often ({err.text})"
            )
        return PodUnknownError(f"pod-resources: {err}") if err.text.endswith(_NO_SUCH_POD) else None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return the identity of this file, which differs for a file that takes its place;
    None when there is no file.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
