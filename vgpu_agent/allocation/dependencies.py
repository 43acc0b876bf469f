"""What binding needs besides the ledger: kubelet's records, the pods, the carrier. `agent` wires it, tests fill it with what they like."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from vgpu_agent.allocation.overcommits import Overcommits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.allocation.carrier import Carrier
    from vgpu_agent.allocation.proof import KubeletEvidence
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.config.binding import Binding
    from vgpu_agent.families.family import MigLayout
    from vgpu_agent.pods import Pod, PodCache


class RecordsReader(Protocol):
    """Reads kubelet's records; `agent.records.reader` is it."""

    async def __call__(self, resource: str, ids: Sequence[str], *, whole: bool = False) -> KubeletEvidence:
        """What they say about these ids, read after this call began; it may say more, and with ``whole`` it tells of every pod."""
        ...


class Fetch(Protocol):
    """Asks the API server for one pod; `cluster` is it."""

    async def __call__(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now; None when there is none.

        Raises:
            ClusterError: no answer.
        """
        ...


class Divider(Protocol):
    """Divides GPUs into MIG instances, one after the other; `agent.devices.mig` is it."""

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """Begin; nobody who waits or stops waiting changes anything about it.

        Args:
            layout: of a GPU of which nobody has anything.
            done: called once, on the event loop: with "" when the inventory shows the GPU divided so, else with the reason.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Dependencies:
    """What binding needs besides the ledger; `agent` wires it, tests fill it with what they like."""

    node: str
    book: PodCache
    read_records: RecordsReader
    fetch: Fetch
    carrier: Carrier
    refusals: Refusals
    settings: Binding
    divider: Divider | None = None
    overcommits: Overcommits = dataclasses.field(default_factory=Overcommits)
