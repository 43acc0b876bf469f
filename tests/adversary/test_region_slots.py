"""Attacks on the slots in which regions lie (`components/region-slots`):
file systems of a fixed size, one for each container.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.test_volcano_metrics import until_used
from tests.component.volcano import VGPU, VolcanoStage, asks, volcano_stage
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation import hami_region
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.isolation.hami_core import HamiCore, containers_directory
from vgpu_agent.journal import Journal
from vgpu_agent.model import Gpu, Owner, Share
from vgpu_agent.mps.directories import mount_tmpfs
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.runtime.region_guard import GuardedPlace, RegionGuard
from vgpu_agent.runtime.region_slots import SLOT_KIB, RegionSlots, mount_slots, resolve_slot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")

GPU = Gpu("GPU-11111111-aaaa-bbbb-cccc-000000000001", 0, 0, "NVIDIA A10", 24576, "0000:07:00.0")


class Node:
    """A node's files, with two slots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = folder / "vgpu"
        self.host.mkdir(0o755)
        (self.host / "libvgpu.so.1").write_bytes(b"\x7fELF")
        self.backend = HamiCore(str(self.host), str(self.host / "libvgpu.so.1"))
        self.regions = containers_directory(str(self.host))
        self.slots = Path(self.regions).parent / "slots"
        self.journal = Journal()
        self.start_agent()

    def start_agent(self) -> None:
        """An agent that knows nothing but what lies on the disk."""
        self.guard = RegionGuard(
            [GuardedPlace(self.regions, [""], lambda _: hami_region.SIZE)],
            self.journal,
            pause_seconds=300,
        )
        self.grants = GrantDirectory(
            str(self.folder / "cdi"),
            self.journal,
            kept_directory=str(self.folder / "kept"),
            proc_root=str(self.folder / "proc"),
            free_disk_space=self.guard.look,
            slots=[RegionSlots(self.regions)],
        )

    def provision(self, uid: str) -> Provision:
        """The provision of the container ``main`` of a pod."""
        return self.backend.provision(
            Target(uid, "main", uid, frozenset(), ((GPU, Share(GPU.uuid, 3000, 50)),))
        )

    async def deliver(self, uid: str) -> Path:
        """Start a container; its region, as the spec names it."""
        provision = self.provision(uid)
        owner, shares = Owner("main", uid, "default", uid), (Share(GPU.uuid, 3000, 50),)
        token = grant_token("volcano.sh/vgpu-number", [f"{GPU.uuid}-{uid}"])
        record = GrantRecord(
            token,
            "volcano-vgpu",
            "volcano.sh/vgpu-number",
            1,
            owner,
            shares,
            "",
            1.0,
            provision.own_directory,
        )
        await self.grants.deliver(record, provision)
        return Path(provision.files[0].path)

    def used(self) -> dict[str, list[str]]:
        """Slot → what is in it, of those with something in them."""
        return {
            slot.name: names
            for slot in sorted(self.slots.iterdir())
            if (names := sorted(os.listdir(slot)))
        }


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """One node."""
    made = Node(tmp_path)
    assert mount_slots(made.regions, 2, mount_tmpfs) == 2
    yield made
    unmount(made.slots)


def unmount(slots: Path) -> None:
    """Take all slots away, as a reboot does."""
    for slot in sorted(slots.iterdir()):
        if slot.is_mount():
            subprocess.run(["umount", "--lazy", str(slot)], check=True)


def append_for_ever(descriptor: int) -> None:
    """Write until that fails."""
    while True:
        os.write(descriptor, b"x" * 65536)


def fill(region: Path) -> int:
    """Write to a region until there is no more room; how many bytes it takes."""
    descriptor = os.open(region, os.O_WRONLY | os.O_APPEND)
    try:
        with pytest.raises(OSError, match="No space left on device"):
            append_for_ever(descriptor)
        return os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)


