"""What is not offered, and what is not given out, as long as a runtime could not resolve its CDI name."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.agent.cdi_side import CdiSide
from vgpu_agent.concurrency import Latest, Supervisor
from vgpu_agent.config.binding import Binding, Cluster
from vgpu_agent.config.device_answers import Cdi, Plugin
from vgpu_agent.config.settings import Gpu as GpuSettings
from vgpu_agent.config.settings import Settings, Tasks
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CarrierError
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import INTEGRATED, Decider, Gpu, Health, Inventory, MigInstance, Resource
from vgpu_agent.sim.nvidia_ctk import COMMAND, StandInCtk
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.status import NotYet

VENDOR = "k8s.device-plugin.nvidia.com"
GPUS = Resource("nvidia.com/gpu", "nvidia", tuple(DeviceId(uuid, uuid, 0) for uuid in (U0, U1)))
SHARES = Resource("volcano.sh/vgpu-number", "volcano-vgpu", GPUS.ids, decided_by=Decider.POD)
BY_NAME = Plugin(device_list_strategy=("cdi-cri",))


class Side:
    """A `CdiSide` on a simulated node, and what it meets."""

    def __init__(
        self, folder: Path, supervisor: Supervisor, *, late: bool = True, node: SimulatedNode | None = None, **sections: Any
    ) -> None:
        self.node = node or SimulatedNode.create(folder / "gpus", model="A100-SXM4-40GB", gpus=2, uuids=[U0, U1])
        self.tool = StandInCtk(self.node.directory)
        self.cdi = folder / "cdi"
        self.settings = msgspec.structs.replace(
            Settings(
                simulate=str(self.node.directory),
                binding=Binding(cdi_directory=str(self.cdi), pod_wait_seconds=0.2),
                gpu=GpuSettings(driver_root=str(self.node.directory), poll_seconds=0.05),
                tasks=Tasks(backoff_min_seconds=0.02, backoff_max_seconds=0.1),
                plugin=BY_NAME,
            ),
            **sections,
        )
        self.journal, self.ledger = Journal(), Ledger()
        self.side = CdiSide(self.settings, ledger=self.ledger, journal=self.journal, supervisor=supervisor, is_late=lambda: late)

    async def begin(self, inventory: Inventory | None = None) -> None:
        """The start of an agent with these GPUs."""
        inventory = inventory or golden_inventory()
        self.ledger.observe(inventory)
        self.ledger.offer([GPUS])
        await self.side.begin(self.settings, inventory)

    @property
    def healthy(self) -> list[str]:
        """The ids that kubelet may give out."""
        return [listed.id.id for listed in self.ledger.listing(GPUS.name) if listed.healthy]

    def withheld(self, resource: Resource = GPUS) -> str:
        """Why a resource is not offered."""
        return self.side.why_withheld(resource)

    async def until_offered(self) -> None:
        """Wait, some seconds at most."""
        task = asyncio.ensure_future(self.side.follow(_nothing))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    if not self.withheld() and len(self.healthy) == 2:
                        return
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()


async def _nothing() -> None:
    """Nobody has to be told."""


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """Loops that are restarted at once."""
    async with Supervisor(backoff_min_seconds=0.01, backoff_max_seconds=0.01) as supervisor:
        yield supervisor


def _write_toolkits_spec(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    devices = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in names]
    replace_text(folder / "nvidia.json", json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))


async def test_nothing_is_made_where_no_names_are_answered(tmp_path: Path, supervisor: Supervisor) -> None:
    """The default list strategy: no tool runs, no file is written, nothing is withheld."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=Plugin()))
    await side.begin()
    assert side.withheld() == ""
    assert len(side.healthy) == 2
    assert not await asyncio.to_thread(side.cdi.exists)
    assert side.side.status().source == ""


async def test_a_resource_is_offered_once_its_names_are_there(tmp_path: Path, supervisor: Supervisor) -> None:
    """At the start the first try is waited for, so that in the normal case nothing is ever withheld."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    assert side.withheld() == ""
    assert side.healthy == [U0, U1]
    version, edits = await side.side.inline([f"{VENDOR}/gpu={U1}"])
    assert version == "0.6.0"
    assert {"/dev/nvidia1", "/dev/nvidiactl"} <= {node["path"] for node in edits["deviceNodes"]}
    (status,) = side.side.status().specs
    assert status.devices == (U0, U1, "all")


async def test_trouble_is_the_reason_and_ends_by_itself(tmp_path: Path, supervisor: Supervisor) -> None:
    """What the tool complains of is what ``/readyz`` says; devices without a name are not given out, either."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await asyncio.to_thread(side.tool.misbehave, fail="Driver Not Loaded")
    await side.begin()
    assert "Driver Not Loaded" in side.withheld()
    assert not isinstance(side.withheld(), NotYet)
    assert side.healthy == []
    with pytest.raises(CarrierError, match="kubelet will ask again"):
        await side.side.inline([f"{VENDOR}/gpu={U1}"])
    await asyncio.to_thread(side.tool.behave)
    await side.until_offered()


