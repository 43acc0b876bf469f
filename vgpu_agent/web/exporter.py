"""The metrics of a program that the agent replaces, such as the monitor beside a device plugin, at
the address where that program had them.

`web.server` serves one such address for each family that has such metrics and whose settings ask
for it. Scrapes that come too soon get the last answer. Where scrapers need permission, the API
server is asked about a token again when its last answer is too old. All these requests together
are limited to `_REVIEWS_A_SECOND`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING, Protocol

import msgspec
from aiohttp import hdrs, web

from vgpu_agent import log
from vgpu_agent.errors import ClusterError
from vgpu_agent.web.certificate import Certificate

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from vgpu_agent.families.spec import ExporterOptions
    from vgpu_agent.web.metrics import Exposition

_logger = log.get(__name__)

SCRAPED = "/metrics"  # the path that scrapers ask for
# How long the API server's answer about a token is cached: one that allows, one that refuses.
_KNOWN_SECONDS, _REFUSED_SECONDS = 60.0, 10.0
_MAX_TOKENS = 64
_LONGEST_TOKEN = 8192
# Any client on the network may send unknown tokens. So the API server is asked about this many at
# once, and then about this many a second.
_REVIEWS_AT_ONCE, _REVIEWS_A_SECOND = 10.0, 2.0


class Reviews(Protocol):
    """The API server's decision about a scraper: a TokenReview and a SubjectAccessReview."""

    async def __call__(self, token: str, path: str) -> bool:
        """Tell whether the owner of ``token`` may get ``path``.

        Raises:
            ClusterError: there is no answer at the moment.
        """
        ...


class Exporter(msgspec.Struct, frozen=True):
    """An address, and the metrics that it serves.

    Attributes:
        options: the address and how it is served.
        exposition: the metrics.
    """

    options: ExporterOptions
    exposition: Exposition


class Scrapes:
    """Answers for one exporter.

    State: the last answer by content type, and the API server's answers about tokens, each for a
    short time.
    """

    def __init__(self, exporter: Exporter, reviews: Reviews, clock: Callable[[], float]) -> None:
        self._options, self._exposition = exporter.options, exporter.exposition
        self._reviews, self._clock = reviews, clock
        # by content type: when it was made, by the clock, and the body
        self._last: dict[str, tuple[float, bytes]] = {}
        # by the hash of the token: until when, and whether it is allowed
        self._known: dict[bytes, tuple[float, bool]] = {}
        # how many requests to the API server were left, and when that was
        self._reviews_left, self._counted_at = _REVIEWS_AT_ONCE, clock()
        self._asking = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one scrape."""
        if self._options.authorised and (refusal := await self._refusal(request)) is not None:
            return refusal
        accept = ",".join(request.headers.getall(hdrs.ACCEPT, []))
        content_type, render = self._exposition.negotiate(accept)
        now = self._clock()
        made_at, body = self._last.get(content_type, (float("-inf"), b""))
        headers = {str(hdrs.CONTENT_TYPE): content_type}
        if now - made_at < self._options.min_interval_seconds:
            headers["X-Rate-Limited"] = "true"
        else:
            body = render()
            self._last[content_type] = (now, body)
        return web.Response(body=body, headers=headers)

    async def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a scraper that may not get the metrics; None for one that may."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > _LONGEST_TOKEN:
            return _refused(401, "send the token of a service account: Authorization: Bearer TOKEN")
        key = hashlib.sha256(token.encode()).digest()
        # A known token does not wait for the API server's answer about unknown ones.
        if (allowed := self._remembered(key)) is not None:
            return None if allowed else _refused(403, f"this token may not get {SCRAPED}")
        async with self._asking:
            allowed = self._remembered(key)  # a request with the same token may have asked
            if allowed is None:
                if not self._may_ask():
                    return _refused(429, "too many unknown tokens; try again in a few seconds")
                try:
                    allowed = await self._reviews(token, SCRAPED)
                except ClusterError as err:
                    _logger.info("web.scraper_unknown", error=str(err))
                    return _refused(503, "the API server cannot be asked about the token now")
                self._remember(key, allowed=allowed)
        return None if allowed else _refused(403, f"this token may not get {SCRAPED}")

    def _remembered(self, key: bytes) -> bool | None:
        until, allowed = self._known.get(key, (0.0, False))
        return allowed if self._clock() < until else None

    def _remember(self, key: bytes, *, allowed: bool) -> None:
        self._known.pop(key, None)
        seconds = _KNOWN_SECONDS if allowed else _REFUSED_SECONDS
        self._known[key] = (self._clock() + seconds, allowed)
        while len(self._known) > _MAX_TOKENS:
            refused = (each for each, (_, allowed) in self._known.items() if not allowed)
            del self._known[next(refused, next(iter(self._known)))]

    def _may_ask(self) -> bool:
        now = self._clock()
        gained = (now - self._counted_at) * _REVIEWS_A_SECOND
        self._reviews_left, self._counted_at = (
            min(_REVIEWS_AT_ONCE, self._reviews_left + gained),
            now,
        )
        if self._reviews_left < 1:
            return False
        self._reviews_left -= 1
        return True


def certificate(options: ExporterOptions) -> Callable[[], Awaitable[ssl.SSLContext]] | None:
    """Return the function that gives each connection its TLS context; None for plain HTTP.

    Raises:
        ListenError: the certificate cannot be used.
    """
    if not options.certificate_file:
        return None
    return Certificate(
        options.certificate_file,
        options.key_file,
        listen=options.listen,
        flags=options.tls_flags,  # the settings of the two files, for messages
        clock=time.monotonic,
    ).context


async def review_without_api_server(token: str, path: str) -> bool:
    """Raise an error for each scraper: the `Reviews` of an agent without an API server."""
    del token, path
    raise ClusterError("there is no API server to ask")


def _refused(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
