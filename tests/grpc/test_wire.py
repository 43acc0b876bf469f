"""The strict protobuf reader: right about every message, and an error for everything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.grpc import wire
from vgpu_agent.sim.protocol import deviceplugin_pb2 as google


def test_fields_come_in_order_with_number_type_and_value() -> None:
    """A message is a sequence of tagged values."""
    encoded = google.ContainerPreferredAllocationRequest(
        available_device_ids=["a", "b"], allocation_size=300
    ).SerializeToString()

    assert list(wire.fields(encoded)) == [(1, 2, b"a"), (1, 2, b"b"), (3, 0, 300)]


def test_fixed_width_fields_are_passed_over() -> None:
    """A field that a newer kubelet may add does not disturb, whatever its type."""
    assert list(wire.fields(b"\x0d\x01\x02\x03\x04" + b"\x11" + bytes(8) + b"\x18\x05")) == [
        (1, 5, b"\1\2\3\4"),
        (2, 1, bytes(8)),
        (3, 0, 5),
    ]


def test_tags_above_fifteen_have_two_bytes() -> None:
    """Field numbers up to 15 fit into one byte, others do not."""
    assert list(wire.fields(b"\x82\x01\x01x")) == [(16, 2, b"x")]


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        (b"\x0a\x05g", "longer than the message"),
        (b"\x0a", "ends in the middle of a number"),
        (b"\x08\xff", "ends in the middle of a number"),
        (b"\x08" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x0b", "unknown wire type 3"),
        (b"\x02\x00", "field 0"),
        (b"\x0d\x01", "longer than the message"),
    ],
)
def test_broken_bytes_are_refused(encoded: bytes, complaint: str) -> None:
    """Truncated and impossible messages are errors,
    unlike in the generated decoder (conformance table, "truncated input").
    """
    with pytest.raises(wire.MalformedError, match=complaint):
        list(wire.fields(encoded))


_FIELD = st.one_of(
    st.tuples(st.sampled_from([1, 2, 16, 17]), st.text(max_size=200)).map(
        lambda each: (
            wire.encode_varint(each[0] << 3 | 2)
            + wire.encode_varint(len(each[1].encode()))
            + each[1].encode()
        )
    ),
    st.tuples(st.sampled_from([1, 2, 16]), st.integers(0, 1 << 40)).map(
        lambda each: wire.encode_varint(each[0] << 3) + wire.encode_varint(each[1])
    ),
    st.binary(max_size=4),
)


@given(encoded=st.lists(_FIELD, max_size=6).map(b"".join), number=st.sampled_from([1, 2, 16, 17]))
def test_the_strings_of_a_field_are_what_its_fields_hold(encoded: bytes, number: int) -> None:
    """The short way for hundreds of ids gives the same as the long one,
    for good bytes and for bad ones.
    """

    def answer(strings: Callable[[], tuple[str, ...]]) -> tuple[str, ...] | str:
        try:
            return strings()
        except wire.MalformedError:
            return "malformed"

    expected = answer(
        lambda: tuple(
            wire.to_text(value) for found, _, value in wire.fields(encoded) if found == number
        )
    )

    assert answer(lambda: wire.strings(encoded, number)) == expected


def test_text_must_be_utf8() -> None:
    """A string field with other bytes is refused."""
    with pytest.raises(wire.MalformedError, match="not UTF-8"):
        wire.to_text(b"\xff\xfe")


def test_wrong_kinds_of_value_are_refused() -> None:
    """A number where text belongs, and the other way round (conformance table,
    "wrong wire type").
    """
    with pytest.raises(wire.MalformedError, match="got the number 5"):
        wire.to_text(5)
    with pytest.raises(wire.MalformedError, match="got bytes"):
        wire.to_integer(b"5")


@given(st.integers(min_value=-(2**31), max_value=2**31 - 1))
def test_integers_agree_with_google(size: int) -> None:
    """Every int32, negative ones included, is read as Google writes it."""
    encoded = google.ContainerPreferredAllocationRequest(allocation_size=size).SerializeToString()

    assert [wire.to_integer(value) for _, _, value in wire.fields(encoded)] == (
        [size] if size else []
    )


@given(st.integers(min_value=0, max_value=2**63))
def test_varints_are_read_as_written(value: int) -> None:
    """Writing and reading are each other's inverse."""
    assert list(wire.fields(b"\x08" + wire.encode_varint(value))) == [(1, 0, value)]


@given(st.binary(max_size=200))
def test_junk_is_refused_or_read_but_nothing_else(encoded: bytes) -> None:
    """No bytes lead to another exception."""
    try:
        read = list(wire.fields(encoded))
    except wire.MalformedError:
        return
    assert all(number > 0 or kind == wire.VARINT for number, kind, _ in read)
