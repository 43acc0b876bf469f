"""The differences between two configurations, and which of them take effect without a restart.

Called by `agent` when the content of a configuration file has changed. Differences that need no
restart are applied at once. The others are logged and shown under ``/debug/config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from vgpu_agent.config import families, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.config.settings import Settings

Section = TypeVar("Section", bound=msgspec.Struct)

# Beginnings of the key paths whose changes take effect at once, in addition to those that each
# family declares (`live_paths`). All other settings are file paths, addresses or time limits that a
# running part was built with.
_AT_ONCE = (
    "nvidiaConfigFile",
    "plugin.",
    "gpu.recovery.",
    "gpu.disableHealthChecks",
    "gpu.enableHealthChecks",
    "log.level",
)


def reloadable_difference(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """List the paths whose values differ: those that take effect at once, and those that need a
    restart; in the schema's order.

    A list is one path, except a list of sections whose length is the same: each of its differing
    values is one.
    """
    changed = list(_differing(old, new, ""))
    at_once = [path for path in changed if takes_effect_at_once(path)]
    return at_once, [path for path in changed if path not in at_once]


def in_force(running: Section, new: Section, prefix: str = "") -> Section:
    """Return the settings that a running agent follows: those of its start, with what takes effect
    at once from ``new``. ``prefix`` is the key path of this section, followed by a dot; empty for
    the whole configuration.
    """
    taken: dict[str, Any] = {}
    for key in schema.keys(type(new)).values():
        before, after, path = (
            getattr(running, key.attribute),
            getattr(new, key.attribute),
            prefix + key.name,
        )
        # `section`: the type of the section below the key; None for a value
        if takes_effect_at_once(path if key.section is None else path + "."):
            taken[key.attribute] = after
        elif key.section is not None:
            taken[key.attribute] = in_force(before, after, path + ".")
    return msgspec.structs.replace(running, **taken)


def takes_effect_at_once(path: str) -> bool:
    """Tell whether a running agent follows a change of the value at ``path``."""
    return path.startswith(
        (*_AT_ONCE, *(beginning for family in families.DECLARED for beginning in family.live_paths))
    )


def _differing(old: msgspec.Struct, new: msgspec.Struct, path: str) -> Iterator[str]:
    if old == new:
        return
    for key in schema.keys(type(new)).values():
        before, after = getattr(old, key.attribute), getattr(new, key.attribute)
        yield from _differing_value(key, before, after, path + key.name)


def _differing_value(key: schema.Key, before: Any, after: Any, path: str) -> Iterator[str]:
    if before == after:
        return
    if key.section is not None:
        yield from _differing(before, after, path + ".")
    # `items`: for a list of sections, the type of its items; None for any other key
    elif key.items is not None and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, other, f"{path}[{index}].")
    else:
        yield path
