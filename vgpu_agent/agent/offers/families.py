"""The families in force, their binding mode, and the reasons why some are not offered now.

All of it can change while the agent runs: by a reloaded configuration, a ConfigMap, the Node, a
newly delivered library (the file of an isolation backend that the operator supplies, for
mounts into containers), or a changed set of GPUs. `composition`, `reload` and the loops that watch
these call this module.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING

from vgpu_agent.agent.offers.build import build, look_at_node
from vgpu_agent.agent.offers.control_nodes import NONE_FOUND, find_control_nodes
from vgpu_agent.agent.offers.servers import check_offer
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.mode import choose_mode
from vgpu_agent.cdi.controller import NO_CDI
from vgpu_agent.concurrency import Latest
from vgpu_agent.config.collisions import duplicate_remedy
from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.errors import OfferError
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.isolation.mps import IN_CONTAINER
from vgpu_agent.ledger.offers import Offers, alike
from vgpu_agent.runtime.libraries import Libraries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from vgpu_agent.agent.api_server import ClusterAccess
    from vgpu_agent.agent.offers.build import Built
    from vgpu_agent.agent.offers.servers import Offering
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.cdi.controller import CdiController
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.family import Family, PodFamily
    from vgpu_agent.isolation.backend import InstalledLibrary, LibraryLimits, LibraryServices
    from vgpu_agent.isolation.mps import MpsView
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import Inventory, Resource

_IDS_IN_STATUS_SINCE = (1, 36)
_KUBELET_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")
# The part of etcd's limit of 1.5 MiB for ids, the rest being for other fields of the pod; and the
# bytes of an entry in addition to the id: lengths, tags and the word "Healthy".
_STATUS_ROOM_BYTES = 1_400_000
_ENTRY_OVERHEAD_BYTES = 13


class FamiliesInForce:
    """The controller of the families in force. It applies settings and facts of the node to the
    allocator and the plugin servers, one change at a time.

    State: in memory only; built again at the start.

    Attributes:
        in_force: family with files of a replaced plugin → its settings after these files, for
            ``/debug/config``.
        origins: family → setting → the file of that plugin that has set it.
        limits: family → the limits that its library enforces on containers.
        problems: errors in files of replaced plugins.
        cautions: problems that some pods will have with the offered resources.
        services: family → the services that the library of its containers needs.
        missing_libraries: isolation backend → why its library, which a family uses, is missing.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        origins: Mapping[str, str],
        allocator: Allocator,
        offering: Offering,
        cluster: ClusterAccess,
        inventory: Callable[[], Inventory],
        journal: Journal,
        cdi: CdiController | None = None,
        mps_view: MpsView = IN_CONTAINER,
    ) -> None:
        self._settings = settings
        self._origins = origins  # setting → the file, flag or variable that has set it
        self._allocator = allocator
        self._offering = offering
        self._cluster = cluster
        self._inventory = inventory
        self._journal = journal
        self._cdi = cdi
        self._mps_view = mps_view  # where this process sees the host's files of MPS
        self._libraries = Libraries(settings, journal)
        self._changing = asyncio.Lock()
        self._families = Families()
        self.in_force: Mapping[str, Mapping[str, object]] = {}
        self.origins: Mapping[str, Mapping[str, str]] = {}
        self.limits: Mapping[str, LibraryLimits] = {}
        self.services: Latest[Mapping[str, LibraryServices]] = Latest({})
        self.problems: tuple[str, ...] = ()
        self.cautions: tuple[str, ...] = ()
        self.missing_libraries: Mapping[str, str] = {}
        self._node_labels: tuple[Callable[[Inventory], Mapping[str, str] | None], ...] = ()
        # the control device nodes (``/dev/nvidiactl`` and others that all GPUs share) that the
        # families were built with
        self._control_nodes = NONE_FOUND
        # resources that the last call of `_offer` could not offer
        self._refused: frozenset[str] = frozenset()
        # the reasons why a library in use is older than the one that was delivered last
        self._outdated: tuple[str, ...] = ()

    @property
    def switched_on(self) -> tuple[tuple[str, bool], ...]:
        """The families that are switched on, each with True if its pods decide on the devices."""
        families = self._families
        return (
            *((family.name, False) for family in families.id_families),
            *((family.name, True) for family in families.pod_families),
        )

    def why_not_offered(self, name: str) -> tuple[str, bool]:
        """Explain why nothing of a family that is on is offered. Also return True if that is in
        order, because this node has no device for the family.
        """
        if reason := self._offering.blocked.get(name):
            return reason, False
        own = [
            f"{resource}: {reason}"
            for family in self._families.all
            if family.name == name
            for resource, reason in self._offering.withheld.items()
            if family.owns(resource) is not Ownership.NONE
        ]
        if own:
            more = f"; and {len(own) - 1} more resources" if own[1:] else ""
            return f"{own[0]}{more}", False
        gpus = self._inventory().gpus
        if not gpus:
            return "this node has no GPU", True
        divided = sum(gpu.mig_enabled for gpu in gpus)
        return (
            f"this node has no device for it: of its {len(gpus)} GPUs, {divided or 'none'} "
            f"{'are' if divided > 1 else 'is'} in MIG mode"
        ), True

    def node_labels(self) -> Mapping[str, str] | None:
        """Return the labels that describe the GPUs on the Node; None while no GPU answers."""
        found: dict[str, str] = {}
        for labels in self._node_labels:
            if (own := labels(self._inventory())) is None:
                return None
            found |= own
        return found

    async def apply(self, settings: Settings) -> None:
        """Put ``settings`` in force.

        Raises:
            OfferError: a family whose ids name devices would offer more than the kubelet takes;
                nothing has changed.
        """
        async with self._changing:
            built, libraries = await self._build(settings)
            self._check(built.families.id_families)  # before anything changes
            self._settings = settings
            self._take_over(built, libraries)
            self._offer()

    async def rebuild(self) -> None:
        """Build the families again with the same settings, after a change of the Node, the
        ConfigMap or a delivered library.
        """
        async with self._changing:
            # Without the check of `apply`: a list that has become too long, because GPUs were
            # added, withholds only its own resource.
            built, libraries = await self._build(self._settings)
            self._take_over(built, libraries)
            self.refresh()

    async def watch_control_nodes(
        self, changed: Callable[[], Awaitable[None]], *, pause_seconds: float
    ) -> None:
        """Poll the control device nodes until cancelled;
        call ``changed`` when they differ from those that the families were built with.
        """
        while True:
            await asyncio.sleep(pause_seconds)
            if (
                self._settings.plugin.pass_device_specs
                and await asyncio.to_thread(find_control_nodes, self._settings)
                != self._control_nodes
            ):
                await changed()

    def refresh(self) -> None:
        """Offer the present GPUs through the same families; the readiness probe shows problems."""
        self._offer()

    async def _build(self, settings: Settings) -> tuple[Built, Mapping[str, InstalledLibrary]]:
        """Build the families of ``settings``, and install their libraries. The families in force
        stay.
        """
        libraries = await self._libraries.install(settings)
        mode = choose_mode(settings.binding.mode, self._cluster.node) or self._allocator.mode
        found = await look_at_node(
            settings,
            # contents of the replaced plugins' files, as far as they are known: from ConfigMaps,
            # and from the last time that the node's files were read
            texts=self._cluster.plugin_texts,
            libraries=libraries,
            origins=self._origins,
            cdi=await self._cdi.look(settings) if self._cdi is not None else NO_CDI,
            late=mode is not None and mode.late,
            mps_view=self._mps_view,
        )
        return build(settings, found), libraries

    def _take_over(self, built: Built, libraries: Mapping[str, InstalledLibrary]) -> None:
        self._families = built.families
        if built.problems != self.problems:
            for problem in built.problems:
                self._journal.record("config.file_problem", level="warning", problem=problem)
        self.problems = built.problems
        if built.in_force != self.in_force:
            for family in FAMILIES:
                if family.name in built.in_force:
                    self._journal.record(
                        f"config.{family.settings.attribute}",
                        in_force=dict(built.in_force[family.name]),
                    )
            self._allocator.revision.advance()  # the Node shows these settings, too
        self.in_force, self.origins, self.limits = built.in_force, built.origins, built.limits
        # the texts of the replaced plugins' files, for the next time and for the next agent
        self._cluster.remember_plugin_texts(built.texts)
        self._control_nodes, self._node_labels = built.control_nodes, built.node_labels
        if built.services != self.services.value:
            self.services.publish(built.services)
        self._choose_mode()
        self._offering.blocked = self._blocked(built)
        self.missing_libraries = {
            backend: library.trouble
            for backend, library in libraries.items()
            if backend in built.uses_libraries and library.trouble and not library.path
        }
        self._outdated = tuple(
            f"{library.trouble}; until then {library.path} is used, installed before"
            for backend, library in libraries.items()
            if backend in built.uses_libraries and library.trouble
        )

    def _offer(self) -> None:
        """Offer every resource that can be offered, and withhold each other one with its reason."""
        inventory = self._inventory()
        if self._cdi is not None:
            self._cdi.observe(inventory)  # before the allocator can grant its devices
        offered: list[Resource] = []
        cautions: list[str] = []
        refused: dict[str, str] = {}
        id_families, pod_families = [], []
        for family in self._families.id_families:
            # what cannot be offered on these GPUs, and what is left out
            short = family.shortfall(inventory)
            cautions += short.cautions
            problems = self._add(family, inventory, offered)
            refused |= {**short.refused, **problems}
            id_families += [] if problems else [family]
        for pod_family in self._families.pod_families:
            unsupported = _why_unsupported(pod_family, inventory)
            cautions += () if unsupported else pod_family.cautions(inventory)
            problems = unsupported or self._add(pod_family, inventory, offered, check_size=True)
            refused |= problems
            pod_families += [] if problems else [pod_family]
        # ends the refusal of resources that can be offered now, or that no family has any more
        self._offering.accept(
            [*(resource.name for resource in offered), *self._refused.difference(refused)]
        )
        self._refused = frozenset(refused)
        for name, reason in refused.items():
            self._offering.refuse(name, reason)
        # families whose pods decide and that start no container now, and families whose ids name
        # devices and are not offered now
        paused = [
            family
            for family in self._families.pod_families
            if family not in pod_families or family.name in self._offering.blocked
        ]
        idle = [
            *self._families.idle,
            *(family for family in self._families.id_families if family not in id_families),
        ]
        self._allocator.use_families(
            Families(
                id_families=tuple(id_families),
                pod_families=tuple(pod_families),
                paused=tuple(paused),
                idle=tuple(idle),
            )
        )
        self._allocator.refresh_offer()
        self._caution(offered, cautions)

    @staticmethod
    def _add(
        family: Family,
        inventory: Inventory,
        offered: list[Resource],
        *,
        check_size: bool = False,
    ) -> Mapping[str, str]:
        """Add the resources of the family to ``offered``. If they cannot be offered, add none and
        return resource → reason. With ``check_size``, a list of ids that is too long for one
        message to the kubelet is such a reason.
        """
        try:
            resources = family.resources(inventory)
            if check_size:
                check_offer(resources)
            _check_distinct(offered, resources)
        except OfferError as err:
            return err.reasons
        offered += resources
        return {}

    def _caution(self, offered: list[Resource], others: list[str]) -> None:
        node = self._cluster.node
        same = (
            f"{one.name} and {other.name} have the same ids, as in the plugins that they come "
            "from; when a device changes its health, the kubelet (feature ResourceHealthStatus) "
            "may update the status of a pod that has the same id of the other resource instead"
            for one, other, _ in alike(offered)  # pairs of resources that have an id in common
        )
        library = () if self._offering.blocked else self._outdated
        found = (
            *long_status_cautions(offered, node.kubelet_version if node else ""),
            *others,
            *same,
            *library,
        )
        for text in found:
            if text not in self.cautions:
                self._journal.record("config.caution", level="warning", problem=text)
        self.cautions = found

    def _check(self, families: tuple[Family, ...]) -> None:
        inventory = self._inventory()
        check_offer(resource for family in families for resource in family.resources(inventory))

    def _choose_mode(self) -> None:
        mode = choose_mode(self._settings.binding.mode, self._cluster.node)
        if mode != self._allocator.mode and mode is not None:
            # `by_annotation`: the CDI name of a grant reaches the runtime as an annotation
            how = "late" if mode.late else "early"
            self._journal.record(
                "binding.mode", mode=how, by_annotation=mode.by_annotation, reason=mode.reason
            )
        # A chosen mode stays while the Node cannot be read.
        self._allocator.use_mode(mode or self._allocator.mode)

    def _blocked(self, built: Built) -> dict[str, str]:
        """Return family → the reason why its containers must not be started now."""
        # why families that need the API server cannot be offered yet; empty when they can
        waits = self._cluster.waiting_for
        if not waits and self._allocator.mode is None:
            waits = (
                "this node's Node object has not been read yet, so it is not known how grants "
                "reach containers"
            )
        # The GPU of a Tegra processor has no control device nodes.
        blocked = (
            {}
            if any(gpu.integrated for gpu in self._inventory().gpus)
            else dict.fromkeys(built.without_control_nodes, built.control_nodes.trouble)
        )
        blocked |= built.blocked
        return blocked | (
            {family.name: waits for family in self._families.pod_families} if waits else {}
        )


