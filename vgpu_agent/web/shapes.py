"""Views: the public JSON shapes of the parts of `AgentStatus`, the snapshot. A view copies fields
of an internal object, by their names.

A moment is shown as ISO-8601 text in UTC and as its age in seconds. Both are null for "never". Used
by the modules of this package that make views.
"""

from __future__ import annotations

import datetime as dt
import functools
from typing import Any, TypeVar

import msgspec

View = TypeVar("View", bound=msgspec.Struct)

# Most fields with unix seconds have one of these endings. Their public names have none.
_MOMENT_ENDINGS = ("_at", "_since")


class When(msgspec.Struct, frozen=True):
    """A moment: ISO-8601 in UTC, and how many seconds ago that was."""

    at: str | None = None
    seconds_ago: float | None = None


def when(unix_seconds: float, now: float) -> When:
    """Return the moment ``unix_seconds``; 0 is never. ``now`` is in unix seconds, too."""
    if not unix_seconds:
        return When()
    at = dt.datetime.fromtimestamp(unix_seconds, dt.UTC).isoformat(timespec="milliseconds")
    return When(at.replace("+00:00", "Z"), round(now - unix_seconds, 3))


def view(kind: type[View], source: Any, now: float, **others: Any) -> View:
    """Make a ``kind`` from ``others``, and its remaining fields from the attributes of ``source``.
    The ages of moments are those at ``now`` (unix seconds).

    An attribute has the name of its field. That of a moment, a field of the type `When`, may end in
    ``_at`` or ``_since``.

    Raises:
        AttributeError: ``source`` has nothing for a field.
    """
    # mypy does not accept classes as hashable
    for name, attribute, is_moment in _sources(kind, type(source)):  # type: ignore[arg-type]
        if name not in others:
            value = getattr(source, attribute)
            others[name] = when(value, now) if is_moment else value
    return kind(**others)


def shown(source: msgspec.Struct, now: float) -> dict[str, Any]:
    """Return all fields of ``source``, a part of `AgentStatus`. A name that ends in ``_at`` or
    ``_since`` is that of a moment, and loses the ending.
    """
    found = {}
    for name in source.__struct_fields__:
        value, public = getattr(source, name), name
        for ending in _MOMENT_ENDINGS:
            if name.endswith(ending):
                value, public = when(value, now), name.removesuffix(ending)
        found[public] = value
    return found


@functools.cache
def _sources(kind: type[msgspec.Struct], source: type) -> tuple[tuple[str, str, bool], ...]:
    """Return each field of ``kind``, the attribute of ``source`` that it shows, and whether it is a
    moment.
    """
    attributes = dir(source)
    found = []
    for field in msgspec.structs.fields(kind):
        is_moment = field.type is When
        names = (field.name, *(field.name + ending for ending in _MOMENT_ENDINGS if is_moment))
        found.append(
            (
                field.name,
                next((name for name in names if name in attributes), field.name),
                is_moment,
            )
        )
    return tuple(found)
