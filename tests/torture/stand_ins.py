"""Two small agents that prove the model's own worth:
one guesses as the replaced plugin does, one asks kubelet's records.

The model must find the first one wrong, over and over, and the second one right; otherwise a
torture test that passes would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.torture.agents import Life, Offer, World, register
from tests.torture.dialects import REGION
from tests.torture.plan import CORES, MEMORY, MEMORY_FACTOR_MIB, NUMBER, SPLIT
from vgpu_agent.allocation.carrier import GrantRecord, cdi_name, grant_token
from vgpu_agent.isolation.edits import Edits, Mount, Provision
from vgpu_agent.model import Owner
from vgpu_agent.pods import ContainerKind, Pod, PodCache


class _StandIn:
    """Registers three resources and follows pods."""

    asked_at_start = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = Life()
        self.book = PodCache()
        cards = world.cards
        self._offers = (
            Offer(
                NUMBER,
                [f"{card.uuid}-{place}" for card in cards for place in range(SPLIT)],
                self.asked_at_start,
                prefers=False,
            ),
            Offer(
                MEMORY,
                [f"{card.uuid}-memory-{place}" for card in cards for place in range(card.units)],
                False,
                prefers=False,
            ),
            Offer(
                CORES,
                [f"{card.uuid}-core-{place}" for card in cards for place in range(100)],
                False,
                prefers=False,
            ),
        )

    async def begin(self) -> None:
        """Watch and register."""
        self.world.api.connect(self.book)
        self.register()

    def register(self) -> None:
        """All resources."""
        register(self.world, self.life, self, self._offers)

    def left_over(self) -> list[str]:
        """It keeps no book."""
        return []

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return the required ids, then the first available ones."""
        del resource
        return list(dict.fromkeys([*must_include, *available]))[:size]

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Allocate."""
        raise NotImplementedError

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """PreStartContainer. An agent that did not ask for it is never called."""
        raise NotImplementedError

    def edits(self, pod: Pod, container: str) -> Edits:
        """Return the container's edits by the pod's annotations."""
        counted = [
            each.name
            for each in pod.containers
            if each.kind is ContainerKind.MAIN and NUMBER in each.limits
        ]
        segment = pod.annotations["volcano.sh/vgpu-ids-new"].split(";")[counted.index(container)]
        fields = sorted(part.split(",") for part in segment.split(":") if part)
        limits = {
            f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{int(each[2]) * MEMORY_FACTOR_MIB}m"
            for place, each in enumerate(fields)
        }
        environment = {
            "NVIDIA_VISIBLE_DEVICES": ",".join(each[0] for each in fields),
            "CUDA_DEVICE_SM_LIMIT": fields[0][3],
            **limits,
        }
        return Edits(environment, (Mount(REGION, f"/h/{pod.kubelet_uid}_{container}/a.cache"),))


class Guesser(_StandIn):
    """Answers in Allocate for the pod that was bound longest ago, by seconds, with as many devices;
    never looks again (volcano-vgpu §4).
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._left: dict[str, list[str]] = {}

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """A guess."""
        if resource != NUMBER:
            return Edits()
        candidates = []
        for pod in self.book.pods:
            text = pod.annotations.get("volcano.sh/vgpu-ids-new", "")
            counted = [
                each.name
                for each in pod.containers
                if each.kind is ContainerKind.MAIN and NUMBER in each.limits
            ]
            left = self._left.setdefault(pod.uid, counted)
            sizes = {each.name: each.limits.get(NUMBER) for each in pod.containers}
            if text and left and sizes[left[0]] == len(ids):
                candidates.append((int(pod.annotations["volcano.sh/vgpu-time"]), pod.bound, pod))
        if not candidates:
            raise LookupError("cannot get valid pod")
        pod = min(candidates, key=lambda each: each[:2])[2]
        return self.edits(pod, self._left[pod.uid].pop(0))


class Reader(_StandIn):
    """Answers with a CDI name and asks the kubelet's checkpoint for the ids' owner when the
    container starts (real-node experiment).
    """

    asked_at_start = True

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """A name for the ids, still undefined."""
        if resource != NUMBER:
            return Edits()
        token = grant_token(resource, ids)
        self.world.files.withdraw(token)
        return Edits(cdi_names=(cdi_name(token),))

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Deliver the grant of the ids' owner, or raise an error."""
        kubelet_evidence = await self.world.read_records()
        holders = [
            each.owner
            for each in kubelet_evidence.checkpoint or ()
            if each.resource == resource and set(each.ids) == set(ids)
        ]
        listed = [
            each.owner
            for each in kubelet_evidence.pod_resources or ()
            if each.resource == resource and set(each.ids) == set(ids)
        ]
        names = {(owner.namespace, owner.pod) for owner in listed}
        pods = [
            (pod, owner.container)
            for owner in holders
            if (pod := self.book.get(owner.pod_uid)) is not None and not pod.ended
        ]
        certain = [
            (pod, container) for pod, container in pods if (pod.namespace, pod.name) in names
        ]
        if len(certain) != 1 or len({owner.pod_uid for owner in holders}) != len(pods):
            raise LookupError("not certain yet")
        pod, container = certain[0]
        record = GrantRecord(
            grant_token(resource, ids),
            "",
            resource,
            len(ids),
            Owner(container, pod.kubelet_uid, pod.namespace, pod.name),
            (),
            "",
            0.0,
        )
        await self.world.files.deliver(record, Provision(self.edits(pod, container)))
