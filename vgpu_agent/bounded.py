"""Facts of log lines and journal entries within bounds:
long texts, long lists and deep nesting are cut, with a note.

The one place where nested values are cut. Single values in messages are quoted by `errors.quoted`.
This module is for values that are passed on unchanged: an exception's text, a list of names, the
facts of an event.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_TEXT = 2048  # characters of one text
MAX_ITEMS = 64  # of one list or mapping
DEEPEST = 6  # levels of nesting
_LONGEST_SECRET = 8192  # characters
_ITEM_BYTES = 64  # memory of an item in addition to the size of its value


def bounded(facts: Mapping[str, Any], *, most_bytes: int) -> tuple[dict[str, Any], int]:
    """Return ``facts`` as plain values without secrets, and the bytes of memory that they take:
    about ``most_bytes`` at most.

    Values that fit stay as they are. Nothing that is returned refers to an object that may grow or
    live long: dataclasses and structs become mappings, everything unknown its text.
    """
    budget = _Budget(most_bytes)
    return {key: budget.cut(value, 0) for key, value in facts.items()}, budget.spent


class _Budget:
    """The bytes that may still be kept of one set of facts; ``spent`` is how many are taken."""

    def __init__(self, most_bytes: int) -> None:
        self.spent = 0
        self._most_bytes = most_bytes

    def cut(self, value: Any, depth: int) -> Any:
        """Return ``value``, cut down to the bytes that are left."""
        self.spent += _ITEM_BYTES
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return (
                value if -(2**63) <= value < 2**64 else f"(a number of {value.bit_length()} bits)"
            )
        if isinstance(value, str):
            return self._text(value)
        return (
            "…"
            if depth >= DEEPEST or self.spent >= self._most_bytes
            else self._nested(value, depth)
        )

    def _nested(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._items(value, depth)
        return self.cut(_plain(value), depth + 1)

    def _text(self, text: str) -> str:
        most = max(0, min(LONGEST_TEXT, self._most_bytes - self.spent))
        length = len(text)
        # Secrets first: half of one would not be recognised.
        text = redacted(text[: most + _LONGEST_SECRET])
        if max(length, len(text)) > most:
            text = f"{text[:most]}… ({length} characters)"
        if not text.isascii():
            # A file's name may have bytes that are not UTF-8, which no line of JSON can have.
            text = text.encode("utf-8", "backslashreplace").decode()
        self.spent += sys.getsizeof(text)
        return text

    def _mapping(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        kept: dict[Any, Any] = {}
        for number, (key, item) in enumerate(value.items()):
            if number >= MAX_ITEMS or self.spent >= self._most_bytes:
                kept["…"] = f"{len(value) - number} more"
                break
            kept[key if isinstance(key, int | float) else self._text(str(key))] = self.cut(
                item, depth + 1
            )
        return kept

    def _items(
        self, value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any], depth: int
    ) -> list[Any] | tuple[Any, ...]:
        kept: list[Any] = []
        for number, item in enumerate(value):
            if number >= MAX_ITEMS or self.spent >= self._most_bytes:
                kept.append(f"… ({len(value) - number} more)")
                break
            kept.append(self.cut(item, depth + 1))
        return tuple(kept) if isinstance(value, tuple) else kept


def _plain(value: Any) -> Any:
    """Convert an unknown object to values that JSON has, or to its text."""
    try:
        return msgspec.to_builtins(value, enc_hook=repr)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return repr(value)
