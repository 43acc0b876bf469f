"""Changes of dependencies while the agent runs:
they withhold what they make impossible, and delay or undo nothing else.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests import constants
from tests.agent.volcano_parts import NODE, Wired, volcano_settings, wired
from tests.families.volcano_vgpu.mig.parts import a_gpu, mig_family
from tests.golden import SLICES, U1, golden_inventory, golden_slices, with_slices
from tests.settings import switches
from vgpu_agent.allocation.context import Families as AllFamilies
from vgpu_agent.config import settings as schema
from vgpu_agent.config.collisions import duplicate_remedy
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.nvidia.settings import MpsSharing, SharedResource, Sharing, TimeSlicing
from vgpu_agent.families.volcano_gpushare.settings import VolcanoGpushare
from vgpu_agent.families.volcano_vgpu.mig.static import StaticMigOptions, VolcanoStaticMigFamily
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
from vgpu_agent.model import Holding, Inventory, KubeletRecords, Owner
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.sim.stand_in_library import (
    FUNCTIONS,
    REGION_BYTES,
    REGION_VARIABLE,
    deliver_stand_in_library,
    load_instruction,
    shared_object,
)

GPU, MIG, REPLICAS = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", 40


@pytest.fixture(autouse=True)
def _library_reads_files(loop_may_block: None) -> None:
    """Let the library read files on the event loop, as the tests of the wiring do."""


def shared(replicas: int) -> Sharing:
    """Each GPU for so many containers of the `nvidia` family."""
    return Sharing(TimeSlicing(resources=(SharedResource(name=GPU, replicas=replicas),)))


async def one_gpu_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Settings:
    """A budget for the list of one shared GPU, but not of two."""
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 4096})
    settings = await volcano_settings(folder, None, families=switches())
    return msgspec.structs.replace(settings, sharing=shared(REPLICAS))


def first_gpu() -> Inventory:
    """The inventory before the second GPU has answered."""
    whole = golden_inventory()
    return msgspec.structs.replace(whole, gpus=whole.gpus[:1])


def two_models() -> Inventory:
    """One GPU that Volcano's geometries know, and one that they do not."""
    return Inventory(
        version=1, gpus=(a_gpu(), msgspec.structs.replace(a_gpu(U1, index=1), name="NVIDIA A10"))
    )


async def look_again(parts: Wired) -> None:
    """Look again, as `composition` does when something outside the configuration may have
    changed.
    """
    await parts.families.rebuild()
    await parts.offering.sync()


async def test_a_gpu_that_makes_the_list_too_long_withholds_it_instead_of_raising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look comes from the loop of the watch or of the grants, which must go on."""
    settings = await one_gpu_fits(tmp_path, monkeypatch)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        await look_again(parts)
        assert (parts.offering.withheld, parts.offered) == ({}, {GPU: REPLICAS})
        parts.inventory = golden_inventory()
        await look_again(parts)
        assert "replicas: at most" in parts.offering.withheld[GPU]


async def test_it_is_offered_again_once_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU is taken out of the node."""
    settings = await one_gpu_fits(tmp_path, monkeypatch)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        parts.inventory = golden_inventory()
        await look_again(parts)
        parts.inventory = first_gpu()
        await look_again(parts)
        assert parts.offering.withheld == {}
        assert parts.offered == {GPU: REPLICAS}


