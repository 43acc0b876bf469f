"""The ids that a resource offers to kubelet, few or very many.

A whole GPU or a replica is one id each. Memory is counted in ids too, one for each MiB of every card in the worst case, so that a node has
a hundred thousand; those are `NumberedIds`, which make each `DeviceId` when somebody asks for it instead of keeping them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceId:
    """One opaque id that a resource offers to kubelet, and the device behind it.

    Attributes:
        id: what kubelet hands back; unique across all resources of the node (kubelet contract §11, V17).
        device: UUID of the GPU or MIG instance.
        numa_node: NUMA node told to kubelet, or None for no topology.
    """

    id: str
    device: str
    numa_node: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ListedDevice:
    """One entry of the list that kubelet is to see: the id and whether it may be given to somebody."""

    id: DeviceId
    healthy: bool


@dataclasses.dataclass(frozen=True, slots=True)
class IdBlock:
    """``count`` ids of one device: ``prefix`` followed by 0, 1, …"""

    prefix: str
    count: int
    device: str
    numa_node: int | None = None

    def find(self, id_: str) -> DeviceId | None:
        """The id of that text, None when this block does not contain it."""
        number = id_.removeprefix(self.prefix)
        canonical = len(number) < len(id_) and number.isdecimal() and number.isascii() and str(int(number)) == number
        return DeviceId(id_, self.device, self.numa_node) if canonical and int(number) < self.count else None


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
