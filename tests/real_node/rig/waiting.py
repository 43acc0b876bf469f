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
# Each answer costs processor time here and where it comes from. After a long wait, a little later
# makes no difference.
_LONGEST_PAUSE_SECONDS, _PAUSE_PART = 0.25, 20
_Found = TypeVar("_Found")


def wait_until(
    what: str, predicate: Callable[[], _Found | None], *, timeout_seconds: float
) -> _Found:
    """The first true value of ``predicate``, asked every 50 ms at first, and less and less often
    after a second, at least every 250 ms.

    Raises:
        TimeoutError: there is none within ``timeout_seconds``; the message names ``what`` and the
            last value.
    """
    began = time.monotonic()
    while not (value := predicate()):
        waited = time.monotonic() - began
        if waited > timeout_seconds:
            raise TimeoutError(
                f"waited {timeout_seconds:g} s in vain for {what}; the last answer was {value!r}"
            )
        time.sleep(max(POLL_SECONDS, min(waited / _PAUSE_PART, _LONGEST_PAUSE_SECONDS)))
    return value
