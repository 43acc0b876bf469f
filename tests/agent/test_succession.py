"""Two agents and the socket and lock between them, without their processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from vgpu_agent.agent.succession import SOCKET, Succession
from vgpu_agent.journal import Journal


class Agents:
    """The agents of one node, which share a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Succession] = []
        self.waits = 0

    def another(self) -> Succession:
        """One more agent, which has done nothing yet."""
        self.made.append(Succession(str(self.directory), self.directory / "kubelet", Journal()))
        return self.made[-1]

    def count_wait(self) -> None:
        """See `Succession.find_predecessor`."""
        self.waits += 1

    async def serving(self) -> Succession:
        """An agent that serves the node."""
        agent = self.another()
        assert not await agent.find_predecessor(self.count_wait)
        await agent.listen(_release, _unlink)
        return agent


async def _release() -> None:
    """Let go of nothing."""


async def _unlink(_: Collection[str]) -> bool:
    """Serve until the successor has registered."""
    return True


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[Agents]:
    """A node without an agent."""
    agents = Agents(tmp_path)
    yield agents
    for agent in reversed(agents.made):
        await agent.stop_listening()
        agent.close()


async def test_an_agent_that_starts_waits_for_one_that_has_just_begun(agents: Agents) -> None:
    """Both have found no socket. The second must not serve as well."""
    first, second = agents.another(), agents.another()
    assert not await first.find_predecessor(agents.count_wait)
    finding = asyncio.ensure_future(second.find_predecessor(agents.count_wait))
    while not agents.waits:  # noqa: ASYNC110 - what is waited for is a call
        await asyncio.sleep(0.01)
    assert not finding.done()
    await first.listen(_release, _unlink)
    assert await finding
    await second.take_over(["a/b"], _release)
    assert first.handed_over.is_set()


async def test_the_lock_is_free_when_an_agent_has_ended(agents: Agents) -> None:
    """The next one does not wait."""
    first = await agents.serving()
    await first.stop_listening()
    first.close()
    assert not await agents.another().find_predecessor(agents.count_wait)
    assert agents.waits == 0


async def test_only_the_end_of_the_successor_counts(agents: Agents) -> None:
    """A connection that was open before, and asked for nothing, may end at any time."""
    first = await agents.serving()
    _, idle = await asyncio.open_unix_connection(os.fspath(agents.directory / SOCKET))
    await asyncio.sleep(0.05)  # it is accepted before the successor's
    second = agents.another()
    assert await second.find_predecessor(agents.count_wait)
    await second.take_over(["a/b"], _release)
    idle.close()
    await asyncio.sleep(0.2)
    assert not first.successor_lost.is_set()
    second.close()
    async with asyncio.timeout(5):
        await first.successor_lost.wait()
