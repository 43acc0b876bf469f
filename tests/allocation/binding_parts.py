"""A small node for the tests of binding: a family whose annotation is a number, kubelet's records
as plain lists, a carrier in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.carrier import GrantRecord
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.overcommits import Overcommits
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.config.binding import Binding
from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds
from vgpu_agent.errors import ClusterError, HostFileError, RequestRefusedError
from vgpu_agent.families.family import Decision, NodeView, Ownership, PodFamily, Question
from vgpu_agent.isolation.edits import Edits, Mount, Provision
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import (
    Decider,
    Grant,
    Holding,
    Inventory,
    KubeletRecords,
    Owner,
    Resource,
    Share,
)
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.pods import ContainerKind, DesiredPod, Pod, PodCache, PodContainer

NUMBER, MEMORY = "example.com/number", "example.com/memory"
NODE = "node-a"
IDS = tuple(f"{uuid}-{place}" for uuid in (U0, U1) for place in range(10))


class NumberFamily:
    """``example.com/<container>: <GPU> <MiB>`` in a pod's annotations is what that container gets;
    the answer names GPU, MiB and pod.
    """

    name = "number"
    by = "the test"

    def owns(self, resource: str) -> Ownership:
        return Ownership.CERTAIN if resource in {NUMBER, MEMORY} else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        if not inventory.gpus:
            return ()
        return (
            Resource(
                NUMBER,
                self.name,
                tuple(DeviceId(id_, id_[: len(U0)]) for id_ in IDS),
                holders_per_device=10,
                pre_start_required=True,
                decided_by=Decider.POD,
                offers_preference=False,
            ),
            Resource(
                MEMORY,
                self.name,
                NumberedIds(
                    (IdBlock(f"{U0}-memory-", 40960, U0), IdBlock(f"{U1}-memory-", 40960, U1))
                ),
                decided_by=Decider.NOBODY,
                offers_preference=False,
            ),
        )

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """Nothing is odd."""
        return ()

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Everything goes."""

    def decide(self, question: Question) -> Decision:
        if (found := self.recall(question)) is None:
            raise RequestRefusedError(
                f"pod {question.pod.full_name} has no annotation example.com/{question.container}"
            )
        return found

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        texts = {
            container.name: pod.annotations.get(f"example.com/{container.name}")
            for container in pod.containers
        }
        return {
            name: tuple(part.split()[0] for part in text.split(","))
            for name, text in texts.items()
            if text
        }

    def recall(self, question: Question) -> Decision | None:
        text = question.pod.annotations.get(f"example.com/{question.container}")
        if text is None:
            return None
        shares = tuple(Share(part.split()[0], int(part.split()[1])) for part in text.split(","))
        return Decision(shares, self.by)

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        own = f"/own/{question.pod.kubelet_uid}_{question.container}"
        environment = {
            "GPU": ",".join(share.device for share in shares),
            "MIB": ",".join(str(share.memory_mib) for share in shares),
        }
        return Provision(Edits(environment, (Mount("/own", own),)), own_directory=own)

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        return DesiredPod(
            {"example.com/done": ",".join(sorted(grants)) or ("failed" if failed else "")}
        )

    def cleanup(self, now: float) -> DesiredNode:
        return DesiredNode(annotations={"example.com/allocated": None})

    def desired_node(self, view: NodeView) -> DesiredNode:
        return DesiredNode(
            annotations={"example.com/allocated": str(view.allocated_at.get(NUMBER, 0))}
        )


class MemoryCarrier:
    """Keeps what was delivered; ``trouble`` makes it fail."""

    def __init__(self) -> None:
        self.specs: dict[str, tuple[GrantRecord, Provision]] = {}
        self.prepared: dict[str, tuple[GrantRecord, Provision]] = {}
        self.trouble = ""

    @property
    def records(self) -> Sequence[GrantRecord]:
        return [record for record, _ in self.specs.values()]

    has_outdated_spec = False

    async def has_usable_spec(self, token: str) -> bool:
        return token in self.specs

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        if self.trouble:
            raise HostFileError(self.trouble)
        self.specs[record.token] = (record, provision)

    async def write_host_files(self, record: GrantRecord, provision: Provision) -> None:
        if self.trouble:
            raise HostFileError(self.trouble)
        self.prepared[record.token] = (record, provision)


