"""The life of one resource's device plugin:
serve, register, notice that the registration is lost, begin again.

`agent` runs one `DevicePlugin` for each resource under the supervisor, all of them beside one
`DirectoryWatch`. Each round is a fresh server on a fresh socket: the kubelet's bookkeeping of
endpoints is too racy to reuse anything (kubelet §3).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.concurrency import Backoff, first_of, unless
from vgpu_agent.errors import (
    KubeletError,
    ListenError,
    RegistrationRefusedError,
    RequestRefusedError,
)
from vgpu_agent.grpc.server import GrpcServer, Limits
from vgpu_agent.grpc.sockets import bind, identity, remove
from vgpu_agent.kubelet import sockets
from vgpu_agent.kubelet.plugin import OPTIONS, PluginService
from vgpu_agent.kubelet.registration import ListenBackoff, NotListeningError, register
from vgpu_agent.status import PluginState, PluginStatus

if TYPE_CHECKING:
    import socket

    from vgpu_agent.concurrency import Revision
    from vgpu_agent.grpc.sockets import SocketIdentity
    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.directory import DirectoryWatch
    from vgpu_agent.kubelet.plugin import Backend, SentList
    from vgpu_agent.model import Resource

# How long one Register call may take; a kubelet that has just started answers late, not never.
REGISTER_TIMEOUT_SECONDS = 15.0
# How long after a Register that succeeded the kubelet may take to open ListAndWatch.
STREAM_OPEN_TIMEOUT_SECONDS = 5.0
# Pauses after a failed registration; the first is short, because pods wait for it.
RETRY_MIN_SECONDS = 0.2
RETRY_MAX_SECONDS = 30.0
# Quiet time before a changed device list is sent, so that a burst of changes becomes one message.
COALESCE_SECONDS = 0.1
# How long a stop waits for calls in flight; the kubelet keeps its connection open by itself.
DRAIN_SECONDS = 3.0
# The longest time that a stopping plugin waits until the kubelet has noticed the end of its stream.
_NOTICE_SECONDS = 1.0

_logger = log.get(__name__)

# A kubelet that has just made its socket listens before this; only longer waits are journalled.
_WORTH_A_LINE_SECONDS = 0.1
_LOG_AGAIN_SECONDS = 600.0

# The kubelet has one connection to each of our sockets, and one stream of lists over it. The
# largest Allocate has less than 4 MiB.
LIMITS = Limits(connections=8, streams=4, request_bytes=16 * 1024 * 1024)


class DevicePlugin:
    """One resource, offered to the kubelet for as long as `run` runs.

    Its ids may come and go meanwhile: the list is that of the backend, the agent behind this server
    (`plugin.Backend`). Only pre-start (the kubelet calls PreStartContainer, or does not) is fixed,
    because a registration states it once. A resource whose pre-start changes is a new
    `DevicePlugin`.

    State: the server instance of the current round. `status` outlives rounds and is read by `web`.
    """

    def __init__(
        self,
        resource: Resource,
        backend: Backend,
        directory: DirectoryWatch,
        journal: Journal,
        lists_revision: Revision | None = None,
        may_register: asyncio.Event | None = None,
    ) -> None:
        """Build it; ``lists_revision`` is advanced with each list that the kubelet is sent,
        and with the end of each stream, for those who wait until the kubelet has a list.
        Registrations wait for ``may_register``, which is set when an earlier agent has let go of
        the node.
        """
        self.resource = resource
        self.status = PluginStatus(resource.name, resource.family)
        self._backend = backend
        self._directory = directory
        self._journal = journal
        self._lists_revision = lists_revision
        self._stopping = asyncio.Event()
        self._has_successor = False  # set by `hand_over`: another agent registers next
        self._streams_ended = asyncio.Event()
        self._may_register = may_register
        self._has_waited = False  # for `may_register`, since the last round ended
        self._ended = asyncio.Event()
        self._ended.set()
        self._registered: _Instance | None = None
        self._listening = ListenBackoff(RETRY_MAX_SECONDS)
        # what was logged; after `forget` it is logged anew
        self._changes = log.ChangeFilter(again_seconds=_LOG_AGAIN_SECONDS)

    @property
    def last_sent(self) -> SentList | None:
        """The list that the kubelet last received over a stream that is still open; None without
        registration or before the first list.
        """
        return self._registered.last_sent if self._registered is not None else None

    @property
    def is_registered(self) -> bool:
        """Tell whether the kubelet knows the server of the current round."""
        return self._registered is not None

    def register_again(self, reason: str) -> None:
        """End the current round, so that a fresh server registers;
        nothing to do when a new round is coming anyway.
        """
        if self._registered is not None:
            self._registered.leave(reason)

    async def run(self) -> None:
        """Keep the resource registered until `stop` is called or the task is cancelled.

        A kubelet that refuses for good is not asked again (kubelet V6): the state is ``failed``
        until there is another kubelet.
        """
        self._ended.clear()
        self._streams_ended.clear()
        backoff = Backoff(RETRY_MIN_SECONDS, RETRY_MAX_SECONDS)
        last_kubelet: SocketIdentity | None = None
        try:
            while not self._stopping.is_set():
                kubelet = await self._kubelet_socket()
                if kubelet is None:
                    break
                if kubelet != last_kubelet:  # its predecessor's failures are no sign against it
                    last_kubelet = kubelet
                    backoff.reset()
                    self._listening.reset()
                try:
                    await self._attempt(kubelet, backoff)
                except RegistrationRefusedError as err:
                    self.status.state, self.status.last_error = PluginState.FAILED, str(err)
                    self._journal.record(
                        "plugin.refused",
                        level="error",
                        resource=self.resource.name,
                        reason=str(err),
                    )
                    await self._until_another(kubelet)
            if not self._has_successor:
                await self._retire()
            self.status.state = PluginState.STOPPED
        except asyncio.CancelledError:
            self.status.state = PluginState.STOPPED
            raise
        finally:
            self.status.stream_open = False
            self._streams_ended.set()
            self._ended.set()

    async def stop(self) -> None:
        """End gracefully: streams return, sockets go,
        and containers of ours can be restarted while we are away.

        The last is for resources with pre-start: the kubelet would refuse to restart a crashed
        container while the plugin that must be asked is gone, so the very last act is a
        registration without pre-start. Returns when `run` has ended.
        """
        self._stopping.set()
        await self._ended.wait()

    async def unlink(self) -> bool:
        """Make the kubelet forget its client of this resource, so that `end_streams` has no
        consequence; tell whether that worked. The socket file stays.

        When a stream of a resource ends, kubelets from 1.25 to 1.36 disconnect the client that
        registered the resource last, whichever that is, and mark all ids Unhealthy. A registration
        that fails makes them forget that client, and changes nothing else (kubelet §3).
        """
        instance = self._registered
        return instance is not None and await instance.unlink()

    async def end_streams(self) -> None:
        """End the streams after `unlink`. The kubelet keeps the healthy ids, and goes on calling
        this agent until another one has registered.
        """
        if self._registered is not None:
            await self._registered.end_streams()

    def register_after_unlink(self, reason: str) -> None:
        """Register again if `unlink` has succeeded, so that the kubelet gets lists again."""
        if self._registered is not None and self._registered.unlinked:
            self._registered.unlinked = False
            self._registered.leave(reason)

    async def until_disconnected(self, seconds: float) -> None:
        """Wait until the kubelet has closed its connection, at most for ``seconds``."""
        if self._registered is not None:
            await self._registered.until_disconnected(seconds)

    async def hand_over(self) -> None:
        """Begin to end, and return when another agent can register: the stream has ended. The calls
        that are running are answered first, because the kubelet has no healthy ids from the end of
        the stream on.
        """
        self._has_successor = True
        self._stopping.set()
        await self._streams_ended.wait()

    async def _attempt(self, kubelet: SocketIdentity, backoff: Backoff) -> None:
        """Do one round; afterwards the next may follow at once,
        or after a pause when the kubelet keeps failing.
        """
        began = asyncio.get_running_loop().time()
        try:
            reason = await self._round(kubelet)
        except RegistrationRefusedError:
            raise
        except (KubeletError, ListenError) as err:
            self.status.registration_failures += isinstance(err, KubeletError) and not isinstance(
                err, NotListeningError
            )
            reason = str(err)
            lasted = False
        else:
            lasted = asyncio.get_running_loop().time() - began > STREAM_OPEN_TIMEOUT_SECONDS
            # The end of the predecessor's stream may have ended this one too (kubelet §3), which is
            # no failure.
            lasted, self._has_waited = lasted or self._has_waited, False
        if self._stopping.is_set():
            return
        self.status.state = PluginState.WAITING
        self._journal_reason(reason, kubelet)
        if lasted:
            # at once: the kubelet has no healthy ids now, e.g. because the last stream of an agent
            # before this one has ended (kubelet §3)
            backoff.reset()
            return
        if self._directory.state.value.kubelet_socket != kubelet:
            return
        await self._while_kubelet_is(kubelet, backoff.pause())

    def _journal_reason(self, reason: str, kubelet: SocketIdentity) -> None:
        """Record why there is no registration: once for each kubelet, when the reason changes,
        and now and then while it lasts.
        """
        self.status.last_error = reason
        if self._changes.is_new(
            "registration", (reason, kubelet), now=asyncio.get_running_loop().time()
        ):
            self._journal.record(
                "plugin.registering_again",
                level="warning",
                resource=self.resource.name,
                reason=reason,
            )

    async def _register(self, instance: _Instance, kubelet: SocketIdentity) -> None:
        """Register as soon as the kubelet listens.
        Until then it does not know the socket, so the same one can be used.

        Raises:
            KubeletError: the registration failed, or there is another kubelet now.
        """
        if self._may_register is not None and not self._may_register.is_set():
            await instance.prepare()
            await self._may_register.wait()
            self._has_waited = True
        while True:
            try:
                await instance.register(REGISTER_TIMEOUT_SECONDS)
            except NotListeningError as err:
                self.status.registration_failures += 1
                self.status.state = PluginState.WAITING
                pause = self._listening.pause()
                if pause >= _WORTH_A_LINE_SECONDS:
                    self._journal_reason(str(err), kubelet)
                self.status.last_error = str(err)
                await self._while_kubelet_is(kubelet, pause)
                if self._directory.state.value.kubelet_socket != kubelet:
                    raise
            else:
                self._listening.reset()
                return

    async def _round(self, kubelet: SocketIdentity) -> str:
        """Serve, register and stay until something ends the round; return why it ended.

        Raises:
            KubeletError: the registration failed.
            ListenError: there is no socket to serve on.
        """
        instance = _Instance(
            self.resource,
            self._backend,
            self.status,
            self._directory,
            lists_revision=self._lists_revision,
        )
        try:
            await instance.start()
            self.status.state, self.status.endpoint = PluginState.SERVING, instance.name
            if not await unless(self._stopping, self._register(instance, kubelet)):
                return "the agent stops"  # `_stopping` was set before the registration was done
            self.status.state, self.status.registered_at = PluginState.REGISTERED, time.time()
            self.status.registrations += 1
            # the difference between the kubelet's ids and those sent, if there is one
            self.status.last_error = self.status.list_fault
            self._changes.forget("registration")
            ids = len(self._backend.listing(self.resource.name))
            self._journal.record(
                "plugin.registered", resource=self.resource.name, endpoint=instance.name, ids=ids
            )
            self._registered = instance
            if self._lists_revision is not None:
                # The kubelet may have received the list already, and `last_sent` counts it only
                # from now on.
                self._lists_revision.advance()
            return await instance.until_lost(kubelet, self._stopping)
        finally:
            self._registered = None
            if self._stopping.is_set():
                self.status.state = PluginState.DRAINING
            if self._has_successor and instance.unlinked:
                # The kubelet does not close the connection. No call may decide anything once the
                # successor reads the records, so `run` sets `_streams_ended` after `close`.
                await instance.until_quiet()
            elif self._has_successor:
                await instance.end_streams_when_quiet()
                self._streams_ended.set()
                # it answers the calls that the kubelet makes before it has noticed the end
                await instance.until_disconnected(DRAIN_SECONDS)
            elif self._stopping.is_set() and self.resource.pre_start_required:
                # `_retire` registers again. A kubelet that has not noticed the end of this stream
                # by then takes down the client of that registration for it. If the list of that
                # registration arrives at the same time, the ids stay healthy without a server.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_NOTICE_SECONDS):
                        await instance.end_streams_when_quiet()
                        await instance.until_disconnected(_NOTICE_SECONDS)
            await instance.close()
            self.status.endpoint = ""

    async def _retire(self) -> None:
        """Register once more without pre-start, see `stop`. If that fails, crashed containers
        cannot restart before the next agent.
        """
        registered_before = self.status.registrations > 0
        if not (
            self.resource.pre_start_required
            and registered_before
            and self._directory.state.value.kubelet_socket
        ):
            return
        if not self._backend.may_start_unasked(self.resource.name):
            return  # better no restart while we are away than one with a wrong share
        self.status.state = PluginState.DRAINING
        last = _Instance(
            self.resource,
            self._backend,
            self.status,
            self._directory,
            pre_start_required=False,
        )
        try:
            await last.start()
            await last.register(DRAIN_SECONDS)
            await last.until_first_list()
            self._journal.record("plugin.retired", resource=self.resource.name)
        except (KubeletError, ListenError) as err:
            _logger.warning("plugin.not_retired", resource=self.resource.name, error=str(err))
        finally:
            await last.close()

    async def _kubelet_socket(self) -> SocketIdentity | None:
        """Wait for the kubelet's socket (kubelet V14); return None if the plugin is to stop."""
        while not self._stopping.is_set():
            version = self._directory.state.version
            if found := self._directory.state.value.kubelet_socket:
                return found
            self.status.state = PluginState.WAITING
            await first_of(self._directory.state.newer_than(version), self._stopping.wait())
        return None

    async def _until_another(self, kubelet: SocketIdentity) -> None:
        """Wait until there is a kubelet other than this one, or until the plugin is to stop."""
        while not self._stopping.is_set():
            version, now = self._directory.state.version, self._directory.state.value.kubelet_socket
            if now is not None and now != kubelet:
                return
            await first_of(self._directory.state.newer_than(version), self._stopping.wait())

    async def _while_kubelet_is(self, kubelet: SocketIdentity, seconds: float) -> None:
        """Pause, but only for as long as this kubelet is there and nothing stops the plugin."""
        until = asyncio.get_running_loop().time() + seconds
        while (
            not self._stopping.is_set() and (left := until - asyncio.get_running_loop().time()) > 0
        ):
            version = self._directory.state.version
            if self._directory.state.value.kubelet_socket != kubelet:
                return
            if not await first_of(
                self._directory.state.newer_than(version),
                self._stopping.wait(),
                timeout_seconds=left,
            ):
                return


