"""GPUs that change under the CDI spec: cut, renumbered, lost or ill,
and what is kept back until the spec is made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.cdi.controller_parts import GPUS, VENDOR, Side, nothing
from tests.golden import U0, U1, golden_inventory
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.allocation import identification
from vgpu_agent.concurrency import Latest, Supervisor
from vgpu_agent.config.device_answers import Plugin
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import HostFileError
from vgpu_agent.model import Health, Inventory, MigInstance, Resource

pytestmark = pytest.mark.component  # it starts programs


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """Loops that are restarted at once."""
    async with Supervisor(backoff_min_seconds=0.01, backoff_max_seconds=0.01) as supervisor:
        yield supervisor


async def test_a_slice_is_kept_back_until_it_has_a_name(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """A GPU was cut a moment ago: before the first list with its slices goes out, they are held
    back. The other GPU is not touched.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    await asyncio.to_thread(side.node.set_mig, 1, ["1g.5gb"])
    (uuid,) = side.node.mig_uuids(1)
    first, second = golden_inventory().gpus
    slices = (
        MigInstance(uuid, 0, 7, 0, "1g.5gb", 4864, 1, 1, ("/dev/nvidia-caps/nvidia-cap201",)),
    )
    cut = Inventory(
        2, (first, msgspec.structs.replace(second, mig_enabled=True, mig_instances=slices))
    )
    by_profile = Resource("nvidia.com/mig-1g.5gb", "nvidia", (DeviceId(uuid, uuid, 0),))

    side.side.observe(cut)
    side.ledger.observe(cut)
    side.ledger.offer([msgspec.structs.replace(GPUS, ids=GPUS.ids[:1]), by_profile])
    assert [listed.healthy for listed in side.ledger.listing(by_profile.name)] == [False]
    assert "no CDI spec has its name yet" in side.withheld(by_profile)
    assert side.is_temporary(by_profile)
    assert side.withheld() == ""

    task = asyncio.ensure_future(side.side.follow(nothing))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if side.withheld(by_profile) == "":
                break
            await asyncio.sleep(0.01)
    task.cancel()
    assert [listed.healthy for listed in side.ledger.listing(by_profile.name)] == [True]
    assert len(await asyncio.to_thread(lambda: side.tool.calls)) == 2


async def test_an_index_that_stands_for_another_device_by_now_is_no_name(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """GPU 0 was unplugged and the other has its number:
    until the spec is made anew, the number in it opens the wrong card.
    """
    plugin = Plugin(device_list_strategy=("cdi-cri",), device_id_strategy="index")
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, plugin=plugin))
    await side.begin()
    name, inventories = f"{VENDOR}/gpu=0", Latest(golden_inventory())
    supervisor.start("devices", lambda: side.side.watch(inventories))
    supervisor.start("names", lambda: side.side.follow(nothing))
    _, before = await side.side.inline([name])

    await asyncio.to_thread(side.tool.misbehave, fail="busy")
    await asyncio.to_thread(side.node.unplug, 0)
    first, second = golden_inventory().gpus
    left = Inventory(
        2,
        (
            msgspec.structs.replace(second, index=0),
            msgspec.structs.replace(first, index=1, present=False),
        ),
    )
    inventories.publish(left)
    await asyncio.sleep(0)
    side.ledger.observe(left)
    assert side.healthy == []
    with pytest.raises(
        HostFileError, match=r"does not have k8s\.device-plugin\.nvidia\.com/gpu=0 as it is now"
    ):
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


async def test_a_name_whose_nodes_open_another_gpu_by_now_is_no_name(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """The driver was loaded anew without GPU 0, so GPU 1 has its device node. Until the spec is
    made anew, no container gets it.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    assert side.healthy == [U0, U1]
    await asyncio.to_thread(side.tool.misbehave, fail="busy")
    first, second = golden_inventory().gpus
    left = Inventory(
        2,
        (
            msgspec.structs.replace(second, index=0, minor=0),
            msgspec.structs.replace(first, index=1, minor=1, present=False),
        ),
    )
    side.side.observe(left)
    side.ledger.observe(left)
    assert side.healthy == []
    with pytest.raises(HostFileError, match=f"does not have {VENDOR}/gpu={U1} as it is now"):
        await side.side.inline([f"{VENDOR}/gpu={U1}"])


async def test_after_a_restart_a_lost_gpu_keeps_back_only_itself(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """The tool answers for all GPUs or for none, so the others use the spec of the agent before, as
    long as the driver is the same.
    """
    known = msgspec.structs.replace(golden_inventory(), driver_version="580.95.05")
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin(known)
    await supervisor.stop("cdi specs")
    await asyncio.to_thread(side.node.lose, 1)
    again = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, node=side.node))
    first, second = known.gpus
    lost = msgspec.structs.replace(
        second, present=False, health=Health(ok=False, reason="GPU is lost")
    )
    await again.begin(msgspec.structs.replace(known, gpus=(first, lost)))
    assert again.withheld() == ""
    assert again.healthy == [U0]
    _, edits = await again.side.inline([f"{VENDOR}/gpu={U0}"])
    assert "/dev/nvidia0" in {node["path"] for node in edits["deviceNodes"]}
    assert "GPU is lost" in again.side.status().specs[0].error


async def test_a_start_waits_a_moment_for_a_spec_that_is_being_made(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU was cut for the container that is about to start.
    The kubelet would ask again after a quarter of a minute only.
    """
    monkeypatch.setattr(identification, "POD_WAIT_SECONDS", PATIENCE_SECONDS)
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    await asyncio.to_thread(side.node.set_mig, 1, ["1g.5gb"])
    (uuid,) = side.node.mig_uuids(1)
    starting = asyncio.ensure_future(side.side.inline([f"{VENDOR}/gpu={uuid}"]))
    await asyncio.sleep(0.05)
    assert not starting.done()
    first, second = golden_inventory().gpus
    slices = (
        MigInstance(uuid, 0, 7, 0, "1g.5gb", 4864, 1, 1, ("/dev/nvidia-caps/nvidia-cap201",)),
    )
    side.side.observe(
        Inventory(
            2, (first, msgspec.structs.replace(second, mig_enabled=True, mig_instances=slices))
        )
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, edits = await starting
    assert "/dev/nvidia1" in {node["path"] for node in edits["deviceNodes"]}


async def test_a_change_of_health_runs_no_tool(tmp_path: Path, supervisor: Supervisor) -> None:
    """Inventories come with every temperature. A spec says which devices there are."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor))
    await side.begin()
    first, second = golden_inventory().gpus
    for version in range(2, 6):
        ill = msgspec.structs.replace(
            second,
            health=msgspec.structs.replace(second.health, ok=version % 2 == 0, reason="XID 79"),
        )
        side.side.observe(Inventory(version, (first, ill)))
    await asyncio.sleep(0.15)
    assert len(await asyncio.to_thread(lambda: side.tool.calls)) == 1
