"""The reading of each family's own scheduler and tools on a mixed node: the Node's counts and
annotations, and the marks on pods. Are they as the contracts say?

Pure functions on objects of the API server; `checker` asks them. The texts are read with the words
of the stand-in schedulers, which share nothing with the agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tests.real_node.mixed.jobs import (
    AWS,
    GPUSHARE,
    NVIDIA,
    RESOURCES,
    UNIT_MIB,
    VGPU_FAMILY,
    VGPU_MANAGER,
)
from tests.real_node.rig.manifests import quantity
from tests.real_node.vgpu_manager_node import (
    DOMAIN,
    PHASE,
    PLANNED,
    PRE,
    REAL,
    REGISTER,
    TIME,
)
from tests.real_node.volcano import IDS, VGPU
from vgpu_agent.sim.vgpu_manager import formats as vgpu_manager
from vgpu_agent.sim.volcano import annotations as volcano

Object = Mapping[str, Any]

_NEVER = str(2**64 - 1)  # the time of a pod of Volcano's that waits for nothing (volcano-vgpu §3.1)
_ASSIGNED = "volcano.sh/gpu-assigned"
_METRICS_NODE, _NODE_CONFIG = f"{DOMAIN}/metrics-node", f"{DOMAIN}/node-config-info"
_COUNTED = "volcano.sh/gpu-number"
_DOMAINS = ("volcano.sh/", f"{DOMAIN}/")

PLANS: Mapping[str, str] = {
    VGPU_FAMILY: IDS,
    GPUSHARE: volcano.GPU_INDEX,
    VGPU_MANAGER: PRE,
}
"""The annotation in which each family's scheduler names a pod's GPUs."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The node as it was configured.

    Attributes:
        uuids: its GPUs in the order of their numbers.
        memory_mib: of each of them.
        families: those that it offers.
        replicas: shares of a GPU through `NVIDIA` and `AWS`.
        split: shares of a GPU through `VGPU_FAMILY` and `VGPU_MANAGER`.
    """

    uuids: tuple[str, ...]
    memory_mib: int
    families: tuple[str, ...]
    replicas: int = 4
    split: int = 10

    @property
    def counts(self) -> dict[str, int]:
        """Resource → its count for one GPU in the Node's status."""
        units = self.memory_mib // UNIT_MIB
        of = {
            NVIDIA: {RESOURCES[NVIDIA]: self.replicas},
            AWS: {RESOURCES[AWS]: self.replicas},
            VGPU_FAMILY: {f"{VGPU}number": self.split, f"{VGPU}memory": units, f"{VGPU}cores": 100},
            GPUSHARE: {RESOURCES[GPUSHARE]: units},
            VGPU_MANAGER: {RESOURCES[VGPU_MANAGER]: self.split},
        }
        return {name: count for family in self.families for name, count in of[family].items()}


def family_of(resource: str) -> str:
    """The family of a resource in `Sizes.counts`."""
    found = (family for family, name in RESOURCES.items() if name == resource)
    return next(found, VGPU_FAMILY)  # which has more than one


def free_gpus(node: Object, sizes: Sizes) -> dict[str, frozenset[str]]:
    """Family → the GPUs that its scheduler may choose, by the Node's annotations; the families
    whose schedulers read counts only are not there.
    """
    found = node["metadata"].get("annotations") or {}
    free: dict[str, frozenset[str]] = {}
    if VGPU_FAMILY in sizes.families:
        registration = volcano.parse_registration(found.get(volcano.REGISTER, ""))
        cards = registration.cards if registration else ()
        free[VGPU_FAMILY] = frozenset(card.uuid for card in cards if card.seats)
    if GPUSHARE in sizes.families:
        unhealthy = volcano.parse_indices(found.get(volcano.UNHEALTHY_IDS, ""))
        free[GPUSHARE] = frozenset(
            uuid for number, uuid in enumerate(sizes.uuids) if number not in unhealthy
        )
    if VGPU_MANAGER in sizes.families:
        register = vgpu_manager.parse_register(found.get(REGISTER, "")) or ()
        free[VGPU_MANAGER] = frozenset(card.uuid for card in register if card.is_healthy)
    return free


