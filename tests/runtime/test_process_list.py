"""The list of a container's processes, byte for byte (vgpu-manager §7.7), whatever its container
does with the file that it can only read.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime import process_list
from vgpu_agent.runtime.process_list import LockedError

pytestmark = pytest.mark.component  # it starts programs


def test_numbers_are_ascending_one_a_line(tmp_path: Path) -> None:
    """vgpu-manager §7.7: mode 0644, and nothing else in the file."""
    process_list.write(str(tmp_path), process_list.encode((3, 20, 100)))
    path = tmp_path / "pids.config"
    assert path.read_bytes() == b"3\n20\n100\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_list_is_rewritten_in_place(tmp_path: Path) -> None:
    """A process has it open: the file stays the same, longer and shorter."""
    process_list.write(str(tmp_path), b"1\n")
    with (tmp_path / "pids.config").open("rb") as opened:
        process_list.write(str(tmp_path), b"1\n22\n333\n")
        assert opened.read() == b"1\n22\n333\n"
        opened.seek(0)
        process_list.write(str(tmp_path), b"4\n")
        assert opened.read() == b"4\n"


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX], ids=["shared", "exclusive"])
def test_a_lock_of_the_container_is_not_waited_for(tmp_path: Path, kind: int) -> None:
    """It may lock a file that it can only read. The thread that writes has other containers."""
    process_list.write(str(tmp_path), b"1\n")
    with (tmp_path / "pids.config").open("rb") as locked:
        fcntl.flock(locked, kind)
        with pytest.raises(LockedError, match="has locked it"):
            process_list.write(str(tmp_path), b"1\n2\n")
    assert (tmp_path / "pids.config").read_bytes() == b"1\n"
    process_list.write(str(tmp_path), b"1\n2\n")
    assert (tmp_path / "pids.config").read_bytes() == b"1\n2\n"


def test_no_link_is_followed(tmp_path: Path) -> None:
    """The directory is the agent's own, and still nothing outside is ever written."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"theirs")
    config = tmp_path / "config"
    config.mkdir()
    (config / "pids.config").symlink_to(outside)
    with pytest.raises(HostFileError):
        process_list.write(str(config), b"1\n")
    linked = tmp_path / "linked"
    linked.symlink_to(config)
    with pytest.raises(HostFileError):
        process_list.write(str(linked), b"1\n")
    assert outside.read_bytes() == b"theirs"


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    """A FIFO in its place blocks nothing."""
    os.mkfifo(tmp_path / "pids.config")
    with pytest.raises(HostFileError, match="it is not a regular file"):
        process_list.write(str(tmp_path), b"1\n")


def test_without_the_directory_of_a_grant_nothing_is_made(tmp_path: Path) -> None:
    """A container without a share of a GPU has none, and gets none by registering."""
    with pytest.raises(HostFileError, match="cannot write"):
        process_list.write(str(tmp_path / "none"), b"1\n")
    assert list(tmp_path.iterdir()) == []
