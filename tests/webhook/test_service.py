"""The process of the webhook: real TLS, as the API server calls it, against a simulated one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from tests.families.vgpu_manager.scheduling.nodes import entry, node_texts
from tests.patience import PATIENCE_SECONDS, eventually
from tests.webhook.reviews import container, patched, pod, response, review
from tests.webhook.test_own_certificate import KINDS, OPTIONS, webhook
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ConfigError, ListenError
from vgpu_agent.families.admission import AdmissionOptions, LargestNode
from vgpu_agent.families.vgpu_manager.admission.family import build
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.webhook import certificates
from vgpu_agent.webhook.options import CertificateFiles, Options
from vgpu_agent.webhook.service import Service

pytestmark = pytest.mark.component

NAME = OPTIONS.names[0]
FAMILY = build(AdmissionOptions(scheduler_name="vgpu-scheduler"))
QUICK_STOP: dict[str, Any] = {"drain_seconds": 0.0, "stop_seconds": 1.0}


class Caller:
    """The API server's side of a call: it trusts the bundle of the configuration, and nothing
    else.
    """

    def __init__(self, address: str, authorities: bytes) -> None:
        self.address, self.stays = address, True
        self.context = ssl.create_default_context(cadata=authorities.decode())

    async def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and answer over a new connection, which `stays` open if the server wants it."""
        connector = aiohttp.TCPConnector(ssl=self.context)
        async with aiohttp.ClientSession(connector=connector) as http:
            method = "GET" if body is None else "POST"
            data = None if body is None else io.BytesIO(body)
            url = f"https://{self.address}{path}"
            async with http.request(method, url, data=data, server_hostname=NAME) as answer:
                self.stays = answer.headers.get("Connection", "") != "close"
                return answer.status, await answer.read()


@contextlib.asynccontextmanager
async def serving(options: Options, url: str = "") -> AsyncIterator[Service]:
    """A service that runs until the context ends."""
    credentials = Credentials(lambda: Access(url), "test") if url else None
    found = Service(options, FAMILY, credentials)
    running = asyncio.ensure_future(found.run())
    try:
        await eventually(lambda: running.done() or found.address)
        if running.done():
            await running
        yield found
    finally:
        found.stop()
        if not running.done():
            await asyncio.wait_for(running, PATIENCE_SECONDS)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """A cluster with a Node of two GPUs and what the component brings."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as found:
        found.objects.create("secrets", {"metadata": {"name": "hook-tls"}}, "ns")
        for kind in KINDS:
            found.objects.create(
                kind, {"metadata": {"name": "hook"}, "webhooks": [webhook("pods.hook")]}
            )
        texts = node_texts([entry(0), entry(1)])
        found.objects.create("nodes", {"metadata": {"name": "n1", "annotations": texts}})
        yield found


def own(**options: Any) -> Options:
    """Options of a service with a certificate of its own."""
    return Options(OPTIONS, host="127.0.0.1", port=0, **{**QUICK_STOP, **options})


def bundle(server: ApiServer) -> bytes:
    """The CA bundle that the API server trusts."""
    (found,) = server.objects.get(KINDS[0], "hook")["webhooks"]
    return base64.b64decode(found["clientConfig"]["caBundle"])


async def test_the_api_server_calls_over_tls_with_the_bundle_it_was_given(
    server: ApiServer,
) -> None:
    """From the empty Secret to a pod that is completed, and one that is refused."""
    async with serving(own(), server.url) as found:
        await eventually(
            lambda: not found.trouble and found._nodes and found._nodes.synced.is_set()
        )
        caller = Caller(found.address, bundle(server))
        given = pod(container(number="1"), annotations={"nvidia.com/pre-allocated": "forged"})
        status, answer = await caller.ask("/pods/mutate", review(given))
        assert status == 200
        after = patched(given, answer)
        assert after["spec"]["schedulerName"] == "vgpu-scheduler"
        assert after["metadata"]["annotations"] == {}
        status, answer = await caller.ask("/pods/validate", review(pod(container(number="17"))))
        assert (status, response(answer)["allowed"]) == (200, False)
        _, answer = await caller.ask("/pods/validate", review(pod(container(number="3"))))
        (warning,) = response(answer)["warnings"]
        assert "the largest Node that was seen has 2 GPUs" in warning
        assert (await caller.ask("/readyz"))[0] == 200
        _, metrics = await caller.ask("/metrics")
        assert b'reviews_total{verb="mutate",outcome="changed"} 1\n' in metrics
        assert b'reviews_total{verb="validate",outcome="denied"} 1\n' in metrics
        assert json.loads((await caller.ask("/version"))[1])["version"]


async def test_a_replica_that_the_api_server_does_not_trust_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its probes are answered, so that nothing restarts it, and it answers reviews all the same."""
    constants.use(monkeypatch, QUICK)
    async with serving(own(), "http://127.0.0.1:1") as found:
        caller = Caller(
            found.address,
            found._own_certificate._in_use.authorities if found._own_certificate else b"",
        )
        assert (await caller.ask("/healthz"))[0] == 200
        await eventually(lambda: "cannot be reached" in found.trouble)
        status, text = await caller.ask("/readyz")
        assert (status, b"cannot be reached" in text) == (503, True)
        status, answer = await caller.ask("/pods/validate", review(pod(container(number="9"))))
        assert response(answer)["allowed"]  # no Node is known


