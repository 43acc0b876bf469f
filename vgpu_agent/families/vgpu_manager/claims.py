"""The annotation values by which vgpu-manager's extender assigns cards to containers (vgpu-manager
§4.2).

``init[0_GPU-…_100_24576];train[0_GPU-…_50_8192,1_GPU-…_50_8192]``: containers separated by ``;``,
the claims of each by ``,``, and a claim is index, UUID, percent of compute and MiB of memory.
*Claim* is vgpu-manager's word here. It does not mean the claims of the ledger.

A text is read when a container's share is decided, and written once the container has started. Any
user who may edit the pod can write it, so this module checks only its form. `decisions` checks the
rest.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_CARDS = 16
"""The most cards that one container may have (vgpu-manager §5.2)."""

# More than any pod has; the API server accepts 256 KiB of annotations.
_MAX_ENTRIES = 4096
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_SHOWN = 80  # characters of an entry in an error


class ClaimsTextError(AgentError):
    """The text is not in the form that this module describes;
    the message is the end of a sentence that names the pod and the annotation.
    """


class DeviceClaim(msgspec.Struct, frozen=True):
    """One claim of a container: a card and the amounts of it.

    Attributes:
        index: the card's NVML index on its node.
        uuid: of the card.
        cores_percent: of the card's compute; 0 for no limit.
        memory_mib: of the memory that the card is offered with, which is its own times the node's
            memory scaling.
    """

    index: int
    uuid: str
    cores_percent: int
    memory_mib: int


class ContainerClaim(msgspec.Struct, frozen=True):
    """The cards of one container, in the order of the text."""

    container: str
    cards: tuple[DeviceClaim, ...]


Claims = tuple[ContainerClaim, ...]


def parse_claims(text: str) -> Claims:
    """Return the claims of each container, in the order of the text.

    Spaces and empty segments count for nothing, as they do for vgpu-manager.

    Raises:
        ClaimsTextError: an entry has another form; the message shows it.
    """
    found = _parsed(text)
    if isinstance(found, str):
        raise ClaimsTextError(found)
    return found


@functools.lru_cache(maxsize=16)  # it is asked for each container of a pod
def _parsed(text: str) -> Claims | str:
    """Return the claims, or what is wrong with the text."""
    if text.count(",") + text.count(";") > _MAX_ENTRIES:
        return f"more than {_MAX_ENTRIES} entries"
    segments = [segment for segment in text.replace(" ", "").split(";") if segment]
    if not segments:
        return "it names no container, expected <container>[<claim>,…]"
    try:
        return tuple(map(_container, segments))
    except ClaimsTextError as err:
        return str(err)


def write_claims(claims: Iterable[ContainerClaim]) -> str:
    """Write the claims; those of one container by the cards' indices."""
    return ";".join(
        f"{each.container}[{','.join(map(_written, sorted(each.cards, key=_index)))}]"
        for each in claims
    )


def by_container(claims: Claims) -> Mapping[str, ContainerClaim]:
    """Map each container to its claims.

    Raises:
        ClaimsTextError: a container is named twice.
    """
    found: dict[str, ContainerClaim] = {}
    for each in claims:
        if each.container in found:
            raise ClaimsTextError(f"container {_shown(each.container)} is named twice")
        found[each.container] = each
    return found


def _index(claim: DeviceClaim) -> int:
    return claim.index


def _written(claim: DeviceClaim) -> str:
    return f"{claim.index}_{claim.uuid}_{claim.cores_percent}_{claim.memory_mib}"


def _container(text: str) -> ContainerClaim:
    name, bracket, rest = text.partition("[")
    if not (name and bracket and rest.endswith("]")) or "[" in rest or "]" in rest[:-1]:
        raise ClaimsTextError(f"{_shown(text)} is no <container>[<claim>,…]")
    cards = tuple(_claim(piece) for piece in rest[:-1].split(",") if piece)
    if not cards:
        raise ClaimsTextError(f"{_shown(text)} gives container {_shown(name)} no card")
    return ContainerClaim(name, cards)


def _claim(piece: str) -> DeviceClaim:
    fields = piece.split("_")
    if len(fields) != 4:
        raise ClaimsTextError(
            f"{_shown(piece)} has {len(fields)} fields, expected <index>_<UUID>_<cores>_<MiB>"
        )
    index, uuid, cores, memory = fields
    if not uuid or not uuid.isprintable():
        raise ClaimsTextError(f"{_shown(piece)} has no UUID of a GPU")
    return DeviceClaim(
        _number(index, "index", piece),
        uuid,
        _number(cores, "cores", piece),
        _number(memory, "memory", piece),
    )


def _number(text: str, what: str, piece: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ClaimsTextError(
            f"{_shown(piece)} has {_shown(text)} for its {what}, expected a whole number"
        )
    return int(text)


def _shown(text: str) -> str:
    return quoted(text, _SHOWN)
