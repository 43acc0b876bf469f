"""Conflicts of families and MPS control daemons: over one resource name, one directory, one GPU.

Each such rule concerns several families, of which one can be served. So an agent starts
nevertheless, withholds the resources in conflict and logs the sentences from here, and
``config check`` refuses the configuration with the same sentences. What a family can offer, and its
own rules beside others, it declares itself (`families`). Conflicts that depend on the node's GPUs
or on files of replaced plugins are found while the agent runs (`agent.offers.families`,
`agent.devices.mps`).
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
    """Every rule that ``settings`` breaks."""
    yield from _equal_names(settings)
    if exposed := exposed_mps_directory(settings):
        yield Conflict((exposed,))
    for family in switched_on(settings):
        yield from family.collisions(settings)


def crowding(settings: Settings) -> Iterator[str]:
    """A sentence for each setting by which one family begins more GPUs than it needs,
    while others are on that could use them.
    """
    on = switched_on(settings)
    values = dict(schema.values(settings))
    for family in on:
        others = ", ".join(other.name for other in on if other is not family)
        for path, value, instead in family.spreading:
            if others and values[path] == value:
                yield (
                    f"{path}: {value} spreads pods of {family.name} over all GPUs, and a GPU with "
                    f"one of them is no use to {others}; set {instead} to keep {family.name} on "
                    "few GPUs"
                )


def by_one_of_two() -> str:
    """The remedy where two MPS control daemons would meet on a GPU, as the end of a sentence."""
    keys = ", ".join(["families", *sorted(family.mps for family in DECLARED if family.mps)])
    return f"offer it by one of the two ({keys})"


def without(family: str) -> str:
    """The consequence of two equal names or ids for the family that comes second,
    and the remedy.
    """
    return (
        f"the kubelet would confuse the two, so {family} offers nothing; choose another name, or "
        "turn one of the families off"
    )


def exposed_mps_directory(settings: Settings) -> tuple[str, str] | None:
    """The path of a directory of MPS control daemons that containers of a family could change,
    with a sentence; None in order.
    """
    for family in switched_on(settings):
        directory, by = family.exposed(settings)
        for path, value in (
            ("mps.root", settings.mps.root),
            ("mps.containerRoot", settings.mps.container_root),
        ):
            if directory and value and PurePosixPath(value).is_relative_to(directory):
                return path, (
                    f"{shown(value)} lies in {directory}, which {by} mounts into containers, so "
                    "that they could change the files of other MPS control daemons; choose another "
                    "directory such as /run/nvidia/mps"
                )
    return None


def _equal_names(settings: Settings) -> Iterator[Conflict]:
    """Every name with an earlier one that is the same;
    the families in the order in which the agent offers them.
    """
    names: list[OfferedName] = []
    for name in (name for family in switched_on(settings) for name in family.names(settings)):
        if (twin := next((earlier for earlier in names if name.meets(earlier)), None)) is not None:
            text = shown(name.text if twin.prefix else twin.text)
            sentence = (
                f"{text} is offered by {twin.family} and by {name.family}; {without(name.family)}"
            )
            if name.counted:
                sentence = (
                    f"{text} is offered by {twin.family}, and {name.family} counts GPUs under it "
                    "in the Node's capacity; choose another name, or turn one of the families off"
                )
            yield Conflict(
                tuple(
                    (each.path, sentence)
                    for each in sorted((twin, name), key=lambda each: each.choice)
                )
            )
        names.append(name)
