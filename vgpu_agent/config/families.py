"""The part that families have in the configuration: switches, sections, flags and rules.

Each family declares its part as a `FamilySettings`, and `families.registry` adds it here before a
configuration is read. `schema` makes the sections of it, `options` the flags, `checks` and
`collisions` apply the rules. Nothing in this package knows a family by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.config.checks import Conflict
    from vgpu_agent.config.documents import PluginDocument
    from vgpu_agent.config.foreign_settings import ForeignFlag, ForeignVariable
    from vgpu_agent.config.options import Option
    from vgpu_agent.config.settings import Settings


class OfferedName(NamedTuple):
    """A resource name that a family has on some node.

    Attributes:
        text: the name.
        family: the family, in words for people.
        path: the setting that the name comes from.
        prefix: ``text`` stands for all names that begin with it.
        counted: the family does not offer it, and writes a number under it into the Node's
            capacity.
        change_order: of two equal names, the operator is asked to change the one with the lower
            number.
    """

    text: str
    family: str
    path: str
    prefix: bool = False
    counted: bool = False
    change_order: int = 3

    def overlaps(self, other: OfferedName) -> bool:
        """Tell whether one resource can have both names."""
        if self.prefix and other.prefix:
            return self.text.startswith(other.text) or other.text.startswith(self.text)
        if self.prefix or other.prefix:
            prefix, name = (self, other) if self.prefix else (other, self)
            return name.text.startswith(prefix.text)
        return self.text == other.text


class Spreading(NamedTuple):
    """A setting by which a family takes more GPUs than it needs.

    Attributes:
        path: the key.
        value: the value that does so.
        instead: the value that keeps the family on few GPUs.
    """

    path: str
    value: str
    instead: str


def _no_conflicts(_: Settings) -> tuple[Conflict, ...]:
    return ()


def _no_sentences(_: Settings) -> tuple[str, ...]:
    return ()


def _no_names(_: Settings) -> tuple[OfferedName, ...]:
    return ()


def _no_daemons(_: Settings) -> bool:
    return False


def _no_directory(_: Settings) -> tuple[str, str]:
    return "", ""


class FamilySettings(msgspec.Struct, frozen=True):
    """The part of one family in the configuration.

    Attributes:
        name: the family's name, e.g. ``volcano-vgpu``.
        switch_text: the description of its switch, the setting in ``families`` that turns it on.
        on_by_default: the default of the switch.
        sections: its own sections, by their names in Python.
        former_keys: keys of earlier versions that are not settings any more → what the agent does
            now.
        live_paths: beginnings of the paths of settings whose changes a running agent follows.
        options: its own flags and environment variables.
        also_set_by: key of its own → a key of another section: the flag, the environment variable
            and the field of the NVIDIA plugin's file for that key also set its own.
        also_set_by_options: the same, except that the field of NVIDIA's file does not: e.g.
            ``--mig-strategy``, for ``plugin.migStrategy``, also sets vgpu-manager's
            ``vgpuManager.migStrategy``.
        ignored_variables: variables of the replaced plugin that are not followed.
        ignored_flags: flags of the replaced plugin that are accepted and not followed.
        conflicts: the rules that the settings break, whether it is on or off. An agent does not
            start with such settings.
        without_effect: a sentence for each setting that has no effect because of another one.
        names: the names of its resources. This function and ``collisions`` are called only while
            it is on.
        collisions: the broken rules about this family together with others. An agent starts, and
            does not offer what is in conflict.
        spreading: its settings that spread pods over more GPUs than they need.
        mps_key: the key by which its GPUs are shared with MPS; empty where they never are.
        runs_mps_daemons: the settings → whether the agent runs MPS control daemons on its GPUs.
        mounted_mps_directory: the directory for MPS that its containers have mounted, and the
            setting with its value that causes it; both empty for none.
        plugin_document: the document that the replaced plugin is configured by, where it has values
            for the whole agent. One family has one.
        offers_mig: it offers existing MIG instances, as ``plugin.migStrategy`` says.
    """

    name: str
    switch_text: str
    on_by_default: bool = False
    sections: Mapping[str, type[msgspec.Struct]] = msgspec.field(default_factory=dict)
    former_keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    live_paths: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    also_set_by: Mapping[str, str] = msgspec.field(default_factory=dict)
    also_set_by_options: Mapping[str, str] = msgspec.field(default_factory=dict)
    ignored_variables: tuple[ForeignVariable, ...] = ()
    ignored_flags: tuple[ForeignFlag, ...] = ()
    conflicts: Callable[[Settings], Iterable[Conflict]] = _no_conflicts
    without_effect: Callable[[Settings], Iterable[str]] = _no_sentences
    names: Callable[[Settings], Iterable[OfferedName]] = _no_names
    collisions: Callable[[Settings], Iterable[Conflict]] = _no_conflicts
    spreading: tuple[Spreading, ...] = ()
    mps_key: str = ""
    runs_mps_daemons: Callable[[Settings], bool] = _no_daemons
    mounted_mps_directory: Callable[[Settings], tuple[str, str]] = _no_directory
    plugin_document: PluginDocument | None = None
    offers_mig: bool = False

    @property
    def attribute(self) -> str:
        """The name of its switch in Python."""
        return self.name.replace("-", "_")

    @property
    def key(self) -> str:
        """The path of its switch in YAML."""
        first, *others = self.name.split("-")
        return "families." + first + "".join(other.capitalize() for other in others)


DECLARED: list[FamilySettings] = []
"""All families of this process, in the order in which their resources are offered."""


def switched_on(settings: Settings) -> list[FamilySettings]:
    """List the families that the settings offer on this node."""
    return [family for family in DECLARED if settings.is_on(family.name)]


def plugin_document() -> PluginDocument:
    """Return the document of a replaced plugin whose values count where our file says nothing.

    Raises:
        LookupError: no family has been declared that has one.
    """
    for family in DECLARED:
        if family.plugin_document is not None:
            return family.plugin_document
    raise LookupError(
        "no family is declared; import vgpu_agent.families.registry before a configuration is read"
    )


def mig_family(settings: Settings) -> str:
    """Name the family that is on and offers existing MIG instances as ``plugin.migStrategy`` says;
    empty where none does.
    """
    return next((family.name for family in switched_on(settings) if family.offers_mig), "")
