"""Socket files: names that are never used twice, errors that name the remedy,
and the rubbish of an earlier life.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from vgpu_agent.errors import ListenError
from vgpu_agent.kubelet import sockets


def test_names_are_never_used_twice() -> None:
    """Two instances of one resource get sockets of their own (kubelet V5),
    with the resource in the name.
    """
    first, second = (
        sockets.unused_name("nvidia.com/gpu.shared"),
        sockets.unused_name("nvidia.com/gpu.shared"),
    )

    assert first != second
    assert first.startswith("vgpu-agent-gpu.shared-")


def test_a_long_resource_name_still_makes_a_short_path() -> None:
    """The default directory leaves room for the longest resource name that Kubernetes allows."""
    name = sockets.unused_name("a" * 253 + "/" + "b" * 63)

    assert len(f"/var/lib/kubelet/device-plugins/{name}") < 107


def test_only_root_may_connect(directory: Path) -> None:
    """The file has mode 0600 from its first moment, whatever the umask is."""
    path = directory / "a.sock"

    with sockets.bind(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_path_that_is_too_long_is_refused(directory: Path) -> None:
    """A unix socket path has at most 107 bytes (kubelet §2). The message says what to shorten."""
    with pytest.raises(ListenError, match=r"107 are allowed; choose a shorter --kubelet-dir"):
        sockets.bind(directory / ("x" * 100))


def test_a_missing_directory_is_explained(directory: Path) -> None:
    """The message names the path and asks the right question."""
    with pytest.raises(
        ListenError,
        match=(
            r"a socket in .*/none: No such file or directory: the directory does not exist; "
            r".*--kubelet-dir"
        ),
    ):
        sockets.bind(directory / "none" / "a.sock")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount the kubelet's directory writable"),
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

    monkeypatch.setattr("vgpu_agent.kubelet.sockets.socket.socket", Unwritable)

    with pytest.raises(ListenError, match=remedy):
        sockets.bind(directory / "a.sock")


def test_only_a_socket_has_an_identity(directory: Path) -> None:
    """A missing path and a regular file have none."""
    (directory / "file.sock").touch()

    assert sockets.identity(directory / "none.sock") is None
    assert sockets.identity(directory / "file.sock") is None


def test_a_new_socket_has_a_new_identity_and_a_new_mode_is_no_news(directory: Path) -> None:
    """Only another socket is another identity."""
    path = directory / "a.sock"
    with sockets.bind(path):
        before = sockets.identity(path)
        path.chmod(0o666)
        after_chmod = sockets.identity(path)
        path.unlink()
        with sockets.bind(path):
            after_bind = sockets.identity(path)

    assert before == after_chmod
    assert before != after_bind


@pytest.mark.parametrize(("created_seconds_ago", "age_seconds"), [(0, 0), (60, 60), (-3600, 0)])
def test_the_age_of_a_socket_is_that_of_its_file(
    directory: Path, created_seconds_ago: float, age_seconds: float
) -> None:
    """It tells when the kubelet started; a clock that was set back must not make that a time
    to come.
    """
    path = directory / sockets.KUBELET_SOCKET
    assert sockets.age_seconds(path) == 0
    with contextlib.closing(sockets.bind(path)):
        os.utime(path, (time.time() - created_seconds_ago,) * 2)
        assert sockets.age_seconds(path) == pytest.approx(age_seconds, abs=5)


def test_leftovers_of_a_killed_agent_are_removed(directory: Path) -> None:
    """Sockets of our naming scheme without a listener go.
    Those of a living agent, of the kubelet and of other plugins stay.
    """
    dead, living, foreign = (
        "vgpu-agent-gpu-00aa11-1.sock",
        "vgpu-agent-gpu-00aa22-1.sock",
        "nvidia-gpu.sock",
    )
    for name in (dead, foreign, "kubelet.sock"):
        sockets.bind(directory / name).close()

    with sockets.bind(directory / living) as listener:
        listener.listen()
        removed = sockets.remove_leftovers(directory)

    assert removed == [dead]
    assert sorted(path.name for path in directory.iterdir()) == [
        "kubelet.sock",
        "nvidia-gpu.sock",
        living,
    ]


def test_a_missing_directory_has_no_leftovers(directory: Path) -> None:
    """The agent may start before the directory is there."""
    assert sockets.remove_leftovers(directory / "none") == []
