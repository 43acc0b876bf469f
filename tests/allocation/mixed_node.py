"""A node that offers several families at once, beside a book of kubelet's that was written from the
contract and shares no code with us.

`Kubelet` knows what a real one knows: the lists it was sent, the holders of ids, and nothing of
GPUs. `MixedNode` puts the allocator with real families beside it. What a container can reach in the
end is read from its answers, as the container runtime would.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tests.allocation.binding_parts import NODE, MemoryCarrier
from tests.ledger.book_parts import let_pass
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import AgentError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Holding, Inventory, KubeletRecords, Owner
from vgpu_agent.pods import Pod, PodCache, PodContainer

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


@dataclasses.dataclass
class Container:
    """One pod with one container, as kubelet keeps it.

    Attributes:
        held: resource → the ids it was given.
        told: the answers at its admission.
        runs: it has started.
    """

    name: str
    held: dict[str, list[str]]
    told: Edits
    runs: bool = False


class Kubelet:
    """Ids and pods; which device is behind an id it does not know.

    State: ``lists`` as they were sent last, and ``pods`` that have not ended.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.lists: dict[str, dict[str, bool]] = {}
        self.pods: dict[str, Container] = {}

    def listed(self, resource: str, ids: Sequence[tuple[str, bool]]) -> None:
        """ListAndWatch has sent a list."""
        assert len({id_ for id_, _ in ids}) == len(ids), "an id stands twice in a list"
        self.lists[resource] = dict(ids)

    def free(self, resource: str) -> list[str]:
        """Return the ids that the kubelet would give to the next container."""
        held = {id_ for pod in self.pods.values() for id_ in pod.held.get(resource, ())}
        return [
            id_
            for id_, healthy in self.lists.get(resource, {}).items()
            if healthy and id_ not in held
        ]

    def choose(self, resource: str, count: int) -> list[str] | None:
        """Any that are free; None when there are too few."""
        free = self.free(resource)
        return self._rng.sample(free, count) if len(free) >= count else None

    def records(self) -> KubeletRecords:
        """Its checkpoint and pod-resources, joined."""
        holdings = tuple(
            Holding(resource, tuple(ids), Owner("main", f"uid-{pod.name}", "default", pod.name))
            for pod in self.pods.values()
            for resource, ids in pod.held.items()
        )
        return KubeletRecords(holdings, entries=holdings)


