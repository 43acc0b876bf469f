"""The replicas of k8s-gpu-sharing-plugin, iktos's fork of NVIDIA's plugin:
``gpu:sharedgpu:4,mig-1g.5gb:slice:2``.

`settings` calls `problems` before the text is accepted as ``iktos.resourceConfig``, and the family
calls `entries` with the accepted text. Syntax: iktos §I.2. The replaced plugin accepts unusable
entries and fails later, or never ends (iktos D9), so every entry is checked here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from vgpu_agent.config.problems import shown
from vgpu_agent.families.nvidia.resource_names import NVIDIA_DOMAIN, resource_name_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

# one replica for each unit of the device's memory: 1 GiB or 1000 MiB (`iktos.automaticUnit`)
AUTOMATIC: Final = -1
_MAX_REPLICAS: Final = 2**31 - 1  # the replaced plugin reads an int32
_ORIGINAL = re.compile(r"(gpu|mig-[0-9a-z][-0-9a-z.]*)\Z")
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}\Z")


class IktosEntry(msgspec.Struct, frozen=True):
    """One resource that is offered under another name and several times.

    Attributes:
        original: the resource as NVIDIA's plugin names it, ``nvidia.com/gpu`` or
            ``nvidia.com/mig-<profile>``.
        new: the offered name, with its domain.
        replicas: for each device; `AUTOMATIC` makes it depend on the device's memory.
    """

    original: str
    new: str
    replicas: int


def entries(text: str) -> tuple[IktosEntry, ...]:
    """Return the entries of a text in which `problems` found nothing; wrong ones are left out."""
    return tuple(found for _, found in _read(text) if isinstance(found, IktosEntry))


def problems(text: str) -> Iterator[str]:
    """Yield a sentence for each fault, with its entry and what to write instead."""
    # resource → the first entry that divides it; offered name → the first entry with that name
    originals: dict[str, str] = {}
    names: dict[str, str] = {}
    for word, found in _read(text):
        if isinstance(found, str):
            yield f"entry {shown(word)}: {found}"
            continue
        if found.original in originals:
            yield (
                f"entries {shown(originals[found.original])} and {shown(word)}: both divide "
                f"{found.original}; keep one of them"
            )
        elif found.new in names:
            yield (
                f"entries {shown(names[found.new])} and {shown(word)}: both are offered as "
                f"{found.new}; give one of them another name"
            )
        originals.setdefault(found.original, word)
        names.setdefault(found.new, word)


def _read(text: str) -> Iterator[tuple[str, IktosEntry | str]]:
    """Yield each entry as it was written, with its meaning or the sentence about its fault; empty
    ones are skipped.
    """
    for written in text.split(","):
        if word := written.strip():
            yield word, _entry(word)


def _entry(word: str) -> IktosEntry | str:
    parts = word.split(":")
    if len(parts) != 3:
        return (
            f"expected <resource>:<new name>:<replicas>, got {len(parts)} "
            f"part{'' if len(parts) == 1 else 's'}"
        )
    original, new, replicas = parts
    if not _ORIGINAL.match(original):
        return f"expected gpu or mig-<profile> as the resource, got {shown(original)}"
    if "/" in new or resource_name_problem(f"{NVIDIA_DOMAIN}/{new}"):
        return (
            "expected up to 63 lower case letters, digits, '-' and '.' as the new name, got "
            f"{shown(new)}"
        )
    number = int(replicas) if _NUMBER.match(replicas) else 0
    if number != AUTOMATIC and not 1 <= number <= _MAX_REPLICAS:
        return (
            "expected replicas of 1 or more, or -1 for one per unit of memory, got "
            f"{shown(replicas)}"
        )
    return IktosEntry(f"{NVIDIA_DOMAIN}/{original}", f"{NVIDIA_DOMAIN}/{new}", number)
