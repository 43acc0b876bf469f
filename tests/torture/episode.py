"""One episode: a node, its agent, some hundred pods, and whatever may go wrong, from one seed.

Two acts. In the first, pods come in bursts while kubelet, agent, API server, records and disk fail
at random. In the second nothing fails any more, and everything that fits must start; when all pods
have gone, nothing may be left of them. Played by `test_torture`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random

from tests.torture.agents import AgentFactory, World
from tests.torture.api_model import NODE, ApiModel, LivePod
from tests.torture.dialects import VOLCANO, Dialect
from tests.torture.faults import Faults, Machine
from tests.torture.judge import Judge
from tests.torture.kubelet_model import KubeletModel
from tests.torture.node_files import NodeFiles
from tests.torture.plan import Card, Ending, Kind, Mix, Origin, PlannedPod, Planner
from tests.torture.story import Story
from tests.torture.virtual_time import run

_LONGEST_WAIT_SECONDS = 1800.0  # longer than any pull, run and outage together
_HOPELESS_SECONDS = 150.0
_NEXT_TRY_SECONDS = 300.0  # as kube-scheduler tries again what nothing has happened to
_FIRST_ACT_SECONDS = 20000.0
_LONGEST_EPISODE_SECONDS = 200000.0


@dataclasses.dataclass
class Outcome:
    """Results of an episode: GPU containers that the kubelet admitted, those of them that started,
    and what was wrong.
    """

    seed: int
    counts: collections.Counter[str]
    containers: int
    started: int
    wrong: list[str]
    stuck: list[str]
    left_over: list[str]
    virtual_seconds: float

    @property
    def faultless(self) -> bool:
        """Nothing was wrong, nothing stuck, nothing left."""
        return not (self.wrong or self.stuck or self.left_over)

    def text(self) -> str:
        """The whole story of what was not right."""
        return "\n".join(
            [f"seed {self.seed}:", *self.wrong[:3], *self.stuck[:3], *self.left_over[:20]]
        )


def play(
    seed: int,
    make: AgentFactory,
    *,
    early: bool,
    pods: int = 200,
    mix: Mix | None = None,
    faults: Faults | None = None,
    overlapping: bool = True,
    dialect: Dialect = VOLCANO,
) -> Outcome:
    """Run the episode of that seed.

    Args:
        seed: decides everything that happens.
        make: starts one life of the agent.
        early: answers must be complete in Allocate.
        pods: how many come, those that return not counted.
        mix: which; drawn when not given.
        faults: how often what fails; drawn when not given.
        overlapping: the scheduler counts pods that are being deleted as gone, although they still
            run, where its dialect has it so (volcano-vgpu:D17).
        dialect: the family's.
    """
    return run(
        _Episode(
            seed,
            make,
            early=early,
            pods=pods,
            mix=mix,
            faults=faults,
            overlapping=overlapping and dialect.overlapping,
            dialect=dialect,
        ).play()
    )


class _Episode:
    def __init__(
        self,
        seed: int,
        make: AgentFactory,
        *,
        early: bool,
        pods: int,
        mix: Mix | None,
        faults: Faults | None,
        overlapping: bool,
        dialect: Dialect,
    ) -> None:
        self._seed = seed
        self._rng = rng = random.Random(seed)
        self._pods = pods
        self._overlapping = overlapping
        faults = Faults.draw(rng) if faults is None else faults
        self._story = story = Story()
        cards = tuple(Card(f"GPU-{place}", rng.choice((12, 16, 24))) for place in range(4))
        self._planner = Planner(
            rng,
            mix or Mix.draw(rng),
            resource=dialect.number,
            claims_all=dialect.claims_all,
        )
        self._scheduler = dialect.scheduler(rng, cards, NODE)
        self._judge = Judge(cards, story, early=early, dialect=dialect)
        api, files = ApiModel(rng, story), NodeFiles(rng, story)
        kubelet = KubeletModel(rng, api=api, files=files, judge=self._judge, story=story)
        kubelet.on_end = self._ended
        self._world = World(
            rng,
            cards,
            story,
            api,
            kubelet,
            files,
            early,
            resources=(dialect.number,),
            dialect=dialect,
        )
        self._machine = Machine(self._world, make, faults)
        self._pending: list[PlannedPod] = []
        self._live: dict[str, LivePod] = {}
        self._last_uid = 0
        self._asked: collections.Counter[str] = collections.Counter()
        self._changed = False  # since pods were last placed
        self._calm = False
        self._again: collections.Counter[str] = collections.Counter()

    async def play(self) -> Outcome:
        """Both acts.

        Raises:
            AssertionError: it does not end.
        """
        try:
            async with asyncio.timeout(_LONGEST_EPISODE_SECONDS):
                return await self._play()
        except TimeoutError as err:
            raise AssertionError(
                f"seed {self._seed} does not end; waiting: {self._pending}, on the node: "
                f"{list(self._live)}"
            ) from err

    async def _play(self) -> Outcome:
        loop = asyncio.get_running_loop()
        await self._machine.start()
        placing = loop.create_task(self._place_for_ever())
        tidying = loop.create_task(self._janitor())
        for pause, burst in self._planner.bursts(self._pods):
            await asyncio.sleep(pause)
            self._pending += burst
            self._changed = True
            await self._pending_at_most(40, until=_FIRST_ACT_SECONDS)
        await self._pending_at_most(0, until=_FIRST_ACT_SECONDS)
        self._calm = True
        await self._machine.calm_down()
        stuck = await self._drain()
        placing.cancel()
        tidying.cancel()
        ended_at = loop.time()
        for pod in list(self._world.api.pods.values()):
            self._world.api.remove(pod)
        await asyncio.sleep(600.0)
        assert self._machine.agent is not None
        left = [f"seed {self._seed}: {each}" for each in self._machine.agent.left_over()]
        left += [f"spec {token} is left over" for token in self._world.files.left_over]
        await self._machine.stop()
        return Outcome(
            self._seed,
            self._story.counts,
            self._world.kubelet.devices.allocated,
            len(self._judge.judged),
            self._story.wrong,
            stuck,
            left,
            ended_at,
        )

    async def _pending_at_most(self, pods: int, *, until: float) -> None:
        # time is virtual
        while len(self._pending) > pods and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(5.0)

    # -- pods --------------------------------------------------------------------------------------

    async def _place_for_ever(self) -> None:
        loop, tried_at = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(0.2 + self._rng.random())
            if not self._pending or not (
                self._changed or loop.time() - tried_at > _NEXT_TRY_SECONDS
            ):
                continue
            if not self._machine.offers and self._rng.random() < 0.95:
                continue
            self._changed, tried_at = False, loop.time()
            waiting, self._pending = self._pending, []
            waiting = [
                pod
                for place, pod in enumerate(waiting)
                if place > 24 or not (self._place(pod) or self._is_too_large(pod))
            ]
            self._pending = waiting + self._pending

    def _is_too_large(self, plan: PlannedPod) -> bool:
        """Tell whether it did not even fit onto an empty node."""
        if self._live or not self._machine.offers or self._world.api.has(plan.name):
            return False
        self._story.tell("too large", "", plan.name)
        return True

    def _place(self, plan: PlannedPod) -> bool:
        """Bind the pod if it fits; False when it must wait."""
        if self._world.api.has(plan.name):
            return False  # names are unique; its predecessor is still there
        if not self._countable(plan):
            return False
        now = asyncio.get_running_loop().time()
        self._last_uid += 1
        # The kubelet makes the UIDs of static pods, in a form that the API server never gives.
        uid = (
            f"{self._last_uid:032x}"
            if plan.origin is Origin.STATIC
            else f"{self._last_uid:08x}-0000-4000-8000-000000000000"
        )
        pod = LivePod(plan, uid, "ns", now)
        if plan.origin is Origin.VOLCANO:
            placement = self._scheduler.place(pod.uid, plan, now=now)
            if placement is None:
                return False
            pod.slices, pod.annotations = placement.slices, placement.annotations
        self._live[pod.uid] = pod
        self._asked.update(plan.needs)
        self._story.tell("bound", pod.uid, plan.name, pod.slices)
        loop, kubelet, api = asyncio.get_running_loop(), self._world.kubelet, self._world.api
        if plan.origin is Origin.STATIC:
            kubelet.add(pod)
            loop.call_later(self._rng.random() * 2, self._mirror, pod)
        else:
            api.show(pod)
            loop.call_later(self._rng.random() * self._rng.choice((0.01, 0.2)), kubelet.add, pod)
        if plan.ending is Ending.EARLY:
            loop.call_later(self._rng.random() * self._rng.choice((1.0, 30.0)), self._delete, pod)
        return True

    def _mirror(self, pod: LivePod) -> None:
        if not pod.gone:
            self._world.api.show(pod)

    def _countable(self, plan: PlannedPod) -> bool:
        """The plain arithmetic of every scheduler:
        all limits of the node's pods within what the node has of each resource.
        """
        healthy = self._world.kubelet.devices.healthy
        return all(
            self._asked[resource] + number <= len(healthy.get(resource, ()))
            for resource, number in plan.needs.items()
        )

    def _delete(self, pod: LivePod, *, force: bool = False) -> None:
        if not pod.gone and not pod.deleting:
            if self._overlapping and self._rng.random() < 0.3:
                # the real one counts terminating pods as gone (volcano-vgpu:D17)
                self._scheduler.take_back(pod.uid)
            self._world.kubelet.delete(pod, force=force)

    def _ended(self, pod: LivePod) -> None:
        self._changed = True
        if self._live.pop(pod.uid, None) is not None:
            self._asked.subtract(pod.plan.needs)
        self._scheduler.take_back(pod.uid)
        loop = asyncio.get_running_loop()
        loop.call_later(self._rng.random() * self._rng.choice((1.0, 30.0)), self._remove, pod)
        plan = pod.plan
        if not pod.admitted:
            self._again[plan.name] += 1
            if self._again[plan.name] <= 3:  # its owner makes another one
                self._pending.append(plan)
            return
        if plan.returns and not self._calm:
            self._pending.append(self._planner.successor(plan))

    def _remove(self, pod: LivePod) -> None:
        self._world.api.remove(pod)
        self._changed = True

    async def _janitor(self) -> None:
        """Delete pods that can never start, and, where answers cannot be changed any more,
        those that were refused for long.
        """
        while True:
            await asyncio.sleep(30.0)
            now = asyncio.get_running_loop().time()
            for pod in list(self._live.values()):
                if (
                    pod.refusal
                    and now - pod.stuck_since > _HOPELESS_SECONDS
                    and (self._world.early or hopeless(pod))
                ):
                    self._story.tell(
                        "given up" if not hopeless(pod) else "hopeless", pod.uid, pod.refusal
                    )
                    self._again[pod.name] += 1
                    if not hopeless(pod) and self._again[pod.name] <= 3:
                        self._pending.append(pod.plan)
                    self._delete(pod)

    # -- the second act ----------------------------------------------------------------------------

    async def _drain(self) -> list[str]:
        """Wait until all pods have come and gone.
        A pod that cannot start although nothing hinders it is reported.
        """
        loop, stuck = asyncio.get_running_loop(), []
        progress, since = -1, loop.time()
        while self._live or self._pending:
            await asyncio.sleep(30.0)
            now = (
                self._story.counts["started"]
                + self._story.counts["ended"]
                + self._story.counts["bound"]
            )
            if now != progress:
                progress, since = now, loop.time()
                continue
            if loop.time() - since < _LONGEST_WAIT_SECONDS:
                continue
            since = loop.time()
            if not self._live:
                stuck += [f"{plan.name} is never placed: {plan}" for plan in self._pending]
                self._pending = []
                continue
            youngest = max(self._live.values(), key=lambda pod: pod.created_at)
            if len(self._live) == 1 and not (self._world.early or hopeless(youngest)):
                self._story.accuse(
                    f"{youngest.name} ({youngest.uid}) never starts: {youngest.refusal}",
                    youngest.uid,
                )
                stuck.append(self._story.wrong.pop())
            else:
                self._story.tell("deadlock broken", youngest.uid, youngest.refusal)
            self._delete(youngest, force=True)
        return stuck


def hopeless(pod: LivePod) -> bool:
    """Tell whether an init container of the pod asks for more cards than were decided
    for the whole pod.
    """
    cards = {part.uuid for parts in pod.slices.values() for part in parts}
    return bool(pod.slices) and any(
        each.kind is Kind.INIT and each.request is not None and each.request.number > len(cards)
        for each in pod.plan.containers
    )
