"""The ids that a resource offers to the kubelet, few or very many.

Each whole GPU, and each replica of one, has one id. Memory is counted in ids too, one for each MiB
of every card in the worst case, so that a node has a hundred thousand. Those are `NumberedIds`,
which make each `DeviceId` on request instead of keeping them all.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, overload

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class DeviceId(msgspec.Struct, frozen=True):
    """One opaque id that a resource offers to the kubelet, and the device behind it.

    Attributes:
        id: what the kubelet hands back; unique across all resources of a family (kubelet §11, V17).
        device: UUID of the GPU or MIG instance.
        numa_node: the NUMA node that is reported to the kubelet; None to report none.
    """

    id: str
    device: str
    numa_node: int | None = None


class ListedDevice(msgspec.Struct, frozen=True):
    """One entry of the list for the kubelet: the id and whether it may be given to a container."""

    id: DeviceId
    healthy: bool


class IdCodec(Protocol):
    """The texts that stand for the numbers of the ids of one device (`IdBlock`).

    By default they are decimal digits; vgpu-manager's ids have another form.

    Texts are ASCII, each stands for one number only, and a greater number never has a shorter one.
    Codecs that give the same texts are equal.
    """

    def text(self, number: int) -> str:
        """Return the text of a number from 0."""
        ...

    def number(self, text: str) -> int | None:
        """Return the number whose text this is, exactly; None for every other text, however long:
        it may be hostile.
        """
        ...


# more than any count has; a hostile id cannot make us read a number of a million digits
_MAX_DIGITS = 18


class Decimal(msgspec.Struct, frozen=True):
    """Decimal digits without leading zeros."""

    text = staticmethod(str)  # fast, because a list has tens of thousands of ids

    def number(self, text: str) -> int | None:
        """See `IdCodec`."""
        if len(text) > _MAX_DIGITS or not text.isdecimal() or not text.isascii():
            return None
        return int(text) if text[0] != "0" or text == "0" else None


DECIMAL = Decimal()


class IdBlock(msgspec.Struct, frozen=True):
    """The ``count`` ids of one device: ``prefix`` followed by the texts of 0, 1, …"""

    prefix: str
    count: int
    device: str
    numa_node: int | None = None
    codec: IdCodec = DECIMAL

    def text(self, number: int) -> str:
        """Return the id of that number."""
        return f"{self.prefix}{self.codec.text(number)}"

    def number(self, id_: str) -> int | None:
        """Return the number of an id; None when this block does not contain it."""
        if not id_.startswith(self.prefix):
            return None
        number = self.codec.number(id_[len(self.prefix) :])
        return number if number is not None and number < self.count else None

    def at(self, number: int) -> DeviceId:
        """Return the id of that number, with its device."""
        return DeviceId(self.text(number), self.device, self.numa_node)

    def equally_long(self) -> Iterator[tuple[int, int]]:
        """Return the numbers as ranges within which all texts have one length:
        [0, 10), [10, 100), …
        """
        start = 0
        while start < self.count:
            length = len(self.codec.text(start))
            end = start + bisect.bisect_right(
                range(start, self.count), length, key=lambda number: len(self.codec.text(number))
            )
            yield start, end
            start = end

    def find(self, id_: str) -> DeviceId | None:
        """Return the id of that text; None when this block does not contain it."""
        return DeviceId(id_, self.device, self.numa_node) if self.number(id_) is not None else None


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedIds(Sequence[DeviceId]):
    """Many ids, kept as one block per device. Equal when the blocks are."""

    blocks: tuple[IdBlock, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices behind the blocks, in their order."""
        return tuple(dict.fromkeys(block.device for block in self.blocks))

    def __len__(self) -> int:
        return sum(block.count for block in self.blocks)

    def __iter__(self) -> Iterator[DeviceId]:
        for block in self.blocks:
            for number in range(block.count):
                yield block.at(number)

    @overload
    def __getitem__(self, index: int) -> DeviceId: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DeviceId]: ...
    def __getitem__(self, index: int | slice) -> DeviceId | Sequence[DeviceId]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + len(self) if index < 0 else index
        for block in self.blocks:
            if 0 <= place < block.count:
                return block.at(place)
            place -= block.count
        raise IndexError(index)

    def find(self, id_: str) -> DeviceId | None:
        """Return the id of that text; None when it is not among them."""
        return next((found for block in self.blocks if (found := block.find(id_))), None)

    def device(self, id_: str) -> str | None:
        """Return the device behind the id of that text; None when it is not among them."""
        for block in self.blocks:
            if block.number(id_) is not None:
                return block.device
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedList(Sequence[ListedDevice]):
    """The list of `NumberedIds` for the kubelet: all ids of a block are healthy or none. Equal when
    both parts are.

    Attributes:
        blocks: each with whether its ids may be given to a container.
        others: ids that are still held although they are not offered any more, most of them of
            unhealthy devices.
    """

    blocks: tuple[tuple[IdBlock, bool], ...]
    others: tuple[ListedDevice, ...] = ()

    @property
    def healthy_count(self) -> int:
        """Number of ids that may be given to a container."""
        return sum(block.count for block, healthy in self.blocks if healthy) + sum(
            entry.healthy for entry in self.others
        )

    def __len__(self) -> int:
        return sum(block.count for block, _ in self.blocks) + len(self.others)

    def __iter__(self) -> Iterator[ListedDevice]:
        for block, healthy in self.blocks:
            for entry in NumberedIds((block,)):
                yield ListedDevice(entry, healthy)
        yield from self.others

    @overload
    def __getitem__(self, index: int) -> ListedDevice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ListedDevice]: ...
    def __getitem__(self, index: int | slice) -> ListedDevice | Sequence[ListedDevice]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + len(self) if index < 0 else index
        for block, healthy in self.blocks:
            if 0 <= place < block.count:
                return ListedDevice(block.at(place), healthy)
            place -= block.count
        if place < 0:
            raise IndexError(index)
        return self.others[place]


