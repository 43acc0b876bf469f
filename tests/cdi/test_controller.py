"""Devices are neither offered nor given out while a runtime could not resolve their CDI names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.cdi.controller_parts import GPUS, SHARES, VENDOR, Side
from tests.golden import U0, U1, golden_inventory
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.agent import api_server
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.binding import Cluster
from vgpu_agent.config.device_answers import Cdi, Plugin
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import HostFileError
from vgpu_agent.model import INTEGRATED, Gpu, Inventory, Resource
from vgpu_agent.sim.nvidia_ctk import COMMAND

pytestmark = pytest.mark.component  # it starts programs


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """Loops that are restarted at once."""
    async with Supervisor(backoff_min_seconds=0.01, backoff_max_seconds=0.01) as supervisor:
        yield supervisor


async def test_nothing_is_made_where_no_names_are_answered(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """The default list strategy: no tool runs, no file is written, nothing is withheld."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=Plugin()))
    await side.begin()
    assert side.withheld() == ""
    assert len(side.healthy) == 2
    assert not await asyncio.to_thread(side.cdi.exists)
    assert side.side.status().source == ""


async def test_a_resource_is_offered_once_its_names_are_there(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """At the start the first try is waited for,
    so that in the normal case nothing is ever withheld.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    assert side.withheld() == ""
    assert side.healthy == [U0, U1]
    version, edits = await side.side.inline([f"{VENDOR}/gpu={U1}"])
    assert version == "0.6.0"
    assert {"/dev/nvidia1", "/dev/nvidiactl"} <= {node["path"] for node in edits["deviceNodes"]}
    (status,) = side.side.status().specs
    assert status.devices == (U0, U1, "all")


async def test_trouble_is_the_reason_and_ends_by_itself(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """``/readyz`` shows the tool's complaint as the reason,
    and devices without a name are not given out either.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await asyncio.to_thread(side.tool.misbehave, fail="Driver Not Loaded")
    await side.begin()
    assert "Driver Not Loaded" in side.withheld()
    assert not side.is_temporary()
    assert side.healthy == []
    with pytest.raises(HostFileError, match="the kubelet will retry"):
        await side.side.inline([f"{VENDOR}/gpu={U1}"])
    await asyncio.to_thread(side.tool.behave)
    await side.until_offered()


async def test_specs_that_are_withdrawn_are_not_made_again(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """Other loops of an agent that leaves the node still look at its GPUs."""
    side = await asyncio.to_thread(
        lambda: Side(tmp_path, supervisor, cluster=Cluster(withdraw_at_stop=True))
    )
    await side.begin()
    assert os.listdir(side.cdi)
    await side.side.withdraw()
    side.side.observe(golden_inventory())
    assert supervisor.reports == []
    assert os.listdir(side.cdi) == []


async def test_a_tool_that_hangs_does_not_keep_the_agent_from_starting(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start goes on, and says what it waits for."""
    monkeypatch.setattr(api_server, "START_WAIT_SECONDS", 0.2)
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await asyncio.to_thread(side.tool.misbehave, hang_seconds=FOR_EVER_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await side.begin()
    assert side.withheld() == "the CDI spec of this node's GPUs is being made"
    assert side.is_temporary()
    await supervisor.stop("cdi specs")


async def test_one_device_without_a_name_keeps_back_only_itself(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """A GPU that the tool does not know is Unhealthy with the reason. The others are offered."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await asyncio.to_thread(side.tool.misbehave, without=[U1])
    await side.begin()
    assert side.withheld() == ""
    assert side.healthy == [U0]
    (room,) = [room for room in side.ledger.rooms(GPUS.name) if room.device == U1]
    assert "no CDI spec has its name yet" in room.trouble


@pytest.mark.parametrize(("late", "withheld"), [(True, True), (False, False)])
async def test_inlining_needs_a_spec_only_for_what_is_bound_late(
    tmp_path: Path, supervisor: Supervisor, *, late: bool, withheld: bool
) -> None:
    """``cdi.inline`` with the default strategy:
    families whose ids name devices answer by variable and wait for nothing.
    """
    side = await asyncio.to_thread(
        lambda: Side(tmp_path, supervisor, late=late, plugin=Plugin(), cdi=Cdi(inline=True))
    )
    await asyncio.to_thread(side.tool.misbehave, fail="no")
    await side.begin()
    assert bool(side.withheld(SHARES)) is withheld
    assert side.withheld(GPUS) == ""
    assert side.healthy == [U0, U1]


async def test_a_required_channel_that_is_missing_withholds_everything(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """This holds for every list strategy. An optional channel is reported once and passed over."""
    plugin = Plugin(imex_channel_ids=(0,), imex_required=True)
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=plugin))
    await side.begin()
    assert "channel0 is no character device" in side.withheld()
    assert side.withheld().endswith("or set plugin.imexRequired: false")
    await side.side.look(
        msgspec.structs.replace(side.settings, plugin=Plugin(imex_channel_ids=(0,)))
    )
    assert side.withheld() == ""
    assert [entry.event for entry in side.journal.entries] == ["imex.missing"]


async def test_a_tool_that_only_the_node_has_is_found_in_its_tree(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """An image without the toolkit, and the node's root mounted into it: nothing has to be set."""
    tool = tmp_path / "root" / "opt" / "nvidia-ctk"
    cdi = Cdi(nvidia_ctk="/opt/nvidia-ctk", container_driver_root=str(tmp_path / "root"))
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=cdi))
    await side.side.look(side.settings)
    assert side.side._command() == ("/opt/nvidia-ctk",)
    await asyncio.to_thread(tool.parent.mkdir, parents=True)
    await asyncio.to_thread(tool.touch)
    await side.side.look(side.settings)
    assert side.side._command() == (str(tool),)


async def test_the_simulator_describes_simulated_gpus_unless_a_tool_is_named(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """A demo then needs no setting, and a configured tool is the one that runs."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    assert side.side._command() == COMMAND
    named = await asyncio.to_thread(
        lambda: Side(tmp_path / "b", supervisor, cdi=Cdi(nvidia_ctk="/opt/nvidia-ctk"))
    )
    assert named.side._command() == ("/opt/nvidia-ctk",)


async def test_the_gpu_of_a_tegra_processor_has_no_cdi_name_and_nothing_waits_for_one(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """nvidia §1: upstream ends over a CDI strategy without NVML.
    Here no tool runs, and the resource says what to change.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    resource = Resource("nvidia.com/gpu", "nvidia", (DeviceId(INTEGRATED, INTEGRATED),))
    await side.side.begin(
        side.settings,
        Inventory(
            version=1, gpus=(Gpu(INTEGRATED, index=0, minor=-1, name=INTEGRATED, memory_mib=0),)
        ),
    )
    assert "remove cdi-cri and cdi-annotations" in side.withheld(resource)
    assert not await asyncio.to_thread(side.cdi.exists)
