"""Judges the claims of all bound pods of a cluster: each pod has what it asks for, and no card is
given out beyond its size.

Written from the contract alone (vgpu-manager §3, §4.1, §4.2, §4.4, §5.3, §5.6), so that a mistake
of the agent's placement cannot hide here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
_CONTAINER = re.compile(r"([^\[\];]+)\[([^\[\]]*)\]\Z")
_LONGEST_LABEL = 63
_LEAST_NVLINK = 7


@dataclasses.dataclass
class Amounts:
    """Slots, cores in percent and memory in MiB."""

    slots: int = 0
    cores: int = 0
    memory: int = 0

    def plus(self, other: Amounts) -> Amounts:
        """The sum."""
        return Amounts(
            self.slots + other.slots, self.cores + other.cores, self.memory + other.memory
        )

    def or_more(self, other: Amounts) -> Amounts:
        """The larger of each."""
        return Amounts(
            max(self.slots, other.slots),
            max(self.cores, other.cores),
            max(self.memory, other.memory),
        )

    def exceeds(self, other: Amounts) -> bool:
        """Tell whether any amount is larger."""
        return self.slots > other.slots or self.cores > other.cores or self.memory > other.memory


@dataclasses.dataclass
class Claim:
    """One card of a container."""

    card: int
    uuid: str
    amounts: Amounts


@dataclasses.dataclass
class _Asked:
    """The request of a container for each of its cards.

    Attributes:
        kind: ``main``, ``init`` or ``sidecar``.
        number: of cards.
        cores: percent of the compute of each card.
        memory: MiB of each card; None for all of it.
    """

    kind: str
    number: int
    cores: int
    memory: int | None


@dataclasses.dataclass
class Verdict:
    """The result of `judge`.

    Attributes:
        problems: one sentence each; empty where all is well.
        bound: names of the bound pods that ask for cards.
        waiting: names of the pods that are not bound.
        used: (Node, UUID) → what its pods take.
    """

    problems: list[str]
    bound: list[str]
    waiting: list[str]
    used: dict[tuple[str, str], Amounts]


def judge(nodes: Iterable[Json], pods: Iterable[Json]) -> Verdict:
    """Judge all pods of a cluster, as the API server has them."""
    cards = {each["metadata"]["name"]: cards_of(each) for each in nodes}
    found = Verdict([], [], [], {})
    for pod in pods:
        name = pod["metadata"]["name"]
        asked = _asked(pod)
        if not asked or pod["status"].get("phase") in {"Succeeded", "Failed"}:
            continue
        if not (node := pod["spec"].get("nodeName")):
            found.waiting.append(name)
            continue
        found.bound.append(name)
        try:
            taken = _taken(pod, node, cards[node], asked)
        except ValueError as err:
            found.problems.append(f"{name} on {node}: {err}")
            continue
        for uuid, amounts in taken.items():
            found.used[node, uuid] = found.used.get((node, uuid), Amounts()).plus(amounts)
    for (node, uuid), amounts in found.used.items():
        size = cards[node].get(uuid, Amounts())
        if amounts.exceeds(size):
            found.problems.append(f"{node}: card {uuid} has {size}, its pods take {amounts}")
    return found


def cards_of(node: Json) -> dict[str, Amounts]:
    """Return the size of each card of a Node, by UUID, in the order of their numbers."""
    text = node["metadata"].get("annotations", {}).get("nvidia.com/node-device-register", "[]")
    return {
        each["uuid"]: Amounts(each["number"], each["core"], each["memory"])
        for each in sorted(json.loads(text), key=lambda each: int(each["id"]))
    }


def empty_cards(nodes: Iterable[Json], verdict: Verdict) -> int:
    """Return how many cards no pod takes anything of."""
    every = {(each["metadata"]["name"], uuid) for each in nodes for uuid in cards_of(each)}
    return len(every - verdict.used.keys())


def fits_somewhere(nodes: Iterable[Json], verdict: Verdict, wanted: Amounts, number: int) -> str:
    """Return a Node with so many cards that have this much left; empty where there is none."""
    for node in nodes:
        name = node["metadata"]["name"]
        free = sum(
            not verdict.used.get((name, uuid), Amounts()).plus(wanted).exceeds(size)
            for uuid, size in cards_of(node).items()
        )
        if free >= number:
            return str(name)
    return ""


def linked_groups(node: Json) -> list[set[str]]:
    """Return the UUIDs of the cards of a Node by what NVLinks join, directly or over others; a card
    without NVLinks is a group of its own (vgpu-manager §3, §5.6).
    """
    uuids = list(cards_of(node))
    text = node["metadata"]["annotations"].get("nvidia.com/node-device-topology", "[]")
    groups = [{uuid} for uuid in uuids]
    for each in json.loads(text):
        for other, links in each["links"].items():
            if max(links, default=0) >= _LEAST_NVLINK:
                pair = {uuids[each["index"]], uuids[int(other)]}
                joined = [group for group in groups if group & pair]
                groups = [group for group in groups if not group & pair]
                groups.append(set[str]().union(*joined))
    return groups


def cards_of_pods(pods: Iterable[Json]) -> dict[str, set[str]]:
    """Return Node → the UUIDs that these bound pods claim on it."""
    found: dict[str, set[str]] = {}
    for pod in pods:
        claims = claims_of(pod["metadata"]["annotations"]["nvidia.com/pre-allocated"])
        found.setdefault(pod["spec"]["nodeName"], set()).update(
            each.uuid for of_container in claims.values() for each in of_container
        )
    return found


def _asked(pod: Json) -> dict[str, _Asked]:
    """Return the containers that ask for cards, in the order of the claims: init containers
    first.
    """
    spec, found = pod["spec"], {}
    for kind, containers in (
        ("init", spec.get("initContainers") or []),
        ("main", spec["containers"]),
    ):
        for each in containers:
            limits = each.get("resources", {}).get("limits", {})
            number, cores, memory = (
                int(limits.get(f"nvidia.com/vgpu-{what}", 0))
                for what in ("number", "cores", "memory")
            )
            if number:
                is_sidecar = kind == "init" and each.get("restartPolicy") == "Always"
                found[each["name"]] = _Asked(
                    "sidecar" if is_sidecar else kind,
                    number,
                    cores if cores or memory else 100,
                    memory or None,
                )
    return found


def _taken(
    pod: Json, node: str, cards: Mapping[str, Amounts], asked: Mapping[str, _Asked]
) -> dict[str, Amounts]:
    """Return UUID → what the pod takes of the card.

    Raises:
        ValueError: its annotations, labels or claims are not those of the contract.
    """
    _check_state(pod["metadata"], node)
    claims = claims_of(pod["metadata"]["annotations"].get("nvidia.com/pre-allocated", ""))
    if list(claims) != list(asked):
        raise ValueError(f"claims are for {list(claims)}, cards are asked by {list(asked)}")
    by_kind: dict[str, dict[str, Amounts]] = {"sidecar": {}, "main": {}, "init": {}}
    for name, wanted in asked.items():
        taken = by_kind[wanted.kind]
        for uuid, amounts in _of_container(name, claims[name], wanted, cards).items():
            before = taken.get(uuid, Amounts())
            taken[uuid] = before.or_more(amounts) if wanted.kind == "init" else before.plus(amounts)
    return {
        uuid: by_kind["sidecar"]
        .get(uuid, Amounts())
        .plus(by_kind["main"].get(uuid, Amounts()).or_more(by_kind["init"].get(uuid, Amounts())))
        for taken in by_kind.values()
        for uuid in taken
    }


def _of_container(
    name: str, claims: list[Claim], wanted: _Asked, cards: Mapping[str, Amounts]
) -> dict[str, Amounts]:
    """Return UUID → what a container takes of the card. Raises: ValueError."""
    numbers, found = list(cards), {}
    if len({each.uuid for each in claims}) != wanted.number or len(claims) != wanted.number:
        raise ValueError(f"{name} asks for {wanted.number} cards and has {claims}")
    for each in claims:
        if each.uuid not in cards or numbers[each.card] != each.uuid:
            raise ValueError(f"{name}: the node has no card {each.card} {each.uuid}")
        memory = cards[each.uuid].memory if wanted.memory is None else wanted.memory
        found[each.uuid] = Amounts(1, wanted.cores, memory)
        if each.amounts != found[each.uuid]:
            raise ValueError(f"{name} asks for {found[each.uuid]} and has {each.amounts}")
    return found


def _check_state(metadata: Json, node: str) -> None:
    """Check all state but the claims. Raises: ValueError."""
    annotations, labels = metadata.get("annotations", {}), metadata.get("labels", {})
    if annotations.get("nvidia.com/predicate-node") != node:
        raise ValueError(f"predicate-node is {annotations.get('nvidia.com/predicate-node')}")
    if labels.get("nvidia.com/assigned-phase") not in {"allocating", "succeed"}:
        raise ValueError(f"assigned-phase is {labels.get('nvidia.com/assigned-phase')}")
    if len(node) <= _LONGEST_LABEL and labels.get("nvidia.com/metrics-node") != node:
        raise ValueError(f"metrics-node is {labels.get('nvidia.com/metrics-node')}")
    if not annotations.get("nvidia.com/predicate-time", "").isdecimal():
        raise ValueError(f"predicate-time is {annotations.get('nvidia.com/predicate-time')}")
    if "nvidia.com/real-allocated" not in annotations:
        raise ValueError("there is no real-allocated")


def claims_of(text: str) -> dict[str, list[Claim]]:
    """Read a claim text, in its strict form.

    Raises:
        ValueError: it is not of that form.
    """
    found = {}
    for part in text.split(";"):
        if not (match := _CONTAINER.match(part)):
            raise ValueError(f"no claim: {part!r} in {text!r}")
        claims = []
        for each in match[2].split(","):
            card, uuid, cores, memory = each.split("_")
            claims.append(Claim(int(card), uuid, Amounts(1, int(cores), int(memory))))
        if [each.card for each in claims] != sorted(each.card for each in claims):
            raise ValueError(f"claims are not sorted: {text!r}")
        found[match[1]] = claims
    return found
