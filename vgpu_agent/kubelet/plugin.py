"""The device plugin service of one resource: the answers to the kubelet's five calls.

`server` puts it on a socket. It decides nothing itself: a `Backend` knows the devices and books the
ids. This module keeps the kubelet's rules (kubelet §4, §6): each list is complete,
GetPreferredAllocation never fails, and an answer has one element for each container. The `Backend`
ensures that an answer to Allocate takes less than a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import Revision, first_of
from vgpu_agent.device_ids import NumberedIds, NumberedList
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.held_ids import SeenNumbers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vgpu_agent.device_ids import DeviceId, ListedDevice
    from vgpu_agent.grpc.server import Send, StreamMethod, UnaryMethod
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.kubelet.codec import PreferenceRequest
    from vgpu_agent.model import Resource
    from vgpu_agent.status import PluginStatus

_logger = log.get(__name__)

_SERVICE = "/v1beta1.DevicePlugin"
OPTIONS = f"{_SERVICE}/GetDevicePluginOptions"


class Backend(Protocol):
    """The plugin servers' interface to the rest of the agent.
    `allocation.Allocator` implements it.
    """

    @property
    def revision(self) -> Revision:
        """The revision of the lists; it advances whenever one may have changed."""

    @property
    def ready(self) -> asyncio.Event:
        """While it is not set, calls wait, because not all grants are known yet."""

    def listing(self, resource: str) -> Sequence[ListedDevice]:
        """List all offered ids with their health, and the ids of lost devices (gone or faulty, and
        not offered any more) that containers still hold.
        """

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """The ``size`` best ids of ``available``, all of ``must_include`` among them."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Book the ids and return the container's edits;
        the same ids twice get the same answer (kubelet V15).
        """

    def may_start_unasked(self, resource: str) -> bool:
        """Tell whether containers may start without `pre_start` while the agent is stopped."""

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Return as soon as the container may start.
        An error refuses the start, and the kubelet asks again.
        """


class SentList(msgspec.Struct, frozen=True):
    """The list that the kubelet was sent last, and its age in seconds."""

    devices: Sequence[ListedDevice]
    seconds_ago: float

    @property
    def offered(self) -> Sequence[DeviceId]:
        """The ids of the list. Where it was built from compact `NumberedIds` (ids that differ in
        their numbers only), these are returned, and the held ids of lost devices are left out.
        """
        if isinstance(self.devices, NumberedList):
            return NumberedIds(tuple(block for block, _ in self.devices.blocks))
        return [device.id for device in self.devices]

    def differences(self, listed: frozenset[str] | SeenNumbers) -> tuple[int, Collection[str]]:
        """Compare with the ids that the kubelet lists in GetAllocatableResources: the number of
        healthy ids that it lacks, and the ids that were never sent to it. `SeenNumbers` is the
        compact form of ``listed`` where numbered ids were sent.
        """
        if isinstance(listed, SeenNumbers) and isinstance(self.devices, NumberedList):
            # a block: the numbered ids of one device, which are all healthy or none
            missing = sum(
                listed.count_missing(block) for block, healthy in self.devices.blocks if healthy
            )
            # `unknown`: listed ids of no block; `others`: the held ids of lost devices, with
            # `id.id`: the text of the id
            return missing, listed.unknown - {device.id.id for device in self.devices.others}
        ids = listed if isinstance(listed, frozenset) else frozenset[str]()
        healthy = {device.id.id for device in self.devices if device.healthy}
        return len(healthy - ids), ids - {device.id.id for device in self.devices}