class MixedNode:
    """The agent's allocator with its ledger, a kubelet,
    and the pods that the API server has shown.
    """

    def __init__(self, families: Families, inventory: Inventory, rng: random.Random) -> None:
        self.families, self.inventory, self.rng = families, inventory, rng
        self.kubelet, self.book, self.carrier = Kubelet(rng), PodCache(), MemoryCarrier()
        self.book.replace(())
        self._pods = 0
        self._shown: tuple[Ledger, int] | None = None
        self.now = 0.0
        self.start_agent()

    def start_agent(self) -> None:
        """A new process of the agent: it knows nothing but what kubelet and the API server tell."""
        self.refusals = Refusals()
        self.ledger, self.journal = Ledger(clock=lambda: self.now), Journal()
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=self.families,
                inventory=lambda: self.inventory,
                journal=self.journal,
                node=NODE,
                pods=self.book,
                read_records=self._read_evidence,
                fetch_pod=self._fetch,
                carrier=self.carrier,
                refusals=self.refusals,
                settings=Binding(),
            )
        )
        self.allocator.use_mode(BindingMode(late=True, by_annotation=False, reason="a test"))
        self.look()
        self.verify(initial=True)

    # -- what kubelet does -------------------------------------------------------------------------

    def bind(self, limits: dict[str, int], annotations: dict[str, str]) -> str:
        """A scheduler binds a pod, and the watch shows it; its name."""
        self._pods += 1
        name = f"pod-{self._pods}"
        containers = (PodContainer("main", limits=limits),)
        self.book.put(
            Pod(
                f"uid-{name}",
                "default",
                name,
                NODE,
                annotations=annotations,
                containers=containers,
                scheduled=True,
            )
        )
        self.look()
        return name

    async def admit(self, limits: dict[str, int], *, bound: str = "") -> str:
        """A pod arrives, or the one that was ``bound``; the name under which it holds what it asked
        for, "" when it was not admitted.
        """
        self._pods += not bound
        name = bound or f"pod-{self._pods}"
        if not bound:
            self.book.put(
                Pod(
                    f"uid-{name}",
                    "default",
                    name,
                    NODE,
                    containers=(PodContainer("main", limits=limits),),
                )
            )
        container = Container(name, {}, Edits())
        wanted = list(limits.items())
        self.rng.shuffle(wanted)
        for resource, count in wanted:
            if not await self._allocate(container, resource, count):
                self.kubelet.pods.pop(name, None)
                self.book.remove(self.pod(name))
                return ""
            self.kubelet.pods[name] = container
            self.look()
        return name

    async def _allocate(self, container: Container, resource: str, count: int) -> bool:
        if (ids := self.kubelet.choose(resource, count)) is None:
            return False
        try:
            container.told = container.told.joined(await self.allocator.allocate(resource, ids))
        except AgentError:
            return False
        container.held[resource] = ids
        return True

    async def start(self, name: str) -> bool:
        """Start the container; kubelet asks the resources that want to be asked,
        and tries again later when one refuses.
        """
        container = self.kubelet.pods[name]
        try:
            for resource, ids in container.held.items():
                if self.ledger.resource(resource).pre_start_required:
                    await self.allocator.pre_start(resource, ids)
        except AgentError:
            return False
        finally:
            self.look()
        container.runs = True
        return True

    def end(self, name: str) -> None:
        """The pod is gone, also for the API server."""
        del self.kubelet.pods[name]
        self.book.remove(self.pod(name))

    def end_unadmitted(self, name: str) -> None:
        """A bound pod is deleted before kubelet has admitted it."""
        self.book.remove(self.pod(name))
        self.look()

    def verify(self, *, initial: bool = False) -> None:
        """The regular look at kubelet's records;
        twice, for one that misses a grant proves nothing yet.
        """
        for _ in range(1 if initial else 2):
            self.now += 0.01  # any time at all is too long for a reservation
            self.allocator.confirm(self.kubelet.records(), reservation_seconds=0, initial=initial)
        self.look()

    def wait(self, seconds: float) -> None:
        """Nothing happens for so long."""
        let_pass(self.ledger, self, seconds)
        self.look()

    def look(self) -> None:
        """GPUs, offers or grants may have changed: kubelet gets every list anew, and one without
        ids for what is offered no more.
        """
        self.allocator.refresh_offer()
        self.allocator.refresh_claims()
        if (shown := (self.ledger, self.ledger.revision.version)) == self._shown:
            return  # as the agent, which sends a list when the ledger has changed
        self._shown = shown
        offered = {resource.name for resource in self.ledger.resources}
        for resource in offered | self.kubelet.lists.keys():
            self.kubelet.listed(
                resource,
                [(entry.id.id, entry.healthy) for entry in self.allocator.listing(resource)],
            )

    # -- what is so in the end ---------------------------------------------------------------------

    def reaches(self, name: str) -> set[str]:
        """The devices that a container can reach:
        from its admission's answer, or from the spec behind the CDI name in it.
        """
        told = self.kubelet.pods[name].told
        visible = [told.environment.get(VISIBLE, "")]
        for cdi_name in told.cdi_names:
            spec = self.carrier.specs.get(cdi_name.partition("=")[2])
            if spec is not None and spec[0].owner.pod_uid == f"uid-{name}":
                visible.append(spec[1].edits.environment.get(VISIBLE, ""))
        return {device for text in visible for device in text.split(",") if device}

    # -- what the agent asks -----------------------------------------------------------------------

    async def _read_evidence(
        self, resource: str = "", ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        del whole
        holdings = self.kubelet.records().holdings
        asked = [
            each
            for each in holdings
            if each.resource == resource and not set(each.ids).isdisjoint(ids)
        ]
        checkpoint = tuple(
            Holding(each.resource, each.ids, Owner("main", each.owner.pod_uid)) for each in asked
        )
        return KubeletEvidence(
            checkpoint,
            tuple(Holding(each.resource, each.ids, _named(each.owner)) for each in holdings),
        )

    async def _fetch(self, namespace: str, name: str) -> Pod | None:
        return next(
            (pod for pod in self.book.pods if (pod.namespace, pod.name) == (namespace, name)), None
        )

    def pod(self, name: str) -> Pod:
        """The pod of that name, as the watch shows it."""
        pod = self.book.get(f"uid-{name}")
        assert pod is not None
        return pod


def _named(owner: Owner) -> Owner:
    """Return the owner as pod-resources names it: without the pod's UID."""
    return Owner(owner.container, namespace=owner.namespace, pod=owner.pod)
