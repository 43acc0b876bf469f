"""A list that has become too long while the agent runs: it is withheld with its remedy, and no loop ends for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from blockbuster import BlockBuster

from tests.agent.volcano_parts import Wired, volcano_settings, wired
from tests.golden import golden_inventory
from vgpu_agent.config import settings as schema
from vgpu_agent.config.binding import Families
from vgpu_agent.errors import ConfigError
from vgpu_agent.model import Inventory

GPU, REPLICAS = "nvidia.com/gpu", 40


@pytest.fixture(autouse=True)
def _library_reads_files(_no_blocked_loop: BlockBuster | None) -> None:
    """As in the tests of the wiring."""
    assert _no_blocked_loop is not None
    _no_blocked_loop.deactivate()


async def one_gpu_fits(folder: Path) -> schema.Settings:
    """A budget for the list of one shared GPU, but not of two."""
    settings = await volcano_settings(folder, None, families=Families())
    sharing = schema.Sharing(schema.TimeSlicing(resources=(schema.SharedResource(name=GPU, replicas=REPLICAS),)))
    return msgspec.structs.replace(settings, sharing=sharing, kubelet=msgspec.structs.replace(settings.kubelet, message_budget_bytes=4096))


def first_gpu() -> Inventory:
    """The inventory before the second GPU has answered."""
    whole = golden_inventory()
    return dataclasses.replace(whole, gpus=whole.gpus[:1])


async def look_again(parts: Wired) -> None:
    """What `composition` does when something outside the configuration may have changed."""
    await parts.families.again()
    await parts.offering.sync()


async def test_a_gpu_that_makes_the_list_too_long_withholds_it_instead_of_raising(tmp_path: Path) -> None:
    """The look comes from the loop of the watch or of the grants, which must go on."""
    settings = await one_gpu_fits(tmp_path)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        await look_again(parts)
        assert (parts.offering.withheld, parts.offered) == ({}, {GPU: REPLICAS})
        parts.inventory = golden_inventory()
        await look_again(parts)
        assert "replicas: at most" in parts.offering.withheld[GPU]


async def test_it_is_offered_again_once_it_fits(tmp_path: Path) -> None:
    """The second GPU is taken out of the node."""
    settings = await one_gpu_fits(tmp_path)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        parts.inventory = golden_inventory()
        await look_again(parts)
        parts.inventory = first_gpu()
        await look_again(parts)
        assert parts.offering.withheld == {}
        assert parts.offered == {GPU: REPLICAS}


async def test_whoever_asks_for_it_by_a_configuration_hears_at_once(tmp_path: Path) -> None:
    """A reloaded file that asks for too much is refused as a whole; that is the reader's to say, not the readiness's."""
    settings = await one_gpu_fits(tmp_path)
    async with wired(settings) as parts:
        with pytest.raises(ConfigError, match="replicas: at most"):
            await parts.families.apply(settings)
        assert parts.offering.withheld == {}