def node_problems(node: Object, sizes: Sizes) -> list[str]:
    """Explain what schedulers read in the Node whatever its GPUs do, where that is wrong."""
    found, status = node["metadata"].get("annotations") or {}, node.get("status") or {}
    wrong: dict[str, bool] = {}
    if VGPU_FAMILY in sizes.families:
        registration = volcano.parse_registration(found.get(volcano.REGISTER, ""))
        cards = registration.cards if registration else ()
        wrong[f"{volcano.REGISTER} is {found.get(volcano.REGISTER)}"] = (
            tuple(card.uuid for card in cards) != sizes.uuids
            or {card.seats for card in cards} - {0, sizes.split} != set()
            or {card.memory for card in cards} != {sizes.memory_mib // UNIT_MIB}
        )
    if GPUSHARE in sizes.families:
        units = len(sizes.uuids) * (sizes.memory_mib // UNIT_MIB)
        for part in ("capacity", "allocatable"):
            count = (status.get(part) or {}).get(_COUNTED)
            wrong[f"{_COUNTED} is {count} in {part}"] = quantity(count) != len(sizes.uuids)
        count = (status.get("capacity") or {}).get(RESOURCES[GPUSHARE])
        wrong[f"{RESOURCES[GPUSHARE]} is {count} in capacity"] = quantity(count) != units
    if VGPU_MANAGER in sizes.families:
        register = vgpu_manager.parse_register(found.get(REGISTER, "")) or ()
        wrong[f"{REGISTER} is {found.get(REGISTER)}"] = tuple(
            (card.uuid, card.seats, card.memory, card.cores, card.is_mig) for card in register
        ) != tuple((uuid, sizes.split, sizes.memory_mib, 100, False) for uuid in sizes.uuids)
        config = vgpu_manager.parse_config(found.get(_NODE_CONFIG, ""))
        wrong[f"{_NODE_CONFIG} is {found.get(_NODE_CONFIG)}"] = config != vgpu_manager.NodeConfig(
            sizes.split, 1
        )
    return [problem for problem, is_wrong in wrong.items() if is_wrong]


def busy_problems(node: Object, sizes: Sizes, used: Mapping[str, Collection[str]]) -> list[str]:
    """Explain where the Node offers a GPU to a family while containers of another one have it.

    Args:
        node: as a scheduler reads it.
        sizes: the node as it was configured.
        used: GPU → the families whose containers have it, for long enough to be known.
    """
    found = []

    def is_foreign(uuid: str, family: str) -> bool:
        return any(other != family for other in used.get(uuid, ()))

    for family, free in free_gpus(node, sizes).items():
        found += [
            f"{uuid} of {sorted(used[uuid])} is free for {family}"
            for uuid in sorted(free)
            if is_foreign(uuid, family)
        ]
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    for resource, per_gpu in sizes.counts.items():
        family, count = family_of(resource), quantity(allocatable.get(resource))
        left = sum(not is_foreign(uuid, family) for uuid in sizes.uuids)
        if count > left * per_gpu:
            found.append(f"{count} {resource} are allocatable, of {left} GPUs")
    return found


def idle_problems(node: Object, sizes: Sizes) -> list[str]:
    """Explain what is missing on a node of which nothing is in use: every family has all of it."""
    found = [
        f"{uuid} is not free for {family}"
        for family, free in free_gpus(node, sizes).items()
        for uuid in sizes.uuids
        if uuid not in free
    ]
    for part in ("capacity", "allocatable"):
        counts = (node.get("status") or {}).get(part) or {}
        found += [
            f"{resource} is {counts.get(resource)} in {part}, of {len(sizes.uuids) * per_gpu}"
            for resource, per_gpu in sizes.counts.items()
            if quantity(counts.get(resource)) != len(sizes.uuids) * per_gpu
        ]
    return [*node_problems(node, sizes), *found]


def is_marked(family: str, pod: Object) -> bool:
    """Tell whether the pod is marked as served, where its family has a mark for that."""
    annotations, labels = _written(pod)
    marks = {
        VGPU_FAMILY: annotations.get(volcano.BIND_PHASE) == "success",
        GPUSHARE: annotations.get(_ASSIGNED) == "true",
        VGPU_MANAGER: labels.get(PHASE) == vgpu_manager.SUCCEED,
    }
    return marks.get(family, True)


def pod_problems(family: str, pod: Object) -> list[str]:
    """Explain which marks on a pod are wrong, served or not."""
    annotations, labels = _written(pod)
    node = pod["spec"].get("nodeName", "")
    return [
        f"{key} is {shown}"
        for key, shown, is_right in _marks(family, annotations, labels, node)
        if not is_right
    ]


def _written(pod: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    metadata = pod["metadata"]
    return metadata.get("annotations") or {}, metadata.get("labels") or {}


def _marks(
    family: str, annotations: Mapping[str, str], labels: Mapping[str, str], node: str
) -> Iterator[tuple[str, str | None, bool]]:
    """Yield each mark, its value, and whether that is right for a pod with one container."""
    if family == VGPU_FAMILY:
        phase = annotations.get(volcano.BIND_PHASE)
        yield volcano.BIND_PHASE, phase, phase in (None, "allocating", "success")
        if phase == "success":
            for key, wanted in ((volcano.VGPU_TIME, _NEVER), (volcano.DEVICES_TO_ALLOCATE, "")):
                yield key, annotations.get(key), annotations.get(key) == wanted
    elif family == GPUSHARE:
        assigned = annotations.get(_ASSIGNED)
        yield _ASSIGNED, assigned, assigned in (None, "true")
    elif family == VGPU_MANAGER:
        phase = labels.get(PHASE)
        allowed = (None, vgpu_manager.FILTERING, vgpu_manager.ALLOCATING, vgpu_manager.SUCCEED)
        yield PHASE, phase, phase in allowed
        real = annotations.get(REAL, "")
        if phase == vgpu_manager.SUCCEED:
            yield REAL, real, real == annotations.get(PRE)
            time = annotations.get(TIME)
            yield TIME, time, time == vgpu_manager.FINISHED_TIME
            yield PLANNED, annotations.get(PLANNED), annotations.get(PLANNED) == node
            yield _METRICS_NODE, labels.get(_METRICS_NODE), labels.get(_METRICS_NODE) == node
        else:
            yield REAL, real, real in ("", annotations.get(PRE))
    else:
        for key in (*annotations, *labels):
            yield key, annotations.get(key, labels.get(key)), not key.startswith(_DOMAINS)


def named_gpus(family: str, pod: Object, uuids: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that the family's scheduler has named for the pod's container."""
    text = _written(pod)[0].get(PLANS.get(family, ""), "")
    if family == VGPU_FAMILY:
        return tuple(claim.uuid for claim in volcano.parse_claims(text))
    if family == GPUSHARE:
        return tuple(uuids[index] for index in volcano.parse_indices(text))
    claims = vgpu_manager.read_claims(text) or {}
    return tuple(claim.uuid for parts in claims.values() for claim in parts)
