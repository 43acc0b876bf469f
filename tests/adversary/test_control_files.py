"""Attacks by way of the files of vgpu-control: those that a container writes to, and those that it
only reads.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import eventually
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.isolation.registry import VGPU_CONTROL, decisive_variables
from vgpu_agent.isolation.vgpu_config import SIZE
from vgpu_agent.isolation.vgpu_control import (
    CardLimit,
    ComputePolicy,
    ControlTarget,
    VgpuControl,
    slot_limit,
)
from vgpu_agent.isolation.vgpu_tables import VMEM_SIZE, read_vmem
from vgpu_agent.journal import Journal
from vgpu_agent.model import Owner, Share
from vgpu_agent.mps.directories import mount_tmpfs
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.runtime.live_limits import change_limit
from vgpu_agent.runtime.region_guard import GuardedPlace, RegionGuard
from vgpu_agent.runtime.region_slots import SLOT_KIB, RegionSlots, mount_slots

CARD = CardLimit(0, "GPU-11111111-aaaa-bbbb-cccc-000000000001", 50, 3000, card_memory_mib=24576)
VMEM, SM_NODE, CONFIG = "vmem_node/vmem_node.config", "sm_node/sm_node.config", "config/vgpu.config"
LOCK = "vgpu_lock/vgpu_0.lock"
WRITABLE = {VMEM: VMEM_SIZE, SM_NODE: 8192, LOCK: 4096, "sm_node/sm_node.lock": 4096}


class Node:
    """A node's files: the library, and the grants of an agent on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = folder / "manager"
        self.host.mkdir(0o755)
        (self.host / "libvgpu-control.so.1").write_bytes(b"\x7fELF")
        (self.host / "ld.so.preload").write_text("the library")
        backend = VgpuControl(
            str(self.host), str(self.host / "libvgpu-control.so.1"), tracks_virtual_memory=True
        )
        self.provision = backend.provision(
            ControlTarget("uid", "pod", "default", "main", ("id",), (CARD,))
        )
        self.directory = Path(self.provision.own_directory)
        self.record = GrantRecord(
            grant_token("number", ["id"]),
            "a family",
            "number",
            1,
            Owner("main", "uid", "default", "pod"),
            (Share(CARD.uuid, 3000, 50),),
            "",
            1.0,
            self.provision.own_directory,
        )
        self.journal = Journal()
        self.cdi = folder / "cdi"
        self.guard = RegionGuard(
            [
                GuardedPlace(
                    str(self.directory.parent), VGPU_CONTROL.folders, VGPU_CONTROL.allowed_size
                )
            ],
            self.journal,
            pause_seconds=300,
        )
        self.grants = GrantDirectory(
            str(self.cdi),
            self.journal,
            kept_directory=str(folder / "kept"),
            proc_root=str(folder / "proc"),
            on_file_made=self.guard.take,
        )

    async def start(self) -> list[tuple[str, bool]]:
        """PreStartContainer, and (source, whether it is read-only) as they are in the spec then."""
        await self.grants.deliver(self.record, self.provision)
        (spec,) = self.cdi.glob("*.json")
        mounts = json.loads(spec.read_text())["devices"][0]["containerEdits"]["mounts"]
        return [(mount["hostPath"], "ro" in mount["options"]) for mount in mounts]

    def path(self, name: str) -> Path:
        """A file of the container."""
        return self.directory / name


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """One node."""
    return Node(tmp_path)


def test_a_container_writes_to_files_and_to_no_directory(node: Node) -> None:
    """vgpu-manager §7.4 mounts three directories of mode 0777. Who can write to a directory decides
    what is mounted from it, and can fill the disk with files that no guard knows.
    """
    for source, read_only in asyncio.run(node.start()):
        assert read_only or stat.S_ISREG(os.stat(source).st_mode), source
        assert os.path.realpath(source) == source
        for parent in Path(source).parents:
            if parent == node.folder:
                break
            status = parent.stat()
            assert (status.st_uid, status.st_mode & 0o022) == (os.geteuid(), 0), parent


def test_what_a_container_only_reads_no_user_of_it_can_write(node: Node) -> None:
    """Its limits, and whose processes count as its own."""
    for source, read_only in asyncio.run(node.start()):
        if read_only:
            for path in (Path(source), *Path(source).glob("*")):
                assert not path.stat().st_mode & 0o022, path


@pytest.mark.parametrize("name", WRITABLE)
async def test_a_container_cannot_fill_the_disk_with_its_files(name: str, node: Node) -> None:
    """The guard knows how large each may be; the locks are empty, and may have a page."""
    await node.start()
    task = asyncio.create_task(node.guard.run())
    try:
        path = str(node.path(name))
        await eventually(lambda: path in node.guard._regions)
        script = f"import os; os.posix_fallocate(os.open({path!r}, os.O_RDWR), 0, 64 << 20)"
        command = [sys.executable, "-c", script]
        await asyncio.to_thread(subprocess.run, command, check=True)
        await eventually(lambda: os.stat(path).st_size == WRITABLE[name])
        await eventually(lambda: bool(node.journal.entries))
        (entry,) = node.journal.entries
        assert (entry.event, entry.facts["container"]) == ("region.cut", "uid_main")
    finally:
        task.cancel()


