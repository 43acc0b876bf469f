"""Limits that change under a container that runs, and what the library sees of its files."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from tests.runtime.conftest import HostProc
from tests.runtime.control_client import build_client, client, lay_out
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.isolation.vgpu_config import SIZE, SlotLimit, limits_offset, slot_offset
from vgpu_agent.isolation.vgpu_control import CardLimit, ControlTarget, VgpuControl
from vgpu_agent.isolation.vgpu_tables import (
    SM_UTIL_COMPUTE,
    SM_UTIL_COMPUTE_COUNT,
    SM_UTIL_LAST_SEEN,
    SM_UTIL_PROCESS,
    SM_UTIL_SAMPLE,
    SM_UTIL_SAMPLE_COUNT,
    SM_UTIL_SAMPLES,
    SM_UTIL_SIZE,
    SM_UTIL_SLOT_SIZE,
    SmUse,
    Spilled,
    read_sm_node,
    read_vmem,
)
from vgpu_agent.runtime import host_files, live_limits
from vgpu_agent.runtime.live_limits import change_limit
from vgpu_agent.runtime.mounts import MountTables

UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"
READS, CHANGES = 1_000_000, 1000


def same(number: int) -> SlotLimit:
    """A limit all of whose parts are the same number, by which a mixture of two is recognised."""
    return SlotLimit(
        UUID,
        number << 20,
        number << 20,
        number,
        number,
        core_limit=True,
        hard_limit=True,
        memory_limit=True,
        oversold=False,
    )


@pytest.fixture
def provision(tmp_path: Path, proc: HostProc) -> Provision:
    """A container's files, made as at its start."""
    host = tmp_path / "manager"
    host.mkdir(mode=0o755)
    (host / "libvgpu-control.so.1").write_bytes(b"\x7fELF")
    backend = VgpuControl(
        str(host), str(host / "libvgpu-control.so.1"), sm_watcher=True, tracks_virtual_memory=True
    )
    made = backend.provision(
        ControlTarget(
            "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e",
            "gpu-pod",
            "default",
            "main",
            (f"{UUID}::3",),
            (CardLimit(3, UUID, 50, 4096, card_memory_mib=24576),),
            driver_version="570.86.10",
            cuda_version="12.8",
        )
    )
    host_files.make(made, MountTables(str(proc.root)))
    return made


@pytest.fixture
def config(provision: Provision) -> str:
    """The container's ``vgpu.config``."""
    return f"{provision.own_directory}/config/vgpu.config"


def sequence(config: str) -> int:
    """The number of card 3's slot."""
    (number,) = struct.unpack_from("<I", Path(config).read_bytes(), slot_offset(3))
    return int(number)


def test_a_change_leaves_an_even_number_and_every_other_byte(config: str) -> None:
    """vgpu-manager §7.7: the number is odd only while the slot is written, and moves on by two."""
    before = Path(config).read_bytes()
    inode = os.stat(config).st_ino
    change_limit(config, 3, same(7))
    change_limit(config, 3, same(9))
    after = Path(config).read_bytes()
    assert sequence(config) == 4
    at = limits_offset(3)
    assert after[at : at + 92] == same(9).packed()
    assert (after[: at - 8], after[at + 92 :]) == (before[: at - 8], before[at + 92 :])
    assert os.stat(config).st_ino == inode  # containers have it mapped


def test_a_change_goes_on_where_a_killed_agent_has_stopped(config: str) -> None:
    """It has left an odd number, on which readers give up."""
    with open(config, "r+b") as file:
        file.seek(slot_offset(3))
        file.write(struct.pack("<I", 0xFFFFFFFF))
    change_limit(config, 3, same(7))
    assert sequence(config) == 0


def flock_of(kind: int, start: int) -> bytes:
    """struct flock."""
    return struct.pack("<hhxxxxqqixxxx", kind, os.SEEK_SET, start, 128, 0)


def test_a_container_s_lock_for_reading_keeps_no_limit_from_being_changed(config: str) -> None:
    """It has the file open for reading, and so may lock it for ever."""
    with open(config, "rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, flock_of(fcntl.F_RDLCK, slot_offset(3)))
        change_limit(config, 3, same(7))
    assert sequence(config) == 2


def test_a_writer_waits_for_another_one(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool of the operator's that follows the same protocol; not for ever, and with a line."""
    with open(config, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, flock_of(fcntl.F_WRLCK, slot_offset(3)))
        monkeypatch.setattr(live_limits, "_LOCK_SECONDS", 0.05)
        with pytest.raises(HostFileError, match=r"another program is changing .*vgpu\.config"):
            change_limit(config, 3, same(7))
        assert sequence(config) == 0
        monkeypatch.undo()
        change_limit(config, 4, same(8))  # another slot is free
        writer = threading.Thread(target=change_limit, args=(config, 3, same(7)))
        writer.start()
    writer.join()
    assert sequence(config) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(SIZE), "layout that this agent does not write"),
        (b"", "no file of 8192 bytes"),
        (None, "symbolic link"),
    ],
)
def test_only_a_file_of_ours_is_changed(content: bytes | None, said: str, tmp_path: Path) -> None:
    """One of an older library has its limits elsewhere."""
    path = tmp_path / "vgpu.config"
    if content is None:
        path.symlink_to(tmp_path / "else")
    else:
        path.write_bytes(content)
    with pytest.raises(HostFileError, match=said):
        change_limit(str(path), 3, same(7))


