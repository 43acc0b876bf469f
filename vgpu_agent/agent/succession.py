"""Take over a node from the agent that serves it, and hand it over to the next one.

In a rolling update the new agent starts beside the old one (``maxSurge``). It reads GPUs, pods
and the kubelet's records first. Then it asks the old one, over a socket in ``stateDirectory``, to
hand the node over. The old one ends its streams in a way that the kubelet does not notice
(`DevicePlugin.unlink`: a registration that fails makes the kubelet forget the plugin's connection),
and goes on answering. The new one registers, and says so. Now the old one stops, and the new one
reads what has changed meanwhile. So there are healthy ids all the time, and each call is answered
by one of the two.

Where the streams cannot be ended in that way, the new one registers as soon as the last of them has
ended. Then the kubelet has no healthy ids for as long as a registration takes. Registering earlier
would not help: kubelets up to 1.36 drop the new registration when the old stream ends (kubelet §3).

A lock in the same directory, which ends with its process, is held by the agent that serves the
node. So of two agents that start at the same time, the second waits until it can take over from the
first.

The old agent then does nothing but wait for its end, and tell a third agent to try again later. If
the new one dies first, the old one starts again from the beginning. Two agents answer the kubelet
or write to the cluster at the same time only where one of them hangs or has no socket, because a
node without an agent would be worse.

Each message is one line of JSON. The new agent sends `Request`, and the old one answers `Answer`.
If it still serves, the new one sends `Registered` when it has registered, and gets another answer.
The connection stays open: its end tells the old agent that the new one is gone.

Used by `composition`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import math
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import __version__, log
from vgpu_agent.errors import AgentError, ListenError
from vgpu_agent.grpc import sockets

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from vgpu_agent.journal import Journal

    _ServeOne = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_logger = log.get(__name__)

SOCKET = "succession.sock"
_PROTOCOL = 1
# Before it answers, an agent makes registrations that fail on purpose (see above) and ends
# streams (12 s with a kubelet that hangs), writes its state files (10 s on a disk that hangs),
# answers the calls under way or ends them (6 s) and ends its MPS daemons (10 s).
ANSWER_SECONDS = 45.0
_LOCK_PAUSE_SECONDS = 0.2  # between two attempts to take the lock
_LOOK_SECONDS = 30.0  # between two checks of this agent's socket file
# A request that does not come at once is not one of ours.
_REQUEST_SECONDS = 5.0
_LONGEST_LINE = 64 * 1024  # a resource name has less than 320 characters
_BUSY = (
    "another agent is just taking over this node from its predecessor. Two of them run beside the "
    "one that serves the node; this one ends, and tries again when it is started again"
)
# The last line of a successor that has handed over in turn: its predecessor must not serve again
# when the connection ends.
_HANDED_ON = b"{}\n"


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """The wish of a new agent to take over.

    Attributes:
        protocol: the version of this protocol.
        version: the version of the new agent, for the log.
        kubelet_directory: the directory of plugin sockets that it serves.
        resources: the resources that it can register beside an agent that still serves them.
        waits_until: when it gives up waiting for an answer, by the node's monotonic clock, in
            seconds.
    """

    protocol: int
    version: str
    kubelet_directory: str
    resources: tuple[str, ...] = ()
    waits_until: float = 0.0


class Registered(msgspec.Struct, frozen=True, rename="camel"):
    """The message of a new agent that it has registered while the old one still serves.

    Attributes:
        waits_until: as in `Request`, for the second answer; an agent of an earlier version does not
            say it.
    """

    waits_until: float = math.inf


class Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The answer of the old agent. If all three truth values are false, it refuses: it is of
    another version of the protocol, serves another kubelet, or is ending.

    Attributes:
        released: the old agent answers no call of the kubelet and writes nothing any more.
        serving: it answers calls until the new agent has registered, and waits for the line that
            says so.
        busy: another agent is taking over, or has.
        version: the version of the old agent, for the log.
    """

    released: bool = False
    serving: bool = False
    busy: bool = False
    version: str = ""


