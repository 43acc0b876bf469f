"""The process of the scheduler extender: watches of Nodes and pods, the extender, and the HTTP
server for kube-scheduler (vgpu-manager §5.1).

All run on one event loop, so the book needs no lock. A filter is answered without waiting for
anything. Until Nodes and pods have been listed once, filters are refused: the book would show cards
as free that are not.
"""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from aiohttp import web

from vgpu_agent import __version__, log
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.errors import ListenError
from vgpu_agent.journal import Journal
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.scheduler.extender import Extender
from vgpu_agent.scheduler.messages import BindingResult, FilterResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.cluster.credentials import Credentials
    from vgpu_agent.families.scheduling import SchedulingFamily

_logger = log.get(__name__)

# kube-scheduler sends up to 5,000 names, or as many Nodes as fit (vgpu-manager §5.1).
MAX_BODY_BYTES = 7 * 1024 * 1024
_TAKE_BACK_SECONDS = 1.0
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 1.0, 30.0
_STUCK_SECONDS = 30.0
_STOP_SECONDS = 5.0
_NOT_READY = (
    "the extender has not read all Nodes and pods yet; kube-scheduler will ask again in a moment"
)

T = TypeVar("T")


class Options(msgspec.Struct, frozen=True):
    """How the extender runs.

    Attributes:
        host: the address to listen on.
        port: the port; 0 takes a free one.
        grace_seconds: how long cards are kept for a pod that is not bound.
    """

    host: str = "127.0.0.1"
    port: int = 3456
    grace_seconds: float = 30.0


class _Objects(Generic[T]):
    """The receiver of a watch that keeps nothing but names.

    State: the keys of the objects that were seen.
    """

    def __init__(
        self, key: Callable[[T], str], see: Callable[[T], None], forget: Callable[[str], None]
    ) -> None:
        self._key, self._see, self._forget = key, see, forget
        self._known: set[str] = set()

    def replace(self, items: Iterable[T], /) -> None:
        """See `reflector.Sink`."""
        present = set()
        for item in items:
            present.add(self._key(item))
            self._see(item)
        for key in self._known - present:
            self._forget(key)
        self._known = present

    def put(self, item: T, /) -> None:
        """See `reflector.Sink`."""
        self._known.add(self._key(item))
        self._see(item)

    def remove(self, item: T, /) -> None:
        """See `reflector.Sink`."""
        self._known.discard(self._key(item))
        self._forget(self._key(item))


class Service:
    """The running extender; use `run`.

    Attributes:
        address: ``host:port``, once it listens.
    """

    def __init__(
        self, options: Options, family: SchedulingFamily, credentials: Credentials
    ) -> None:
        self._options = options
        self._journal = Journal()
        self._client = ApiClient(credentials)
        self._extender = Extender(
            book=Book(),
            family=family,
            read_pod=decode.pod,
            api=self._client,
            journal=self._journal,
            grace_seconds=options.grace_seconds,
        )
        extender = self._extender
        self._nodes = Reflector(
            self._client,
            Scope("all Nodes", "/api/v1/nodes", ""),
            decode.node,
            _Objects(lambda node: node.name, extender.see_node, extender.forget_node),
            journal=self._journal,
        )
        # A pod that has ended leaves this selection, which the watch reports as its deletion.
        self._pods = Reflector(
            self._client,
            Scope("all pods", "/api/v1/pods", "status.phase!=Succeeded,status.phase!=Failed"),
            decode.pod,
            _Objects(lambda pod: pod.uid, extender.see_pod, extender.forget_pod),
            journal=self._journal,
        )
        self._stopping = asyncio.Event()
        self.address = ""

    def stop(self) -> None:
        """Let `run` end."""
        self._stopping.set()

    @property
    def is_ready(self) -> bool:
        """Tell whether Nodes and pods have been listed once."""
        return self._nodes.synced.is_set() and self._pods.synced.is_set()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Raises:
            ListenError: the port cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=_STOP_SECONDS)
        try:
            async with Supervisor(
                backoff_min_seconds=_BACKOFF_MIN_SECONDS, backoff_max_seconds=_BACKOFF_MAX_SECONDS
            ) as supervisor:
                self._start_watch(supervisor, "nodes", self._nodes)
                self._start_watch(supervisor, "pods", self._pods)
                supervisor.start(
                    "promises",
                    lambda: self._take_back(supervisor),
                    stuck_after_seconds=_STUCK_SECONDS,
                )
                await self._listen(runner)
                await self._stopping.wait()
        finally:
            await runner.cleanup()
            await self._client.close()

    def _start_watch(self, supervisor: Supervisor, name: str, reflector: Reflector[T]) -> None:
        supervisor.start(
            name,
            lambda: reflector.run(lambda: supervisor.beat(name)),
            stuck_after_seconds=reflector.longest_silence_seconds + _STUCK_SECONDS,
        )

    async def _take_back(self, supervisor: Supervisor) -> None:
        while True:
            supervisor.beat("promises")
            self._extender.take_back()
            await asyncio.sleep(_TAKE_BACK_SECONDS)

    async def _listen(self, runner: web.AppRunner) -> None:
        host, port = self._options.host, self._options.port
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as err:
            raise ListenError(
                f"cannot listen on {host}:{port}: {err.strerror or err}; choose another "
                "--server-bind-port, or stop the program that has this one"
            ) from err
        found = runner.addresses[0]
        self.address = f"{host}:{found[1]}"
        _logger.info("scheduler.listening", address=self.address, version=__version__)

    # -- HTTP --------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/scheduler/filter", self._filter)
        application.router.add_post("/scheduler/bind", self._bind)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/version", self._version)
        return application

    async def _filter(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self.is_ready:
            return _json(msgspec.json.encode(FilterResult(error=_NOT_READY)))
        return _json(self._extender.filter(body))

    async def _bind(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self.is_ready:
            return _json(msgspec.json.encode(BindingResult(_NOT_READY)))
        return _json(await self._extender.bind(body))

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self.is_ready
        return web.Response(
            text="ok\n" if ready else _NOT_READY + "\n", status=200 if ready else 503
        )

    async def _version(self, _: web.Request) -> web.Response:
        return _json(json.dumps({"version": __version__}).encode())


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
