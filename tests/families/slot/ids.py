"""The family's ids: the GPU's index and a number as a protobuf varint, in base64.

vgpu-manager's ids of memory and cores have this form (vgpu-manager §2.2).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses

_ALPHABET = b"-_"
_LONGEST = 14  # of a varint of ten bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """The codec of one GPU's ids."""

    index: int

    def text(self, number: int) -> str:
        value = number << 8 | self.index
        varint = bytearray()
        while value > 0x7F:
            varint.append(value & 0x7F | 0x80)
            value >>= 7
        varint.append(value)
        return base64.b64encode(varint, _ALPHABET).rstrip(b"=").decode()

    def number(self, text: str) -> int | None:
        if len(text) > _LONGEST:
            return None
        try:
            varint = base64.b64decode(text + "=" * (-len(text) % 4), _ALPHABET)
        except (binascii.Error, ValueError):
            return None
        value = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
        # what is not in its one form is another id
        return value >> 8 if value & 0xFF == self.index and self.text(value >> 8) == text else None
