"""Directories and files on the host: exact, whole,
and careful with what containers may have done to them.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.conftest import HostProc, names
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import HostFile
from vgpu_agent.isolation.hami_region import SIZE, DeviceLimit, limit_parts, region
from vgpu_agent.runtime import host_files, removal
from vgpu_agent.runtime.mounts import MountTables


@pytest.fixture
def mounts(proc: HostProc) -> MountTables:
    """The mount tables of the made-up host."""
    return MountTables(str(proc.root))


@pytest.fixture
def umask() -> Iterator[None]:
    """The strictest umask that an operator may have set."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_directory_gets_exactly_its_mode(tmp_path: Path) -> None:
    """Any user of the container writes into it, whatever the agent's umask.
    What leads to it can be passed.
    """
    host_files.make_directory(str(tmp_path / "a" / "b"), 0o1777)
    assert (mode(tmp_path / "a" / "b"), mode(tmp_path / "a")) == (0o1777, 0o755)


def test_a_directory_that_is_there_keeps_its_content(tmp_path: Path) -> None:
    """volcano-vgpu:D5: the replaced plugin empties it, also below a running container.
    Only a wrong mode is corrected.
    """
    directory = tmp_path / "d"
    directory.mkdir(0o700)
    (directory / "region").write_text("in use")
    host_files.make_directory(str(directory), 0o777)
    assert ((directory / "region").read_text(), mode(directory)) == ("in use", 0o777)


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_directory_that_another_thread_makes_and_fills_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_renamed: bool
) -> None:
    """The first pods of a node start at once, and have a parent directory in common.
    ``is_renamed``: the other thread was faster with the same unfinished one.
    """
    path, mkdir = tmp_path / "d", os.mkdir

    def mkdir_of_two(name: str, its_mode: int = 0o777) -> None:
        mkdir(name, its_mode)
        if is_renamed:
            os.rename(name, path)
            path.chmod(0o755)
        else:
            mkdir(path, 0o755)
        (path / "of-the-other").write_text("")

    monkeypatch.setattr(os, "mkdir", mkdir_of_two)
    host_files.make_directory(str(path))
    assert os.listdir(tmp_path) == ["d"]
    assert os.listdir(path) == ["of-the-other"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_its_place_is_refused(kind: str, tmp_path: Path) -> None:
    """A link could lead anywhere, and its target would get the mode."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    path = tmp_path / "d"
    path.write_text("") if kind == "file" else path.symlink_to(elsewhere)
    with pytest.raises(
        HostFileError, match=rf"cannot make directory {path}: .*; (move away|replace)"
    ):
        host_files.make_directory(str(path), 0o777)
    assert mode(elsewhere) == 0o700


@pytest.mark.usefixtures("umask")
def test_a_region_is_whole_sparse_and_for_everybody(tmp_path: Path, mounts: MountTables) -> None:
    """hami-core §2.3: 2,008,953 bytes, 0666; of which only some pages take up space."""
    path = tmp_path / "region.cache"
    parts = region([DeviceLimit("GPU-a", 3000, 50)])
    host_files.make_file(HostFile(str(path), SIZE, parts, 0o666), mounts)
    content = path.read_bytes()
    assert (len(content), mode(path)) == (2_008_953, 0o666)
    assert [content[offset : offset + len(part)] for offset, part in parts] == [
        part for _, part in parts
    ]
    assert sum(content) == sum(sum(part) for _, part in parts)
    assert path.stat().st_blocks * 512 < 100_000
    assert names(tmp_path) == ["proc", "region.cache"]


def test_a_region_in_use_keeps_its_inode_and_its_entries(
    tmp_path: Path, proc: HostProc, mounts: MountTables
) -> None:
    """Containers have it mapped: only the limits change,
    and their processes go on (hami-core §0.3.3).
    """
    path = tmp_path / "region.cache"
    old, new = [DeviceLimit("GPU-a", 3000)], [DeviceLimit("GPU-a", 5000)]
    host_files.make_file(HostFile(str(path), SIZE, region(old), 0o666, limit_parts(old)), mounts)
    before = path.stat().st_ino
    with path.open("r+b") as file:
        file.seek(1_856)
        file.write(b"a process")
    proc.someone_else((str(path), "/tmp/cudevshr.cache"))
    host_files.make_file(HostFile(str(path), SIZE, region(new), 0o666, limit_parts(new)), mounts)
    content = path.read_bytes()
    assert (path.stat().st_ino, content[1_856:1_865]) == (before, b"a process")
    assert int.from_bytes(content[1_600:1_608], "little") == 5000 << 20


def test_a_region_that_an_ended_container_left_is_made_anew(
    tmp_path: Path, mounts: MountTables
) -> None:
    """A dead process's bookings would count against the next container,
    whose process numbers begin anew (hami-core §2.4).
    """
    path = tmp_path / "region.cache"
    wanted = HostFile(
        str(path),
        SIZE,
        region([DeviceLimit("GPU-a", 3000)]),
        0o666,
        limit_parts([DeviceLimit("GPU-a", 3000)]),
    )
    host_files.make_file(wanted, mounts)
    with path.open("r+b") as file:
        file.seek(1_856)
        file.write(b"a dead process")
    host_files.make_file(wanted, mounts)
    assert path.read_bytes()[1_856:1_870] == bytes(14)


def test_a_region_that_may_be_in_use_is_not_replaced(
    tmp_path: Path, proc: HostProc, mounts: MountTables
) -> None:
    """An agent that does not see the other containers keeps to the limits alone."""
    path = tmp_path / "file"
    path.write_bytes(b"used" + bytes(4))
    (proc.root / "1" / "mountinfo").write_bytes((proc.root / "self" / "mountinfo").read_bytes())
    host_files.make_file(HostFile(str(path), 8, ((0, b"new"),), renewed=((6, b"!"),)), mounts)
    assert path.read_bytes() == b"used\0\0!\0"


def test_the_same_content_is_not_written_again(tmp_path: Path, mounts: MountTables) -> None:
    """Neither a new inode nor a new time."""
    path = tmp_path / "file"
    wanted = HostFile(str(path), 100_000, ((0, b"a"), (99_990, b"b")), 0o640, ((0, b"a"),))
    host_files.make_file(wanted, mounts)
    os.utime(path, (1, 1))
    path.chmod(0o600)
    host_files.make_file(wanted, mounts)
    assert (path.stat().st_mtime, mode(path)) == (1, 0o640)


@pytest.mark.parametrize("place", [500, 70_000, 99_999])
def test_one_other_byte_anywhere_is_noticed(
    place: int, tmp_path: Path, mounts: MountTables
) -> None:
    """Only what takes up space is read, so it must not be missed in a hole between two parts."""
    path = tmp_path / "file"
    wanted = HostFile(str(path), 100_000, ((0, b"a"), (60_000, b"b" * 10)))
    host_files.make_file(wanted, mounts)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    host_files.make_file(wanted, mounts)
    assert path.read_bytes()[place] == 0


@pytest.mark.parametrize("content", [b"short", b"much too long"])
def test_a_file_of_another_size_is_replaced(
    content: bytes, tmp_path: Path, mounts: MountTables
) -> None:
    """It is of another layout, or half written by another program."""
    path = tmp_path / "file"
    path.write_bytes(content)
    host_files.make_file(HostFile(str(path), 8, ((0, b"new"),), renewed=((0, b"new"),)), mounts)
    assert path.read_bytes() == b"new" + bytes(5)


def test_a_link_that_a_container_has_laid_is_not_followed(
    tmp_path: Path, mounts: MountTables
) -> None:
    """The directory is writable for the container, the agent is root:
    the host's file stays as it is.
    """
    secret = tmp_path / "shadow"
    secret.write_bytes(b"12345678")
    path = tmp_path / "region.cache"
    path.symlink_to(secret)
    host_files.make_file(HostFile(str(path), 8, ((0, b"new"),), 0o666, ((0, b"new"),)), mounts)
    assert (secret.read_bytes(), mode(secret) & 0o002, path.is_symlink()) == (b"12345678", 0, False)


def test_a_pipe_in_the_place_of_a_file_hangs_nobody(tmp_path: Path, mounts: MountTables) -> None:
    """Opening one waits for the other end, which a container need not give."""
    path = tmp_path / "file"
    os.mkfifo(path)
    host_files.make_file(HostFile(str(path), 3, ((0, b"new"),)), mounts)
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "writable"),
        (errno.EACCES, "give the agent write access"),
        (errno.EBADF, "file system"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_and_says_why(
    number: int, remedy: str, tmp_path: Path, mounts: MountTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, reason and remedy are in the pod's status. The old file is whole."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(
        HostFileError, match=rf"cannot write {path}: {os.strerror(number)}; .*{remedy}"
    ):
        host_files.make_file(HostFile(str(path), 8, ((0, b"new"),)), mounts)
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["file", "proc"])


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path, mounts: MountTables) -> None:
    """Nothing of it is removed."""
    (tmp_path / "file" / "inner").mkdir(parents=True)
    with pytest.raises(HostFileError, match="move away the directory"):
        host_files.make_file(HostFile(str(tmp_path / "file"), 8, ((0, b"new"),)), mounts)
    assert names(tmp_path) == ["file", "proc"]


def test_short_writes_are_continued(
    tmp_path: Path, mounts: MountTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full takes a part first."""
    really = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, part, offset: really(descriptor, part[:2], offset)
    )
    host_files.make_file(HostFile(str(tmp_path / "file"), 8, ((1, b"abcde"),)), mounts)
    assert (tmp_path / "file").read_bytes() == b"\0abcde\0\0"


