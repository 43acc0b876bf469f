"""The context of an allocator on a node whose pods nobody reads: ids name the devices there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.allocation.binding_parts import NODE, MemoryCarrier
from vgpu_agent.allocation.context import Context
from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import PodCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.pods import Pod


def without_pods(**facts: Any) -> Context:
    """A context with these facts, where no record can be read
    and the API server does not answer.
    """
    return Context(
        node=NODE,
        pods=PodCache(),
        read_records=_unreadable,
        fetch_pod=_no_answer,
        carrier=MemoryCarrier(),
        refusals=Refusals(),
        settings=Binding(),
        **facts,
    )


async def _unreadable(resource: str, ids: Sequence[str], *, whole: bool = False) -> KubeletEvidence:
    return KubeletEvidence(None, None, trouble="a test")


async def _no_answer(namespace: str, name: str) -> Pod | None:
    raise ClusterError("the API server does not answer")
