"""The public JSON shapes of the parts of a snapshot: a view has the fields of the same name, and a moment in both forms.

A moment is ISO-8601 text in UTC beside its age in seconds. Both are null for "never". Used by all views of this package.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

View = TypeVar("View", bound=msgspec.Struct)

_MOMENTS = ("_at", "_since")  # endings of the names of unix seconds, where the public name is another word


class When(msgspec.Struct, frozen=True):
    """A moment: ISO-8601 in UTC, and how many seconds ago that was."""

    at: str | None = None
    seconds_ago: float | None = None


def when(unix_seconds: float, now: float) -> When:
    """The moment ``unix_seconds``; 0 is never."""
    if not unix_seconds:
        return When()
    at = dt.datetime.fromtimestamp(unix_seconds, dt.UTC).isoformat(timespec="milliseconds")
    return When(at.replace("+00:00", "Z"), round(now - unix_seconds, 3))


def view(kind: type[View], source: object, now: float, **others: Any) -> View:
    """Make a ``kind`` of ``others``, and for its other fields of the attributes of ``source``.

    An attribute has the name of its field; a moment may have ``_at`` or ``_since`` behind it.
    """
    for name, is_moment in _fields(kind):
        if name not in others:
            others[name] = _moment(source, name, now) if is_moment else getattr(source, name)
    return kind(**others)


def shown(source: DataclassInstance, now: float) -> dict[str, Any]:
    """All fields of a status; those that end in ``_at`` or ``_since`` are moments, and are shown without that ending."""
    found = {}
    for field in dataclasses.fields(source):
        value, public = getattr(source, field.name), field.name
        for ending in _MOMENTS:
            if field.name.endswith(ending):
                value, public = when(value, now), field.name.removesuffix(ending)
        found[public] = value
    return found


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, bool], ...]:
    return tuple((field.name, field.type is When) for field in msgspec.structs.fields(kind))


def _moment(source: object, name: str, now: float) -> When:
    names = (name, *(name + ending for ending in _MOMENTS))
    return when(next(getattr(source, each) for each in names if hasattr(source, each)), now)
