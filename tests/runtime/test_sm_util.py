"""The file of samples as a library maps it (vgpu-manager §7.7), and what a reader can do to it."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.vgpu_tables import SM_UTIL_SIZE
from vgpu_agent.runtime import sm_util
from vgpu_agent.runtime.sm_util import SmUtilFile

# Offsets by the contract, not by the module under test.
SLOT, COUNT, SEEN, COMPUTE, COMPUTE_COUNT = 81_952, 32_768, 32_776, 32_784, 57_360
GRAPHICS, GRAPHICS_COUNT, LOCK = 57_368, 81_944, 81_948
_FLOCK = "hhqqi4x"
EMPTY = memoryview(b"")


def _sample(pid: int, at: int, sm: int) -> bytes:
    return struct.pack("<I4xQ4I", pid, at, sm, 1, 2, 3)


def _process(pid: int, used: int) -> bytes:
    return struct.pack("<I4xQ2I", pid, used, 0xFFFFFFFF, 0xFFFFFFFF)


@pytest.fixture
def kept_locked() -> list[int]:
    """GPUs whose locks somebody keeps."""
    return []


@pytest.fixture
def opened(tmp_path: Path, kept_locked: list[int]) -> SmUtilFile:
    """The file."""
    return SmUtilFile(str(tmp_path / "watcher"), kept_locked.append)


def _lock(descriptor: int, index: int, kind: int) -> None:
    request = struct.pack(_FLOCK, kind, os.SEEK_SET, index * SLOT + LOCK, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)


def test_the_rows_lie_where_the_library_looks(tmp_path: Path, opened: SmUtilFile) -> None:
    """Offsets of vgpu-manager §7.7 in the slot of the GPU; all else is zero."""
    path = tmp_path / "watcher" / "sm_util.config"
    assert path.stat().st_mode & 0o777 == 0o644
    samples = _sample(10, 5_000, 40) + _sample(11, 5_001, 50)
    compute, graphics = _process(10, 1 << 30), _process(12, 7) + _process(13, 8)
    opened.write(2, 4_000, memoryview(samples), memoryview(compute), memoryview(graphics))
    content = path.read_bytes()
    assert len(content) == 1_311_232 == 16 * SLOT == SM_UTIL_SIZE
    slot = bytearray(content[2 * SLOT : 3 * SLOT])
    for at, expected in (
        (0, samples),
        (COUNT, struct.pack("<I", 2)),
        (SEEN, struct.pack("<Q", 4_000)),
        (COMPUTE, compute),
        (COMPUTE_COUNT, struct.pack("<I", 1)),
        (GRAPHICS, graphics),
        (GRAPHICS_COUNT, struct.pack("<I", 2)),
    ):
        assert slot[at : at + len(expected)] == expected
        slot[at : at + len(expected)] = bytes(len(expected))
    assert not any(slot)
    assert not any(content[: 2 * SLOT])
    assert not any(content[3 * SLOT :])


def test_old_samples_stay_until_there_are_newer_ones(tmp_path: Path, opened: SmUtilFile) -> None:
    """The driver has none between its own; readers go by the time, which advances."""
    opened.write(0, 1, memoryview(_sample(10, 5, 40)), EMPTY, EMPTY)
    opened.write(0, 2, None, EMPTY, EMPTY)
    content = (tmp_path / "watcher" / "sm_util.config").read_bytes()
    assert content[:32] == _sample(10, 5, 40)
    assert struct.unpack_from("<IxxxxQ", content, COUNT) == (1, 2)
    opened.write(0, 3, EMPTY, EMPTY, EMPTY)
    content = (tmp_path / "watcher" / "sm_util.config").read_bytes()
    assert struct.unpack_from("<IxxxxQ", content, COUNT) == (0, 3)


def test_a_restarted_agent_writes_into_the_file_that_containers_have_mapped(
    tmp_path: Path, opened: SmUtilFile
) -> None:
    """They never open it again."""
    path = tmp_path / "watcher" / "sm_util.config"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        opened.close()
        again = SmUtilFile(str(tmp_path / "watcher"), lambda _: None)
        again.write(15, 9, memoryview(_sample(10, 5, 40)), EMPTY, EMPTY)
        assert mapped[15 * SLOT : 15 * SLOT + 32] == _sample(10, 5, 40)


@pytest.mark.parametrize("what", ["short", "link", "fifo"])
def test_anything_else_in_its_place_is_replaced(tmp_path: Path, what: str) -> None:
    """A file of another version, or what an administrator has put there; no link is followed."""
    folder, outside = tmp_path / "watcher", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(b"theirs")
    path = folder / "sm_util.config"
    if what == "short":
        path.write_bytes(b"short")
    elif what == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    SmUtilFile(str(folder), lambda _: None).close()
    assert path.stat().st_size == SM_UTIL_SIZE
    assert not path.is_symlink()
    assert outside.read_bytes() == b"theirs"


def test_a_directory_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    """With the path in its text."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HostFileError, match="file"):
        SmUtilFile(str(tmp_path / "file" / "watcher"), lambda _: None)