async def test_a_tenant_cannot_take_more_than_its_slot(node: Node) -> None:
    """There is no watch here: the kernel has no more for it, neither by writing nor by allocating.
    The neighbour has all of its own.
    """
    region, neighbour = await node.deliver("greedy"), await node.deliver("neighbour")
    assert fill(region) <= SLOT_KIB << 10
    for mode in ([], ["--keep-size"]):
        allocated = await asyncio.to_thread(
            subprocess.run,
            ["fallocate", *mode, "-l", "1G", str(region)],
            check=False,
            capture_output=True,
        )
        assert allocated.returncode != 0
    assert os.stat(region).st_dev != os.stat(node.host).st_dev
    assert os.stat(neighbour).st_size == hami_region.SIZE
    assert fill(neighbour) > hami_region.SIZE  # all that it ever needs


async def test_a_full_slot_keeps_its_container_from_no_restart(node: Node) -> None:
    """Files that the container wrote beyond its region are removed first.
    Then a new region replaces the old one.
    """
    region = await node.deliver("greedy")
    fill(region)
    assert await node.deliver("greedy") == region
    assert region.stat().st_size == hami_region.SIZE
    assert node.used() == {"000": ["greedy_main"]}


async def test_a_slot_is_free_again_when_its_container_has_ended(node: Node) -> None:
    """With all that the container has left in it;
    further containers lie on the disk, as those of a node without slots.
    """
    fill(await node.deliver("first"))
    await node.deliver("second")
    third = await node.deliver("third")
    assert os.stat(third).st_dev == os.stat(node.host).st_dev
    assert stat.S_ISDIR(os.lstat(third.parent).st_mode)
    await node.grants.collect(lambda record: record.owner.pod_uid != "first")
    assert node.used() == {"001": ["second_main"]}
    assert "first_main" not in os.listdir(node.regions)
    await node.deliver("fourth")
    assert node.used() == {"000": ["fourth_main"], "001": ["second_main"]}


async def test_an_agent_that_starts_anew_finds_each_container_in_its_slot(node: Node) -> None:
    """An upgrade changes nothing for running containers, and gives none of their slots away."""
    await node.deliver("first")
    node.start_agent()
    await node.grants.load()
    await node.deliver("second")
    await node.deliver("first")
    assert node.used() == {"000": ["first_main"], "001": ["second_main"]}


async def test_after_a_reboot_regions_are_made_again(node: Node) -> None:
    """Slots are in memory: empty after a reboot, or missing when they are not mounted any more."""
    region = await node.deliver("first")
    await asyncio.to_thread(unmount, node.slots)
    await asyncio.to_thread(mount_slots, node.regions, 2, mount_tmpfs)
    node.start_agent()
    assert (await node.deliver("first")).stat().st_size == hami_region.SIZE
    assert node.used() == {"000": ["first_main"]}
    await asyncio.to_thread(unmount, node.slots)
    node.start_agent()
    assert await node.deliver("first") == region
    assert os.stat(region).st_dev == os.stat(node.host).st_dev
    assert await asyncio.to_thread(mount_slots, node.regions, 2, mount_tmpfs) == 2
    assert await asyncio.to_thread(mount_slots, node.regions, 2, mount_tmpfs) == 0


async def test_a_slot_that_was_taken_and_never_used_is_given_back(node: Node) -> None:
    """An agent was killed before the link."""
    (node.slots / "000" / "killed_main").mkdir()
    await node.deliver("first")
    node.start_agent()
    await node.grants.tidy()
    assert node.used() == {"001": ["first_main"]}


async def test_a_slot_that_another_agent_is_just_taking_is_left_alone(node: Node) -> None:
    """In an update the new agent reads the files while the old one delivers grants. Their regions
    would be gone before their containers start.
    """
    (node.slots / "000" / "first_main").mkdir()
    node.start_agent()
    await node.grants.load()
    assert node.used() == {"000": ["first_main"]}


