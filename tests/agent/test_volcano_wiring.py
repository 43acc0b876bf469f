"""The offer of a node with volcano-vgpu, from Node, ConfigMap, library and settings,
and its changes while it runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import constants
from tests.agent.volcano_parts import NODE, Wired, volcano_settings, wired
from tests.golden import U1
from tests.patience import PATIENCE_SECONDS
from tests.settings import switches
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.families.volcano_gpushare.settings import VolcanoGpushare
from vgpu_agent.families.volcano_vgpu.files import CONFIG_MAP as NAME
from vgpu_agent.families.volcano_vgpu.files import DEVICE_CONFIG as KEY
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
from vgpu_agent.sim.api.server import ApiServer

IMPATIENT = {
    constants.API_START_WAIT: 0.1,
    constants.API_BACKOFF_MIN: 0.05,
    constants.API_BACKOFF_MAX: 0.1,
}


@pytest.fixture(autouse=True)
def _library_reads_files(loop_may_block: None) -> None:
    """kubernetes-asyncio reads the kubeconfig in a coroutine;
    the agent runs that in a loop of its own, in a thread.
    """


NUMBER, MEMORY, CORES = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"


def node(runtime: str = "containerd://2.1.0") -> dict[str, Any]:
    """Our Node, as kubelet registers it."""
    return {
        "metadata": {"name": NODE},
        "status": {"nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": runtime}},
    }


def config_map(text: str) -> dict[str, Any]:
    """Volcano's ConfigMap."""
    return {
        "metadata": {"name": "volcano-vgpu-device-config"},
        "data": {"device-config.yaml": text},
    }


async def test_defaults_are_offered_once_the_node_is_read(tmp_path: Path) -> None:
    """volcano-vgpu:G2 ten places a GPU, a hundred percents, a memory unit of one MiB that fits;
    bound late on a new containerd.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        async with wired(await volcano_settings(tmp_path, server)) as parts:
            await parts.families.apply(parts.settings)
            # 2 × 40 GiB in units of 2 MiB: 81,920 would not fit
            assert parts.offered == {NUMBER: 20, CORES: 200, MEMORY: 40960}
            assert parts.offering.blocked == {}
            assert parts.allocator.mode is not None
            assert parts.allocator.mode.late


async def test_the_config_map_and_the_nodes_own_file_are_laid_over_the_settings(
    tmp_path: Path,
) -> None:
    """volcano-vgpu:D23 ConfigMap, then the node's entry.
    What is wrong in them is named, and the rest counts.
    """
    (tmp_path / "config.json").write_text(
        '{"nodeconfig":[{"name":"node-a","devicesplitcount":3,"devicecorescaling":"many"}]}'
    )
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        server.objects.create(
            "configmaps",
            config_map("nvidia: {deviceSplitCount: 5, gpuMemoryFactor: 10}\n"),
            "kube-system",
        )
        async with wired(await volcano_settings(tmp_path, server)) as parts:
            await parts.families.apply(parts.settings)
            assert parts.offered == {NUMBER: 6, CORES: 200, MEMORY: 8192}
            assert [
                problem for problem in parts.families.problems if "devicecorescaling" in problem
            ]


async def test_a_config_map_that_is_edited_wrongly_changes_nothing(tmp_path: Path) -> None:
    """volcano-vgpu:D23 The earlier content stays in force, also for an agent that starts
    afterwards, until the ConfigMap is mended.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        server.objects.create(
            "configmaps",
            config_map("nvidia: {deviceSplitCount: 5, gpuMemoryFactor: 10}\n"),
            "kube-system",
        )
        settings = await volcano_settings(tmp_path, server)

        async def edited(parts: Wired, text: str | None) -> dict[str, int]:
            assert KEY in parts.cluster.config_maps
            seen = parts.cluster.config_maps[KEY].text
            version = seen.version
            server.objects.patch("configmaps", NAME, {"data": {KEY: text}}, "kube-system")
            await asyncio.wait_for(seen.newer_than(version), PATIENCE_SECONDS)
            await parts.families.rebuild()
            return parts.offered

        async with wired(settings) as parts:
            await parts.families.apply(settings)
            before = parts.offered
            assert parts.families.origins["volcano-vgpu"] == {
                "device_split_count": KEY,
                "gpu_memory_factor": KEY,
            }
            assert (
                await edited(parts, "nvidia: {deviceSplitCount: many, gpuMemoryFactor: ten}")
                == before
            )
            assert await edited(parts, "nvidia: {") == before
            assert "its previous content stays in force" in parts.families.problems[0]
            assert await edited(parts, None) == before  # the key is misspelt
            assert "its previous content stays in force" in parts.families.problems[0]
            await parts.cluster.remember()
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.offered == before
            assert (await edited(parts, "nvidia: {deviceSplitCount: 6, gpuMemoryFactor: 10}"))[
                NUMBER
            ] == 12
            assert parts.families.problems == ()


