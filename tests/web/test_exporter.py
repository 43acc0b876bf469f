"""Metrics of a replaced program at an address of their own: what they cost, who gets them, and how
they are encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.patience import PATIENCE_SECONDS
from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.errors import ClusterError, ListenError
from vgpu_agent.families.spec import ExporterOptions
from vgpu_agent.families.vgpu_manager.settings import Exporter, VgpuManager
from vgpu_agent.families.vgpu_manager.spec import SPEC
from vgpu_agent.model import Grant, GrantState, Owner, Share
from vgpu_agent.status import AgentStatus, FamilyStatus, Problem, ProblemKind
from vgpu_agent.web import certificate as certificate_module
from vgpu_agent.web.exporter import Reviews, review_without_api_server
from vgpu_agent.web.server import WebServer

PLAIN = ExporterOptions("127.0.0.1:0", "vgpuManager.exporter.address", 1.0)
CERTIFICATES = pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason="certificates are made with the openssl command, which is not here",
)


@pytest.fixture
def status(node: AgentStatus) -> AgentStatus:
    """A node that serves the family."""
    node.binding.families = (FamilyStatus("vgpu-manager", decided_by_pod=True, offered=True),)
    return node


@contextlib.asynccontextmanager
async def serving(
    status: AgentStatus,
    options: ExporterOptions = PLAIN,
    reviews: Reviews = review_without_api_server,
    *,
    pod_names: bool = True,
) -> AsyncIterator[str]:
    """Serve the family's metrics; yield their address."""
    server = WebServer(
        lambda: status,
        listen="127.0.0.1:0",
        debug_listen="127.0.0.1:0",
        max_body_bytes=1000,
        request_timeout_seconds=PATIENCE_SECONDS,
        shutdown_seconds=1,
        exporters=[(SPEC, options)],
        reviews=reviews,
        pod_names_everywhere=pod_names,
    )
    async with server:
        (address,) = server.exporter_addresses
        yield address