async def test_no_lease_keeps_a_limit_from_being_changed(node: Node) -> None:
    """Root in a container owns the file as far as the kernel is concerned. For reading it gets no
    lease while the guard has the file open for writing.
    """
    await node.start()
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with node.path(CONFIG).open("rb") as held:
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        change_limit(str(node.path(CONFIG)), 0, slot_limit(CARD, ComputePolicy.NONE))
    signal.signal(signal.SIGIO, before)


async def test_what_a_container_has_written_ends_with_it(node: Node) -> None:
    """Rows of processes that are gone would count against it, and a list of processes that is out
    of date would give it the memory of others (vgpu-manager §7.5).
    """
    await node.start()
    node.path(VMEM).write_bytes(b"\xff" * VMEM_SIZE)
    node.path(SM_NODE).write_bytes(b"junk")
    node.path("config/pids.config").write_text("4711\n")
    await node.start()
    content = node.path(VMEM).read_bytes()
    assert read_vmem(len(content), lambda at, size: content[at : at + size]) == ()
    assert node.path(SM_NODE).stat().st_size == 8192
    assert not node.path("config/pids.config").exists()


async def test_links_in_the_place_of_files_are_removed_themselves(node: Node) -> None:
    """Only root could put them there; nothing is written through them all the same."""
    await node.start()
    other = node.folder / "other"
    other.write_text("somebody's")
    for name in (VMEM, LOCK, CONFIG, "config/pids.config"):
        node.path(name).unlink(missing_ok=True)
        node.path(name).symlink_to(other)
    await node.start()
    assert other.read_text() == "somebody's"
    assert node.path(CONFIG).stat().st_size == SIZE
    assert not node.path(VMEM).is_symlink()
    assert not node.path("config/pids.config").is_symlink()


async def test_a_restored_spec_takes_nothing_from_a_container_that_runs(node: Node) -> None:
    """vgpu-manager §7.5 is for starts. After a loss of /run the specs are written anew under
    containers that run, which have their list of processes, and their tables mapped.
    """
    await node.start()
    node.path("config/pids.config").write_text("4711\n")
    files = {name: node.path(name).stat().st_ino for name in (VMEM, SM_NODE, CONFIG, LOCK)}
    with node.path(VMEM).open("r+b") as ledger:
        ledger.seek(128)
        ledger.write(b"row")
    (spec,) = node.cdi.glob("*.json")
    spec.unlink()
    assert await node.grants.restore([(node.record, node.provision)]) == 1
    assert {name: node.path(name).stat().st_ino for name in files} == files
    assert b"row" in node.path(VMEM).read_bytes()
    assert node.path("config/pids.config").read_text() == "4711\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_in_a_slot_a_container_takes_no_more_than_that(node: Node) -> None:
    """With components/vgpu-control-slots the kernel is the bound: nothing of the disk, whatever is
    written to. A full slot keeps the container from no restart.
    """
    containers = str(node.directory.parent)
    assert mount_slots(containers, 1, mount_tmpfs) == 1
    slot = node.host / "slots" / "000"
    node.grants = GrantDirectory(
        str(node.cdi),
        node.journal,
        kept_directory=str(node.folder / "kept"),
        proc_root=str(node.folder / "proc"),
        slots=[RegionSlots(containers)],
    )
    try:
        for _ in range(2):
            asyncio.run(node.start())
            assert node.path(VMEM).stat().st_dev == slot.stat().st_dev
            assert os.listdir(slot) == ["uid_main"]
            command = ["fallocate", "-l", "1G", str(node.path(LOCK))]
            assert subprocess.run(command, check=False, capture_output=True).returncode != 0
            with node.path(LOCK).open("r+b") as lock, pytest.raises(OSError, match="No space left"):
                lock.write(bytes(SLOT_KIB << 10))
        # as an agent does that was killed before its link was there
        os.unlink(node.directory)
        RegionSlots(containers).remove_orphans()
        assert os.listdir(slot) == []
    finally:
        subprocess.run(["umount", "--lazy", str(slot)], check=True)


def test_a_pod_cannot_leave_its_limit_by_a_variable_of_its_own() -> None:
    """With early binding the pod's value wins, so such a start is refused; each of them is answered
    with late binding, where the agent's wins.
    """
    answered = VgpuControl("/h", "/l").provision(
        ControlTarget("uid", "pod", "default", "main", ("id",), (CARD,))
    )
    decisive = decisive_variables(answered.edits.environment)
    assert {"CUDA_SM_SHARED_BUCKET", "MANAGER_COMPATIBILITY_MODE"} <= decisive
    assert decisive <= answered.edits.environment.keys()
    assert decisive_variables({"PATH"}) == frozenset()
