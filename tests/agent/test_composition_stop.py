"""The order in which an agent stops: whatever may start without it is put right
before the kubelet learns that it may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from vgpu_agent.agent.composition import Agent
from vgpu_agent.agent.devices.mps import MpsController
from vgpu_agent.agent.offers.servers import Offering
from vgpu_agent.agent.records.grant_files import GrantKeeping
from vgpu_agent.agent.records.share_seconds import ShareSeconds
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.errors import HostFileError


class Steps:
    """Writes down the calls to the parts, instead of doing them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, trouble: str = "") -> None:
        self.taken: list[str] = []
        self._trouble = trouble
        monkeypatch.setattr(GrantKeeping, "withdraw_foreign_specs", self._withdraw)
        monkeypatch.setattr(Offering, "stop", self._retire)

    def add_those_of_a_hand_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write down the calls of a hand-over, too."""
        monkeypatch.setattr(GrantKeeping, "keep_all", lambda _: self.taken.append("all is kept"))
        monkeypatch.setattr(Offering, "hand_over", self._step("the streams end"))
        monkeypatch.setattr(ShareSeconds, "end", self._step("share seconds are written: {write}"))
        monkeypatch.setattr(MpsController, "stop", self._step("idle MPS daemons end"))

    def _step(self, words: str) -> Callable[..., Awaitable[None]]:
        async def step(*_: object, **options: object) -> None:
            self.taken.append(words.format(**options))

        return step

    async def _withdraw(self) -> None:
        self.taken.append("strangers' specs are withdrawn")
        if self._trouble:
            raise HostFileError(self._trouble)

    async def _retire(self) -> None:
        self.taken.append("the plugin servers retire")


async def agent_of(folder: Path) -> Agent:
    """An agent that has not started."""
    text = f"""\
version: v1
listen: 127.0.0.1:0
debugListen: 127.0.0.1:0
stateDirectory: {folder}/state
binding: {{cdiDirectory: {folder}/cdi}}
kubelet: {{directory: {folder}/kubelet}}
cluster: {{enabled: never}}
"""
    loaded = await asyncio.to_thread(
        load_contents, Sources({}, {}, "config.yaml"), Contents(text.encode())
    )
    return Agent(loaded)


async def stop_at_once(folder: Path, *, serves: bool = True) -> None:
    """Run an agent that is asked to stop before it has started; with ``serves``, as if it had taken
    over the node.
    """
    stop = asyncio.Event()
    stop.set()
    agent = await agent_of(folder)
    agent._serves_node = serves
    async with asyncio.timeout(10):
        await agent.run(stop)


async def test_strangers_specs_go_before_the_last_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the kubelet starts containers without asking,
    from any files under their names.
    """
    steps = Steps(monkeypatch)
    await stop_at_once(tmp_path)
    assert steps.taken == ["strangers' specs are withdrawn", "the plugin servers retire"]


async def test_a_spec_that_cannot_be_removed_does_not_keep_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only is reported,
    and the servers still drain instead of being cut off.
    """
    steps = Steps(monkeypatch, trouble="cannot remove /var/run/cdi/x.json: Read-only file system")
    await stop_at_once(tmp_path)
    assert steps.taken == ["strangers' specs are withdrawn", "the plugin servers retire"]


async def test_an_agent_that_never_served_the_node_leaves_all_to_the_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an upgrade another agent serves the node while this one starts: its specs stay, and so do
    the sums in its file, which this one has not read.
    """
    steps = Steps(monkeypatch)
    sums = tmp_path / "state" / "share-seconds.json"
    sums.parent.mkdir()
    sums.write_text("of another agent")
    await stop_at_once(tmp_path, serves=False)
    assert steps.taken == ["the plugin servers retire"]
    assert sums.read_text() == "of another agent"


@pytest.mark.parametrize("awaited", [True, False])
async def test_a_hand_over_leaves_a_successor_that_serves_already_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, awaited: bool
) -> None:
    """One that has waited in vain has newer sums, and its containers may use the daemons."""
    steps = Steps(monkeypatch)
    steps.add_those_of_a_hand_over(monkeypatch)
    agent = await agent_of(tmp_path)
    await agent._hand_over(lambda: awaited)
    assert steps.taken == [
        "all is kept",
        f"share seconds are written: {awaited}",
        "the streams end",
        *(["idle MPS daemons end"] if awaited else []),
    ]
