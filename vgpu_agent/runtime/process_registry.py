"""The registry of containers' processes (vgpu-manager §9).

The library of `isolation.vgpu_control` has to know which processes of a GPU belong to its own
container. In client mode (``vgpuControl.processes: client``) it does not look into the host's
/proc, which would show every tenant's processes to every other. Instead each process that uses a
GPU calls this service on a unix socket, and the agent writes the pids of *all* processes of its
container into the container's own list.

What the caller says about itself is not trusted, only compared. The kernel names the calling
process and its container (`cgroups`), and the kubelet's status of the pod has the container's name.
The call must name the same. A call only updates the list of the caller's own container with its
real processes, so a forged call gains nothing. A list is kept up to date while its container lives,
because a process that does not load the library makes no call.

The agent needs ``hostPID`` for this, and the host's cgroups.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import first_of
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    HostFileError,
    ListenError,
    PermissionDeniedError,
    RequestRefusedError,
    quoted,
)
from vgpu_agent.grpc import sockets, wire
from vgpu_agent.grpc.server import GrpcServer, Limits
from vgpu_agent.pods import container_directory
from vgpu_agent.runtime import process_list
from vgpu_agent.runtime.cgroups import ContainerKey, PodCgroups
from vgpu_agent.runtime.host_files import file_error, make_directory
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.region_slots import resolve_slot
from vgpu_agent.runtime.registry_acceptor import Acceptor, Caller, RateLimiter

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from vgpu_agent.grpc.sockets import SocketIdentity
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import Pod, PodCache

T = TypeVar("T")

_logger = log.get(__name__)

METHOD = "/registry.VDeviceRegistry/RegisterContainerDevice"
SOCKET = "socket.sock"
_CONFIG = "config"  # within a container's directory
_DIRECTORY_MODE, _SOCKET_MODE = 0o711, 0o666

# How long a call waits until the pod's status names the container. Its client gives up earlier, by
# default after 12 s.
WAIT_SECONDS = 60.0
# How often lists are compared with the cgroups; vgpu-manager's registry does so only at a call
# (vgpu-manager §9). A process begins to use a GPU some time after it has started.
REFRESH_SECONDS = 1.0
_GUARD_SECONDS = 5.0  # between two checks that the file at the socket's path is still ours
# How long a call goes on trying while a process of the container has its list locked, and the pause
# between two tries.
_LOCK_SECONDS, _LOCK_PAUSE_SECONDS = 1.0, 0.01
_WORK_SECONDS = 10.0  # the longest that one piece of work on files may take
_SILENT_SECONDS = 15.0  # a connection without a call in progress is ended after this long
_MAX_CONNECTIONS, _MAX_OF_A_CONTAINER = 256, 64
_BACKLOG = 128
_MAX_MESSAGE_BYTES = 16 * 1024
_LONGEST_TOKEN = 128

# streams: calls with many answers, which this service does not have
_LIMITS = Limits(connections=_MAX_CONNECTIONS, streams=0, request_bytes=64 * 1024)


class Request(msgspec.Struct, frozen=True):
    """A call, as the library's client sends it. ``token`` is no hash of ids but the field
    ``register_uuid``, a UUID beside the two names. The agent gives containers none, and does not
    use it.
    """

    pod_uid: str
    container: str
    token: str = ""

    @classmethod
    def decode(cls, encoded: bytes) -> Request:
        """Read a ``ContainerDeviceRequest``.

        Raises:
            CapacityError: it is too long.
            RequestRefusedError: it is no such message, or no pod or container can have these names.
        """
        if len(encoded) > _MAX_MESSAGE_BYTES:
            raise CapacityError(
                f"the message has {len(encoded)} bytes and {_MAX_MESSAGE_BYTES} are the most"
            )
        try:
            uid, name, token = (wire.string(encoded, number) for number in (1, 2, 3))
        except (wire.MalformedError, IndexError) as err:
            raise RequestRefusedError(f"the message cannot be read: {err}") from err
        if len(token) > _LONGEST_TOKEN:
            raise RequestRefusedError(
                f"register_uuid has {len(token)} characters and {_LONGEST_TOKEN} are the most"
            )
        container_directory(uid, name)  # raises if one of the two is no such name
        return cls(uid, name, token)


class _Registered(msgspec.Struct):
    """A container whose list is kept current, and the content of the list that was written last."""

    container: ContainerKey
    written: bytes = b""


class _Connection:
    """An accepted connection.

    Attributes:
        caller: the process that has connected, and its container.
        calls: how many of its calls wait for an answer.
        end: ends it.
        silence: the timer that ends it when no call waits.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.calls = 0
        self.end: Callable[[], None] = lambda: None
        self.silence: asyncio.TimerHandle | None = None


