"""A strict reader of the kubelet's protobuf bytes.

The generated code encodes byte for byte like Google's, but its decoder silently accepts truncated
messages and wrong wire types, fails on others with arbitrary exceptions, and is slow. The messages
that we read are few and flat, so `codec` reads them with this instead.

Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class MalformedError(ValueError):
    """The bytes are no protobuf message, or a field is not of the kind
    that its message prescribes.
    """


VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


def fields(encoded: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Field number, wire type and value of each field, in order;
    the value is bytes for anything but a varint.

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
        MalformedError: there is no field.
    """
    tag = encoded[position]
    if tag < 0x80:  # one-byte tags are nearly all there is
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
    following = position + length
    if number == 0 or following > len(encoded):
        raise MalformedError(f"field {number} at byte {position} is longer than the message")
    return number, wire_type, encoded[position:following], following


def messages(encoded: bytes, number: int) -> Iterator[bytes]:
    """The encoded messages of a repeated message field."""
    return (nested(value) for found, _, value in fields(encoded) if found == number)


def string(encoded: bytes, number: int) -> str:
    """A string field that should be there once, of which the last one counts;
    empty when it is missing.
    """
    return next(iter(strings(encoded, number)[-1:]), "")


def strings(encoded: bytes, number: int) -> tuple[str, ...]:
    """The values of a repeated string field."""
    found, position, end = [], 0, len(encoded)
    tag = number << 3 | LENGTH_DELIMITED if number < 16 else None
    # A request has hundreds of ids, all of them fields of this number, ASCII, and shorter than 128
    # bytes; then a byte is a character.
    characters = encoded.decode("ascii") if encoded.isascii() else ""
    while position < end:
        following = position + 2
        if (
            characters
            and encoded[position] == tag
            and following < end
            and following + encoded[position + 1] <= end
        ):
            position = following + encoded[position + 1]
            found.append(characters[following:position])
            continue
        this, _, value, position = field(encoded, position)
        if this == number:
            found.append(text(value))
    return tuple(found)


def text(value: int | bytes) -> str:
    """The value of a string field.

    Raises:
        MalformedError: it is a number, or not UTF-8.
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
    """The value of an int32 or int64 field; negative numbers come as their 64-bit complement.

    Raises:
        MalformedError: the field holds no number.
    """
    if not isinstance(value, int):
        raise MalformedError("expected a number, got bytes")
    return value - (1 << 64) if value >= 1 << 63 else value


def delimited(number: int, encoded: bytes) -> bytes:
    """Text, or a message, as the field of that number, which is below 16."""
    return bytes([number << 3 | LENGTH_DELIMITED]) + varint(len(encoded)) + encoded


def varint(value: int) -> bytes:
    """``value``, not negative, as protobuf writes lengths and tags."""
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
