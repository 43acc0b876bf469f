"""The HTTP servers: metrics and probes for every client (:9394), debug for clients on the node
(127.0.0.1:9395), and the metrics of programs that the agent replaces, such as the monitor beside a
device plugin, at the addresses that these had.

Built by `agent`, which starts it after the first registrations (`agent/late_web.py`) and stops it
last. It owns its sockets and nothing else. Every answer is rendered from one `AgentStatus` without
an await, so no request can see a half-changed state, or hold up the event loop by waiting.

Each error is answered with one JSON line that has the remedy. Tracebacks stay in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from vgpu_agent import log
from vgpu_agent.errors import AgentError
from vgpu_agent.web import debug, page, probes, views
from vgpu_agent.web.address import STATE_HEADER, Address, bind, parse
from vgpu_agent.web.connections import Connections, Viewers, bounded_by_descriptors
from vgpu_agent.web.dashboard import node as dashboard_content
from vgpu_agent.web.dashboard import stream
from vgpu_agent.web.exporter import (
    SCRAPED,
    Exporter,
    Scrapes,
    certificate,
    review_without_api_server,
)
from vgpu_agent.web.metrics import Exposition, exported

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    from vgpu_agent.families.spec import ExporterOptions, FamilySpec
    from vgpu_agent.status import AgentStatus
    from vgpu_agent.web.exporter import Reviews
    from vgpu_agent.web.probes import Verdict

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Probe = Callable[..., Verdict]

Answer = TypeVar("Answer")

_logger = log.get(__name__)
# the page's own files, by path: content type and content
_FILES = {
    f"/dashboard.{ending}": (
        kind,
        Path(dashboard_content.__file__).with_name(f"dashboard.{ending}").read_bytes(),
    )
    for ending, kind in (("css", "text/css"), ("js", "text/javascript"))
}
# where another address of the agent lacks one of these, its error names the public address
_PUBLIC_PATHS = ("/", "/healthz", "/livez", "/metrics", "/readyz")
# the time limit of the request, which the handler of a stream lifts
_TIME_LIMIT = web.RequestKey("time_limit", asyncio.Timeout)
# For the first seconds after the start, how often a stream asks whether the ledger has been read.
_FIRST_READING_SECONDS, _LOOK_SECONDS = 10.0, 0.5
_LONGEST_ECHO = 120  # characters of a wrong path that an error repeats
_MAX_CONNECTIONS, _MAX_DEBUG_CONNECTIONS = 256, 32
# Requests over one connection: this many at once, then this many a second. A scraper that keeps its
# connection open sends one every few seconds.
_REQUESTS_AT_ONCE, _REQUESTS_A_SECOND = 20, 10.0
_MAX_REQUESTS = 1000  # over one connection, which is then closed
_LONGEST_LINE_BYTES = 8190  # of a request line or a header; paths and queries of ours are short
_MAX_HEADERS = 64
# The limits of `KeptAnswers`, because any client on the network may ask for /metrics in a loop.
_PART_OF_TIME = 0.05  # the part of the event loop's time that computing answers may take
_BURST_SECONDS = 0.5  # the computing that is possible at once: dozens of answers
_KEPT_SECONDS = 5.0
_MAX_KEPT = 16


class WebServer:
    """The HTTP servers; use it as an async context, or `start` and `stop`.

    Args:
        status: returns the snapshot from which an answer is made; cheap, and never blocks.
        listen: address of metrics and probes, ``:9394``; port 0 takes a free one.
        debug_listen: address of ``/debug``, ``127.0.0.1:9395``; port 0 as in ``listen``.
        max_body_bytes: largest request body that is read.
        request_timeout_seconds: how long a request may take to arrive, and how long a silent
            connection is kept.
        shutdown_seconds: how long `stop` waits for answers under way.
        pod_names_everywhere: the public address shows names of pods, too; otherwise only the debug
            address does.
        clock: unix seconds; a test passes its own.
        exporters: families that have metrics at an address of their own, and the options of that
            address.
        reviews: asks the API server whether a scraper may get the metrics at such an address; by
            default there is none to ask, and no scraper may.
    """

    def __init__(
        self,
        status: Callable[[], AgentStatus],
        *,
        listen: str,
        debug_listen: str,
        max_body_bytes: int,
        request_timeout_seconds: float,
        shutdown_seconds: float,
        pod_names_everywhere: bool = True,
        clock: Callable[[], float] = time.time,
        exporters: Sequence[tuple[FamilySpec, ExporterOptions]] = (),
        reviews: Reviews = review_without_api_server,
    ) -> None:
        self._status = status
        self._listen, self._debug_listen = listen, debug_listen
        self._max_body_bytes = max_body_bytes
        self._request_timeout_seconds = request_timeout_seconds
        self._shutdown_seconds = shutdown_seconds
        self._clock = clock
        self._pod_names_everywhere = pod_names_everywhere
        self._exposition = Exposition(status, clock=clock)
        self._public_exposition = Exposition(status, pod_names=pod_names_everywhere, clock=clock)
        self._exporters = [
            Exporter(
                options,
                Exposition(
                    status, pod_names=pod_names_everywhere, clock=clock, metrics=exported(family)
                ),
            )
            for family, options in exporters
        ]
        self._reviews = reviews
        self.exporter_addresses: list[str] = []
        self._kept = KeptAnswers()
        # apart, because clients can invent any number of searches
        self._searches = KeptAnswers()
        self._dashboard = stream.Dashboard(lambda: dashboard_content.parts(*self._snapshot()))
        self._viewers = Viewers()
        self._rate_limits: weakref.WeakKeyDictionary[asyncio.Transport, _RateLimit] = (
            weakref.WeakKeyDictionary()
        )
        self._listening: list[tuple[web.AppRunner, Connections]] = []
        self._public_address = self._debug_address = Address("", 0)
        self._started_at = 0.0  # on the event loop's clock
        self._ledger_was_read = False

    @property
    def public_address(self) -> str:
        """The address that serves metrics and probes, once started. Its port is never 0."""
        return str(self._public_address)

    @property
    def debug_address(self) -> str:
        """The address that serves ``/debug``, once started."""
        return str(self._debug_address)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on all addresses.

        Raises:
            ListenError: one of them cannot be listened on; the message names it, the cause and the
                remedy. Nothing is left listening.
        """
        self._started_at = asyncio.get_running_loop().time()
        try:
            # Debug first: the public 404 page names the debug port.
            self._debug_address = await self._serve(
                self._debug_application(),
                self._debug_listen,
                flag="--debug-listen",
                max_connections=_MAX_DEBUG_CONNECTIONS,
            )
            self._public_address = await self._serve(
                self._public_application(),
                self._listen,
                flag="--listen",
                max_connections=_MAX_CONNECTIONS,
            )
            for exporter in self._exporters:
                address = await self._serve(
                    self._exporter_application(exporter),
                    exporter.options.listen,
                    flag=exporter.options.flag,
                    max_connections=_MAX_DEBUG_CONNECTIONS,
                    tls=await asyncio.to_thread(certificate, exporter.options),
                )
                self.exporter_addresses.append(str(address))
        except BaseException:
            await self.stop()
            raise
        _logger.info(
            "web.listening",
            listen=self.public_address,
            debug_listen=self.debug_address,
            exporters=self.exporter_addresses,
        )

    async def stop(self) -> None:
        """Stop listening, finish answers under way (at most ``shutdown_seconds``), close every
        connection; may be called twice.
        """
        while self._listening:
            runner, connections = self._listening.pop()
            self._viewers.end_all()
            connections.stop()
            await runner.cleanup()

    async def _serve(
        self,
        application: web.Application,
        listen: str,
        *,
        flag: str,
        max_connections: int,
        tls: Callable[[], Awaitable[ssl.SSLContext]] | None = None,
    ) -> Address:
        """Serve ``application`` at the address ``listen``; return that with the port it has got.

        Args:
            application: the handlers by path.
            listen: the configured address.
            flag: the command line flag that sets it, for the remedy in an error.
            max_connections: the most connections at once.
            tls: returns the TLS context for each new connection; None for plain HTTP.
        """
        runner = web.AppRunner(
            application,
            access_log=None,
            logger=_library_logger(),
            keepalive_timeout=self._request_timeout_seconds,
            lingering_time=self._request_timeout_seconds,
            shutdown_timeout=self._shutdown_seconds,
            max_line_size=_LONGEST_LINE_BYTES,
            max_field_size=_LONGEST_LINE_BYTES,
            max_headers=_MAX_HEADERS,
        )
        wanted = parse(listen)
        sock = await bind(wanted, flag=flag)
        # Each connection inherits this option. Without it, a client that does not read its answer
        # would keep the connection forever, even after it was closed here (tcp(7)).
        sock.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            math.ceil(self._request_timeout_seconds * 1000),
        )
        address = Address(wanted.host, sock.getsockname()[1])
        try:
            await runner.setup()
        except BaseException:
            sock.close()
            raise
        connections = Connections(
            sock,
            cast("web.Server", runner.server),
            max_connections=bounded_by_descriptors(max_connections),
            tls=tls,
        )
        self._listening.append((runner, connections))
        connections.start()
        return address

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._guard], client_max_size=self._max_body_bytes
        )
        application.on_response_prepare.append(_harden)
        return application

    def _public_application(self) -> web.Application:
        application = self._application()
        if self._pod_names_everywhere:
            self._add_page(application)
        else:
            application.router.add_get("/", self._elsewhere)
        application.router.add_get("/metrics", self._metrics(self._public_exposition))
        application.router.add_get("/healthz", self._probe(probes.live))
        application.router.add_get("/livez", self._probe(probes.live))
        application.router.add_get("/readyz", self._probe(probes.ready))
        return application

    def _exporter_application(self, exporter: Exporter) -> web.Application:
        application = self._application()
        scrapes = Scrapes(exporter, reviews=self._reviews, clock=time.monotonic)
        application.router.add_get(SCRAPED, scrapes.answer)  # ``/metrics``
        application.router.add_get("/healthz", self._probe(probes.live))
        application.router.add_get("/readyz", self._probe(probes.ready))
        return application

    def _debug_application(self) -> web.Application:
        application = self._application()
        for entry in debug.PATHS:
            application.router.add_get(entry.path, self._debug(entry))
        # the first one is ``/debug/``, the list of all
        application.router.add_get("/debug", self._debug(debug.PATHS[0]))
        application.router.add_put("/debug/loglevel", self._put_log_level)
        if not self._pod_names_everywhere:
            self._add_page(application)
            application.router.add_get("/metrics", self._metrics(self._exposition))
        return application

    def _add_page(self, application: web.Application) -> None:
        application.router.add_get("/", self._page)
        application.router.add_get("/stream", self._stream, allow_head=False)
        for path in _FILES:
            application.router.add_get(path, self._file)

    def _snapshot(self) -> tuple[AgentStatus, float]:
        return self._status(), self._clock()

    async def _page(self, request: web.Request) -> web.Response:
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            return self._document(request.query.get("pod", "").strip())
        text = self._kept.answer("/", lambda: page.as_text(views.overview(*self._snapshot())))
        return web.Response(text=text)

    def _document(self, searched: str) -> web.Response:
        searched = searched[: dashboard_content.LONGEST_SEARCH]
        status, found = 200, ""
        if searched:
            try:
                found = self._searches.answer(
                    searched,
                    lambda: dashboard_content.answer(*self._snapshot(), searched),
                    may_refuse=True,
                )
            except TooBusyError as err:
                status, found = 503, f"<p>{err}</p>"
        self._dashboard.refresh()
        text = dashboard_content.document(self._dashboard, self._clock(), searched, found)
        return web.Response(status=status, text=text, content_type="text/html")

    async def _file(self, request: web.Request) -> web.Response:
        kind, content = _FILES[request.path]
        return web.Response(body=content, content_type=kind, charset="utf-8")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        request[_TIME_LIMIT].reschedule(None)  # it lasts as long as somebody looks
        await self._until_ledger_is_read()
        return await stream.answer(
            request,
            self._dashboard,
            self._viewers,
            patience_seconds=self._request_timeout_seconds,  # for a viewer to read a message
        )

    async def _until_ledger_is_read(self) -> None:
        """Wait, soon after the start only, until the ledger has been compared with the kubelet's
        records. Before that, no pod is known: a page that somebody has looked at since before a
        restart would lose all its pods for a moment, and with them the focus.
        """
        until = self._started_at + _FIRST_READING_SECONDS
        while not (self._is_ledger_read() or self._viewers.stopping):
            if asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_ledger_read(self) -> bool:
        if not self._ledger_was_read:
            # kept, because any client on the network may open streams
            self._ledger_was_read = self._kept.answer(
                "ledger", lambda: self._status().ledger.verified_at > 0
            )
        return self._ledger_was_read

    async def _elsewhere(self, _: web.Request) -> web.Response:
        return _error(
            403,
            f"this page names pods, so it is served at {self.debug_address} only (web.podNames: "
            "debug)",
        )

    def _metrics(self, exposition: Exposition) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            content_type, render = exposition.negotiate(
                ",".join(request.headers.getall(hdrs.ACCEPT, []))
            )
            body = self._kept.answer((exposition, content_type), render)
            return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

        return answer

    def _probe(self, probe: Probe) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            verbose = "verbose" in request.query
            verdict = self._kept.answer(
                (probe, verbose), lambda: probe(*self._snapshot(), verbose=verbose)
            )
            text = verdict.text if self._pod_names_everywhere else verdict.without_reasons
            return web.Response(status=200 if verdict.ok else 503, text=text)

        return answer

    def _debug(self, entry: debug.DebugPath) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            parsed = debug.parse_request(
                *self._snapshot(), request.query.items(), entry.parameters, entry.path
            )
            layout = debug.layout(parsed)
            found = entry.answer(parsed)
            if entry.as_text is not None and "text" in parsed.query:
                answer = web.Response(text=entry.as_text(found, layout))
            else:
                answer = _json(200, found, pretty="pretty" in parsed.query)
            if isinstance(found, views.Overview):
                # how the node is, from which `vgpu-agent status` makes its exit status
                answer.headers[STATE_HEADER] = found.condition
            return answer

        return answer

    async def _put_log_level(self, request: web.Request) -> web.Response:
        return _json(200, debug.change_log_level(await request.read()))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn any failure of one request into one JSON line."""
        try:
            await self._limit_rate(request)
            self._refuse_unwanted_body(request)
            async with asyncio.timeout(self._request_timeout_seconds) as time_limit:
                request[_TIME_LIMIT] = time_limit
                return self._close_after_last(request, await handler(request))
        except debug.BadRequestError as err:
            return _error(400, str(err))
        except web.HTTPException as err:
            return self._http_error(request, err)
        except TimeoutError:
            return _error(
                408, f"the request did not arrive within {self._request_timeout_seconds:g} s"
            )
        except Exception as err:
            # a bug in one answer must not show its traceback to clients, nor end the connection
            # without an answer
            _logger.error("web.failed", method=request.method, path=request.path, exc_info=err)
            return _error(
                500, "this answer failed inside the agent; its log has the reason (web.failed)"
            )

    async def _limit_rate(self, request: web.Request) -> None:
        """Delay the answers on a connection that sends requests in a loop."""
        if (transport := request.transport) is None:
            return
        rate_limit = self._rate_limits.setdefault(transport, _RateLimit())
        if delay := rate_limit.delay_seconds(asyncio.get_running_loop().time()):
            await asyncio.sleep(delay)

    def _close_after_last(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        transport = request.transport
        if transport is not None and self._rate_limits[transport].requests >= _MAX_REQUESTS:
            response.force_close()
        return response

    def _refuse_unwanted_body(self, request: web.Request) -> None:
        """Refuse a body that is too large, or that no handler reads. Only PUT reads one, and
        aiohttp checks the size only while the body is read.
        """
        size = request.content_length
        if size is not None and size > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, size)
        if request.method in ("GET", "HEAD") and request.body_exists:
            raise debug.BadRequestError(
                f"{request.method} {_shortened(request.path)} takes no request body; send it "
                "without one"
            )

    def _http_error(self, request: web.Request, err: web.HTTPException) -> web.Response:
        path = _shortened(request.path)
        match err:
            case web.HTTPRequestEntityTooLarge():
                return _error(
                    413,
                    f"the request body is too large; at most {self._max_body_bytes} bytes are read",
                )
            case web.HTTPMethodNotAllowed():
                allowed = sorted(err.allowed_methods)
                refusal = _error(
                    405,
                    f"{_shortened(request.method)} is not possible on {path}; use "
                    f"{_alternatives(allowed)}",
                )
                refusal.headers[hdrs.ALLOW] = ", ".join(allowed)
                return refusal
            case web.HTTPNotFound():
                known = sorted({resource.canonical for resource in request.app.router.resources()})
                elsewhere = (
                    f"; /debug is served at {self.debug_address}"
                    if path.startswith("/debug") and "/metrics" in known
                    else ""
                )
                elsewhere = elsewhere or (
                    f"; it is served at {self.public_address}"
                    if request.path in _PUBLIC_PATHS
                    else ""
                )
                return _json(404, {"error": f"there is no {path} here{elsewhere}", "paths": known})
            case _:
                return _error(err.status, err.reason)


class TooBusyError(AgentError):
    """An answer would take more of the event loop's time than answers may take."""


