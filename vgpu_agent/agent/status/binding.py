"""The state of the families, for `report`: which are offered, how their grants are bound, and which starts are refused.

A module of its own because allocation, offering and settings each know a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.status import BindingStatus, FamilyStatus

if TYPE_CHECKING:
    from vgpu_agent.agent.offers.families import FamiliesInForce
    from vgpu_agent.agent.offers.servers import Offering
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.allocation.overcommits import Overcommits
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.runtime.grants import GrantDirectory
    from vgpu_agent.runtime.region_guard import RegionGuard


class BindingReport:
    """The reader of all parts for the report; keeps nothing."""

    def __init__(
        self,
        allocator: Allocator,
        families: FamiliesInForce,
        offering: Offering,
        refusals: Refusals,
        overcommits: Overcommits,
        directory: GrantDirectory,
        regions: RegionGuard,
    ) -> None:
        self._allocator = allocator
        self._families = families
        self._offering = offering
        self._refusals = refusals
        self._directory = directory
        self._regions = regions
        self._overcommits = overcommits

    def status(self) -> BindingStatus:
        """Everything at this moment."""
        return BindingStatus(
            mode=self._allocator.mode,
            families=tuple(self._family(name, by_pod=by_pod) for name, by_pod in self._families.on),
            refusals=self._refusals.current,
            ambiguities=self._allocator.late_start.ambiguities,
            wrong_guesses=self._allocator.early.wrong_guesses,
            exchanges=self._allocator.early.exchanges,
            overcommitted_starts=self._overcommits.total,
            in_force=self._families.in_force,
            origins=self._families.origins,
            limits=self._families.limits,
            file_problems=self._families.problems,
            cautions=(*self._families.cautions, *self._offering.cautions.values()),
            left_over=dict(self._directory.left_over),
            regions_cut=self._regions.cuts,
        )

    def _family(self, name: str, *, by_pod: bool) -> FamilyStatus:
        offered = any(plugin.family == name for plugin in self._offering.statuses)
        return FamilyStatus(
            name, by_pod, offered, "" if offered else self._offering.blocked.get(name) or "the reason is that of its resources"
        )
