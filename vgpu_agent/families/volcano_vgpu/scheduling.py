"""Volcano's annotations of vGPUs, as a scheduler reads and writes them; the interface is in
`families.scheduling`.

In clusters without Volcano, kube-scheduler and the agent's extender use this module to place pods
that ask for Volcano's vGPUs. Nodes whose cards are divided into MIG instances for each pod are left
out, because that needs Volcano's scheduler.

Amounts of memory are in the Node's units, also in fields that are named after MiB. The Node's
annotation does not say how large a unit is (volcano-vgpu §2.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError, quoted, shortened
from vgpu_agent.families.scheduling import DEFAULTS, KeyNames
from vgpu_agent.families.volcano_vgpu.decisions import DECISION, NODE, TO_ALLOCATE
from vgpu_agent.families.volcano_vgpu.family import (
    NO_TYPE,
    NO_UUID,
    USE_TYPE,
    USE_UUID,
    WANTED_MODE,
)
from vgpu_agent.families.volcano_vgpu.node_state import REGISTER
from vgpu_agent.families.volcano_vgpu.pod_devices import (
    SEGMENT_END,
    Assigned,
    parse_pod_devices,
    write_segment,
)
from vgpu_agent.families.volcano_vgpu.pod_state import ALLOCATING, BIND_TIME, PHASE, TIME
from vgpu_agent.families.volcano_vgpu.requests import Names, read_request
from vgpu_agent.placement.nodes.book import HeldCard, Holding
from vgpu_agent.placement.nodes.cards import Card, Hardware, NodeCards, Unfit
from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand, PodDemand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.rooms import BINPACK
from vgpu_agent.pods import ContainerKind, DesiredPod, PodKeys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.scheduling import SchedulingOptions
    from vgpu_agent.pods import Pod

MAX_CARDS = 64  # of a Node, and of one container
# The largest numbers that are read from a Node's entry of a card. Larger ones count as these, and
# those with more digits as 0.
_MOST_CONTAINERS, _MOST_MEMORY = 10_000, 2**31 - 1
# Percent of a card. A Node may register another number; schedulers count 100 all the same
# (volcano-vgpu §8).
_WHOLE_CORES = 100
_MIG = "mig"  # a Node's mode, or the one that a pod wants: cards are divided into MIG instances
_LONGEST_NOTE = 200  # characters of a Node's annotation in a message
_MAX_ENTRIES = 64  # of a list in an annotation


class VolcanoScheduling:
    """Volcano's side of `SchedulingFamily`, the interface of the scheduler extender to a family.

    State: none.
    """

    def __init__(self, names: Names, options: SchedulingOptions = DEFAULTS) -> None:
        """Build it for resources of these names; ``options`` are the operator's decisions on how
        the pods' annotations are read.
        """
        self._names, self._options = names, options

    @property
    def number_resource(self) -> str:
        """The resource for the number of cards."""
        return self._names.number

    @property
    def pod_keys(self) -> PodKeys:
        """The keys that are read of pods; no option renames them."""
        names = self._names
        return PodKeys(
            annotations=(DECISION, NODE, WANTED_MODE, USE_TYPE, NO_TYPE, USE_UUID, NO_UUID),
            labels=(),
            resource_prefixes=(names.number, names.memory, names.cores, names.percentage),
        )

    @property
    def role_label(self) -> str:
        """An empty name: Volcano has no label that says which of several extenders leads."""
        return ""

    @property
    def key_names(self) -> KeyNames:
        """The names of resources and annotations in explanations; empty where Volcano has none."""
        names = self._names
        return KeyNames(
            number=names.number,
            cores=names.cores,
            memory=names.memory,
            topology_mode="",
            memory_policy="",
            include_types=USE_TYPE,
            exclude_types=NO_TYPE,
            include_uuids=USE_UUID,
            exclude_uuids=NO_UUID,
            node_register=REGISTER,
            node_config="",
        )

    def read_cards(self, annotations: Mapping[str, str], slots: int) -> NodeCards | Unfit:
        """Read a Node's annotations (volcano-vgpu §2). ``slots`` is the Node's allocatable number
        of `number_resource`: the sum of its cards' slots.
        """
        if slots <= 0:
            return Unfit(Reason.NodeNotVGPUEnabled)
        text = annotations.get(REGISTER, "")
        if not text:
            return Unfit(Reason.NodeNoVGPURegister)
        pieces = [piece.split(",") for piece in text.split(":") if "," in piece]
        if not 0 < len(pieces) <= MAX_CARDS or any(len(piece) < 6 for piece in pieces):
            return Unfit(
                Reason.NodeBadVGPURegister,
                f"expected 1 to {MAX_CARDS} cards of six fields, got "
                f"{quoted(shortened(text, _LONGEST_NOTE), _LONGEST_NOTE)}",
            )
        if pieces[-1][5].strip() == _MIG:  # the mode in the last entry is that of the Node
            return Unfit(Reason.DeviceMIGEnabled, "its cards are divided for each pod (mode mig)")
        uuids = tuple(piece[0] for piece in pieces)
        if len(set(uuids)) < len(uuids) or not all(uuids):
            return Unfit(Reason.NodeBadVGPURegister, "two cards have one UUID, or one has none")
        cards = [_card(piece) for piece in pieces]
        # `memory_factor`: from a request's units to a card's; here both are the Node's units.
        # `is_oversold`: the cards are offered with more memory than they have. That counts only for
        # pods with a memory policy, which Volcano's do not have.
        return NodeCards(Hardware(tuple(cards), memory_factor=1, is_oversold=False), uuids)

    def read_demand(self, pod: Pod) -> PodDemand | None:
        """Return the demand of a pod, None if it asks for no vGPU (volcano-vgpu §8)."""
        names = self._names
        pod.refuse_more_requests()
        asking = names.asking(pod)
        if not asking:
            return None
        containers = []
        for container in asking:
            request = read_request(pod, container, names)
            number = container.limits.get(names.number, 0)
            if names.number in container.unreadable_limits or not 0 < number <= MAX_CARDS:
                value = container.unreadable_limits.get(names.number, str(number))
                raise RequestRefusedError(
                    f"pod {pod.full_name}, container {container.name}: {names.number} is "
                    f"{quoted(value, 40)}; expected a number of GPUs, 1 to {MAX_CARDS}, without "
                    "which the container would get no GPU"
                )
            containers.append(
                ContainerDemand(
                    ContainerKind.MAIN,  # Volcano's scheduler sees no init containers or sidecars
                    card_count=number,
                    cores_percent=request.cores_percent,
                    memory_units=request.memory_units,
                    memory_percent=request.memory_percent,
                    # it shares its cards with no other container
                    alone=request.cores_percent == _WHOLE_CORES,
                )
            )
        mode = pod.annotations.get(WANTED_MODE, "").strip()
        if mode == _MIG:
            raise RequestRefusedError(
                f"pod {pod.full_name}: annotation {WANTED_MODE} is mig; MIG instances that are "
                "made for a pod need Volcano's scheduler"
            )
        included = _entries(pod, USE_TYPE)
        demand = Demand(
            tuple(containers),
            node_policy=BINPACK,
            device_policy=BINPACK,
            include_types=included,
            # schedulers ignore it beside USE_TYPE (volcano-vgpu §3.1)
            exclude_types=() if included else _entries(pod, NO_TYPE),
            include_uuids=_entries(pod, USE_UUID),
            exclude_uuids=_entries(pod, NO_UUID),
            # True: ``A10`` also matches ``A100``
            types_match_substrings=self._options.types_match_substrings,
        )
        return PodDemand(demand, tuple(each.name for each in asking))

    def misspelt(self, _pod: Pod) -> Sequence[str]:
        """Return nothing: no annotation of Volcano's pods has a policy that could be misspelt."""
        return ()

    def grace_seconds(self, _pod: Pod) -> float | None:
        """Return None: no annotation of Volcano's pods says how long cards are kept for the pod
        until it is bound.
        """
        return None

    def read_holding(self, pod: Pod) -> Holding | None:
        """Return the cards that a pod holds by its annotations; None if there are none. Only the
        annotation `DECISION` counts, the chosen cards, which schedulers write once, and only of
        bound pods (volcano-vgpu §8). Of its segments (its parts, one for each container), those
        beyond the number of containers that ask for cards do not count: any user can write more,
        and the kubelet gives other containers no device.
        """
        text = pod.annotations.get(DECISION, "")
        asking = len(self._names.asking(pod))
        if not pod.node or pod.ended or not text or not asking:
            return None
        segments = [segment for segment in parse_pod_devices(text)[:asking] if segment]
        if not segments:
            return None
        return Holding(
            pod.node,
            kinds=(ContainerKind.MAIN,) * len(segments),
            cards=tuple(
                tuple(
                    HeldCard(each.gpu, max(each.cores_percent, 0), max(each.memory_units, 0))
                    for each in segment
                )
                for segment in segments
            ),
        )

    def when_bound(
        self, wanted: PodDemand, holding: Holding, numbers: Mapping[str, int], now_ns: int
    ) -> DesiredPod:
        """Return the six annotations that Volcano's scheduler writes when it binds a pod
        (volcano-vgpu §3.1, G3).
        """
        del wanted, numbers
        devices = SEGMENT_END.join(
            write_segment(Assigned(card.uuid, card.memory_mib, card.cores_percent) for card in each)
            for each in holding.cards
        )
        seconds = str(now_ns // 1_000_000_000)
        return DesiredPod(
            {
                NODE: holding.node,
                TIME: seconds,
                DECISION: devices,
                TO_ALLOCATE: devices,  # the part of it that has no shares yet: all
                PHASE: ALLOCATING,  # how far the start has come
                BIND_TIME: seconds,  # the same time as `TIME`, that of the decision
            },
            labels={},
        )


def _card(fields: list[str]) -> Card:
    """Read an entry; a text that is not a number counts as 0, as for schedulers (volcano-vgpu
    §2.2).
    """
    _, count, memory, model, health, *_ = fields
    healthy = health.strip() in {"1", "t", "T", "true", "TRUE", "True"}
    return Card(
        blocked=None if healthy else Reason.DeviceUnhealthy,
        model=model,
        memory_mib=_number(memory, _MOST_MEMORY),
        cores_percent=_WHOLE_CORES,
        slots=_number(count, _MOST_CONTAINERS),
        numa=None,
    )


def _number(text: str, most: int) -> int:
    fits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    return min(int(text), most) if fits else 0


def _entries(pod: Pod, key: str) -> tuple[str, ...]:
    found = {entry.strip().lower() for entry in pod.annotations.get(key, "").split(",")} - {""}
    if len(found) > _MAX_ENTRIES:
        raise RequestRefusedError(
            f"pod {pod.full_name}: annotation {key} has {len(found)} entries; expected at most "
            f"{_MAX_ENTRIES}"
        )
    return tuple(sorted(found))
