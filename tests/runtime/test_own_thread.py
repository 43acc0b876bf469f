"""A thread of its own: answers, errors, and jobs that take too long."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime.own_thread import OwnThread


async def test_answers_and_errors_come_back() -> None:
    """Ours as they are, so that their text stays; any other as ours, so that it ends no loop."""
    thread = OwnThread("test")
    assert await thread.run("/p", lambda: threading.current_thread().name, seconds=20) == "test"

    def ours() -> None:
        raise HostFileError("cannot write /p: no")

    def anothers() -> None:
        raise RecursionError("too deep")

    with pytest.raises(HostFileError, match=r"^cannot write /p: no$"):
        await thread.run("/p", ours, seconds=20)
    with pytest.raises(HostFileError, match=r"^work on /p failed: RecursionError: too deep$"):
        await thread.run("/p", anothers, seconds=20)


async def test_a_late_job_is_named_until_it_is_back() -> None:
    """No second one begins meanwhile, since it would wait behind the first."""
    thread, back = OwnThread("test"), threading.Event()
    with pytest.raises(HostFileError, match=r"work on /slow has not returned within 0.05 s"):
        await thread.run("/slow", lambda: back.wait(20), seconds=0.05)
    with pytest.raises(HostFileError, match=r"work on /slow has not returned for 0 s"):
        await thread.run("/other", lambda: None, seconds=20)
    back.set()
    answers: list[int] = []
    while not answers:
        with contextlib.suppress(HostFileError):
            answers.append(await thread.run("/other", lambda: 1, seconds=20))
        await asyncio.sleep(0.01)
    assert answers == [1]


async def test_a_cancelled_caller_leaves_the_job_to_the_thread() -> None:
    """The next one waits for it like for any late one."""
    thread, began, back = OwnThread("test"), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        back.wait(20)

    task = asyncio.create_task(thread.run("/p", work, seconds=20))
    await asyncio.to_thread(began.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(HostFileError, match=r"work on /p"):
        await thread.run("/other", lambda: None, seconds=20)
    back.set()
