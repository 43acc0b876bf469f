"""The ids of cores and memory: the card's number and a count, packed into a few characters
(vgpu-manager §2.2, §13.2).

A node has hundreds of thousands of them, so `device_ids.NumberedIds` makes each on request, with
one codec (`device_ids.IdCodec`) for each card.
"""

from __future__ import annotations

import binascii

import msgspec

CARDS = 256
"""The most cards that ids can tell apart: the number takes one byte of the packed value."""

_LONGEST = 14  # characters of a varint of ten bytes, the longest that protobuf has
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")


class PackedIds(msgspec.Struct, frozen=True):
    """The texts of one card's ids: ``count << 8 | card`` as a protobuf varint, in the URL alphabet
    of base64 without padding.

    Attributes:
        card: its number on the node, below `CARDS`.
    """

    card: int

    def text(self, number: int) -> str:
        """Return the text of the id with the count ``number``."""
        value = number << 8 | self.card
        varint = bytearray()
        while value > 0x7F:
            varint.append(value & 0x7F | 0x80)
            value >>= 7
        varint.append(value)
        return binascii.b2a_base64(varint, newline=False).rstrip(b"=").translate(_TO_URL).decode()

    def number(self, text: str) -> int | None:
        """Return the count of an id; None for a text that is not one of our ids, even if it decodes
        to such a count.
        """
        if not 0 < len(text) <= _LONGEST or not text.isascii():
            return None
        padded = text.encode().translate(_FROM_URL) + b"=" * (-len(text) % 4)
        try:
            varint = binascii.a2b_base64(padded)
        except binascii.Error:
            return None
        value = 0
        for place, byte in enumerate(varint):
            value |= (byte & 0x7F) << 7 * place
        number = value >> 8
        return number if value & 0xFF == self.card and self.text(number) == text else None
