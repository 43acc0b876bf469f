"""The process of the webhook: the HTTPS server for the API server, its certificate, and a watch of
Nodes (vgpu-manager §6).

All run on one event loop. A review, the API server's question about one pod (AdmissionReview), is
answered without waiting for anything but its own body. The server keeps no state that a review
depends on, except the size of the largest Node, which may be missing. So any number of replicas can
run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import TYPE_CHECKING, cast

from aiohttp import web

from vgpu_agent import __version__, log
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.admission import LargestNode
from vgpu_agent.journal import Journal
from vgpu_agent.web.address import Address, bind
from vgpu_agent.web.certificate import Certificate
from vgpu_agent.web.connections import Connections, bounded_by_descriptors
from vgpu_agent.webhook.bodies import Bodies
from vgpu_agent.webhook.options import CertificateFiles, OwnCertificateOptions
from vgpu_agent.webhook.review import MUTATE, VALIDATE, Reviewer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from vgpu_agent.cluster.credentials import Credentials
    from vgpu_agent.families.admission import AdmissionFamily
    from vgpu_agent.nodes import Node
    from vgpu_agent.webhook.options import Options
    from vgpu_agent.webhook.own_certificate import OwnCertificate

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = log.get(__name__)

_MAX_CONNECTIONS = 256
# The API server closes connections that it has not used for 90 seconds.
_KEEP_ALIVE_SECONDS = 120.0
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 1.0, 30.0
_STUCK_SECONDS = 120.0  # after the time within which a watch should have given a beat
# A round of the certificate is some calls, each of which may take its longest time, and a pause.
_STUCK_ROUND_SECONDS = 360.0
_TEXT = "text/plain; version=0.0.4"


async def run(options: Options, family: AdmissionFamily, credentials: Credentials | None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        options: the options of the webhook.
        family: the rules for new pods.
        credentials: for the API server; None where there are none.

    Raises:
        ConfigError: the options need the API server, and there are no credentials.
        CertificateError: the names of the Service cannot be those of a certificate.
        ListenError: the port cannot be listened on, or the files of the certificate cannot be used.
    """
    await Service(options, family, credentials).run()


class _NodeSizes:
    """The receiver of a watch of Nodes.

    State: the largest amounts that were seen since the start. They include removed Nodes, which may
    come back.
    """

    def __init__(self, family: AdmissionFamily) -> None:
        self._family = family
        self.seen = LargestNode()

    def replace(self, items: Iterable[Node], /) -> None:
        """Take note of all Nodes that there are."""
        for item in items:
            self.put(item)

    def put(self, item: Node, /) -> None:
        """Take note of a Node that was added or changed."""
        # `joined`: the larger of each amount
        self.seen = self.seen.joined(self._family.size_of(item.annotations))

    def remove(self, item: Node, /) -> None:
        """Ignore that a Node was deleted."""