async def test_a_config_map_that_is_no_longer_read_has_no_effect(tmp_path: Path) -> None:
    """The agent remembers its text for an outage.
    It must not count after a restart with `readConfigMap: false`.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        server.objects.create(
            "configmaps", config_map("nvidia: {deviceSplitCount: 5}\n"), "kube-system"
        )
        settings = await volcano_settings(tmp_path, server)
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.offered[NUMBER] == 10
            await parts.cluster.remember()
        vgpu = msgspec.structs.replace(settings.section(VolcanoVgpu), read_config_map=False)
        settings = msgspec.structs.replace(settings, volcano_vgpu=vgpu)
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.offered[NUMBER] == 20
            assert parts.families.origins == {"volcano-vgpu": {}}


async def test_what_two_wrong_edits_have_left_in_force_stays_over_a_restart(tmp_path: Path) -> None:
    """volcano-vgpu:D23 The right half of the first edit counts, then nothing of the second,
    and of the node's own file neither.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        server.objects.create(
            "configmaps",
            config_map("nvidia: {deviceSplitCount: 5, gpuMemoryFactor: 10}\n"),
            "kube-system",
        )
        settings = await volcano_settings(tmp_path, server)
        own = Path(settings.section(VolcanoVgpu).node_config_file)
        hiding = msgspec.json.encode(
            {"nodeconfig": [{"name": NODE, "filterdevices": {"uuid": [U1]}}]}
        )
        await asyncio.to_thread(own.write_bytes, hiding)

        async with wired(settings) as parts:
            await parts.families.apply(settings)
            memory = parts.offered[MEMORY]
            assert KEY in parts.cluster.config_maps
            for text in ("nvidia: {deviceSplitCount: 6, gpuMemoryFactor: ten}", "nvidia: {"):
                seen = parts.cluster.config_maps[KEY].text
                version = seen.version
                server.objects.patch("configmaps", NAME, {"data": {KEY: text}}, "kube-system")
                await asyncio.wait_for(seen.newer_than(version), PATIENCE_SECONDS)
                await parts.families.rebuild()
            await asyncio.to_thread(own.write_bytes, b"{")
            await parts.families.rebuild()
            before = parts.offered
            assert (before[NUMBER], before[MEMORY]) == (6, memory)
            await parts.cluster.remember()
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.offered == before
            await parts.cluster.remember()
        await server.down()
        async with wired(settings, others=IMPATIENT) as parts:
            await parts.families.apply(parts.settings)
            assert parts.offered == before
            await asyncio.to_thread(own.unlink)
            await asyncio.to_thread(own.mkdir)  # there is something, and it cannot be read
            await parts.families.rebuild()
            assert parts.offered == before
            assert "config.json: cannot be read: Is a directory" in parts.families.problems[-1]
            await asyncio.to_thread(own.rmdir)
            await parts.families.rebuild()
            assert parts.offered[NUMBER] == 12


