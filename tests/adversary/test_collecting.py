"""Leftovers of an ended container that keep the agent busy, kill it,
or keep other containers' files from being collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.collector import collect
from vgpu_agent.errors import HostFileError
from vgpu_agent.journal import Journal
from vgpu_agent.runtime import grants as grants_module
from vgpu_agent.runtime import host_files, removal
from vgpu_agent.runtime.grants import GrantDirectory

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="gives files to other users, and capabilities up (setpriv)",
)
STRANGER = 4242
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_IMMUTABLE = 0x80086601, 0x40086602, 0x10  # linux/fs.h


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Path]:
    """Directories of grants: one of a container that lives,
    and one of a well-behaved container that has ended.
    """
    made = tmp_path / "containers"
    for name in ("alive_main", "ended_main"):
        (made / name).mkdir(parents=True)
        (made / name / "a.cache").write_bytes(bytes(100))
    yield made
    # Not by the code under test: pytest's own removal would stumble over what is left, in this run
    # and in the next ones.
    subprocess.run(["rm", "-rf", str(made)], check=False)


def hostile(containers: Path) -> Path:
    """The directory of a container that has ended, which it could fill as it liked."""
    made = containers / "a-hostile_main"
    made.mkdir(0o777)
    made.chmod(0o777)
    return made


def names(directory: Path) -> list[str]:
    """Names in a directory."""
    return sorted(os.listdir(directory))


def fill_deep(directory: Path, depth: int, name: str) -> None:
    """A chain of directories, made as a container makes one that no path can name."""
    descriptor = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, 0o755, dir_fd=descriptor)
        inner = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=descriptor))
    os.close(descriptor)


@needs_root
def test_no_deep_tree_ends_the_collecting(containers: Path) -> None:
    """A recursive removal raises RecursionError, which is no OSError, and the loop that collects
    for all pods is dead for good.
    """
    fill_deep(hostile(containers), 5000, "d")
    told = collect(containers)
    assert (told["freed"], told["left_over"], names(containers)) == (
        ["a-hostile_main", "ended_main"],
        {},
        ["alive_main"],
    )


@needs_root
def test_no_tree_of_the_longest_names_stays(containers: Path) -> None:
    """300 levels of 255 bytes are a path that no system call takes. The agent never builds one."""
    fill_deep(hostile(containers), 300, "n" * 255)
    assert collect(containers)["left_over"] == {}
    assert names(containers) == ["alive_main"]


@needs_root
def test_a_tenant_cannot_take_the_agents_memory_with_many_files(containers: Path) -> None:
    """A list of 200,000 names is some 20 MiB, and a million are more than the DaemonSet's limit
    leaves: killed at every start.
    """
    descriptor = os.open(hostile(containers), os.O_RDONLY)
    for number in range(200_000):
        if number % 50_000 == 0:  # as many names as a file may have
            os.mknod(first := f"{number}-first", 0o100600, dir_fd=descriptor)
        os.link(first, f"{number}-{'x' * 30}", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    os.close(descriptor)
    told = collect(containers, rounds=12)
    assert names(containers) == ["alive_main"]
    assert told["grown_kib"] < 4096
    assert told["longest_silence"] < 5  # the loop goes on beating while it collects


@needs_root
def test_a_tenant_cannot_keep_others_from_being_collected(containers: Path) -> None:
    """A directory of another user with closed permissions cannot be removed without capabilities.
    It is moved aside and shown.
    """
    locked = hostile(containers) / "locked"
    locked.mkdir()
    (locked / "file").write_text("")
    os.chown(locked, STRANGER, STRANGER)
    locked.chmod(0)
    told = collect(containers)
    # its name is free, for another container of that name
    assert told["freed"] == ["a-hostile_main", "ended_main"]
    ((path, why),) = told["left_over"].items()
    assert "Permission denied" in why
    assert names(containers) == [Path(path).name, "alive_main"]
    assert told["events"] == ["grants.left_over"]  # once, however often it is looked at


@needs_root
def test_no_folder_of_mode_0_stays_where_the_agent_owns_it(containers: Path) -> None:
    """Root in a container is root: what it has made unreadable is the agent's own
    to make readable.
    """
    attacked = hostile(containers)
    for mode in (0, 0o300, 0o700, 0o500):
        (attacked / f"{mode:o}" / "inner" / "innermost").mkdir(parents=True)
        (attacked / f"{mode:o}" / "inner").chmod(mode)
        (attacked / f"{mode:o}").chmod(mode)
    attacked.chmod(0)
    assert collect(containers)["left_over"] == {}
    assert names(containers) == ["alive_main"]


@needs_root
def test_an_empty_folder_of_another_user_does_not_stay(containers: Path) -> None:
    """To remove an empty directory takes no right in it."""
    attacked = hostile(containers)
    (attacked / "empty").mkdir(0)
    os.chown(attacked / "empty", STRANGER, STRANGER)
    os.chown(attacked, STRANGER, STRANGER)
    assert collect(containers)["left_over"] == {}
    assert names(containers) == ["alive_main"]


@needs_root
def test_a_grants_own_directory_given_away_does_not_hold_its_name(containers: Path) -> None:
    """A directory that an earlier agent mounted into its container may have any owner and mode
    by now, and is still renamed.
    """
    attacked = hostile(containers)
    (attacked / "file").write_text("")
    os.chown(attacked, STRANGER, STRANGER)
    attacked.chmod(0)
    told = collect(containers)
    assert told["freed"] == ["a-hostile_main", "ended_main"]
    assert len(told["left_over"]) == 1


@needs_root
def test_an_immutable_file_holds_up_nobody(containers: Path) -> None:
    """A file with that flag cannot be removed. All around it goes."""
    attacked = hostile(containers)
    (attacked / "gone").write_text("")
    with (attacked / "stays").open("wb") as file:
        try:
            fcntl.ioctl(file, _FS_IOC_SETFLAGS, struct.pack("l", _FS_IMMUTABLE))
        except OSError:
            pytest.skip("this file system has no such flag")
        try:
            told = collect(containers)
        finally:
            fcntl.ioctl(file, _FS_IOC_SETFLAGS, struct.pack("l", 0))
    ((path, why),) = told["left_over"].items()
    assert ("Operation not permitted" in why, names(Path(path))) == (True, ["stays"])
    assert told["freed"] == ["a-hostile_main", "ended_main"]


@needs_root
def test_a_mount_in_the_tree_holds_up_nobody(containers: Path) -> None:
    """It is busy; nothing in it is touched, and nothing else waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    point = hostile(containers) / "mounted"
    point.mkdir()
    if libc.mount(b"none", str(point).encode(), b"tmpfs", 0, b"size=64k"):
        pytest.skip("may not mount")
    (point / "precious").write_text("")
    aside = point
    try:
        removed = removal_error(point.parent)
        assert "busy" in removed.lower()
        # where mounts can be seen, what is mounted onto stays under its name
        assert collect(containers)["freed"] == ["ended_main"]
    finally:
        libc.umount2(str(aside).encode(), 2)


