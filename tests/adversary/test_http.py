"""Attacks on the open port: a pod that may reach :9394 wants the agent's descriptors, its time, its
log, or the names of other tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests import constants
from tests.component.conftest import QUICK, SHARED, Stage
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.sim.agent_process import AgentProcess

pytestmark = pytest.mark.component

# descriptors of an agent under attack: with a few hundred connections there are enough of them
_LIMIT = 256
_SLOW = 600
_PROBE_SECONDS = 5.0  # timeoutSeconds of the probes in manifests/daemonset.yaml


async def _agent(stage: Stage, config: str = QUICK + SHARED) -> AgentProcess:
    """A ready agent whose soft and hard limits are `_LIMIT`."""
    agent = stage.agent(config)
    agent._through = ("prlimit", f"--nofile={_LIMIT}:{_LIMIT}")
    await agent.start()
    await agent.until_ready()
    await stage.kubelet.until(
        lambda: any(call.facts["ids"] for call in stage.kubelet.called("list"))
    )
    return agent


@contextlib.asynccontextmanager
async def _connections(
    address: str, number: int, sent: bytes = b""
) -> AsyncIterator[list[socket.socket]]:
    """Connections that have sent something and then stay silent;
    what the server does not take in time waits in its queue.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    opened: list[socket.socket] = []

    async def open_one() -> None:
        one = socket.socket()
        opened.append(one)
        one.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                await loop.sock_connect(one, (host, int(port)))
                await loop.sock_sendall(one, sent)

    try:
        for start in range(0, number, 100):
            await asyncio.gather(*(open_one() for _ in range(start, min(number, start + 100))))
        yield opened
    finally:
        for one in opened:
            one.close()


async def _probed(agent: AgentProcess) -> None:
    """The kubelet's probe is answered over a connection of its own, again and again,
    and mostly within its time limit.

    It takes three failures in a row for a restart, so one that waited longer on a busy machine is
    none.
    """
    times = []
    for _ in range(5):
        began = time.monotonic()
        # or (0, reason) without an answer in time
        assert await agent.get_text("/livez") == (200, "alive\n")
        times.append(time.monotonic() - began)
    assert statistics.median(times) < _PROBE_SECONDS


def _log_bytes(agent: AgentProcess) -> int:
    return Path(agent.log_path).stat().st_size


async def test_connections_cannot_use_up_a_soft_limit_that_the_container_may_raise(
    stage: Stage,
) -> None:
    """Container runtimes leave the soft limit at 1,024 for programs that use select(2). A
    neighbour's connections would use that up.
    """
    agent = stage.agent(QUICK + SHARED)
    agent._through = ("prlimit", "--nofile=128:4096")
    await agent.start()
    limits = await asyncio.to_thread(Path(f"/proc/{agent.pid}/limits").read_text)
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == ["4096", "4096"]


async def test_slow_connections_cannot_keep_the_kubelets_probes_out(stage: Stage) -> None:
    """More silent connections than the agent may have descriptors: it is probed in time, pods
    start, and the log stays small.
    """
    agent = await _agent(stage)
    before = _log_bytes(agent)
    async with _connections(
        agent.public_address, _SLOW, b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: "
    ):
        await _probed(agent)
        pod = await stage.admit("under-attack")
        assert stage.ids(pod)
        assert await agent.metric("vgpu_agent_process_open_fds") < _LIMIT
    assert _log_bytes(agent) - before < 50_000
    assert not [line for line in agent.log_lines() if "Too many open files" in str(line)]


async def test_silent_connections_cannot_use_up_the_debug_port(stage: Stage) -> None:
    """From inside the pod, or through a forwarded port:
    the operator still gets an answer, as does the open port.
    """
    agent = await _agent(stage)
    async with _connections(agent.debug_address, _SLOW):
        assert (await agent.get("/debug/tasks"))["tasks"]
        await _probed(agent)


async def test_clients_that_read_nothing_cannot_keep_their_connections(stage: Stage) -> None:
    """Each asks for more than fits into the kernel's buffers.
    The oldest of them make room without waiting for their readers.
    """
    agent = await _agent(stage)
    asked = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 200
    async with _connections(agent.public_address, _SLOW, asked):
        await _probed(agent)


async def test_a_header_that_never_ends_is_cut_off(stage: Stage) -> None:
    """A byte now and then keeps no connection beyond the time that a request may take,
    and neither do endless header lines.
    """
    stage.constants[constants.WEB_REQUEST_TIMEOUT] = 0.5
    agent = await _agent(stage)
    host, _, port = agent.public_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n")
    ended = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X: y\r\n")
            await asyncio.wait([ended], timeout=0.05)
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 10_000)
    with contextlib.suppress(ConnectionError):
        assert b" 200 " not in await reader.read()
    writer.close()
    await _probed(agent)


async def test_junk_in_a_loop_cannot_fill_the_log(stage: Stage) -> None:
    """Each line of junk could be one of the log's: some are written, then their number."""
    agent = await _agent(stage)
    for _ in range(3):
        async with _connections(
            agent.public_address, 30, b"GET / HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n"
        ):
            await _probed(agent)
    assert 0 < sum(line["msg"] == "web.bad_request" for line in agent.log_lines()) <= 20


async def test_fifty_clients_that_ask_in_a_loop_cannot_keep_pods_waiting(stage: Stage) -> None:
    """A scrape costs milliseconds of the one event loop.
    An immediate second request waits, and gets the last answer.
    """
    agent = await _agent(stage)
    hammering = asyncio.ensure_future(_hammer(f"http://{agent.public_address}/metrics", clients=50))
    try:
        took = []
        for number in range(8):
            began = time.monotonic()
            assert stage.ids(await stage.admit(f"pod-{number}"))
            took.append(time.monotonic() - began)
        assert min(took) < 0.5
        await _probed(agent)
    finally:
        hammering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hammering


async def _hammer(url: str, *, clients: int) -> None:
    async def one(session: aiohttp.ClientSession) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    await answer.read()
            await asyncio.sleep(0)

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(clients):
            group.create_task(one(session))


_NAME = "secret-project"


async def test_no_neighbour_learns_the_names_of_other_tenants_pods_where_the_operator_keeps_them(
    stage: Stage,
) -> None:
    """With web.podNames: debug nothing on the open port names a pod.
    The debug port, on the pod's own loopback, serves it all.
    """
    agent = await stage.ready_agent(QUICK + SHARED + "web: {podNames: debug}\n")
    await stage.admit(_NAME)
    await agent.until("/debug/allocations", lambda answer: _NAME in str(answer))
    paths = [
        "/",
        "/metrics",
        "/livez?verbose",
        "/readyz?verbose",
        "/healthz",
        "/nothing",
        "/debug/allocations",
    ]
    answers = {path: await agent.get_text(path) for path in paths}
    assert [path for path, (_, text) in answers.items() if _NAME in text] == []
    assert (answers["/"][0], answers["/metrics"][0], answers["/readyz?verbose"][0]) == (
        403,
        200,
        200,
    )
    assert "vgpu_agent_gpu_grants{" in answers["/metrics"][1]
    for path in ("/", "/metrics"):
        status, text = await agent.get_text(path, debug=True)
        assert (status, _NAME in text) == (200, True)
