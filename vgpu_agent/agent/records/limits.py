"""Record in the journal each container whose limit is not in force.

`hami-core` keeps the limits and the usage of a container in a file, its *region*. The container can
write that file, so a hostile container can raise its own limit. With `vgpu-control`, a container
can run programs without the library that enforces the limit. The agent prevents neither. It
compares the files of containers with the grants (`web.limits`), and records once each grant whose
limit is not in force. Grants under MPS have no such file: they are checked when the file of any
container changes.
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
    """The loop that records grants whose limit is not in force.

    State: the numbers of the recorded grants. Each is recorded once, because a container that
    changes its region every second must not fill the journal. A restarted agent records them again.

    Args:
        evidence: the contents of the containers' files, one snapshot for each of `hami-core` and
            `vgpu-control`.
        status: returns the agent's status, which includes the evidence.
        journal: receives the entries.
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
        """Check all limits now and after each change of the evidence, until cancelled."""
        while True:
            versions = Versions(*self._evidence)
            self.check()
            await versions.passed()  # until one of them is newer

    def check(self) -> None:
        """Record each grant whose limit is not in force, unless it was recorded before. Grants
        without a known container or without shares yet are passed over.
        """
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