async def test_a_loop_that_is_stuck_is_not_healthy(tmp_path: Path) -> None:
    """So the kubelet starts the replica again: nothing else would renew its certificate."""
    files, authorities = await asyncio.to_thread(write, tmp_path)
    options = Options(files, host="127.0.0.1", port=0, watches_nodes=False, **QUICK_STOP)
    async with serving(options) as found:
        caller = Caller(found.address, authorities)
        assert await caller.ask("/healthz") == (200, b"ok\n")
        assert found._supervisor
        found._supervisor.start("one", lambda: asyncio.sleep(60), stuck_after_seconds=0.0)
        await asyncio.sleep(0.01)
        assert await caller.ask("/healthz") == (503, b"no heartbeat of: one\n")


async def test_a_renewed_certificate_is_served_without_a_restart(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections get it; the other replica has written it."""
    monkeypatch.setattr("vgpu_agent.webhook.own_certificate.CHECK_SECONDS", 0.01)
    async with serving(own(), server.url) as found:
        await eventually(lambda: not found.trouble)
        first = bundle(server)
        renewed = certificates.make(OPTIONS.names, time.time())
        data = dict(
            zip(
                ("ca.crt", "ca.key", "tls.crt", "tls.key"),
                (base64.b64encode(text).decode() for text in msgspec.structs.astuple(renewed)),
                strict=True,
            )
        )
        server.objects.patch("secrets", "hook-tls", {"data": data}, "ns")
        await eventually(
            lambda: found._own_certificate and found._own_certificate._in_use == renewed
        )
        assert bundle(server) == renewed.authorities + first
        assert (await Caller(found.address, renewed.authorities).ask("/healthz"))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await Caller(found.address, first).ask("/healthz")


def write(folder: Path, name: str = NAME) -> tuple[CertificateFiles, bytes]:
    """Write a certificate as cert-manager mounts it."""
    made = certificates.make((name,), time.time())
    files = CertificateFiles(str(folder / "tls.crt"), str(folder / "tls.key"))
    for path, text in ((files.certificate, made.certificate), (files.key, made.key)):
        new = Path(f"{path}.new")
        new.write_bytes(text)
        new.rename(path)
    return files, made.authorities


async def test_files_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cert-manager renews them; without Nodes and a certificate of its own, the webhook needs no
    API server. vgpu-manager:D3.
    """
    monkeypatch.setattr("vgpu_agent.web.certificate.CERTIFICATE_SECONDS", 0.0)
    files, authorities = await asyncio.to_thread(write, tmp_path)
    options = Options(files, host="127.0.0.1", port=0, watches_nodes=False, **QUICK_STOP)
    async with serving(options) as found:
        caller = Caller(found.address, authorities)
        assert (await caller.ask("/readyz"))[0] == 200
        assert caller.stays
        _, renewed = await asyncio.to_thread(write, tmp_path)
        assert (await Caller(found.address, renewed).ask("/readyz"))[0] == 200


async def test_what_does_not_fit_together_is_said_at_the_start(tmp_path: Path) -> None:
    """With the flag that remedies it."""
    missing = Options(CertificateFiles("/no/crt", "/no/key"), port=0, watches_nodes=False)
    with pytest.raises(ListenError, match=r"/no/crt does not exist; mount .* --cert-dir"):
        async with serving(missing):
            pass
    with pytest.raises(ConfigError, match="--certificate-secret needs the API server"):
        Service(own(watches_nodes=False), FAMILY, None)
    with pytest.raises(ConfigError, match="--watch-nodes needs the API server"):
        Service(Options(CertificateFiles("/no/crt", "/no/key")), FAMILY, None)
    files, _ = await asyncio.to_thread(write, tmp_path)
    options = Options(files, host="127.0.0.1", port=0, watches_nodes=False, **QUICK_STOP)
    async with serving(options) as found:
        port = int(found.address.rpartition(":")[2])
        with pytest.raises(ListenError, match=rf"{port}: .*--server-bind-port"):
            async with serving(msgspec.structs.replace(options, port=port)):
                pass


@contextlib.asynccontextmanager
async def with_files(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Service, Caller]]:
    """A service without the API server, and a caller that trusts it."""
    files, authorities = await asyncio.to_thread(write, tmp_path)
    given = Options(files, host="127.0.0.1", port=0, watches_nodes=False, **QUICK_STOP, **options)
    async with serving(given) as found:
        yield found, Caller(found.address, authorities)