def test_removing_a_tree_follows_no_link(tmp_path: Path) -> None:
    """Targets of a container's links stay. A tree that is gone is fine."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "precious").write_text("")
    tree = tmp_path / "d"
    tree.mkdir()
    (tree / "link").symlink_to(tmp_path / "host")
    assert removal.remove_tree(str(tree))
    assert removal.remove_tree(str(tree))
    assert (tree.exists(), names(tmp_path / "host")) == (False, ["precious"])


def test_parts_near_to_each_other_are_written_together(
    tmp_path: Path, mounts: MountTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros between them, and nothing where nothing is for pages;
    a container waits for each system call.
    """
    written: list[int] = []
    really = os.pwrite

    def pwrite(descriptor: int, part: bytes, offset: int) -> int:
        written.append(offset)
        return really(descriptor, part, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    parts = ((1, b"a"), (2, b"b"), (100, b"c"), (50_000, b"d"), (50_010, b"e"))
    host_files.make_file(HostFile(str(tmp_path / "file"), 60_000, parts), mounts)
    content = (tmp_path / "file").read_bytes()
    assert (len(content), {place: byte for place, byte in enumerate(content) if byte}) == (
        60_000,
        {at: part[0] for at, part in parts},
    )
    assert written == [1, 50_000]


def test_a_file_is_put_into_a_directory_that_was_not_there(tmp_path: Path) -> None:
    """/run is empty after a reboot, and only the exact content counts as there."""
    path = str(tmp_path / "run" / "cdi" / "spec.json")
    assert not host_files.has(path, b"{}")
    host_files.replace_file(path, b"{}")
    assert [host_files.has(path, content) for content in (b"{}", b"{", b"{}}", b"")] == [
        True,
        False,
        False,
        False,
    ]
    assert not host_files.has(str(tmp_path), b"")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12_000), st.binary(max_size=40) | st.binary(min_size=3000, max_size=3100)
        ),
        max_size=8,
    )
)
def test_parts_of_any_order_are_written_one_over_the_other(parts: list[tuple[int, bytes]]) -> None:
    """They may overlap or be empty. None is lost to the zeros between two others,
    and the size is what it should be.
    """
    expected = bytearray(16_000)
    for offset, part in parts:
        expected[offset : offset + len(part)] = part
    with tempfile.TemporaryDirectory() as folder:
        host_files.make_file(
            HostFile(f"{folder}/file", len(expected), tuple(parts)), MountTables(folder)
        )
        assert Path(folder, "file").read_bytes() == expected


