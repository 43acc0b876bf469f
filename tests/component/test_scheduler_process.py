"""The process of ``vgpu-agent scheduler``, on the event loop that it has in a cluster; the tests of
`tests/scheduler` have the service on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import ssl
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.webhook.certificates import ServerCertificate, make

_NODE, _POD = "n0", "p"
_HOST = "extender.test"
_ENDED_SECONDS = 5.0


@contextlib.asynccontextmanager
async def extender(kubeconfig: Path, *flags: str) -> AsyncIterator[Process]:
    """The process, ended with the context; its log is on stderr."""
    command = (sys.executable, "-m", "vgpu_agent", "scheduler", "--kubeconfig", str(kubeconfig))
    process = await asyncio.create_subprocess_exec(*command, *flags, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def address_of(process: Process) -> str:
    """Where it listens, as its log says."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for line in process.stderr:
            if found := re.search(rb'"msg":"scheduler.listening".*"address":"([^"]+)"', line):
                return found[1].decode()
    raise AssertionError("it has ended without listening")


async def cluster(server: ApiServer) -> dict[str, Any]:
    """Create a Node with a card and a pod for half of it; the pod."""
    server.objects.create(
        "nodes",
        {
            "metadata": {
                "name": _NODE,
                "annotations": node_texts([entry(0, uuid=uuid(0, 0))]),
            },
            "status": {"allocatable": {KEYS.number: "10"}},
        },
    )
    limits = {KEYS.number: "1", KEYS.cores: "50"}
    spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    return server.objects.create("pods", {"metadata": {"name": _POD}, "spec": spec}, "default")


def mount(folder: Path, certified: ServerCertificate) -> ssl.SSLContext:
    """Put a certificate where a mounted Secret has it; a client that trusts it."""
    replace_text(folder / "tls.key", certified.key.decode())
    replace_text(folder / "tls.crt", certified.certificate.decode())
    return ssl.create_default_context(cadata=certified.authorities.decode())


async def ask(
    address: str, tls: ssl.SSLContext, path: str, arguments: object = None
) -> tuple[int, Any]:
    """Status and answer, each over a new connection."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
        http.request(
            "GET" if arguments is None else "POST",
            f"https://{address}{path}",
            data=None if arguments is None else json.dumps(arguments),
            ssl=tls,
            server_hostname=_HOST,
        ) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text


async def test_a_pod_is_placed_and_bound_over_tls_and_a_renewed_certificate_is_served(
    folder: Path,
) -> None:
    """All that kube-scheduler asks of it, and then the end of the pod."""
    old = make([_HOST], time.time())
    trusting = await asyncio.to_thread(mount, folder, old)
    async with ApiServer() as server:
        pod = await cluster(server)
        kubeconfig = await asyncio.to_thread(server.kubeconfig, folder / "kubeconfig")
        files = ("--tls-cert-file", f"{folder}/tls.crt", "--tls-key-file", f"{folder}/tls.key")
        flags = ("--server-bind-port", "0", "--cert-refresh-interval", "100ms", "--enable-tls")
        async with extender(kubeconfig, *flags, *files) as process:
            address = await address_of(process)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await ask(address, trusting, "/readyz"))[0] != 200:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
            status, answer = await ask(
                address, trusting, "/scheduler/filter", {"Pod": pod, "NodeNames": [_NODE]}
            )
            assert (status, answer["NodeNames"], answer["Error"]) == (200, [_NODE], "")
            binding = {
                "PodName": _POD,
                "PodNamespace": "default",
                "PodUID": pod["metadata"]["uid"],
                "Node": _NODE,
            }
            assert await ask(address, trusting, "/scheduler/bind", binding) == (200, {"Error": ""})
            bound = server.objects.get("pods", _POD, "default")
            assert bound["spec"]["nodeName"] == _NODE
            assert bound["metadata"]["annotations"][KEYS.pre_allocated].startswith("main[0_")

            new = await asyncio.to_thread(mount, folder, make([_HOST], time.time()))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectorCertificateError):
                        assert (await ask(address, new, "/healthz"))[0] == 200
                        break
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), _ENDED_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_at_once_while_the_api_server_does_not_answer(
    folder: Path, number: signal.Signals
) -> None:
    """Otherwise the kubelet waits for 30 s, and then kills it."""
    async with ApiServer(latency_seconds=FOR_EVER_SECONDS) as server:
        kubeconfig = await asyncio.to_thread(server.kubeconfig, folder / "kubeconfig")
        async with extender(kubeconfig, "--server-bind-port", "0") as process:
            await address_of(process)
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), _ENDED_SECONDS) == 0


async def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    """It names the flag; the status makes the kubelet start it again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with ApiServer() as server:
            kubeconfig = await asyncio.to_thread(server.kubeconfig, folder / "kubeconfig")
            async with extender(kubeconfig, "--server-bind-port", str(port)) as process:
                _, log = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 1
    text = log.decode()
    assert f"cannot listen on 127.0.0.1:{port}: " in text
    assert f"{os.strerror(errno.EADDRINUSE).lower()}; choose another --server-bind-port" in text
    assert "Traceback" not in text
