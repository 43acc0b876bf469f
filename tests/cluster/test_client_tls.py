"""A CA that is exchanged under a running client, with real certificates."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.cluster.scripted import until
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ClusterError
from vgpu_agent.sim.api.server import ApiServer

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(
        shutil.which("openssl") is None,
        reason="certificates are made with the openssl command, which is not here",
    ),
]


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


def _credentials(server: ApiServer, ca: Path) -> Credentials:
    """Return credentials like a service account's: the CA's path stays, its content changes."""
    return Credentials(
        lambda: Access(server.url, ca_file=str(ca), tls_fingerprint=ca.read_text()), "test"
    )


def _connected(client: ApiClient) -> bool:
    """Tell whether the client believes that it has a connection to the server."""
    assert client._connections is not None
    connector = client._connections._session.connector
    assert connector is not None
    return any(
        protocol.is_connected() for kept in connector._conns.values() for protocol, _ in kept
    )


async def test_a_ca_that_was_rotated_is_read_again_and_the_request_repeated(tmp_path: Path) -> None:
    """First the server shows a certificate that is not trusted yet, then the CA file follows. The
    caller notices only the gap between.
    """
    first, second = [
        await asyncio.to_thread(_certificate, tmp_path, name) for name in ("first", "second")
    ]
    ca = tmp_path / "ca.crt"
    await asyncio.to_thread(shutil.copy, first[0], ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    await asyncio.to_thread(context.load_cert_chain, *first)
    async with ApiServer(ssl_context=context) as server:
        server.objects.create("nodes", {"metadata": {"name": "n1"}})
        client = ApiClient(_credentials(server, ca))
        assert await client.get("/api/v1/nodes/n1")
        await asyncio.to_thread(context.load_cert_chain, *second)
        server.cut()
        await until(lambda: not _connected(client))
        with pytest.raises(
            ClusterError,
            match=r"certificate is not trusted: .*self.signed.*; compare it with the CA",
        ):
            await client.get("/api/v1/nodes/n1")
        await asyncio.to_thread(shutil.copy, second[0], ca)
        assert await client.get("/api/v1/nodes/n1")
        await client.close()


async def test_a_ca_file_that_holds_no_certificate_is_one_clear_error(tmp_path: Path) -> None:
    """It names the file."""
    await asyncio.to_thread((tmp_path / "ca.crt").write_text, "no certificate")
    access = Access("https://127.0.0.1:9", ca_file=str(tmp_path / "ca.crt"))
    client = ApiClient(Credentials(lambda: access, "test"))
    with pytest.raises(
        ClusterError, match=r"TLS files for the API server \(.*ca.crt\) cannot be used"
    ):
        await client.get("/api/v1/nodes/n1")
    await client.close()


async def test_a_server_without_tls_is_one_clear_error() -> None:
    """HTTPS spoken to a port that speaks HTTP."""
    async with ApiServer() as server:
        access = Access(server.url.replace("http:", "https:"))
        client = ApiClient(Credentials(lambda: access, "test"))
        with pytest.raises(ClusterError, match=r"TLS with https://127\.0\.0\.1"):
            await client.get("/api/v1/nodes/n1")
        await client.close()
