"""The dependencies of binding besides the ledger: the kubelet's records, the pods, the carrier. `agent` wires them, tests replace them."""

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
    """The reader of the kubelet's records, implemented by `agent.records.reader`."""

    async def __call__(self, resource: str, ids: Sequence[str], *, whole: bool = False) -> KubeletEvidence:
        """Return the records about these ids, read after this call began; with ``whole`` of every pod, else possibly of more ids."""
        ...


class Fetch(Protocol):
    """The request to the API server for one pod, implemented by `cluster`."""

    async def __call__(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now; None when there is none.

        Raises:
            ClusterError: no answer.
        """
        ...


class Divider(Protocol):
    """The divider of GPUs into MIG instances, one after the other, implemented by `agent.devices.mig`."""

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """Begin the division; it goes on whether or not a caller waits for it.

        Args:
            layout: of a GPU without any holder.
            done: called once, on the event loop: with "" when the inventory shows the GPU divided so, else with the reason.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of binding besides the ledger. `agent` wires them, tests replace them."""

    node: str
    book: PodCache
    read_records: RecordsReader
    fetch: Fetch
    carrier: Carrier
    refusals: Refusals
    settings: Binding
    divider: Divider | None = None
    overcommits: Overcommits = dataclasses.field(default_factory=Overcommits)