async def test_whoever_asks_for_it_by_a_configuration_hears_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reloaded file that asks for too much is refused as a whole.
    That is the reader's to say, not the readiness's.
    """
    settings = await one_gpu_fits(tmp_path, monkeypatch)
    async with wired(settings) as parts:
        with pytest.raises(ConfigError, match="replicas: at most"):
            await parts.families.apply(settings)
        assert parts.offering.withheld == {}


async def test_one_familys_list_that_is_too_long_does_not_hold_up_the_others(
    tmp_path: Path,
) -> None:
    """The node's own file says something new about Volcano's shares while `nvidia` waits
    for fewer replicas.
    """
    async with ApiServer() as server:
        status = {
            "nodeInfo": {
                "kubeletVersion": "v1.36.3",
                "containerRuntimeVersion": "containerd://2.1.0",
            }
        }
        server.objects.create("nodes", {"metadata": {"name": NODE}, "status": status})
        settings = await volcano_settings(
            tmp_path, server, families=switches(volcano_vgpu=True), sharing=shared(30_000)
        )
        async with wired(settings, first_gpu()) as parts:
            await parts.families.apply(settings)
            assert parts.offered["volcano.sh/vgpu-number"] == 10
            parts.inventory = golden_inventory()
            (tmp_path / "config.json").write_text(
                '{"nodeconfig":[{"name":"node-a","devicesplitcount":3}]}'
            )
            await look_again(parts)
            assert list(parts.offering.withheld) == [GPU]
            assert parts.offered["volcano.sh/vgpu-number"] == 6


async def test_a_look_during_a_reload_does_not_put_the_old_settings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come from loops of their own. The look waits for the reload
    and then uses its settings.
    """
    settings = await one_gpu_fits(tmp_path, monkeypatch)
    async with wired(settings, first_gpu()) as parts:
        await parts.families.apply(settings)
        reloading = asyncio.ensure_future(
            parts.families.apply(msgspec.structs.replace(settings, sharing=shared(2)))
        )
        await asyncio.sleep(0)
        await look_again(parts)
        await reloading
        assert parts.offered == {GPU: 2}


def in_mig_mode(*, both: bool) -> Inventory:
    """GPU 1 in seven slices; GPU 0 likewise, or whole."""
    divided = {"U1": golden_slices()} | ({"U0": golden_slices(letter="d")} if both else {})
    return with_slices(golden_inventory(), **divided)


async def with_mig(
    folder: Path, strategy: Literal["single", "mixed"], **sections: object
) -> schema.Settings:
    """Settings of the `nvidia` family with that MIG strategy."""
    settings = await volcano_settings(folder, None, families=switches(), **sections)
    return msgspec.structs.replace(
        settings, plugin=msgspec.structs.replace(settings.plugin, mig_strategy=strategy)
    )


async def test_what_one_resource_cannot_offer_withholds_that_resource(tmp_path: Path) -> None:
    """MPS on slices: the readiness has the reason, and whole GPUs are offered."""
    sharing = Sharing(mps=MpsSharing(resources=(SharedResource(name=MIG, replicas=2),)))
    settings = await with_mig(tmp_path, "mixed", sharing=sharing)
    async with wired(settings, in_mig_mode(both=False)) as parts:
        await parts.families.apply(settings)
        await parts.offering.sync()
        assert parts.offered == {GPU: 1}
        assert parts.offering.withheld[MIG].startswith(
            "sharing using MPS is not supported for MIG devices"
        )


async def test_it_is_served_once_nothing_stands_against_it(tmp_path: Path) -> None:
    """nvidia:D9: with migStrategy single the operator switches MIG on for the second GPU, too,
    and later off for both.
    """
    settings = await with_mig(tmp_path, "single")
    async with wired(settings, in_mig_mode(both=False)) as parts:
        await parts.families.apply(settings)
        await parts.offering.sync()
        assert (parts.offered, list(parts.offering.withheld)) == ({}, [GPU])
        parts.inventory = in_mig_mode(both=True)
        await look_again(parts)
        assert (parts.offered, parts.offering.withheld) == ({GPU: 14}, {})
        parts.inventory = golden_inventory()
        await look_again(parts)
        assert (parts.offered, parts.offering.withheld) == ({GPU: 2}, {})


async def test_a_reason_goes_with_what_it_was_about(tmp_path: Path) -> None:
    """The slices are gone, and with them the resource that could not be shared."""
    settings = await with_mig(
        tmp_path,
        "mixed",
        sharing=Sharing(mps=MpsSharing(resources=(SharedResource(name=MIG, replicas=2),))),
    )
    async with wired(settings, in_mig_mode(both=False)) as parts:
        await parts.families.apply(settings)
        parts.inventory = golden_inventory()
        await look_again(parts)
        assert (parts.offered, parts.offering.withheld) == ({GPU: 2}, {})


