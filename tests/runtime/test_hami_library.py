"""The operator's library: checked, installed under a name of its own, never replaced in place."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.runtime.conftest import names
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import HostFileError
from vgpu_agent.journal import Journal
from vgpu_agent.runtime import hami_library
from vgpu_agent.runtime.delivered_library import DeliveredLibrary
from vgpu_agent.sim.stand_in_library import (
    FUNCTIONS,
    REGION_VARIABLE,
    load_instruction,
    shared_object,
)

INSTEAD = "or set volcanoVgpu.isolation to none"


def installer(host: Path, source: Path | str, journal: Journal) -> DeliveredLibrary:
    """Return an installer of HAMi-core's library."""
    settings = Settings(hami_core=HamiCore(host_directory=str(host), library=str(source)))
    return DeliveredLibrary(hami_library.RECOGNITION, settings, journal, instead=INSTEAD)


def elf(
    content: bytes = b"",
    *,
    size: int = 2_008_952,
    kind: int = 3,
    word: int = 2,
    machine: int = 62,
    missing: int = 0,
) -> bytes:
    """A library that exports HAMi-core's functions,
    with the region's size in its code as a compiler leaves it there.
    """
    code = load_instruction(size, machine)
    whole = bytearray(
        shared_object(
            FUNCTIONS, code=code, strings=REGION_VARIABLE + b"\0" + content, machine=machine
        )
    )
    whole[4], whole[16] = word, kind
    return bytes(whole[: -missing or None])


def lay(path: Path, content: bytes, time: int = 1) -> Path:
    """Deliver a library, as of a certain time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time, time))
    return path


@pytest.fixture(autouse=True)
def _on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The host directory, still missing."""
    return tmp_path / "vgpu"


@pytest.fixture
def library(host: Path, tmp_path: Path, journal: Journal) -> DeliveredLibrary:
    """Return an installer of the library that the operator delivers."""
    return installer(host, tmp_path / "libvgpu.so", journal)


async def test_a_library_is_installed_under_a_name_made_of_its_content(
    library: DeliveredLibrary, host: Path, tmp_path: Path, journal: Journal
) -> None:
    """volcano-vgpu:D21; and the file that preloads it says the path in the container,
    without a newline.
    """
    lay(tmp_path / "libvgpu.so", elf())
    path = await library.install()
    assert path == library.path
    assert names(host) == ["ld.so.preload", os.path.basename(path)]
    assert os.path.basename(path).removeprefix("libvgpu.so.").isalnum()
    assert (read(path), read(host / "ld.so.preload")) == (elf(), b"/usr/local/vgpu/libvgpu.so")
    assert [(entry.event, entry.facts["layout"]) for entry in journal.entries] == [
        ("library.installed", "1.1 or 1.2")
    ]


async def test_without_a_setting_it_is_taken_from_the_host_directory(
    host: Path, journal: Journal
) -> None:
    """The replaced plugin's image copies the library there."""
    lay(host / "libvgpu.so", elf())
    assert (await installer(host, "", journal).install()).startswith(f"{host}/libvgpu.so.")


async def test_installing_again_writes_nothing(
    library: DeliveredLibrary, tmp_path: Path, host: Path, journal: Journal
) -> None:
    """Neither in this agent nor in the next."""
    lay(tmp_path / "libvgpu.so", elf())
    path = await library.install()
    os.utime(path, (1, 1))
    os.utime(host / "ld.so.preload", (1, 1))
    assert await library.install() == path
    assert await installer(host, tmp_path / "libvgpu.so", journal).install() == path
    assert (os.stat(path).st_mtime, os.stat(host / "ld.so.preload").st_mtime) == (1, 1)


async def test_a_newer_library_lies_beside_the_old_one(
    library: DeliveredLibrary, tmp_path: Path
) -> None:
    """volcano-vgpu:D21: containers that run have the old one mapped, and it stays as it is."""
    lay(tmp_path / "libvgpu.so", elf(b"old"))
    old = await library.install()
    lay(tmp_path / "libvgpu.so", elf(b"new"), time=2)
    new = await library.install()
    assert (read(old), read(new), library.path) == (elf(b"old"), elf(b"new"), new)


@pytest.mark.parametrize("name", ["library", "ld.so.preload"])
async def test_what_somebody_deleted_or_changed_comes_back(
    name: str, library: DeliveredLibrary, tmp_path: Path, host: Path
) -> None:
    """A container without it would not start, or run without a limit."""
    lay(tmp_path / "libvgpu.so", elf())
    path = await library.install()
    lost = path if name == "library" else str(host / name)
    before = read(lost)
    os.unlink(lost)
    await library.install()
    assert read(lost) == before


async def test_an_installed_library_that_was_damaged_is_replaced(
    host: Path, tmp_path: Path, journal: Journal
) -> None:
    """Its name promises its content."""
    lay(tmp_path / "libvgpu.so", elf())
    path = await installer(host, tmp_path / "libvgpu.so", journal).install()
    lay(Path(path), b"damaged")
    await installer(host, tmp_path / "libvgpu.so", journal).install()
    assert read(path) == elf()


