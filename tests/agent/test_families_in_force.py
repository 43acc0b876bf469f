"""Changes of the surroundings while the agent runs: what they make impossible is withheld, and nothing else is held up or undone."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest
from blockbuster import BlockBuster

from tests.agent.volcano_parts import NODE, Wired, volcano_settings, wired
from tests.golden import golden_inventory
from vgpu_agent.config import settings as schema
from vgpu_agent.config.binding import Families
from vgpu_agent.config.sharing import SharedResource, Sharing, TimeSlicing
from vgpu_agent.errors import ConfigError
from vgpu_agent.model import Inventory
from vgpu_agent.sim.api_server import ApiServer

GPU, REPLICAS = "nvidia.com/gpu", 40


@pytest.fixture(autouse=True)
def _library_reads_files(_no_blocked_loop: BlockBuster | None) -> None:
    """As in the tests of the wiring."""
    assert _no_blocked_loop is not None
    _no_blocked_loop.deactivate()


def shared(replicas: int) -> Sharing:
    """Each GPU for so many containers of the `nvidia` family."""
    return Sharing(TimeSlicing(resources=(SharedResource(name=GPU, replicas=replicas),)))


async def one_gpu_fits(folder: Path) -> schema.Settings:
    """A budget for the list of one shared GPU, but not of two."""
    settings = await volcano_settings(folder, None, families=Families())
    kubelet = msgspec.structs.replace(settings.kubelet, message_budget_bytes=4096)
    return msgspec.structs.replace(settings, sharing=shared(REPLICAS), kubelet=kubelet)


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


async def test_one_familys_list_that_is_too_long_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """The node's own file says something new about Volcano's shares while `nvidia` waits for fewer replicas."""
    async with ApiServer() as server:
        status = {"nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.1.0"}}
        server.objects.create("nodes", {"metadata": {"name": NODE}, "status": status})
        settings = await volcano_settings(tmp_path, server, families=Families(volcano_vgpu=True), sharing=shared(30_000))
        async with wired(settings, first_gpu()) as parts:
            await parts.families.apply(settings)
            assert parts.offered["volcano.sh/vgpu-number"] == 10
            parts.inventory = golden_inventory()
            (tmp_path / "config.json").write_text('{"nodeconfig":[{"name":"node-a","devicesplitcount":3}]}')
            await look_again(parts)
            assert list(parts.offering.withheld) == [GPU]
            assert parts.offered["volcano.sh/vgpu-number"] == 6


async def test_a_look_during_a_reload_does_not_put_the_old_settings_back(tmp_path: Path) -> None:
    """Both come from loops of their own; the look waits for the reload and then goes by what that has put in force."""
    settings = await one_gpu_fits(tmp_path)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        reloading = asyncio.ensure_future(parts.families.apply(msgspec.structs.replace(settings, sharing=shared(2))))
        await asyncio.sleep(0)
        await look_again(parts)
        await reloading
        assert parts.offered == {GPU: 2}
