"""An event loop whose clock jumps to the next timer: an image pull of minutes costs microseconds.

`looptime` does the same for single tests; a torture run makes millions of steps, and this loop,
which never asks the operating system for anything, takes a sixteenth of the time for each.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


# A step of the loop takes its time too: code that waits until a moment would otherwise ask for ever
# for less than a float can hold.
_STEP_SECONDS = 1e-9


class _Clock(selectors.SelectSelector):
    """Waits for nothing: a sleep of some seconds finds that they have passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(
                "everybody waits and no timer is set: the episode would hang for ever"
            )
        self.now += max(_STEP_SECONDS, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop without a real clock and without input; only for code that does no I/O."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        self.unheeded: list[str] = []
        super().__init__(self._virtual)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Work for another thread is done at once and here:
        a thread would run by a clock of its own.
        """
        del executor
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as err:  # noqa: BLE001 - it is passed on to the task that waits
            done.set_exception(err)
        return done

    def _note(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        self.unheeded.append(f"{context.get('message')}: {context.get('exception')!r}")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a loop of its own.

    Raises:
        AssertionError: a task or a callback failed unnoticed.
    """
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main)
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()
    assert not loop.unheeded, loop.unheeded
    return result
