"""Credentials: which there are, that they are read again, and how a file that is no good reads."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vgpu_agent.cluster.credentials import Access, Credentials, credentials
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import ClusterError

_IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def _library_reads_files(loop_may_block: None) -> None:
    """The library reads kubeconfigs in a coroutine;
    we run that in a thread and on a loop of its own, which it may block.
    """


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    """Write the files that the kubelet mounts for a service account."""
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    (directory / "token").write_text("t0ken\n")
    (directory / "ca.crt").write_text("first CA")
    return directory


def _settings(**more: Any) -> Settings:
    return msgspec.convert(more, Settings)


def _kubeconfig(
    path: Path, *, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None
) -> str:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.write_bytes(msgspec.json.encode(config))
    return str(path)


def _access(found: Credentials | None) -> Access:
    assert found is not None
    return asyncio.run(found.access())


def test_without_any_there_are_none(tmp_path: Path) -> None:
    """Outside a cluster and without a kubeconfig the agent runs without an API server."""
    assert credentials(_settings(), environment={}, service_account=tmp_path) is None


def test_a_pod_without_a_mounted_token_has_none(tmp_path: Path) -> None:
    """Its environment names the API server all the same."""
    assert credentials(_settings(), environment=_IN_CLUSTER, service_account=tmp_path) is None


def test_never_means_never(service_account: Path) -> None:
    """Even where there are credentials."""
    assert (
        credentials(
            _settings(cluster={"enabled": "never"}),
            environment=_IN_CLUSTER,
            service_account=service_account,
        )
        is None
    )


def test_a_service_account_is_used_as_it_is_mounted(service_account: Path) -> None:
    """Server from the environment, token without its newline, CA by its path."""
    access = _access(
        credentials(_settings(), environment=_IN_CLUSTER, service_account=service_account)
    )
    assert (access.server, access.authorization) == ("https://10.0.0.1:443", "Bearer t0ken")
    assert access.ca_file == str(service_account / "ca.crt")


@pytest.mark.usefixtures("_library_reads_files")
def test_a_kubeconfig_goes_before_the_service_account(
    tmp_path: Path, service_account: Path
) -> None:
    """With its token, TLS name and proxy."""
    path = _kubeconfig(
        tmp_path / "kubeconfig",
        user={"token": "mine"},
        cluster={"tls-server-name": "kubernetes", "proxy-url": "http://p:1"},
    )
    access = _access(
        credentials(
            _settings(kubeconfig=path), environment=_IN_CLUSTER, service_account=service_account
        )
    )
    assert (access.server, access.authorization) == ("https://api:6443", "Bearer mine")
    assert (access.server_name, access.proxy, access.verify) == ("kubernetes", "http://p:1", True)


@pytest.mark.usefixtures("_library_reads_files")
def test_certificates_inside_a_kubeconfig_become_files(tmp_path: Path) -> None:
    """kubectl writes certificates into its configuration."""
    data = base64.b64encode(b"a CA").decode()
    path = _kubeconfig(tmp_path / "kubeconfig", cluster={"certificate-authority-data": data})
    access = _access(credentials(_settings(kubeconfig=path), environment={}))
    assert Path(access.ca_file).read_bytes() == b"a CA"


async def test_a_rotated_token_is_read_when_a_minute_has_passed_or_at_once_when_asked(
    service_account: Path,
) -> None:
    """Between two readings the old one is used, so that a burst of requests reads nothing."""
    found = await asyncio.to_thread(
        credentials, _settings(), environment=_IN_CLUSTER, service_account=service_account
    )
    assert found is not None
    first = await found.access()
    await asyncio.to_thread((service_account / "token").write_text, "newer")
    assert await found.access() == first
    assert (await found.access(fresh=True)).authorization == "Bearer newer"
    await asyncio.to_thread((service_account / "token").write_text, "newest")
    found._read_at -= 61
    assert (await found.access()).authorization == "Bearer newest"


async def test_another_ca_shows_as_another_fingerprint(service_account: Path) -> None:
    """Although its path is the same."""
    found = await asyncio.to_thread(
        credentials, _settings(), environment=_IN_CLUSTER, service_account=service_account
    )
    assert found is not None
    first = await found.access()
    await asyncio.to_thread((service_account / "ca.crt").write_text, "second CA")
    second = await found.access(fresh=True)
    assert first.ca_file == second.ca_file
    assert first.tls_fingerprint != second.tls_fingerprint


async def test_a_file_that_is_away_for_a_moment_leaves_the_last_reading_in_use(
    service_account: Path,
) -> None:
    """The kubelet exchanges the mount by renaming."""
    found = await asyncio.to_thread(
        credentials, _settings(), environment=_IN_CLUSTER, service_account=service_account
    )
    assert found is not None
    first = await found.access()
    await asyncio.to_thread((service_account / "token").unlink)
    assert await found.access(fresh=True) == first


def _empty(path: Path) -> None:
    path.write_text("")


def _no_yaml(path: Path) -> None:
    path.write_text("{[")


def _a_list(path: Path) -> None:
    path.write_text("- 1\n")


def _no_context(path: Path) -> None:
    path.write_text("apiVersion: v1\nkind: Config\n")


def _no_ca(path: Path) -> None:
    _kubeconfig(path, cluster={"certificate-authority": "/nowhere/ca.crt"})


def _missing(path: Path) -> None:
    path.unlink(missing_ok=True)


@pytest.mark.usefixtures("_library_reads_files")
@pytest.mark.parametrize("spoil", [_empty, _no_yaml, _a_list, _no_context, _no_ca, _missing])
def test_a_kubeconfig_that_is_no_good_is_one_clear_error(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """It names the file. Whatever the library makes of it stays inside."""
    path = tmp_path / "kubeconfig"
    spoil(path)
    with pytest.raises(ClusterError, match=f"kubeconfig {path}") as raised:
        _access(credentials(_settings(kubeconfig=str(path)), environment={}))
    assert "\n" not in str(raised.value)


def test_an_address_of_ipv6_stands_in_brackets(service_account: Path) -> None:
    """A cluster of IPv6 only has such a service address."""
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert (
        _access(
            credentials(_settings(), environment=environment, service_account=service_account)
        ).server
        == "https://[fd00::1]:6443"
    )


@pytest.mark.parametrize(
    ("name", "content", "trouble"),
    [
        ("token", b"", "its token is empty"),
        ("token", b" \n", "its token is empty"),
        ("token", b"t0k\xff", "not in the expected form"),
        ("ca.crt", None, r"ca\.crt: No such file"),
    ],
)
def test_a_service_account_that_is_no_good_is_one_clear_error(
    service_account: Path, name: str, content: bytes | None, trouble: str
) -> None:
    """It says what the pod needs, and shows nothing of the token."""
    if content is None:
        (service_account / name).unlink()
    else:
        (service_account / name).write_bytes(content)
    with pytest.raises(ClusterError, match=f"{trouble}.*automountServiceAccountToken") as raised:
        _access(credentials(_settings(), environment=_IN_CLUSTER, service_account=service_account))
    assert "t0k" not in f"{raised.value!r}"


def test_a_service_account_without_a_port_is_one_clear_error(service_account: Path) -> None:
    """The kubelet sets both variables, or somebody else has set one of them."""
    found = credentials(
        _settings(),
        environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        service_account=service_account,
    )
    with pytest.raises(ClusterError, match="KUBERNETES_SERVICE_PORT is not set"):
        _access(found)


def test_a_service_account_needs_no_kubernetes_library(service_account: Path) -> None:
    """The library takes 38 MiB, half as much as the rest of the agent;
    only a kubeconfig is worth that.
    """
    program = f"""
import asyncio, pathlib, sys
from vgpu_agent.cluster.credentials import credentials
from vgpu_agent.config.settings import Settings
import vgpu_agent.cluster.client
folder = pathlib.Path({str(service_account)!r})
found = credentials(Settings(), environment={_IN_CLUSTER!r}, service_account=folder)
assert asyncio.run(found.access()).authorization == "Bearer t0ken"
print("kubernetes_asyncio" in sys.modules)
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
        == "False\n"
    )


def test_an_access_that_is_logged_shows_no_token() -> None:
    """A traceback shows none either."""
    assert "t0ken" not in repr(Access("https://api", "Bearer t0ken"))