class Place:
    """The node: an allocator, what kubelet's records say, and what the API server would answer."""

    def __init__(
        self,
        *,
        late: bool = True,
        carrier: MemoryCarrier | None = None,
        book: PodCache | None = None,
        family: PodFamily | None = None,
        resource: str = NUMBER,
        binding: Binding | None = None,
    ) -> None:
        self.ledger, self.journal, self.refusals = Ledger(), Journal(), Refusals()
        self.carrier, self.book = carrier or MemoryCarrier(), book or PodCache()
        self.checkpoint: list[Holding] | None = []
        self.pod_resources: list[Holding] | None = []
        self.answers: dict[tuple[str, str, str], Edits] = {}
        self.on_server: dict[tuple[str, str], Pod] = {}
        self.outage = False
        self.can_get = False  # whether pod-resources is asked about single pods
        self.fetches = 0
        self.readings = 0
        self.family = NumberFamily()
        self.resource = resource  # of which kubelet gives out ids
        self.notices = Notices()
        self.overcommits = Overcommits(self.notices)
        self.api_reachable_seconds = 3600.0
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=Families(pod_families=(family or self.family,)),
                inventory=golden_inventory,
                journal=self.journal,
                node=NODE,
                pods=self.book,
                read_records=self.read_evidence,
                fetch_pod=self.fetch,
                carrier=self.carrier,
                refusals=self.refusals,
                settings=binding or Binding(),
                notices=self.notices,
                overcommits=self.overcommits,
                api_reachable_seconds=lambda: self.api_reachable_seconds,
            )
        )
        self.allocator.use_mode(BindingMode(late=late, by_annotation=False, reason="a test"))
        self.allocator.refresh_offer()
        # the kubelet has reported that nothing is held
        self.ledger.reconcile(KubeletRecords(entries=()), lambda _: None, reservation_seconds=60)

    async def read_evidence(
        self, resource: str = NUMBER, ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        self.readings += 1
        listed = self.pod_resources
        if listed is not None and self.can_get and not whole:
            listed = [
                entry
                for entry in listed
                if entry.resource == resource and not set(ids).isdisjoint(entry.ids)
            ]
        return KubeletEvidence(
            None if self.checkpoint is None else tuple(self.checkpoint),
            None if listed is None else tuple(listed),
            dict(self.answers),
            trouble="a witness is silent" if None in (self.checkpoint, self.pod_resources) else "",
            whole=whole or not self.can_get,
        )

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        self.fetches += 1
        if self.outage:
            raise ClusterError("the API server does not answer")
        return self.on_server.get((namespace, name))

    async def admit(
        self, pod: Pod, container: str, ids: Sequence[str], *, listed: bool = True
    ) -> Edits:
        """The kubelet admits one container: Allocate, then its records."""
        answer = await self.allocator.allocate(self.resource, ids)
        assert self.checkpoint is not None
        assert self.pod_resources is not None
        self.checkpoint.append(
            Holding(self.resource, tuple(ids), Owner(container, pod.kubelet_uid))
        )
        self.answers[pod.kubelet_uid, container, self.resource] = answer
        if listed:
            self.pod_resources.append(
                Holding(
                    self.resource,
                    tuple(ids),
                    Owner(container, namespace=pod.namespace, pod=pod.name),
                )
            )
        return answer

    async def start(self, ids: Sequence[str]) -> None:
        """The kubelet is about to start the container that has these ids."""
        await self.allocator.pre_start(self.resource, ids)

    def forget(self, pod: Pod) -> None:
        """The kubelet has cleaned up after the pod."""
        self.checkpoint = [
            entry for entry in self.checkpoint or () if entry.owner.pod_uid != pod.kubelet_uid
        ]
        self.pod_resources = [
            entry for entry in self.pod_resources or () if entry.owner.pod != pod.name
        ]

    def events(self, name: str) -> list[dict[str, object]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


class SlowPlace(Place):
    """The kubelet answers what is asked about one pod, and never says which pods there are."""

    async def read_evidence(
        self, resource: str = NUMBER, ids: Sequence[str] = (), *, whole: bool = False
    ) -> KubeletEvidence:
        if whole:
            await asyncio.sleep(3600)
        return await super().read_evidence(resource, ids, whole=whole)


def a_pod(
    name: str,
    *containers: PodContainer | str,
    uid: str = "",
    annotations: Mapping[str, str] | None = None,
    phase: str = "Pending",
    number: int = 1,
) -> Pod:
    """A pod on this node; a container given by name asks for ``number`` ids."""
    listed = tuple(
        PodContainer(each, limits={NUMBER: number}) if isinstance(each, str) else each
        for each in containers or ("main",)
    )
    return Pod(
        uid or f"uid-{name}",
        "default",
        name,
        NODE,
        phase,
        annotations or {},
        listed,
        scheduled=True,
    )


def init(name: str, number: int = 1) -> PodContainer:
    """An init container that asks for ``number`` ids."""
    return PodContainer(name, ContainerKind.INIT, {NUMBER: number})


def wants(**containers: str) -> dict[str, str]:
    """The annotations of `NumberFamily`."""
    return {f"example.com/{name}": text for name, text in containers.items()}
