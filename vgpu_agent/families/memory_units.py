"""Choose how many MiB one memory id stands for, so that the list of all of them fits into one message to the kubelet.

Memory is counted in ids, so a node with eight 80 GB cards would have 650,000 of them at one MiB each, and kubelet drops the connection at
4 MiB (kubelet §10). Called by the families that offer memory, before anything is registered. Only sums: no list is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.device_ids import IdBlock, NumberedIds

LARGEST_FACTOR = 65536  # MiB in one id; the largest that the settings allow

_HEALTH_FIELD_BYTES = 11  # tag, length and the longer of the two words, "Unhealthy"


def list_bytes(ids: NumberedIds) -> int:
    """Size of the largest message that these ids can lead to: all of them unhealthy, and without topology."""
    return sum(_block_bytes(block) for block in ids.blocks)


def smallest_fitting_factor(size_bytes: Callable[[int], int], budget_bytes: int) -> int | None:
    """The smallest power of two with which the list fits; None when not even the largest factor makes it small enough.

    Args:
        size_bytes: the list's size with that many MiB in one id.
        budget_bytes: what the list may take.
    """
    factors = (1 << power for power in range(LARGEST_FACTOR.bit_length()))
    return next((factor for factor in factors if size_bytes(factor) <= budget_bytes), None)


def _block_bytes(block: IdBlock) -> int:
    size, digits, smallest = 0, 1, 0  # `smallest` is the first number with so many digits
    prefix = len(block.prefix.encode())
    while smallest < block.count:
        largest = min(block.count, 10**digits)
        size += (largest - smallest) * _delimited(_delimited(prefix + digits) + _HEALTH_FIELD_BYTES)
        smallest, digits = largest, digits + 1
    return size


def _delimited(length: int) -> int:
    """Bytes of a protobuf field of that length, with its tag."""
    return 1 + max(1, -(-length.bit_length() // 7)) + length
