"""The cards of a Node, as its annotations describe them (vgpu-manager §3).

They are read when a Node is new or has changed, and not for each pod. A Node whose annotations are
malformed gets no pod (`Unfit`), with a reason, and no other Node is affected. (In vgpu-manager's
extender a gap in the cards' numbers crashes the whole process, vgpu-manager §12.3.)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated

import msgspec

from vgpu_agent.errors import shortened
from vgpu_agent.placement.nodes.cards import Card, Hardware, NodeCards, Unfit
from vgpu_agent.placement.nodes.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.families.vgpu_manager.keys import Keys

MAX_CARDS = 64
"""More than any machine has. A container gets at most 16 (vgpu-manager §5.2)."""

_LONGEST_NOTE = 200  # characters of the text that says what is wrong with an annotation
_MAX_MIB = 2**40  # more than any card has
_Amount = Annotated[int, msgspec.Meta(ge=0, le=_MAX_MIB)]  # MiB


# an operator's name for the network that a card is nearest to
_Rail = Annotated[str, msgspec.Meta(max_length=253)]


class _Entry(msgspec.Struct):
    """One card of ``node-device-register``."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CARDS)]  # NVML index
    uuid: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9.:-]+\Z")]
    core: Annotated[int, msgspec.Meta(ge=0, le=100_000)]  # percent of compute
    memory: _Amount  # as it is offered, with the node's scaling
    number: Annotated[int, msgspec.Meta(ge=0, le=10_000)]  # of slots
    type: Annotated[str, msgspec.Meta(max_length=256)] = ""  # product name
    numa: Annotated[int, msgspec.Meta(ge=-1, le=4096)] = -1  # NUMA node; -1: not known
    mig: bool = False
    healthy: bool = True


class _Config(msgspec.Struct, rename="camel"):
    """The settings in ``node-config-info``."""

    device_split: Annotated[int, msgspec.Meta(ge=0, le=10_000)]  # containers that may share a card
    memory_factor: int  # MiB in one unit of a pod's request
    # how many times the memory of each card is offered
    memory_scaling: Annotated[float, msgspec.Meta(ge=0, le=1000)]


class _Linked(msgspec.Struct):
    """The links of one card in ``node-device-topology``."""

    index: int
    # index of another card → types of the link: a level of PCIe, and NVLinks
    links: dict[str, Annotated[list[int], msgspec.Meta(max_length=8)]] = {}


def read_cards(annotations: Mapping[str, str], slots: int, keys: Keys) -> NodeCards | Unfit:
    """Read the annotations of a Node that offers ``slots`` (allocatable) of ``vgpu-number``.

    ``keys`` has the keys of the annotations, with the domain that the plugin is configured with
    before the slash. The checks are in the order of vgpu-manager §5.2.
    """
    if slots <= 0:
        return Unfit(Reason.NodeNotVGPUEnabled)
    entries = _register(annotations.get(keys.node_register, ""))
    if isinstance(entries, Unfit):
        return entries
    config = _config(annotations.get(keys.node_config, ""))
    if isinstance(config, Unfit):
        return config
    hardware = Hardware(
        tuple(map(_card, entries)),
        config.memory_factor,
        is_oversold=config.memory_scaling > 1,
        links=_links(annotations.get(keys.node_topology, ""), len(entries)),
    )
    uuids = tuple(entry.uuid for entry in entries)
    # `node_gpu_domain`: an operator's annotation with the network of each card
    return NodeCards(hardware, uuids, _rails(annotations.get(keys.node_gpu_domain, ""), uuids))


def _register(text: str) -> list[_Entry] | Unfit:
    if not text:
        return Unfit(Reason.NodeNoVGPURegister)
    try:
        entries = sorted(msgspec.json.decode(text, type=list[_Entry]), key=lambda each: each.id)
        problem = _problem(entries)
    except (msgspec.MsgspecError, RecursionError) as err:
        problem = str(err)
    if problem:
        return Unfit(Reason.NodeBadVGPURegister, shortened(problem, _LONGEST_NOTE))
    return entries


def _config(text: str) -> _Config | Unfit:
    if not text:
        return Unfit(Reason.NodeNoVGPUConfig)
    try:
        config = msgspec.json.decode(text, type=_Config)
    except (msgspec.MsgspecError, RecursionError) as err:
        return Unfit(Reason.NodeBadVGPUConfig, shortened(str(err), _LONGEST_NOTE))
    if not config.device_split:
        return Unfit(Reason.NodeNotVGPUEnabled, "deviceSplit is 0")
    if not 0 < config.memory_factor <= _MAX_MIB:
        return Unfit(Reason.NodeBadMemoryFactor, f"memoryFactor is {config.memory_factor}")
    return config


def _problem(entries: list[_Entry]) -> str:
    """Say what is wrong with the cards, empty where nothing is."""
    if not entries:
        return "no card"
    for place, entry in enumerate(entries):
        if entry.id != place:
            return f"the cards' ids are {', '.join(str(each.id) for each in entries)}, not 0, 1, …"
    uuids = [entry.uuid for entry in entries]
    twice = next((uuid for uuid in uuids if uuids.count(uuid) > 1), "")
    return f"{twice} is the UUID of two cards" if twice else ""


def _card(entry: _Entry) -> Card:
    # why no container may get a share of the card; None where one may
    blocked = (
        Reason.DeviceUnhealthy
        if not entry.healthy
        else Reason.DeviceMIGEnabled
        if entry.mig
        else None
    )
    numa = None if entry.numa < 0 else entry.numa
    return Card(
        blocked,
        model=entry.type,
        memory_mib=entry.memory,
        cores_percent=entry.core,
        slots=entry.number,
        numa=numa,
    )


@functools.lru_cache(maxsize=64)  # Nodes of one kind have equal texts, of some ten KiB at most
def _links(text: str, count: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return the links between the first ``count`` cards: card, other card, types of the link. A
    text that cannot be read counts as none. Then pods with the topology mode ``link-strict``, which
    need linked cards, do not fit, and all others are placed without regard to links.
    """
    try:
        found = msgspec.json.decode(text or "[]", type=list[_Linked])
    except (msgspec.MsgspecError, RecursionError):
        return ()
    links = {
        (each.index, int(other)): tuple(types)
        for each in found
        for other, types in each.links.items()
        if other.isascii() and other.isdecimal() and len(other) < 4
    }
    return tuple(
        (one, other, types)
        for (one, other), types in sorted(links.items())
        if one != other and 0 <= one < count and other < count
    )


def _rails(text: str, uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rail (network) of each card. A text that cannot be read counts as none: an
    operator has written it, and it only decides which of several cards are better.
    """
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, _Rail])
    except (msgspec.MsgspecError, RecursionError):
        return ()
    rails = tuple(found.get(uuid, "") for uuid in uuids)
    return rails if any(rails) else ()
