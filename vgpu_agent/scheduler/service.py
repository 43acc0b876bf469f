"""The process of the scheduler extender: watches of Nodes and pods, the extender, and the HTTP
server for kube-scheduler (vgpu-manager §5.1).

All run on one event loop, so the book needs no lock. A filter is answered without waiting for
anything. Until Nodes and pods have been listed once, filters are refused: the book would show cards
as free that are not.

Of several extenders behind one address, one leads (`leadership`), and the others answer the verbs
with 503, except dry runs, which keep no cards. An extender in one pod with its own kube-scheduler
needs no Lease: only the leading kube-scheduler calls its extender. In both cases a label of the
extender's pod may show whether it leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec
from aiohttp import web

from vgpu_agent import __version__, log
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.decode_scheduling import budget, with_facts
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Latest, Supervisor
from vgpu_agent.errors import AgentError, ClusterError, ListenError
from vgpu_agent.journal import Journal
from vgpu_agent.memory import freeze_objects
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.placement.nodes.budgets import Budgets
from vgpu_agent.scheduler.dry_run import FilterDryRun
from vgpu_agent.scheduler.extender import Extender
from vgpu_agent.scheduler.known_pods import KnownPods
from vgpu_agent.scheduler.leadership import Leadership, holder_of
from vgpu_agent.scheduler.messages import BindingResult, FilterResult
from vgpu_agent.scheduler.metrics import Metrics
from vgpu_agent.scheduler.pod_events import PodEvents
from vgpu_agent.scheduler.preemption import Preemption
from vgpu_agent.scheduler.web import OperatorEndpoints
from vgpu_agent.web.address import Address, bind
from vgpu_agent.web.certificate import Certificate
from vgpu_agent.web.connections import Connections, bounded_by_descriptors

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    from vgpu_agent.cluster.credentials import Credentials
    from vgpu_agent.families.scheduling import SchedulingFamily

_logger = log.get(__name__)

# kube-scheduler sends up to 5,000 names, or as many Nodes as fit (vgpu-manager §5.1).
MAX_BODY_BYTES = 7 * 1024 * 1024
_PROMISE_CHECK_SECONDS = 1.0  # the pause between two checks of promises, and of binds
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 1.0, 30.0
_STUCK_SECONDS = 30.0  # a loop without a sign of life for so long is reported as stuck
_STOP_SECONDS = 5.0
# the kubelet's probes, and a few scrapers
_MAX_PROBE_CONNECTIONS = 64
_MAX_EVENTS = 2048  # in the queue; a job of many pods raises one for each pod within seconds
_LEADER, _FOLLOWER = "leader", "follower"
# How often kube-scheduler's own Lease is read; its holder seldom changes.
_LEASE_READ_SECONDS = 2.0
_NOT_READY = (
    "the extender has not read all Nodes and pods yet; kube-scheduler will ask again in a moment"
)
_NO_BUDGETS = (
    "the extender has not read all PodDisruptionBudgets yet, so it names no victims; it needs the "
    "permission to list and watch them"
)

T = TypeVar("T")


class Lease(msgspec.Struct, frozen=True):
    """A Lease, and the identity of this extender.

    Attributes:
        namespace: of the Lease.
        name: of the Lease.
        identity: the holder's name while this extender leads; with ``is_schedulers`` the beginning
            of the name of the kube-scheduler in the same pod.
        is_schedulers: it is the Lease of kube-scheduler, which the extender only reads. Otherwise
            it is the Lease of the extenders.
    """

    namespace: str
    name: str
    identity: str
    is_schedulers: bool = False


class Options(msgspec.Struct, frozen=True):
    """The options of the extender.

    Attributes:
        host: the address to listen on.
        port: the port; 0 takes a free one.
        grace_seconds: how long cards are kept for a pod that is not bound.
        certificate_file: the certificate with its chain, in PEM; empty for plain HTTP.
        key_file: its private key, in PEM.
        certificate_seconds: how often both files are checked for a renewed certificate.
        lease: decides which of several extenders leads; None where there is only one.
        event_source: the component that events on pods name.
        pod_namespace: of the pod in which the extender runs.
        pod_name: its name; its label says whether the extender leads. Empty: no label is written.
        probe_port: a second port for probes and metrics alone, on all addresses, so that the
            kubelet and Prometheus reach them where ``host`` is a loopback address; None for none.
    """

    host: str = "127.0.0.1"
    port: int = 3456
    grace_seconds: float = 30.0
    certificate_file: str = ""
    key_file: str = ""
    certificate_seconds: float = 5.0
    lease: Lease | None = None
    event_source: str = "vgpu-scheduler"
    pod_namespace: str = ""
    pod_name: str = ""
    probe_port: int | None = None


class _Objects(Generic[T]):
    """The receiver of a watch that passes objects on and keeps only their keys.

    State: the keys of the present objects.
    """

    def __init__(
        self, key: Callable[[T], str], see: Callable[[T], None], forget: Callable[[str], None]
    ) -> None:
        self._key, self._see, self._forget = key, see, forget
        self._known: set[str] = set()

    def replace(self, items: Iterable[T], /) -> None:
        """Pass on ``items``, which are all objects that there are, and forget the others."""
        present = set()
        for item in items:
            present.add(self._key(item))
            self._see(item)
        for key in self._known - present:
            self._forget(key)
        self._known = present

    def put(self, item: T, /) -> None:
        """Pass on an object that was added or changed."""
        self._known.add(self._key(item))
        self._see(item)

    def remove(self, item: T, /) -> None:
        """Forget an object that was deleted."""
        self._known.discard(self._key(item))
        self._forget(self._key(item))


class Service:
    """The running extender; use `run`.

    Attributes:
        address: ``host:port``, once it listens.
        probe_port: the port for probes and metrics, once it listens; 0 for none.
    """

    def __init__(
        self, options: Options, family: SchedulingFamily, credentials: Credentials
    ) -> None:
        self._options, self._family = options, family
        self._journal = Journal()
        self._client = ApiClient(credentials)
        self.metrics = Metrics()
        # from no Node: the extender is a part of the cluster
        self._events = Events(
            self._client,
            component=options.event_source,
            node_name="",
            journal=self._journal,
            max_queued=_MAX_EVENTS,
        )
        self._leadership: Leadership | None = None
        if options.lease is not None and not options.lease.is_schedulers:
            self._leadership = Leadership(
                self._client,
                namespace=options.lease.namespace,
                name=options.lease.name,
                identity=options.lease.identity,
                journal=self._journal,
                on_change=self._role_changed,
            )
        book, known_pods, budgets = Book(), KnownPods(), Budgets()
        events = PodEvents(self._events)
        # `with_facts`: with `Pod.scheduling`, the facts that only schedulers use; `pod_keys`: the
        # annotations, labels and resources that are read
        read_pod = with_facts(decode.pods_with(family.pod_keys))
        self._extender = Extender(
            book=book,
            family=family,
            read_pod=read_pod,
            api=self._client,
            journal=self._journal,
            grace_seconds=options.grace_seconds,
            metrics=self.metrics,
            events=events,
            known_pods=known_pods,
            leads=lambda: self.leads,
        )
        extender = self._extender
        self._dry_run = FilterDryRun(
            book=book,
            family=family,
            read_pod=read_pod,
            read_node=decode.node,
            alignment=extender.alignment,  # places pods of one group near each other
        )
        self._preemption = Preemption(
            book=book,
            family=family,
            read_pod=read_pod,
            known_pods=known_pods,
            alignment=extender.alignment,
            budgets=budgets,
            # those in its `allocatable`: kube-scheduler may count them, too
            resources_of_node=extender.resources_of_node,
            journal=self._journal,
            metrics=self.metrics,
            events=events,
        )
        self._budgets = Reflector(
            self._client,
            Scope(
                what="all PodDisruptionBudgets",
                path="/apis/policy/v1/poddisruptionbudgets",
                field_selector="",
            ),
            budget,  # decodes one
            _Objects(key=lambda each: each.key, see=budgets.put, forget=budgets.forget),
            journal=self._journal,
        )
        self._nodes = Reflector(
            self._client,
            Scope(what="all Nodes", path="/api/v1/nodes", field_selector=""),
            decode.node,
            _Objects(
                key=lambda node: node.name, see=extender.see_node, forget=extender.forget_node
            ),
            journal=self._journal,
            burst_seconds=0,
        )
        # A pod that has ended leaves this selection, which the watch reports as its deletion.
        self._pods = Reflector(
            self._client,
            Scope(
                what="all pods",
                path="/api/v1/pods",
                field_selector="status.phase!=Succeeded,status.phase!=Failed",
            ),
            read_pod,
            _Objects(key=lambda pod: pod.uid, see=extender.see_pod, forget=extender.forget_pod),
            journal=self._journal,
            # A list or watch that is behind shows cards as free that are not.
            from_cache=False,
            burst_seconds=0,
        )
        self._endpoints = OperatorEndpoints(  # `/explain` and `/capacity`
            extender=extender,
            book=book,
            family=family,
            read_pod=read_pod,
            api=self._client,
            is_ready=lambda: self.is_ready,
            # with the Lease of kube-scheduler, `leads` is always true, and only the role tells
            leads=lambda: self.leads and self._known_role.value is not False,
            watches=lambda: (self._nodes.status, self._pods.status),
        )
        # True while this extender leads, False while another one does; None until that is known
        self._known_role: Latest[bool | None] = Latest(None)
        self._stopping = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self.address = ""
        self.probe_port = 0
        self._probe_connections: Connections | None = None

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    @property
    def is_ready(self) -> bool:
        """Tell whether Nodes and pods have been listed once."""
        return self._nodes.synced.is_set() and self._pods.synced.is_set()

    @property
    def leads(self) -> bool:
        """Tell whether this extender may answer kube-scheduler."""
        return self._leadership is None or self._leadership.leads

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Raises:
            ListenError: the port cannot be listened on, or the certificate cannot be used.
        """
        loop = asyncio.get_running_loop()
        certificate = await asyncio.to_thread(self._certificate)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=_STOP_SECONDS)
        probes = web.AppRunner(self._probes(), access_log=None, shutdown_timeout=_STOP_SECONDS)
        try:
            async with Supervisor(
                backoff_min_seconds=_BACKOFF_MIN_SECONDS, backoff_max_seconds=_BACKOFF_MAX_SECONDS
            ) as supervisor:
                self._supervisor = supervisor
                self._start_watch(supervisor, "nodes", self._nodes)
                self._start_watch(supervisor, "pods", self._pods)
                self._start_watch(supervisor, "budgets", self._budgets)
                supervisor.start(
                    "promises",
                    lambda: self._expire_promises(supervisor, certificate),
                    stuck_after_seconds=_STUCK_SECONDS,
                )
                supervisor.start(
                    "binds",
                    lambda: self._check_unconfirmed_binds(lambda: supervisor.beat("binds")),
                    stuck_after_seconds=_STUCK_SECONDS,
                )
                supervisor.start(
                    "events",
                    lambda: self._events.run(lambda: supervisor.beat("events")),
                    stuck_after_seconds=_STUCK_SECONDS,
                )
                await self._listen(runner, await certificate.context() if certificate else None)
                await self._listen_for_probes(probes)
                self._start_lease(supervisor)
                await self._stopping.wait()
            # The Lease is released after all binds have ended: they must not conflict with those of
            # the next leader.
            await runner.cleanup()
            if self._leadership is not None:
                await self._leadership.give_back()
        finally:
            if self._probe_connections is not None:
                self._probe_connections.stop()
            await runner.cleanup()
            await probes.cleanup()
            await self._client.close()

    def _start_watch(self, supervisor: Supervisor, name: str, reflector: Reflector[T]) -> None:
        supervisor.start(
            name,
            lambda: reflector.run(lambda: supervisor.beat(name)),
            # the longest time between two beats of a healthy watch, and some more
            stuck_after_seconds=reflector.longest_silence_seconds + _STUCK_SECONDS,
        )

    async def _expire_promises(
        self, supervisor: Supervisor, certificate: Certificate | None
    ) -> None:
        """End promises whose time is up. The same loop freezes objects once, after the start, and
        loads a renewed certificate.
        """
        has_frozen = False
        while True:
            supervisor.beat("promises")
            if self.is_ready and not has_frozen:
                freeze_objects()  # excludes what was read so far from garbage collection
                has_frozen = True
            self._extender.expire_promises()
            if certificate is not None:
                await certificate.context()  # loads a renewed one
            await asyncio.sleep(_PROMISE_CHECK_SECONDS)

    async def _check_unconfirmed_binds(self, beat: Callable[[], None]) -> None:
        """Ask again and again for pods whose bind has ended and which the watch has not shown as
        bound: such a pod may be gone, and its promise must end.
        """
        while True:
            beat()
            await self._extender.check_unconfirmed_binds(beat)
            await asyncio.sleep(_PROMISE_CHECK_SECONDS)

    def _certificate(self) -> Certificate | None:
        options = self._options
        if not options.certificate_file:
            return None
        return Certificate(
            options.certificate_file,
            options.key_file,
            # the address and the flags are for messages
            listen=f"{options.host}:{options.port}",
            flags="--tls-cert-file and --tls-key-file",
            clock=time.monotonic,
            every_seconds=options.certificate_seconds,
        )

    def _start_lease(self, supervisor: Supervisor) -> None:
        lease, leadership = self._options.lease, self._leadership
        if lease is None:
            return
        supervisor.start(
            "lease",
            (lambda: leadership.run(lambda: supervisor.beat("lease")))
            if leadership is not None
            else (lambda: self._follow_scheduler(lease, lambda: supervisor.beat("lease"))),
            stuck_after_seconds=_STUCK_SECONDS,
        )
        if self._options.pod_name and self._family.role_label:
            supervisor.start(
                "role",
                lambda: self._write_role_label(lambda: supervisor.beat("role")),
                stuck_after_seconds=_STUCK_SECONDS,
            )

    async def _follow_scheduler(self, lease: Lease, beat: Callable[[], None]) -> None:
        """Set the role to that of the kube-scheduler in the same pod."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{lease.namespace}/leases/{lease.name}"
        trouble = ""  # the error recorded last, so that the same one is not recorded again
        while True:
            beat()
            try:
                holder = holder_of(await self._client.get(path))
                # kube-scheduler's name is that of its host, an underscore and a UUID
                leads = holder.startswith(f"{lease.identity}_")
                if leads is not self._known_role.value:
                    self._role_changed(leads)
                trouble = ""
            except ClusterError as err:
                if str(err) != trouble:
                    self._journal.record("scheduler.lease_failed", level="warning", error=str(err))
                trouble = str(err)
            await asyncio.sleep(_LEASE_READ_SECONDS)

    def _role_changed(self, leads: bool) -> None:
        self.metrics.leads.set(leads)
        if not leads:
            self._extender.stop_leading()
        self._known_role.publish(leads)

    async def _write_role_label(self, beat: Callable[[], None]) -> None:
        """Keep the label of the extender's own pod equal to its role, so that a Service can select
        the leader. A slow API server delays nothing else, and a failed write is repeated.
        """
        options, role = self._options, self._known_role
        written: bool | None = None
        trouble = ""  # the error recorded last, so that the same one is not recorded again
        while True:
            beat()
            leads, version = role.value, role.version
            try:
                if leads is not written:
                    word = _LEADER if leads else _FOLLOWER
                    await self._client.patch(
                        pod_path(options.pod_namespace, options.pod_name),
                        {"metadata": {"labels": {self._family.role_label: word}}},
                    )
                written, trouble = leads, ""
            except ClusterError as err:
                if str(err) != trouble:
                    self._journal.record(
                        "scheduler.role_not_written", level="warning", role=word, error=str(err)
                    )
                trouble = str(err)
            with contextlib.suppress(TimeoutError):
                # a change of the role ends the pause
                async with asyncio.timeout(_LEASE_READ_SECONDS):
                    await role.newer_than(version)

    async def _listen(self, runner: web.AppRunner, tls: ssl.SSLContext | None) -> None:
        host, port = self._options.host, self._options.port
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as err:
            raise ListenError(
                f"cannot listen on {host}:{port}: {err.strerror or err}; choose another "
                "--server-bind-port, or stop the program that has this one"
            ) from err
        self.address = f"{host}:{runner.addresses[0][1]}"
        _logger.info("scheduler.listening", address=self.address, version=__version__)

    async def _listen_for_probes(self, runner: web.AppRunner) -> None:
        if (port := self._options.probe_port) is None:
            return
        await runner.setup()
        listener = await bind(Address("", port), flag="--probe-bind-port")
        # Any pod that reaches this pod can open connections and be silent. Without a limit, they
        # would take all file descriptors, and kube-scheduler would get no answer either.
        self._probe_connections = Connections(
            listener,
            cast("web.Server", runner.server),
            max_connections=bounded_by_descriptors(_MAX_PROBE_CONNECTIONS),
        )
        self._probe_connections.start()
        self.probe_port = int(listener.getsockname()[1])
        _logger.info("scheduler.probes_listening", port=self.probe_port)

    # -- HTTP --------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/scheduler/filter", self._filter)
        application.router.add_post("/scheduler/filter-dryrun", self._filter_dry_run)
        application.router.add_post("/scheduler/bind", self._bind)
        application.router.add_post("/scheduler/preempt", self._preempt)
        self._endpoints.add_routes(application.router)
        self._add_probes(application)
        return application

    def _probes(self) -> web.Application:
        """Return the pages that any pod of the cluster may read: no verb, and no pod's name."""
        application = web.Application()
        self._add_probes(application)
        return application

    def _add_probes(self, application: web.Application) -> None:
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/version", self._version)
        application.router.add_get("/metrics", self._metrics)

    async def _filter(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self.leads:
            return _not_leading()
        if not self.is_ready:
            return _json(msgspec.json.encode(FilterResult(error=_NOT_READY)))
        return _json(self._extender.filter(body))

    async def _filter_dry_run(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self.is_ready:
            return _json(msgspec.json.encode(FilterResult(error=_NOT_READY)))
        return _json(self._dry_run.answer(body))

    async def _bind(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self.leads:
            return _not_leading()
        if not self.is_ready:
            return _json(msgspec.json.encode(BindingResult(error=_NOT_READY)))
        return _json(await self._extender.bind(body))

    async def _metrics(self, request: web.Request) -> web.Response:
        self._update_gauges()
        body, content_type = self.metrics.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _update_gauges(self) -> None:
        """Set the metrics that show the present state."""
        lease = self._options.lease
        if lease is None or not lease.is_schedulers:  # otherwise `_follow_scheduler` knows
            self.metrics.leads.set(self.leads)
        self._extender.update_gauges()
        watches = {
            "nodes": self._nodes.status,
            "pods": self._pods.status,
            "budgets": self._budgets.status,
        }
        self.metrics.show_watches(watches, time.time())

    async def _preempt(self, request: web.Request) -> web.Response:
        """Answer with a status, since the answer has no field for an error (vgpu-manager §5.1)."""
        body = await request.read()
        if not self.leads:
            return _not_leading()
        if not self.is_ready:
            return web.Response(text=_NOT_READY + "\n", status=503)
        if not self._budgets.synced.is_set():
            return web.Response(text=_NO_BUDGETS + "\n", status=503)
        try:
            return _json(await self._preemption.answer(body))
        except AgentError as err:
            return web.Response(text=f"{err}\n", status=400)

    async def _healthz(self, _: web.Request) -> web.Response:
        """Fail where the kubelet should restart the extender: a loop is stuck."""
        now = time.time()
        stuck = [
            f"{report.name}: no heartbeat for {now - report.last_heartbeat_at:.0f} s; it will not "
            "recover by itself\n"
            for report in (self._supervisor.reports if self._supervisor else ())
            if report.stuck_for(now)
        ]
        return web.Response(text="".join(stuck) or "ok\n", status=503 if stuck else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self.is_ready
        return web.Response(
            text="ok\n" if ready else _NOT_READY + "\n", status=200 if ready else 503
        )

    async def _version(self, _: web.Request) -> web.Response:
        return _json(json.dumps({"version": __version__}).encode())


def _not_leading() -> web.Response:
    """Refuse a verb: another extender holds the Lease."""
    text = "another extender leads; this one answers when it holds the Lease\n"
    return web.Response(status=503, text=text)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