async def test_a_restart_during_an_outage_offers_the_same(tmp_path: Path) -> None:
    """Ids and the way of binding are those of before, from what was remembered.
    Without memory nothing is guessed.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node("containerd://1.6.0"))
        server.objects.create(
            "configmaps",
            config_map("nvidia: {deviceSplitCount: 5, gpuMemoryFactor: 10}\n"),
            "kube-system",
        )
        settings = await volcano_settings(tmp_path, server)
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            before = parts.offered
            await parts.cluster.remember()
        await server.down()
        async with wired(settings, others=IMPATIENT) as parts:
            await parts.families.apply(settings)
            assert parts.offered == before
            assert parts.offering.blocked == {}
            assert parts.allocator.mode is not None
            assert not parts.allocator.mode.late
        async with wired(
            msgspec.structs.replace(settings, state_directory=str(tmp_path / "empty")),
            others=IMPATIENT,
        ) as parts:
            await parts.families.apply(parts.settings)
            assert "has not been read yet" in parts.offering.blocked["volcano-vgpu"]


async def test_without_credentials_the_family_waits_and_says_for_what(tmp_path: Path) -> None:
    """The agent runs; its readiness names the remedy."""
    async with wired(await volcano_settings(tmp_path, None)) as parts:
        await parts.families.apply(parts.settings)
        assert "set kubeconfig" in parts.offering.blocked["volcano-vgpu"]


async def test_a_missing_library_withholds_its_family_until_it_is_delivered(tmp_path: Path) -> None:
    """An agent never pretends: schedulers read that nothing is free,
    and the delivery is noticed.
    """
    hami = HamiCore(host_directory=str(tmp_path / "hami"))
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        settings = await volcano_settings(
            tmp_path, server, volcano_vgpu=VolcanoVgpu(node_config_file=""), hami_core=hami
        )
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert "libvgpu.so" in parts.offering.blocked["volcano-vgpu"]
            assert parts.cluster.node is not None
            register = parts.allocator.desired_node(parts.cluster.node, 0.0).annotations[
                "volcano.sh/node-vgpu-register"
            ]
            assert register is not None
            assert [entry.split(",")[1] for entry in register.split(":") if "," in entry] == [
                "0",
                "0",
            ]


async def test_a_factor_that_does_not_fit_is_refused_with_the_one_that_does(tmp_path: Path) -> None:
    """volcano-vgpu:D9 the resource is withheld with the remedy.
    The agent and its other families go on.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        settings = await volcano_settings(
            tmp_path,
            server,
            volcano_vgpu=VolcanoVgpu(isolation="none", gpu_memory_factor=1, node_config_file=""),
            families=switches(nvidia=True, volcano_vgpu=True),
        )
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            await parts.offering.sync()
            assert parts.offered == {"nvidia.com/gpu": 2}
            (reason,) = parts.offering.withheld.values()
            assert "gpuMemoryFactor" in reason
            wider = msgspec.structs.replace(
                settings,
                volcano_vgpu=VolcanoVgpu(
                    isolation="none", gpu_memory_factor=2, node_config_file=""
                ),
            )
            await parts.families.apply(wider)
            await parts.offering.sync()
            assert parts.offered[MEMORY] == 40960
            assert parts.offering.withheld == {}


async def test_two_families_with_the_same_ids_stand_on_one_node(tmp_path: Path) -> None:
    """Whole GPUs under two names have the same ids.
    Both are offered, and a caution names the kubelet's reaction.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node())
        settings = await volcano_settings(
            tmp_path,
            server,
            families=switches(nvidia=True, volcano_gpushare=True),
            volcano_gpushare=VolcanoGpushare(strategy="number"),
        )
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.offered == {"nvidia.com/gpu": 2, "volcano.sh/gpu-number": 2}
            assert parts.offering.withheld == {}
            (caution,) = parts.families.cautions
            assert caution.startswith("nvidia.com/gpu and volcano.sh/gpu-number have the same ids")


@pytest.mark.parametrize(("setting", "late"), [("late", True), ("early", False)])
async def test_the_mode_may_be_set(tmp_path: Path, setting: str, *, late: bool) -> None:
    """An operator who knows the runtime better sets the mode.
    The choice and its reason are journalled.
    """
    async with ApiServer() as server:
        server.objects.create("nodes", node("containerd://1.7.20"))
        settings = await volcano_settings(tmp_path, server)
        settings = msgspec.structs.replace(
            settings, binding=msgspec.structs.replace(settings.binding, mode=setting)
        )
        async with wired(settings) as parts:
            await parts.families.apply(settings)
            assert parts.allocator.mode is not None
            assert parts.allocator.mode.late is late
            assert [fact["reason"] for fact in parts.journalled("binding.mode")] == [
                f"binding.mode is {setting}"
            ]
