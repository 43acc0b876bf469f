"""List and watch: keeps a copy of a few objects of the API server up to date,
through everything that clusters do to a watch.

Used by the watches of this package (`watching`, `config_map`). Each of them runs a `Reflector` as a
supervised loop and gives it a receiver of objects (`Sink`). Its rules, which the libraries' own
watches do not keep:

* A watch that ends is normal. The next one goes on from the same version (the ``resourceVersion``
  that was seen last), after a pause that doubles while watches end soon.
* 410 in any form means that history was lost: list again. A malformed event, or the deletion of an
  undecodable object, leads to a new list as well. Any other failure keeps the version, so that no
  event is lost or seen twice.
* Bookmarks move the version only. Versions are never put in an order, as the API asks of its
  clients.
* Other undecodable objects are skipped, each logged once and counted.
* A connection that is silent for too long is dead (`client` sees to that); ``Retry-After`` is
  obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from vgpu_agent.cluster import api, decode
from vgpu_agent.cluster.lists import ListReader
from vgpu_agent.cluster.retrying import Backoff, slow_seconds
from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import ClusterError, shortened
from vgpu_agent.log import ChangeFilter
from vgpu_agent.status import BRING_API_SERVER_BACK, WatchStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping

    from vgpu_agent.journal import Journal

T = TypeVar("T")
Seen_contra = TypeVar("Seen_contra", contravariant=True)

# How long a watch is asked to last; the real time is drawn between this and its double.
WATCH_SECONDS = 240.0
_PAGE = "500"  # items; an API server that answers from its cache sends all
# Limits for a list that never ends: a node has some hundred objects of a kind, and each page has at
# least one. The receivers keep fewer: ``trim`` drops what they would not keep.
_MAX_ITEMS = 50_000
_TRIMMED_EACH = 100  # items after which ``trim`` is called
_MAX_PAGES = 1000
# A watch is followed no faster than this for long; a node with 500 pods has some hundred changes a
# second at its worst.
_BURST = 200  # lines
_BURST_SECONDS = 0.2
_LONGEST_ERROR = 1000  # characters of an error that is remembered
# a stream that lasted this long proves that the API server works, and pauses begin small again
_HEALTHY_SECONDS = 30.0
# errors of unreadable objects that are remembered, so that they are not logged again; beyond these,
# all are forgotten
_UNREADABLE_REMEMBERED = 200
_GONE = 410
_FORBIDDEN = 403
_GRANT = "grant the right to the service account; manifests/rbac.yaml has it"


class Source(Protocol):
    """The source of lists and watches: `client.ApiClient`, or a test's script."""

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Return the whole answer to a GET, such as one object."""
        ...

    def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield a list as it arrives, in pieces of the JSON text."""
        ...

    def lines(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch; an empty one means that the API server has accepted it."""
        ...


class Sink(Protocol[Seen_contra]):
    """The receiver of what was seen; called on the event loop, never concurrently."""

    def replace(self, items: Iterable[Seen_contra], /) -> None:
        """Keep ``items`` and nothing else: they are all objects that there are."""
        ...

    def put(self, item: Seen_contra, /) -> None:
        """Keep ``item``, which was added or changed."""
        ...

    def remove(self, item: Seen_contra, /) -> None:
        """Drop ``item``, which was deleted; it has its last state."""
        ...


class Scope(msgspec.Struct, frozen=True):
    """The watched objects: a collection, or a selection of it.

    Attributes:
        what: for people, e.g. ``pods of this node``.
        path: of the collection.
        field_selector: the selection, as ``fieldSelector`` of the API server.
    """

    what: str
    path: str
    field_selector: str

    @classmethod
    def single(cls, what: str, path: str, name: str) -> Scope:
        """Return the scope of the one object ``name``, which need not exist, of the collection at
        ``path``.

        It is listed, too. A watch from the version of an object that has not changed for long is
        refused: the API server remembers the changes of the last minutes, after its start none.
        """
        return cls(what, path, f"metadata.name={name}")


class Reflector(Generic[T]):
    """The loop that keeps ``sink`` equal to the API server's objects in ``scope``.

    State: the version up to which everything was seen. It outlives a restart of `run` by its
    supervisor, and the failure of a watch; it is dropped when the API server has forgotten it.

    Attributes:
        status: counts, times and the last error of its lists and watches.
        synced: there was a first complete list, since the start or `forget`.
        trouble: why the last list or watch failed; None when all is well.
    """

    def __init__(
        self,
        source: Source,
        scope: Scope,
        decoder: Callable[[msgspec.Raw | bytes], T],
        sink: Sink[T],
        *,
        journal: Journal,
        uniform: Callable[[float, float], float] = random.uniform,
        expected: Collection[int] = (),
        trim: Callable[[list[T]], list[T]] | None = None,
        from_cache: bool = True,
        burst_seconds: float = _BURST_SECONDS,
    ) -> None:
        """Build it.

        Args:
            source: gives lists and watches.
            scope: the objects.
            decoder: makes an object of type ``T`` from the JSON of one; raises `ClusterError` if it
                cannot.
            sink: receives the objects.
            journal: failures are recorded there.
            uniform: draws a number between two, for the length of watches and pauses.
            expected: HTTP statuses that are not logged, because the caller reports them.
            trim: returns those of the objects read so far that the sink would keep. So a long list
                is never held whole.
            from_cache: the first list may come from the API server's cache, which may be behind.
            burst_seconds: the least time for each `_BURST` lines of a watch. 0 where being behind
                is worse than being busy; other tasks still run in between.
        """
        self._from_cache, self._burst_seconds = from_cache, burst_seconds
        self._trim = trim
        self.status = WatchStatus(scope.what)
        self.synced = asyncio.Event()
        self.trouble: Latest[ClusterError | None] = Latest(None)
        self.scope = scope
        self._source, self._decoder, self._sink = source, decoder, sink
        self._journal = journal
        self._uniform = uniform
        self._expected = frozenset(expected)
        self._version = ""  # empty: begin with a list
        # loop time since which lists and watches have succeeded; None while they fail
        self._well_since: float | None = None
        # of failures: one with the same HTTP status as the last one is not logged
        self._changes = ChangeFilter()
        # of unreadable objects, so that one that changes every second does not flood the log
        self._unreadable = ChangeFilter()

    @property
    def longest_silence_seconds(self) -> float:
        """The longest time between two calls of ``beat`` by a healthy `run`."""
        return (
            2 * WATCH_SECONDS
            + api.WATCH_SILENCE_SECONDS  # until a silent connection counts as dead
            + slow_seconds()  # the pause after a permanent failure, such as a missing right
            + api.REQUEST_TIMEOUT_SECONDS
        )

    @property
    def reachable_seconds(self) -> float:
        """The seconds for which lists and watches have not failed; 0 while they fail. Soon after an
        outage, the statuses of pods may still be old.
        """
        if self._well_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._well_since

    def forget(self) -> None:
        """Begin with a list when `run` is started the next time; `run` must have ended."""
        self._version = ""
        self.synced.clear()

    async def run(self, beat: Callable[[], None]) -> None:
        """List and watch, until cancelled.

        Args:
            beat: called at each sign of life, so that a supervisor can tell a hang.
        """
        backoff, loop = Backoff(self._uniform), asyncio.get_running_loop()
        while True:
            beat()
            began, failure = loop.time(), None
            try:
                if not self._version:
                    await self._list(beat)
                await self._watch(beat)
            except ClusterError as err:
                failure = err
                self._failed(err)
            if loop.time() - began > _HEALTHY_SECONDS:
                backoff.succeeded()
            await asyncio.sleep(backoff.pause(failure))

    async def _list(self, beat: Callable[[], None]) -> None:
        items, version = await self._get_pages(beat)
        self._sink.replace(items)
        self._version = version
        self.status.lists += 1
        self._note_answer()
        self.status.synced = True
        self.synced.set()
        self._well()

    async def _get_pages(self, beat: Callable[[], None]) -> tuple[list[T], str]:
        items: list[T] = []
        params = {"fieldSelector": self.scope.field_selector, "limit": _PAGE}
        # The first list may come from the API server's cache. One after a lost history must not:
        # the cache may be older than what was seen.
        cached = self._from_cache and not self.status.synced
        more = {"resourceVersion": "0"} if cached else {}
        tokens = {""}
        while True:
            version, token = await self._get_page(params | more, items, beat)
            if not token:
                break
            if token in tokens or len(tokens) > _MAX_PAGES:
                what = "the same page again" if token in tokens else f"more than {_MAX_PAGES} pages"
                raise ClusterError(
                    f"GET {self.scope.path}: the list goes on for ever: {what}; look for a proxy "
                    "between this node and the API server"
                )
            tokens.add(token)
            more = {"continue": token}
        if not version:
            raise ClusterError(
                f"GET {self.scope.path}: the list has no metadata.resourceVersion; look for a "
                "proxy between this node and the API server"
            )
        return items, version

    async def _get_page(
        self, params: Mapping[str, str], items: list[T], beat: Callable[[], None]
    ) -> tuple[str, str]:
        """Add the items of one page; return its version, and the token of the next page."""
        page, seen = ListReader(self.scope.path), 0
        async with contextlib.aclosing(self._source.chunks(self.scope.path, params)) as chunks:
            async for chunk in chunks:
                for raw in page.feed(chunk):
                    items += self._readable(raw)
                    seen += 1
                    if self._trim is not None and items and len(items) % _TRIMMED_EACH == 0:
                        items[:] = self._trim(items)
                    if seen > _MAX_ITEMS:
                        text = (
                            f"the list has more than {_MAX_ITEMS} objects; it is given up, since "
                            "no node has so many"
                        )
                        raise ClusterError(
                            f"GET {self.scope.path}: {text}; look for a proxy between this "
                            "node and the API server"
                        )
                beat()
        return page.end()

    async def _watch(self, beat: Callable[[], None]) -> None:
        seconds = self._uniform(WATCH_SECONDS, 2 * WATCH_SECONDS)
        params = {
            "watch": "true",
            "fieldSelector": self.scope.field_selector,
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        self.status.watches += 1
        async with contextlib.aclosing(self._source.lines(self.scope.path, params)) as lines:
            taken, since = 0, asyncio.get_running_loop().time()
            async for line in lines:
                beat()
                self._take(line)
                taken += 1
                if taken == _BURST:
                    now = asyncio.get_running_loop().time()
                    # Also when there is nothing to wait for, so that other loops can run.
                    await asyncio.sleep(max(0.0, since + self._burst_seconds - now))
                    taken, since = 0, asyncio.get_running_loop().time()
        self._well()

    def _take(self, line: bytes) -> None:
        """Take over one line of a watch."""
        if not line:
            self._note_answer()
            # the recovery is only logged with the first event: until then the watch may not last
            self.status.failing_since = 0.0
            self._begin_well()
            return
        try:
            event = decode.event(line)
            if event.type == "ERROR":
                raise decode.failure(event.object)
            version = decode.version(event.object)
            self._take_object(event)
        except ClusterError as err:
            if err.status == 0:
                # the line could not be understood; whatever it was about, a list will show
                self._version = ""
            raise
        self._version = version
        self._note_answer()
        self._well()

    def _take_object(self, event: decode.Event) -> None:
        match event.type:
            case "ADDED" | "MODIFIED":
                self.status.events += 1
                for item in self._readable(event.object):
                    self._sink.put(item)
            case "DELETED":
                self.status.events += 1
                self._sink.remove(self._decoder(event.object))
            case "BOOKMARK":
                pass
            case _:
                raise ClusterError(
                    f"GET {self.scope.path}: the watch sent an event of the unknown type "
                    f"{event.type[:40]!r}"
                )

    def _readable(self, raw: msgspec.Raw | bytes) -> list[T]:
        """Return the object in a list, which is empty when it cannot be read."""
        try:
            return [self._decoder(raw)]
        except ClusterError as err:
            self.status.unreadable += 1
            text = shortened(str(err), _LONGEST_ERROR)
            if self._unreadable.is_new(text):
                if len(self._unreadable) > _UNREADABLE_REMEMBERED:
                    self._unreadable.keep_only((text,))
                self._journal.record(
                    "cluster.unreadable", level="warning", watch=self.scope.what, error=text
                )
            return []

    def _note_answer(self) -> None:
        self.status.last_event_at = time.time()

    def _failed(self, err: ClusterError) -> None:
        if err.status == _GONE:
            self._version = ""
            return
        self.status.errors += 1
        self._well_since = None
        self.status.failing_since = self.status.failing_since or time.time()
        self.status.last_error = shortened(str(err), _LONGEST_ERROR)
        self.trouble.publish(err)
        # An outage is one line in the log, not one for each try.
        if err.status not in self._expected and self._changes.is_new("watch", err.status):
            self._journal.record(
                "cluster.watch_failed",
                level="warning",
                watch=self.scope.what,
                error=str(err),
                remedy=_GRANT if err.status == _FORBIDDEN else BRING_API_SERVER_BACK,
            )

    def _begin_well(self) -> None:
        """Note since when lists and watches have succeeded, see `reachable_seconds`."""
        if self._well_since is None:
            self._well_since = asyncio.get_running_loop().time()

    def _well(self) -> None:
        """Note that a list or watch has succeeded, and that the last failure is over."""
        self.status.failing_since = 0.0
        self._begin_well()
        if self.trouble.value is not None:
            self.trouble.publish(None)
        if self._changes.forget("watch"):
            self._journal.record("cluster.watch_recovered", watch=self.scope.what)