class Succession:
    """One agent's place in the sequence of agents of a node.

    State: the lock; the connection to the predecessor, if there was one; the listening socket; the
    connection of the successor, once there is one.

    Attributes:
        handed_over: set when a successor has been given the node.
        successor_lost: set when that successor's connection has ended.
    """

    def __init__(self, state_directory: str, kubelet_directory: Path, journal: Journal) -> None:
        """Build it without any connection."""
        self._path = Path(state_directory) / SOCKET
        self._kubelet_directory = os.fspath(kubelet_directory)
        # of this kubelet: agents of several kubelets may share a directory
        number = zlib.crc32(self._kubelet_directory.encode())
        self._lock_path = self._path.with_name(f"succession-{number:08x}.lock")
        self._lock: int | None = None
        self._journal = journal
        self._reader: asyncio.StreamReader | None = None
        self._predecessor: asyncio.StreamWriter | None = None
        # of the predecessor's socket file
        self._predecessor_identity: sockets.SocketIdentity | None = None
        self._server: asyncio.Server | None = None
        # called for each connection; None before `listen`
        self._serve_one: _ServeOne | None = None
        # of our own socket file, which a successor's replaces under the same name; None without one
        self._identity: sockets.SocketIdentity | None = None
        self._changes = log.ChangeFilter()  # lets a repeated failure be logged only once
        self._releasing = self._stopping = self._predecessor_silent = False
        # set when a release has ended, or was given up because the successor is gone
        self._release_over = asyncio.Event()
        self._successor: asyncio.StreamWriter | None = None
        self.handed_over = asyncio.Event()
        self.successor_lost = asyncio.Event()

    async def find_predecessor(self, waiting: Callable[[], None]) -> bool:
        """Connect to the agent that serves this node; tell whether there is one. Without one, this
        agent has the lock, unless there can be none or another agent hangs.

        While another agent has the lock and no socket, it is starting or stopping. Then this waits,
        but not for longer than `ANSWER_SECONDS`, and calls ``waiting`` at each attempt, so that the
        agent's status can say why its start takes long.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_SECONDS
        while not await self._connect():
            if await self._take_lock():
                return False
            if loop.time() > until:
                self._report_silence()
                return False
            waiting()
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        return True

    async def _connect(self) -> bool:
        self._predecessor_identity = await asyncio.to_thread(sockets.identity, self._path)
        try:
            self._reader, self._predecessor = await asyncio.open_unix_connection(
                os.fspath(self._path), limit=_LONGEST_LINE
            )
        except (OSError, ValueError):  # ValueError: the path is too long, so there is no socket
            return False
        return True

    async def _take_lock(self) -> bool:
        """Take the lock of the agent that serves the node; return False while another agent has it,
        which has just begun to serve, or is ending.

        Where there can be no lock, or a predecessor hangs, return True all the same: a node without
        an agent would be worse. `listen` logs the first of these, and `take_over` the second.
        """
        return self._predecessor_silent or await self._try_lock()

    async def _try_lock(self) -> bool:
        """Take the lock; return False while another agent has it, and True where there can be no
        lock.
        """
        try:
            if self._lock is None:
                self._lock = await asyncio.to_thread(_open, self._lock_path)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def take_over(
        self, resources: Iterable[str], register: Callable[[], Awaitable[None]]
    ) -> None:
        """Ask the predecessor to hand the node over, and return when it has, or when it is gone.

        One that does not answer within `ANSWER_SECONDS` counts as dead, and so does one that
        refuses and does not end in that time, unless another agent serves in its place by then.
        ``register`` is awaited if this agent is to register its ``resources`` while the other still
        serves them.

        Raises:
            AgentError: a third agent is taking over at the same time, or has.
        """
        if self._reader is None or self._predecessor is None:
            return
        request = Request(
            _PROTOCOL,
            __version__,
            self._kubelet_directory,
            resources=tuple(resources),
            waits_until=time.monotonic() + ANSWER_SECONDS,
        )
        answer = await self._ask(self._reader, self._predecessor, request)
        if answer is not None and answer.serving:
            await register()
            registered = Registered(waits_until=time.monotonic() + ANSWER_SECONDS)
            answer = await self._ask(self._reader, self._predecessor, registered)
        if answer is not None and answer.released:
            # the connection stays open: its end would tell that this agent is gone
            self._journal.record("agent.took_over", predecessor=answer.version)
            await self._take_lock()
            return
        if self._predecessor_silent:
            # It may wake up and answer: it does not begin again while this connection is open.
            return
        self._predecessor.close()
        self._predecessor = None
        if answer is not None and answer.busy:
            raise AgentError(_BUSY)
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_SECONDS
        while not await self._take_lock() and loop.time() < until:
            found = await asyncio.to_thread(sockets.identity, self._path)
            if found is not None and found != self._predecessor_identity:
                raise AgentError(_BUSY)  # that agent has the lock, and keeps it
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)

    async def listen(
        self,
        release: Callable[[Callable[[], bool]], Awaitable[None]],
        unlink: Callable[[Collection[str]], Awaitable[bool]],
        serve_again: Callable[[], Awaitable[None]],
    ) -> None:
        """Let the next agent take over from now on.

        Args:
            release: ends all that two agents must not do at the same time. It is called with a
                function that tells whether the successor still waits for that; one that has waited
                in vain, because this agent hung, may serve the node by then.
            unlink: makes the kubelet forget its clients of the given resources, so that another
                agent can register beside this one, and tells whether that worked.
            serve_again: undoes that, when the other one ends before it has registered.

        Where no socket can be made for that, it is logged. Then an upgrade leaves the node without
        healthy ids for a moment, as a restart does. `keep_listening` tries again.
        """
        self._serve_one = functools.partial(self._serve, release, unlink, serve_again)
        await self._listen(self._serve_one)

    async def keep_listening(self) -> None:
        """Call `listen_again` regularly, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.listen_again()

    async def listen_again(self) -> None:
        """Make the socket if that has failed before, as on a full disk, or if it has been removed;
        otherwise do nothing. Call this after `listen`.
        """
        if self._identity is None:
            # This agent has let go of the lock, and another may have begun with it.
            can_listen = await self._try_lock()
        else:
            # Another socket there is that of an agent which began because this one hung.
            can_listen = await asyncio.to_thread(sockets.identity, self._path) is None
        if can_listen and self._serve_one is not None:
            await self._listen(self._serve_one)

    async def _listen(self, serve_one: _ServeOne) -> None:
        # Under another name first: the renaming replaces the predecessor's socket in one step.
        unfinished = self._path.with_suffix(".new")
        try:
            listener = await asyncio.to_thread(_bind, unfinished)
            server = await asyncio.start_unix_server(serve_one, sock=listener, limit=_LONGEST_LINE)
            self._server, before = server, self._server
            if before is not None:
                before.close()
            await asyncio.to_thread(os.replace, unfinished, self._path)
        except (ListenError, OSError) as err:
            if self._changes.is_new("listen", str(err)):
                self._journal.record(
                    "succession.unavailable",
                    level="warning",
                    path=str(self._path),
                    error=str(err),
                    remedy=(
                        "make stateDirectory a directory in which the agent can create a socket; "
                        "until then an upgrade leaves the node without healthy ids for a second "
                        "or two"
                    ),
                )
            self._identity = None
            self._release_lock()  # the next agent would wait for a socket
            return
        self._changes.forget("listen")
        self._identity = await asyncio.to_thread(sockets.identity, self._path)

    async def stop_listening(self) -> None:
        """Let no agent take over any more, and wait for the end of a release that has begun. A
        successor keeps its connection. After a hand-over other agents are still answered.
        """
        self._stopping = True
        if self._releasing:
            await self._release_over.wait()
        # After a hand-over the successor's socket may take this name between the check and the
        # removal below, and would be deleted. Until it is there, a third agent must get an answer
        # here, or it would serve beside the successor.
        if self._server is None or self.handed_over.is_set():
            return
        self._server.close()
        # not that of an agent that began because this one hung
        if await asyncio.to_thread(sockets.identity, self._path) == self._identity:
            await asyncio.to_thread(sockets.remove, self._path)

    def stop_answering(self) -> None:
        """Stop answering other agents; the last step."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End the connection to the predecessor. If its process is still there, it serves the node
        again, unless this agent has handed over itself.
        """
        if self._predecessor is not None:
            if self.handed_over.is_set():
                self._predecessor.write(_HANDED_ON)
            self._predecessor.close()
        self._release_lock()

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        message: Request | Registered,
    ) -> Answer | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(msgspec.json.encode(message) + b"\n")
                await writer.drain()
                line = await reader.readline()
            return msgspec.json.decode(line, type=Answer) if line else None
        except TimeoutError:
            self._report_silence()
        except (OSError, ValueError) as err:  # DecodeError and an endless line are ValueErrors
            _logger.warning("succession.broken", error=str(err))
        return None

    def _report_silence(self) -> None:
        self._predecessor_silent = True
        self._journal.record(
            "agent.predecessor_silent", level="warning", waited_seconds=ANSWER_SECONDS
        )

    async def _serve(
        self,
        release: Callable[[Callable[[], bool]], Awaitable[None]],
        unlink: Callable[[Collection[str]], Awaitable[bool]],
        serve_again: Callable[[], Awaitable[None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serve the connection of one agent that may become the successor."""
        handed_on = False
        try:
            with contextlib.suppress(OSError, ValueError):  # ValueError: an endless line
                if await self._hand_over(release, unlink, serve_again, reader, writer):
                    # the successor's word that it has registered may come late
                    while not handed_on and (line := await reader.readline()):
                        handed_on = line == _HANDED_ON
        finally:
            if writer is self._successor and self.handed_over.is_set() and not handed_on:
                self.successor_lost.set()
            writer.close()

    async def _hand_over(
        self,
        release: Callable[[Callable[[], bool]], Awaitable[None]],
        unlink: Callable[[Collection[str]], Awaitable[bool]],
        serve_again: Callable[[], Awaitable[None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = msgspec.json.decode(await reader.readline(), type=Request)
        except (TimeoutError, ValueError) as err:
            _logger.warning("succession.broken", error=str(err) or "no request came")
            return False
        if (
            request.protocol != _PROTOCOL  # of a later version of the agent
            or request.kubelet_directory != self._kubelet_directory
        ):
            answer = Answer(version=__version__)
        elif self._releasing:
            answer = Answer(busy=True, version=__version__)
        elif self._stopping:
            answer = Answer(version=__version__)
        else:
            self._releasing, self._successor = True, writer
            self._release_over.clear()
            try:
                waits_until = request.waits_until
                # If this agent hung after the request came, the sender has stopped waiting and may
                # have registered; `unlink` would undo that.
                if time.monotonic() < waits_until and await _try_unlink(unlink(request.resources)):
                    registered = await _until_registered(reader, writer)
                    if registered is None:
                        await serve_again()
                        self._journal.record("agent.successor_lost", level="warning")
                        self._releasing, self._successor = False, None
                        return False
                    waits_until = registered.waits_until
                await release(lambda: time.monotonic() < waits_until)
            finally:
                # also when `release` failed halfway: this agent cannot serve any more
                if self._releasing:
                    self._release_lock()
                    self.handed_over.set()
                self._release_over.set()
            self._journal.record("agent.handed_over", successor=request.version)
            answer = Answer(released=True, version=__version__)
        writer.write(msgspec.json.encode(answer) + b"\n")
        await writer.drain()
        return answer.released


async def _try_unlink(unlinking: Awaitable[bool]) -> bool:
    """Await the call of ``unlink``; tell whether the successor can register beside this agent. When
    it fails, the streams are ended before the successor registers, as where it is impossible.
    """
    try:
        return await unlinking
    except (AgentError, OSError) as err:
        _logger.warning("succession.broken", error=str(err))
        return False


async def _until_registered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Registered | None:
    """Let the successor register, and wait until it has, but not forever; return None if it is
    gone first.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(msgspec.json.encode(Answer(serving=True, version=__version__)) + b"\n")
            await writer.drain()
            line = await reader.readline()
    except TimeoutError:
        return Registered(waits_until=0.0)  # it hangs, and may have registered
    except (OSError, ValueError):  # ValueError: an endless line
        return None
    if not line:
        return None
    try:
        return msgspec.json.decode(line, type=Registered)
    except ValueError:  # of a later version of the agent
        return Registered()


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _bind(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    sockets.remove(path)  # an earlier agent was killed before it could rename it
    return sockets.bind(path, "stateDirectory")