def removal_error(path: Path) -> str:
    """The reason for which the tree cannot be removed."""
    with pytest.raises(Exception, match="cannot remove all of") as raised:
        removal.remove_tree(str(path))
    return str(raised.value)


def test_no_link_leads_the_removal_out_of_the_tree(tmp_path: Path) -> None:
    """A link is removed as a link, at the top, below,
    and in the place of a directory that was just looked at.
    """
    outside = tmp_path / "host"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "precious").write_text("")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "link").symlink_to(outside)
    (tree / "a" / "link").symlink_to(outside)
    (tree / "a" / "b" / "up").symlink_to("../../../host")
    assert removal.remove_tree(str(tree))
    assert (outside / "inner" / "precious").exists()


def test_a_tenant_cannot_stop_the_removal_by_taking_its_names(tmp_path: Path) -> None:
    """Directories are lifted to names of the agent's own;
    files and full directories of those names are there already.
    """
    tree = tmp_path / "tree"
    for number in range(1, 30):
        name = f".vgpu-agent-lifted-{number}"
        if number % 2:
            (tree / name / "full" / "er").mkdir(parents=True)
        else:
            (tree / name).write_text("")
    (tree / "a" / "b" / "c").mkdir(parents=True)
    assert removal.remove_tree(str(tree))
    assert not tree.exists()


