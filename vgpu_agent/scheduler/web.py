"""The extender's endpoints for operators: ``/explain`` and ``/capacity``.

They run on the event loop that answers kube-scheduler. So their work is done in time slices of
`_SLICE_SECONDS`, one request at a time. At most `_MAX_WAITING` requests run or wait. An explanation
may take seconds, and pauses between its slices. ``/capacity`` takes some milliseconds: it only lets
other tasks run between its slices, and is computed at most once a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import hdrs, web

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import is_object_name
from vgpu_agent.scheduler import page
from vgpu_agent.scheduler.capacity import Capacity, capacity
from vgpu_agent.scheduler.explain import Explanation, Facts, Situation, Waiting, explain, unknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.families.scheduling import SchedulingFamily
    from vgpu_agent.placement.nodes.book import Book
    from vgpu_agent.pods import Pod
    from vgpu_agent.scheduler.extender import Extender
    from vgpu_agent.status import WatchStatus

T = TypeVar("T")

_SLICE_SECONDS = 0.002
_PAUSE_SECONDS = 0.002  # between two slices of an explanation
_KEPT_SECONDS = 1.0  # for which an answer of `/capacity` is given again
# Computing time of an explanation after which it no longer counts how many such pods would fit, nor
# tries with which changes of its request the pod would fit.
_MOST_SECONDS = 3.0
_GET_SECONDS = 5.0  # for the pod
_MAX_WAITING = 8
_MAX_GATES = 16  # scheduling gates of the pod that an explanation names
_POD = re.compile(r"[^/]+/[^/]+")
_FORMATS = ("json", "text")
_SWITCH = {"": True, "1": True, "true": True, "0": False, "false": False}


class OperatorEndpoints:
    """The handlers of both endpoints; see the module.

    State: the number of requests that are being answered or wait, and the last answer of
    `/capacity`.
    """

    def __init__(
        self,
        *,
        extender: Extender,
        book: Book,
        family: SchedulingFamily,
        read_pod: Callable[[msgspec.Raw | bytes], Pod],
        api: Api,
        is_ready: Callable[[], bool],
        leads: Callable[[], bool],
        watches: Callable[[], Iterable[WatchStatus]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build them.

        Args:
            extender: has the promises to pods.
            book: the cards of all Nodes.
            family: reads from annotations and limits what a pod asks for and what it holds.
            read_pod: decodes the JSON of a pod; it raises `ClusterError` if that cannot be read.
            api: the API server.
            is_ready: tells whether all Nodes and pods were read.
            leads: tells whether this extender answers kube-scheduler.
            watches: returns the state of the watches from which the book comes.
            clock: unix seconds.
        """
        self._extender, self._book, self._family = extender, book, family
        self._read_pod, self._api = read_pod, api
        self._is_ready, self._leads = is_ready, leads
        self._watches, self._clock = watches, clock
        self._waiting = 0
        self._one_at_a_time = asyncio.Lock()
        # the last answer of `/capacity`, and when it was computed (loop time)
        self._last_capacity: tuple[float, Capacity] | None = None

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Serve ``/explain`` and ``/capacity``."""
        router.add_get("/explain", self._answered(self._explain))
        router.add_get("/capacity", self._answered(self._capacity))

    def _answered(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Let ``handler`` answer only while the book is complete and few requests wait, and turn a
        wrong parameter into an answer with status 400.
        """

        async def answer(request: web.Request) -> web.Response:
            if not self._is_ready():
                return _error(
                    503,
                    "the extender has not read all Nodes and pods yet; ask again in some seconds. "
                    "If that lasts, its log says which request to the API server fails",
                )
            if self._waiting >= _MAX_WAITING:
                return _error(
                    503, f"{_MAX_WAITING} such requests are under way; ask again in some seconds"
                )
            self._waiting += 1
            try:
                return await handler(request)
            except _BadRequestError as err:
                return _error(400, str(err))
            finally:
                self._waiting -= 1

        return answer

    # -- /explain ----------------------------------------------------------------------------------

    async def _explain(self, request: web.Request) -> web.Response:
        query = _query(request, ("pod", "all", "format"))
        name = query.get("pod", "")
        namespace, _, short = name.partition("/")
        if not (_POD.fullmatch(name) and is_object_name(namespace) and is_object_name(short)):
            raise _BadRequestError("name the pod: /explain?pod=NAMESPACE/NAME")
        # whether the table has a row for each Node, not one for each group of equal Nodes
        every_node = _SWITCH.get(query.get("all", "0"))
        if every_node is None:
            raise _BadRequestError("all is 1 or 0")
        as_text = _wants_text(request, query)
        try:
            async with asyncio.timeout(_GET_SECONDS):
                raw = await self._api.get(pod_path(namespace, short))
            pod = self._read_pod(raw)
        except TimeoutError:
            return _error(504, f"the API server did not send pod {name} within {_GET_SECONDS:g} s")
        except ClusterError as err:
            if err.status != 404:
                return _error(502, f"pod {name} cannot be read: {err}")
            found = unknown(name)  # says that there is no such pod
        else:
            found = await self._about(pod, read_waiting(raw), every_node=every_node)
        status = 404 if found.situation == Situation.UNKNOWN.value else 200
        return _answer(found, page.explanation(found) if as_text else None, status)

    async def _about(self, pod: Pod, waiting: Waiting, *, every_node: bool) -> Explanation:
        async with self._one_at_a_time:
            extender = self._extender
            records = extender.records  # what kube-scheduler has asked so far
            # the cards that are kept for the pod from filter to bind
            kept = None if pod.node else extender.kept(pod.uid)
            holding = self._book.holding(pod.uid)
            if not pod.node and kept is None and holding is not None:
                # bound since the API server has sent it
                pod = msgspec.structs.replace(pod, node=holding.node)
            facts = Facts(
                pod=pod,
                waiting=waiting,
                family=self._family,
                views=self._book.views(),  # all Nodes, with cards and holdings, as now
                holding=holding,
                kept=kept,
                filter_calls=records.filter_calls(pod.uid),
                started_at=records.started_at,  # since then filter calls are remembered
                # `schedulerName` of the pods in filter calls
                schedulers=tuple(records.schedulers),
                name_of=extender.name_of,  # of a pod, by its UID
                now=self._clock(),
                doubts=self._doubts(),
            )
            slices = _Slices(_PAUSE_SECONDS)
            return await slices.result(
                explain(
                    facts, every_node=every_node, is_over=lambda: slices.seconds > _MOST_SECONDS
                )
            )

    # -- /capacity ---------------------------------------------------------------------------------

    async def _capacity(self, request: web.Request) -> web.Response:
        as_text = _wants_text(request, _query(request, ("format",)))
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._last_capacity is None or now - self._last_capacity[0] >= _KEPT_SECONDS:
                self._last_capacity = now, await _Slices(0.0).result(capacity(self._book.views()))
            found = self._last_capacity[1]
        found = msgspec.structs.replace(found, doubts=self._doubts())
        return _answer(found, page.capacity(found) if as_text else None)

    def _doubts(self) -> tuple[str, ...]:
        """Say what is missing in the book: cards that another extender keeps, and changes while a
        watch fails.
        """
        label = self._family.role_label  # says which extender leads; empty where there is none
        where = f": kubectl get pods -A -l {label}=leader" * bool(label)
        follows = (
            "This extender does not lead. It does not know which cards the leader keeps for pods "
            f"that are not bound yet, nor what kube-scheduler has asked. Ask the leader{where}"
        )
        failing = (
            f"The watch of {watch.name} has been failing for "
            f"{max(self._clock() - watch.failing_since, 0):.0f} s, so this may be out of date: "
            f"{watch.last_error}"
            for watch in self._watches()
            if watch.failing_since
        )
        return *(() if self._leads() else (follows,)), *failing