# Largest device list that is sent. The kubelet refuses a message of 4 MiB (the default limit of its
# gRPC library) and drops the stream that carried it; this keeps a reserve below that.
MESSAGE_BUDGET_BYTES = 3_670_016
_MEBIBYTE = 1024 * 1024
_HEALTH_FIELD_BYTES = 11  # tag, length and the longer of the two words, "Unhealthy"


def list_size_bytes(ids: Iterable[DeviceId]) -> int:
    """Size of the largest list for the kubelet that these ids can lead to: all of them Unhealthy,
    which takes two bytes more per id (kubelet §10).

    No list is made for it, because some are far too long.
    """
    if not isinstance(ids, NumberedIds):
        return sum(map(element_size_bytes, ids))
    return sum(
        (end - start) * element_size_bytes(block.at(start))
        for block in ids.blocks
        for start, end in block.equally_long()
    )


def why_too_long(size_bytes: int) -> str:
    """Explain by how much a device list of that size exceeds a message, as the end of a sentence
    about its ids; empty when it fits.
    """
    if size_bytes <= MESSAGE_BUDGET_BYTES:
        return ""
    return (
        f"make a device list of {size_bytes / _MEBIBYTE:.2f} MiB, and the agent sends at most "
        f"{MESSAGE_BUDGET_BYTES / _MEBIBYTE:.2f} MiB, because the kubelet refuses 4 MiB"
    )


def element_size_bytes(device: DeviceId) -> int:
    """Size of one unhealthy id in such a list."""
    size = _delimited(len(device.id.encode())) + _HEALTH_FIELD_BYTES
    # an id without a known NUMA node has no topology
    if device.numa_node is not None and device.numa_node >= 0:
        size += _delimited(
            _delimited(1 + _varint_size(device.numa_node) if device.numa_node else 0)
        )
    return _delimited(size)


def _delimited(length: int) -> int:
    """Bytes of a protobuf field of that length, with its tag."""
    return 1 + _varint_size(length) + length


def _varint_size(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
