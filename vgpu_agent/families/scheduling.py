"""The interface between the scheduler extender and a family whose pods share cards by amounts.

A family whose pods the extender places has a `SchedulingFamily`. The extender knows nothing else of
families.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.placement.nodes.book import Holding
    from vgpu_agent.placement.nodes.cards import NodeCards, Unfit
    from vgpu_agent.placement.nodes.demand import PodDemand
    from vgpu_agent.pods import DesiredPod, Pod, PodKeys


class Incomplete(enum.StrEnum):
    """The treatment of a container that asks for compute without memory, or the other way round."""

    # all of the card's memory, or compute without a limit, as from the replaced extender
    AS_REPLACED = "as-replaced"
    PROPORTIONAL = "proportional"  # the same part of the card's memory as of its compute
    REFUSED = "refused"


class SchedulingOptions(msgspec.Struct, frozen=True):
    """The operator's decisions about the pods of a family.

    Attributes:
        domain: the part before the ``/`` of the family's labels, annotations and resources, if the
            family lets operators choose it; empty otherwise.
        types_match_substrings: the words by which a pod selects cards match any part of a product
            name, as in the replaced extender: ``A10`` also matches ``A100``.
        cores_only: the treatment of a container that asks for compute, and not for memory.
        memory_only: that of a container that asks for memory, and not for compute; never
            `PROPORTIONAL`, because an agent gives no container a limit that it has not asked for.
    """

    domain: str = ""
    types_match_substrings: bool = False
    cores_only: Incomplete = Incomplete.AS_REPLACED
    memory_only: Incomplete = Incomplete.AS_REPLACED


DEFAULTS = SchedulingOptions()


# The labels and annotations that may name a pod's gang, for any family (vgpu-manager §4.5).
GANG_LABELS = ("scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io/name")
GANG_ANNOTATIONS = (
    "scheduling.k8s.io/group-name",
    "scheduling.volcano.sh/group-name",
    "gang.scheduling.koordinator.sh/name",
)


class KeyNames(msgspec.Struct, frozen=True):
    """The names of the resources and annotations that explanations mention, so that operators can
    change a pod or a Node.

    Attributes:
        number: the resource for the number of cards.
        cores: the resource for percent of each card's compute.
        memory: the resource for memory of each card.
        topology_mode: the annotation of a pod for the links that its cards must have.
        memory_policy: the one for physical memory or virtual memory, which is more than the cards
            have.
        include_types: the one for the product names that the pod wants.
        exclude_types: the one for the product names that it does not want.
        include_uuids: the one for the UUIDs that it wants.
        exclude_uuids: the one for the UUIDs that it does not want.
        node_register: the annotation of a Node that lists its cards.
        node_config: the annotation of a Node with the settings by which its cards are shared.
    """

    number: str
    cores: str
    memory: str
    topology_mode: str
    memory_policy: str
    include_types: str
    exclude_types: str
    include_uuids: str
    exclude_uuids: str
    node_register: str
    node_config: str


class SchedulingFamily(Protocol):
    """The reader and writer of the annotations and labels of one family on Nodes and pods."""

    @property
    def number_resource(self) -> str:
        """The name of the resource for the number of cards. A Node's number of it is the sum of
        the slots of its cards: the places for containers that share a card.
        """
        ...

    @property
    def pod_keys(self) -> PodKeys:
        """The keys of pods that are read and written; all others are skipped."""
        ...

    @property
    def role_label(self) -> str:
        """The label by which the pods of several extenders show which one leads, so that a Service
        can select it; empty if the family has none.
        """
        ...

    @property
    def key_names(self) -> KeyNames:
        """The names of resources and annotations in explanations."""
        ...

    def read_cards(self, annotations: Mapping[str, str], slots: int) -> NodeCards | Unfit:
        """Read a Node's annotations; ``slots`` is its allocatable number of `number_resource`. An
        `Unfit` says why the Node cannot take any pod.
        """
        ...

    def read_demand(self, pod: Pod) -> PodDemand | None:
        """Return the demand of a pod; None if it asks for nothing of this family.

        Raises:
            RequestRefusedError: no Node can ever serve it.
        """
        ...

    def misspelt(self, pod: Pod) -> Sequence[str]:
        """Return a sentence for each annotation of a pod, among those that choose a policy or mode
        from a list of words, whose word is not in the list, and so counts as ``none``.
        """
        ...

    def grace_seconds(self, pod: Pod) -> float | None:
        """Return how long cards are to be kept for the pod after filter, until it is bound, by its
        own annotation; None if it leaves that to the operator.
        """
        ...

    def read_holding(self, pod: Pod) -> Holding | None:
        """Return the cards that a pod holds by its annotations; None if there are none.

        Raises:
            AgentError: the annotations are malformed; the message is the end of a sentence that
                names the pod.
        """
        ...

    def when_bound(
        self, wanted: PodDemand, holding: Holding, numbers: Mapping[str, int], now_ns: int
    ) -> DesiredPod:
        """Return the annotations and labels that a pod gets when it is bound: the annotations with
        the Binding, and the labels with it or, where it cannot carry them, before.

        Args:
            wanted: its demand.
            holding: the cards that it is to hold.
            numbers: UUID → number of the card on its Node.
            now_ns: the time, in unix nanoseconds.
        """
        ...
