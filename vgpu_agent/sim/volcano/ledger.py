"""The vGPU ledger of the simulated Volcano scheduler: the use of each card, and the place of the
next pod.

Made anew from the register annotation and the pods' `vgpu-ids-new` for every round of `scheduler`,
so all its state is in the API server. Rules: volcano-vgpu §8, golden vectors volcano-vgpu G3, G6,
G7, G8 and G13; for cards in the mode ``mig`` whose geometry is known, `mig`. The accounting
mistakes of the real scheduler (volcano-vgpu D17) are not imitated.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Literal

from vgpu_agent.sim.volcano import annotations as volcano_annotations
from vgpu_agent.sim.volcano.annotations import Card, Claim
from vgpu_agent.sim.volcano.mig import InstanceUse
from vgpu_agent.sim.volcano.resources import Object, amount, annotations_of, is_terminated, limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.sim.volcano.mig import Geometries

NUMBER = "volcano.sh/vgpu-number"
MEMORY = "volcano.sh/vgpu-memory"
CORES = "volcano.sh/vgpu-cores"
PERCENTAGE = "volcano.sh/vgpu-memory-percentage"

Policy = Literal["none", "binpack", "spread"]
_ALL_CORES = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One container's request: a number of cards, and of each ``cores`` percent and ``memory``
    units (of as many MiB as the device plugin's ``gpu-memory-factor`` says), or ``percent`` of its
    memory.
    """

    number: int
    memory: int
    cores: int
    percent: int | None = None

    def memory_on(self, card: Card) -> int:
        """Return the memory units that this request takes of ``card``."""
        return self.memory if self.percent is None else card.memory * self.percent // 100


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The placement of a pod: the values to write about it, and the node's score."""

    annotations: dict[str, str]
    score: float = 0.0


@dataclasses.dataclass(slots=True)
class CardUse:
    """A card and its used part; ``holders`` is the number of containers on it, ``groups`` are the
    pod groups of the pods on it.

    With ``instances`` the card is divided, and ``memory`` is that of the instances in use.
    """

    card: Card
    instances: InstanceUse | None = None
    holders: int = 0
    memory: int = 0
    cores: int = 0
    groups: set[str] = dataclasses.field(default_factory=set)

    def add(self, memory: int, cores: int, group: str) -> None:
        """Book one container's claim."""
        self.holders += 1
        self.memory += memory
        self.cores += cores
        self.groups.add(group)

    def take(self, ask: Ask, group: str) -> Claim:
        """Book one container's claim, and return it in its written form."""
        units = ask.memory_on(self.card)
        if self.instances is None:
            self.add(units, ask.cores, group)
            return Claim(self.card.uuid, units, ask.cores)
        # ``[group-position]`` of an instance: the name of a way to divide the card, and the number
        # of the instance in it
        place = self.instances.find(units)
        self.add(self.instances.book(place), ask.cores, group)
        return Claim(self.card.uuid + place, units, ask.cores)

    def has_room(self, ask: Ask, policy_group: str) -> bool:
        """Tell whether a container with that request fits; ``policy_group`` is its pod group if
        pods of the group must be on different cards, else empty.
        """
        return (
            self.holders < self.card.seats  # so many containers may share it
            and (not policy_group or policy_group not in self.groups)
            and self.card.memory - self.memory >= ask.memory_on(self.card)
            and self.cores + ask.cores <= _ALL_CORES
            and (ask.cores < _ALL_CORES or self.holders == 0)
            and (ask.cores > 0 or self.cores < _ALL_CORES)
            and (self.instances is None or bool(self.instances.find(ask.memory_on(self.card))))
        )


def asks(pod: Object) -> list[Ask]:
    """The request of each regular container that names cards or memory in its limits; init
    containers are ignored (volcano-vgpu §8).
    """
    return [
        _ask(container)
        for container in pod["spec"].get("containers") or ()
        if {NUMBER, MEMORY} & set(limits(container))
    ]


def group_of(pod: Object) -> str:
    """Return ``namespace/group`` of the pod, empty when it is in none."""
    name = annotations_of(pod).get(volcano_annotations.GROUP_NAME, "")
    return f"{pod['metadata'].get('namespace', 'default')}/{name}" if name else ""


