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

# The most texts of one file that are kept: the oldest, and the newest ones after it; see
# `texts_in_force`.
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
        part_in_force: the part that applies to this node, as the end of a message; empty when the
            whole file applies.
    """

    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    part_in_force: str = ""


def _no_findings(_: Settings, __: str) -> Findings:
    return Findings()


class PluginFile(msgspec.Struct, frozen=True):
    """A configuration file of a replaced plugin, on the node or in a ConfigMap.
    The settings decide whether and where it is read.

    Attributes:
        name: the file's name, which is also its key in a ConfigMap.
        is_valid: tells whether the part of the text for this node has no error.
        path: where it is mounted on the node; empty for nowhere.
        config_map: the name of the ConfigMap; empty for a file on the node.
        namespaces: where the ConfigMap is searched, in order; none where it is not read.
        configured_namespace: the namespace of the ConfigMap by the settings; empty where they
            name none.
        findings: judges a text that may be mounted; its errors agree with ``is_valid``.
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

    A sound text counts alone. One with an error needs those ``before`` it, back to the last sound
    one: of several wrong versions in a row, the correct parts of each
    stay in force.
    """
    if text is None:
        return ()
    if before and before[-1] == text:
        return tuple(before)
    return (text,) if is_valid(text) else (*before[:1], *before[1:][2 - _MAX_TEXTS :], text)