@pytest.mark.component
def test_no_read_is_torn_while_limits_change(
    provision: Provision, config: str, tmp_path: Path
) -> None:
    """A million reads as the library makes them, from its own mapping, while limits change as fast
    as they can: each has the old limits or the new ones.
    """
    program, root = build_client(tmp_path), tmp_path / "container"
    change_limit(config, 3, same(1))
    lay_out(provision, root)
    command = [str(program), str(root), "watch", "3", str(READS), str(CHANGES)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    number = 0
    while reader.poll() is None:
        number += 1
        change_limit(config, 3, same(number % 99 + 1))
    words = reader.communicate()[0].split()
    said = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert (reader.returncode, said["torn"]) == (0, 0)
    assert said["reads"] >= READS
    # it has read while the limits were changing
    assert said["changes"] >= CHANGES


@pytest.mark.component
def test_the_library_finds_what_it_looks_for(provision: Provision, tmp_path: Path) -> None:
    """vgpu-manager §7.7, by offsets that a compiler has made of the fields' types: the limits, and
    the tables that it writes to, whose rows the agent then reads.
    """
    program, root = build_client(tmp_path), tmp_path / "container"
    lay_out(provision, root)
    assert client(program, root, "config") == [
        "cuda 12.8 driver 570.86.10",
        "pod 6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e default/gpu-pod container main register ''",
        "mode 200 watcher 1 vmem 1",
        f"card 3 {UUID} total {4096 << 20} real {4096 << 20} hard 50 soft 50 limits 1 1 1 0",
    ]
    assert client(program, root, "spill", 3, 4711, 1 << 30) == ["rows 1"]
    assert client(program, root, "spill", 3, 4712, 5) == ["rows 2"]
    ledger = Path(provision.own_directory, "vmem_node/vmem_node.config").read_bytes()
    assert read_vmem(len(ledger), lambda at, size: ledger[at : at + size]) == (
        Spilled(3, 4711, 1 << 30),
        Spilled(3, 4712, 5),
    )
    assert client(program, root, "sample", 3, 40, 60, 2, 99) == ["published"]
    table = Path(provision.own_directory, "sm_node/sm_node.config").read_bytes()
    assert read_sm_node(len(table), lambda at, size: table[at : at + size]) == (
        SmUse(3, 40, 60, 40, 2, 99),
    )


@pytest.mark.component
def test_the_library_finds_the_agent_s_samples(tmp_path: Path) -> None:
    """vgpu-manager §7.7: the offsets of the one table that the agent writes to."""
    table, slot = bytearray(SM_UTIL_SIZE), 2 * SM_UTIL_SLOT_SIZE
    SM_UTIL_SAMPLE.pack_into(table, slot + SM_UTIL_SAMPLES, 4711, 5, 30, 20, 1, 2)
    struct.pack_into("<I", table, slot + SM_UTIL_SAMPLE_COUNT, 1)
    struct.pack_into("<Q", table, slot + SM_UTIL_LAST_SEEN, 77)
    SM_UTIL_PROCESS.pack_into(table, slot + SM_UTIL_COMPUTE, 4711, 1 << 30, 0, 0)
    struct.pack_into("<I", table, slot + SM_UTIL_COMPUTE_COUNT, 1)
    watcher = tmp_path / "etc/vgpu-manager/watcher"
    watcher.mkdir(parents=True)
    (watcher / "sm_util.config").write_bytes(table)
    assert client(build_client(tmp_path), tmp_path, "refill", 2) == [
        "last seen 77",
        "sample 4711 at 5 sm 30 mem 20 enc 1 dec 2",
        f"compute 4711 uses {1 << 30}",
    ]


def test_a_restart_restores_the_limits_of_the_start(provision: Provision, proc: HostProc) -> None:
    """A limit that was changed while the container ran ends with it, unless the claim was changed
    as well.
    """
    config = f"{provision.own_directory}/config/vgpu.config"
    before = Path(config).read_bytes()
    change_limit(config, 3, same(7))
    host_files.make(provision, MountTables(str(proc.root)))
    assert Path(config).read_bytes() == before
