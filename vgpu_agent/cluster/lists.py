"""A list of the API server, read object by object while it arrives.

The API server ignores ``limit`` where it answers from its cache, so one answer may hold all pods of
a node with a megabyte and a half each. Here never more than one object and one piece of the body
are in memory. Used by `reflector`, which decodes each object and drops it, and by `failed_pods`,
which looks for a few of many.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

# etcd takes objects of 1.5 MiB by default, and their JSON is at most a few times as long.
LONGEST_OBJECT_BYTES = 16 * 1024 * 1024
# For the envelope, all of a list except the items: kind, version, continue token.
_LONGEST_ENVELOPE_BYTES = 64 * 1024

# The longest text that a pattern is matched against: a match keeps some hundred bytes for each JSON
# string or object in it, and those may be as short as two characters.
_MATCHED_AT_ONCE_BYTES = 16 * 1024

_DEEPEST = 500  # levels of one object; those of Kubernetes have about ten

# Each character fits one alternative only, so nothing is ever tried in two ways. Possessive
# quantifiers would do the same, but Python before 3.11.5 matches too little with them (CPython
# issue 106052), and Debian 12 has 3.11.2.
# Escapes are replaced before (`_without_escapes`), so a string ends with the next quote.
_IN_STRING = rb'[^"]*'
_STRING = rb'"' + _IN_STRING + rb'"'
# Text with strings and without braces; and the same that may also have objects of one level.
_FLAT = rb'[^"{}]*(?:' + _STRING + rb'[^"{}]*)*'
_SHALLOW = rb'[^"{}]*(?:(?:' + _STRING + rb"|\{" + _FLAT + rb'\})[^"{}]*)*'
# Up to the next brace that changes `_depth`: strings, and within an item objects with few levels,
# are passed over in one step.
_OUTSIDE = re.compile(_FLAT, re.DOTALL)
_INSIDE = re.compile(rb'[^"{}]*(?:(?:' + _STRING + rb"|\{" + _SHALLOW + rb'\})[^"{}]*)*', re.DOTALL)
_REST_OF_STRING = re.compile(_IN_STRING, re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b'{}"'
_ITEMS = re.compile(rb'"items"\s*:\s*\[\s*\Z')


class ListReader:
    """The reader of one page: `feed` it the body, take the items, and `end` it.

    State: the received part of the incomplete object, `LONGEST_OBJECT_BYTES` at most, and the text
    around the items.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = bytearray()
        self._from = 0  # how far `_rest` is read
        # the part of `_rest` that was unread when the last piece came, with its escapes replaced
        self._ahead = bytearray()
        self._at = 0  # how far `_ahead` is read
        self._in_string = False
        self._depth = 0  # open braces: 1 in the list itself, 2 in an item or another object in it
        self._in_items = False
        self._item = False  # the object that is being read is an item
        self._envelope = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the items that are complete with ``chunk``.

        Raises:
            ClusterError: it is not a list, or an object in it is too long.
        """
        for start in range(0, len(chunk), _MATCHED_AT_ONCE_BYTES):
            self._rest += chunk[start : start + _MATCHED_AT_ONCE_BYTES]
            self._ahead, self._at = _without_escapes(self._rest[self._from :]), 0
            while (brace := self._next_brace()) is not None:
                if brace == _OPENING:
                    self._opened()
                elif (item := self._closed()) is not None:
                    yield item
        if self._depth < 2 and len(self._rest) > _LONGEST_ENVELOPE_BYTES:
            self._refuse_envelope()
        if len(self._rest) > LONGEST_OBJECT_BYTES:
            raise ClusterError(
                f"GET {self._path}: the list has an object of more than "
                f"{LONGEST_OBJECT_BYTES >> 20} MiB; it is given up"
            )

    def end(self) -> tuple[str, str]:
        """Return the resource version, and the token of the next page, empty on the last one.

        Raises:
            ClusterError: it was not a list, or it broke off.
        """
        self._keep_outside(len(self._rest))
        if self._depth > 0:
            raise ClusterError(f"GET {self._path}: the list ended early; it is requested again")
        _, version, token = decode.page(bytes(self._envelope))
        return version, token

    def _next_brace(self) -> int | None:
        """Go on after the next brace that changes `_depth`, and return it;
        None at the end of the received text. Nothing is read twice.
        """
        ahead = self._ahead
        while True:
            if self._in_string:
                self._read_to(_required(_REST_OF_STRING.match(ahead, self._at)).end())
                if self._at >= len(ahead):
                    return None
                self._in_string = False
                self._read_to(self._at + 1)
            pattern = _INSIDE if self._depth > 1 else _OUTSIDE
            self._read_to(_required(pattern.match(ahead, self._at)).end())
            if self._at >= len(ahead):
                return None
            found = ahead[self._at]
            self._read_to(self._at + 1)
            if found != _QUOTE:
                return found
            self._in_string = True  # the end of this string has not been received

    def _read_to(self, place: int) -> None:
        """Go on to a place in `_ahead`."""
        self._from += place - self._at
        self._at = place

    def _opened(self) -> None:
        """Go one level deeper, at the opening brace before `_from`; if an object of the list begins
        with it, drop what is before it from `_rest`.
        """
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ClusterError(
                f"GET {self._path}: the list has an object with more than {_DEEPEST} levels; "
                "look for a proxy between this node and the API server"
            )
        if self._depth == 2:
            at = self._from - 1
            self._keep_outside(at)
            self._item = self._in_items
            del self._rest[:at]
            self._from = 1

    def _closed(self) -> bytes | None:
        """Go back one level, at the closing brace before `_from`; return the item that ends there,
        if one does.
        """
        self._depth -= 1
        if self._depth < 0:
            raise ClusterError(
                f"GET {self._path}: the API server sent a list that cannot be read: it has an "
                "extra bracket"
            )
        if self._depth != 1:
            return None
        text = bytes(memoryview(self._rest)[: self._from])
        del self._rest[: self._from]
        self._from = 0
        if self._item:
            return text
        self._keep(text)
        return None

    def _keep_outside(self, end: int) -> None:
        """Add the text before ``end``, which is in no inner object, to the envelope; leave out what
        is between items.
        """
        text = bytes(memoryview(self._rest)[:end])
        if self._in_items and b"]" in text:
            self._in_items = False
            text = text[text.index(b"]") :]
        if self._in_items:
            return  # commas
        self._keep(text)
        self._in_items = _ITEMS.search(self._envelope) is not None

    def _keep(self, text: bytes) -> None:
        """Add ``text`` to the envelope."""
        self._envelope += text
        if len(self._envelope) > _LONGEST_ENVELOPE_BYTES:
            self._refuse_envelope()

    def _refuse_envelope(self) -> None:
        most = f"{_LONGEST_ENVELOPE_BYTES >> 10} KiB"
        raise ClusterError(
            f"GET {self._path}: the list has more than {most} beside its items; it is given up"
        )


def _without_escapes(text: bytearray) -> bytearray:
    """Return the text with other characters in the place of escaped quotes and backslashes, and
    without the beginning of an escape at its end.
    """
    replaced = text.replace(rb"\\", b"..").replace(rb"\"", b"..")
    return replaced[:-1] if replaced.endswith(b"\\") else replaced


def _required(found: re.Match[bytes] | None) -> re.Match[bytes]:
    """Return the match of a pattern that always matches, if only the empty text."""
    if found is None:
        raise AssertionError("the pattern matches the empty text")
    return found