async def test_a_review_that_is_too_large_is_denied(tmp_path: Path) -> None:
    """With another status the API server lets the pod pass, where the failure policy is Ignore. It
    writes < as six bytes, so a pod that etcd takes can be that large.
    """
    async with with_files(tmp_path) as (_, caller):
        large = pod(container(number="17"), annotations={"a": "x" * 9 * 1024 * 1024})
        for verb in ("mutate", "validate"):
            status, answer = await caller.ask(f"/pods/{verb}", review(large))
            assert status == 200
            assert caller.stays
            assert not response(answer)["allowed"]
            message = response(answer)["status"]["message"]
            assert message == (
                "the AdmissionReview is larger than 8388608 bytes; make the pod smaller"
            )
        _, metrics = await caller.ask("/metrics")
        assert b'reviews_total{verb="mutate",outcome="too_large"} 1\n' in metrics


async def raw(
    caller: Caller, client: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which a test writes what it likes."""
    host, _, port = caller.address.rpartition(":")
    return await asyncio.open_connection(
        host, int(port), ssl=caller.context, server_hostname=NAME, local_addr=(client, 0)
    )


HEAD = "POST /pods/mutate HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n"


async def test_a_review_that_is_too_large_is_denied_before_all_of_it_came(tmp_path: Path) -> None:
    """The API server waits no longer than for another review. Without a declared length, too."""
    limits: dict[str, Any] = {"max_body_bytes": 100_000, "body_seconds": 0.5}
    async with with_files(tmp_path, **limits) as (_, caller):
        start = review(pod(annotations={"a": "x" * 120_000}))
        chunked = HEAD.replace("Content-Length: {}", "Transfer-Encoding: chunked")
        chunk = f"{len(start):x}\r\n".encode() + start + b"\r\n"
        for sent in (HEAD.format(1_000_000).encode() + start, chunked.encode() + chunk):
            reader, writer = await raw(caller)
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.splitlines() if "Content-Length" in line)
                body = await reader.readexactly(int(length.partition(":")[2]))
            assert head.startswith("HTTP/1.1 200 ")
            assert "Connection: close" in head
            assert response(body)["status"]["code"] == 413
            writer.close()


async def test_large_reviews_are_answered_a_few_at_a_time(tmp_path: Path) -> None:
    """All of them."""
    async with with_files(tmp_path) as (_, caller):
        large = review(pod(container(), annotations={"a": "x" * 500_000}))
        statuses = await asyncio.gather(*(caller.ask("/pods/mutate", large) for _ in range(10)))
        assert {status for status, _ in statuses} == {200}


async def test_stalled_large_reviews_of_one_client_do_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with what they have declared nor with what they have sent."""
    monkeypatch.setattr("vgpu_agent.webhook.slots.UNDISTURBED_SECONDS", 0.1)
    async with with_files(tmp_path, body_seconds=PATIENCE_SECONDS) as (_, caller):
        stalled = [await raw(caller, "127.0.0.2") for _ in range(12)]
        for place, (_, writer) in enumerate(stalled):
            writer.write(HEAD.format(1_000_000).encode() + b"{" * (600_000 * (place % 2)))
        large = review(pod(container(), annotations={"a": "x" * 500_000}))
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            for _ in range(6):
                assert (await caller.ask("/pods/mutate", large))[0] == 200
        for _, writer in stalled:
            writer.transport.abort()


async def test_bodies_that_are_too_slow_are_refused(tmp_path: Path) -> None:
    """The server goes on."""
    async with with_files(tmp_path, body_seconds=0.2) as (_, caller):
        reader, writer = await raw(caller)
        writer.write(HEAD.format(9).encode() + b"{")
        assert b"408" in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()
        _, metrics = await caller.ask("/metrics")
        assert b'reviews_total{verb="mutate",outcome="too_slow"} 1\n' in metrics


async def test_a_signal_to_stop_lets_the_service_forget_the_replica_first(
    tmp_path: Path,
) -> None:
    """It is not ready at once, and answers as long as calls may still come."""
    files, authorities = await asyncio.to_thread(write, tmp_path)
    options = Options(
        files, host="127.0.0.1", port=0, watches_nodes=False, drain_seconds=4.0, stop_seconds=1.0
    )
    found = Service(options, FAMILY, None)
    running = asyncio.ensure_future(found.run())
    await eventually(lambda: found.address)
    os.kill(os.getpid(), signal.SIGTERM)
    caller = Caller(found.address, authorities)
    await eventually(lambda: found.trouble)
    assert (await caller.ask("/readyz"))[0] == 503
    assert response((await caller.ask("/pods/mutate", review(pod(container()))))[1])["allowed"]
    assert not caller.stays
    await asyncio.wait_for(running, PATIENCE_SECONDS)
    with pytest.raises(aiohttp.ClientConnectorError):
        await caller.ask("/healthz")


async def test_the_largest_node_is_what_was_seen_or_what_may_come(server: ApiServer) -> None:
    """A Node that an autoscaler would add is not there yet; before all were listed, none counts."""
    options = own(assumed_largest_node=8)
    async with serving(options, server.url) as found:
        await eventually(lambda: found._largest_node().gpus == 8)
        assert found._largest_node() == LargestNode(8, 24576, is_limit=True)
        server.objects.delete("nodes", "n1")
        texts = node_texts([entry(place, memory=81920) for place in range(16)])
        server.objects.create("nodes", {"metadata": {"name": "n2", "annotations": texts}})
        await eventually(lambda: found._largest_node() == LargestNode(16, 81920, is_limit=True))


def test_the_largest_node_that_the_operator_names_counts_by_itself(tmp_path: Path) -> None:
    """Without a watch, and where all Nodes with GPUs are away."""
    files, _ = write(tmp_path)
    options = Options(files, watches_nodes=False, assumed_largest_node=8)
    assert Service(options, FAMILY, None)._largest_node() == LargestNode(8, is_limit=True)
    assert (
        Service(Options(files, watches_nodes=False), FAMILY, None)._largest_node() == LargestNode()
    )


def test_a_certificate_in_files_does_not_load_cryptography() -> None:
    """It takes memory, and only the other way needs it."""
    code = "import sys, vgpu_agent.webhook.service; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
