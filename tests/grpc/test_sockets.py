"""Socket files: who may connect, errors that name the remedy, and which file it is."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from vgpu_agent.errors import ListenError
from vgpu_agent.grpc.sockets import bind, identity


def test_only_root_may_connect(directory: Path) -> None:
    """The file has mode 0600 from its first moment, whatever the umask is."""
    path = directory / "a.sock"

    with bind(path, "--dir"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_listens_at_once(directory: Path) -> None:
    """An agent that starts removes sockets of others on which nobody listens."""
    path = directory / "a.sock"

    with bind(path, "--dir"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_path_that_is_too_long_is_refused(directory: Path) -> None:
    """A unix socket path has at most 107 bytes (kubelet §2). The message says what to shorten."""
    with pytest.raises(ListenError, match=r"107 are allowed; choose a shorter --dir"):
        bind(directory / ("x" * 100), "--dir")


def test_a_missing_directory_is_explained(directory: Path) -> None:
    """The message names the path and asks the right question."""
    with pytest.raises(
        ListenError,
        match=(
            r"a socket in .*/none: No such file or directory: the directory does not exist; "
            r".*--dir"
        ),
    ):
        bind(directory / "none" / "a.sock", "--dir")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount that directory writable"),
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "run as root"),
    ],
)
def test_an_unwritable_directory_is_explained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Read-only, full and forbidden: one clear line each."""

    class Unwritable(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("vgpu_agent.grpc.sockets.socket.socket", Unwritable)

    with pytest.raises(ListenError, match=remedy):
        bind(directory / "a.sock", "--dir")


def test_only_a_socket_has_an_identity(directory: Path) -> None:
    """A missing path and a regular file have none."""
    (directory / "file.sock").touch()

    assert identity(directory / "none.sock") is None
    assert identity(directory / "file.sock") is None


def test_a_new_socket_has_a_new_identity_and_a_new_mode_is_no_news(directory: Path) -> None:
    """Only another socket is another identity."""
    path = directory / "a.sock"
    with bind(path, "--dir"):
        before = identity(path)
        path.chmod(0o666)
        after_chmod = identity(path)
        path.unlink()
        with bind(path, "--dir"):
            after_bind = identity(path)

    assert before == after_chmod
    assert before != after_bind
