"""The ids that a resource offers to kubelet, few or very many.

A whole GPU or a replica is one id each. Memory is counted in ids too, one for each MiB of every
card in the worst case, so that a node has a hundred thousand; those are `NumberedIds`, which make
each `DeviceId` on request instead of keeping them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceId:
    """One opaque id that a resource offers to kubelet, and the device behind it.

    Attributes:
        id: what kubelet hands back; unique across all resources of a family (kubelet §11, V17).
        device: UUID of the GPU or MIG instance.
        numa_node: NUMA node reported to the kubelet, or None for no topology.
    """

    id: str
    device: str
    numa_node: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ListedDevice:
    """One entry of the list for the kubelet: the id and whether it may be given to a container."""

    id: DeviceId
    healthy: bool


# more than any count has; a hostile id cannot make us read a number of a million digits
_MOST_DIGITS = 18


@dataclasses.dataclass(frozen=True, slots=True)
class IdBlock:
    """``count`` ids of one device: ``prefix`` followed by 0, 1, …"""

    prefix: str
    count: int
    device: str
    numa_node: int | None = None

    def number(self, id_: str) -> int | None:
        """The number behind the prefix; None when this block does not contain the id."""
        if not id_.startswith(self.prefix):
            return None
        digits = id_[len(self.prefix) :]
        if (
            not digits.isdecimal()
            or not digits.isascii()
            or (digits[0] == "0" and digits != "0")
            or len(digits) > _MOST_DIGITS
        ):
            return None
        number = int(digits)
        return number if number < self.count else None

    def find(self, id_: str) -> DeviceId | None:
        """The id of that text, None when this block does not contain it."""
        return DeviceId(id_, self.device, self.numa_node) if self.number(id_) is not None else None


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedIds(Sequence[DeviceId]):
    """Many ids, kept as one block a device. Equal when the blocks are."""

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
                yield DeviceId(f"{block.prefix}{number}", block.device, block.numa_node)

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
                return DeviceId(f"{block.prefix}{place}", block.device, block.numa_node)
            place -= block.count
        raise IndexError(index)

    def find(self, id_: str) -> DeviceId | None:
        """The id of that text, None when it is not among them."""
        return next((found for block in self.blocks if (found := block.find(id_))), None)

    def device(self, id_: str) -> str | None:
        """The device behind the id of that text, None when it is not among them."""
        for block in self.blocks:
            if block.number(id_) is not None:
                return block.device
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedList(Sequence[ListedDevice]):
    """The list of `NumberedIds` for the kubelet: all ids of a block are healthy or none.
    Equal when both parts are.

    Attributes:
        blocks: each with whether its ids may be given to a container.
        others: ids that are not offered any more and still held, of unhealthy devices.
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
                return ListedDevice(NumberedIds((block,))[place], healthy)
            place -= block.count
        if place < 0:
            raise IndexError(index)
        return self.others[place]


_HEALTH_FIELD_BYTES = 11  # tag, length and the longer of the two words, "Unhealthy"


def list_size_bytes(ids: Iterable[DeviceId]) -> int:
    """Size of the largest list for the kubelet that these ids can lead to: all of them Unhealthy,
    two bytes more an id (kubelet §10).

    Only a sum: it is asked about lists that are far too long.
    """
    if not isinstance(ids, NumberedIds):
        return sum(map(element_size_bytes, ids))
    return sum(
        (largest - smallest)
        * element_size_bytes(DeviceId(f"{block.prefix}{smallest}", block.device, block.numa_node))
        for block in ids.blocks
        for smallest, largest in equally_long(block.count)
    )


def element_size_bytes(device: DeviceId) -> int:
    """Size of one unhealthy id in such a list."""
    size = _delimited(len(device.id.encode())) + _HEALTH_FIELD_BYTES
    # an id without a known node has no topology
    if device.numa_node is not None and device.numa_node >= 0:
        size += _delimited(
            _delimited(1 + _varint_size(device.numa_node) if device.numa_node else 0)
        )
    return _delimited(size)


def equally_long(count: int) -> Iterator[tuple[int, int]]:
    """The numbers from 0 to ``count`` as ranges within which all have as many digits:
    [0, 10), [10, 100), …
    """
    smallest, end = 0, 10
    while smallest < count:
        yield smallest, min(end, count)
        smallest, end = end, end * 10


def _delimited(length: int) -> int:
    """Bytes of a protobuf field of that length, with its tag."""
    return 1 + _varint_size(length) + length


def _varint_size(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
