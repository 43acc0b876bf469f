"""The files of unix sockets: made with mode 0600, told apart, removed.

Each function blocks for as long as the file system takes, so it is called through
``asyncio.to_thread``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.errors import ListenError

if TYPE_CHECKING:
    from pathlib import Path

# struct sockaddr_un holds 108 bytes, the last of them a zero.
_LONGEST_PATH = 107

# error → the remedy; ``{setting}``: see `bind`
_REMEDIES = {
    errno.ENOENT: "the directory does not exist; is {setting} right, and is it mounted?",
    errno.EROFS: "the file system is read-only; mount that directory writable",
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


def bind(path: Path, setting: str) -> socket.socket:
    """Return a socket that listens at ``path``, mode 0600. It listens at once, because an agent
    that starts removes sockets of other agents on which nobody listens.

    ``setting`` is the setting by which an operator chooses the directory, for the messages.

    Raises:
        ListenError: the path is too long or cannot be created; the message has the remedy.
    """
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ListenError(
            f"socket path {path} has {length} bytes and {_LONGEST_PATH} are allowed; choose a "
            f"shorter {setting}"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # before bind, so that the file never exists with a wider mode
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        listener.listen()
    except OSError as err:
        listener.close()
        remedy = _REMEDIES.get(err.errno or 0, "see the error").format(setting=setting)
        # The message names the directory only: the file has another name at each try, and the same
        # trouble should give the same message.
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


def remove(path: Path) -> None:
    """Delete the socket file if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
