"""The schedulers of a mixed day, as far as the node knows them: they use nothing but its status.

Volcano's keeps a ledger of its own (`tests.torture.scheduler_model`) and reads the register
annotation; the default scheduler counts. Both see the Node as the API server has it: kubelet writes
the allocatable numbers every ten seconds only. Used by `day`.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Mapping

from tests.torture.agents import World
from tests.torture.api_model import NODE, LivePod
from tests.torture.mixed.plan import CARDS, VOLCANO, family_of
from tests.torture.plan import PlannedPod
from tests.torture.scheduler_model import Placement, SchedulerModel
from vgpu_agent.concurrency import Revision

STATUS_SECONDS = 10.0
"""Kubelet's default ``nodeStatusUpdateFrequency``."""


class NodeStatus:
    """The Node object as the API server has it.

    State: what was written last; it outlives agent and kubelet.

    Attributes:
        capacity: resource → ids that the kubelet has received.
        allocatable: resource → those of them that are healthy.
        register: Volcano's register annotation.
        revision: moves on when kubelet or the agent has written capacity or allocatable.
    """

    def __init__(self) -> None:
        self.capacity: Mapping[str, int] = {}
        self.allocatable: Mapping[str, int] = {}
        self.register = ""
        self.revision = Revision()

    def healthy_for_volcano(self) -> frozenset[str]:
        """The cards that take new pods by the register annotation (volcano-vgpu §2.1)."""
        entries = (entry.split(",") for entry in self.register.split(":") if entry)
        return frozenset(entry[0] for entry in entries if int(entry[1]) > 0)

    def write(
        self, allocatable: Mapping[str, int], *, capacity: Mapping[str, int] | None = None
    ) -> None:
        """Some of the counts are written anew."""
        before = self.allocatable, self.capacity
        self.allocatable = {**self.allocatable, **allocatable}
        self.capacity = {**self.capacity, **(capacity or {})}
        if (self.allocatable, self.capacity) != before:
            self.revision.advance()

    async def kubelet_writes(self, world: World) -> None:
        """The kubelet's part: how many ids of each resource are healthy, every ten seconds,
        until cancelled.
        """
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if world.kubelet.up and not world.api.away:
                devices = world.kubelet.devices
                self.write(
                    {resource: len(ids) for resource, ids in devices.healthy.items()},
                    capacity={
                        resource: devices.listed_ids.get(resource, 0)
                        for resource in devices.healthy
                    },
                )


class Schedulers:
    """Volcano's and the default one.

    State: what the pods that are bound and have not ended ask for, and Volcano's ledger of cards.
    """

    def __init__(self, rng: random.Random, node: NodeStatus) -> None:
        self._node = node
        self._volcano = SchedulerModel(rng, CARDS, node=NODE)
        self._asked: collections.Counter[str] = collections.Counter()

    def place(self, uid: str, plan: PlannedPod, *, now: float) -> Placement | None:
        """Return what the pod's scheduler writes when it binds the pod;
        None when it does not fit by that scheduler's view.
        """
        allocatable = self._node.allocatable
        if any(
            self._asked[resource] + number > allocatable.get(resource, 0)
            for resource, number in plan.needs.items()
        ):
            return None
        placement: Placement | None = Placement({}, {})
        if family_of(plan) == VOLCANO:
            placement = self._volcano.place(
                uid, plan, now=now, usable=self._node.healthy_for_volcano()
            )
        if placement is not None:
            self._asked.update(plan.needs)
        return placement

    def take_back(self, pod: LivePod) -> None:
        """The pod has ended."""
        self._asked.subtract(pod.plan.needs)
        self._volcano.take_back(pod.uid)
