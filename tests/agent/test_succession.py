"""Two agents and the socket and lock between them, without their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.agent import succession
from vgpu_agent.agent.succession import SOCKET, Succession
from vgpu_agent.errors import AgentError
from vgpu_agent.journal import Journal


class Agents:
    """The agents of one node, which share a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.journal = directory, Journal()
        self.made: list[Succession] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.waits = 0

    def another(self) -> Succession:
        """One more agent, which has done nothing yet."""
        self.made.append(Succession(str(self.directory), self.directory / "kubelet", self.journal))
        return self.made[-1]

    def count_wait(self) -> None:
        """See `Succession.find_predecessor`."""
        self.waits += 1

    async def serving(self) -> Succession:
        """An agent that serves the node."""
        agent = self.another()
        assert not await agent.find_predecessor(self.count_wait)
        await agent.listen(_release, _unlink, _serve_again)
        return agent


async def _release(_: Callable[[], bool]) -> None:
    """Let go of nothing."""


async def _register() -> None:
    """Register nothing."""


async def _unlink(_: Collection[str]) -> bool:
    """Serve until the successor has registered."""
    return True


async def _serve_again() -> None:
    """Undo nothing."""


class Successor:
    """A connection that asks for the node, and then does what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def asking(cls, agents: Agents, *, waits_seconds: float = 30) -> Successor:
        """One that has sent its request."""
        successor = cls(*await asyncio.open_unix_connection(os.fspath(agents.directory / SOCKET)))
        agents.connections.append(successor.writer)
        request = {
            "protocol": 1,
            "version": "0",
            "kubeletDirectory": os.fspath(agents.directory / "kubelet"),
            "resources": ["a/b"],
            "waitsUntil": time.monotonic() + waits_seconds,
        }
        await successor.say(request)
        return successor

    async def say(self, line: object) -> None:
        """Send one line."""
        self.writer.write(json.dumps(line).encode() + b"\n")
        await self.writer.drain()

    async def answer(self) -> dict[str, object]:
        """Return the next answer of the predecessor."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return dict(json.loads(await self.reader.readline()))


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[Agents]:
    """A node without an agent."""
    agents = Agents(tmp_path)
    yield agents
    for connection in agents.connections:
        connection.close()
        await connection.wait_closed()
    for agent in reversed(agents.made):
        await agent.stop_listening()
        agent.stop_answering()
        agent.close()


async def test_an_agent_that_starts_waits_for_one_that_has_just_begun(agents: Agents) -> None:
    """Both have found no socket. The second must not serve as well."""
    first, second = agents.another(), agents.another()
    assert not await first.find_predecessor(agents.count_wait)
    finding = asyncio.ensure_future(second.find_predecessor(agents.count_wait))
    while not agents.waits:  # noqa: ASYNC110 - what is waited for is a call
        await asyncio.sleep(0.01)
    assert not finding.done()
    await first.listen(_release, _unlink, _serve_again)
    assert await finding
    await second.take_over(["a/b"], _register)
    assert first.handed_over.is_set()


async def test_the_lock_is_free_when_an_agent_has_ended(agents: Agents) -> None:
    """The next one does not wait."""
    first = await agents.serving()
    await first.stop_listening()
    first.close()
    assert not await agents.another().find_predecessor(agents.count_wait)
    assert agents.waits == 0


async def test_the_end_of_an_agent_that_has_handed_over_removes_no_socket(agents: Agents) -> None:
    """Its successor puts its own there at any moment. Without one, the next agent would wait for
    45 s, and then serve beside the successor.
    """
    first = await agents.serving()
    second = agents.another()
    assert await second.find_predecessor(agents.count_wait)
    await second.take_over(["a/b"], _register)
    file = agents.directory / SOCKET
    await first.stop_listening()
    assert file.is_socket()
    await second.listen(_release, _unlink, _serve_again)
    await second.stop_listening()
    assert not file.exists()


