"""vgpu-manager's annotations, as a scheduler reads and writes them; the interface is in
`families.scheduling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.scheduling import DEFAULTS, KeyNames
from vgpu_agent.families.vgpu_manager.claims import (
    ClaimsTextError,
    ContainerClaim,
    DeviceClaim,
    by_container,
    parse_claims,
    write_claims,
)
from vgpu_agent.families.vgpu_manager.grace import grace_seconds
from vgpu_agent.families.vgpu_manager.pod_state import ALLOCATING, node_label
from vgpu_agent.families.vgpu_manager.requests import asks
from vgpu_agent.families.vgpu_manager.scheduling.demand import misspelt, read_demand
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes.book import HeldCard, Holding
from vgpu_agent.pods import DesiredPod, PodKeys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.scheduling import SchedulingOptions
    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.placement.nodes.cards import NodeCards, Unfit
    from vgpu_agent.placement.nodes.demand import PodDemand
    from vgpu_agent.pods import Pod

ROLE_LABEL = "vgpu-manager.io/scheduler-role"  # says which of several extenders leads


class VgpuManagerScheduling:
    """The reader and writer of vgpu-manager's annotations and labels; no state of its own."""

    def __init__(self, keys: Keys, options: SchedulingOptions = DEFAULTS) -> None:
        """Build it. ``keys`` are in the operator's domain (the part before the slash) already.
        ``options`` are the operator's decisions about pods, such as about incomplete requests.
        """
        self._keys, self._options = keys, options

    @property
    def number_resource(self) -> str:
        """The resource for the number of cards; a Node has one for each slot of its cards."""
        return self._keys.number

    @property
    def pod_keys(self) -> PodKeys:
        """The annotations, labels and resources of pods that are read and written."""
        keys = self._keys
        return PodKeys(
            (*keys.state_annotations, *keys.user_annotations),
            keys.state_labels,
            (keys.number, keys.cores, keys.memory),
        )

    @property
    def role_label(self) -> str:
        """The label that says which of several extenders leads (vgpu-manager §1.3)."""
        return ROLE_LABEL

    @property
    def key_names(self) -> KeyNames:
        """The names of resources and annotations in explanations of why a pod does not start."""
        keys = self._keys
        return KeyNames(
            number=keys.number,
            cores=keys.cores,
            memory=keys.memory,
            topology_mode=keys.topology_mode,
            memory_policy=keys.memory_policy,
            include_types=keys.include_type,
            exclude_types=keys.exclude_type,
            include_uuids=keys.include_uuid,
            exclude_uuids=keys.exclude_uuid,
            node_register=keys.node_register,
            node_config=keys.node_config,
        )

    def read_cards(self, annotations: Mapping[str, str], slots: int) -> NodeCards | Unfit:
        """Return the cards of a Node that has ``slots`` allocatable, or why it can take no pod."""
        return read_cards(annotations, slots, self._keys)

    def read_demand(self, pod: Pod) -> PodDemand | None:
        """Return the demand of a pod; None if it asks for no cards."""
        return read_demand(pod, self._keys, self._options)

    def misspelt(self, pod: Pod) -> Sequence[str]:
        """Return a sentence for each policy of a pod whose word means nothing."""
        return misspelt(pod, self._keys)

    def grace_seconds(self, pod: Pod) -> float | None:
        """Return how long cards are kept for the pod until it is bound, by its own annotation; None
        if it leaves that to the operator.
        """
        return grace_seconds(pod, self._keys)

    def read_holding(self, pod: Pod) -> Holding | None:
        """Return the cards that a bound pod holds by its annotations; None if there are none."""
        return holding_of(pod, self._keys)

    def when_bound(
        self, wanted: PodDemand, holding: Holding, numbers: Mapping[str, int], now_ns: int
    ) -> DesiredPod:
        """Return the annotations and labels that vgpu-manager's extender writes in its two patches
        until a pod is bound (vgpu-manager §4.3).

        Args:
            wanted: the pod's demand, with the names of its containers.
            holding: the Node and the cards that were chosen.
            numbers: UUID of each card → its index on the Node.
            now_ns: the time at which it is to be bound, in Unix nanoseconds.
        """
        keys = self._keys
        claims = (
            ContainerClaim(
                name,
                tuple(
                    DeviceClaim(
                        index=numbers.get(card.uuid, 0),
                        uuid=card.uuid,
                        cores_percent=card.cores_percent,
                        memory_mib=card.memory_mib,
                    )
                    for card in cards
                ),
            )
            for name, cards in zip(wanted.names, holding.cards, strict=True)
        )
        return DesiredPod(
            {
                keys.pre_allocated: write_claims(claims),
                keys.predicate_node: holding.node,
                keys.predicate_time: str(now_ns),
                keys.real_allocated: "",  # for the claims of containers that have started
            },
            # `phase`: how far the allocation is. `metrics_node`: where the pod's use is measured.
            # `node_label`: None, for no label, where the name is too long for one
            {keys.phase: ALLOCATING, keys.metrics_node: node_label(holding.node)},
        )


def holding_of(pod: Pod, keys: Keys) -> Holding | None:
    """Return the cards that the pod holds on its Node by the claims in its annotations, None if
    there are none (vgpu-manager §4.2, §4.4). ``keys`` has the names of the annotations.

    Claims count from the moment when the pod is bound until it has ended. Those of a pod without a
    Node do not count: any user can write them, and the cards that the agent's own extender keeps
    for such a pod are in its memory (`placement.nodes.book`, vgpu-manager §12.3).

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
