"""A strict and fast decoder for protobuf messages, and an encoder for single fields.

The encoder of the classes that are generated from .proto files (`protocol`) gives the same bytes as
Google's. But their decoder silently accepts truncated messages and wrong wire types, raises
arbitrary exceptions for other malformed messages, and is slow. The agent reads only a few kinds of
messages, with little nesting. So `kubelet.codec`, `kubelet.held_ids` and `runtime.process_registry`
decode them with this module.

Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class MalformedError(ValueError):
    """The bytes are not a protobuf message, or a field has the wrong type."""


# Wire types
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


def fields(encoded: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Iterate over the fields of a message: (number, wire type, value). The value of a varint is an
    int, any other value is bytes.

    Raises:
        MalformedError: the bytes are not a protobuf message.
    """
    position, end = 0, len(encoded)
    while position < end:
        number, wire_type, value, position = read_field(encoded, position)
        yield number, wire_type, value


def read_field(encoded: bytes, position: int) -> tuple[int, int, int | bytes, int]:
    """Decode the field at ``position``; return its number, wire type and value, and the position
    after it.

    Raises:
        MalformedError: the bytes at ``position`` are not a field.
    """
    tag = encoded[position]
    if tag < 0x80:  # nearly all tags are one byte long
        position += 1
    else:
        tag, position = _decode_varint(encoded, position)
    number, wire_type = tag >> 3, tag & 7
    if wire_type == VARINT:
        value, position = _decode_varint(encoded, position)
        return number, wire_type, value, position
    if wire_type == LENGTH_DELIMITED:
        length, position = _decode_varint(encoded, position)
    elif wire_type in {FIXED32, FIXED64}:
        length = 4 if wire_type == FIXED32 else 8
    else:
        raise MalformedError(f"unknown wire type {wire_type} at byte {position}")
    end = position + length
    if number == 0 or end > len(encoded):
        raise MalformedError(f"field {number} at byte {position} is longer than the message")
    return number, wire_type, encoded[position:end], end


def messages(encoded: bytes, number: int) -> Iterator[bytes]:
    """Iterate over the encoded messages of the repeated message field ``number``."""
    return (to_bytes(value) for found, _, value in fields(encoded) if found == number)


def string(encoded: bytes, number: int) -> str:
    """Return the value of the singular string field ``number``; empty if it is missing. If the
    field occurs more than once, the last value counts, as protobuf requires.
    """
    return next(iter(strings(encoded, number)[-1:]), "")


def strings(encoded: bytes, number: int) -> tuple[str, ...]:
    """Return the values of the repeated string field ``number``."""
    values, position, end = [], 0, len(encoded)
    tag = number << 3 | LENGTH_DELIMITED if number < 16 else None
    # A request may have hundreds of ids, in ASCII and shorter than 128 bytes. A fast path for them
    # decodes the whole message once and slices the ids out of the text, because each byte is one
    # character, and each length takes one byte.
    characters = encoded.decode("ascii") if encoded.isascii() else ""
    while position < end:
        start = position + 2  # after the tag and the length
        if (
            characters
            and encoded[position] == tag
            and start < end
            and start + encoded[position + 1] <= end
        ):
            position = start + encoded[position + 1]
            values.append(characters[start:position])
            continue
        found, _, value, position = read_field(encoded, position)
        if found == number:
            values.append(to_text(value))
    return tuple(values)


def to_text(value: int | bytes) -> str:
    """Convert the value of a field from `fields` to the text of a string field.

    Raises:
        MalformedError: the field holds a number, or its bytes are not UTF-8.
    """
    try:
        return to_bytes(value).decode()
    except UnicodeDecodeError as err:
        raise MalformedError(f"a string is not UTF-8 ({err.reason})") from err


def to_bytes(value: int | bytes) -> bytes:
    """Convert the value of a field from `fields` to the encoded content of a message field.

    Raises:
        MalformedError: the field holds a number.
    """
    if isinstance(value, int):
        raise MalformedError(f"expected text or a message, got the number {value}")
    return value


def to_integer(value: int | bytes) -> int:
    """Convert the value of a field from `fields` to the number of an int32 or int64 field. Negative
    numbers are encoded as 64-bit two's complement.

    Raises:
        MalformedError: the field holds no number.
    """
    if not isinstance(value, int):
        raise MalformedError("expected a number, got bytes")
    return value - (1 << 64) if value >= 1 << 63 else value


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a string or message field.

    Args:
        number: the field number, below 16.
        content: the encoded text or message.
    """
    return bytes([number << 3 | LENGTH_DELIMITED]) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    """Encode ``value``, which must not be negative, as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode_varint(encoded: bytes, position: int) -> tuple[int, int]:
    """Decode the varint at ``position``; return its value and the position after it."""
    value = shift = 0
    try:
        while True:
            byte = encoded[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7
            if shift > 63:
                raise MalformedError(f"a number at byte {position} is longer than 64 bits")
    except IndexError as err:
        raise MalformedError(f"it ends in the middle of a number, at byte {position}") from err
