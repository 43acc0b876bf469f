"""Allocate while a GPU is being cut anew: what was there a moment ago is not given out."""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.without_pods import without_pods
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger


async def test_a_device_that_went_away_since_the_last_offer_is_refused() -> None:
    """nvidia:D9, nvidia:D12: the offers follow a new inventory when its turn comes. An Allocate
    before that goes by what is there now.
    """
    whole = golden_inventory()
    inventory = whole
    ledger = Ledger()
    families = Families((NvidiaFamily(NvidiaOptions()),))
    allocator = Allocator(
        without_pods(
            ledger=ledger, families=families, inventory=lambda: inventory, journal=Journal()
        )
    )
    allocator.refresh_offer()
    inventory = msgspec.structs.replace(whole, gpus=whole.gpus[:1])

    with pytest.raises(UnhealthyDeviceError, match="the device is gone"):
        await allocator.allocate("nvidia.com/gpu", [U1])

    assert ledger.grants == ()
    assert (await allocator.allocate("nvidia.com/gpu", [U0])).environment[
        "NVIDIA_VISIBLE_DEVICES"
    ] == U0
