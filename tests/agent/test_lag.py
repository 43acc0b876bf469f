"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.patience import eventually
from vgpu_agent.agent.lag import LoopLag


def test_before_the_first_sample_there_is_no_lag() -> None:
    """A scrape in the first tenth of a second shows zero."""
    assert (LoopLag().percentile_99_seconds, LoopLag().max_seconds) == (0.0, 0.0)


@pytest.mark.looptime
async def test_an_idle_loop_is_in_time() -> None:
    """On virtual time nothing is late, and the loop sends a heartbeat each time."""
    lag, beats = LoopLag(), []
    task = asyncio.ensure_future(lag.run(lambda: beats.append(1)))
    await asyncio.sleep(10.05)
    task.cancel()
    assert lag.max_seconds == pytest.approx(0, abs=1e-6)
    assert len(beats) == 100


async def test_a_blocked_loop_shows_as_lag() -> None:
    """Half a second in which nothing else could run is seen as such."""
    lag = LoopLag()
    task = asyncio.ensure_future(lag.run(lambda: None))
    await asyncio.sleep(0.05)
    _block(0.5)
    await eventually(lambda: lag.max_seconds >= 0.3)
    task.cancel()


def _block(seconds: float) -> None:
    """Hold the loop, as a long computation does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
