"""A configuration of a replaced plugin as a document of its own, whose values count where the agent's own file says nothing.

Its family declares how it is read (`families.FamilySettings.document`); `load` finds it, and `reading` judges its values like our own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.config import yaml


@dataclasses.dataclass(frozen=True)
class Translation:
    """Such a document with our keys.

    Attributes:
        members: as the top of a document of ours, every value with its line in theirs.
        keys: our dotted path → theirs, for sentences about it.
        faults: the errors, in their keys.
        warnings: settings that are ignored, or that count only here; in their keys.
    """

    members: Mapping[str, yaml.Node] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    faults: tuple[yaml.Fault, ...] = ()
    warnings: tuple[yaml.Fault, ...] = ()


@dataclasses.dataclass(frozen=True)
class PluginDocument:
    """How such documents are read.

    Attributes:
        section: the key of our file below which one may stand.
        only_there: keys at the top of one that our file never has.
        translate_file: the content of a file → its meaning.
        translate_section: what stands below ``section`` → the same.
    """

    section: str
    only_there: tuple[str, ...]
    translate_file: Callable[[bytes], Translation]
    translate_section: Callable[[yaml.Node], Translation]
