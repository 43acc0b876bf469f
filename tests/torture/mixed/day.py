"""One mixed day: a node whose GPUs serve several families, its agent, some hundred pods,
and at times whatever may go wrong.

Two acts as in `tests.torture.episode`. In the first, jobs come and one family floods the node; in
the second nothing comes and nothing fails, and all that has come must end. Played by
`tests.torture.test_mixed_days`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from unittest import mock
from uuid import UUID

from tests.torture.api_model import ApiModel, LivePod
from tests.torture.faults import Faults, Machine
from tests.torture.kubelet_model import KubeletModel
from tests.torture.mixed.agent import MixedAgent, MixedWorld, read_model_records
from tests.torture.mixed.judge import Figures, MixedJudge, Seen, Waits, named_by_scheduler
from tests.torture.mixed.plan import (
    BY_IDS,
    BY_POD,
    CARDS,
    FAMILIES,
    RESOURCES,
    Planner,
    family_of,
    gpus_behind,
)
from tests.torture.mixed.schedulers import NodeStatus, Schedulers
from tests.torture.node_files import NodeFiles
from tests.torture.plan import Ending, PlannedPod
from tests.torture.story import Story
from tests.torture.virtual_time import run
from vgpu_agent.agent.records import verification

QUIET = Faults()
TROUBLED = Faults(
    kubelet=900.0, agent=700.0, reboot=6000.0, api=900.0, pod_resources=1500.0, checkpoint=1500.0
)

_MAX_PENDING = 12  # of a family that does not flood
_SOUND_AFTER_SECONDS = 150.0
_LONGEST_WAIT_SECONDS = 1800.0
_LONGEST_DAY_SECONDS = 400_000.0


@dataclasses.dataclass
class Outcome:
    """Results of a day: its figures, and what was wrong."""

    seed: int
    figures: Figures
    counts: collections.Counter[str]
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
    seed: int, *, pods: int = 300, faults: Faults = QUIET, families: Sequence[str] = FAMILIES
) -> Outcome:
    """Run the day of that seed on a node that offers ``families``."""
    with mock.patch.multiple(
        verification, read_records=read_model_records, _release_memory=_nothing
    ):
        return run(_Day(seed, pods=pods, faults=faults, families=families).play())


class _Day:
    def __init__(self, seed: int, *, pods: int, faults: Faults, families: Sequence[str]) -> None:
        self._seed, self._left = seed, pods
        self._rng = rng = random.Random(seed)
        self._story = story = Story()
        self._planner = Planner(rng, families)
        self._judge, self._waits, node = MixedJudge(story), Waits(), NodeStatus()
        self._schedulers = Schedulers(rng, node, families)
        api, files = ApiModel(rng, story), NodeFiles(rng, story)
        if faults == QUIET:
            api.longest_delays_seconds = (0.03, 0.2, 1.0)  # a watch that lags by seconds is a fault
        kubelet = KubeletModel(rng, api=api, files=files, judge=self._judge, story=story)
        kubelet.on_end = self._ended
        self._world = world = MixedWorld(
            rng,
            CARDS,
            story,
            api,
            kubelet,
            files,
            early=False,
            resources=tuple(RESOURCES[family] for family in families),
            node=node,
            waits=self._waits,
            families=tuple(families),
        )
        self._machine = Machine(world, lambda _: MixedAgent(world), faults)
        self._pending: dict[str, list[tuple[PlannedPod, float]]] = {
            family: [] for family in families
        }
        self._live: dict[str, LivePod] = {}
        self._begun: set[str] = set()
        self._last_uid = 0
        self._sound_since = 0.0

    async def play(self) -> Outcome:
        """Both acts.

        Raises:
            AssertionError: it does not end.
        """
        try:
            async with asyncio.timeout(_LONGEST_DAY_SECONDS):
                return await self._play()
        except TimeoutError as err:
            raise AssertionError(
                f"seed {self._seed} does not end; waiting: {self._pending}, on the node: "
                f"{list(self._live)}"
            ) from err

    async def _play(self) -> Outcome:
        loop = asyncio.get_running_loop()
        await self._machine.start()
        kubelet_writes = self._world.node.kubelet_writes(self._world)
        loops = [
            loop.create_task(work)
            for work in (kubelet_writes, self._schedule_for_ever(), self._look_for_ever())
        ]
        await self._first_act()
        await self._machine.calm_down()
        stuck = await self._drain()
        for task in loops:
            task.cancel()
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
            self._waits.figures,
            self._story.counts,
            self._story.wrong,
            stuck,
            left,
            ended_at,
        )

    async def _first_act(self) -> None:
        for arrival in self._planner.arrivals():
            await asyncio.sleep(arrival.pause_seconds)
            flooding = self._planner.flooding
            missing = arrival.flood - len(self._pending[flooding])
            for pod in (*arrival.pods, *(self._planner.pod(flooding) for _ in range(missing))):
                waiting = self._pending[family_of(pod)]
                if len(waiting) < _MAX_PENDING:
                    waiting.append((pod, asyncio.get_running_loop().time()))
                    self._waits.figures.pods += 1
                    self._left -= 1
            if self._left <= 0:
                return

    # -- pods --------------------------------------------------------------------------------------

    async def _schedule_for_ever(self) -> None:
        """Both schedulers, each of which tries what waits, the oldest first, again and again."""
        while True:
            await asyncio.sleep(0.1 + self._rng.random() * 0.5)
            if self._world.api.away:
                continue
            waiting = [
                (created_at, family, pod)
                for family, pods in self._pending.items()
                for pod, created_at in pods
            ]
            full: set[str] = set()
            for created_at, family, pod in sorted(waiting, key=lambda each: each[:2]):
                if family in full:
                    continue
                if self._place(pod, created_at):
                    self._pending[family].remove((pod, created_at))
                elif family in BY_IDS:
                    full.add(family)  # the others of the family ask for as much

    def _place(self, plan: PlannedPod, created_at: float) -> bool:
        now = asyncio.get_running_loop().time()
        # of the form that only the API server gives
        uid = str(UUID(int=self._last_uid + 1, version=4))
        placement = self._schedulers.place(uid, plan, now=now)
        if placement is None:
            return False
        self._last_uid += 1
        pod = LivePod(
            plan, uid, "ns", created_at, dict(placement.slices), dict(placement.annotations)
        )
        self._live[uid] = pod
        self._waits.placed(family_of(plan))
        self._story.tell("bound", uid, plan.name, pod.slices)
        self._world.api.show(pod)
        loop = asyncio.get_running_loop()
        loop.call_later(
            self._rng.random() * self._rng.choice((0.01, 0.2)), self._world.kubelet.add, pod
        )
        if plan.ending is Ending.EARLY:
            loop.call_later(self._rng.random() * self._rng.choice((1.0, 30.0)), self._delete, pod)
        return True

    def _delete(self, pod: LivePod) -> None:
        if not pod.gone and not pod.deleting:
            self._world.kubelet.delete(pod, force=False)

    def _ended(self, pod: LivePod) -> None:
        self._live.pop(pod.uid, None)
        self._schedulers.take_back(pod)
        loop = asyncio.get_running_loop()
        if not pod.admitted and not pod.deleting:
            cause = cause_of(self._story, pod)
            self._waits.figures.failed[cause] += 1
            self._waits.figures.stories.append(
                f"{pod.name} ({pod.uid}) failed: {cause}\n{self._story.latest(seconds=5.0)}"
            )
        gpus = self._gpus_of(pod)
        if pod.uid not in self._judge.started:
            self._waits.given_up(pod)
        others = {uuid for other in self._live.values() for uuid in self._gpus_of(other)}
        self._waits.ended(pod, gpus, last_of=gpus - others, now=loop.time())
        loop.call_later(
            self._rng.random() * self._rng.choice((1.0, 30.0)), self._world.api.remove, pod
        )

    def _gpus_of(self, pod: LivePod) -> frozenset[str]:
        """The GPUs of which the pod has a share,
        by the kubelet's records and by its containers' answers.
        """
        ids = (
            id_
            for entry in self._world.kubelet.devices.entries.get(pod.uid, ())
            for id_ in entry.ids
        )
        by_ids = gpus_behind(ids) if family_of(pod.plan) in BY_IDS else frozenset()
        return by_ids | self._judge.gpus_of(pod.uid)

    # -- the judge's view --------------------------------------------------------------------------

    async def _look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.5)
            self._waits.look(self._seen(loop.time()), loop.time())
            for uid in self._judge.started - self._begun:
                self._begun.add(uid)
                if (pod := self._live.get(uid)) is not None:
                    self._waits.started(pod, loop.time())

    def _seen(self, now: float) -> Seen:
        world = self._world
        failing = world.api.away or not world.kubelet.up or self._machine.agent is None
        if failing or world.pod_resources_silent or world.checkpoint_unreadable:
            self._sound_since = now + _SOUND_AFTER_SECONDS
        holders: dict[str, set[str]] = collections.defaultdict(set)
        claimed, refused = set[str](), list[LivePod]()
        for pod in self._live.values():
            family = family_of(pod.plan)
            for uuid in self._gpus_of(pod):
                holders[uuid].add(family)
            if family in BY_POD:
                claimed |= named_by_scheduler(pod)  # also between a crash and the next start
                if pod.uid not in self._judge.started and pod.refusal and not pod.deleting:
                    refused.append(pod)
        return Seen(
            {uuid: frozenset(families) for uuid, families in holders.items()},
            frozenset(claimed),
            {
                family: [(pod.name, created_at) for pod, created_at in pods]
                for family, pods in self._pending.items()
            },
            refused,
            # a new resource shows with kubelet's next status
            now >= self._sound_since and bool(world.node.allocatable),
        )

    # -- the second act ----------------------------------------------------------------------------

    async def _drain(self) -> list[str]:
        """Wait until all pods have come and gone;
        a pod that waits although nothing hinders it is reported and deleted.
        """
        loop, stuck = asyncio.get_running_loop(), []
        progress, since = -1, loop.time()
        while self._live or any(self._pending.values()):
            await asyncio.sleep(30.0)
            now = (
                self._story.counts["started"]
                + self._story.counts["ended"]
                + self._story.counts["bound"]
            )
            if now != progress:
                progress, since = now, loop.time()
            elif loop.time() - since > _LONGEST_WAIT_SECONDS:
                since = loop.time()
                stuck += list(self._give_up())
        return stuck

    def _give_up(self) -> Iterator[str]:
        for pod in list(self._live.values()):
            self._story.accuse(f"{pod.name} ({pod.uid}) never ends: {pod.refusal}", pod.uid)
            yield self._story.wrong.pop()
            self._world.kubelet.delete(pod, force=False)
        if not self._live:
            yield from (
                f"{pod.name} is never placed" for pods in self._pending.values() for pod, _ in pods
            )
            self._pending = {family: [] for family in self._pending}


_CAUSES = {
    "no healthy devices": "no healthy ids",
    "requested number of devices unavailable": "too few healthy ids",
    "has been stopped": "the agent was away",
    "unregistered": "the agent was away",
    "no longer healthy": "held ids not healthy after a restart of kubelet",
    "which is unexpected": "refused by Allocate",  # at the end of all such messages
}


def cause_of(story: Story, pod: LivePod) -> str:
    """Return why the kubelet refused the pod for good, in a few words."""
    text = story.last_fact("not admitted", pod.uid)
    return next((cause for part, cause in _CAUSES.items() if part in text), text)


_nothing: Callable[[], None] = lambda: None  # noqa: E731 - a name for what is patched in
