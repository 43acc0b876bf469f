"""The pieces of asyncio that every package of the agent shares: a value that can be awaited, waits,
a back-off, and supervised loops.

State flows through the agent as immutable snapshots held by a `Latest`. A reader waits for
"something newer than version N". So any number of readers (each ListAndWatch stream, metrics, the
health watch) see every final state, and a slow reader cannot block others.

Loops are `Supervisor` tasks: named, restarted with back-off, counted, and visible under
``/debug/tasks``. No loop of the agent is started in another way; other tasks end with the function
or the object that made them.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import msgspec

from vgpu_agent import log

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

T = TypeVar("T")

# A loop that sends no heartbeat for this long, in addition to its own longest pause, is stuck, and
# ``/livez`` fails. A resource that has waited this long to be offered is an error in the log.
STUCK_SECONDS = 30.0

# A loop that has not ended this long after its cancellation is cancelled again. Its own cleanup
# takes less.
CANCEL_AGAIN_SECONDS = 10.0

_logger = log.get(__name__)


class Latest(Generic[T]):
    """The newest version of a value, for readers that must not miss the last change but may skip
    the ones before.

    Only the event loop's thread may call it; another thread goes through
    ``loop.call_soon_threadsafe``.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._newer = asyncio.Event()

    @property
    def value(self) -> T:
        """The current value."""
        return self._value

    @property
    def version(self) -> int:
        """Number of times the value was replaced; 0 for the first one."""
        return self._version

    def publish(self, value: T) -> None:
        """Replace the value and wake all tasks that wait for something newer."""
        self._value = value
        self._version += 1
        self._newer.set()
        self._newer = asyncio.Event()

    async def newer_than(self, version: int) -> T:
        """Return the value as soon as its version is above ``version``, perhaps at once."""
        while self._version <= version:
            await self._newer.wait()
        return self._value

    async def changes(self, *, coalesce_seconds: float = 0.0) -> AsyncGenerator[T, None]:
        """Yield the current value, then each later one that the reader is quick enough to see.

        Args:
            coalesce_seconds: how long to wait after each one; what comes meanwhile is one change.
                For readers that are in no hurry.
        """
        version = -1
        while True:
            value = await self.newer_than(version)
            version = self._version
            yield value
            if coalesce_seconds:
                await asyncio.sleep(coalesce_seconds)


class Revision(Latest[int]):
    """A count of changes: readers see that something is new, and look up what."""

    def __init__(self) -> None:
        super().__init__(0)

    def advance(self) -> None:
        """Count one more change and wake all tasks that wait for it."""
        self.publish(self.value + 1)


class Versions:
    """The versions of some snapshots at one moment, so that no change after it is missed.

    Take it before reading the snapshots: what changes while the reader is busy then ends the next
    wait at once.
    """

    def __init__(self, *snapshots: Latest[Any]) -> None:
        self._snapshots = [(snapshot, snapshot.version) for snapshot in snapshots]

    async def passed(self, *, timeout_seconds: float | None = None) -> bool:
        """Wait until one snapshot is newer; return False if ``timeout_seconds`` pass first."""
        if any(snapshot.version > version for snapshot, version in self._snapshots):
            return True
        return await first_of(
            *(snapshot.newer_than(version) for snapshot, version in self._snapshots),
            timeout_seconds=timeout_seconds,
        )


async def first_of(
    *waits: Coroutine[Any, Any, object], timeout_seconds: float | None = None
) -> bool:
    """Wait until one of ``waits`` has ended, or until the time is over. The others are cancelled
    before this returns, and an exception of one is dropped.

    Returns:
        True if one of them has ended, False if the time was over.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return bool(done)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do ``work``, but abandon it as soon as ``stopping`` is set; an exception of the work passes
    through.

    Returns:
        True if the work was finished, False if it was abandoned.
    """
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


class Backoff:
    """Pauses in seconds that double from ``minimum`` to ``maximum`` with each failure in a row."""

    def __init__(self, minimum: float, maximum: float) -> None:
        self._minimum, self._maximum = minimum, maximum
        self._next = minimum

    def pause(self) -> float:
        """Return the pause after one more failure."""
        pause, self._next = self._next, min(self._next * 2, self._maximum)
        return pause

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._next = self._minimum


class TaskState(enum.StrEnum):
    """The state of a supervised loop."""

    RUNNING = "running"
    BACKING_OFF = "backing off"
    ENDED = "ended"


class TaskReport(msgspec.Struct):
    """One line of ``/debug/tasks``; times are unix seconds."""

    name: str
    state: TaskState = TaskState.RUNNING
    restarts: int = 0
    last_error: str = ""
    started_at: float = 0.0
    last_heartbeat_at: float = 0.0
    stuck_after_seconds: float | None = None

    def stuck_for(self, now: float) -> float:
        """Seconds by which the loop is late with its heartbeat; 0 when it is on time, gives none or
        does not run.
        """
        if self.stuck_after_seconds is None or self.state is not TaskState.RUNNING:
            return 0.0
        return max(0.0, now - self.last_heartbeat_at - self.stuck_after_seconds)


