"""Faults of an episode's node, and their end:
kubelet and agent die, the node reboots, API server, records and disk fail.

All code that starts and kills things is here, so that `episode` has only pods.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine

from tests.torture.agents import Agent, AgentFactory, World


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """Mean virtual seconds between two faults of a kind; 0 for never."""

    kubelet: float = 0.0
    agent: float = 0.0
    reboot: float = 0.0
    api: float = 0.0
    pod_resources: float = 0.0
    checkpoint: float = 0.0
    disk: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """A quiet node, a troubled one, or a nightmare."""
        pace = rng.choice((0.0, 1.0, 1.0, 4.0))
        if not pace:
            return cls()
        return cls(
            *(
                mean / pace * rng.choice((0.0, 1.0, 1.0))
                for mean in (500.0, 400.0, 2500.0, 900.0, 600.0, 600.0, 1500.0)
            )
        )


class Machine:
    """The node with everything that runs on it, and the faults that befall it.

    State: the agent that lives now, and all that have lived; a task for each kind of fault, until
    `calm_down`.
    """

    def __init__(self, world: World, make: AgentFactory, faults: Faults) -> None:
        self._world = world
        self._make = make
        self._faults = faults
        self._rng = world.rng
        self._disturbances: list[asyncio.Task[None]] = []
        self.agent: Agent | None = None
        self.agents: list[Agent] = []

    @property
    def offers(self) -> bool:
        """Tell whether the kubelet has any healthy id."""
        return any(self._world.kubelet.devices.healthy.values())

    async def start(self) -> None:
        """Switch it on; faults come from now on."""
        self._world.kubelet.start()
        await self._start_agent()
        means = self._faults
        kinds: tuple[tuple[float, Callable[[], Coroutine[None, None, None]]], ...] = (
            (means.kubelet, self._kubelet_dies),
            (means.agent, self._agent_dies),
            (means.reboot, self._node_reboots),
            (means.api, self._api_goes),
            (means.pod_resources, lambda: self._flag("pod_resources_silent")),
            (means.checkpoint, lambda: self._flag("checkpoint_unreadable")),
            (means.disk, self._disk_fills),
        )
        loop = asyncio.get_running_loop()
        self._disturbances = [
            loop.create_task(self._now_and_then(mean, fault)) for mean, fault in kinds if mean
        ]

    async def calm_down(self) -> None:
        """End all faults."""
        for task in self._disturbances:
            task.cancel()
        await asyncio.sleep(0)
        self._world.story.tell("calm")
        world = self._world
        if world.api.away:
            world.api.come_back()
        world.pod_resources_silent = world.checkpoint_unreadable = world.files.full = False
        self._start_kubelet()
        await self._start_agent()
        if not self.offers:
            await asyncio.sleep(2.0)
            self._register_again(self.agent)

    async def stop(self) -> None:
        """Switch it off for good."""
        for agent in self.agents:
            agent.life.kill()
        self._world.kubelet.kill()
        await asyncio.sleep(60.0)
        for agent in self.agents:
            agent.life.bury()

    async def _now_and_then(
        self, mean: float, fault: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / mean))
            await fault()

    async def _kubelet_dies(self) -> None:
        kubelet = self._world.kubelet
        if not kubelet.up:
            return
        kubelet.kill()
        await asyncio.sleep(self._rng.random() * self._rng.choice((0.5, 20.0)))
        self._start_kubelet()

    def _start_kubelet(self) -> None:
        if not self._world.kubelet.up:
            self._world.kubelet.start()
            self._world.story.tell("kubelet started")
            # The agent sees the new socket.
            asyncio.get_running_loop().call_later(
                0.05 + self._rng.random() * 0.8, self._register_again, self.agent
            )

    def _register_again(self, agent: Agent | None) -> None:
        if (
            agent is not None
            and agent is self.agent
            and not agent.life.dead
            and self._world.kubelet.up
        ):
            agent.register()

    async def _agent_dies(self) -> None:
        if self.agent is None:
            return
        self._kill_agent()
        await asyncio.sleep(self._rng.random() * self._rng.choice((0.5, 10.0, 60.0)))
        await self._start_agent()

    def _kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.life.kill()
            self.agent = None
            self._world.api.disconnect()
            self._world.kubelet.devices.streams_end()
            self._world.story.tell("agent killed")

    async def _start_agent(self) -> None:
        if self.agent is None:
            self.agent = agent = self._make(self._world)
            self.agents.append(agent)
            self._world.story.tell("agent started")
            await agent.begin()

    async def _node_reboots(self) -> None:
        kubelet = self._world.kubelet
        if not kubelet.up:
            return
        self._world.story.tell("node reboots")
        kubelet.kill()
        self._kill_agent()
        kubelet.reboot()
        self._world.files.reboot()
        self._world.booted_at = asyncio.get_running_loop().time()
        await asyncio.sleep(self._rng.random() * 30.0)
        if self._rng.random() < 0.5:
            await self._start_agent()
            await asyncio.sleep(self._rng.random() * 5)
            self._start_kubelet()
        else:
            self._start_kubelet()
            await asyncio.sleep(self._rng.random() * 5)
            await self._start_agent()

    async def _api_goes(self) -> None:
        self._world.api.leave()
        await asyncio.sleep(self._rng.random() * self._rng.choice((5.0, 60.0, 400.0)))
        self._world.api.come_back()

    async def _flag(self, name: str) -> None:
        setattr(self._world, name, True)
        self._world.story.tell(name)
        await asyncio.sleep(self._rng.random() * self._rng.choice((2.0, 60.0)))
        setattr(self._world, name, False)

    async def _disk_fills(self) -> None:
        self._world.files.full = True
        self._world.story.tell("disk full")
        await asyncio.sleep(self._rng.random() * 60.0)
        self._world.files.full = False
