"""The facts and services that the parts of `allocation` share. `agent` builds them, and tests
replace them.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from vgpu_agent.allocation.carrier import GrantRecord
from vgpu_agent.allocation.holdings import ruled_out
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.overcommits import Overcommits
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.allocation.carrier import Carrier
    from vgpu_agent.allocation.identification import KubeletEvidence
    from vgpu_agent.allocation.mode import BindingMode
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.config.binding import Binding
    from vgpu_agent.families.family import Family, IdFamily, MigLayout, PodFamily
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory, Owner
    from vgpu_agent.pods import Pod, PodCache


class Families(msgspec.Struct, frozen=True):
    """The families of this node, by kind.

    Attributes:
        id_families: families whose ids name devices.
        pod_families: families whose pods decide.
        paused: families whose pods decide and that start no container now; for their schedulers, no
            GPU is free. Some of them may be in ``pod_families``.
        idle: families whose ids name devices and whose resources are not offered now. Containers
            that run keep their grants.
    """

    id_families: tuple[IdFamily, ...] = ()
    pod_families: tuple[PodFamily, ...] = ()
    paused: tuple[PodFamily, ...] = ()
    idle: tuple[IdFamily, ...] = ()

    @property
    def all(self) -> tuple[Family, ...]:
        """The families in ``id_families`` and ``pod_families``."""
        return (*self.id_families, *self.pod_families)


class RecordsReader(Protocol):
    """The reader of the kubelet's records, implemented by `agent.records.reader`."""

    async def __call__(
        self, resource: str, ids: Sequence[str], *, whole: bool = False
    ) -> KubeletEvidence:
        """Return the records about these ids, read after this call began. They may contain other
        ids as well; with ``whole`` they contain every pod.
        """
        ...


class Fetch(Protocol):
    """The request to the API server for one pod, implemented by `agent.api_server`."""

    async def __call__(self, namespace: str, name: str) -> Pod | None:
        """Return the pod that has this name now; None when there is none.

        Raises:
            ClusterError: no answer.
        """
        ...


class Divider(Protocol):
    """The divider of GPUs into MIG instances, one after the other,
    implemented by `agent.devices.mig`.
    """

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """Begin the division. It is not interrupted when the caller stops waiting.

        Args:
            layout: the GPU, which must have no holder, and the instances to create.
            done: called once, on the event loop: with "" when the inventory shows the layout, else
                with the reason of the failure.
        """
        ...


def _booted_at() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Context(msgspec.Struct):
    """The facts and services that the parts of `allocation` share.

    Attributes:
        node: this node's name.
        ledger: the ledger of devices and grants.
        inventory: returns the current inventory of the GPUs.
        journal: receives the events.
        pods: the pods of this node.
        read_records: reads the kubelet's records about some ids.
        fetch_pod: asks the API server for one pod.
        carrier: delivers grants to the container runtime.
        refusals: the starts that are refused now.
        settings: section ``binding``.
        divider: divides GPUs; None where that is not possible.
        notices: messages to the owners of pods.
        overcommits: the starts that were let through although their shares exceed what a device
            had left.
        node_annotations: returns the annotations of this node's Node in the API server; empty while
            the Node has not been read.
        api_reachable_seconds: returns for how many seconds the API server has answered without a
            failure. Soon after an outage, the statuses of pods may still be old.
        clock: the wall clock, unix seconds.
        booted_at: returns the unix seconds of the host's last boot. Init containers that ended
            before it run again.
        families: the families in force; `Allocator.use_families` replaces them.
        mode: the binding mode; None while ``binding.mode`` is ``auto`` and nothing is known of this
            node's Node. `Allocator.use_mode` sets it.
    """

    node: str
    ledger: Ledger
    inventory: Callable[[], Inventory]
    journal: Journal
    pods: PodCache
    read_records: RecordsReader
    fetch_pod: Fetch
    carrier: Carrier
    refusals: Refusals
    settings: Binding
    divider: Divider | None = None
    notices: Notices = msgspec.field(default_factory=Notices)
    overcommits: Overcommits = msgspec.field(default_factory=lambda: Overcommits(Notices()))
    node_annotations: Callable[[], Mapping[str, str]] = dict
    api_reachable_seconds: Callable[[], float] = lambda: math.inf
    clock: Callable[[], float] = time.time
    booted_at: Callable[[], float] = _booted_at
    families: Families = Families()
    mode: BindingMode | None = None

    def new_record(
        self,
        token: str,
        id_count: int,
        pod: Pod,
        owner: Owner,
        grant: Grant,
        decider: str,
        provision: Provision,
    ) -> GrantRecord:
        """Return the record of a decision that is made now, which the carrier keeps.

        ``token`` and ``id_count`` are those of the grant's ids, ``provision`` is what puts the
        grant in force, and ``decider`` says in words who has decided. The record's time is later
        than that of every other record, because the order of the records shows which containers of
        a pod have ended. The records outlive reboots, so their time is wall time; and the wall
        clock may have been set back since the latest record.
        """
        latest = max((record.decided_at for record in self.carrier.records), default=0.0)
        return GrantRecord(
            token=token,
            family=grant.family,
            resource=grant.resource,
            id_count=id_count,
            owner=owner,
            shares=grant.shares,
            decider=decider,
            decided_at=max(self.clock(), math.nextafter(latest, math.inf)),
            own_directory=provision.own_directory,  # on the host, removed with the grant
            may_overcommit=grant.may_overcommit,
            # `ruled_out`: the containers that cannot run when this one starts. So older records of
            # these init containers no longer count.
            inits_not_running=tuple(
                name
                for name in ruled_out(pod, owner.container)
                if (container := pod.container(name)) and container.kind is ContainerKind.INIT
            ),
        )