async def test_what_is_odd_is_said_once(tmp_path: Path) -> None:
    """A GPU in MIG mode without slices: a warning in the journal and in the status,
    however often GPUs are looked at.
    """
    settings = await with_mig(tmp_path, "mixed")
    async with wired(settings, with_slices(golden_inventory(), U1=())) as parts:
        await parts.families.apply(settings)
        await look_again(parts)
        assert ["has no MIG instances" in caution for caution in parts.families.cautions] == [True]
        assert len(parts.journalled("config.caution")) == 1
        parts.inventory = in_mig_mode(both=False)
        await look_again(parts)
        assert parts.families.cautions == ()


async def test_a_gpu_that_nobody_can_divide_is_said_once(tmp_path: Path) -> None:
    """GPUs that families by pods leave out are reported like all others:
    journal, status and `/debug/resources`.
    """
    async with wired(
        await volcano_settings(tmp_path, None, families=switches()), two_models()
    ) as parts:
        parts.families._families = AllFamilies(pod_families=(mig_family(),))
        parts.families.refresh()
        parts.families.refresh()
        assert [
            "has no entry for NVIDIA A10;" in caution for caution in parts.families.cautions
        ] == [True]
        assert len(parts.journalled("config.caution")) == 1


async def test_a_library_that_is_spoilt_later_is_said_and_withholds_only_when_none_is_left(
    tmp_path: Path,
) -> None:
    """An operator who has delivered it would wait in vain for the new one,
    and a missing library limits nothing.
    """
    hami = HamiCore(host_directory=str(tmp_path / "hami"))
    async with ApiServer() as server:
        server.objects.create("nodes", {"metadata": {"name": NODE}})
        versions = {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2.0.0"}
        server.objects.set_status("nodes", NODE, {"nodeInfo": versions})
        settings = await volcano_settings(
            tmp_path, server, volcano_vgpu=VolcanoVgpu(node_config_file=""), hami_core=hami
        )
        source = await asyncio.to_thread(deliver_stand_in_library, tmp_path / "hami")
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert (parts.offering.blocked, parts.families.cautions) == ({}, ())
            await asyncio.to_thread(source.write_bytes, b"a download that failed")
            await look_again(parts)
            await look_again(parts)
            assert parts.offering.blocked == {}
            assert [
                "is not an ELF file" in caution and "installed before" in caution
                for caution in parts.families.cautions
            ] == [True]
            assert len(parts.journalled("config.caution")) == 1
            (installed,) = await asyncio.to_thread(
                lambda: list((tmp_path / "hami").glob("libvgpu.so.*"))
            )
            await asyncio.to_thread(installed.unlink)
            await look_again(parts)
            assert "is not an ELF file" in parts.offering.blocked["volcano-vgpu"]
            assert parts.families.cautions == ()


@pytest.mark.parametrize(
    ("runtime", "offered"), [("containerd://2.0.0", True), ("containerd://1.6.8", False)]
)
async def test_a_library_with_a_lock_file_is_served_where_each_container_can_have_its_own(
    runtime: str, offered: bool, tmp_path: Path
) -> None:
    """In an early answer only a directory of the node could be mounted, and one container could
    keep all others from starting.
    """
    hami = HamiCore(host_directory=str(tmp_path / "hami"))
    async with ApiServer() as server:
        server.objects.create("nodes", {"metadata": {"name": NODE}})
        server.objects.set_status(
            "nodes",
            NODE,
            {"nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": runtime}},
        )
        settings = await volcano_settings(
            tmp_path, server, volcano_vgpu=VolcanoVgpu(node_config_file=""), hami_core=hami
        )
        source = await asyncio.to_thread(deliver_stand_in_library, tmp_path / "hami")
        locking = shared_object(
            FUNCTIONS,
            code=load_instruction(REGION_BYTES),
            strings=REGION_VARIABLE + b"\0/tmp/vgpulock/lock\0unified_lock locked, waiting\0",
        )
        await asyncio.to_thread(source.write_bytes, locking)
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            blocked = parts.offering.blocked.get("volcano-vgpu", "")
            assert ("makes a lock file in /tmp/vgpulock" in blocked, "HAMi 2.8.2" in blocked) == (
                not offered,
                not offered,
            )


