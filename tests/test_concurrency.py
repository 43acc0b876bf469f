"""Snapshots that can be awaited, and loops that are looked after."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.concurrency import Backoff, Latest, Revision, Supervisor, TaskState


async def test_a_reader_gets_the_newest_value_and_skips_the_ones_between() -> None:
    """Three changes without a look are one for the reader."""
    latest = Latest("a")
    for value in "bcd":
        latest.publish(value)
    assert await latest.newer_than(0) == "d"
    assert latest.version == 3


async def test_all_readers_are_woken_by_one_change() -> None:
    """Two streams wait for the same version and both see it."""
    latest = Latest(0)
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        readers = [group.create_task(latest.newer_than(0)) for _ in range(2)]
        await asyncio.sleep(0)
        latest.publish(7)
    assert [reader.result() for reader in readers] == [7, 7]


async def test_changes_begin_with_the_current_value() -> None:
    """A new stream sends the list as it is before it waits."""
    latest = Latest("now")
    changes = latest.changes()
    assert await anext(changes) == "now"
    latest.publish("then")
    assert await anext(changes) == "then"
    await changes.aclose()


async def test_a_revision_counts_changes_and_wakes_its_readers() -> None:
    """The publishers need not know what the count is."""
    revision = Revision()
    reader = asyncio.ensure_future(revision.newer_than(0))
    await asyncio.sleep(0)
    revision.advance()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reader == 1
    revision.advance()
    assert (revision.value, revision.version) == (2, 2)


@pytest.mark.looptime
async def test_a_reader_in_no_hurry_sees_a_burst_of_changes_once() -> None:
    """Values within the reader's pause are one change, and the last of a burst is never missed."""
    latest, seen = Latest(0), list[int]()

    async def read() -> None:
        async for value in latest.changes(coalesce_seconds=1.0):
            seen.append(value)

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        for value in (1, 2, 3, 4):
            await asyncio.sleep(0.3)
            latest.publish(value)
        await asyncio.sleep(5)
        reader.cancel()
    assert seen == [0, 3, 4]


async def _forever() -> None:
    await asyncio.Event().wait()


def _supervisor() -> Supervisor:
    return Supervisor(backoff_min_seconds=1, backoff_max_seconds=8)


@pytest.mark.looptime
async def test_a_loop_that_fails_is_started_again_with_growing_pauses() -> None:
    """1, 2, 4, 8, 8 seconds: the pause doubles up to its end."""
    starts: list[float] = []

    async def fails() -> None:
        starts.append(asyncio.get_running_loop().time())
        raise OSError("the disk is full")

    async with _supervisor() as supervisor:
        supervisor.start("writer", fails)
        await asyncio.sleep(30)
        (report,) = supervisor.reports
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 8]
    assert report.restarts == 6
    assert report.last_error == "OSError: the disk is full"


async def test_one_failing_loop_does_not_end_the_others() -> None:
    """Each loop is looked after by itself."""
    alive = asyncio.Event()

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def works() -> None:
        await asyncio.sleep(0.01)
        alive.set()

    async with asyncio.timeout(PATIENCE_SECONDS), _supervisor() as supervisor:
        supervisor.start("buggy", fails)
        supervisor.start("good", works)
        await alive.wait()


async def test_a_loop_that_returns_has_ended() -> None:
    """Returning is no failure and starts nothing again."""

    async def once() -> None:
        return

    async with _supervisor() as supervisor:
        supervisor.start("once", once)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert supervisor.reports[0].state is TaskState.ENDED


def test_pauses_double_up_to_a_limit_and_begin_again() -> None:
    """0.2 to 30 seconds with the default settings."""
    backoff = Backoff(0.2, 1.0)

    pauses = [backoff.pause() for _ in range(5)]
    backoff.reset()

    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.pause() == 0.2


