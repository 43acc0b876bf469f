"""One JSON object a line, of the same shape for all loggers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading

import pytest
import structlog

from vgpu_agent import log
from vgpu_agent.concurrency import Supervisor


def test_our_lines_and_a_librarys_lines_have_one_shape(lines: io.StringIO) -> None:
    """Both carry ts, level, logger and msg; ours carry their facts as keys."""
    log.get("vgpu_agent.gpu.watch").info("gpu.unhealthy", gpu="GPU-1", xid=79)
    logging.getLogger("grpclib").warning("stream %s closed", 3)
    ours, theirs = map(json.loads, lines.getvalue().splitlines())
    assert ours.keys() - {"gpu", "xid"} == theirs.keys() == {"ts", "level", "logger", "msg"}
    assert (ours["msg"], ours["logger"], ours["xid"]) == ("gpu.unhealthy", "gpu.watch", 79)
    assert theirs["msg"] == "stream 3 closed"
    assert list(ours)[:4] == ["ts", "level", "msg", "logger"]


def test_an_exception_stays_on_one_line(lines: io.StringIO) -> None:
    """A traceback is part of the JSON object."""
    log.get("x").error("task.restarting", exc_info=RuntimeError("boom"))
    (line,) = lines.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "boom"


async def test_a_traceback_that_is_logged_from_the_loop_is_not_lost(lines: io.StringIO) -> None:
    """The detector of blocked loops lets it pass,
    or tests would not show the complaints of the agent's loops.
    """
    called = asyncio.Event()

    async def fail() -> None:
        called.set()
        raise RuntimeError("boom")

    async with Supervisor(backoff_min_seconds=60, backoff_max_seconds=60) as supervisor:
        supervisor.start("failing", fail)
        await called.wait()
        await supervisor.stop("failing")
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert (line["msg"], line["task"], line["exception"][0]["exc_value"]) == (
        "task.restarting",
        "failing",
        "boom",
    )


def test_the_level_can_be_changed_while_running(lines: io.StringIO) -> None:
    """Debug lines appear after the change and not before."""
    log.get("x").debug("before")
    log.set_level("debug")
    log.get("x").debug("after")
    assert [json.loads(line)["msg"] for line in lines.getvalue().splitlines()] == ["after"]
    assert log.current_level() == "debug"


def test_an_unknown_level_names_the_known_ones(lines: io.StringIO) -> None:
    """The message has the remedy."""
    with pytest.raises(
        ValueError, match="'loud' is not known; use one of debug, info, warning, error"
    ):
        log.set_level("loud")


def test_a_logger_that_is_put_together_for_good_follows_the_level(lines: io.StringIO) -> None:
    """The agent's own loggers are, and an operator changes the level while it runs."""
    log.configure(stream=lines, cache_loggers=True)
    assert structlog.get_config()["cache_logger_on_first_use"]
    logger = log.get("x")
    for level in ("info", "warning", "info"):
        log.set_level(level)
        logger.info("said", at=level)
    assert [json.loads(line)["at"] for line in lines.getvalue().splitlines()] == ["info", "info"]


class _Time:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _limited(time: _Time) -> io.StringIO:
    """The log of this process from now on, whose repeated lines are limited by this clock."""
    stream = io.StringIO()
    log.configure(stream=stream)
    (handler,) = logging.getLogger().handlers
    (ours,) = handler.filters
    handler.removeFilter(ours)
    handler.addFilter(log.RepeatedLines(time))
    return stream


@pytest.mark.usefixtures("lines")
def test_a_librarys_repeated_line_is_limited_and_the_rest_counted() -> None:
    """asyncio's line for each connection that could not be accepted has filled disks.
    Their number is logged once.
    """
    time = _Time()
    stream = _limited(time)
    for number in range(500):
        cause = OSError(24, "Too many open files")
        logging.getLogger("asyncio").error(
            "socket.accept() out of system resource\nsocket: <fd=%s>", number, exc_info=cause
        )
    assert stream.getvalue().count("out of system resource") == 20
    time.now += 61
    log.get("vgpu_agent.web").info("web.listening")
    suppressed = [
        json.loads(line) for line in stream.getvalue().splitlines() if "log.suppressed" in line
    ]
    assert [(line["lines"], line["of_logger"], line["similar_to"]) for line in suppressed] == [
        (480, "asyncio", "socket.accept() out of system resource")
    ]
    logging.getLogger("asyncio").error("socket.accept() out of system resource")
    assert stream.getvalue().count('"msg":"socket.accept() out of system resource') == 21


