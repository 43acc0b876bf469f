"""A server of ours that ends: calls finish, streams end cleanly,
and no peer holds up the end for longer than the grace time.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import h2.settings
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from tests.grpc.parts import ECHO, HANG, SLOW, Served, new_client, raw_watch, status_of
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.grpc.client import CallError, call


async def test_draining_ends_streams_cleanly_while_the_client_keeps_its_connection(
    served: Served,
) -> None:
    """The kubelet never closes its connection by itself; grpclib's own stop would wait for it
    forever on Python 3.12 and later.
    """
    watch = served.watch()
    await watch.read()
    served.service.ending.set()

    await asyncio.wait_for(served.server.drain(FOR_EVER_SECONDS), PATIENCE_SECONDS)

    assert await watch.read() == EOF
    assert await watch.code() == grpc.StatusCode.OK


async def test_draining_lets_a_running_call_finish(served: Served) -> None:
    """An Allocate in flight gets its answer, while no new call is let in."""
    answer = asyncio.ensure_future(served.call(SLOW, b"answer"))
    await served.service.watching.wait()

    drain = asyncio.create_task(served.server.drain(FOR_EVER_SECONDS))
    await asyncio.sleep(0)
    with pytest.raises(CallError, match="Connection refused"):
        await call(served.path, ECHO, b"", timeout_seconds=PATIENCE_SECONDS)
    served.service.ending.set()

    assert await answer == b"answer"
    await drain


async def test_draining_cancels_what_does_not_finish_in_time(served: Served) -> None:
    """A method that hangs costs the grace time and no more."""
    hanging = asyncio.ensure_future(status_of(served.call(HANG)))
    await served.service.watching.wait()

    began = time.perf_counter()
    await asyncio.wait_for(served.server.drain(0.1), PATIENCE_SECONDS)

    assert time.perf_counter() - began >= 0.1
    assert served.service.cleaned_up.is_set()
    assert (await hanging)[0] in {"UNAVAILABLE", "CANCELLED", "UNKNOWN"}


async def test_draining_cuts_off_a_peer_that_does_not_read(served: Served) -> None:
    """It has cancelled its stream and reads no more:
    neither the end nor a task may wait for room in the write buffer.
    """
    served.service.message = b"x" * 20_000_000
    client = new_client()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
    client.increment_flow_control_window(2**30)
    _, writer = await raw_watch(served.path, client)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can both
    await asyncio.wait_for(served.service.watching.wait(), PATIENCE_SECONDS)
    client.reset_stream(1)
    writer.write(client.data_to_send())
    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)

    began = time.perf_counter()
    await served.server.drain(10.0)

    assert time.perf_counter() - began < 9.0  # it gets a tenth of the grace
    assert [task for task in asyncio.all_tasks() if "request_handler" in repr(task)] == []
    writer.transport.abort()
