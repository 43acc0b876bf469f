"""Decode protobuf messages of other programs, strictly and fast.

The generated code encodes byte for byte like Google's. But its decoder silently accepts truncated
messages and wrong wire types, raises arbitrary exceptions for other malformed messages, and is
slow. The agent reads few kinds of messages, with little nesting, so they are decoded with this
module instead: by `kubelet.codec` and by `runtime.process_registry`.

Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class MalformedError(ValueError):
    """The bytes are no protobuf message, or a field does not have the type that it must have."""


# Wire types
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


def fields(encoded: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """The number, wire type and value of each field, in order. The value of a varint is an int, any
    other value is bytes.

    Raises:
        MalformedError: the bytes are no protobuf message.
    """
    position, end = 0, len(encoded)
    while position < end:
        number, wire_type, value, position = field(encoded, position)
        yield number, wire_type, value


def field(encoded: bytes, position: int) -> tuple[int, int, int | bytes, int]:
    """Field number, wire type and value of the field at ``position``, and the position after it.

    Raises:
        MalformedError: the bytes there are no field.
    """
    tag = encoded[position]
    if tag < 0x80:  # nearly all tags are one byte long
        position += 1
    else:
        tag, position = _varint(encoded, position)
    number, wire_type = tag >> 3, tag & 7
    if wire_type == VARINT:
        value, position = _varint(encoded, position)
        return number, wire_type, value, position
    if wire_type == LENGTH_DELIMITED:
        length, position = _varint(encoded, position)
    elif wire_type in {FIXED32, FIXED64}:
        length = 4 if wire_type == FIXED32 else 8
    else:
        raise MalformedError(f"unknown wire type {wire_type} at byte {position}")
    end = position + length
    if number == 0 or end > len(encoded):
        raise MalformedError(f"field {number} at byte {position} is longer than the message")
    return number, wire_type, encoded[position:end], end


def messages(encoded: bytes, number: int) -> Iterator[bytes]:
    """The encoded messages of a repeated message field."""
    return (nested(value) for found, _, value in fields(encoded) if found == number)


def string(encoded: bytes, number: int) -> str:
    """The value of a string field that is not repeated; empty when it is missing. Where it occurs
    more than once, the last one counts, as protobuf demands.
    """
    return next(iter(strings(encoded, number)[-1:]), "")


def strings(encoded: bytes, number: int) -> tuple[str, ...]:
    """The values of a repeated string field."""
    values, position, end = [], 0, len(encoded)
    tag = number << 3 | LENGTH_DELIMITED if number < 16 else None
    # A request may have hundreds of ids. They are ASCII and shorter than 128 bytes, so a fast path
    # decodes the message once and cuts the ids out of the text: a byte is a character, and each
    # length is one byte.
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
        found, _, value, position = field(encoded, position)
        if found == number:
            values.append(text(value))
    return tuple(values)


def text(value: int | bytes) -> str:
    """The value of a string field.

    Raises:
        MalformedError: the field holds a number, or its bytes are not UTF-8.
    """
    try:
        return nested(value).decode()
    except UnicodeDecodeError as err:
        raise MalformedError(f"a string is not UTF-8 ({err.reason})") from err


def nested(value: int | bytes) -> bytes:
    """The encoded message in a message field.

    Raises:
        MalformedError: the field holds a number instead.
    """
    if isinstance(value, int):
        raise MalformedError(f"expected text or a message, got the number {value}")
    return value


def integer(value: int | bytes) -> int:
    """The value of an int32 or int64 field. A negative number is encoded as its 64-bit two's
    complement.

    Raises:
        MalformedError: the field holds no number.
    """
    if not isinstance(value, int):
        raise MalformedError("expected a number, got bytes")
    return value - (1 << 64) if value >= 1 << 63 else value


def delimited(number: int, encoded: bytes) -> bytes:
    """Encode a field that holds a text or a message, already encoded. Its number is below 16."""
    return bytes([number << 3 | LENGTH_DELIMITED]) + varint(len(encoded)) + encoded


def varint(value: int) -> bytes:
    """Encode ``value``, which must not be negative, as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(encoded: bytes, position: int) -> tuple[int, int]:
    """The varint at ``position`` and the position after it."""
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