async def test_a_silent_loop_counts_as_stuck_until_it_beats() -> None:
    """A promise of a heartbeat every 5 s is broken 2 s after the seventh second,
    and kept again by a beat.
    """
    async with _supervisor() as supervisor:
        supervisor.start("watch", _forever, stuck_after_seconds=5)
        (report,) = supervisor.reports
        assert report.stuck_for(report.last_heartbeat_at + 4) == 0
        assert report.stuck_for(report.last_heartbeat_at + 7) == pytest.approx(2)
        supervisor._beats["watch"] -= 7
        assert 1.999 < supervisor.reports[0].stuck_for(time.time()) < PATIENCE_SECONDS
        supervisor.beat("watch")
        assert supervisor.reports[0].stuck_for(time.time()) == 0


async def test_a_corrected_wall_clock_makes_nobody_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's jump at boot must not let kubelet restart the agent."""
    async with _supervisor() as supervisor:
        supervisor.start("watch", _forever, stuck_after_seconds=5)
        later = time.time() + 3600
        monkeypatch.setattr("vgpu_agent.concurrency.time.time", lambda: later)
        assert supervisor.reports[0].stuck_for(later) == 0


async def test_two_loops_of_one_name_are_a_bug() -> None:
    """A name means one loop in the log."""
    async with _supervisor() as supervisor:
        supervisor.start("watch", _forever)
        with pytest.raises(RuntimeError, match="already running"):
            supervisor.start("watch", _forever)


async def test_a_stopped_loop_is_gone_and_its_name_free() -> None:
    """A resource that is withdrawn and offered again gets its loop again."""
    async with _supervisor() as supervisor:
        supervisor.start("plugin", _forever)
        await supervisor.stop("plugin")
        assert supervisor.reports == []
        supervisor.start("plugin", _forever)


async def test_a_loop_that_another_starts_again_meanwhile_is_stopped_as_well() -> None:
    """An agent that hands its node over would go on writing beside its successor."""
    async with _supervisor() as supervisor:

        async def restarts_it() -> None:
            try:
                await _forever()
            finally:
                supervisor.start("a writer", _forever)

        supervisor.start("a writer", _forever)
        supervisor.start("kept", _forever)
        supervisor.start("restarts it", restarts_it)
        await asyncio.sleep(0)
        await supervisor.stop_all_but(lambda name: name == "kept")
        assert [report.name for report in supervisor.reports] == ["kept"]


async def test_a_loop_cancelled_while_it_stops_another_ends_as_well() -> None:
    """SIGTERM may come while a plugin server is being replaced.
    A loop that went on would keep the agent from ending.
    """

    async def slow_to_end() -> None:
        try:
            await _forever()
        finally:
            await asyncio.sleep(0.01)

    async def replace() -> None:
        await supervisor.stop("old")
        supervisor.start("new", _forever)

    async with asyncio.timeout(PATIENCE_SECONDS), _supervisor() as supervisor:
        supervisor.start("old", slow_to_end)
        await asyncio.sleep(0)
        supervisor.start("replace", replace)
        await asyncio.sleep(0)
    assert [report.name for report in supervisor.reports] == ["replace"]


@pytest.mark.looptime
@pytest.mark.parametrize("by_name", [True, False])
async def test_a_loop_that_loses_a_cancellation_ends_all_the_same(*, by_name: bool) -> None:
    """A library that swallows one, in a race with its own timeout, must not keep a stop from
    ending.
    """
    lost = 0

    async def lose_one() -> None:
        nonlocal lost
        try:
            await _forever()
        except asyncio.CancelledError:
            lost += 1
        await _forever()

    async with asyncio.timeout(60):
        async with _supervisor() as supervisor:
            supervisor.start("loop", lose_one)
            await asyncio.sleep(1)
            if by_name:
                await supervisor.stop("loop")
        assert lost == 1


@pytest.mark.looptime
async def test_a_loop_whose_wait_was_cancelled_by_somebody_else_is_started_again() -> None:
    """A future that is cancelled under a loop is a failure of the loop, not its end:
    it would never be seen again.
    """
    runs = 0

    async def wait_in_vain() -> None:
        nonlocal runs
        runs += 1
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with _supervisor() as supervisor:
        supervisor.start("watch", wait_in_vain)
        await asyncio.sleep(60)
        (report,) = supervisor.reports
        assert runs == report.restarts + (report.state is TaskState.RUNNING)
        assert runs > 2
        assert report.last_error.startswith("CancelledError")
