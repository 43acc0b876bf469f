"""The present state of the dashboard's page, and the stream of its changes for browsers that show
it.

The state is rendered when somebody looks, at most once in `REFRESH_SECONDS`, and is the same for
all viewers. Each viewer gets the changes since the version that it has. So a slow one skips
versions, nothing is queued for it, and it is dropped when it takes no bytes for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import hdrs, web

from vgpu_agent import log
from vgpu_agent.web.dashboard.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.web.connections import Viewers

_logger = log.get(__name__)

# The use of GPUs is measured every five seconds, and a lost GPU should be seen soon. A rendering
# takes a few milliseconds.
REFRESH_SECONDS = 2.0
# After that long without a change a viewer gets an empty message. dashboard.js gives up on a stream
# that is silent for twice as long.
SILENCE_SECONDS = 15.0
# Bytes that wait for a viewer in this process. A message mostly has less than 5 KiB.
_MAX_WAITING_BYTES = 16 * 1024
# For this many earlier versions, the changes since them are kept until the next version. Viewers
# mostly have the last one. One that has, or invents, yet another version gets the whole page. So
# the computing that streams can cause is bounded, however often they are opened.
_MAX_KEPT_CHANGES = 16
_RECONNECT_MILLISECONDS = 3000
_NUMBER = re.compile(r"\d{1,12}\Z", re.ASCII)
# tells the page that there are too many viewers, so that it connects again later than usual
_FULL = b"event: full\ndata: \n\n"


class Dashboard:
    """The page as it was rendered last by ``render``, which returns its parts.

    State: its parts (pieces of HTML, by their ids), their version, and the version in which each of
    them changed last; the HTML and the changes that were asked for since. Versions have a random
    beginning, so that those of an earlier process mean nothing.
    """

    def __init__(
        self, render: Callable[[], Parts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._render, self._clock = render, clock
        self._parts = Parts()
        self._changed: dict[str, int] = {}
        self._version = 0
        self._rendered_at = float("-inf")
        self._process = secrets.token_hex(4)
        self._html: dict[str, str] = {}
        self._changes: dict[int, msgspec.Raw] = {}

    @property
    def version(self) -> str:
        """The version of the parts as last rendered."""
        return f"{self._process}-{self._version}"

    @property
    def due_in(self) -> float:
        """Seconds until `refresh` renders again."""
        return max(0.0, self._rendered_at + REFRESH_SECONDS - self._clock())

    def refresh(self) -> None:
        """Render the page again if that is due."""
        if self.due_in:
            return
        self._rendered_at = self._clock()
        parts = self._render()
        if differing := list(parts.differing(self._parts)):
            self._version += 1
            known = self._changed
            self._changed = {part: known.get(part, 0) for part in parts.ids}
            self._changed.update(dict.fromkeys(differing, self._version))
            self._html.clear()
            self._changes.clear()
        self._parts = parts

    def html(self, part: str) -> str:
        """Return the whole content of a part."""
        if part not in self._html:
            self._html[part] = self._parts.whole(part)
        return self._html[part]

    def message(self, since: str) -> bytes:
        """Return the changes since a version as one server-sent event; empty if there are none. All
        of the page has changed since a version of another process.
        """
        process, _, number = since.partition("-")
        is_ours = process == self._process and _NUMBER.match(number)
        known = int(number) if is_ours else 0
        if known >= self._version:
            return b""
        if known not in self._changes and len(self._changes) >= _MAX_KEPT_CHANGES:
            known = 0
        if known not in self._changes:
            changes = self._parts.changes(self._changed, known)
            self._changes[known] = msgspec.Raw(msgspec.json.encode(changes))
        return event(self.version, self._changes[known])


def event(version: str, changes: msgspec.Raw) -> bytes:
    """Return one server-sent event with the present time, in Unix milliseconds."""
    data = msgspec.json.encode({"now": int(time.time() * 1000), "changes": changes})
    return b"id: %b\ndata: %b\n\n" % (version.encode(), data)


async def answer(
    request: web.Request, dashboard: Dashboard, viewers: Viewers, *, patience_seconds: float
) -> web.StreamResponse:
    """Send the changes of the page until the viewer leaves.

    Args:
        request: its header ``Last-Event-ID`` or its parameter ``have`` names the version that the
            viewer has.
        dashboard: the page.
        viewers: all viewers, among which this one is counted. When there are too many, the oldest
            stream of the client with most is ended.
        patience_seconds: how long a viewer may take to read a message.
    """
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream"})
    response.force_close()
    have = request.headers.get("Last-Event-ID") or request.query.get("have", "")
    # `ended` is set when the server stops, or makes room for another viewer
    with viewers.one(request.remote or "") as ended:
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        transport.set_write_buffer_limits(high=_MAX_WAITING_BYTES)
        pending = b"retry: %d\n\n" % _RECONNECT_MILLISECONDS
        sent_at = float("-inf")
        try:
            while not transport.is_closing():
                dashboard.refresh()
                pending += dashboard.message(have)
                now = asyncio.get_running_loop().time()
                if not pending and now - sent_at >= SILENCE_SECONDS:
                    pending = event(dashboard.version, msgspec.Raw(b"{}"))
                if pending:
                    have, sent_at = dashboard.version, now
                    async with asyncio.timeout(patience_seconds):
                        await response.write(pending)
                    pending = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(dashboard.due_in):
                        await ended.wait()
                if ended.is_set():
                    if not viewers.stopping:
                        async with asyncio.timeout(patience_seconds):
                            await response.write(_FULL)
                    break
        except TimeoutError:
            client = request.remote or ""
            _logger.info("web.viewer_dropped", client=client, seconds=patience_seconds)
            transport.abort()
        except ConnectionError:
            pass  # the viewer has left
    return response
