"""The places of large bodies: who gets the next one, and who loses one."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.webhook import slots
from vgpu_agent.webhook.slots import Slots


class Client:
    """Bodies that hold a place until they are told to end, by address."""

    def __init__(self, places: Slots) -> None:
        self._places = places
        self.holding: list[str] = []
        self.lost: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def hold(self, name: str) -> None:
        """Hold a place; the address is the first letter of ``name``."""
        self._ends[name] = asyncio.Event()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS) as limit:
                async with self._places.held(name[0], limit):
                    self.holding.append(name)
                    try:
                        await self._ends[name].wait()
                    finally:
                        self.holding.remove(name)
        except TimeoutError:
            self.lost.append(name)

    def start(self, *names: str) -> list[asyncio.Task[None]]:
        """Let bodies arrive in this order."""
        return [asyncio.ensure_future(self.hold(name)) for name in names]

    def end(self, name: str) -> None:
        """Let a body be complete."""
        self._ends[name].set()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Two places, of which a held one is soon held for long."""
    monkeypatch.setattr(slots, "UNDISTURBED_SECONDS", 0.02)
    return Client(Slots(2))


async def finished(client: Client, *tasks: asyncio.Task[None]) -> None:
    """End every body, and what still waits."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert client.holding == []


async def test_a_free_place_goes_to_the_address_that_holds_the_fewest(client: Client) -> None:
    """Not to whoever has waited for longest: that may be one client with hundreds."""
    tasks = client.start("a1", "b1", "a2", "a3", "c1", "b2")
    await eventually(lambda: client.holding == ["a1", "b1"])
    client.end("b1")
    await eventually(lambda: client.holding == ["a1", "c1"])
    client.end("c1")
    await eventually(lambda: client.holding == ["a1", "b2"])
    client.end("a1")
    await eventually(lambda: client.holding == ["b2", "a2"])
    await finished(client, *tasks)
    assert client.lost == []


async def test_an_address_with_several_loses_its_oldest_to_one_with_none(client: Client) -> None:
    """Four stalled connections of one client do not keep the API server waiting."""
    tasks = client.start("a1", "a2")
    await eventually(lambda: len(client.holding) == 2)
    tasks += client.start("b1", "b2")
    await eventually(lambda: client.holding == ["a2", "b1"])
    assert client.lost == ["a1"]
    await asyncio.sleep(5 * slots.UNDISTURBED_SECONDS)
    assert client.holding == ["a2", "b1"]  # both have one now
    await finished(client, *tasks)
    assert client.lost == ["a1"]


async def test_a_place_is_not_lost_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that arrives as quickly as it can has time to end."""
    monkeypatch.setattr(slots, "UNDISTURBED_SECONDS", PATIENCE_SECONDS)
    tasks = client.start("a1", "a2", "b1")
    await asyncio.sleep(0.05)
    assert client.holding == ["a1", "a2"]
    client.end("a1")
    await eventually(lambda: client.holding == ["a2", "b1"])
    await finished(client, *tasks)


@pytest.mark.parametrize("ends_first", [True, False])
async def test_one_that_stops_waiting_takes_no_place(client: Client, *, ends_first: bool) -> None:
    """Its client has gone, maybe in the moment in which a place becomes free."""
    first, *others = client.start("a1", "a2", "a3", "a4")
    await eventually(lambda: len(client.holding) == 2)
    if ends_first:
        client.end("a1")
    others[1].cancel()
    client.end("a1")
    await first
    await eventually(lambda: client.holding == ["a2", "a4"])
    await finished(client, *others)
    assert client._places._waiting == []
