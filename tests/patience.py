"""Time in tests, on a machine that may be five times slower than ours,
or busy with something else for a second.

Three ways, for all tests that cannot have virtual time:

* what comes is waited for, up to `PATIENCE_SECONDS`, which only a failing test spends;
* what must not wait for something else passes in `PATIENCE_SECONDS`, while that something takes
  `FOR_EVER_SECONDS`;
* what has a budget of its own keeps to it in the quickest of several attempts (`quickest`,
  `quickest_call`), measured without what coverage's tracer adds to each line, which would be four
  fifths of what only computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

PATIENCE_SECONDS = 20.0
FOR_EVER_SECONDS = 300.0  # longer than pytest lets a test run


async def quickest(
    attempt: Callable[[], Awaitable[float | None]], *, within_seconds: float, attempts: int = 5
) -> float:
    """Seconds of the quickest attempt; the first one within the budget is the last.

    Args:
        attempt: takes this time; or answers with the seconds that count, where some of it is
            preparation.
        within_seconds: the budget.
        attempts: how many at most.
    """
    best = float("inf")
    for _ in range(attempts):
        began = time.perf_counter()
        with _untraced():
            counted = await attempt()
        best = min(best, time.perf_counter() - began if counted is None else counted)
        if best < within_seconds:
            break
    return best


def quickest_call(call: Callable[[], object], *, within_seconds: float, attempts: int = 5) -> float:
    """The same for what needs no event loop and only computes, in the processor's time; an answer
    that is a float counts instead.
    """
    best = float("inf")
    for _ in range(attempts):
        began = time.process_time()
        with _untraced():
            counted = call()
        best = min(best, counted if isinstance(counted, float) else time.process_time() - began)
        if best < within_seconds:
            break
    return best


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracing = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracing)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for something without an announcement, such as what another process does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