class Service:
    """The running webhook; use `run`.

    Attributes:
        address: ``host:port``, once it listens.
    """

    def __init__(
        self, options: Options, family: AdmissionFamily, credentials: Credentials | None
    ) -> None:
        self._options = options
        self._journal = Journal()  # only its log lines are read
        self._reviewer = Reviewer(
            family,
            journal=self._journal,
            largest_node=self._largest_node,
            pinned=options.pinned,  # what becomes of a pod's spec.nodeName
        )
        self._client = ApiClient(credentials) if credentials is not None else None
        self._sizes_of_nodes = _NodeSizes(family)
        self._nodes: Reflector[Node] | None = None
        self._own_certificate: OwnCertificate | None = None
        if options.watches_nodes:
            self._nodes = Reflector(
                self._api("--watch-nodes"),
                Scope(what="all Nodes", path="/api/v1/nodes", field_selector=""),
                decode.node,
                self._sizes_of_nodes,
                journal=self._journal,
            )
        if isinstance(options.certificate, OwnCertificateOptions):
            # It imports the library cryptography, which a certificate in files does not need.
            from vgpu_agent.webhook.own_certificate import OwnCertificate  # noqa: PLC0415

            self._own_certificate = OwnCertificate(
                options.certificate, self._api("--certificate-secret"), journal=self._journal
            )
        self._bodies = Bodies(most_bytes=options.max_body_bytes, seconds=options.body_seconds)
        self._stopping = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self.address = ""

    def _api(self, flag: str) -> ApiClient:
        if self._client is None:
            raise ConfigError(
                [f"{flag} needs the API server; run in a pod with a token, or give --kubeconfig"]
            )
        return self._client

    def _largest_node(self) -> LargestNode:
        """Return the largest known amounts; zeros until all Nodes have been listed."""
        # the operator's word: the number of GPUs of the largest Node that may come; 0: none given
        stated = self._options.assumed_largest_node
        # with `is_limit`, a request for more is refused, and not only warned of
        limit = LargestNode(gpus=stated, is_limit=stated > 0)
        if self._nodes is None:
            return limit
        return (
            self._sizes_of_nodes.seen.joined(limit)
            if self._nodes.synced.is_set()
            else LargestNode()
        )

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    @property
    def trouble(self) -> str:
        """The reason why the API server should not call this replica; empty where it may."""
        if self._stopping.is_set():
            return "the webhook is stopping"
        return self._own_certificate.trouble if self._own_certificate is not None else ""

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Raises:
            ListenError: the port cannot be listened on, or the files of the certificate cannot be
                used.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            shutdown_timeout=self._options.stop_seconds,
            auto_decompress=False,  # a small body could become a large one
        )
        connections: Connections | None = None
        try:
            async with Supervisor(
                backoff_min_seconds=_BACKOFF_MIN_SECONDS, backoff_max_seconds=_BACKOFF_MAX_SECONDS
            ) as supervisor:
                self._supervisor = supervisor
                self._start_loops(supervisor)
                connections = await self._listen(runner)
                await self._stopping.wait()
                # goes on answering until the Service sends no calls here any more
                await asyncio.sleep(self._options.drain_seconds)
        finally:
            if connections is not None:
                connections.stop()
            await runner.cleanup()
            if self._client is not None:
                await self._client.close()

    def _start_loops(self, supervisor: Supervisor) -> None:
        nodes, own = self._nodes, self._own_certificate
        if nodes is not None:
            supervisor.start(
                "nodes",
                lambda: nodes.run(lambda: supervisor.beat("nodes")),
                # the longest time between two beats of a healthy watch, and some more
                stuck_after_seconds=nodes.longest_silence_seconds + _STUCK_SECONDS,
            )
        if own is not None:
            supervisor.start(
                "certificate",
                lambda: own.run(lambda: supervisor.beat("certificate")),
                stuck_after_seconds=_STUCK_ROUND_SECONDS,
            )

    async def _listen(self, runner: web.AppRunner) -> Connections:
        wanted = Address(self._options.host, self._options.port)
        tls = await self._tls(str(wanted))
        listener = await bind(wanted, flag="--server-bind-port")  # the flag is for messages
        try:
            await runner.setup()
        except BaseException:
            listener.close()
            raise
        # `reachable`: 127.0.0.1 in place of all addresses of the machine
        self.address = str(Address(wanted.host, listener.getsockname()[1]).reachable)
        # `bounded`: fewer where this process may open few files
        connections = Connections(
            listener,
            cast("web.Server", runner.server),
            max_connections=bounded_by_descriptors(_MAX_CONNECTIONS),
            tls=tls,
        )
        connections.start()
        _logger.info("webhook.listening", address=self.address, version=__version__)
        return connections

    async def _tls(self, address: str) -> Callable[[], Awaitable[ssl.SSLContext]]:
        """Return the function that gives each new connection its TLS context."""
        if self._own_certificate is not None:
            return self._own_certificate.context
        files = cast("CertificateFiles", self._options.certificate)
        certificate = await asyncio.to_thread(
            Certificate,
            files.certificate,
            files.key,
            # the address and the flags are for messages
            listen=address,
            flags="--cert-dir, --tls-cert-name and --tls-key-name",
            clock=time.monotonic,
        )
        return certificate.context

    # -- HTTP --------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        application = web.Application()
        verbs = ((MUTATE, self._reviewer.mutate), (VALIDATE, self._reviewer.validate))
        for verb, answer in verbs:
            application.router.add_post(f"/pods/{verb}", self._reviewed(verb, answer))
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/version", self._version)
        return application

    def _reviewed(self, verb: str, answer: Callable[[bytes], bytes]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            client = request.remote or ""
            try:
                body = await self._bodies.read(request)
            except TimeoutError:
                self._reviewer.too_slow(verb, client)
                raise web.HTTPRequestTimeout(text="the review did not arrive in time") from None
            if body.whole:  # not too large
                found = _json(answer(body.content))
            else:
                most = self._options.max_body_bytes
                found = _json(self._reviewer.too_large(verb, body.content, most, client))
            # `ended`: the client has sent all of it
            if self._stopping.is_set() or not body.ended:
                found.force_close()  # the next call goes to another replica
            return found

        return handle

    async def _healthz(self, _: web.Request) -> web.Response:
        reports, now = self._supervisor.reports if self._supervisor else (), time.time()
        if stuck := [report.name for report in reports if report.stuck_for(now)]:
            return web.Response(text=f"no heartbeat of: {', '.join(stuck)}\n", status=503)
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        trouble = self.trouble
        return web.Response(text=f"{trouble or 'ok'}\n", status=503 if trouble else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json(json.dumps({"version": __version__}).encode())

    async def _metrics(self, _: web.Request) -> web.Response:
        text = "".join(f"{line}\n" for line in self._exposition())
        return web.Response(text=text, headers={"Content-Type": _TEXT})

    def _exposition(self) -> Iterator[str]:
        """Yield the lines of the metrics; no label has a character that must be escaped."""
        yield "# HELP vgpu_agent_webhook_reviews_total Reviews answered, by verb and outcome."
        yield "# TYPE vgpu_agent_webhook_reviews_total counter"
        for (verb, outcome), count in sorted(self._reviewer.counts.items()):
            labels = f'verb="{verb}",outcome="{outcome}"'
            yield f"vgpu_agent_webhook_reviews_total{{{labels}}} {count}"
        yield "# HELP vgpu_agent_webhook_ready 1 where the API server may call this replica."
        yield "# TYPE vgpu_agent_webhook_ready gauge"
        yield f"vgpu_agent_webhook_ready {0 if self.trouble else 1}"
        if self._own_certificate is not None:
            name = "vgpu_agent_webhook_certificate_expires_timestamp_seconds"
            yield f"# HELP {name} When the certificate that the webhook has made expires."
            yield f"# TYPE {name} gauge"
            yield f"{name} {self._own_certificate.expires_at:.0f}"


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
