"""One JSON object a line, the same shape for everybody."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from vgpu_agent import log
from vgpu_agent.concurrency import Supervisor


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the log wrote; the root logger is put back afterwards."""
    stream = io.StringIO()
    log.configure(stream=stream)
    yield stream
    log.configure(level="debug", stream=io.StringIO())


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
    """The detector of blocked loops lets it pass, or tests would show no word of what the agent's loops complain of."""
    called = asyncio.Event()

    async def fail() -> None:
        called.set()
        raise RuntimeError("boom")

    async with Supervisor(backoff_min_seconds=60, backoff_max_seconds=60) as supervisor:
        supervisor.start("failing", fail)
        await called.wait()
        await supervisor.stop("failing")
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert (line["msg"], line["task"], line["exception"][0]["exc_value"]) == ("task.restarting", "failing", "boom")


def test_the_level_can_be_changed_while_running(lines: io.StringIO) -> None:
    """Debug lines appear after the change and not before."""
    log.get("x").debug("before")
    log.set_level("debug")
    log.get("x").debug("after")
    assert [json.loads(line)["msg"] for line in lines.getvalue().splitlines()] == ["after"]
    assert log.current_level() == "debug"


def test_an_unknown_level_names_the_known_ones(lines: io.StringIO) -> None:
    """The remedy stands in the message."""
    with pytest.raises(ValueError, match="'loud' is not known; use one of debug, info, warning, error"):
        log.set_level("loud")


def test_a_logger_that_is_put_together_for_good_follows_the_level(lines: io.StringIO) -> None:
    """The agent's own loggers are, and an operator changes the level while it runs."""
    log.configure(stream=lines, for_good=True)
    assert structlog.get_config()["cache_logger_on_first_use"]
    logger = log.get("x")
    for level in ("info", "warning", "info"):
        log.set_level(level)
        logger.info("said", at=level)
    assert [json.loads(line)["at"] for line in lines.getvalue().splitlines()] == ["info", "info"]