@pytest.mark.usefixtures("lines")
def test_a_storm_of_one_kind_hides_no_other_kind() -> None:
    """Other events, other levels, other exceptions behind the same words,
    and the lines of 110 pods that start at once.
    """
    stream = _limited(_Time())
    asyncios, ours = logging.getLogger("asyncio"), log.get("vgpu_agent.web.server")
    for _ in range(100):
        ours.info("web.bad_request", error="junk")
        asyncios.error("it failed: %s", 1)
    ours.warning("web.bad_request", error="another level")
    asyncios.error("it failed: %s", 1, exc_info=ValueError("another cause"))
    asyncios.error("something else failed")
    for number in range(110):
        ours.info("start.bound", pod=f"ml/{number}")
    lines = [json.loads(line)["msg"] for line in stream.getvalue().splitlines()]
    assert (
        lines.count("web.bad_request"),
        lines.count("it failed: 1"),
        lines.count("start.bound"),
    ) == (21, 21, 110)
    assert "something else failed" in lines


@pytest.mark.usefixtures("lines")
def test_endless_kinds_of_lines_take_bounded_memory() -> None:
    """A library that puts foreign text into its template makes each line a kind of its own. What
    was left out is reported all the same.
    """
    stream = _limited(_Time())
    for _ in range(30):
        logging.getLogger("library").warning("the same")
    for number in range(2000):
        # as such a library does
        logging.getLogger("library").warning(f"another {number}")  # noqa: G004
    (told,) = [
        json.loads(line) for line in stream.getvalue().splitlines() if "log.suppressed" in line
    ]
    assert (told["lines"], told["similar_to"]) == (10, "the same")


@pytest.mark.usefixtures("lines")
def test_threads_that_log_at_once_get_no_error_of_the_limiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML's thread and those that read files log as well, and one of them would die of a line."""
    monkeypatch.setattr(log, "_WINDOW_SECONDS", 0.0005)
    limiter, errors = log.RepeatedLines(), list[BaseException]()

    def hammer(name: str) -> None:
        try:
            for number in range(5000):
                limiter.filter(
                    logging.LogRecord(name, logging.INFO, "", 0, f"line {number % 700}", None, None)
                )
        except (RuntimeError, KeyError) as err:
            errors.append(err)

    threads = [threading.Thread(target=hammer, args=(f"thread {number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_message_is_new_until_it_is_repeated() -> None:
    """By subject: when it begins, when it changes, and when it begins again once forgotten."""
    changes = log.ChangeFilter()
    assert [changes.is_new("a", text) for text in ("full", "full", "gone", "gone", "full")] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert changes.is_new("b", "full")
    assert (changes.forget("a"), changes.forget("a")) == (True, False)
    assert changes.is_new("a", "full")


def test_a_message_that_lasts_is_new_again_after_a_time() -> None:
    """The time runs from the line, and not from the last repetition."""
    changes = log.ChangeFilter(again_seconds=60)
    assert [now for now in (0, 30, 59, 60, 100, 120) if changes.is_new("a", "full", now=now)] == [
        0,
        60,
        120,
    ]


def test_subjects_that_are_gone_are_forgotten() -> None:
    """A pod of the same name is another one, and memory does not grow with those that are gone."""
    changes = log.ChangeFilter()
    for subject in ("a", "b", "c"):
        changes.is_new(subject)
    changes.keep_only({"b", "d"})
    assert len(changes) == 1
    assert [subject for subject in ("a", "b") if changes.is_new(subject)] == ["a"]
