"""The search for blocking calls on the event loop, which `tests/conftest.py` keeps on from test to
test: each of these tests runs after one that has switched it off, or on again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from blockbuster import BlockingError

import vgpu_agent

_BLOCKING = "import os\nos.listdir('/')\n"


async def _block() -> None:
    """Make a blocking call in what counts as a module of the agent."""
    module = Path(vgpu_agent.__file__).with_name("blocking.py")
    exec(compile(_BLOCKING, str(module), "exec"))  # noqa: S102 - code with another module's name


async def test_a_blocking_call_of_the_agent_fails_a_test() -> None:
    """Without it, what stops every pod's start for a while would not be noticed."""
    with pytest.raises(BlockingError, match=r"os\.listdir"):
        await _block()


@pytest.mark.usefixtures("loop_may_block")
async def test_a_test_may_block_on_purpose() -> None:
    """Some libraries are called in a loop of their own, where nothing else waits."""
    await _block()


async def test_the_next_test_may_not() -> None:
    """After one with `loop_may_block`."""
    with pytest.raises(BlockingError):
        await _block()