def test_a_card_without_a_slot_is_left_out(opened: SmUtilFile, tmp_path: Path) -> None:
    """The library has sixteen."""
    opened.write(16, 1, EMPTY, EMPTY, EMPTY)
    opened.write(-1, 1, EMPTY, EMPTY, EMPTY)
    path = tmp_path / "watcher" / "sm_util.config"
    assert path.stat().st_size == SM_UTIL_SIZE
    assert not any(path.read_bytes())


def test_a_reader_that_keeps_the_lock_stops_nothing(
    tmp_path: Path, opened: SmUtilFile, kept_locked: list[int]
) -> None:
    """A tenant can lock what it can only read. The thread that writes watches over health, too."""
    with (tmp_path / "watcher" / "sm_util.config").open("rb") as theirs:
        _lock(theirs.fileno(), 0, fcntl.F_RDLCK)
        began = time.monotonic()
        for round_ in range(100):
            opened.write(0, round_, EMPTY, EMPTY, EMPTY)
            opened.write(1, round_, EMPTY, EMPTY, EMPTY)
        assert time.monotonic() - began < 1.0
        assert kept_locked == [0]
        content = (tmp_path / "watcher" / "sm_util.config").read_bytes()
        assert struct.unpack_from("<Q", content, SEEN) == (99,)


def test_a_reader_with_the_lock_never_sees_half_a_sample(
    tmp_path: Path, opened: SmUtilFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand looks and more while it is written: number, rows and time belong together."""
    monkeypatch.setattr(sm_util, "_TRIES", 1_000_000)  # this reader is slow, and honest
    ending = threading.Event()

    def write() -> None:
        round_ = 0
        while not ending.is_set():
            round_ += 1
            rows = _sample(round_, round_, round_ % 100) * (1 + round_ % 8)
            opened.write(3, round_, memoryview(rows), EMPTY, EMPTY)

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[int] = set()
    try:
        path = tmp_path / "watcher" / "sm_util.config"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            looks = 0
            until = time.monotonic() + PATIENCE_SECONDS
            while looks < 10_000 or (len(seen) <= 10 and time.monotonic() < until):
                try:
                    _lock(file.fileno(), 3, fcntl.F_RDLCK)
                except BlockingIOError:
                    continue
                slot = mapped[3 * SLOT : 3 * SLOT + SEEN + 8]
                _lock(file.fileno(), 3, fcntl.F_UNLCK)
                looks += 1
                number, since = struct.unpack_from("<IxxxxQ", slot, COUNT)
                if since:
                    assert number == 1 + since % 8
                    assert slot[: 32 * number] == _sample(since, since, since % 100) * number
                    seen.add(since)
    finally:
        ending.set()
        writer.join()
    assert len(seen) > 10