async def test_two_families_that_name_one_resource_are_not_offered_both(tmp_path: Path) -> None:
    """The first keeps the name. The other is withheld with the reason, until the first is gone."""
    settings = await with_mig(tmp_path, "mixed")
    async with wired(settings, in_mig_mode(both=False)) as parts:
        await parts.families.apply(settings)
        static = VolcanoStaticMigFamily(StaticMigOptions("mixed", prefix="nvidia.com"))
        both = (*parts.families._families.id_families, static)
        parts.families._families = msgspec.structs.replace(
            parts.families._families, id_families=both
        )
        parts.families.refresh()
        await parts.offering.sync()
        assert parts.offered == {GPU: 1, MIG: 7}
        assert parts.offering.withheld[MIG] == (
            f"{MIG} is offered by nvidia and by volcano-vgpu-mig; "
            f"{duplicate_remedy('volcano-vgpu-mig')}"
        )
        parts.families._families = msgspec.structs.replace(
            parts.families._families, id_families=both[:1]
        )
        await look_again(parts)
        assert parts.offering.withheld == {}


async def test_whole_gpus_are_offered_under_nvidias_and_under_volcanos_name(tmp_path: Path) -> None:
    """The ids of both are UUIDs, and a GPU serves one of the two at a time. The kubelet's status of
    devices is all that may be late.
    """
    families = switches(nvidia=True, volcano_gpushare=True)
    settings = await volcano_settings(
        tmp_path, None, families=families, volcano_gpushare=VolcanoGpushare(strategy="number")
    )
    async with wired(settings) as parts:
        await parts.families.apply(settings)
        assert parts.offered == {GPU: 2, "volcano.sh/gpu-number": 2}
        (caution,) = parts.families.cautions
        assert "nvidia.com/gpu and volcano.sh/gpu-number have the same ids" in caution


async def test_one_family_with_two_equal_names_is_withheld_and_says_so(tmp_path: Path) -> None:
    """A slip in Volcano's ConfigMap must not end the agent, nor the loop that has read it."""
    settings = await volcano_settings(
        tmp_path,
        None,
        volcano_vgpu=VolcanoVgpu(isolation="none", memory_resource="volcano.sh/vgpu-number"),
    )
    async with wired(settings) as parts:
        await parts.families.apply(settings)
        await look_again(parts)
        assert parts.offered == {}
        assert parts.offering.withheld["volcano.sh/vgpu-number"] == (
            "volcano.sh/vgpu-number is offered by volcano-vgpu and by volcano-vgpu; the kubelet "
            "would confuse the two, so volcano-vgpu offers nothing; choose another name, or turn "
            "one of the families off"
        )


async def test_two_families_may_have_the_same_slices(tmp_path: Path) -> None:
    """Each slice serves one of them at a time. While one has it, it is Unhealthy for the other."""
    settings = await with_mig(tmp_path, "mixed")
    async with wired(settings, in_mig_mode(both=False)) as parts:
        await parts.families.apply(settings)
        static = VolcanoStaticMigFamily(StaticMigOptions("mixed"))
        parts.families._families = msgspec.structs.replace(
            parts.families._families, id_families=(*parts.families._families.id_families, static)
        )
        parts.families.refresh()
        await parts.offering.sync()
        assert parts.offered == {GPU: 1, MIG: 7, "volcano.sh/mig-1g.5gb": 7}
        holding = Holding(
            "volcano.sh/mig-1g.5gb", (SLICES[0],), Owner("main", "uid-1", "default", "train")
        )
        parts.allocator.confirm(KubeletRecords((holding,)), reservation_seconds=60, initial=True)
        assert [(grant.family, grant.ids) for grant in parts.ledger.grants] == [
            ("volcano-vgpu-mig", (SLICES[0],))
        ]
        assert not any(entry.healthy for entry in parts.ledger.listing(MIG))
        assert all(entry.healthy for entry in parts.ledger.listing("volcano.sh/mig-1g.5gb"))
