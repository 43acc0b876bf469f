"""Tells of containers whose limits are no longer those that were configured, from what the usage loop reads.

A container's region is writable for it, so a hostile one can raise its own limit. `hami-core` cannot prevent that; it can be seen, and the
journal names the pod once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.web.limits import Limits, LimitState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.concurrency import Latest
    from vgpu_agent.journal import Journal
    from vgpu_agent.status import AgentStatus, ContainerUsage


class LimitsWatch:
    """Compares what regions say with what their grants were given.

    State: which grants were told of, by number, so that each is told once until its limit holds again; a restart tells again.
    """

    def __init__(self, usage: Latest[tuple[ContainerUsage, ...]], status: Callable[[], AgentStatus], journal: Journal) -> None:
        self._usage = usage
        self._status = status
        self._journal = journal
        self._told: set[int] = set()

    async def run(self) -> None:
        """Look after each change of what regions say, until cancelled; a loop for the supervisor."""
        async for _ in self._usage.changes():
            self.look()

    def look(self) -> None:
        """Record each limit that is newly not in force, and each that holds again."""
        status = self._status()
        limits = Limits(status)
        loose = {}
        for grant in status.ledger.grants:
            limit = limits.of(grant)
            if limit is not None and limit.state is LimitState.NOT_IN_FORCE and grant.owner is not None:
                loose[grant.number] = (grant.owner, limit.reason)
        for number in loose.keys() - self._told:
            owner, reason = loose[number]
            self._journal.record(
                "limit.not_in_force", level="warning", grant=number, pod=owner.pod_name, container=owner.container, reason=reason
            )
        live = {grant.number for grant in status.ledger.grants}
        for number in sorted((self._told - loose.keys()) & live):
            self._journal.record("limit.in_force_again", grant=number)
        self._told = set(loose)
