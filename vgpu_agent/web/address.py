"""Listen addresses: the meaning of ``:9394``, ``127.0.0.1:9395`` and ``[::1]:9395`` for a server
and for a client; and the header by which a client learns the state of the node.

Called by `web.server`, which binds them, and by ``vgpu-agent status``, which connects to one.
Imports no HTTP library, so that the command line stays quick to start.
"""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

from vgpu_agent.errors import ListenError

_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - only compared with, never bound
_BACKLOG = 128

# The header of the answer of /debug/status, and its values: ready and without problems; ready, with
# problems; not ready.
STATE_HEADER = "Vgpu-Agent-State"
HEALTHY, DEGRADED, NOT_READY = "healthy", "degraded", "not-ready"


class Address(NamedTuple):
    """Host and port; the host is empty for every interface, and an IPv6 address has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> Address:
        """Return the address at which a client on the same machine reaches a server
        that listens here.
        """
        return Address("127.0.0.1", self.port) if self.host in _WILDCARDS else self


def parse(text: str) -> Address:
    """Parse ``text`` into an address.

    Raises:
        ListenError: ``text`` is not ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT`` with a port from 0
            to 65535.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    valid = (
        colon
        and port.isascii()
        and port.isdigit()
        and len(port) <= 5
        and int(port) <= 65535
        and (bracketed or ":" not in host)
    )
    if not valid:
        raise ListenError(
            f"address {text[:100]!r} is not understood; write HOST:PORT, [IPV6]:PORT or :PORT with "
            "a port from 0 to 65535"
        )
    return Address(host[1:-1] if bracketed else host, int(port))


async def bind(address: Address, *, flag: str) -> socket.socket:
    """Return a listening socket on ``address``; port 0 takes a free one.

    An empty host means every interface, IPv4 and IPv6 on one port where the machine has both.

    Args:
        address: the address to listen on.
        flag: the command line flag that chose it, for the remedy in the error.

    Raises:
        ListenError: the address cannot be listened on; the message names it, the cause and the
            remedy.
    """
    import asyncio  # noqa: PLC0415 - clients only parse addresses, and must start quickly

    try:
        if not address.host:
            return _bind_everywhere(address.port)
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = found[0]
        return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except OSError as err:  # covers socket.gaierror
        raise ListenError(
            f"cannot listen on {address}: {_cause_and_remedy(err, address, flag)}"
        ) from err


def _bind_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        except OSError as err:
            if err.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
            # IPv6 is compiled in but switched off on this machine: only IPv4 is available.
    return socket.create_server(("", port), family=socket.AF_INET, backlog=_BACKLOG)


def _cause_and_remedy(err: OSError, address: Address, flag: str) -> str:
    other = f"choose another address with {flag}"
    match err.errno:
        case errno.EADDRINUSE:
            return (
                "the address is already in use; stop the process that holds it (ss -ltnp 'sport = "
                f":{address.port}' names it) or {other}"
            )
        case errno.EACCES:
            return (
                "permission denied; ports below 1024 need the capability NET_BIND_SERVICE: grant "
                f"it or {other}"
            )
        case errno.EADDRNOTAVAIL:
            return f"no interface of this machine has that address; {other}"
        case _ if isinstance(err, socket.gaierror):
            return f"the host name does not resolve ({err.strerror}); {other}"
        case _:
            return f"{err.strerror or err}; {other}"
