"""The wrapper of grpclib, with grpcio and with peers that speak nonsense:
each pitfall here was met.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from tests.grpc.parts import ECHO, FAIL, Served, new_client, post, raw_watch, status_of
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    KubeletError,
    LedgerError,
    RequestRefusedError,
    UnhealthyDeviceError,
    UnknownDeviceError,
)
from vgpu_agent.grpc.client import call


async def test_a_call_moves_bytes_both_ways(served: Served) -> None:
    """Megabytes as well: kubelet's GetPreferredAllocation has no limit on our side (kubelet
    §10).
    """
    request = b"x" * 5_000_000

    assert await served.channel.unary_unary(ECHO)(b"", timeout=PATIENCE_SECONDS) == b""
    assert await call(served.path, ECHO, request, timeout_seconds=PATIENCE_SECONDS) == request


async def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    """grpclib's own refusal lacks a content type and reaches other stacks as ``Unknown``."""
    assert await status_of(served.call("/v1beta1.DevicePlugin/Surprise")) == (
        "UNIMPLEMENTED",
        "vgpu-agent does not serve this method",
    )


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestRefusedError("at most 1"), "INVALID_ARGUMENT"),
        (UnknownDeviceError("unknown id x"), "INVALID_ARGUMENT"),
        (UnhealthyDeviceError("x is unhealthy"), "FAILED_PRECONDITION"),
        (LedgerError("taken"), "FAILED_PRECONDITION"),
        (CapacityError("no memory left"), "RESOURCE_EXHAUSTED"),
        (KubeletError("no checkpoint"), "UNAVAILABLE"),
    ],
)
async def test_our_errors_reach_kubelet_with_their_text(
    served: Served, failure: AgentError, status: str
) -> None:
    """The kubelet copies our sentence into the pod's status."""
    served.service.failure = failure

    assert await status_of(served.call(FAIL)) == (status, str(failure))


async def test_a_bug_reaches_kubelet_as_a_short_text_and_the_log_as_a_whole(served: Served) -> None:
    """A traceback in a pod's status does not help. In our log it does. Other calls go on."""
    with capture_logs() as lines:
        status, text = await status_of(served.call(FAIL))

    assert (status, text) == (
        "INTERNAL",
        "internal error in vgpu-agent (ValueError); its log has the details under grpc.bug",
    )
    (line,) = [line for line in lines if line["event"] == "grpc.bug"]
    assert (line["method"], str(line["exc_info"])) == (FAIL, "a bug")
    assert await served.call(ECHO, b"still there") == b"still there"


async def test_a_long_error_text_is_cut(served: Served) -> None:
    """An error text is an HTTP/2 header. A list of a thousand ids must not break the connection."""
    served.service.failure = RequestRefusedError("é" * 100_000)

    status, text = await status_of(served.call(FAIL))

    assert (status, text) == ("INVALID_ARGUMENT", "é" * 1024)


async def test_a_cancelled_stream_is_cleaned_up_at_once(served: Served) -> None:
    """The kubelet's cancel reaches the method as a cancellation. The connection stays usable."""
    call = served.watch()
    await call.read()

    call.cancel()

    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)
    assert await served.call(ECHO, b"still there") == b"still there"


async def test_a_reader_that_goes_away_during_a_send_is_cleaned_up_at_once(served: Served) -> None:
    """The method is blocked in a send of more than the flow-control window
    when the connection is cut.
    """
    served.service.message = b"x" * 20_000_000
    reader, writer = await raw_watch(served.path, new_client())
    await asyncio.wait_for(served.service.watching.wait(), PATIENCE_SECONDS)
    await reader.read(1000)

    writer.transport.abort()

    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
        b"",
    ],
)
async def test_garbage_on_the_socket_disturbs_nobody(served: Served, junk: bytes) -> None:
    """A peer that speaks nonsense loses its own connection.
    A call before and after it is answered.
    """
    assert await served.call(ECHO, b"before") == b"before"
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(junk)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()

    assert await served.call(ECHO, b"after") == b"after"


async def test_an_unknown_frame_does_not_end_the_connection(served: Served) -> None:
    """HTTP/2 demands that frames of an unknown type are ignored;
    grpclib alone would drop the connection.
    """
    client = new_client()
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(client.data_to_send() + b"\x00\x00\x04\xbb\x00\x00\x00\x00\x00abcd")
    post(client, ECHO, b"hello")
    writer.write(client.data_to_send())

    received = b""
    while b"hello" not in received:
        chunk = await asyncio.wait_for(reader.read(4096), PATIENCE_SECONDS)
        assert chunk, "the connection was closed"
        received += chunk
    writer.close()


async def test_a_call_without_a_request_message_is_refused(served: Served) -> None:
    """A request that ends after its headers must not leave kubelet waiting."""
    client = new_client()
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    post(client, ECHO, None)
    writer.write(client.data_to_send())

    trailers: dict[bytes, bytes] = {}
    while b"grpc-status" not in trailers:
        for event in client.receive_data(
            await asyncio.wait_for(reader.read(4096), PATIENCE_SECONDS)
        ):
            trailers.update(getattr(event, "headers", None) or [])
    writer.close()

    assert (trailers[b"grpc-status"], trailers[b"grpc-message"]) == (
        b"3",
        b"the call carries no request message",
    )
