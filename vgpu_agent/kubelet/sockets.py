"""Socket files in kubelet's plugin directory:
ours, kubelet's, and the ones that an earlier life of this agent left behind.

Called by `directory` and `server`, always through ``asyncio.to_thread``, because a directory may be
slow or gone. A path is never used twice: kubelet may end the client of a new registration when the
stream of an old one on the same path ends (kubelet §3), so each server instance gets a name of its
own. Process ids do not help here, since in a container ours is 1 in every life.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import socket
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.errors import ListenError

if TYPE_CHECKING:
    from pathlib import Path

KUBELET_SOCKET = "kubelet.sock"

# struct sockaddr_un holds 108 bytes, the last of them a zero.
_LONGEST_PATH = 107
_LONGEST_SLUG = 24

# This life of the process, and the server instances in it.
_LIFE = secrets.token_hex(3)
_instances = itertools.count(1)
_OURS = re.compile(r"\Avgpu-agent-.+-[0-9a-f]{6}-[0-9]+\.sock\Z")

_REMEDIES = {
    errno.ENOENT: (
        "the directory does not exist; is this the kubelet's directory (--kubelet-dir), and is it "
        "mounted?"
    ),
    errno.EROFS: "the file system is read-only; mount the kubelet's directory writable",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "the agent has to run as root",
    errno.EPERM: "the agent has to run as root",
}


class SocketIdentity(NamedTuple):
    """The identity of a socket file, which differs for the next file under the same name.

    Inode numbers alone are reused at once. The time is that of modification, which for a socket is
    that of its creation. A change of its mode or security label does not change the identity.
    """

    device: int
    inode: int
    created_ns: int


def unused_name(resource: str) -> str:
    """A file name that no server instance had before, e.g. ``vgpu-agent-gpu.shared-4f1c2a-1.sock``
    for ``nvidia.com/gpu.shared``.
    """
    slug = resource.rpartition("/")[2][:_LONGEST_SLUG].strip("-.") or "resource"
    return f"vgpu-agent-{slug}-{_LIFE}-{next(_instances)}.sock"


def bind(path: Path) -> socket.socket:
    """Bind a socket to ``path``, mode 0600, not listening yet.

    Raises:
        ListenError: the path is too long or cannot be created; the message has the remedy.
    """
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ListenError(
            f"socket path {path} has {length} bytes and {_LONGEST_PATH} are allowed; choose a "
            "shorter --kubelet-dir"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # before bind, so that the file never exists with a wider mode
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
    except OSError as err:
        listener.close()
        remedy = _REMEDIES.get(err.errno or 0, "see the error")
        # Names the directory, because the file's name is another at each try and the same trouble
        # should read the same.
        raise ListenError(
            f"cannot create a socket in {path.parent}: {err.strerror or err}: {remedy}"
        ) from err
    return listener


def identity(path: Path) -> SocketIdentity | None:
    """Identify the socket at ``path``; None when there is no file, or one that is no socket."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (
        SocketIdentity(found.st_dev, found.st_ino, found.st_mtime_ns)
        if stat.S_ISSOCK(found.st_mode)
        else None
    )


def age_seconds(path: Path) -> float:
    """Return the seconds since the socket at ``path`` was created;
    0 without one, or where its time is in the future.

    The kubelet replaces its sockets when it starts. A clock that is set late, after a boot say, can
    make the age too large.
    """
    found = identity(path)
    return max(0.0, time.time() - found.created_ns / 1e9) if found is not None else 0.0


def remove(path: Path) -> None:
    """Delete the socket file if it is still there;
    another's file of that name cannot exist, see `unused_name`.
    """
    with contextlib.suppress(OSError):
        path.unlink()


def remove_leftovers(directory: Path) -> list[str]:
    """Delete the sockets of our naming scheme that have no listener, and return their names.

    A killed agent leaves its sockets behind. Another agent that is alive (a rolling update) accepts
    the connection and keeps its socket.
    """
    removed = []
    for path in _ours(directory):
        if _deserted(path):
            remove(path)
            removed.append(path.name)
    return removed


def _ours(directory: Path) -> list[Path]:
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if _OURS.match(path.name) and f"-{_LIFE}-" not in path.name
        )
    except OSError:
        return []


def _deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