class ProcessRegistry:
    """The service, its socket, and the lists that it keeps.

    State: the connections, and the containers that have registered. The lists are files, by which a
    new agent finds these containers again.

    Args:
        directory: of the socket; containers have it mounted read-only.
        containers: the parent of the containers' directories, ``<pod UID>_<container>``.
        pods: the pods of this node.
        journal: lists that cannot be kept are recorded there.
        proc_root: where the host's processes are seen.
        cgroup_root: where the host's cgroups are mounted.
    """

    def __init__(
        self,
        directory: Path,
        containers: Path,
        pods: PodCache,
        journal: Journal,
        *,
        proc_root: str,
        cgroup_root: str,
    ) -> None:
        self._directory, self._containers = directory, containers
        self._path = directory / SOCKET
        self._pods, self._journal, self._proc_root = pods, journal, proc_root
        self._cgroups = PodCgroups(cgroup_root)
        # threads for work on files, which may block; one each, so that neither delays the other
        self._files = OwnThread("container processes")
        self._socket_files = OwnThread("registry socket")
        self._arrived: asyncio.Queue[tuple[socket.socket, Caller]] = asyncio.Queue()
        self._connections: list[_Connection] = []  # oldest first
        self._calls = RateLimiter()  # those that each container may still make
        self._registered: dict[tuple[str, str], _Registered] = {}  # by (pod's UID, container)
        self._any = asyncio.Event()  # some container has registered
        self._changes = log.ChangeFilter()  # tells new failures from repeated ones

    @property
    def registered(self) -> dict[tuple[str, str], ContainerKey]:
        """The containers whose lists are kept, by (the UID under which the kubelet keeps the pod,
        name of the container).
        """
        return {owner: one.container for owner, one in self._registered.items()}

    # ---- the socket

    async def run(self) -> None:
        """Serve until cancelled; a loop for the supervisor."""
        # a method of `by_caller` also gets the `_Connection` over which it was called
        server = GrpcServer(
            unary={}, streams={}, limits=_LIMITS, by_caller={METHOD: self._register}
        )
        acceptor: Acceptor | None = None
        identity: SocketIdentity | None = None
        try:
            while True:
                found = await self._work(self._socket_files, lambda: sockets.identity(self._path))
                if identity is None or found != identity:
                    if acceptor is not None:
                        self._journal.record(
                            "registry.socket_replaced", level="warning", path=str(self._path)
                        )
                        acceptor.close()
                    listener, identity = await self._work(self._socket_files, self._listen)
                    acceptor = Acceptor(listener, self._arrive, proc_root=self._proc_root)
                await self._serve(server, until=time.monotonic() + _GUARD_SECONDS)
        finally:
            if acceptor is not None:
                acceptor.close()
            while not self._arrived.empty():
                self._arrived.get_nowait()[0].close()
            server.abort()

    async def _serve(self, server: GrpcServer, *, until: float) -> None:
        """Serve the accepted connections until ``until``, when the socket is checked again."""
        while (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    connection, caller = await self._arrived.get()
            except TimeoutError:
                return
            await self._take(server, connection, caller)

    def _arrive(self, connection: socket.socket, caller: Caller) -> None:
        if self._arrived.qsize() >= _MAX_CONNECTIONS:
            connection.close()
            return
        self._arrived.put_nowait((connection, caller))

    async def _take(self, server: GrpcServer, accepted: socket.socket, caller: Caller) -> None:
        of_its_own = [one for one in self._connections if one.caller.container == caller.container]
        if len(of_its_own) >= _MAX_OF_A_CONTAINER:
            accepted.close()
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._busiest().end()
        made = _Connection(caller)

        def lost() -> None:  # called when the connection has ended
            if made in self._connections:
                self._connections.remove(made)
            if made.silence is not None:
                made.silence.cancel()

        self._connections.append(made)
        try:
            made.end = await server.take(accepted, made, lost)
        except BaseException:
            lost()
            accepted.close()
            raise
        made.silence = asyncio.get_running_loop().call_later(
            _SILENT_SECONDS, self._end_if_silent, made
        )

    def _busiest(self) -> _Connection:
        """The oldest connection of the container that has the most."""
        containers = [one.caller.container for one in self._connections]
        most = max(containers, key=containers.count)
        return next(one for one in self._connections if one.caller.container == most)

    def _end_if_silent(self, connection: _Connection) -> None:
        if not connection.calls:
            connection.end()
            return
        connection.silence = asyncio.get_running_loop().call_later(
            _SILENT_SECONDS, self._end_if_silent, connection
        )

    def _listen(self) -> tuple[socket.socket, SocketIdentity]:
        """Make the socket under another name and rename it, so that it accepts connections as soon
        as it is visible.
        """
        make_directory(str(self._directory), _DIRECTORY_MODE)
        unfinished = self._directory / f".{secrets.token_hex(4)}"
        for name in os.listdir(self._directory):
            if name.startswith(".") and len(name) == len(unfinished.name):
                sockets.remove(self._directory / name)  # one that a killed agent has left
        # with the setting that decides the path, for the error
        listener = sockets.bind(unfinished, "vgpuControl.hostDirectory")
        try:
            listener.listen(_BACKLOG)
            os.chmod(unfinished, _SOCKET_MODE)
            os.rename(unfinished, self._path)
        except OSError as err:
            listener.close()
            sockets.remove(unfinished)
            raise file_error("write", str(self._path), err) from err
        made = sockets.identity(self._path)
        if made is None:
            listener.close()
            raise ListenError(
                f"the socket {self._path} was removed at once; stop the program that removes it"
            )
        return listener, made

    # ---- a call

    async def _register(self, encoded: bytes, connection: _Connection) -> bytes:
        caller = connection.caller
        if not self._calls.take(caller.container):
            connection.end()
            raise CapacityError("this container has called too often; try again later")
        calls = sum(
            one.calls for one in self._connections if one.caller.container == caller.container
        )
        if calls >= _MAX_OF_A_CONTAINER:
            raise CapacityError(
                f"{calls} calls of this container wait and {_MAX_OF_A_CONTAINER} are the most"
            )
        connection.calls += 1
        try:
            await self._register_container(Request.decode(encoded), caller)
        finally:
            connection.calls -= 1
        return b""

    async def _register_container(self, request: Request, caller: Caller) -> None:
        container = caller.container
        if not caller.peer.pid:
            raise AgentError(
                "the agent does not see the host's processes; run it with hostPID, or set another "
                "vgpuControl.processes"
            )
        if container is None:
            raise PermissionDeniedError(
                f"process {caller.peer.pid} does not run in a pod's container"
            )
        if container.pod_uid != request.pod_uid:
            raise PermissionDeniedError(
                f"the caller belongs to pod {quoted(container.pod_uid)} and asks for "
                f"{quoted(request.pod_uid)}"
            )
        await self._wait_until_confirmed(request, container)
        owner = (request.pod_uid, request.container)
        known = self._registered.get(owner)
        if known is None or known.container != container:
            known = _Registered(container)
        await self._write(owner, known, must_have=caller.peer.pid)
        if owner not in self._registered:
            _logger.info(
                "registry.registered",
                pod_uid=request.pod_uid,
                container=request.container,
                container_id=container.container_id,
            )
        self._registered[owner] = known
        self._any.set()

    async def _wait_until_confirmed(self, request: Request, container: ContainerKey) -> None:
        """Wait until the kubelet has written that the container of that name is the caller's.

        Raises:
            PermissionDeniedError: the caller's container has another name.
            AgentError: there is no answer in time.
        """
        until = time.monotonic() + WAIT_SECONDS
        while True:
            seen = self._pods.revision.version
            pod = self._pods.get(request.pod_uid)
            if pod is not None and _has_name(pod, request.container, container.container_id):
                return
            if (left := until - time.monotonic()) <= 0:
                missing = (
                    "the API server has not shown this pod"
                    if pod is None
                    else "its status does not name the caller's container id"
                )
                raise AgentError(
                    f"container {quoted(request.container)} of pod {request.pod_uid} cannot be "
                    f"confirmed within {WAIT_SECONDS:g} s: {missing}; try again"
                )
            await first_of(self._pods.revision.newer_than(seen), timeout_seconds=left)

    # ---- the lists

    async def keep_lists(self) -> None:
        """Keep the lists current until cancelled; a loop for the supervisor. It sleeps while no
        container has registered.
        """
        await self._pods.synced.wait()
        await self._find_again()
        while True:
            await self._any.wait()
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Compare every list with the container's cgroup once."""
        owners = dict(self._registered)
        try:
            outcomes = await self._work(self._files, functools.partial(self._look, owners))
        except HostFileError as err:
            if self._changes.is_new("keeps"):  # "keeps": the lists as a whole
                self._journal.record("registry.not_kept", level="warning", error=str(err))
            return
        self._changes.forget("keeps")
        for owner, outcome in outcomes.items():
            if self._registered.get(owner) is not owners[owner]:
                continue
            if outcome is None:
                del self._registered[owner]
            elif outcome and self._changes.is_new(owner):
                self._journal.record(
                    "registry.list_not_written", level="warning", pod_uid=owner[0],
                    container=owner[1], error=outcome,
                )  # fmt: skip
            elif not outcome:
                self._changes.forget(owner)
        self._changes.keep_only({"keeps", *self._registered})
        if not self._registered:
            self._any.clear()

    def _look(
        self, owners: dict[tuple[str, str], _Registered]
    ) -> dict[tuple[str, str], str | None]:
        """Write the lists that have changed. Return why one could not be written, or "";
        None where the container has ended.
        """
        outcomes: dict[tuple[str, str], str | None] = {}
        for owner, one in owners.items():
            new = process_list.encode(self._cgroups.processes(one.container))
            outcomes[owner] = "" if new else None
            if not new or new == one.written:
                continue
            try:
                process_list.write(self._list_directory(owner), new)
                one.written = new
            except HostFileError as err:
                outcomes[owner] = str(err)
        return outcomes

    async def _find_again(self) -> None:
        """Go on with the lists of the previous agent."""
        owners = {
            (pod.kubelet_uid, container.name): _Registered(
                ContainerKey(pod.kubelet_uid, container.container_id)
            )
            for pod in self._pods.pods
            if not pod.ended
            for container in pod.containers
            if container.container_id
        }

        def found() -> list[tuple[str, str]]:
            return [owner for owner in owners if process_list.exists(self._list_directory(owner))]

        for owner in await self._work(self._files, found):
            self._registered.setdefault(owner, owners[owner])
        if self._registered:
            self._any.set()

    async def _write(self, owner: tuple[str, str], one: _Registered, *, must_have: int) -> None:
        """Write the list of a container, in which the process ``must_have`` has to be.

        Raises:
            PermissionDeniedError: that process is not in the container's cgroup.
            HostFileError: the list cannot be written.
        """

        def write() -> None:
            processes = self._cgroups.processes(one.container)
            if must_have not in processes:
                raise PermissionDeniedError(
                    f"process {must_have} is not among those of container {quoted(owner[1])}; has "
                    "it ended, and does the agent see the host's cgroups?"
                )
            new = process_list.encode(processes)
            if new != one.written:
                process_list.write(self._list_directory(owner), new)
                one.written = new

        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                await self._work(self._files, write)
            except process_list.LockedError:
                if time.monotonic() > until:
                    raise
            else:
                return
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)

    def _list_directory(self, owner: tuple[str, str]) -> str:
        """The directory of a container's list, in the container's slot if it has one; blocks."""
        return f"{resolve_slot(f'{self._containers}/{container_directory(*owner)}')}/{_CONFIG}"

    async def _work(self, thread: OwnThread, call: Callable[[], T]) -> T:
        """Run ``call`` in the thread; if it does not return, the error names the directory of the
        containers.
        """
        return await thread.run(str(self._containers), call, seconds=_WORK_SECONDS)


def _has_name(pod: Pod, name: str, container_id: str) -> bool:
    """Tell whether the container of that id has that name.

    Raises:
        PermissionDeniedError: it has another one, or there is none of that name.
    """
    for container in pod.containers:
        if container.container_id == container_id and container.name != name:
            raise PermissionDeniedError(
                f"the caller is container {quoted(container.name)} and asks for {quoted(name)}"
            )
    if pod.container(name) is None:
        raise PermissionDeniedError(f"pod {pod.full_name} has no container {quoted(name)}")
    return any(one.name == name and one.container_id == container_id for one in pod.containers)
