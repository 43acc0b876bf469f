"""A configuration of a replaced plugin as a document of its own, whose values count where the
agent's own file says nothing.

Its family declares how it is read (`families.FamilySettings.plugin_document`); `load` finds it, and
`reading` judges its values like our own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from vgpu_agent.config import yaml
    from vgpu_agent.config.settings import Settings


class Translation(msgspec.Struct, frozen=True):
    """A configuration of a replaced plugin, translated into the agent's keys.

    Attributes:
        members: the top-level keys of the agent's schema → their values, with the lines of the
            plugin's document, which messages name.
        keys: dotted path of the agent → dotted path of the plugin, for messages.
        faults: the errors, with the plugin's keys.
        warnings: settings that the agent ignores, or that only the agent applies; with the
            plugin's keys.
    """

    members: Mapping[str, yaml.Node] = msgspec.field(default_factory=dict)
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    faults: tuple[yaml.Fault, ...] = ()
    warnings: tuple[yaml.Fault, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """The choice of one of several documents, or the reason why none could be chosen.

    Attributes:
        key: the document's name; empty for none at all, which is valid where ``problem`` is empty.
        reason: the reason of the choice, for people.
        problem: why nothing could be chosen, with the remedy; the settings in force stay.
    """

    key: str = ""
    reason: str = ""
    problem: str = ""


class NamedDocuments(msgspec.Struct, frozen=True):
    """Several such documents, of which a label of the Node chooses one.

    Attributes:
        directory: the directory with a file for each; empty where the settings ask for no choice.
        label: the name of the label.
        choose: the label's value (empty: no label) and the names of the documents → the choice.
    """

    directory: str
    label: str
    choose: Callable[[str, Collection[str]], Choice]

    def path(self, key: str) -> str:
        """Return the path of the file of the document ``key``."""
        return os.path.join(self.directory, key)


class PluginDocument(msgspec.Struct, frozen=True):
    """A description of such documents: where they are found and how they are read.

    Attributes:
        section: the top-level key in the agent's own file whose value can be such a document.
        plugin_only_keys: top-level keys of such a document that the agent's own file never has; the
            error about one there says where such a document belongs.
        translate_file: the content of a file → the document in the agent's keys.
        translate_section: the value of ``section`` → the same.
        directory_key: the dotted path of the agent's setting for the directory of documents of
            which a label of the Node chooses one.
        named_documents: the settings → those documents and their choice.
    """

    section: str
    plugin_only_keys: tuple[str, ...]
    translate_file: Callable[[bytes], Translation]
    translate_section: Callable[[yaml.Node], Translation]
    directory_key: str
    named_documents: Callable[[Settings], NamedDocuments]
