"""The directory watch: what lies there is known at once, whatever happens to the directory."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.grpc.sockets import bind
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import inotify
from vgpu_agent.kubelet.directory import DirectoryState, DirectoryWatch
from vgpu_agent.kubelet.inotify import Inotify
from vgpu_agent.status import START_KUBELET, KubeletStatus

SLOW_POLL_SECONDS = 60.0  # so that only inotify can explain what a test sees


class Watched:
    """A running watch, and a way to wait for what it should see."""

    def __init__(self, path: Path, poll_seconds: float) -> None:
        self.path = path
        self.journal = Journal()
        self.status = KubeletStatus()
        self.beats = 0
        self._looked = asyncio.Event()
        self.watch = DirectoryWatch(
            path, poll_seconds=poll_seconds, journal=self.journal, status=self.status
        )
        self._task = asyncio.create_task(self.watch.run(self._beat))

    def _beat(self) -> None:
        self.beats += 1
        self._looked.set()
        self._looked = asyncio.Event()

    @property
    def state(self) -> DirectoryState:
        return self.watch.state.value

    async def until(
        self, condition: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS
    ) -> None:
        async with asyncio.timeout(timeout_seconds):
            while not condition():
                await self._looked.wait()

    async def started(self) -> None:
        await self.until(lambda: self.beats > 0)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def events(self) -> list[str]:
        return [entry.event for entry in self.journal.entries]


@pytest.fixture
def plugins(directory: Path) -> Path:
    """The plugin directory, existing."""
    path = directory / "device-plugins"
    path.mkdir()
    return path


@pytest.fixture
async def watched(plugins: Path) -> AsyncIterator[Watched]:
    """A watch on it that has looked once."""
    built = Watched(plugins, SLOW_POLL_SECONDS)
    await built.started()
    yield built
    await built.stop()


async def test_a_new_kubelet_socket_is_seen_at_once(watched: Watched) -> None:
    """inotify tells, long before the next poll."""
    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)

    assert watched.events() == ["kubelet.waiting", "kubelet.socket_found"]
    assert (watched.status.socket_present, watched.status.restarts_seen) == (True, 0)


async def test_a_kubelet_restart_is_another_socket_of_the_same_name(watched: Watched) -> None:
    """Vanishing and coming back is one restart (kubelet §3)."""
    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)
    (watched.path / "kubelet.sock").unlink()
    await watched.until(lambda: watched.state.kubelet_socket is None)
    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)

    assert watched.events() == [
        "kubelet.waiting",
        "kubelet.socket_found",
        "kubelet.socket_missing",
        "kubelet.restarted",
    ]
    assert watched.status.restarts_seen == 1


async def test_waiting_for_kubelet_is_said_once_with_the_socket(plugins: Path) -> None:
    """At the start at once, and as a warning with the remedy when the kubelet is away for longer
    than a poll: each one line, however long it lasts.
    """
    watched = Watched(plugins, 0.05)
    await watched.until(lambda: watched.beats > 3)
    assert watched.events() == ["kubelet.waiting", "kubelet.waiting"]
    first, lasting = watched.journal.entries
    socket = str(plugins / "kubelet.sock")
    assert first.facts == {"socket": socket}
    assert lasting.facts == {"socket": socket, "remedy": START_KUBELET}

    with bind(plugins / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)
    (plugins / "kubelet.sock").unlink()
    seen = watched.beats
    await watched.until(lambda: watched.beats > seen + 4)
    await watched.stop()

    assert watched.events() == [
        "kubelet.waiting",
        "kubelet.waiting",
        "kubelet.socket_found",
        "kubelet.socket_missing",
        "kubelet.waiting",
    ]


async def test_a_deleted_socket_of_ours_is_seen(watched: Watched) -> None:
    """The server behind a deleted socket file would never notice by itself (kubelet V4)."""
    with bind(watched.path / "ours.sock", "--kubelet-dir"):
        await watched.until(lambda: "ours.sock" in watched.state.sockets)
        (watched.path / "ours.sock").unlink()
        await watched.until(lambda: "ours.sock" not in watched.state.sockets)


async def test_a_socket_that_moves_in_is_seen(watched: Watched) -> None:
    """A rename into the directory counts like a creation."""
    with bind(watched.path.parent / "elsewhere.sock", "--kubelet-dir"):
        (watched.path.parent / "elsewhere.sock").rename(watched.path / "kubelet.sock")
        await watched.until(lambda: watched.state.kubelet_socket is not None)


async def test_kubelets_checkpoint_wakes_nobody(watched: Watched) -> None:
    """The kubelet rewrites it in the same directory several times for every pod. A socket that
    comes after is seen all the same.
    """
    await asyncio.sleep(0.05)
    looks = watched.beats
    for number in range(50):
        written = watched.path / f".checkpoint{number}"
        written.write_text("content")
        written.rename(watched.path / "kubelet_internal_checkpoint")
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)

    assert watched.beats == looks
    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)


async def test_a_directory_that_is_replaced_is_watched_again(watched: Watched) -> None:
    """A watch is on an inode. When the directory is replaced, the new one must not go unseen."""
    await asyncio.to_thread(shutil.rmtree, watched.path)
    watched.path.mkdir()

    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)


async def test_a_directory_that_does_not_exist_yet_is_waited_for(directory: Path) -> None:
    """The agent may be earlier than kubelet's first start on the node (kubelet V14)."""
    watched = Watched(directory / "new" / "device-plugins", SLOW_POLL_SECONDS)
    await watched.started()
    watched.path.mkdir(parents=True)
    with bind(watched.path / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)
    await watched.stop()


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
async def test_without_inotify_the_directory_is_polled_after_one_warning(
    plugins: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A kernel without inotify instances or watches to spare (limit reached) makes it slower,
    not blind.
    """

    class Exhausted:
        def __getattr__(self, name: str) -> object:
            return refuse if name == call else getattr(libc, name)

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    libc = inotify._libc
    monkeypatch.setattr(inotify, "_libc", Exhausted())
    with capture_logs() as lines:
        watched = Watched(plugins, poll_seconds=0.02)
        with bind(plugins / "kubelet.sock", "--kubelet-dir"):
            await watched.until(
                lambda: watched.state.kubelet_socket is not None and watched.beats > 3
            )
        await watched.stop()

    (warning,) = [line for line in lines if line["event"] == "kubelet.inotify_unavailable"]
    assert "fs.inotify.max_user" in warning["remedy"]


async def test_a_lost_event_is_made_up_for_by_the_poll(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If inotify stays silent, a look every few seconds finds the socket all the same."""
    monkeypatch.setattr(Inotify, "_readable", lambda self: os.read(self._descriptor, 65536))
    watched = Watched(plugins, poll_seconds=0.05)
    await watched.started()
    with bind(plugins / "kubelet.sock", "--kubelet-dir"):
        await watched.until(lambda: watched.state.kubelet_socket is not None)
    await watched.stop()


async def test_leftover_sockets_are_removed_when_the_watch_begins(plugins: Path) -> None:
    """The sockets of a killed agent are removed, and the journal says so."""
    bind(plugins / "vgpu-agent-gpu-00aa11-1.sock", "--kubelet-dir").close()

    watched = Watched(plugins, SLOW_POLL_SECONDS)
    await watched.started()
    await watched.stop()

    assert watched.events() == ["kubelet.leftover_sockets_removed", "kubelet.waiting"]
    assert watched.state.sockets == {}


async def test_an_end_gives_the_inotify_instance_back(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised watch may be restarted often; instances are few (128 a user)."""
    closed: list[int] = []
    original = Inotify.close

    def close(self: Inotify) -> None:
        closed.append(self._descriptor)
        original(self)

    monkeypatch.setattr(Inotify, "close", close)
    watched = Watched(plugins, SLOW_POLL_SECONDS)
    await watched.started()

    await watched.stop()

    assert len(closed) == 1


async def test_a_directory_that_may_not_be_read_is_called_that(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a missing kubelet, and no limit of inotify: both would be looked for in vain."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(plugins))

    # root, who runs these tests, may read a directory of any mode
    monkeypatch.setattr(type(plugins), "iterdir", refuse)
    monkeypatch.setattr(Inotify, "watch", refuse)
    with capture_logs() as lines:
        watched = Watched(plugins, poll_seconds=0.02)
        await watched.until(lambda: watched.beats > 3)
        await watched.stop()

    trouble = watched.status.directory_trouble
    assert trouble.startswith(f"cannot read {plugins}: Permission denied; let the agent read it")
    (waiting,) = [e for e in watched.journal.entries if e.event == "kubelet.waiting"]
    assert waiting.facts["error"] == trouble
    (warning,) = [line for line in lines if line["event"] == "kubelet.inotify_unavailable"]
    assert "let the agent read it" in warning["remedy"]
    assert "fs.inotify" not in warning["remedy"]
