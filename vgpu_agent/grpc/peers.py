"""The process at the other end of a unix socket, as the kernel knows it.

The kernel notes who connects (unix(7), SO_PEERCRED), which cannot be forged. The pid is that of the
process which called connect(2), in the agent's own PID namespace. After the end of that process
another one may get the pid, so a caller must also compare when the process began.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

_CREDENTIALS = struct.Struct("iII")


class Peer(msgspec.Struct, frozen=True):
    """The process that has connected.

    Attributes:
        pid: as this process sees it; 0 where it cannot see it.
        uid: its user.
        gid: its group.
        seen_at: when this was read, in seconds since the boot; a process that began later is
            another one with the same pid.
    """

    pid: int
    uid: int
    gid: int
    seen_at: float


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer of a connected unix socket.

    Raises:
        OSError: it is no unix socket, or not connected.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return Peer(pid, uid, gid, time.clock_gettime(time.CLOCK_BOOTTIME))