async def test_a_tool_that_hangs_does_not_keep_the_agent_from_starting(tmp_path: Path, supervisor: Supervisor) -> None:
    """The start goes on, and says what it waits for."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cluster=Cluster(start_wait_seconds=0.2)))
    await asyncio.to_thread(side.tool.misbehave, hang_seconds=FOR_EVER_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await side.begin()
    assert side.withheld() == "the CDI spec of this node's GPUs is being made"
    assert isinstance(side.withheld(), NotYet)
    await supervisor.stop("cdi specs")


async def test_one_device_without_a_name_keeps_back_only_itself(tmp_path: Path, supervisor: Supervisor) -> None:
    """A GPU that the tool does not know is Unhealthy with the reason; the others are offered."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await asyncio.to_thread(side.tool.misbehave, without=[U1])
    await side.begin()
    assert side.withheld() == ""
    assert side.healthy == [U0]
    (room,) = [room for room in side.ledger.rooms(GPUS.name) if room.device == U1]
    assert "no CDI spec has its name yet" in room.trouble


async def test_a_slice_is_kept_back_until_it_has_a_name(tmp_path: Path, supervisor: Supervisor) -> None:
    """A GPU was cut a moment ago: before the first list with its slices goes out, they are held back; the other GPU is not touched."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    await asyncio.to_thread(side.node.set_mig, 1, ["1g.5gb"])
    (uuid,) = side.node.mig_uuids(1)
    first, second = golden_inventory().gpus
    slices = (MigInstance(uuid, 0, 7, 0, "1g.5gb", 4864, 1, 1, ("/dev/nvidia-caps/nvidia-cap201",)),)
    cut = Inventory(2, (first, dataclasses.replace(second, mig_enabled=True, mig_instances=slices)))
    by_profile = Resource("nvidia.com/mig-1g.5gb", "nvidia", (DeviceId(uuid, uuid, 0),))

    side.side.observe(cut)
    side.ledger.observe(cut)
    side.ledger.offer([dataclasses.replace(GPUS, ids=GPUS.ids[:1]), by_profile])
    assert [listed.healthy for listed in side.ledger.listing(by_profile.name)] == [False]
    assert "no CDI spec has its name yet" in side.withheld(by_profile)
    assert isinstance(side.withheld(by_profile), NotYet)
    assert side.withheld() == ""

    task = asyncio.ensure_future(side.side.follow(_nothing))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if side.withheld(by_profile) == "":
                break
            await asyncio.sleep(0.01)
    task.cancel()
    assert [listed.healthy for listed in side.ledger.listing(by_profile.name)] == [True]
    assert len(await asyncio.to_thread(lambda: side.tool.calls)) == 2


async def test_an_index_that_stands_for_another_device_by_now_is_no_name(tmp_path: Path, supervisor: Supervisor) -> None:
    """GPU 0 was unplugged and the other has its number: until the spec is made anew, the number in it opens the wrong card."""
    plugin = Plugin(device_list_strategy=("cdi-cri",), device_id_strategy="index")
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=plugin))
    await side.begin()
    name, inventories = f"{VENDOR}/gpu=0", Latest(golden_inventory())
    supervisor.start("devices", lambda: side.side.watch(inventories))
    supervisor.start("names", lambda: side.side.follow(_nothing))
    _, before = await side.side.inline([name])

    await asyncio.to_thread(side.tool.misbehave, fail="busy")
    await asyncio.to_thread(side.node.unplug, 0)
    first, second = golden_inventory().gpus
    left = Inventory(2, (dataclasses.replace(second, index=0), dataclasses.replace(first, index=1, present=False)))
    inventories.publish(left)
    await asyncio.sleep(0)
    side.ledger.observe(left)
    assert side.healthy == []
    with pytest.raises(CarrierError, match=r"does not have k8s\.device-plugin\.nvidia\.com/gpu=0 as it is now"):
        await side.side.inline([name])

    await asyncio.to_thread(side.tool.behave)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if side.healthy == [U1]:
                break
            await asyncio.sleep(0.01)
    _, after = await side.side.inline([name])
    paths = [{node["path"] for node in edits["deviceNodes"]} for edits in (before, after)]
    assert paths[0] ^ paths[1] == {"/dev/nvidia0", "/dev/nvidia1"}
    await supervisor.stop("devices")
    await supervisor.stop("names")


async def test_a_name_whose_nodes_open_another_gpu_by_now_is_no_name(tmp_path: Path, supervisor: Supervisor) -> None:
    """The driver was loaded anew without GPU 0, so GPU 1 has its device node; until the spec is made anew, nobody is given that."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    assert side.healthy == [U0, U1]
    await asyncio.to_thread(side.tool.misbehave, fail="busy")
    first, second = golden_inventory().gpus
    left = Inventory(2, (dataclasses.replace(second, index=0, minor=0), dataclasses.replace(first, index=1, minor=1, present=False)))
    side.side.observe(left)
    side.ledger.observe(left)
    assert side.healthy == []
    with pytest.raises(CarrierError, match=f"does not have {VENDOR}/gpu={U1} as it is now"):
        await side.side.inline([f"{VENDOR}/gpu={U1}"])