def test_a_tenant_that_goes_on_writing_does_not_hold_the_agent(tmp_path: Path) -> None:
    """A container that has not ended may make files as quickly as they are removed.
    The time of a turn ends all the same.
    """
    tree = tmp_path / "tree"
    tree.mkdir()
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                os.mkdir(tree / f"d{number}")
            except OSError:
                return

    writer = threading.Thread(target=write)
    writer.start()
    ticks = iter(range(1_000_000))  # a clock that moves on by one second with each question
    try:
        # a slow writer: all was gone for a moment, and then there was one more
        with contextlib.suppress(HostFileError):
            assert (
                not removal.remove_tree(str(tree), seconds=2000, clock=lambda: float(next(ticks)))
                or not tree.exists()
            )
    finally:
        stop.set()
        writer.join()


async def test_a_large_tree_does_not_hold_up_small_ones(
    containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees take turns: in the round in which a large one is begun, all small ones go."""
    monkeypatch.setattr(grants_module, "_SLICE_SECONDS", 0.02)
    monkeypatch.setattr(grants_module, "_ROUND_SECONDS", 0.3)
    attacked = hostile(containers)
    for number in range(20_000):
        os.mknod(attacked / str(number), 0o100600)
    small = [f"small-{number}_main" for number in range(5)]
    for name in small:
        (containers / name).mkdir()
    grants = collector(containers)
    freed = await grants.sweep(str(containers), lambda name: name.startswith("alive"))
    assert set(small) <= set(freed)
    left = names(containers)
    assert "alive_main" in left
    assert len(left) <= 2  # at most the large one is still being removed, under another name


async def test_no_unexpected_error_ends_the_collecting(
    containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One grant's trouble is one line, whatever kind of error it is."""
    really = removal.remove_tree
    attacked = hostile(containers)
    inode = attacked.stat().st_ino

    def remove(path: str, *, seconds: float) -> bool:
        if os.stat(path).st_ino == inode:
            raise RecursionError("maximum recursion depth exceeded")
        return really(path, seconds=seconds)

    monkeypatch.setattr(removal, "remove_tree", remove)
    grants = collector(containers)
    assert await grants.sweep(str(containers), lambda name: name.startswith("alive")) == (
        "a-hostile_main",
        "ended_main",
    )
    ((_, why),) = grants.left_over.items()
    assert "RecursionError" in why


async def test_a_removal_that_hangs_holds_up_neither_loop_nor_starts(
    containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may never answer. The loop names the path and goes on; starts use other threads."""
    monkeypatch.setattr(grants_module, "_DEADLINE_SECONDS", 0.2)
    back = threading.Event()

    def hang(path: str, *, seconds: float) -> bool:
        del path, seconds
        return back.wait(60)

    monkeypatch.setattr(removal, "remove_tree", hang)
    grants = collector(containers)
    began = time.monotonic()
    await grants.sweep(str(containers), lambda name: name.startswith("alive"))
    await grants.sweep(str(containers), lambda name: name.startswith("alive"))
    assert time.monotonic() - began < 20
    assert any(
        "has not returned" in why and host_files.ASIDE_PREFIX in why
        for why in grants.left_over.values()
    )
    assert await asyncio.wait_for(asyncio.to_thread(lambda: True), 20)  # where starts are answered
    back.set()


async def test_what_was_helped_by_hand_goes(
    containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again now and then, in every directory,
    and is no problem any more when it is gone.
    """
    monkeypatch.setattr(grants_module, "_RETRY_SECONDS", 0.0)
    really, locked = removal.remove_tree, [True]

    def remove(path: str, *, seconds: float) -> bool:
        if locked:
            raise host_files.file_error(
                "remove all of", path, PermissionError(13, "Permission denied")
            )
        return really(path, seconds=seconds)

    monkeypatch.setattr(removal, "remove_tree", remove)
    grants = collector(containers)
    for _ in range(3):
        await grants.sweep(str(containers), lambda name: name.startswith("alive"))
        await grants.sweep(str(containers.parent / "another"), lambda _: False)
    assert len(grants.left_over) == 1
    locked.clear()
    await grants.sweep(str(containers), lambda name: name.startswith("alive"))
    assert (dict(grants.left_over), names(containers)) == ({}, ["alive_main"])


async def test_more_directories_than_pods_are_taken_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No list has more entries than a fixed bound."""
    monkeypatch.setattr(grants_module, "_MAX_LISTED", 10)
    containers = tmp_path / "containers"
    for number in range(25):
        (containers / f"uid-{number:02}_main").mkdir(parents=True)
    grants = collector(containers)
    rounds = [len(await grants.sweep(str(containers), lambda _: False)) for _ in range(4)]
    assert (max(rounds), sum(rounds), names(containers)) == (10, 25, [])


async def test_killed_agents_leave_nothing_that_piles_up(tmp_path: Path) -> None:
    """Unfinished files of any life, also under the random names of earlier versions,
    are gone once an agent has started.
    """
    host, state = tmp_path / "host", tmp_path / "state"
    for directory in (host, state, host / "regions"):
        directory.mkdir(parents=True)
    (host / ".vgpu-agent-17af3c0011223344.tmp").write_bytes(bytes(1000))
    (host / "regions" / ".vgpu-agent-17af3c0011223344.tmp").mkdir()
    (state / ".remembered.json.k2j3h4").write_text("half")
    (state / "remembered.json").write_text("{}")
    grants = GrantDirectory(
        str(tmp_path / "cdi"),
        Journal(),
        kept_directory=str(tmp_path / "kept"),
        other_directories=[str(host), str(host / "regions"), str(state)],
    )
    await grants.tidy()
    assert (names(host), names(host / "regions"), names(state)) == (
        ["regions"],
        [],
        ["remembered.json"],
    )


def test_a_killed_agent_never_leaves_a_directory_that_others_cannot_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made and then opened up, a parent would stay closed for good when the agent dies in between.
    It gets its name when it is right.
    """
    for killed_at in range(12):
        base = tmp_path / str(killed_at)
        base.mkdir()
        steps = [0]

        def die(really: object, steps: list[int] = steps, killed_at: int = killed_at) -> object:
            def call(*arguments: object, **more: object) -> object:
                steps[0] += 1
                if steps[0] > killed_at:
                    raise KeyboardInterrupt
                return really(*arguments, **more)  # type: ignore[operator]  # a function of os

            return call

        with monkeypatch.context() as patched:
            for name in ("mkdir", "chmod", "rename"):
                patched.setattr(os, name, die(getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                host_files.make_directory(str(base / "a" / "b" / "c"))
        for path in base.rglob("*"):
            assert path.name.startswith(".vgpu-agent-") or path.stat().st_mode & 0o777 == 0o755
        host_files.make_directory(str(base / "a" / "b" / "c"))
        assert sorted(str(path.relative_to(base)) for path in base.rglob("*")) == [
            "a",
            "a/b",
            "a/b/c",
        ]


def collector(containers: Path) -> GrantDirectory:
    """An agent's grants, in this process."""
    return GrantDirectory(
        str(containers.parent / "cdi"),
        Journal(),
        kept_directory=str(containers.parent / "kept"),
        proc_root=str(containers.parent / "proc"),
    )
