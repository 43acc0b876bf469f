"""One registration at the simulated kubelet: the connection back to a device plugin, and its
ListAndWatch stream.

Used by `kubelet` in this package only. It is the client side of the device plugin API on grpcio,
dialled as the real kubelet dials: authority ``localhost``, at most 4 MiB per message, 10 seconds to
connect.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    # `Endpoint.watch` says when these are called.
    OnList: TypeAlias = "Callable[[Endpoint, messages.ListAndWatchResponse], Awaitable[None]]"
    OnEnd: TypeAlias = "Callable[[Endpoint, str], Awaitable[None]]"

_SERVICE = "/v1beta1.DevicePlugin"
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_DIAL_SECONDS = 10.0
_PRE_START_SECONDS = 30.0


class CallFailedError(Exception):
    """A call to the plugin failed; the text is the kubelet's: ``rpc error: code = … desc = …``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The duration of one call to the plugin; ``began`` is in `time.monotonic` seconds, ``ids`` the
    number of its device ids.
    """

    method: str
    began: float
    seconds: float
    ids: int


class Endpoint:
    """The kubelet's client of a device plugin, in use from `connect` until its stream ends.

    Attributes:
        options: the plugin's answer to GetDevicePluginOptions; None until it has been asked.
        timings: of every call that succeeded, oldest first.
        stopped_at: when its stream ended (`time.monotonic`), set by `kubelet`; None before.
    """

    def __init__(self, resource: str, socket_path: Path) -> None:
        self.resource = resource
        self.socket_path = socket_path
        self.options: messages.DevicePluginOptions | None = None
        self.timings: list[Timing] = []
        self.stopped_at: float | None = None
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket_path}",
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                # no connection is shared with an earlier plugin on the same path
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self._hung_up = False  # the connection was dropped by `hang_up`
        self._watching: asyncio.Task[None] | None = None

    async def connect(self, *, asks_options: bool = True) -> None:
        """Dial, and ask for the options, as kubelet does before it answers Register (kubelet V1);
        a kubelet before 1.25 does not ask (``asks_options`` is False).

        Raises:
            CallFailedError: no server answers on the socket, or the plugin refuses.
        """
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                await self._channel.channel_ready()
        except TimeoutError as err:
            raise CallFailedError(
                f"nobody answers on {self.socket_path} within {_DIAL_SECONDS:g} s"
            ) from err
        if not asks_options:
            return
        self.options = await self._call(
            "GetDevicePluginOptions", messages.Empty(), messages.DevicePluginOptions
        )

    def watch(self, on_list: OnList, on_end: OnEnd) -> None:
        """Open ListAndWatch; each list goes to ``on_list``, the end of the stream to ``on_end``
        with its reason.
        """
        self._watching = asyncio.create_task(
            self._watch(on_list, on_end), name=f"ListAndWatch {self.resource}"
        )

    async def _watch(self, on_list: OnList, on_end: OnEnd) -> None:
        call: Any = self._channel.unary_stream(
            f"{_SERVICE}/ListAndWatch",
            request_serializer=messages.Empty.SerializeToString,
            response_deserializer=messages.ListAndWatchResponse.FromString,
        )
        reason = "EOF"
        try:
            async for response in call(messages.Empty()):
                await on_list(self, response)
        except grpc.aio.AioRpcError as err:
            reason = _worded(err)
        except asyncio.CancelledError:
            await on_end(self, "cancelled by kubelet")
            raise
        await on_end(self, reason)

    async def cancel_stream(self) -> None:
        """Cancel ListAndWatch and nothing else, like a kubelet that loses a stream without a
        restart (kubelet V3).
        """
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def prefer(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Call GetPreferredAllocation for one container, which gets ``size`` ids; return those that
        the plugin prefers.

        Raises:
            CallFailedError: the call failed.
        """
        request = messages.PreferredAllocationRequest()
        request.container_requests.add(
            available_device_ids=available,
            must_include_device_ids=must_include,
            allocation_size=size,
        )
        response = await self._call(
            "GetPreferredAllocation", request, messages.PreferredAllocationResponse
        )
        return (
            list(response.container_responses[0].device_ids) if response.container_responses else []
        )

    async def allocate(self, ids: Sequence[str]) -> messages.ContainerAllocateResponse:
        """Call Allocate for one container; only the first element of the answer is read.

        Raises:
            CallFailedError: refused, or an answer without elements.
        """
        request = messages.AllocateRequest()
        request.container_requests.add(device_ids=ids)
        response = await self._call("Allocate", request, messages.AllocateResponse, ids=len(ids))
        if not response.container_responses:
            raise CallFailedError("no containers return in allocation response")
        answer: messages.ContainerAllocateResponse = response.container_responses[0]
        return answer

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Call PreStartContainer for the ids of one container.

        Raises:
            CallFailedError: refused, or not answered in time.
        """
        request = messages.PreStartContainerRequest(device_ids=ids)
        answer = messages.PreStartContainerResponse
        await self._call(
            "PreStartContainer", request, answer, ids=len(ids), timeout_seconds=_PRE_START_SECONDS
        )

    async def close(self) -> None:
        """Drop the connection; the stream ends with it."""
        await self.cancel_stream()
        await self.hang_up()

    async def hang_up(self) -> None:
        """Drop the connection of a stream that has ended."""
        self._hung_up = True
        await self._channel.close(None)

    async def _call(
        self,
        method: str,
        request: Any,
        response: type[Any],
        *,
        ids: int = 0,
        timeout_seconds: float | None = None,
    ) -> Any:
        call: Any = self._channel.unary_unary(
            f"{_SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        if self._hung_up:  # it hung up between two calls for one pod that is being admitted
            raise CallFailedError(self._stopped())
        began = time.monotonic()
        try:
            answer = await call(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as err:
            raise CallFailedError(_worded(err)) from err
        except asyncio.CancelledError:
            # grpcio cancels the calls of a channel that is closed under them; a cancellation of our
            # own task passes on.
            task = asyncio.current_task()
            if not self._hung_up or (task is not None and task.cancelling()):
                raise
            raise CallFailedError(self._stopped()) from None
        self.timings.append(Timing(method, began, time.monotonic() - began, ids))
        return answer

    def _stopped(self) -> str:
        return f"endpoint {self.socket_path} has been stopped"


def _worded(err: grpc.aio.AioRpcError) -> str:
    return f"rpc error: code = {err.code().name} desc = {err.details()}"