async def test_after_a_restart_a_lost_gpu_keeps_back_only_itself(tmp_path: Path, supervisor: Supervisor) -> None:
    """The tool answers for all GPUs or for none, so the others go by the spec of the agent before, as long as the driver is the same."""
    known = dataclasses.replace(golden_inventory(), driver_version="580.95.05")
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin(known)
    await supervisor.stop("cdi specs")
    await asyncio.to_thread(side.node.lose, 1)
    again = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, node=side.node))
    first, second = known.gpus
    lost = dataclasses.replace(second, present=False, health=Health(ok=False, reason="GPU is lost"))
    await again.begin(dataclasses.replace(known, gpus=(first, lost)))
    assert again.withheld() == ""
    assert again.healthy == [U0]
    _, edits = await again.side.inline([f"{VENDOR}/gpu={U0}"])
    assert "/dev/nvidia0" in {node["path"] for node in edits["deviceNodes"]}
    assert "GPU is lost" in again.side.status().specs[0].error


async def test_a_start_waits_a_moment_for_a_spec_that_is_being_made(tmp_path: Path, supervisor: Supervisor) -> None:
    """A GPU was cut for the container that is about to start; kubelet would ask again after a quarter of a minute only."""
    binding = Binding(cdi_directory=str(tmp_path / "cdi"), pod_wait_seconds=PATIENCE_SECONDS)
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, binding=binding))
    await side.begin()
    await asyncio.to_thread(side.node.set_mig, 1, ["1g.5gb"])
    (uuid,) = side.node.mig_uuids(1)
    starting = asyncio.ensure_future(side.side.inline([f"{VENDOR}/gpu={uuid}"]))
    await asyncio.sleep(0.05)
    assert not starting.done()
    first, second = golden_inventory().gpus
    slices = (MigInstance(uuid, 0, 7, 0, "1g.5gb", 4864, 1, 1, ("/dev/nvidia-caps/nvidia-cap201",)),)
    side.side.observe(Inventory(2, (first, dataclasses.replace(second, mig_enabled=True, mig_instances=slices))))
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, edits = await starting
    assert "/dev/nvidia1" in {node["path"] for node in edits["deviceNodes"]}


async def test_a_change_of_health_runs_no_tool(tmp_path: Path, supervisor: Supervisor) -> None:
    """Inventories come with every temperature; a spec says which devices there are."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    first, second = golden_inventory().gpus
    for version in range(2, 6):
        ill = dataclasses.replace(second, health=dataclasses.replace(second.health, ok=version % 2 == 0, reason="XID 79"))
        side.side.observe(Inventory(version, (first, ill)))
    await asyncio.sleep(0.15)
    assert len(await asyncio.to_thread(lambda: side.tool.calls)) == 1


@pytest.mark.parametrize(("late", "withheld"), [(True, True), (False, False)])
async def test_inlining_needs_a_spec_only_for_what_is_bound_late(
    tmp_path: Path, supervisor: Supervisor, *, late: bool, withheld: bool
) -> None:
    """``cdi.inline`` with the default strategy: families whose ids name devices answer by variable and wait for nothing."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, late=late, plugin=Plugin(), cdi=Cdi(inline=True)))
    await asyncio.to_thread(side.tool.misbehave, fail="no")
    await side.begin()
    assert bool(side.withheld(SHARES)) is withheld
    assert side.withheld(GPUS) == ""
    assert side.healthy == [U0, U1]