class _BadRequestError(Exception):
    """A parameter is unknown or invalid; the message says what is expected."""


class _Slices:
    """Time slices in which a generator runs, so that the event loop can run other tasks in between.

    Attributes:
        seconds: computing time so far.
    """

    def __init__(
        self, pause_seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._pause_seconds, self._clock = pause_seconds, clock
        # when the present slice began, and the computing time of the slices before it
        self._began, self._before = clock(), 0.0

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._began

    async def result(self, work: Generator[None, None, T]) -> T:
        """Run the generator to its end and return its result."""
        self._began = self._clock()
        while True:
            while self._clock() - self._began < _SLICE_SECONDS:
                try:
                    next(work)
                except StopIteration as end:
                    found: T = end.value
                    return found
            self._before += self._clock() - self._began
            await asyncio.sleep(self._pause_seconds)
            self._began = self._clock()


class _Named(msgspec.Struct):
    name: str = ""


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class _Spec(msgspec.Struct):
    gates: list[_Named] | None = msgspec.field(default=None, name="schedulingGates")


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    spec: _Spec | None = None
    status: _Status | None = None


def read_waiting(raw: bytes) -> Waiting:
    """Read from a pod object why it waits; parts that cannot be read count as missing."""
    try:
        pod = msgspec.json.decode(raw, type=_Pod)
    except (msgspec.MsgspecError, RecursionError):
        return Waiting()
    gates = (pod.spec.gates if pod.spec else None) or []
    conditions = (pod.status.conditions if pod.status else None) or []
    waiting = next(
        (each for each in conditions if (each.type, each.status) == ("PodScheduled", "False")),
        _Condition(),
    )
    return Waiting(
        gates=tuple(each.name for each in gates[:_MAX_GATES]),
        reason=waiting.reason or "",
        message=waiting.message or "",
    )


def _query(request: web.Request, known: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of a request.

    Raises:
        _BadRequestError: one is not known.
    """
    if unknown_ones := sorted(set(request.query) - set(known)):
        raise _BadRequestError(
            f"unknown parameter {unknown_ones[0][:100]!a}; there are {', '.join(known)}"
        )
    return dict(request.query)


def _wants_text(request: web.Request, query: dict[str, str]) -> bool:
    """Tell whether the answer is to be plain text: ``format`` decides, otherwise ``Accept``."""
    wanted = query.get("format", "")
    if wanted and wanted not in _FORMATS:
        raise _BadRequestError(f"format is {' or '.join(_FORMATS)}")
    accept = ",".join(request.headers.getall(hdrs.ACCEPT, []))
    return wanted == "text" if wanted else "text/plain" in accept


def _answer(found: object, text: str | None, status: int = 200) -> web.Response:
    headers = {hdrs.CACHE_CONTROL: "no-store", "X-Content-Type-Options": "nosniff"}
    if text is not None:
        return web.Response(status=status, text=text, headers=headers)
    return web.Response(
        status=status,
        body=msgspec.json.encode(found),
        content_type="application/json",
        headers=headers,
    )


def _error(status: int, text: str) -> web.Response:
    return _answer({"error": text}, text=None, status=status)
