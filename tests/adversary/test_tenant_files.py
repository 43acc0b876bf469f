"""Attacks by way of the files that a container shares with the agent: its region, and whatever an
earlier version let it write to.
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
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation import hami_region
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import HostFile, Mount, Provision
from vgpu_agent.isolation.hami_core import HamiCore, uses_lock
from vgpu_agent.journal import Journal
from vgpu_agent.model import Gpu, Owner, Share
from vgpu_agent.pods import Pod, PodCache, PodContainer
from vgpu_agent.runtime import container_usage, host_files
from vgpu_agent.runtime.container_usage import ContainerUsages
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.runtime.mounts import MountTables
from vgpu_agent.runtime.region_guard import GuardedPlace, RegionGuard

GPU = Gpu("GPU-11111111-aaaa-bbbb-cccc-000000000001", 0, 0, "NVIDIA A10", 24576, "0000:07:00.0")
TENANT = 1000
SHADOW = "/etc/shadow"
FALLOC_FL_KEEP_SIZE = 1


class Node:
    """A node's files: the library, and the grants of an agent on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = folder / "vgpu"
        self.host.mkdir(0o755)
        self.library = self.host / "libvgpu.so.1"
        self.library.write_bytes(b"\x7fELF")
        (self.host / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so")
        self.backend = HamiCore(str(self.host), str(self.library))
        self.journal = Journal()
        self.cdi = folder / "cdi"
        self.grants = GrantDirectory(
            str(self.cdi),
            self.journal,
            kept_directory=str(folder / "kept"),
            proc_root=str(folder / "proc"),
            free_disk_space=lambda: None,
        )

    def provision(self) -> Provision:
        """The provision of the container ``uid_main``."""
        return self.backend.provision(
            Target("uid", "main", "token", frozenset(), ((GPU, Share(GPU.uuid, 3000, 50)),))
        )

    def record(self) -> GrantRecord:
        """The record of its grant."""
        token = grant_token("volcano.sh/vgpu-number", [f"{GPU.uuid}-1"])
        owner = Owner("main", "uid", "default", "pod")
        shares = (Share(GPU.uuid, 3000, 50),)
        return GrantRecord(
            token,
            "volcano-vgpu",
            "volcano.sh/vgpu-number",
            1,
            owner,
            shares,
            "",
            1.0,
            self.provision().own_directory,
        )

    async def mounts_at_start(self) -> list[tuple[str, bool]]:
        """PreStartContainer, and (source, whether it is read-only) as they are in the spec then."""
        await self.grants.deliver(self.record(), self.provision())
        (spec,) = self.cdi.glob("*.json")
        mounts = json.loads(spec.read_text())["devices"][0]["containerEdits"]["mounts"]
        return [
            (mount["hostPath"], "ro" in mount["options"])
            for mount in mounts
            if mount.get("type") != "tmpfs"
        ]

    @property
    def region(self) -> Path:
        """The container's region."""
        return Path(self.provision().files[0].path)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """One node."""
    return Node(tmp_path)


def replace_all_by_links(sources: Iterable[tuple[str, bool]]) -> int:
    """Do as a container's root in the directories that it may write to:
    each entry becomes a link to the file that it is after.
    """
    replaced = 0
    for source, read_only in sources:
        if not read_only and os.path.isdir(source):
            for entry in list(os.scandir(source)):
                os.unlink(entry.path)
                os.symlink(SHADOW, entry.path)
                replaced += 1
    return replaced


def resolved(sources: Iterable[tuple[str, bool]]) -> list[str]:
    """The files that a runtime would mount."""
    return [os.path.realpath(source) for source, _ in sources]


async def test_a_tenant_cannot_choose_what_is_mounted_into_its_container(node: Node) -> None:
    """A runtime follows links in the source of a mount. Between PreStartContainer and the mount, a
    container that runs already (a sibling, the one before) replaces what it can; whatever the
    runtime resolves then must be what the agent meant.
    """
    sources = await node.mounts_at_start()
    replaced = replace_all_by_links(sources)
    assert resolved(sources) == [source for source, _ in sources]
    assert replaced == 0


async def test_no_directory_of_the_host_is_writable_in_a_container(node: Node) -> None:
    """The class behind it: what is writable is one file of a fixed place, and every directory on
    the way to a source is root's alone.
    """
    for source, read_only in await node.mounts_at_start():
        assert read_only or stat.S_ISREG(os.stat(source).st_mode), source
        for parent in Path(source).parents:
            if parent == node.folder:
                break
            status = parent.stat()
            assert (status.st_uid, status.st_mode & 0o022) == (os.geteuid(), 0), parent


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
async def test_another_user_cannot_replace_a_region(node: Node) -> None:
    """A user without root in the container, with some other way to the host's path."""
    await node.mounts_at_start()
    script = f"import os; os.rename({str(node.region)!r}, {str(node.region) + '.old'!r})"
    done = await asyncio.to_thread(
        subprocess.run,
        [
            "setpriv",
            f"--reuid={TENANT}",
            f"--regid={TENANT}",
            "--clear-groups",
            sys.executable,
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert node.region.is_file()


def old_directory(node: Node) -> Path:
    """The directory that an agent of the version before has made for the container,
    after the container's attack.
    """
    made = node.host / "vgpu" / "containers" / "uid_main"
    made.mkdir(parents=True)
    made.chmod(0o777)
    (made / node.region.name).symlink_to(SHADOW)
    os.mkfifo(made / "fifo")
    return made


async def test_an_upgrade_does_not_reuse_what_a_container_could_write_to(node: Node) -> None:
    """The container of a pod from before runs on with its directory mounted;
    started again, it gets a region where it never was.
    """
    old = old_directory(node)
    sources = await node.mounts_at_start()
    replace_all_by_links([(str(old), False)])
    assert not any(Path(source).is_relative_to(old) for source, _ in sources)
    assert resolved(sources) == [source for source, _ in sources]
    assert node.region.stat().st_size == hami_region.SIZE


async def test_no_container_is_started_from_a_spec_of_before(node: Node) -> None:
    """While the API server is away, containers start from the specs that are there. One of the
    version before must be written anew.
    """
    record = msgspec.structs.replace(node.record(), own_directory=str(old_directory(node)))
    await node.grants.deliver(record, node.provision())
    earlier = str(node.host / "vgpu" / "containers")
    after = GrantDirectory(
        str(node.cdi), node.journal, kept_directory=str(node.folder / "kept"), old_directory=earlier
    )
    await after.load()
    assert not await after.has_usable_spec(record.token)
    assert after.has_outdated_spec
    await after.deliver(node.record(), node.provision())
    assert await after.has_usable_spec(record.token)
    assert not after.has_outdated_spec


async def test_an_early_answer_from_before_cannot_be_turned_into_a_way_out(node: Node) -> None:
    """The kubelet keeps the answer of the version before, which mounts that directory, and it
    cannot be changed. A sibling container that has the directory open (by a shared PID namespace)
    writes to the old one, while the runtime is given a new one.
    """
    old = old_directory(node)
    opened = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    provision = node.provision()
    kept = Provision(
        provision.edits,
        provision.directories,
        provision.files,
        provision.own_directory,
        provision.earlier_directory,
        replaces_earlier=True,
    )
    for _ in range(3):  # it restarts, and the attacker opens whatever it gets to see
        await node.grants.write_host_files(node.record(), kept)
        for name in os.listdir(opened):
            os.unlink(name, dir_fd=opened)
        os.symlink(SHADOW, node.region.name, dir_fd=opened)
        source = old / node.region.name
        assert resolved([(str(source), False)]) == [str(source)]
        assert source.samefile(node.region)
        os.close(opened)
        opened = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    os.close(opened)


async def test_a_fifo_in_the_regions_place_holds_up_no_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put there at the worst moment, between two looks at the file, it would hang a thread that
    serves the starts of all pods.
    """
    await node.mounts_at_start()
    really = host_files._is_fresh

    def swap(descriptor: int, file: HostFile) -> bool:
        answer = really(descriptor, file)
        os.unlink(file.path)
        os.mkfifo(file.path)
        return answer

    monkeypatch.setattr(host_files, "_is_fresh", swap)
    started = threading.Thread(
        target=host_files.make_file,
        args=(node.provision().files[0], MountTables("/nowhere")),
        daemon=True,
    )
    started.start()
    await asyncio.to_thread(started.join, PATIENCE_SECONDS / 4)
    assert not started.is_alive()
    monkeypatch.undo()
    await node.mounts_at_start()
    assert stat.S_ISREG(node.region.lstat().st_mode)


async def test_a_lease_on_the_region_holds_up_no_start(node: Node) -> None:
    """Root in a container owns the file as far as the kernel is concerned, and may take a lease,
    on which an open waits 45 s.
    """
    await node.mounts_at_start()
    # the kernel asks the holder to give it back
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with node.region.open("r+b") as held:
        try:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("this file system grants no leases")
        began = time.monotonic()
        await node.mounts_at_start()
        assert time.monotonic() - began < PATIENCE_SECONDS / 4
    signal.signal(signal.SIGIO, before)
    assert node.region.stat().st_size == hami_region.SIZE


async def test_a_full_disk_kills_no_neighbour(node: Node) -> None:
    """The library maps its region. A page that the disk cannot take at that moment is SIGBUS for a
    program that has done nothing wrong.
    """
    await node.mounts_at_start()
    assert node.region.stat().st_blocks * 512 >= hami_region.SIZE


GROW = {
    "write": "os.pwrite(file, bytes(1 << 20), SIZE)",
    "truncate": "os.ftruncate(file, 1 << 30)",
    "allocate": "os.posix_fallocate(file, 0, 64 << 20)",
    "allocate behind the end": (
        f"libc.fallocate64(file, {FALLOC_FL_KEEP_SIZE}, ctypes.c_long(0), ctypes.c_long(64 << 20))"
    ),
}


@pytest.mark.parametrize("how", GROW)
async def test_a_tenant_cannot_fill_the_disk_with_its_region(how: str, node: Node) -> None:
    """The file systems of other directories have no quota for it.
    It is cut back at once, logged once, and counted each time.
    """
    await node.mounts_at_start()
    guard = RegionGuard(
        [GuardedPlace(str(node.host / "vgpu" / "regions"), [""], lambda _: hami_region.SIZE)],
        node.journal,
        pause_seconds=300,
    )
    task = asyncio.create_task(guard.run())
    try:
        await eventually(lambda: bool(guard._regions))
        for times in (1, 2):
            script = f"import ctypes, os; SIZE = {hami_region.SIZE}; libc = ctypes.CDLL(None)\n"
            script += f"file = os.open({str(node.region)!r}, os.O_RDWR)\n"
            await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", script + GROW[how]], check=True
            )
            await eventually(lambda times=times: guard.cuts >= times)
            await eventually(lambda: node.region.stat().st_size == hami_region.SIZE)
            await eventually(
                lambda: node.region.stat().st_blocks * 512 < hami_region.SIZE + (256 << 10)
            )
        assert [entry.event for entry in node.journal.entries] == ["region.cut"]
    finally:
        task.cancel()


async def test_no_region_escapes_the_guard_by_being_new_or_made_anew(node: Node) -> None:
    """Neither a region that was made a moment ago, nor one that has taken the place of an ended
    container's, waits for the next look.
    """
    guard = RegionGuard(
        [GuardedPlace(str(node.host / "vgpu" / "regions"), [""], lambda _: hami_region.SIZE)],
        node.journal,
        pause_seconds=300,
    )
    task = asyncio.create_task(guard.run())
    try:
        await eventually(lambda: guard._thread is not None)
        node.grants._on_file_made = guard.take
        for times in (1, 2):
            await node.mounts_at_start()
            with node.region.open("r+b") as file:
                file.truncate(1 << 26)
            await eventually(lambda times=times: guard.cuts >= times)
            node.region.unlink()
    finally:
        task.cancel()


async def test_a_start_finds_room_that_a_tenant_has_just_taken(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that has grown until nothing else fits is cut
    before the neighbour's start is refused.
    """
    really = os.posix_fallocate
    room: list[bool] = []

    def full(descriptor: int, offset: int, length: int) -> None:
        if not room:
            raise OSError(28, "No space left on device")
        really(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(node.grants, "_free_disk_space", lambda: room.append(True))
    assert await node.mounts_at_start()


async def test_a_shortened_region_hurts_nobody_but_its_container(node: Node) -> None:
    """Read with pread, never mapped: what is missing is no signal.
    The next start has a whole one.
    """
    await node.mounts_at_start()
    usages = usages_of(node)
    for size in (0, 1, 100, hami_region.SIZE - 1):
        os.truncate(node.region, size)
        await usages.read_once()
    await node.mounts_at_start()
    assert node.region.stat().st_size == hami_region.SIZE


def usages_of(node: Node) -> ContainerUsages:
    """The reader behind the metrics, of directories from before, too."""
    book = PodCache()
    book.put(Pod("uid", "default", "pod", phase="Running", containers=(PodContainer("main"),)))
    directories = [str(node.host / "vgpu" / "regions"), str(node.host / "vgpu" / "containers")]
    return ContainerUsages(
        book, directories, node.journal, pause_seconds=5, proc_root=str(node.folder / "proc")
    )


async def test_a_tenant_cannot_hang_or_fill_the_reading_of_regions(node: Node) -> None:
    """In a directory from before: FIFOs, links, a device, a file of a terabyte,
    and an endless number of names.
    """
    old = old_directory(node)
    os.mkfifo(old / "a.cache")
    (old / "b.cache").symlink_to("/dev/zero")
    with (old / "c.cache").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    for number in range(2000):
        (old / f"{number}.cache").touch()
    usages = usages_of(node)
    await asyncio.wait_for(usages.read_once(), PATIENCE_SECONDS)
    assert usages.usage.value == ()


async def test_reading_that_hangs_keeps_no_container_from_starting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts have threads of their own. The loop names what hangs, once, and goes on."""
    back = threading.Event()
    monkeypatch.setattr(container_usage, "_DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr(container_usage, "_region", lambda *_: back.wait(60))
    usages = usages_of(node)
    for _ in range(3):
        await asyncio.wait_for(usages.read_once(), PATIENCE_SECONDS)
    assert [entry.event for entry in node.journal.entries] == ["region.read_hangs"]
    await asyncio.wait_for(node.mounts_at_start(), PATIENCE_SECONDS)
    back.set()


def test_nothing_of_ours_lies_where_everybody_may_make_it_first() -> None:
    """/tmp/vgpulock of the host, made by another user with mode 0700,
    made every start of the node fail.
    """
    default = HamiCore("/usr/local/vgpu", "/usr/local/vgpu/libvgpu.so.1", library_locks=True)
    provision = default.provision(
        Target("uid", "main", "token", frozenset(), ((GPU, Share(GPU.uuid, 3000, 50)),))
    )
    sources = [mount.host_path for mount in provision.edits.mounts] + [
        directory.path for directory in provision.directories
    ]
    assert not [source for source in sources if source.startswith(("/tmp", "/var/tmp", "/dev/shm"))]


async def test_a_tenant_cannot_hold_the_lock_that_others_wait_for(node: Node) -> None:
    """Libraries before 2.8.1 wait for one lock file. Each container has a file system of its own
    for it, small, and gone with it.
    """
    node.backend = HamiCore(
        str(node.host),
        str(node.library),
        library_locks=uses_lock(b"/tmp/vgpulock/lock\0unified_lock locked"),
        late=True,
    )
    await node.mounts_at_start()
    (spec,) = node.cdi.glob("*.json")
    mounts = json.loads(spec.read_text())["devices"][0]["containerEdits"]["mounts"]
    (lock,) = [mount for mount in mounts if mount["containerPath"] == "/tmp/vgpulock"]
    assert (lock["type"], lock["hostPath"]) == ("tmpfs", "tmpfs")
    assert {"size=64k", "nr_inodes=16", "mode=1777", "nosuid", "nodev", "noexec"} <= set(
        lock["options"]
    )
    assert not uses_lock(
        b"/tmp/vgpulock/lock\0 of 2.8.1 or newer, where nothing calls the functions that are left"
    )


@pytest.mark.parametrize("what", ["mode", "owner", "link in a writable directory"])
async def test_a_source_that_others_could_replace_is_never_mounted(what: str, node: Node) -> None:
    """A directory that an operator, or an installer, has left open:
    the start is refused with the path and the remedy.
    """
    if what == "mode":
        node.host.chmod(0o775)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("gives a directory to another user")
        os.chown(node.host, TENANT, TENANT)
    else:
        (node.folder / "open").mkdir()
        (node.folder / "open").chmod(0o777)
        (node.folder / "open" / "library").symlink_to(node.library)
        node.backend = HamiCore(str(node.host), str(node.folder / "open" / "library"))
    with pytest.raises(
        HostFileError, match=r"is not mounted into containers: .*(chmod go-w|make root its owner)"
    ):
        await node.mounts_at_start()
    assert not list(node.cdi.glob("*.json"))


def test_devices_and_sticky_directories_are_no_alarm(tmp_path: Path) -> None:
    """The check must not refuse what is right:
    /dev/null (volume-mounts), and what root has in /tmp.
    """
    host_files.require_only_root(["/dev/null", str(tmp_path / "not there"), str(tmp_path), "/"])
    assert Mount("/a", "/b").host_path == "/b"


async def eventually(check: object) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not check():  # type: ignore[operator]  # a function without arguments
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
