"""The simulated extender's ledger: how much of each card of one node is planned, and where a pod
fits.

Made anew from the Node's and the pods' annotations for each pod that is filtered, as in the real
extender (vgpu-manager §4.4, §5.2, §5.3, §5.5). Topology modes and the choice among nodes by policy
are left out: neither changes the form of a claim. Called by `extender`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import operator
from typing import TYPE_CHECKING

from vgpu_agent.sim.vgpu_manager import formats
from vgpu_agent.sim.vgpu_manager.formats import Card, Claim, Claims, Keys
from vgpu_agent.sim.volcano import resources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vgpu_agent.sim.volcano.resources import Object

# This long after they were planned, the claims of a pod that is not bound, and was refused before,
# count no more.
STUCK_SECONDS = 30.0
MAX_CARDS = 16  # that one container may ask for
_WHOLE_CORES = 100  # percent, for a request without cores and memory
# of a Node, without the beginning ``node-``: its cards, and the settings by which they are shared
_ANNOTATIONS = ("device-register", "config-info")

Reason = str  # why a node takes no pods, or why a pod does not fit, in the extender's words


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """The part of one card that is taken: ``seats`` is the number of containers on it, ``memory``
    is in MiB, ``cores`` in percent of its compute.
    """

    seats: int = 0
    memory: int = 0
    cores: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(*map(operator.add, self._numbers, other._numbers))

    def __or__(self, other: Use) -> Use:
        """Return the larger of both in each dimension."""
        return Use(*map(max, self._numbers, other._numbers))

    @property
    def _numbers(self) -> tuple[int, int, int]:
        return self.seats, self.memory, self.cores


Uses = dict[str, Use]  # UUID of the card → the part that is taken


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A container that asks for a ``number`` of cards, and on each for ``cores``, in percent of the
    compute, and for ``memory``, in MiB, 0 for all of it.
    """

    container: str
    number: int
    cores: int
    memory: int


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The requests of a pod's containers, by the kind of the container."""

    init: tuple[Request, ...]
    sidecars: tuple[Request, ...]
    apps: tuple[Request, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the containers that get a claim, init containers first."""
        return [each.container for each in (*self.init, *self.sidecars, *self.apps)]


def node_of(pod: Object, keys: Keys) -> str:
    """Return the node on which the pod is, or for which it is planned."""
    bound = (pod.get("spec") or {}).get("nodeName") or ""
    # `keys` puts the domain before a name: nvidia.com/predicate-node
    return bound or resources.annotations_of(pod).get(keys("predicate-node"), "")


def holds_claim(pod: Object, keys: Keys, now: float) -> bool:
    """Tell whether the pod's claims count as taken on its node (vgpu-manager §4.4)."""
    if (pod.get("spec") or {}).get("nodeName"):
        return True
    if (pod["metadata"].get("labels") or {}).get(keys("assigned-phase")) == formats.FAILED:
        return False
    refused = [
        condition
        for condition in (pod.get("status") or {}).get("conditions") or ()
        if condition.get("type") == "PodScheduled"
        and (condition.get("status"), condition.get("reason")) == ("False", "Unschedulable")
    ]
    if not refused:
        return True
    # when the claims were planned, in unix nanoseconds
    stamp = resources.annotations_of(pod).get(keys("predicate-time"), "")
    # FINISHED_TIME: the allocation has succeeded or failed
    if not stamp.isdigit() or stamp == formats.FINISHED_TIME:
        return False
    planned = int(stamp) / 1e9
    if int(planned) <= dt.datetime.fromisoformat(refused[0]["lastTransitionTime"]).timestamp():
        return False
    return now - planned <= STUCK_SECONDS


def asked_by(pod: Object, keys: Keys, factor: int = 1) -> Asked:
    """Read the requests of the pod's containers (vgpu-manager §5.3). ``factor`` is the MiB in the
    node's unit of requested memory.
    """
    spec = pod.get("spec") or {}
    init = [each for each in spec.get("initContainers") or () if not _is_sidecar(each)]
    sidecars = [each for each in spec.get("initContainers") or () if _is_sidecar(each)]

    def read(containers: Iterable[Object]) -> tuple[Request, ...]:
        return tuple(filter(None, (_request(each, keys, factor) for each in containers)))

    return Asked(read(init), read(sidecars), read(spec.get("containers") or ()))


def footprint(pod: Object, claims: Claims) -> Uses:
    """Return what the pod takes of each card: all its sidecars, and in addition either all its
    other containers or its largest init container, whichever is more (vgpu-manager §4.4).
    """
    spec = pod.get("spec") or {}
    kinds = {
        each["name"]: "sidecar" if _is_sidecar(each) else "init"
        for each in spec.get("initContainers") or ()
    }
    sidecars, apps, init = Uses(), Uses(), Uses()
    for name, parts in claims.items():
        for part in parts:
            use, kind = Use(1, part.memory, part.cores), kinds.get(name, "app")
            if kind == "init":
                init[part.uuid] = init.get(part.uuid, Use()) | use
            else:
                into = sidecars if kind == "sidecar" else apps
                into[part.uuid] = into.get(part.uuid, Use()) + use
    return {
        uuid: sidecars.get(uuid, Use()) + (apps.get(uuid, Use()) | init.get(uuid, Use()))
        for uuid in {*sidecars, *apps, *init}
    }


class NodeLedger:
    """One node's cards, and what the pods that hold claims take of them."""

    def __init__(self, cards: Sequence[Card], factor: int, uses: Uses) -> None:
        """Account for ``cards``; ``factor`` is the MiB in the node's unit of requested memory."""
        self._cards = tuple(cards)
        self._factor = factor
        self.uses = uses

    @classmethod
    def of(
        cls, node: Object, pods: Iterable[Object], keys: Keys, now: float
    ) -> NodeLedger | Reason:
        """Return the ledger of the node; or a short reason why it takes no vGPU pods."""
        if isinstance(read := _read(node, keys), str):
            return read
        cards, factor = read
        uses: Uses = {}
        name = node["metadata"]["name"]
        for pod in pods:
            if node_of(pod, keys) != name or resources.is_terminated(pod):
                continue
            if not holds_claim(pod, keys, now):
                continue
            for uuid, use in footprint(pod, claims_of(pod, keys)).items():
                uses[uuid] = uses.get(uuid, Use()) + use
        return cls(cards, factor, uses)

    def place(self, pod: Object, keys: Keys, *, policy: str = "none") -> Claims | Reason:
        """Choose cards for every container of the pod; return the reason if it does not fit.

        ``policy`` orders the cards, unless an annotation of the pod does: ``binpack`` takes those
        with the least free first, ``spread`` those with the most, and any other word goes by NUMA
        node.
        """
        asked = asked_by(pod, keys, self._factor)
        annotations = resources.annotations_of(pod)
        policy = annotations.get(keys("device-scheduler-policy"), policy)
        allowed = [card for card in self._cards if _may_take(card, annotations, keys)]
        if not allowed:
            return "GPU type mismatch"  # also where the lists of UUIDs allow none
        uses, chosen = dict(self.uses), Claims()
        after_sidecars = uses  # what is taken while the init containers run
        for place, request in enumerate((*asked.sidecars, *asked.apps), start=1):
            parts = self._choose(request, allowed, uses, policy)
            if not parts:
                return self._lacking(request)
            chosen[request.container] = parts
            uses = _with(uses, parts)
            if place == len(asked.sidecars):
                after_sidecars = uses
        used = {part.uuid for parts in chosen.values() for part in parts}
        for request in asked.init:
            # an init container runs before the others, and preferably on one of their cards
            own = [card for card in allowed if card.uuid in used]
            parts = self._choose(request, own, after_sidecars, policy) or self._choose(
                request, allowed, after_sidecars, policy
            )
            if not parts:
                return self._lacking(request)
            chosen[request.container] = parts
        order = [each["name"] for each in _containers(pod) if each["name"] in chosen]
        return {name: chosen[name] for name in order}

    def _choose(
        self, request: Request, cards: Iterable[Card], uses: Uses, policy: str
    ) -> tuple[Claim, ...]:
        """Return the first cards by policy that have room; none when there are too few."""

        def fits(card: Card) -> bool:
            use = uses.get(card.uuid, Use())
            free_cores = card.cores - use.cores
            return (
                card.is_healthy
                and not card.is_mig
                and use.seats < card.seats  # so many containers may share it
                and (request.memory or card.memory) <= card.memory - use.memory
                and request.cores <= free_cores
                and free_cores > 0
            )

        fitting = sorted(filter(fits, cards), key=_order(policy, uses))[: request.number]
        if len(fitting) < request.number:
            return ()
        parts = (
            Claim(card.index, card.uuid, request.cores, request.memory or card.memory)
            for card in fitting
        )
        return tuple(sorted(parts, key=lambda part: part.index))

    def _lacking(self, request: Request) -> Reason:
        """Return why no cards could be chosen for a container."""
        healthy = [card for card in self._cards if card.is_healthy and not card.is_mig]
        return (
            "Insufficient GPU cards"
            if len(healthy) < request.number
            else ("Insufficient GPU resources")
        )


def _read(node: Object, keys: Keys) -> tuple[Sequence[Card], int] | Reason:
    """Return the node's cards and the MiB in its unit of memory; or, from the first check that
    fails, the reason why it takes no vGPU pods (vgpu-manager §5.2).
    """
    found = resources.annotations_of(node)
    register, config = (found.get(keys(f"node-{name}")) for name in _ANNOTATIONS)
    cards = None if register is None else formats.parse_register(register)
    parsed = None if config is None else formats.parse_config(config)
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(keys("vgpu-number"), 0)
    failures = (
        (not resources.amount(offered), "node not vGPU-enabled"),
        (register is None, "node has no vGPU registered"),
        (cards is None, "node vGPU registry invalid"),
        (config is None, "node has no vGPU configuration"),
        (parsed is None, "node vGPU configuration invalid"),
        # `split`: how many containers may share a card
        (parsed is not None and parsed.split <= 0, "node not vGPU-enabled"),
        (parsed is not None and parsed.memory_factor <= 0, "node memory factor invalid"),
    )
    for failed, reason in failures:
        if failed:
            return reason
    return cards or (), parsed.memory_factor if parsed else 0


def claims_of(pod: Object, keys: Keys) -> Claims:
    """Return the claims that count: those that the plugin has written when they are complete,
    otherwise those that the extender has planned.
    """
    found = resources.annotations_of(pod)
    planned = formats.read_claims(found.get(keys("pre-allocated"), "")) or {}
    real = formats.read_claims(found.get(keys("real-allocated"), "")) or {}
    return real if len(real) >= len(planned) else planned


def _order(policy: str, uses: Uses) -> Callable[[Card], tuple[float, int]]:
    def free(card: Card) -> float:
        use = uses.get(card.uuid, Use())
        shares = (
            (card.seats - use.seats) / max(1, card.seats),
            (card.memory - use.memory) / max(1, card.memory),
            (card.cores - use.cores) / max(1, card.cores),
        )
        return 100 * sum(shares) / len(shares)

    if policy == "binpack":
        return lambda card: (free(card), card.index)
    if policy == "spread":
        return lambda card: (-free(card), card.index)
    return lambda card: (card.numa, card.index)


def _may_take(card: Card, annotations: dict[str, str], keys: Keys) -> bool:
    """Tell whether the pod's lists of UUIDs and types allow the card. Their entries match as
    substrings, and the lists to include and to exclude are both applied (vgpu-manager §4.1).
    """

    def named(key: str, value: str) -> bool | None:
        entries = [entry.strip().lower() for entry in annotations.get(keys(key), "").split(",")]
        entries = [entry for entry in entries if entry]
        return any(entry in value.lower() for entry in entries) if entries else None

    values = (("uuid", card.uuid), ("type", card.type))
    return all(
        named(f"include-gpu-{what}", value) is not False
        and named(f"exclude-gpu-{what}", value) is not True
        for what, value in values
    )


def _with(uses: Uses, parts: Iterable[Claim]) -> Uses:
    changed = dict(uses)
    for part in parts:
        changed[part.uuid] = changed.get(part.uuid, Use()) + Use(1, part.memory, part.cores)
    return changed


def _request(container: Object, keys: Keys, factor: int) -> Request | None:
    limits = resources.limits(container)
    number, cores, memory = (
        int(resources.amount(limits.get(keys(name), 0)))
        for name in ("vgpu-number", "vgpu-cores", "vgpu-memory")
    )
    if not number:
        return None
    if not cores and not memory:
        cores = _WHOLE_CORES
    return Request(container["name"], number, cores, memory * factor)


def _containers(pod: Object) -> Iterator[Object]:
    spec = pod.get("spec") or {}
    yield from spec.get("initContainers") or ()
    yield from spec.get("containers") or ()


def _is_sidecar(container: Object) -> bool:
    return container.get("restartPolicy") == "Always"
