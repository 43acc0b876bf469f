"""Conflicts between families: over a resource name, a directory, or a GPU's MPS control daemon.

In each conflict one family can still be offered. So the agent starts, does not offer the resources
of the other family, and logs the sentence of the conflict. ``config check`` refuses the
configuration with the same sentence. Each family declares its names and its own rules in
`families`. Conflicts that depend on the node's GPUs or on files of replaced plugins are found while
the agent runs (`agent.offers.families`, `agent.devices.mps`).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from vgpu_agent.config import schema
from vgpu_agent.config.checks import Conflict
from vgpu_agent.config.families import DECLARED, switched_on
from vgpu_agent.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.config.families import OfferedName
    from vgpu_agent.config.settings import Settings


def collisions(settings: Settings) -> Iterator[Conflict]:
    """Yield a conflict for each rule that ``settings`` break: (setting, sentence) pairs, of which
    the first setting is the likeliest to change.
    """
    yield from _equal_names(settings)
    if exposed := exposed_mps_directory(settings):
        yield Conflict((exposed,))
    for family in switched_on(settings):
        yield from family.collisions(settings)


def spreading_warnings(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each setting by which one family takes more GPUs than it needs, while
    other families are on that could use them.
    """
    on = switched_on(settings)
    values = dict(schema.values(settings))
    for family in on:
        others = ", ".join(other.name for other in on if other is not family)
        # setting, its value that spreads pods, and the value with which they share GPUs
        for path, value, instead in family.spreading:
            if others and values[path] == value:
                yield (
                    f"{path}: {value} spreads pods of {family.name} over all GPUs, and a GPU with "
                    f"one of them is no use to {others}; set {instead} to keep {family.name} on "
                    "few GPUs"
                )


def two_daemons_remedy() -> str:
    """Return the remedy where a GPU would get two MPS control daemons, as the end of a sentence."""
    # `mps_key`: the key by which a family's GPUs are shared with MPS; empty where they never are
    keys = ", ".join(["families", *sorted(family.mps_key for family in DECLARED if family.mps_key)])
    return f"offer it by one of the two ({keys})"


def duplicate_remedy(family: str) -> str:
    """Return the consequence of two equal names or ids for the second ``family``, and the remedy,
    as the end of a sentence.
    """
    return (
        f"the kubelet would confuse the two, so {family} offers nothing; choose another name, or "
        "turn one of the families off"
    )


def exposed_mps_directory(settings: Settings) -> tuple[str, str] | None:
    """Return the setting that puts files of MPS control daemons where a family's containers could
    change them, with a sentence; None where no setting does.
    """
    for family in switched_on(settings):
        # the directory for MPS that the family's containers have mounted, and the setting behind it
        directory, by = family.mounted_mps_directory(settings)
        root = settings.mps.root
        if directory and root and PurePosixPath(root).is_relative_to(directory):
            return "mps.root", (
                f"{shown(root)} lies in {directory}, which {by} mounts into containers, so that "
                "they could change the files of other MPS control daemons; choose another "
                "directory such as /run/nvidia/mps"
            )
    return None


def _equal_names(settings: Settings) -> Iterator[Conflict]:
    """Yield a conflict for each name that an earlier one equals or overlaps. Families come in the
    order in which the agent offers them.
    """
    names: list[OfferedName] = []
    for name in (name for family in switched_on(settings) for name in family.names(settings)):
        earlier = next((each for each in names if name.overlaps(each)), None)
        if earlier is not None:
            # a `prefix` stands for all names that begin with it
            text = shown(name.text if earlier.prefix else earlier.text)
            sentence = (
                f"{text} is offered by {earlier.family} and by {name.family}; "
                f"{duplicate_remedy(name.family)}"
            )
            if name.counted:  # not offered, only a number in the Node's capacity
                sentence = (
                    f"{text} is offered by {earlier.family}, and {name.family} counts GPUs under "
                    "it in the Node's capacity; choose another name, or turn one of the families "
                    "off"
                )
            # first the path that the operator is asked to change
            yield Conflict(
                tuple(
                    (each.path, sentence)
                    for each in sorted((earlier, name), key=lambda each: each.change_order)
                )
            )
        names.append(name)