async def test_a_removed_region_that_is_still_open_fills_nobody_elses_slot(node: Node) -> None:
    """A container may hand its open region to another one of its pod before it ends.
    The file lives on, and can still grow.
    """
    region = await node.deliver("first")
    descriptor = os.open(region, os.O_RDWR)
    try:
        await node.grants.collect(lambda _: False)
        assert node.used() == {}
        await node.deliver("second")
        assert node.used() == {"001": ["second_main"]}
        node.start_agent()
        third = await node.deliver("third")
        assert os.stat(third).st_dev == os.stat(node.host).st_dev
    finally:
        os.close(descriptor)
    await node.deliver("fourth")
    assert node.used() == {"000": ["fourth_main"], "001": ["second_main"]}


async def test_a_full_disk_costs_no_slots(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link lies on the disk. The kubelet asks again every few seconds,
    and each try would take a slot for good.
    """

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", refuse)
        for _ in range(3):
            with pytest.raises(HostFileError, match="No space left on device"):
                await node.deliver("first")
    await node.deliver("first")
    await node.deliver("second")
    assert sorted(node.used().values()) == [["first_main"], ["second_main"]]


async def test_an_agent_that_was_killed_while_it_removed_a_slot_removes_nobody_elses(
    node: Node,
) -> None:
    """The directory was gone and the link was not.
    A container of that name may have the same slot by then.
    """
    await node.deliver("first")
    aside = Path(node.regions) / ".vgpu-agent-gone-0123456789abcdef"
    aside.symlink_to("../slots/001/second_main")
    node.start_agent()
    await node.grants.tidy()
    region = await node.deliver("second")
    await node.grants.sweep(node.regions, lambda name: not name.startswith("."))
    assert region.stat().st_size == hami_region.SIZE
    assert node.used() == {"000": ["first_main"], "001": ["second_main"]}


async def test_a_link_that_leads_anywhere_else_is_not_followed(node: Node) -> None:
    """Only links as the agent makes them lead into a slot;
    of others nothing behind them is read, made or removed.
    """
    await node.deliver("first")
    precious = node.folder / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    for target in (
        str(precious),
        "../../precious",
        "../slots/../../../precious",
        "../slots/000/../../../../precious",
    ):
        path = f"{node.regions}/link_main"
        os.symlink(target, path)
        assert await asyncio.to_thread(resolve_slot, path) == path
        await node.grants.sweep(node.regions, lambda name: name != "link_main")
        assert "link_main" not in os.listdir(node.regions)
    assert (precious / "file").read_text() == "kept"


async def test_a_region_on_the_disk_stays_there_while_its_container_lives(node: Node) -> None:
    """A container from before there were slots has it mounted.
    One that starts again under its name keeps its directory.
    """
    await asyncio.to_thread(unmount, node.slots)
    region = await node.deliver("old")
    await asyncio.to_thread(mount_slots, node.regions, 2, mount_tmpfs)
    assert await node.deliver("old") == region
    assert os.stat(region).st_dev == os.stat(node.host).st_dev


@pytest.mark.component
async def test_the_agent_itself_uses_the_slots(folder: Path) -> None:
    """From PreStartContainer to the collecting,
    with what the container uses in the metrics between them.
    """
    regions = containers_directory(str(folder / "vgpu"))
    (folder / "vgpu").mkdir(mode=0o755)
    await asyncio.to_thread(mount_slots, regions, 2, mount_tmpfs)
    slots = Path(regions).parent / "slots"
    try:
        async with volcano_stage(folder, of=VolcanoStage) as stage:
            await stage.start_agent(VGPU)
            await stage.serve("train", asks(1, 16))
            (slot,) = [slot for slot in sorted(slots.iterdir()) if os.listdir(slot)]
            (directory,) = slot.iterdir()
            (region,) = directory.iterdir()
            assert region.stat().st_size == hami_region.SIZE
            await until_used(stage, {"train": 0})
            stage.cluster.delete_pod("train")
            await stage.cluster.until(lambda: not os.listdir(slot))
    finally:
        await asyncio.to_thread(unmount, slots)