async def get(
    address: str, path: str = "/metrics", *, tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Ask once, over a connection of its own."""
    scheme = "https" if tls else "http"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{scheme}://{address}{path}", headers=headers, ssl=tls or True) as answer,
    ):
        return answer.status, dict(answer.headers), await answer.text()


async def test_the_names_of_the_replaced_monitor_are_here_and_not_among_ours(
    status: AgentStatus,
) -> None:
    """Both may be scraped, without two values for one series; nothing else is served here."""
    async with serving(status) as address:
        code, _, text = await get(address)
        assert code == 200
        assert 'physical_gpu_device_health_status{capability="8.0"' in text
        assert 'service="vGPU"' in text
        assert "vgpu_agent_" not in text
        assert (await get(address, "/debug/status"))[0] == 404


async def test_probes_are_on_the_same_port(status: AgentStatus) -> None:
    """The manifest of device-monitor names one port for metrics and probes."""
    async with serving(status) as address:
        assert (await get(address, "/healthz"))[0] == 200
        assert (await get(address, "/readyz"))[0] == 200
        status.not_ready = (Problem(ProblemKind.AGENT, "", "the agent is starting"),)
        assert (await get(address, "/readyz"))[0] in {200, 503}  # an answer may be kept


async def test_who_scrapes_too_often_gets_the_last_answer(
    status: AgentStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header tells so, as with device-monitor (vgpu-manager §10.1)."""
    now = [100.0]
    monkeypatch.setattr("vgpu_agent.web.server.time.monotonic", lambda: now[0])
    options = msgspec.structs.replace(PLAIN, min_interval_seconds=30)
    async with serving(status, options) as address:
        _, headers, before = await get(address)
        assert "X-Rate-Limited" not in headers
        status.node = "renamed"
        now[0] += 29
        _, headers, text = await get(address)
        assert (headers["X-Rate-Limited"], text) == ("true", before)
        now[0] += 2
        _, headers, text = await get(address)
        assert "X-Rate-Limited" not in headers
        assert 'node="renamed"' in text


async def test_pods_are_named_only_where_they_may_be(status: AgentStatus) -> None:
    """``web.podNames: debug`` holds for this address, too."""
    async with serving(status, pod_names=False) as address:
        _, _, text = await get(address)
        assert "physical_gpu_device_health_status" in text
        assert "pod_name" not in text


# -- who may --------------------------------------------------------------------------------------


class Book:
    """The API server's users: the token ``good`` may, ``bad`` may not."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.away = False

    async def __call__(self, token: str, path: str) -> bool:
        self.asked.append((token, path))
        await asyncio.sleep(0)
        if self.away:
            raise ClusterError("connection refused")
        return token == "good"


AUTHORISED = msgspec.structs.replace(PLAIN, authorised=True, min_interval_seconds=0)


async def test_a_scraper_must_be_allowed_where_the_operator_says_so(status: AgentStatus) -> None:
    """401 without a token, 403 for one that may not; probes stay open, as the kubelet has none."""
    book = Book()
    async with serving(status, AUTHORISED, book) as address:
        assert (await get(address))[0] == 401
        assert (await get(address, Authorization="Basic good"))[0] == 401
        assert (await get(address, Authorization="Bearer " + "x" * 8200))[0] in {400, 401}
        assert book.asked == []
        assert (await get(address, Authorization="Bearer bad"))[0] == 403
        assert (await get(address, Authorization="Bearer good"))[0] == 200
        assert (await get(address, "/healthz"))[0] == 200
    assert book.asked == [("bad", "/metrics"), ("good", "/metrics")]


async def test_the_api_server_is_not_asked_for_every_scrape(status: AgentStatus) -> None:
    """Once a minute for each token; an outage in between changes nothing for those that are known,
    and lets nobody else in.
    """
    book = Book()
    async with serving(status, AUTHORISED, book) as address:
        for _ in range(5):
            assert (await get(address, Authorization="Bearer good"))[0] == 200
        book.away = True
        assert (await get(address, Authorization="Bearer good"))[0] == 200
        assert (await get(address, Authorization="Bearer other"))[0] == 503
    assert book.asked == [("good", "/metrics"), ("other", "/metrics")]


async def test_made_up_tokens_do_not_flood_the_api_server(status: AgentStatus) -> None:
    """Anybody on the network may send them; who is known already is served all the same."""
    book = Book()
    async with serving(status, AUTHORISED, book) as address:
        assert (await get(address, Authorization="Bearer good"))[0] == 200
        answers = [
            (await get(address, Authorization=f"Bearer made-up-{number}"))[0]
            for number in range(100)
        ]
        assert set(answers) == {403, 429}
        assert (await get(address, Authorization="Bearer good"))[0] == 200
    assert len(book.asked) < 60


async def test_who_is_known_does_not_wait_for_an_answer_about_others(status: AgentStatus) -> None:
    """While the API server is slow, a neighbour's made-up tokens would cost a scraper its data."""
    answered = asyncio.Event()

    async def slow(token: str, path: str) -> bool:
        if token != "good":
            await answered.wait()
        return token == "good"

    async with serving(status, AUTHORISED, slow) as address:
        assert (await get(address, Authorization="Bearer good"))[0] == 200
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(get(address, Authorization="Bearer made-up"))
            await asyncio.sleep(0.05)
            assert (await get(address, Authorization="Bearer good"))[0] == 200
            assert not waiting.done()
            answered.set()
        assert waiting.result()[0] == 403


# -- TLS ------------------------------------------------------------------------------------------


def _certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own CA, and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -addext "
        "subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-subj", f"/CN={name}", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[[str], ExporterOptions]:
    """Makes a new certificate under the same name, as a mounted Secret does."""

    def mount(name: str) -> ExporterOptions:
        for made, where in zip(_certificate(tmp_path, name), ("tls.crt", "tls.key"), strict=True):
            os.replace(made, tmp_path / where)
        return msgspec.structs.replace(
            PLAIN,
            certificate_file=str(tmp_path / "tls.crt"),
            key_file=str(tmp_path / "tls.key"),
        )

    return mount


def _trusting(options: ExporterOptions) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=options.certificate_file)


