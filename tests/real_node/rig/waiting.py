"""Waiting for something to become true, with an end.

Used by the processes inside (inside.py, node.py) for the steps of a start, and by lifecycle.Rig for
tests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_SECONDS = 0.05
_Found = TypeVar("_Found")


def wait_until(
    what: str, predicate: Callable[[], _Found | None], *, timeout_seconds: float
) -> _Found:
    """The first true value of ``predicate``, asked every 50 ms.

    Raises:
        TimeoutError: there is none within ``timeout_seconds``; the message names ``what`` and the
            last value.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {timeout_seconds:g} s in vain for {what}; the last answer was {value!r}"
            )
        time.sleep(POLL_SECONDS)
    return value