class _Instance:
    """One server on one socket, from its file's creation to its removal."""

    def __init__(
        self,
        resource: Resource,
        backend: Backend,
        status: PluginStatus,
        directory: DirectoryWatch,
        *,
        pre_start_required: bool | None = None,
        lists_revision: Revision | None = None,
    ) -> None:
        self.name = sockets.new_socket_name(resource.name)
        self._resource = resource
        self._directory = directory
        self._path = directory.directory / self.name
        self._listener: socket.socket | None = None
        self._identity: SocketIdentity | None = None
        self._socket_seen = False
        self._leave_reason = ""
        # `unlink` has succeeded; the kubelet has asked for the options during Register
        self.unlinked = self._called_back = False
        self._pre_start_required = (
            resource.pre_start_required if pre_start_required is None else pre_start_required
        )
        self._service = PluginService(
            resource,
            backend,
            status,
            coalesce_seconds=COALESCE_SECONDS,
            pre_start_required=self._pre_start_required,
            lists_revision=lists_revision,
        )
        self._server = GrpcServer(
            unary=self._service.unary_methods,
            streams=self._service.stream_methods,
            limits=LIMITS,
        )

    @property
    def last_sent(self) -> SentList | None:
        """See `PluginService.last_sent`."""
        return self._service.last_sent

    def leave(self, reason: str) -> None:
        """Let `until_lost` return ``reason``."""
        self._leave_reason = reason
        # it advances with each stream and list, and here to wake `until_lost`
        self._service.activity.advance()

    async def start(self) -> None:
        """Create the socket and serve.

        Raises:
            ListenError: the socket cannot be created.
        """
        self._listener = await asyncio.to_thread(bind, self._path, setting="--kubelet-dir")
        await self._server.start(self._listener)
        self._identity = await asyncio.to_thread(identity, self._path)

    async def register(self, timeout_seconds: float) -> None:
        """Announce the socket to the kubelet.

        Raises:
            KubeletError: see `registration.register`.
        """
        await register(
            self._directory.directory / sockets.KUBELET_SOCKET,
            endpoint=self.name,
            resource=self._resource.name,
            pre_start_required=self._pre_start_required,
            offers_preference=self._resource.offers_preference,
            timeout_seconds=timeout_seconds,
            on_connected=self._confirm_socket,
        )
        # kubelets that connect during Register ask for the options then
        self._called_back = self._service.options_asked > 0

    async def unlink(self) -> bool:
        """Make the kubelet forget the client of the resource by a registration that fails; tell
        whether it failed as it was meant to. See `DevicePlugin.unlink`.
        """
        if not self._called_back:
            # Up to 1.24 a kubelet connects after Register has succeeded. It would replace this
            # endpoint by one that only refuses.
            return False
        refused = False

        async def refuse(_: bytes) -> bytes:
            nonlocal refused
            refused = True
            raise RequestRefusedError("this agent hands over to its successor")

        name = sockets.new_socket_name(self._resource.name)
        path = self._directory.directory / name
        server = GrpcServer(unary={OPTIONS: refuse}, streams={}, limits=LIMITS)
        try:
            listener = await asyncio.to_thread(bind, path, setting="--kubelet-dir")
        except ListenError:
            return False
        try:
            await server.start(listener)
            await register(
                self._directory.directory / sockets.KUBELET_SOCKET,
                endpoint=name,
                resource=self._resource.name,
                pre_start_required=self._pre_start_required,
                timeout_seconds=REGISTER_TIMEOUT_SECONDS,
            )
        except KubeletError:
            self.unlinked = refused
            return refused
        finally:
            await server.drain(DRAIN_SECONDS)
            listener.close()
            await asyncio.to_thread(remove, path)
        return False

    async def end_streams(self) -> None:
        """End the streams, and stay; calls are answered as before."""
        # notes that the kubelet keeps the last list after this, so `last_sent` still returns it
        self._service.keep_list()
        await self._end_streams()

    async def _confirm_socket(self) -> None:
        """Make sure that our socket is still there, now that a kubelet has accepted a connection.

        A kubelet deletes all sockets before it listens. One that restarted after `start` would
        accept the registration of a socket that it has deleted, and fail every pod until the agent
        missed its stream.

        Raises:
            KubeletError: the socket is gone, or was replaced.
        """
        found = await asyncio.to_thread(identity, self._path)
        if found is None or found != self._identity:
            raise KubeletError(
                f"the agent's socket {self.name} was deleted while it was registered: the kubelet "
                "has restarted"
            )

    async def until_lost(self, kubelet: SocketIdentity, stopping: asyncio.Event) -> str:
        """Wait until the kubelet can no longer be served by this instance (kubelet V2, V3, V4), or
        until ``stopping``; return the reason.
        """
        deadline = asyncio.get_running_loop().time() + STREAM_OPEN_TIMEOUT_SECONDS
        while not stopping.is_set():
            activity, state = self._service.activity.version, self._directory.state.version
            if reason := self._lost(kubelet):
                return reason
            left = (
                None
                if self._service.streams_opened
                else deadline - asyncio.get_running_loop().time()
            )
            if left is not None and left <= 0:
                return (
                    "the kubelet accepted the registration but opened no stream within "
                    f"{STREAM_OPEN_TIMEOUT_SECONDS:g} s"
                )
            await first_of(
                self._service.activity.newer_than(activity),
                self._directory.state.newer_than(state),
                stopping.wait(),
                timeout_seconds=left,
            )
        return "the agent stops"

    async def until_first_list(self) -> None:
        """Wait until the kubelet has got a list, at most as long as draining may take."""
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while (
            not self._service.lists_sent
            and (left := deadline - asyncio.get_running_loop().time()) > 0
        ):
            await first_of(
                self._service.activity.newer_than(self._service.activity.version),
                timeout_seconds=left,
            )

    async def end_streams_when_quiet(self) -> None:
        """End the streams while no other call is running; wait for both as long as draining may
        take.
        """
        await self.until_quiet()
        await self._end_streams()

    async def until_quiet(self) -> None:
        """Wait until no call is running, as long as draining may take."""
        await self._server.wait_until_quiet(DRAIN_SECONDS)

    async def _end_streams(self) -> None:
        self._service.end_streams()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._service.open_streams:
                    activity = self._service.activity
                    await activity.newer_than(activity.version)

    async def until_disconnected(self, seconds: float) -> None:
        """Wait until the kubelet has closed its connection, at most for ``seconds``."""
        await self._server.until_disconnected(seconds)

    async def prepare(self) -> None:
        """Encode the list, so that it can be sent as soon as the kubelet asks for it."""
        await self._service.prepare()

    async def close(self) -> None:
        """Let streams return, close every connection, remove the socket;
        also right after a `start` that was broken off.
        """
        self._service.end_streams()
        try:
            await self._server.drain(DRAIN_SECONDS)
        finally:
            if self._listener is not None:
                self._listener.close()
            await asyncio.to_thread(remove, self._path)

    def _lost(self, kubelet: SocketIdentity) -> str:
        if self.unlinked:
            return ""
        if self._leave_reason:
            return self._leave_reason
        state = self._directory.state.value
        now = state.kubelet_socket
        if now is not None and now != kubelet:
            return "the kubelet has restarted: there is a new kubelet.sock"
        if self._service.streams_opened and not self._service.open_streams:
            return "the kubelet has ended the stream"
        present = state.sockets.get(self.name) == self._identity
        if self._socket_seen and not present:
            return f"the agent's socket {self.name} has been deleted or replaced"
        self._socket_seen = present  # False at first: the watch needs a moment to see the new file
        return ""
