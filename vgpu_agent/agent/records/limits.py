"""Journal each container whose limit is no longer the configured one.

`hami-core` keeps the limits and the usage of a container in a file, its *region*, which the
container can write. So a hostile container can raise its own limit. With `vgpu-control` it can run
programs without the library. The agent cannot prevent that, but it reads what there is to see, and
the journal names such a pod once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_agent.concurrency import Versions
from vgpu_agent.log import ChangeFilter
from vgpu_agent.web.limits import Limits, LimitState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.concurrency import Latest
    from vgpu_agent.journal import Journal
    from vgpu_agent.status import AgentStatus


class LimitsWatch:
    """The comparison of the limits that containers have with those of their grants.

    State: the numbers of the grants that were reported. Each is reported once, because a container
    that changes its region every second must not fill the journal. A restarted agent reports again.

    Args:
        evidence: what is read from the containers' files, by each backend.
        status: returns the snapshot with it.
        journal: gets an entry for each.
    """

    def __init__(
        self,
        evidence: Sequence[Latest[Any]],
        status: Callable[[], AgentStatus],
        journal: Journal,
    ) -> None:
        self._evidence = tuple(evidence)
        self._status = status
        self._journal = journal
        self._changes = ChangeFilter()

    async def run(self) -> None:
        """Compare whenever something was read that has changed, until cancelled."""
        while True:
            seen = Versions(*self._evidence)
            self.look()
            await seen.passed()

    def look(self) -> None:
        """Journal each limit that is not in force and was not reported yet."""
        status = self._status()
        limits = Limits(status)
        self._changes.keep_only({grant.number for grant in status.ledger.grants})
        for grant in status.ledger.grants:
            owner, limit = grant.owner, limits.of(grant)
            if (
                owner is None
                or limit is None
                or limit.state is not LimitState.NOT_IN_FORCE
                or not self._changes.is_new(grant.number)
            ):
                continue
            self._journal.record(
                "limit.not_in_force",
                level="warning",
                grant=grant.number,
                pod=owner.pod_name,
                container=owner.container,
                resource=grant.resource,
                reason=limit.reason,
            )