def test_a_link_is_not_the_file_that_it_names(tmp_path: Path) -> None:
    """It could name something else a moment later."""
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert [host_files.has(str(tmp_path / name), b"{}") for name in ("file", "link")] == [
        True,
        False,
    ]


def test_a_directory_keeps_its_mode_when_a_file_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-written file was removed. That is no reason to make the directory anew."""
    tmp_path.chmod(0o1777)

    def rename(source: str, _: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(HostFileError, match="cannot write"):
        host_files.replace_file(str(tmp_path / "file"), b"{}")
    assert (mode(tmp_path), names(tmp_path)) == (0o1777, [])


@pytest.mark.parametrize("path", ["file", "a/b/file"])
def test_a_removed_file_is_gone_and_need_not_have_been_there(tmp_path: Path, path: str) -> None:
    """A start that is tried again removes it again."""
    target = tmp_path / path
    target.parent.mkdir(parents=True, exist_ok=True)
    (beside := target.parent / "beside").write_text("stays")
    target.write_text("old")
    for _ in range(2):
        host_files.remove_file(str(tmp_path), path)
        assert names(target.parent) == [beside.name]
    host_files.remove_file(str(tmp_path / "none"), path)


def test_a_link_in_the_place_of_a_removed_file_goes_and_its_target_stays(tmp_path: Path) -> None:
    """So does a pipe, for whose other end nobody waits."""
    (secret := tmp_path / "shadow").write_text("host")
    own = tmp_path / "own"
    own.mkdir()
    (own / "link").symlink_to(secret)
    os.mkfifo(own / "pipe")
    for name in ("link", "pipe"):
        host_files.remove_file(str(own), name)
    assert (names(own), secret.read_text()) == ([], "host")


@pytest.mark.parametrize("path", ["sub/shadow", "sub/deep/shadow"])
def test_no_link_is_followed_to_a_file_to_be_removed(tmp_path: Path, path: str) -> None:
    """A container that can write to its directory would name the host's files."""
    host = tmp_path / "etc"
    (host / "deep").mkdir(parents=True)
    for directory in (host, host / "deep"):
        (directory / "shadow").write_text("host")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sub").symlink_to(host)
    with pytest.raises(HostFileError, match=r"cannot remove .*/own/sub/.*shadow: "):
        host_files.remove_file(str(own), path)
    (tmp_path / "other").symlink_to(host)
    with pytest.raises(HostFileError, match="cannot remove"):
        host_files.remove_file(str(tmp_path / "other"), "shadow")
    assert names(host) == ["deep", "shadow"]


@pytest.mark.parametrize("path", ["", "/etc/shadow", "../shadow", "a/../../shadow", ".", "a//b"])
def test_only_files_within_the_directory_are_removed(tmp_path: Path, path: str) -> None:
    """Whatever a family says."""
    (tmp_path / "shadow").write_text("host")
    own = tmp_path / "own"
    (own / "a").mkdir(parents=True)
    with pytest.raises(HostFileError, match="no path within the container's directory"):
        host_files.remove_file(str(own), path)
    with pytest.raises(HostFileError, match="no path within the container's directory"):
        host_files.remove_file("", "file")
    assert (tmp_path / "shadow").exists()


def test_a_directory_in_the_place_of_a_removed_file_is_named(tmp_path: Path) -> None:
    """And left as it is: it may have a million files. Descriptors do not pile up."""
    (tmp_path / "file").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(
            HostFileError, match=r"cannot remove .*/file: Is a directory; move away"
        ):
            host_files.remove_file(str(tmp_path), "file")
    assert len(os.listdir("/proc/self/fd")) == before
