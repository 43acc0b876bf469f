"""The problems of a configuration, collected so that all can be corrected at once.

`reading` collects them. A problem names the place (a line of the file, a flag, a variable), the
key, the expectation and the value found. Only the first ones are kept in full, because a megabyte
of junk must not become a megabyte of log.
"""

from __future__ import annotations

import json
import re
from typing import Any

from vgpu_agent.errors import ConfigError

SHOWN = 20  # problems that are kept in full
_AFTER_ALL_FILES = 2**31
_LONGEST_VALUE = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_<-][A-Za-z0-9_./<-]*\Z")


class Problems:
    """Problems of one configuration; `raise_if_any` ends the collection."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, str]] = []  # (number of the file, line, sentence)
        self._files: dict[str, int] = {}  # file → its number, in the order of their first problems
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def only_counts_more(self) -> bool:
        """Tell whether further problems are only counted, so that they need no text."""
        return len(self._found) >= SHOWN

    def add(self, place: str, path: str, text: str, *, line: int = 0) -> None:
        """Note a problem. Those with a ``line`` are listed by file and line, the others after them.

        Args:
            place: where the value is set: ``<file>:<line>``, a flag or a variable.
            path: the dotted path of the key, such as ``mps.root``; empty where ``place`` names it.
            text: the expectation, and the value found.
            line: the line in the file; 0 for a value that is not from a file.
        """
        self._count += 1
        if not self.only_counts_more:
            file = (
                self._files.setdefault(place.rpartition(":")[0], len(self._files))
                if line
                else _AFTER_ALL_FILES
            )
            self._found.append(
                (file, line, ": ".join(part for part in (place, path, text) if part))
            )

    def raise_if_any(self) -> None:
        """Raise the collected problems.

        Raises:
            ConfigError: there is at least one problem.
        """
        if self._found:
            raise ConfigError(list(self.sentences))

    @property
    def sentences(self) -> tuple[str, ...]:
        """List the collected problems, in order."""
        sentences = [
            sentence for _, _, sentence in sorted(self._found, key=lambda found: found[:2])
        ]
        if (more := self._count - len(sentences)) > 0:
            sentences.append(f"and {more} more like these")
        return tuple(sentences)


def shown(value: Any) -> str:
    """Return ``value`` for messages ("got …"): as in the file, in one printable line, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f'"{_printable(value)}"'
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _shortened(json.dumps(value))


def shown_list(value: Any) -> str:
    """Show ``value`` like `shown`, but a list of plain values with its values, for a key that takes
    lists.
    """
    if isinstance(value, list) and all(
        isinstance(word, str | int | float | None) for word in value
    ):
        return _shortened(f"[{', '.join(map(shown, value))}]")
    return shown(value)


def shown_key(key: str) -> str:
    """Return ``key`` as a part of a dotted path, in quotes when it would be mistaken for something
    else.
    """
    return key if len(key) <= _LONGEST_VALUE and _PLAIN_KEY.match(key) else f'"{_printable(key)}"'


def _printable(text: str) -> str:
    start = text[: _LONGEST_VALUE + 1]
    return _shortened(
        "".join(
            char if char.isprintable() and char not in '"\\' else json.dumps(char)[1:-1]
            for char in start
        )
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"
