"""The episode's interface to an agent, and the kill of an agent without any cleanup.

`Agent` is the common shape of the real thing (`real_agent`) and of the stand-ins that prove the
model's own worth (`stand_ins`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol

from tests.torture.api_model import ApiModel
from tests.torture.device_manager import Endpoint
from tests.torture.dialects import VOLCANO, Dialect
from tests.torture.kubelet_model import KubeletModel
from tests.torture.node_files import NodeFiles
from tests.torture.plan import MEMORY_FACTOR_MIB, NUMBER, Card
from tests.torture.story import Story
from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import Gpu, Inventory


class AgentGoneError(Exception):
    """The connection broke: the agent's process does not exist any more."""


@dataclasses.dataclass
class World:
    """Everything an agent finds on its node; it outlives each of them."""

    rng: random.Random
    cards: tuple[Card, ...]
    story: Story
    api: ApiModel
    kubelet: KubeletModel
    files: NodeFiles
    early: bool
    resources: tuple[str, ...] = (NUMBER,)
    dialect: Dialect = VOLCANO
    pod_resources_silent: bool = False
    checkpoint_unreadable: bool = False
    booted_at: float = 0.0  # seconds of the loop

    @property
    def inventory(self) -> Inventory:
        """The GPUs as the agent's driver shows them."""
        return Inventory(
            1,
            tuple(
                Gpu(
                    card.uuid,
                    place,
                    place,
                    "NVIDIA A10",
                    card.units * MEMORY_FACTOR_MIB,
                    f"0000:0{place + 1}:00.0",
                )
                for place, card in enumerate(self.cards)
            ),
        )

    async def read_records(
        self, resource: str = NUMBER, ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        """The kubelet's records of ``resources``:
        pod-resources first, since a List makes kubelet forget ended pods.

        Every other time pod-resources is asked about those pods only that have one of the ids,
        unless the whole is wanted.
        """
        devices, rng, trouble = self.kubelet.devices, self.rng, []
        whole = whole or not ids or rng.random() < 0.5
        await asyncio.sleep(rng.random() * rng.choice((0.002, 0.04)))
        listed = None
        if self.pod_resources_silent or not self.kubelet.up:
            trouble.append("pod-resources does not answer")
        else:
            listed = devices.pod_resources(*self.resources) if self.kubelet.knows_its_pods else ()
        await asyncio.sleep(rng.random() * 0.001)
        if self.checkpoint_unreadable:
            trouble.append("the checkpoint cannot be understood")
            return KubeletEvidence(None, listed, {}, "; ".join(trouble))
        lines, wanted = devices.checkpoint(*self.resources), frozenset(ids)
        asked = [
            line for line in lines if line.resource == resource and not wanted.isdisjoint(line.ids)
        ]
        holders = {(line.owner.pod_uid, line.owner.container, resource) for line in asked}
        answers = {
            key: answer
            for key, answer in devices.answers(*self.resources).items()
            if self.early or key in holders
        }
        if not whole and listed is not None:
            about = tuple(
                held
                for held in listed
                if held.resource == resource and not wanted.isdisjoint(held.ids)
            )
            if len({(holding.owner.namespace, holding.owner.pod) for holding in about}) == 1:
                return KubeletEvidence(lines, about, answers, whole=False)
        return KubeletEvidence(lines, listed, answers, "; ".join(trouble))


class Backend(Protocol):
    """The part of the agent that answers kubelet (`vgpu_agent.kubelet.plugin.Backend`)."""

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """GetPreferredAllocation."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Allocate."""

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """PreStartContainer."""


class Life:
    """One process of an agent, until it is killed.

    Whatever it runs is stepped through `_Guarded`: at the moment of death everything stops where it
    stands. No `finally` and no `except` runs, as with ``kill -9``.
    """

    def __init__(self) -> None:
        self.dead = False
        self.graveyard: list[Coroutine[Any, Any, Any]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a seed stays a seed

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a call of kubelet's inside this process.

        Raises:
            AgentGoneError: it was killed meanwhile, or before.
        """
        if self.dead:
            coroutine.close()
            raise AgentGoneError("connection refused")
        try:
            return await self.run(coroutine)
        except AgentGoneError:
            if (caller := asyncio.current_task()) is not None and caller.cancelling():
                raise asyncio.CancelledError from None  # both ends died at the same moment
            raise

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a loop of the agent's own."""
        task = asyncio.get_running_loop().create_task(_drive(_Guarded(self, coroutine)))
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self.dead and not task.cancelled():
            task.exception()  # no task is left to receive it

    def kill(self) -> None:
        """Stop everything where it stands."""
        self.dead = True
        for task in list(self._tasks):
            task.cancel()

    def bury(self) -> None:
        """Close what was left standing, once nothing of it matters any more."""
        for coroutine in self.graveyard:
            with contextlib.suppress(RuntimeError):  # it waits for something while it ends
                coroutine.close()
            coroutine.close()


class _Guarded:
    """Steps a coroutine on, as long as its process lives."""

    def __init__(self, life: Life, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._life, self._coroutine = life, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        life, coroutine = self._life, self._coroutine
        try:
            waiting_for = coroutine.send(None)
            while True:
                try:
                    value = yield waiting_for
                except BaseException as err:  # noqa: BLE001 - it is passed on into the coroutine
                    if life.dead:
                        raise self._gone() from None
                    waiting_for = coroutine.throw(err)
                else:
                    if life.dead:
                        raise self._gone()
                    waiting_for = coroutine.send(value)
        except StopIteration as end:
            return end.value

    def _gone(self) -> AgentGoneError:
        self._life.graveyard.append(self._coroutine)
        return AgentGoneError("connection lost")


async def _drive(guarded: Awaitable[Any]) -> Any:
    return await guarded


class BackendPlugin:
    """One resource of a backend, as kubelet sees it through a socket."""

    def __init__(self, life: Life, backend: Backend, resource: str) -> None:
        self._life, self._backend, self._resource = life, backend, resource

    async def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """GetPreferredAllocation."""
        if self._life.dead:
            raise AgentGoneError("connection refused")
        return self._backend.preferred(self._resource, available, must_include, size)

    async def allocate(self, ids: Sequence[str]) -> Edits:
        """Allocate."""
        edits: Edits = await self._life.call(self._backend.allocate(self._resource, ids))
        return edits

    async def pre_start(self, ids: Sequence[str]) -> None:
        """PreStartContainer."""
        await self._life.call(self._backend.pre_start(self._resource, ids))


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A resource that an agent registers."""

    name: str
    ids: Sequence[str]
    pre_start: bool
    prefers: bool


class Agent(Protocol):
    """An agent under test."""

    life: Life

    async def begin(self) -> None:
        """Start: read what is there, then register."""

    def register(self) -> None:
        """Register all resources (again) with the kubelet that is there now."""

    def left_over(self) -> list[str]:
        """Return the bookings that remain although all pods are gone, as sentences;
        and every broken invariant.
        """


def register(world: World, life: Life, backend: Backend, offers: Sequence[Offer]) -> None:
    """Put each resource on a socket of its own and tell kubelet."""
    for offer in offers:
        plugin = BackendPlugin(life, backend, offer.name)
        world.kubelet.devices.register(
            offer.name, Endpoint(plugin, offer.pre_start, offer.prefers), offer.ids
        )
    world.story.tell("registered")


AgentFactory = Callable[[World], Agent]