class KeptAnswers:
    """A cache of the last answers, which limits the computing time. A new answer is computed only
    while computing takes a small part of the time; otherwise a caller gets the last answer.

    State: the last answer to each kind of request, for a few seconds; the computing time that may
    be spent (`_seconds_left`) at the moment `_counted_at`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: dict[Hashable, tuple[float, Any]] = {}
        self._seconds_left, self._counted_at = _BURST_SECONDS, clock()

    def answer(
        self, key: Hashable, make: Callable[[], Answer], *, may_refuse: bool = False
    ) -> Answer:
        """Return the result of ``make``, or the kept one for the same ``key``.

        Args:
            key: what is asked.
            make: computes it.
            may_refuse: clients can invent any number of keys, so that keeping their answers
                does not bound the time that they take.

        Raises:
            TooBusyError: with ``may_refuse``, while there is neither time nor a kept answer.
        """
        began = self._clock()
        self._seconds_left = min(
            _BURST_SECONDS, self._seconds_left + (began - self._counted_at) * _PART_OF_TIME
        )
        self._counted_at = began
        made_at, last = self._last.get(key, (float("-inf"), None))
        if self._seconds_left <= 0 and began - made_at < _KEPT_SECONDS:
            # what is kept under a key is what its `make` returned
            return last  # type: ignore[no-any-return]
        if self._seconds_left <= 0 and may_refuse:
            raise TooBusyError("There are too many searches now; try again in some seconds.")
        made = make()
        self._seconds_left -= self._clock() - began
        if key not in self._last and len(self._last) >= _MAX_KEPT:
            self._last.clear()
        self._last[key] = (began, made)
        return made


class _RateLimit:
    """The rate limit of one connection.

    State: the requests so far, and how many might be answered without delay at the moment
    `_counted_at`; less than 0 while one waits.
    """

    __slots__ = ("_counted_at", "_requests_left", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self._requests_left, self._counted_at = float(_REQUESTS_AT_ONCE), float("-inf")

    def delay_seconds(self, now: float) -> float:
        """Return the seconds by which to delay the request that arrived at ``now``; mostly 0."""
        self.requests += 1
        self._requests_left = (
            min(
                float(_REQUESTS_AT_ONCE),
                self._requests_left + (now - self._counted_at) * _REQUESTS_A_SECOND,
            )
            - 1
        )
        self._counted_at = now
        return max(0.0, -self._requests_left / _REQUESTS_A_SECOND)


async def _harden(_: web.Request, response: web.StreamResponse) -> None:
    """Set the security headers of every answer: no server version, no guessing of content types, no
    caching, no scripts and styles but the page's own files, no frames.
    """
    response.headers.popall(hdrs.SERVER, None)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers[hdrs.CACHE_CONTROL] = "no-store"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Content-Security-Policy"] = (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def _json(status: int, answer: object, *, pretty: bool = False) -> web.Response:
    return web.Response(
        status=status, body=debug.to_json(answer, pretty=pretty), content_type="application/json"
    )


def _error(status: int, text: str) -> web.Response:
    return _json(status, {"error": text})


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}…"


def _alternatives(words: list[str]) -> str:
    """``A``, ``A or B``, ``A, B or C``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


class _OneLine(logging.Filter):
    """A filter that turns aiohttp's report of bytes that are not HTTP, an error with a traceback,
    into one line of our log, because the fault is the client's.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        if not isinstance(cause, HttpProcessingError):
            return True
        _logger.info("web.bad_request", error=_shortened(" ".join(str(cause).split())))
        return False


def _library_logger() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.aiohttp")
    if not logger.filters:
        logger.addFilter(_OneLine())
    return logger