class VgpuLedger:
    """The cards of one node; `place` changes it only when the whole pod fits."""

    # the annotation by which the scheduler locks the Node
    lock_key = volcano_annotations.VGPU_LOCK
    # Volcano's reason against a node on which a pod does not fit.
    refusal = "hami-vgpuDeviceSharing error"

    def __init__(
        self,
        node: str,
        registration: volcano_annotations.Registration,
        *,
        policy: Policy = "none",
        geometries: Geometries | None = None,
    ) -> None:
        self.node = node
        self.mode = registration.mode  # ``mig`` or ``hami-core``
        self.uses = [
            CardUse(card, _instances(card, registration.mode, geometries))
            for card in registration.cards
        ]
        self._policy = policy

    @classmethod
    def of(
        cls,
        node: Object,
        pods: Iterable[Object],
        *,
        policy: Policy,
        requires_resources: bool,
        geometries: Geometries | None = None,
    ) -> VgpuLedger | None:
        """The ledger of a node with ``pods`` on it;
        None when the scheduler takes it for a node without vGPU.

        Args:
            node: the Node object.
            pods: those bound to it.
            policy: which card is tried first.
            requires_resources: also ask for all three resources in allocatable, as schedulers from
                1.14.3 do.
            geometries: how cards in the mode ``mig`` may be divided.
        """
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        if requires_resources and not all(
            amount(allocatable.get(name, "0")) for name in (NUMBER, MEMORY, CORES)
        ):
            return None
        registration = volcano_annotations.parse_registration(
            annotations_of(node).get(volcano_annotations.REGISTER, "")
        )
        if registration is None:
            return None
        ledger = cls(node["metadata"]["name"], registration, policy=policy, geometries=geometries)
        for pod in pods:
            if not is_terminated(pod):
                ledger.add(pod)
        return ledger

    def add(self, pod: Object) -> None:
        """Book the shares in a bound pod's annotation; ids of cards that are not registered are
        ignored.
        """
        for claim in volcano_annotations.parse_claims(
            annotations_of(pod).get(volcano_annotations.VGPU_IDS, "")
        ):
            for use in self.uses:
                if use.card.uuid in claim.uuid:
                    units = use.instances.book(claim.uuid) if use.instances else claim.memory
                    use.add(units, claim.cores, group_of(pod))
                    break

    def copy(self) -> VgpuLedger:
        """A copy, so that a placement can be tried."""
        return copy.deepcopy(self)

    @staticmethod
    def has_request(pod: Object) -> bool:
        """Tell whether the pod requests vGPU."""
        return bool(asks(pod))

    @staticmethod
    def needs_lock(pod: Object) -> bool:
        """Tell whether the scheduler locks the node for the pod, by an annotation, where locks are
        on: for every pod that requests vGPU, unlike with Volcano's GPU share.
        """
        return bool(asks(pod))

    def place(self, pod: Object, now: float) -> Placed | None:
        """Book a place for all containers and return the values to write (volcano-vgpu G3);
        None when one does not fit.

        Args:
            pod: not bound yet.
            now: unix seconds, for the time stamps.
        """
        annotations = annotations_of(pod)
        if annotations.get("volcano.sh/vgpu-mode", self.mode) != self.mode:
            return None
        trial = copy.deepcopy(self.uses)
        containers = []
        score = 0.0
        for ask in asks(pod):
            chosen = [use for use in self._in_order(trial) if _suits(use, ask, pod)][: ask.number]
            if len(chosen) < ask.number:
                return None
            claims = []
            for use in chosen:
                claims.append(use.take(ask, group_of(pod)))
                score += (
                    100 * use.memory / use.card.memory
                    if self._policy == "binpack" and use.card.memory
                    else 0.0
                )
            containers.append(claims)
        for use, before in zip(trial, self.uses, strict=True):
            # An instance counts as used only once the pod is seen to be bound, as in the real
            # scheduler (volcano-vgpu D15).
            use.instances = before.instances
        self.uses = trial
        devices, seconds = volcano_annotations.format_claims(containers), str(int(now))
        written = {
            volcano_annotations.VGPU_NODE: self.node,
            volcano_annotations.VGPU_TIME: seconds,
            volcano_annotations.VGPU_IDS: devices,
            volcano_annotations.DEVICES_TO_ALLOCATE: devices,
            volcano_annotations.BIND_PHASE: "allocating",
            volcano_annotations.BIND_TIME: seconds,
        }
        return Placed(written, score)

    def _in_order(self, uses: Sequence[CardUse]) -> list[CardUse]:
        match self._policy:
            case "binpack":
                return sorted(uses, key=lambda use: (-use.memory, use.card.index))
            case "spread":
                return sorted(uses, key=lambda use: (use.holders, use.card.index))
            case _:  # without a policy the real scheduler begins with the last card
                return sorted(uses, key=lambda use: -use.card.index)


def _instances(card: Card, mode: str, geometries: Geometries | None) -> InstanceUse | None:
    # The ways to divide the card. `factor`: MiB in one unit of memory.
    divisions = geometries.for_card(card.type) if geometries is not None and mode == "mig" else ()
    return (
        InstanceUse(divisions, geometries.factor) if geometries is not None and divisions else None
    )


def _ask(container: Object) -> Ask:
    written = {**((container.get("resources") or {}).get("requests") or {}), **limits(container)}
    number, cores = int(amount(written.get(NUMBER, 1))), int(amount(written.get(CORES, 0)))
    if PERCENTAGE in written:
        return Ask(number, 0, cores, int(amount(written[PERCENTAGE])))
    if MEMORY in written:
        return Ask(number, int(amount(written[MEMORY])), cores)
    return Ask(number, 0, cores, 100)


def _suits(use: CardUse, ask: Ask, pod: Object) -> bool:
    annotations = annotations_of(pod)
    keep_apart = (
        group_of(pod) if annotations.get("volcano.sh/vgpu-podgroup-policy") == "spread" else ""
    )
    return (
        _uuid_allowed(use.card.uuid, annotations)
        and use.has_room(ask, keep_apart)
        and _type_allowed(use.card.type, annotations)
    )


def _uuid_allowed(uuid: str, annotations: dict[str, str]) -> bool:
    def listed(key: str) -> list[str]:
        return [item.strip() for item in annotations[key].split(",")]

    denied, wanted = "volcano.sh/vgpu-nouse-gpuuuid", "volcano.sh/vgpu-use-gpuuuid"
    if denied in annotations and uuid in listed(denied):
        return False
    return wanted not in annotations or uuid in listed(wanted)


def _type_allowed(type_: str, annotations: dict[str, str]) -> bool:
    """Match types. Items are not trimmed and match anywhere in the type;
    with desired types the unwanted ones are ignored.
    """

    def matches(key: str) -> bool:
        return any(item.lower() in type_.lower() for item in annotations[key].split(","))

    wanted, unwanted = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
    if "NVIDIA" not in type_:
        return False
    if wanted in annotations:
        return matches(wanted)
    return unwanted not in annotations or not matches(unwanted)