class PluginService:
    """The answers to the kubelet for one resource on one server instance: each time that the agent
    has to register again, it serves on a new one.

    State: the number of open streams, and `PluginStatus`, which outlives the instance. Two streams
    may be open at once (kubelet V5), so each remembers the list that it sent last. They share only
    the cache of encoded devices.
    """

    def __init__(
        self,
        resource: Resource,
        backend: Backend,
        status: PluginStatus,
        *,
        coalesce_seconds: float,
        pre_start_required: bool | None = None,
        lists_revision: Revision | None = None,
    ) -> None:
        """Serve ``resource``.

        Args:
            resource: the served resource.
            backend: knows its devices.
            status: the state and the counts of the plugin, for pages and metrics; kept up to date.
            coalesce_seconds: how long changes of the list are collected into one message.
            pre_start_required: overrides the resource's own setting: a stopping agent registers
                without it, so that the kubelet can restart containers meanwhile.
            lists_revision: advanced with each list that is sent, and with the end of each stream,
                for those who wait for either.
        """
        self._resource = resource
        self._backend = backend
        self._status = status
        self._coalesce_seconds = coalesce_seconds
        self._pre_start_required = (
            resource.pre_start_required if pre_start_required is None else pre_start_required
        )
        self._encoder = codec.DeviceListEncoder()
        self._ending = asyncio.Event()
        self._open = 0
        # the last list, and when (monotonic)
        self._sent: tuple[Sequence[ListedDevice], float] | None = None
        self._lists_revision = lists_revision
        self.activity = Revision()  # advances when a stream opens, sends a list, or ends
        # counts of this instance, from which `server` knows what the kubelet has done so far
        self.options_asked = 0  # GetDevicePluginOptions
        self.streams_opened = 0
        self.lists_sent = 0
        self._kept = False  # the kubelet keeps the last list when its stream ends (`keep_list`)

    @property
    def unary_methods(self) -> Mapping[str, UnaryMethod]:
        """The calls with one answer, by gRPC path."""
        return {
            OPTIONS: self._options,
            f"{_SERVICE}/GetPreferredAllocation": self._prefer,
            f"{_SERVICE}/Allocate": self._allocate,
            f"{_SERVICE}/PreStartContainer": self._pre_start,
        }

    @property
    def stream_methods(self) -> Mapping[str, StreamMethod]:
        """The calls with many answers, by gRPC path."""
        return {f"{_SERVICE}/ListAndWatch": self._list_and_watch}

    @property
    def open_streams(self) -> int:
        """The number of ListAndWatch calls that are running."""
        return self._open

    @property
    def last_sent(self) -> SentList | None:
        """The list that was sent last, by whichever stream; None when nothing was ever sent, or
        when no stream is open and `keep_list` was not called.
        """
        if not (self._open or self._kept) or self._sent is None:
            return None
        devices, at = self._sent
        return SentList(devices, time.monotonic() - at)

    def end_streams(self) -> None:
        """Let every stream return, which the kubelet sees as a clean end."""
        self._ending.set()

    def keep_list(self) -> None:
        """Note that the kubelet keeps the list that was sent last when the stream ends, as in a
        hand-over to another agent.
        """
        self._kept = True

    async def prepare(self) -> None:
        """Encode the list once, so that the encoder's cache makes the first list fast."""
        for _ in self._encoder.parts(self._backend.listing(self._resource.name)):
            await asyncio.sleep(0)

    async def _options(self, _: bytes) -> bytes:
        self.options_asked += 1
        return codec.encode_options(
            pre_start_required=self._pre_start_required,
            offers_preference=self._resource.offers_preference,  # GetPreferredAllocation
        )

    async def _list_and_watch(self, _: bytes, send: Send) -> None:
        self._open += 1
        self.streams_opened += 1
        self._status.streams_opened += 1
        self._status.stream_open = True
        self.activity.advance()
        _logger.info("stream.opened", resource=self._resource.name, endpoint=self._status.endpoint)
        try:
            await self._send_lists(send)
        finally:
            self._open -= 1
            self._status.stream_open = self._open > 0
            self._note_activity()
            _logger.info(
                "stream.ended", resource=self._resource.name, endpoint=self._status.endpoint
            )

    async def _send_lists(self, send: Send) -> None:
        revision = self._backend.revision
        sent: Sequence[ListedDevice] | None = None
        while not self._ending.is_set():
            version = revision.version
            devices = self._backend.listing(self._resource.name)
            if devices != sent:
                size = await self._send_list(devices, send)
                sent = devices
                self._count_list(devices, size)
            await first_of(revision.newer_than(version), self._ending.wait())
            # A burst of changes becomes one message: the kubelet rewrites its checkpoint for each.
            await first_of(self._ending.wait(), timeout_seconds=self._coalesce_seconds)

    async def _send_list(self, devices: Sequence[ListedDevice], send: Send) -> int:
        """Send the complete list and return its size in bytes.
        Other calls are answered between its parts.
        """
        parts = []
        for part in self._encoder.parts(devices):
            parts.append(part)
            await asyncio.sleep(0)
        message = b"".join(parts)
        del parts
        await send(message)
        return len(message)

    def _count_list(self, devices: Sequence[ListedDevice], size: int) -> None:
        self._status.ids_sent = len(devices)
        if isinstance(devices, NumberedList):
            self._status.healthy_sent = devices.healthy_count
        else:
            self._status.healthy_sent = sum(device.healthy for device in devices)
        self._status.bytes_sent = size
        self._status.messages_sent += 1
        self.lists_sent += 1
        self._sent = devices, time.monotonic()
        self._note_activity()

    def _note_activity(self) -> None:
        self.activity.advance()
        if self._lists_revision is not None:
            self._lists_revision.advance()

    async def _prefer(self, request: bytes) -> bytes:
        # An error here would fail the pod's admission (kubelet §6). A poor choice only costs some
        # speed.
        self._status.preferred_calls += 1
        try:
            containers = codec.decode_preference(request)
        except RequestRefusedError as err:
            _logger.warning("preferred.malformed", resource=self._resource.name, error=str(err))
            return codec.encode_preference([])
        await self._backend.ready.wait()
        return codec.encode_preference([self._choice(container) for container in containers])

    def _choice(self, request: PreferenceRequest) -> list[str]:
        try:
            choice = self._backend.preferred(
                self._resource.name, request.available, request.must_include, request.size
            )
        except Exception as err:  # a bug in the choice must not fail the pod
            _logger.error("preferred.failed", resource=self._resource.name, exc_info=err)
            return simple_choice(request)
        chosen = set(choice)
        if (
            len(chosen) == request.size
            and chosen.issuperset(request.must_include)
            and chosen.issubset(request.available)
        ):
            return choice
        _logger.warning(
            "preferred.unsuitable",
            resource=self._resource.name,
            size=request.size,
            chosen=len(choice),
        )
        return simple_choice(request)

    async def _allocate(self, request: bytes) -> bytes:
        began = time.perf_counter()
        self._status.allocations += 1
        try:
            answers = [
                await self._backend.allocate(self._resource.name, ids)
                for ids in codec.decode_allocate(request)
            ]
            return codec.encode_allocate(answers)
        except Exception as err:
            self._status.allocations_refused += 1
            self._status.last_error = f"Allocate: {err}"
            raise
        finally:
            self._status.allocate_seconds_last = time.perf_counter() - began
            self._status.allocate_seconds_sum += self._status.allocate_seconds_last

    async def _pre_start(self, request: bytes) -> bytes:
        began = time.perf_counter()
        self._status.pre_starts += 1
        try:
            await self._backend.pre_start(self._resource.name, codec.decode_pre_start(request))
        except Exception as err:
            self._status.pre_starts_refused += 1
            self._status.last_error = f"PreStartContainer: {err}"
            raise
        finally:
            self._status.pre_start_seconds_sum += time.perf_counter() - began
        return codec.EMPTY


def simple_choice(request: PreferenceRequest) -> list[str]:
    """Choose as the kubelet does without a preference: what must be included, then the first
    available ids.
    """
    return list(dict.fromkeys([*request.must_include, *request.available]))[: max(0, request.size)]
