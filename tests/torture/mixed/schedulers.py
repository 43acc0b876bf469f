"""The schedulers of a mixed day, as far as the node knows them: they use nothing but its status.

Where a family's pods decide, its scheduler keeps a ledger of its own (`tests.torture.dialects`) and
reads the family's annotation of the Node; the default scheduler counts. All see the Node as the API
server has it: kubelet writes the allocatable numbers every ten seconds only. Used by `day`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import Mapping, Sequence

from tests.torture.agents import World
from tests.torture.api_model import NODE, LivePod
from tests.torture.mixed.plan import BY_POD, CARDS, GPUSHARE, MANAGER, VOLCANO, family_of
from tests.torture.plan import PlannedPod
from tests.torture.scheduler_model import Placement
from vgpu_agent.concurrency import Revision
from vgpu_agent.nodes import DesiredNode

STATUS_SECONDS = 10.0
"""Kubelet's default ``nodeStatusUpdateFrequency``."""


class NodeStatus:
    """The Node object as the API server has it.

    State: what was written last; it outlives agent and kubelet.

    Attributes:
        capacity: resource → ids that the kubelet has received.
        allocatable: resource → those of them that are healthy.
        register: Volcano's register annotation.
        manager_register: that of vgpu-manager.
        unhealthy: the numbers of the cards that Volcano's scheduler of whole memory must not use.
        cards: how many cards that scheduler counts.
        revision: moves on when kubelet or the agent has written capacity or allocatable.
    """

    def __init__(self) -> None:
        self.capacity: Mapping[str, int] = {}
        self.allocatable: Mapping[str, int] = {}
        self.register = ""
        self.manager_register = ""
        self.unhealthy = ""
        self.cards = 0
        self.revision = Revision()

    def take(self, desired: DesiredNode) -> None:
        """The agent has written its desired state, as far as schedulers read it."""
        annotations = desired.annotations
        self.register = annotations.get("volcano.sh/node-vgpu-register") or self.register
        self.manager_register = (
            annotations.get("nvidia.com/node-device-register") or self.manager_register
        )
        self.unhealthy = annotations.get("volcano.sh/gpu-unhealthy-ids") or ""
        self.cards = int(desired.capacity.get("volcano.sh/gpu-number") or 0)

    def healthy_for(self, family: str) -> frozenset[str]:
        """The cards that take new pods of the family whose pods decide, by what the Node says to
        its scheduler.
        """
        return {
            VOLCANO: self._healthy_for_volcano,
            MANAGER: self._healthy_for_manager,
            GPUSHARE: self._healthy_for_gpushare,
        }[family]()

    def _healthy_for_volcano(self) -> frozenset[str]:
        """See volcano-vgpu §2.1."""
        entries = (entry.split(",") for entry in self.register.split(":") if entry)
        return frozenset(entry[0] for entry in entries if int(entry[1]) > 0)

    def _healthy_for_manager(self) -> frozenset[str]:
        """See vgpu-manager §3."""
        entries = json.loads(self.manager_register or "[]")
        return frozenset(entry["uuid"] for entry in entries if entry["healthy"])

    def _healthy_for_gpushare(self) -> frozenset[str]:
        """See volcano-gpushare §2."""
        unhealthy = {int(number) for number in self.unhealthy.split(",") if number}
        cards = enumerate(CARDS[: self.cards])
        return frozenset(card.uuid for number, card in cards if number not in unhealthy)

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
    """One for each family whose pods decide, and the default one.

    State: what the pods that are bound and have not ended ask for, and the ledgers of cards.
    """

    def __init__(self, rng: random.Random, node: NodeStatus, families: Sequence[str]) -> None:
        self._node = node
        self._by_pod = {
            family: dialect.scheduler(rng, CARDS, NODE)
            for family, dialect in BY_POD.items()
            if family in families
        }
        self._asked: collections.Counter[str] = collections.Counter()

    def place(self, uid: str, plan: PlannedPod, *, now: float) -> Placement | None:
        """Return what the pod's scheduler writes when it binds the pod;
        None when it does not fit by that scheduler's view.
        """
        allocatable, family = self._node.allocatable, family_of(plan)
        if any(
            self._asked[resource] + number > allocatable.get(resource, 0)
            for resource, number in plan.needs.items()
            # kube-scheduler leaves the others to vgpu-manager's extender (vgpu-manager §5.1)
            if family != MANAGER or resource == BY_POD[MANAGER].number
        ):
            return None
        placement: Placement | None = Placement({}, {})
        if (scheduler := self._by_pod.get(family)) is not None:
            placement = scheduler.place(uid, plan, now=now, usable=self._node.healthy_for(family))
        if placement is not None:
            self._asked.update(plan.needs)
        return placement

    def take_back(self, pod: LivePod) -> None:
        """The pod has ended."""
        self._asked.subtract(pod.plan.needs)
        if (scheduler := self._by_pod.get(family_of(pod.plan))) is not None:
            scheduler.take_back(pod.uid)
