"""What a bound pod holds, by the claims in its annotations (vgpu-manager §4.2, §4.4).

Claims count from the moment when the pod is bound until it has ended. Those of a pod without a Node
are worth nothing: any user can write them, and what the extender itself has promised to such a pod
it keeps in the book (vgpu-manager §12.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.vgpu_manager.claims import Claims, ClaimsTextError, parse_claims
from vgpu_agent.placement.nodes.book import HeldCard, Holding
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.pods import Pod


def holding_of(pod: Pod, keys: Keys) -> Holding | None:
    """Return what the pod holds on its Node, None if that is nothing.

    The claims of what it has received count once they name as many containers as those of the
    scheduler; until then the scheduler's do.

    Raises:
        ClaimsTextError: the text that counts is none; the message is the end of a sentence that
            names the pod.
    """
    if not pod.node or pod.ended:
        return None
    planned_text = pod.annotations.get(keys.pre_allocated, "")
    received_text = pod.annotations.get(keys.real_allocated, "")
    planned = parse_claims(planned_text) if planned_text else ()
    received = _received(received_text, planned)
    claims = received if received and len(received) >= len(planned) else planned
    if not claims:
        return None
    kinds = {container.name: container.kind for container in pod.containers}
    return Holding(
        pod.node,
        tuple(kinds.get(each.container, ContainerKind.MAIN) for each in claims),
        tuple(
            tuple(
                HeldCard(card.uuid, max(card.cores_percent, 0), max(card.memory_mib, 0))
                for card in each.cards
            )
            for each in claims
        ),
    )


def _received(text: str, planned: Claims) -> Claims:
    """Read the claims of what the pod has received. If they are nonsense, the plan counts, if there
    is one.
    """
    try:
        return parse_claims(text) if text else ()
    except ClaimsTextError:
        if planned:
            return ()
        raise
