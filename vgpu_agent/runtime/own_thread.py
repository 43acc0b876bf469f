"""A separate thread for work on files that containers can reach.

Calls of the kubelet use the threads of asyncio (`asyncio.to_thread`), so these must stay free. Work
on what a tenant has left behind may take long, or hang with the disk, so it never runs there. One
`OwnThread` does one job at a time. If a job takes too long, its caller gets an error that names the
path. Until that job has returned, `run` refuses new jobs with the same error.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from vgpu_agent.errors import AgentError, HostFileError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class NotReturnedError(HostFileError):
    """A job takes too long: it has not returned ``how_long``, such as "within 5 s".

    Attributes:
        what: what the job works on: a path, or words.
    """

    def __init__(self, what: str, how_long: str) -> None:
        self.what = what
        super().__init__(f"work on {what} has not returned {how_long}; check that file system")


_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", "Callable[[], Any]"]


class OwnThread:
    """A daemon thread for jobs, which does not delay the end of the process.

    State: the job for which no caller waits any more, because it has taken too long or the caller
    was cancelled, if there is one; forgotten when it has returned.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # what it works on, when it was queued (monotonic seconds), and its result
        self._abandoned: tuple[str, float, asyncio.Future[Any]] | None = None

    async def run(self, what: str, call: Callable[[], T], *, seconds: float) -> T:
        """Run ``call`` in the thread, and return its result.

        Args:
            what: what the job works on, a path or words; for messages.
            call: the job, which may block.
            seconds: how long it may take, with the wait for the jobs before it.

        Raises:
            NotReturnedError: it takes too long, or an earlier job has not returned yet.
            HostFileError: it raised an exception. An `AgentError` is passed on instead.
        """
        if self._abandoned is not None and not self._abandoned[2].done():
            what, since, _ = self._abandoned
            raise NotReturnedError(what, f"for {time.monotonic() - since:.0f} s")
        self._abandoned = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        queued = time.monotonic()
        self._jobs.put((loop, future, call))
        try:
            done, _ = await asyncio.wait([future], timeout=seconds)
        except asyncio.CancelledError:
            # the thread finishes the job, and `run` refuses others until then
            self._abandoned = what, queued, future
            raise
        if not done:
            self._abandoned = what, queued, future
            raise NotReturnedError(what, f"within {seconds:g} s")
        try:
            return future.result()
        except AgentError:
            raise
        except Exception as err:
            raise HostFileError(f"work on {what} failed: {type(err).__name__}: {err}") from err

    def _work(self) -> None:
        while True:
            loop, future, call = self._jobs.get()
            result, error = None, None
            try:
                result = call()
            except Exception as err:  # noqa: BLE001 - passed on to the waiting caller
                error = err
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the event loop has ended


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # no warning of asyncio if the waiter has gone