async def test_a_required_channel_that_is_missing_withholds_everything(tmp_path: Path, supervisor: Supervisor) -> None:
    """Whatever the list strategy; an optional one is told once and passed over."""
    plugin = Plugin(imex_channel_ids=(0,), imex_required=True)
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=plugin))
    await side.begin()
    assert "channel0 is no character device" in side.withheld()
    assert side.withheld().endswith("or set plugin.imexRequired: false")
    await side.side.look(msgspec.structs.replace(side.settings, plugin=Plugin(imex_channel_ids=(0,))))
    assert side.withheld() == ""
    assert [entry.event for entry in side.journal.entries] == ["imex.missing"]


async def test_the_toolkits_names_are_looked_for_and_never_written(tmp_path: Path, supervisor: Supervisor) -> None:
    """``cdi.source: toolkit``: offered when its spec has the names, by what it says now; withdrawn without touching it."""
    sections: dict[str, Any] = {"cdi": Cdi(source="toolkit"), "cluster": Cluster(withdraw_at_stop=True)}
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, **sections))
    await side.begin()
    assert "no CDI spec of kind nvidia.com/gpu" in side.withheld()
    await asyncio.to_thread(_write_toolkits_spec, side.cdi, U0, U1)
    await side.until_offered()
    await side.side.withdraw()
    assert await asyncio.to_thread((side.cdi / "nvidia.json").exists)
    assert not await asyncio.to_thread(lambda: side.tool.calls)


async def test_a_gpu_that_the_toolkits_spec_does_not_have_is_kept_back(tmp_path: Path, supervisor: Supervisor) -> None:
    """Made before the card was plugged in: who has to do what stands in the reason."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(_write_toolkits_spec, side.cdi, U0)
    await side.begin()
    assert side.healthy == [U0]
    (room,) = [room for room in side.ledger.rooms(GPUS.name) if room.device == U1]
    assert "must make its spec anew (service nvidia-cdi-refresh" in room.trouble


async def test_offers_are_looked_at_again_only_when_names_have_changed(tmp_path: Path, supervisor: Supervisor) -> None:
    """Not at a start that knew them all; and again, when a look has failed."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(_write_toolkits_spec, side.cdi, U0, U1)
    await side.begin()
    looks: list[int] = []

    async def look_again() -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise ConnectionError("not now")

    supervisor.start("names", lambda: side.side.follow(look_again))
    await asyncio.sleep(0.15)
    assert looks == []
    await asyncio.to_thread(_write_toolkits_spec, side.cdi, U0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if len(looks) == 2:
                break
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.15)
    assert looks == [0, 1]
    await supervisor.stop("names")


async def test_one_name_for_all_gpus_keeps_none_of_them_back(tmp_path: Path, supervisor: Supervisor) -> None:
    """nvidia:A26 with CDI: under a Windows subsystem the spec has the device ``all`` and no other."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(_write_toolkits_spec, side.cdi, "all")
    await side.begin()
    assert side.healthy == [U0, U1]
    assert side.withheld(Resource("nvidia.com/gpu", "nvidia", (DeviceId("all", U0, None),))) == ""


async def test_a_tool_that_only_the_node_has_is_found_in_its_tree(tmp_path: Path, supervisor: Supervisor) -> None:
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


async def test_the_simulator_describes_simulated_gpus_unless_a_tool_is_named(tmp_path: Path, supervisor: Supervisor) -> None:
    """So that a demo needs nothing; and a tool that somebody has named is the one that runs."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    assert side.side._command() == COMMAND
    named = await asyncio.to_thread(lambda: Side(tmp_path / "b", supervisor, cdi=Cdi(nvidia_ctk="/opt/nvidia-ctk")))
    assert named.side._command() == ("/opt/nvidia-ctk",)


async def test_the_gpu_of_a_tegra_processor_has_no_cdi_name_and_nothing_waits_for_one(tmp_path: Path, supervisor: Supervisor) -> None:
    """nvidia contract §1: upstream ends over a CDI strategy without NVML; here no tool runs, and the resource says what to change."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    resource = Resource("nvidia.com/gpu", "nvidia", (DeviceId(INTEGRATED, INTEGRATED),))
    await side.side.begin(side.settings, Inventory(version=1, gpus=(Gpu(INTEGRATED, index=0, minor=-1, name=INTEGRATED, memory_mib=0),)))
    assert "take cdi-cri and cdi-annotations out" in side.withheld(resource)
    assert not await asyncio.to_thread(side.cdi.exists)
