"""Listen addresses."""

from __future__ import annotations

import socket

import pytest

from vgpu_agent.errors import ListenError
from vgpu_agent.web.address import Address, bind, parse


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9394", Address("", 9394)),
        ("127.0.0.1:9395", Address("127.0.0.1", 9395)),
        ("[::1]:9395", Address("::1", 9395)),
        ("localhost:0", Address("localhost", 0)),
    ],
)
def test_an_address_reads_as_host_and_port_and_writes_back_the_same(
    text: str, address: Address
) -> None:
    """The forms of the documentation are understood,
    and an error message shows them as they were written.
    """
    assert parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9394", "localhost", "host:port", "host:-1", ":65536", "::1:9395", "x" * 5000]
)
def test_an_address_that_makes_no_sense_is_refused_with_the_right_forms(text: str) -> None:
    """For any text the message shows what to write, and does not repeat a page of it."""
    with pytest.raises(ListenError, match=r"HOST:PORT, \[IPV6\]:PORT or :PORT") as refused:
        parse(text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("listen", "reachable"),
    [(":9395", "127.0.0.1:9395"), ("0.0.0.0:1", "127.0.0.1:1"), ("10.0.0.7:2", "10.0.0.7:2")],
)
def test_a_client_finds_a_server_that_listens_everywhere_on_loopback(
    listen: str, reachable: str
) -> None:
    """The same setting serves the server and ``vgpu-agent status``."""
    assert str(parse(listen).reachable) == reachable


async def test_every_interface_gets_one_port_even_when_it_is_a_free_one() -> None:
    """``:0`` binds one socket, so that the reported port is right for IPv4 as well."""
    with await bind(Address("", 0), flag="--listen") as listening, socket.socket() as client:
        client.connect(("127.0.0.1", listening.getsockname()[1]))
        assert client.getpeername()[1] == listening.getsockname()[1]


async def test_a_port_in_use_is_named_with_the_remedy() -> None:
    """Two agents on one node: the second names the process to look for and the flag to change."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            ListenError,
            match=(
                rf"cannot listen on 127\.0\.0\.1:{port}: the address is already in use; .*ss "
                r"-ltnp.*--listen"
            ),
        ):
            await bind(Address("127.0.0.1", port), flag="--listen")


async def test_a_port_in_use_on_every_interface_is_an_error_and_not_ipv4_alone() -> None:
    """The fall-back for machines without IPv6 must not hide a conflict."""
    with (
        await bind(Address("", 0), flag="--listen") as holder,
        pytest.raises(ListenError, match="already in use"),
    ):
        await bind(Address("", holder.getsockname()[1]), flag="--listen")


async def test_an_address_of_another_machine_is_refused() -> None:
    """An IP that no interface has (RFC 5737) is explained as such."""
    with pytest.raises(
        ListenError,
        match=(
            r"no interface of this machine has that address; choose another address with "
            r"--debug-listen"
        ),
    ):
        await bind(Address("192.0.2.1", 0), flag="--debug-listen")


async def test_a_port_without_permission_names_the_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EACCES comes from the kernel for low ports;
    root in a test has the right, so the refusal is injected.
    """

    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ListenError,
        match="permission denied; ports below 1024 need the capability NET_BIND_SERVICE",
    ):
        await bind(Address("127.0.0.1", 80), flag="--listen")


async def test_a_machine_without_ipv6_serves_every_ipv4_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IPv6 compiled in but switched off is no reason not to start."""
    real = socket.create_server

    def without_ipv6(address: tuple[str, int], *, family: int, **options: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        # options are passed through untouched
        return real(address, family=family, **options)  # type: ignore[arg-type]  # the test's own keywords

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with await bind(Address("", 0), flag="--listen") as listening:
        assert listening.family is socket.AF_INET


async def test_a_host_that_does_not_resolve_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver's own words are kept."""

    def fail(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        ListenError,
        match=r"nowhere:1: the host name does not resolve \(Name or service not known\)",
    ):
        await bind(Address("nowhere", 1), flag="--listen")
