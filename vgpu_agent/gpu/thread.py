"""The one thread that calls the driver, and its queue of jobs,
so that the event loop never waits inside a driver call.

A driver call can block for seconds while a card resets, or for ever when it dies. So a single
daemon thread owns NVML: it runs jobs from the event loop one by one and waits for driver events in
between. When a call does not return in time, the loop reports the call and the GPU, fails all
waiting jobs, and refuses new ones until the call returns. A daemon thread never keeps the process
from ending.

Samples of the GPU usage of all processes are taken in between as well, while there is a container
whose library (that of the backend `vgpu-control`) limits its compute by them (`sampling`).

Used by `watch`, which also calls `look` regularly, so that a hang is noticed without a waiting job.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from vgpu_agent.errors import AgentError, NvmlHungError
from vgpu_agent.gpu.sampling import ProcessSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.gpu.nvml import CallInFlight, DeviceEvent, Nvml
    from vgpu_agent.gpu.session import Session

T = TypeVar("T")

# A job that arrives while the thread waits for events starts after this long at worst.
_LONGEST_TICK_SECONDS = 0.2
_SHORTEST_TICK_SECONDS = 0.001  # the driver waits for whole milliseconds


class Listener(msgspec.Struct, frozen=True):
    """The receiver of the thread's own reports; each function is called on the event loop.

    Attributes:
        event: the driver reported something.
        wait_failed: waiting for events failed with this text.
        hung: a call does not return; once for each hang.
        answering: the call that hung has returned, after this many seconds.
        waiting: a caller still waits for a long job; at least once in every call timeout, so that
            the loop of the caller can show that it is not stuck.
        not_sampled: samples of processes failed with this text.
    """

    event: Callable[[DeviceEvent], None]
    wait_failed: Callable[[str], None]
    hung: Callable[[CallInFlight], None]
    answering: Callable[[CallInFlight, float], None]
    waiting: Callable[[], None] = lambda: None
    not_sampled: Callable[[str], None] = lambda _: None


class _Job(Generic[T]):
    """A function to run in the thread, and the future of its result on the loop."""

    def __init__(self, name: str, function: Callable[[], T], future: asyncio.Future[T]) -> None:
        self.name, self.function, self.future = name, function, future


# A call that takes longer is reported as hung.
CALL_TIMEOUT_SECONDS = 5.0
# The most that a single wait for events may take; `_LONGEST_TICK_SECONDS` is below it. The agent's
# stop waits twice as long for the thread.
EVENT_WAIT_SECONDS = 0.5


class NvmlThread:
    """The owner of NVML.

    State: the queue of jobs, for some of which no caller may wait any more. While a call hangs,
    `hang` names it. Everything but `pass_on`, `_main` and their callees belongs to the event loop.

    Attributes:
        sampler: takes the samples; its user tells it of which GPUs, and where to put them.
    """

    def __init__(self, nvml: Nvml, session: Session, listener: Listener) -> None:
        self.sampler = ProcessSampler(nvml, session.handle)
        self._nvml, self._session, self._listener = nvml, session, listener
        # None only wakes the thread, when it is to end
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._hang: CallInFlight | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="nvml", daemon=True)

    @property
    def hang(self) -> CallInFlight | None:
        """The call that does not return; None while the driver answers."""
        return self._hang

    def start(self) -> None:
        """Begin, with the running event loop as the one that gets the results."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, name: str, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread and wait for its result; its exceptions are raised here.

        Args:
            name: its name in errors.
            function: may use NVML; nothing on the event loop.

        Raises:
            NvmlHungError: a driver call hangs, now or before this job began, or the thread does
                not run; the job may still run later, or never.
        """
        if self._loop is None or self._ended.is_set():
            raise NvmlHungError(f"{name}: the NVML thread is not running")
        self.look()
        if self._hang is not None:
            raise self._hung_error(name, self._hang)
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.add(future)
        self._jobs.put(_Job(name, function, future))
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=self._until_next_look())
                if not future.done():
                    self._listener.waiting()
                    self.look()
                    if self._ended.is_set():
                        raise NvmlHungError(f"{name}: the NVML thread has ended")
            return future.result()
        finally:
            self._waiting.discard(future)
            # no effect on a finished future; otherwise the thread will not begin a job for which
            # no caller waits any more
            future.cancel()

    def look(self) -> None:
        """Notice that a call hangs, or that it has returned."""
        running = self._nvml.in_flight
        if self._hang is not None and running is not self._hang:
            returned, self._hang = self._hang, None
            self._listener.answering(returned, time.monotonic() - returned.started)
        if (
            self._hang is None
            and running is not None
            and time.monotonic() - running.started > CALL_TIMEOUT_SECONDS
        ):
            self._hang = running
            for future in self._waiting:
                if not future.done():
                    future.set_exception(self._hung_error("NVML", running))
            self._listener.hung(running)

    def stop(self) -> None:
        """Let the thread close the driver and end once its current call has returned;
        does not wait for that.
        """
        self._stopping = True
        self._jobs.put(None)

    async def stopped(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread; return False when it is still inside a call after that
        time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def _until_next_look(self) -> float:
        now = time.monotonic()
        running = self._nvml.in_flight
        until_hung = (
            CALL_TIMEOUT_SECONDS
            if running is None
            else running.started + CALL_TIMEOUT_SECONDS - now
        )
        # a call that began a moment after the look is caught by the next one
        return max(until_hung, 0.01)

    @staticmethod
    def _hung_error(name: str, call: CallInFlight) -> NvmlHungError:
        about = f" about {call.gpu}" if call.gpu else ""
        seconds = time.monotonic() - call.started
        return NvmlHungError(
            f"{name}: the NVIDIA driver hangs in {call.name}{about} for {seconds:.1f} s; see "
            "dmesg, the node may need a reboot"
        )

    # ---- inside the thread

    def pass_on(self, event: DeviceEvent) -> None:
        """Hand an event to the loop; for jobs that find one while they run."""
        self._report(self._listener.event, event)

    def _main(self) -> None:
        try:
            while not self._stopping:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    job = self._wait()
                if job is not None:
                    self._run(job)
                self._sample()
                if self._hang is not None:
                    self._report(self.look)
            self._session.close()
        finally:
            self._report(self._ended.set)

    def _wait(self) -> _Job[Any] | None:
        """Wait for one tick: for an event if there is an event queue, else for a job."""
        tick = min(EVENT_WAIT_SECONDS, _LONGEST_TICK_SECONDS, self.sampler.wait_seconds())
        tick = max(tick, _SHORTEST_TICK_SECONDS)
        if self._session.listening:
            try:
                event = self._session.wait(tick)
            except AgentError as err:
                self._report(self._listener.wait_failed, str(err))
            else:
                if event is not None:
                    self.pass_on(event)
                return None
        with contextlib.suppress(queue.Empty):
            return self._jobs.get(timeout=tick)
        return None

    def _sample(self) -> None:
        try:
            self.sampler.sample()
        except Exception as err:  # noqa: BLE001
            # health is watched in this thread, so nothing about samples may end it
            self._report(self._listener.not_sampled, f"{type(err).__name__}: {err}")

    def _run(self, job: _Job[Any]) -> None:
        if job.future.cancelled():
            return
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.function()
        except BaseException as err:  # noqa: BLE001
            # any exception belongs to the caller that waits for the job, not to this thread
            error = err
        self._report(_settle, job.future, result, error)

    def _report(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            # the loop is closed: the process is ending without a listener
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.done():  # given up by its caller
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