@CERTIFICATES
async def test_a_renewed_certificate_is_served_without_a_restart(
    status: AgentStatus,
    mounted: Callable[[str], ExporterOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """device-monitor never reads it again, because a duration is multiplied by a second;
    vgpu-manager:D3. One that cannot be used changes nothing.
    """
    monkeypatch.setattr(certificate_module, "CERTIFICATE_SECONDS", 0.0)
    options = await asyncio.to_thread(mounted, "old")
    old = await asyncio.to_thread(_trusting, options)
    async with serving(status, options) as address:
        assert (await get(address, tls=old))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await get(address)  # plain HTTP
        await asyncio.to_thread(mounted, "new")
        new = await asyncio.to_thread(_trusting, options)
        assert (await get(address, tls=new))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(address, tls=old)
        await asyncio.to_thread(Path(options.key_file).write_text, "no key")
        assert (await get(address, tls=new))[0] == 200


@CERTIFICATES
async def test_a_certificate_that_cannot_be_used_is_said_at_the_start(
    status: AgentStatus, mounted: Callable[[str], ExporterOptions]
) -> None:
    """With the files and the remedy, and nothing is left listening."""
    options = await asyncio.to_thread(mounted, "old")
    await asyncio.to_thread(Path(options.key_file).write_text, "no key")
    with pytest.raises(ListenError, match=r"tls\.key cannot be used: .*; mount a certificate"):
        async with serving(status, options):
            pass
    await asyncio.to_thread(Path(options.key_file).unlink)
    named = msgspec.structs.replace(options, tls_flags="x.certificateFile and .keyFile")
    with pytest.raises(ListenError) as raised:
        async with serving(status, named):
            pass
    assert str(raised.value) == (
        f"cannot serve {options.listen} with TLS: {options.key_file} does not exist; mount a "
        "certificate with its key in PEM, as x.certificateFile and .keyFile name them"
    )


@CERTIFICATES
async def test_clients_that_never_finish_the_beginning_of_tls_keep_nobody_out(
    status: AgentStatus, mounted: Callable[[str], ExporterOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are let go after some seconds, and the loop has other things to do meanwhile."""
    monkeypatch.setattr("vgpu_agent.web.connections.HANDSHAKE_SECONDS", 0.3)
    options = await asyncio.to_thread(mounted, "old")
    trusting = await asyncio.to_thread(_trusting, options)
    async with serving(status, options) as address, asyncio.timeout(PATIENCE_SECONDS):
        host, _, port = address.rpartition(":")
        silent: list[Any] = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        assert (await get(address, tls=trusting))[0] == 200
        for _, writer in silent:
            writer.close()


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "address", "expected"), [(True, ":3456", True), (True, "", False), (False, ":1", False)]
)
def test_the_address_is_the_switch(on: bool, address: str, expected: bool) -> None:
    """Off by default: on a node that still has device-monitor the port is taken."""
    settings = settings_of(
        families=switches(vgpu_manager=on),
        vgpu_manager=VgpuManager(exporter=Exporter(address=address)),
    )
    assert SPEC.exporter is not None
    assert (SPEC.exporter.options(settings) is not None) == expected


async def test_a_slice_of_the_family_has_its_holder(status: AgentStatus) -> None:
    """Slices are a family of their own in the ledger, and the same one to a dashboard."""
    owner = Owner("main", "uid-a", "ml", "a")
    grant = Grant(
        *(9, "vgpu-manager-mig", "nvidia.com/mig-1g.10gb", ("MIG-1",), (Share("MIG-1"),)),
        *(GrantState.IDENTIFIED, owner),
    )
    status.ledger.grants = (*status.ledger.grants, grant)
    async with serving(status) as address:
        _, _, text = await get(address)
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("container_mig_device_allocation_info{")
    )
    assert 'device_uuid="MIG-1",node="node-a",parent_uuid="GPU-1",pod_name="a"' in line
