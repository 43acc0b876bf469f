"""The current content of the kubelet's plugin directory,
for every component that must react when it changes.

The kubelet announces no restart: it removes the sockets there and makes a new ``kubelet.sock``
(kubelet §3). One watch for all plugin servers publishes a `DirectoryState` at each change: the
sockets, each with device, inode and time of its file. A server compares it with the state in which
it registered. State is published instead of events because events get lost, and because a server
that was busy must still see the current state.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import Latest
from vgpu_agent.grpc.sockets import identity
from vgpu_agent.kubelet import sockets
from vgpu_agent.kubelet.inotify import Inotify
from vgpu_agent.status import START_KUBELET

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vgpu_agent.grpc.sockets import SocketIdentity
    from vgpu_agent.journal import Journal
    from vgpu_agent.status import KubeletStatus

_logger = log.get(__name__)

# How often the agent looks in addition to inotify, in case the kernel's notice was lost.
POLL_SECONDS = 5.0
_SOCKET = ".sock"
_LET_READ = (
    "let the agent read it: run it as root, and look for a security policy (SELinux, AppArmor)"
)
_INOTIFY_REMEDIES = {
    errno.EMFILE: "raise fs.inotify.max_user_instances and restart the agent",
    errno.ENOSPC: "raise fs.inotify.max_user_watches",
    errno.EACCES: _LET_READ,
    errno.EPERM: _LET_READ,
}


class DirectoryState(msgspec.Struct, frozen=True):
    """The sockets in the directory, by file name; empty when there is no directory."""

    sockets: Mapping[str, SocketIdentity] = msgspec.field(default_factory=dict)

    @property
    def kubelet_socket(self) -> SocketIdentity | None:
        """The kubelet's registration socket; another identity means another kubelet process."""
        return self.sockets.get(sockets.KUBELET_SOCKET)


class DirectoryWatch:
    """The watch on the directory, which keeps `state` up to date.

    inotify wakes it within a millisecond; a look every ``poll_seconds`` makes up for lost events,
    for a replaced directory, and for a failed inotify (one warning, then polling alone).
    """

    def __init__(
        self, directory: Path, *, poll_seconds: float, journal: Journal, status: KubeletStatus
    ) -> None:
        self.directory = directory
        # the newest state, with a version for those who wait for the next
        self.state: Latest[DirectoryState] = Latest(DirectoryState())
        self._poll_seconds = poll_seconds
        self._journal = journal
        self._status = status
        self._status.directory = str(directory)
        self._woken = asyncio.Event()
        self._changes = log.ChangeFilter()  # what was logged, until `forget`
        self._known_kubelet: SocketIdentity | None = None  # the last one that was seen
        self._missing_since: float | None = None  # loop time

    async def run(self, beat: Callable[[], None] = lambda: None) -> None:
        """Watch until cancelled; ``beat`` is called after each look,
        at least every ``poll_seconds``.
        """
        # the sockets of killed agents, not those of other plugins or of an agent that still runs
        if leftovers := await asyncio.to_thread(sockets.remove_stale_sockets, self.directory):
            self._journal.record(
                "kubelet.leftover_sockets_removed", directory=str(self.directory), sockets=leftovers
            )
        inotify = self._inotify()
        try:
            while True:
                self._woken.clear()
                # Watch first, then look: what happens in between wakes us again.
                self._watch(inotify)
                self._publish(await asyncio.to_thread(self._look))
                self._note_waiting()
                beat()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_seconds):
                        await self._woken.wait()
        finally:
            if inotify is not None:
                inotify.close()

    def _inotify(self) -> Inotify | None:
        try:
            return Inotify(self._woken.set)
        except OSError as err:
            self._warn(err)
            return None

    def _watch(self, inotify: Inotify | None) -> None:
        """Watch the directory, or the nearest one above it that exists."""
        if inotify is None:
            return
        for candidate in (self.directory, *self.directory.parents):
            try:
                # other files in the plugin directory, such as the checkpoint, are of no interest
                inotify.watch(candidate, ending=_SOCKET if candidate == self.directory else "")
            except FileNotFoundError:
                continue
            except OSError as err:
                self._warn(err)
            return

    def _look(self) -> DirectoryState:
        found = {}
        trouble = ""
        try:
            for path in self.directory.iterdir():
                if path.name.endswith(_SOCKET) and (socket := identity(path)):
                    found[path.name] = socket
        except FileNotFoundError:
            pass  # made by the kubelet
        except PermissionError as err:
            trouble = f"cannot read {self.directory}: {err.strerror}; {_LET_READ}"
        except OSError as err:
            trouble = f"cannot read {self.directory}: {err.strerror}"
        self._status.directory_trouble = trouble
        return DirectoryState(found)

    def _publish(self, state: DirectoryState) -> None:
        if state == self.state.value:
            return
        before, now = self.state.value.kubelet_socket, state.kubelet_socket
        self._status.socket_present = now is not None
        if now is None and before is not None:
            self._journal.record("kubelet.socket_missing", directory=str(self.directory))
        elif now is not None and now != self._known_kubelet:
            event = "kubelet.socket_found" if self._known_kubelet is None else "kubelet.restarted"
            self._status.restarts_seen += self._known_kubelet is not None
            self._known_kubelet = now
            self._journal.record(event, directory=str(self.directory))
        self.state.publish(state)

    def _note_waiting(self) -> None:
        """Log once that there is no kubelet: immediately at the start, and as a warning when it is
        away for longer than a restart takes.
        """
        if self.state.value.kubelet_socket is not None:
            self._missing_since = None
            self._changes.forget("kubelet")
            return
        now = asyncio.get_running_loop().time()
        if self._missing_since is None:
            self._missing_since = now
        facts = {"socket": str(self.directory / sockets.KUBELET_SOCKET)}
        if trouble := self._status.directory_trouble:
            facts["error"] = trouble
        elif now - self._missing_since >= self._poll_seconds:
            facts["remedy"] = START_KUBELET
        elif self._known_kubelet is None:
            if self._changes.is_new("kubelet"):
                self._journal.record("kubelet.waiting", **facts)
            return
        else:
            return
        # `tuple(facts)` has only the names: logged again when the error or the remedy appears or
        # goes, and not when its text changes
        if self._changes.is_new("kubelet", tuple(facts)):
            self._journal.record("kubelet.waiting", level="warning", **facts)

    def _warn(self, err: OSError) -> None:
        if self._changes.is_new("inotify"):
            _logger.warning(
                "kubelet.inotify_unavailable",
                error=str(err),
                remedy=(
                    f"{_INOTIFY_REMEDIES.get(err.errno or 0, 'check that directory')}; until then "
                    "the directory is polled"
                ),
                poll_seconds=self._poll_seconds,
            )