async def test_a_missing_library_is_said_with_both_remedies(
    library: DeliveredLibrary, tmp_path: Path
) -> None:
    """The resource is not offered, and this is what /readyz says."""
    with pytest.raises(
        HostFileError,
        match=(
            rf"no usable library at {tmp_path}/libvgpu\.so: No such file.*deliver.*or set "
            r"volcanoVgpu\.isolation"
        ),
    ):
        await library.install()
    assert library.path == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"#!/bin/sh", "not an ELF file"),
        (b"\x7fELF", "damaged"),
        (b"junk" * 100, "not an ELF file"),
        (elf(word=1), "not a 64-bit"),
        (elf(kind=2), "not a shared library"),
        (elf(machine=183), "other than this node's"),
        (elf(missing=10), "not complete"),
        (
            elf(size=2_008_984),
            r"of HAMi 2\.8\.1, whose shared region \(2008984 bytes\) does not have",
        ),
        (elf(size=1_197_896), r"HAMi 2\.3 to 2\.4\.0"),
        (elf(size=804_680), r"HAMi before 2\.3"),
        (
            elf().replace(b"cuMemAlloc_v2", b"cuMemAlloc_v9"),
            "does not export cuMemAlloc_v2, so it limits nothing",
        ),
        (
            elf().replace(b"SHARED_CACHE", b"SHARED_WHICH"),
            "does not know CUDA_DEVICE_MEMORY_SHARED_CACHE, so it is not HAMi-core",
        ),
        (elf(size=1), "has a shared region of unknown layout"),
        (bytes((16 << 20) + 1), "larger than 16 MiB"),
    ],
)
async def test_a_library_that_would_not_limit_is_refused(
    content: bytes, said: str, library: DeliveredLibrary, tmp_path: Path, host: Path
) -> None:
    """It is not installed either; hami-core §0.3.10 about layouts."""
    lay(tmp_path / "libvgpu.so", content)
    with pytest.raises(
        HostFileError, match=rf"libvgpu\.so (is )?.*{said}.*deliver.*or set volcanoVgpu\.isolation"
    ):
        await library.install()
    assert names(host) == ["ld.so.preload"]


async def test_a_bad_delivery_leaves_the_good_library_in_use(
    library: DeliveredLibrary, tmp_path: Path
) -> None:
    """It may be one that is still being copied. The next refresh finds it whole."""
    lay(tmp_path / "libvgpu.so", elf())
    good = await library.install()
    lay(tmp_path / "libvgpu.so", elf(b"new", missing=1), time=2)
    with pytest.raises(HostFileError, match="still being copied"):
        await library.install()
    assert library.path == good
    lay(tmp_path / "libvgpu.so", elf(b"new"), time=3)
    assert await library.install() != good


async def test_a_library_that_is_gone_with_its_source_is_no_longer_named(
    library: DeliveredLibrary, tmp_path: Path
) -> None:
    """A runtime cannot create a container that mounts it, and says less about the reason."""
    lay(tmp_path / "libvgpu.so", elf())
    os.unlink(await library.install())
    (tmp_path / "libvgpu.so").unlink()
    with pytest.raises(HostFileError, match="no usable library"):
        await library.install()
    assert library.path == ""


@pytest.mark.parametrize(
    "code",
    [
        "01EF 9452 C103 A072",  # mov w1, #0xa778; movk w1, #0x1e, lsl #16 (clang -O0 and -O2)
        "01EF 94D2 E103 1F2A C103 A0F2",  # the same of x1, with an instruction between
        "78A7 1E00",  # a constant among the code, which ldr loads
    ],
)
async def test_the_layout_is_read_on_aarch64_too(
    code: str, library: DeliveredLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a number takes two instructions, so its four bytes need not be together."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    strings = REGION_VARIABLE + b"\0"
    lay(
        tmp_path / "libvgpu.so",
        shared_object(FUNCTIONS, code=bytes.fromhex(code), strings=strings, machine=183),
    )
    assert await library.install()


@pytest.mark.parametrize(
    "code",
    [
        "01EF 9452",
        "C103 A072",
        "01EF 9452 C203 A072",
        "00 01EF 9452 C103 A072",
        "C103 A072 01EF 9452",
    ],
)
async def test_other_instructions_of_aarch64_are_not_the_size(
    code: str, library: DeliveredLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One half, halves of two registers, of no instruction, or in the wrong order."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    strings = REGION_VARIABLE + b"\0"
    lay(
        tmp_path / "libvgpu.so",
        shared_object(FUNCTIONS, code=bytes.fromhex(code), strings=strings, machine=183),
    )
    with pytest.raises(HostFileError, match="unknown layout"):
        await library.install()


async def test_a_host_directory_that_cannot_be_written_is_an_error(
    tmp_path: Path, journal: Journal
) -> None:
    """With the path and what helps."""
    lay(tmp_path / "libvgpu.so", elf())
    lay(tmp_path / "file", b"")
    with pytest.raises(
        HostFileError, match="move away the file that is in the place of a directory"
    ):
        await installer(tmp_path / "file", tmp_path / "libvgpu.so", journal).install()


def read(path: str | Path) -> bytes:
    """The content."""
    return Path(path).read_bytes()