def _why_unsupported(family: PodFamily, inventory: Inventory) -> dict[str, str]:
    """Return family → reason when the family, which shares memory, cannot use these GPUs. The
    family's name then stands for all its resources.
    """
    if not any(gpu.integrated for gpu in inventory.gpus):
        return {}
    why = (
        "the GPU of this node is part of its processor and has no memory of its own to share; "
        "offer it by families.nvidia, and switch this family off here"
    )
    return {family.name: why}


def _check_distinct(offered: Sequence[Resource], more: Sequence[Resource]) -> None:
    """Check that the resources in ``more`` have names and ids of their own.

    Raises:
        OfferError: one of them has a name or an id of another one, or of one in ``offered``.
    """
    try:
        Offers().replace([*offered, *more])
    except ValueError as err:
        raise OfferError(
            {resource.name: f"{err}; {duplicate_remedy(resource.family)}" for resource in more}
        ) from err


def long_status_cautions(resources: Iterable[Resource], kubelet_version: str) -> Iterator[str]:
    """Yield a caution for each resource of which one GPU has more ids than a pod's status can hold.

    From 1.36 on the kubelet writes each device id that a container holds into the pod's status
    (feature ResourceHealthStatus, on by default), and etcd accepts requests of 1.5 MiB. With any
    device plugin, a pod with more ids runs but never shows Ready. A pod that failed to start cannot
    even be deleted, because the kubelet cannot write its last status. Measured on a kubelet 1.36.3:
    a status with 22,000 ids of 53 bytes is written, one with 23,028 is not.

    Args:
        resources: the offered resources.
        kubelet_version: ``status.nodeInfo.kubeletVersion``; without a number, no caution is made.
    """
    found = _KUBELET_VERSION.match(kubelet_version)
    if found is None or (int(found[1]), int(found[2])) < _IDS_IN_STATUS_SINCE:
        return
    for resource in resources:
        # only ids of this kind are so many: for each GPU one block of ids that differ by a number
        if not isinstance(resource.ids, NumberedIds) or not resource.ids.blocks:
            continue
        block = max(resource.ids.blocks, key=lambda block: block.count)
        # `block.text`: the id of that number; the last one is the longest
        fits = _STATUS_ROOM_BYTES // (len(block.text(block.count - 1)) + _ENTRY_OVERHEAD_BYTES)
        if block.count > fits:
            yield (
                f"{resource.name}: a GPU has {block.count} ids, and a pod that asks for more than "
                f"about {fits} never shows Ready and is hard to delete: this kubelet "
                f"({kubelet_version}) writes each id into the pod's status, which then is too "
                f"large for the API server. Change {resource.ids_setting} so that a GPU has at "
                f"least {math.ceil(block.count / fits)} times fewer ids; where an id stands for "
                "memory, divide what pods ask for by as much"
            )
