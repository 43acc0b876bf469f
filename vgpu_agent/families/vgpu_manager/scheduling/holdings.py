"""The cards that a bound pod holds, by the claims in its annotations (vgpu-manager §4.2, §4.4).

Claims count from the moment when the pod is bound until it has ended. Those of a pod without a Node
do not count: any user can write them, and the cards that the agent's own extender keeps for such a
pod are in its memory (`placement.nodes.book`, vgpu-manager §12.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.vgpu_manager.claims import (
    ClaimsTextError,
    ContainerClaim,
    by_container,
    parse_claims,
)
from vgpu_agent.families.vgpu_manager.requests import asks
from vgpu_agent.placement.nodes.book import HeldCard, Holding

if TYPE_CHECKING:
    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.pods import Pod


def holding_of(pod: Pod, keys: Keys) -> Holding | None:
    """Return the cards that the pod holds on its Node, None if there are none. ``keys`` has the
    names of the annotations.

    Only containers that ask for cards count: the kubelet gives other containers no device, whatever
    a user has written. A container's claims in ``real-allocated`` (what it has received) replace
    those in ``pre-allocated`` (what the scheduler planned). If one of the annotations is malformed,
    only the other one counts: a user who corrupts one must not free the cards in the other.

    Raises:
        ClaimsTextError: nothing can be read; the message is the end of a sentence that names the
            pod.
    """
    if not pod.node or pod.ended:
        return None
    claims: dict[str, ContainerClaim] = {}
    problem: ClaimsTextError | None = None
    for key in (keys.pre_allocated, keys.real_allocated):
        if text := pod.annotations.get(key, ""):
            try:
                claims |= by_container(parse_claims(text))
            except ClaimsTextError as err:
                problem = err
    if not claims:
        if problem is not None:
            raise problem
        return None
    kinds = {each.name: each.kind for each in pod.containers if asks(each, keys)}
    counted = [each for each in claims.values() if each.container in kinds]
    if not counted:
        return None
    return Holding(
        pod.node,
        kinds=tuple(kinds[each.container] for each in counted),
        cards=tuple(
            tuple(
                # a user may have written negative amounts
                HeldCard(card.uuid, max(card.cores_percent, 0), max(card.memory_mib, 0))
                for card in each.cards
            )
            for each in counted
        ),
    )
