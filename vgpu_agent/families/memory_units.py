"""Choose how many MiB one memory id stands for,
so that the list of all of them fits into one message to the kubelet.

Memory is counted in ids, so a node with eight 80 GB cards would have 650,000 of them at one MiB
each, and the kubelet drops the connection at 4 MiB (kubelet §10). Called by the families that offer
memory, before anything is registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent import device_ids

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_FACTOR = 65536  # MiB in one id; the largest that the settings allow


def smallest_fitting_factor(size_bytes: Callable[[int], int]) -> int | None:
    """The smallest power of two with which the list fits;
    None when not even the largest factor makes it small enough.

    Args:
        size_bytes: the list's size with that many MiB in one id.
    """
    budget_bytes = device_ids.MESSAGE_BUDGET_BYTES
    factors = (1 << power for power in range(LARGEST_FACTOR.bit_length()))
    return next((factor for factor in factors if size_bytes(factor) <= budget_bytes), None)
