"""The web server, which starts when the first registrations are over.

aiohttp and prometheus_client are a third of all that the agent imports, and the kubelet offers no
GPU before the agent has registered, so registrations come first. A start that waits for a driver or
the API server is shown all the same: the server waits for `_LONGEST_SECONDS` at most. Until then
connections are refused, which the startup probe tolerates.

Used by `composition`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING, Self

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.web.address import bind, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.status import AgentStatus
    from vgpu_agent.web.exporter import Reviews
    from vgpu_agent.web.server import WebServer

MAX_BODY_BYTES = 65536  # of a request
# How long one request may take before it is answered with an error.
REQUEST_TIMEOUT_SECONDS = 10.0
# How long a stop waits for answers under way.
SHUTDOWN_SECONDS = 10.0
_LONGEST_SECONDS = 1.0
_LOOK_SECONDS = 0.01


class LateWeb:
    """The web server, which begins to listen with `start`; use it as an async context manager.

    State: the server, None before `start`.
    """

    def __init__(
        self,
        status: Callable[[], AgentStatus],
        settings: Settings,
        reviews: Reviews | None = None,
    ) -> None:
        """Keep what the server needs. ``status`` returns the state of the agent; ``reviews`` asks
        the API server whether the owner of a scraper's token may GET a path, and is None where
        there is no API server to ask: then each such scraper gets an error.
        """
        self._status = status
        self._reviews = reviews
        # the families with metrics at an address of their own, like the program that each replaces
        self._exporters = [
            (family, options)
            for family in FAMILIES
            if family.exporter is not None
            and (options := family.exporter.options(settings)) is not None
        ]
        self._settings = settings
        self._server: WebServer | None = None

    @property
    def serves_replaced_metrics(self) -> bool:
        """Tell whether the metrics of programs that a family replaces are served, too."""
        return bool(self._exporters)

    async def __aenter__(self) -> Self:
        """Make sure, before anything is registered, that all addresses can be listened on.

        Raises:
            ListenError: one cannot.
        """
        for listen, flag in (
            (self._settings.debug_listen, "--debug-listen"),
            (self._settings.listen, "--listen"),
            *((options.listen, options.flag) for _, options in self._exporters),
        ):
            (await bind(parse(listen), flag=flag)).close()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            await self._server.stop()

    async def start(self, registered: Callable[[], bool]) -> None:
        """Serve once ``registered`` tells that the first registrations are over, or after the
        longest wait.

        Raises:
            ListenError: an address was taken in the meantime.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_SECONDS):
                # plugin servers come and go meanwhile, so there is no single event to wait for
                while not registered():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.to_thread(importlib.import_module, "vgpu_agent.web.server")
        # imported late: see the docstring of this module
        from vgpu_agent.web.exporter import review_without_api_server  # noqa: PLC0415
        from vgpu_agent.web.server import WebServer  # noqa: PLC0415

        settings = self._settings
        self._server = WebServer(
            self._status,
            listen=settings.listen,
            debug_listen=settings.debug_listen,
            max_body_bytes=MAX_BODY_BYTES,
            request_timeout_seconds=REQUEST_TIMEOUT_SECONDS,
            # True: `listen` shows the names of pods, too, as `debug_listen` always does
            pod_names_everywhere=settings.web.pod_names == "all",
            shutdown_seconds=SHUTDOWN_SECONDS,
            exporters=self._exporters,
            reviews=self._reviews or review_without_api_server,
        )
        await self._server.start()