async def test_a_third_agent_that_had_connected_to_the_first_gives_up(agents: Agents) -> None:
    """It has connected before the hand-over, and its request comes after it. To wait for the lock
    would be in vain: the second agent has it, and keeps it.
    """
    first, third = await agents.serving(), agents.another()
    assert await third.find_predecessor(agents.count_wait)
    second = agents.another()
    assert await second.find_predecessor(agents.count_wait)
    await second.take_over(["a/b"], _register)
    await first.stop_listening()
    with pytest.raises(AgentError, match="another agent is just taking over"):
        await third.take_over(["a/b"], _register)


async def test_a_third_agent_that_is_refused_gives_up_when_the_second_serves(
    agents: Agents,
) -> None:
    """The second was quicker to take the lock of an agent that ended, and keeps it."""
    first, third = await agents.serving(), agents.another()
    assert await third.find_predecessor(agents.count_wait)
    first._stopping = True  # SIGTERM
    taking = asyncio.ensure_future(third.take_over(["a/b"], _register))
    while third._predecessor is not None:  # noqa: ASYNC110 - nothing announces the refusal
        await asyncio.sleep(0.01)
    await first.stop_listening()
    first.close()
    await agents.serving()
    with pytest.raises(AgentError, match="another agent is just taking over"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await taking


async def test_a_third_agent_finds_the_first_until_the_second_listens(agents: Agents) -> None:
    """The first has let go of the lock, and the second has no socket yet: a third one that finds
    neither would serve beside it.
    """
    first, second = await agents.serving(), agents.another()
    assert await second.find_predecessor(agents.count_wait)
    taking = asyncio.ensure_future(second.take_over(["a/b"], _register))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await first.handed_over.wait()
    await first.stop_listening()
    third = agents.another()
    assert await third.find_predecessor(agents.count_wait)
    with pytest.raises(AgentError, match="another agent is just taking over"):
        await third.take_over(["a/b"], _register)
    await taking


async def test_an_agent_that_hung_leaves_the_socket_of_the_one_that_began(agents: Agents) -> None:
    """It wakes up and ends, and the next agent must still find the one that serves."""
    first = await agents.serving()
    second = agents.another()
    await second.listen(_release, _unlink, _serve_again)
    await first.stop_listening()
    assert (agents.directory / SOCKET).is_socket()


async def _found(agents: Agents) -> Succession:
    """Return an agent that has found a predecessor."""
    new = agents.another()
    assert await new.find_predecessor(agents.count_wait)
    return new


async def test_a_socket_that_could_not_be_made_is_made_later(agents: Agents) -> None:
    """A disk that was full for a moment must not cost the next update its hand-over."""
    (agents.directory / "succession.new").mkdir()
    first = await agents.serving()
    await first.listen_again()
    assert [entry.event for entry in agents.journal.entries] == ["succession.unavailable"]
    (agents.directory / "succession.new").rmdir()
    await first.listen_again()
    await (await _found(agents)).take_over(["a/b"], _register)
    assert first.handed_over.is_set()


async def test_a_socket_that_was_removed_is_made_again(agents: Agents) -> None:
    """The next agent would wait for 45 s, and then serve beside this one. When the first attempt
    fails, the lock is let go, and taken again with the next one.
    """
    first = await agents.serving()
    (agents.directory / "succession.new").mkdir()
    (agents.directory / SOCKET).unlink()
    await first.listen_again()
    assert await agents.another()._take_lock()
    agents.made[-1].close()
    (agents.directory / "succession.new").rmdir()
    await first.listen_again()
    second = await _found(agents)
    assert not await agents.another()._take_lock()
    await second.take_over(["a/b"], _register)
    assert first.handed_over.is_set()


@pytest.mark.parametrize("case", ["hung", "without a socket", "after one that hung"])
async def test_no_socket_takes_the_place_of_another_agents(agents: Agents, case: str) -> None:
    """The other agent began while this one hung, or could make no socket. The next update would
    take the node over from the wrong one.
    """
    blocked = agents.directory / "succession.new"
    if case == "hung":
        first, second = await agents.serving(), agents.another()
        await second.listen(_release, _unlink, _serve_again)
    else:
        blocked.mkdir()
        first = await agents.serving()
        if case == "after one that hung":
            first._predecessor_silent = True
        blocked.rmdir()
        second = await agents.serving()
    await first.listen_again()
    await (await _found(agents)).take_over(["a/b"], _register)
    assert second.handed_over.is_set()
    assert not first.handed_over.is_set()


@pytest.mark.looptime
async def test_the_socket_is_checked_every_half_minute(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed one is there again before an update of the next node is through."""
    agent, at = agents.another(), list[float]()
    loop = asyncio.get_running_loop()

    async def note() -> None:
        at.append(loop.time())

    monkeypatch.setattr(agent, "listen_again", note)
    began = loop.time()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(100):
            await agent.keep_listening()
    assert [round(each - began) for each in at] == [30, 60, 90]


async def test_only_the_end_of_the_successor_counts(agents: Agents) -> None:
    """A connection that was open before, and asked for nothing, may end at any time."""
    first = await agents.serving()
    _, idle = await asyncio.open_unix_connection(os.fspath(agents.directory / SOCKET))
    await asyncio.sleep(0.05)  # it is accepted before the successor's
    second = agents.another()
    assert await second.find_predecessor(agents.count_wait)
    await second.take_over(["a/b"], _register)
    idle.close()
    await asyncio.sleep(0.2)
    assert not first.successor_lost.is_set()
    second.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await first.successor_lost.wait()


async def test_a_successor_that_ends_before_it_has_registered_changes_nothing(
    agents: Agents,
) -> None:
    """The old agent has let go of nothing yet, so it serves on, also for the next successor."""
    first = agents.another()
    assert not await first.find_predecessor(agents.count_wait)
    again = asyncio.Event()

    async def serve_again() -> None:
        again.set()

    await first.listen(_release, _unlink, serve_again)
    successor = await Successor.asking(agents)
    assert (await successor.answer())["serving"]
    successor.writer.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await again.wait()
    assert not first.handed_over.is_set()

    third = agents.another()
    assert await third.find_predecessor(agents.count_wait)
    await third.take_over(["a/b"], _register)
    assert first.handed_over.is_set()
    assert not first.successor_lost.is_set()


async def test_a_word_that_comes_late_is_not_the_end_of_the_successor(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old agent would take the node back from one that serves it."""
    first = await agents.serving()
    monkeypatch.setattr(succession, "ANSWER_SECONDS", 0.2)
    successor = await Successor.asking(agents)
    assert (await successor.answer())["serving"]
    assert (await successor.answer())["released"]
    await successor.say({"registered": True})
    await asyncio.sleep(0.2)
    assert not first.successor_lost.is_set()
    successor.writer.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await first.successor_lost.wait()


@pytest.mark.parametrize(
    ("waits_seconds", "second_line", "awaited"),
    [
        (30, lambda now: {"waitsUntil": now + 30}, True),
        (30, lambda _: {"registered": True}, True),
        (30, lambda now: {"waitsUntil": now - 1}, False),
        (-1, None, False),
    ],
    ids=["to the end", "does not say", "not for the second answer", "not for the first answer"],
)
async def test_a_release_knows_whether_the_successor_still_waits(
    agents: Agents,
    waits_seconds: float,
    second_line: Callable[[float], object] | None,
    *,
    awaited: bool,
) -> None:
    """One that has waited in vain for an agent that hung serves the node by then, and what this
    agent has in memory is old.
    """
    first, awaited_at_release = agents.another(), list[bool]()

    async def release(is_awaited: Callable[[], bool]) -> None:
        awaited_at_release.append(is_awaited())

    assert not await first.find_predecessor(agents.count_wait)
    await first.listen(release, _unlink, _serve_again)
    successor = await Successor.asking(agents, waits_seconds=waits_seconds)
    if second_line is not None:
        assert (await successor.answer())["serving"]
        await successor.say(second_line(time.monotonic()))
    assert (await successor.answer())["released"]
    assert awaited_at_release == [awaited]


async def test_a_fault_before_the_release_does_not_prevent_it(agents: Agents) -> None:
    """Then the node has no healthy ids for a moment, as with other kubelets."""
    first = agents.another()
    assert not await first.find_predecessor(agents.count_wait)

    async def unlink(_: Collection[str]) -> bool:
        raise OSError(28, "no space left on device")

    await first.listen(_release, unlink, _serve_again)
    successor = await Successor.asking(agents)
    assert (await successor.answer())["released"]
    assert first.handed_over.is_set()
