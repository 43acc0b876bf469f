"""The configuration files of the plugins that families replace:
where each is found, and which version of its content is in force.

A family declares its files in its `FamilySpec`. `agent` reads them, from the node or from a
ConfigMap, and passes their texts to the family's builder. None of them can stop the agent: errors
in a file are reported, and its previous content stays in force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.config.settings import Settings

# The most texts of one file in force together: the oldest, usually the last one without an error,
# and the newest ones after it.
_MAX_TEXTS = 8


def _nowhere(_: Settings) -> str:
    return ""


def _in_none(_: Settings) -> tuple[str, ...]:
    return ()


class Findings(msgspec.Struct, frozen=True):
    """The findings in one text of a file, for people who have not applied it yet.

    Attributes:
        errors: one sentence for each, with the line where that is known.
        notes: the same for each part that has no effect.
        part_in_force: which part of the file applies to this node, in words that end the message
            ``<path>: ok, …``; empty when the whole file applies.
    """

    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    part_in_force: str = ""


def _no_findings(_: Settings, __: str) -> Findings:
    return Findings()


class PluginFile(msgspec.Struct, frozen=True):
    """A configuration file of a replaced plugin, on the node or in a ConfigMap.
    The settings decide whether and where it is read: each function gets them as its first argument.

    Attributes:
        name: the file's name, which is also its key in a ConfigMap.
        is_valid: tells whether the part of the text for this node has no error.
        path: where it is mounted on the node; empty for nowhere.
        config_map: the name of the ConfigMap; empty for a file on the node.
        namespaces: where the ConfigMap is searched, in order; none where it is not read.
        configured_namespace: the namespace of the ConfigMap by the settings; empty where they
            name none. Only there a failing watch is a problem; in other namespaces the agent may
            lack the right to read it.
        findings: returns what is wrong with a text, for the command that checks a configuration
            before it is applied, with errors where ``is_valid`` returns False; by default nothing,
            for files that the command does not check.
    """

    name: str
    is_valid: Callable[[Settings, str], bool]
    path: Callable[[Settings], str] = _nowhere
    config_map: str = ""
    namespaces: Callable[[Settings], tuple[str, ...]] = _in_none
    configured_namespace: Callable[[Settings], str] = _nowhere
    findings: Callable[[Settings, str], Findings] = _no_findings


def texts_in_force(
    before: Sequence[str], text: str | None, is_valid: Callable[[str], bool]
) -> tuple[str, ...]:
    """List the texts of a file that count when the newest is ``text``, oldest first;
    none where there is no file.

    A valid text counts alone. One with an error needs those ``before`` it, back to the last valid
    one: of several wrong versions in a row, the correct parts of each stay in force.

    Args:
        before: what this function returned for the previous text; empty for the first one.
        text: the newest content of the file; None where there is no file.
        is_valid: tells whether a text has no error.
    """
    if text is None:
        return ()
    if before and before[-1] == text:
        return tuple(before)
    return (text,) if is_valid(text) else (*before[:1], *before[1:][2 - _MAX_TEXTS :], text)