class Supervisor:
    """The named loops inside one TaskGroup; those that fail are restarted.

    A loop that returns has ended. A loop that raises is logged with its traceback and started again
    after a back-off that doubles from ``backoff_min_seconds`` to ``backoff_max_seconds`` and begins
    again after ``healthy_seconds`` without a failure.
    """

    def __init__(
        self,
        *,
        backoff_min_seconds: float,
        backoff_max_seconds: float,
        healthy_seconds: float = 60.0,
    ) -> None:
        self._new_backoff = functools.partial(Backoff, backoff_min_seconds, backoff_max_seconds)
        self._healthy_seconds = healthy_seconds
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, TaskReport] = {}
        # Heartbeats are kept on the monotonic clock: a corrected wall clock must not make a loop
        # look stuck.
        self._beats: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._group is None:  # pragma: no cover - __aenter__ always ran
            return
        try:
            await _cancel({task for task in self._tasks.values() if not task.done()})
        finally:
            await self._group.__aexit__(None, None, None)

    @property
    def reports(self) -> list[TaskReport]:
        """Return one report for each loop, by name, as it is now."""
        now, monotonic = time.time(), time.monotonic()
        return [
            msgspec.structs.replace(report, last_heartbeat_at=now - (monotonic - self._beats[name]))
            for name, report in sorted(self._reports.items())
        ]

    def start(
        self,
        name: str,
        loop: Callable[[], Awaitable[None]],
        *,
        stuck_after_seconds: float | None = None,
    ) -> None:
        """Run ``loop`` under ``name`` until it returns or `stop` is called.

        Args:
            name: what ``/debug/tasks``, the log and the metric call it; a running task of that name
                must not exist.
            loop: called again after each failure, so it must not rely on what its last run left.
            stuck_after_seconds: how long the loop may go without calling `beat` before it counts as
                stuck; None without a limit.

        Raises:
            RuntimeError: the supervisor was not entered, or the name is in use.
        """
        if self._group is None:
            raise RuntimeError("the supervisor has not been entered")
        if name in self._tasks and not self._tasks[name].done():
            raise RuntimeError(f"a task named {name!r} is already running")
        report = self._reports[name] = TaskReport(
            name, started_at=time.time(), stuck_after_seconds=stuck_after_seconds
        )
        self._beats[name] = time.monotonic()
        self._tasks[name] = self._group.create_task(self._look_after(report, loop), name=name)

    def beat(self, name: str) -> None:
        """Send the heartbeat of the loop ``name``."""
        if name in self._beats:
            self._beats[name] = time.monotonic()

    async def stop(self, name: str) -> None:
        """Cancel the loop ``name``, wait for its end and forget it; unknown names are fine."""
        task = self._tasks.pop(name, None)
        self._reports.pop(name, None)
        self._beats.pop(name, None)
        if task is not None:
            await _cancel({task})

    async def stop_all_but(self, kept: Callable[[str], bool]) -> None:
        """Stop each loop for whose name ``kept`` is false, including loops that are started
        meanwhile.
        """
        while names := [name for name in sorted(self._reports) if not kept(name)]:
            for name in names:
                await self.stop(name)

    async def _look_after(self, report: TaskReport, loop: Callable[[], Awaitable[None]]) -> None:
        backoff = self._new_backoff()
        while True:
            began = time.monotonic()
            report.state = TaskState.RUNNING
            self.beat(report.name)
            try:
                await loop()
            # A loop's bug must not end the other loops; it is logged whole and counted. A
            # cancellation that nobody requested is such a bug: a future that the loop waited for
            # was cancelled.
            except (Exception, asyncio.CancelledError) as err:
                if isinstance(err, asyncio.CancelledError) and _is_being_cancelled():
                    raise
                if time.monotonic() - began > self._healthy_seconds:
                    backoff.reset()
                report.restarts += 1
                pause = backoff.pause()
                report.state, report.last_error = (
                    TaskState.BACKING_OFF,
                    f"{type(err).__name__}: {err}",
                )
                _logger.error(
                    "task.restarting",
                    task=report.name,
                    restarts=report.restarts,
                    in_seconds=pause,
                    exc_info=err,
                )
                await asyncio.sleep(pause)
            else:
                report.state = TaskState.ENDED
                return


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end, again where a library has swallowed a cancellation."""
    while tasks:
        for task in tasks:
            task.cancel()
        # `wait` does not raise the exceptions of its tasks, so a cancellation that arrives here was
        # meant for the caller and must reach it.
        _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_SECONDS)


def _is_being_cancelled() -> bool:
    """Tell whether cancellation of the running task was requested."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
