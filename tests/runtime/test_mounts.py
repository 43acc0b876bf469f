"""Tell from made-up mount tables whether something on the host is mounted into a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.runtime.conftest import HostProc
from vgpu_agent.runtime.mounts import MountTables, Use


@pytest.fixture
def tables(proc: HostProc) -> MountTables:
    """The tables of the made-up host."""
    return MountTables(str(proc.root))


def test_a_path_that_nobody_mounts_is_free(tables: MountTables, tmp_path: Path) -> None:
    """Another container was seen, and it has something else."""
    assert tables.mounted_below(str(tmp_path / "d")) is Use.FREE


@pytest.mark.parametrize("inner", ["", "/region.cache"])
def test_a_directory_is_mounted_when_it_or_something_in_it_is(
    inner: str, proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """Under whatever name the container has it."""
    proc.someone_else((f"{tmp_path}/d{inner}", "/tmp/elsewhere"))
    assert tables.mounted_below(str(tmp_path / "d")) is Use.MOUNTED


def test_a_path_with_the_same_beginning_is_another_path(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """``uid-1_main`` is not ``uid-1_main2``."""
    proc.someone_else((f"{tmp_path}/d2", "/tmp/vgpu"))
    assert tables.mounted_below(str(tmp_path / "d")) is Use.FREE


def test_the_same_path_on_another_file_system_is_another_path(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """Mount tables name paths inside a file system."""
    proc.write("4711", [(f"{tmp_path}/d", "/tmp/vgpu")], device="0:99")
    assert tables.mounted_below(str(tmp_path / "d")) is Use.FREE


def test_something_mounted_onto_it_counts(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """Removing the directory would remove what is mounted there."""
    proc.write("self", [("/disk", f"{tmp_path}/d/disk")])
    assert tables.mounted_below(str(tmp_path / "d")) is Use.MOUNTED


def test_a_file_system_of_its_own_is_taken_into_account(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """``/usr/local`` may be a volume. Then containers show the path inside that volume."""
    own = f"1 0 8:1 / / rw - ext4 a rw\n2 1 8:9 /volume {tmp_path} rw - ext4 b rw\n"
    (proc.root / "self" / "mountinfo").write_text(own)
    proc.write("4711", [("/volume/d", "/tmp/vgpu")], device="8:9")
    assert tables.mounted_below(str(tmp_path / "d")) is Use.MOUNTED


def test_a_deleted_source_and_odd_characters_are_understood(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """The kernel writes a blank as an octal number, and says so when the source was deleted."""
    proc.someone_else((f"{tmp_path}/a\\040b//deleted", "/tmp/vgpu"))
    assert tables.mounted_below(str(tmp_path / "a b")) is Use.MOUNTED


def test_an_agent_that_sees_only_itself_does_not_know(
    proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """Without the host's process ids, silence means nothing."""
    (proc.root / "1" / "mountinfo").write_bytes((proc.root / "self" / "mountinfo").read_bytes())
    assert tables.mounted_below(str(tmp_path / "d")) is Use.UNKNOWN


@pytest.mark.parametrize("content", ["", "junk\n", "1 0 8:1\n"])
def test_an_unreadable_table_is_no_answer(
    content: str, proc: HostProc, tables: MountTables, tmp_path: Path
) -> None:
    """A table without our own path is no answer either."""
    (proc.root / "self" / "mountinfo").write_text(content)
    assert tables.mounted_below(str(tmp_path / "d")) is Use.UNKNOWN


def test_a_missing_proc_is_no_answer(tmp_path: Path) -> None:
    """The path may be set wrong."""
    assert MountTables(str(tmp_path / "nothing")).mounted_below(str(tmp_path)) is Use.UNKNOWN


def test_each_mount_namespace_is_read_once(
    proc: HostProc, tables: MountTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has thousands of processes and some hundred namespaces."""
    monkeypatch.setattr(os, "readlink", lambda path: "mnt:[1]")
    proc.someone_else(pid="4712")
    seen: set[str] = set()
    for namespace, _ in tables._tables(seen):
        assert namespace not in seen
        seen.add(namespace)
    assert seen == {"mnt:[1]"}


def test_a_process_that_ends_meanwhile_hides_no_other_one_of_its_namespace(
    proc: HostProc, tables: MountTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a probe's command in a container. A directory that counts as free is removed."""
    monkeypatch.setattr(os, "readlink", lambda path: f"mnt:[{path.split('/')[-3] == '4711'}]")
    for pid in ("4712", "4713"):
        proc.someone_else((str(tmp_path), "/vgpu"), pid=pid)
    for ended in ("4712", "4713"):  # whichever the kernel lists first
        table = proc.root / ended / "mountinfo"
        text = table.read_text()
        table.unlink()
        assert tables.mounted_below(str(tmp_path)) is Use.MOUNTED
        table.write_text(text)


def test_the_real_proc_is_understood(tmp_path: Path) -> None:
    """This very process's root directory has something mounted in it."""
    assert MountTables().mounted_below("/") is Use.MOUNTED
    assert MountTables().mounted_below(str(tmp_path)) in {Use.FREE, Use.UNKNOWN}
