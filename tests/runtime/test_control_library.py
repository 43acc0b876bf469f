"""vgpu-manager's library: recognised, installed under a name of its own, with its program."""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests.runtime.conftest import names
from vgpu_agent.config.settings import Gpu, Settings
from vgpu_agent.config.vgpu_control import VgpuControl
from vgpu_agent.errors import HostFileError
from vgpu_agent.journal import Journal
from vgpu_agent.runtime import control_library
from vgpu_agent.runtime.delivered_library import DeliveredLibrary
from vgpu_agent.sim.stand_in_library import (
    AARCH64,
    X86_64,
    deliver_stand_in_control_library,
    deliver_stand_in_library,
)
from vgpu_agent.sim.stand_in_library import (
    control_library as stand_in,
)

INSTEAD = "or set vgpuManager.isolation to none"


class Delivery:
    """A node to which an operator delivers.

    Attributes:
        host: the host directory, still missing.
        source: where the library is delivered.
    """

    def __init__(self, folder: Path) -> None:
        self.host, self.source = folder / "manager", folder / "delivered" / "libvgpu-control.so"
        deliver_stand_in_control_library(self.source.parent)
        self.proc = folder / "proc"
        (self.proc / "2").mkdir(parents=True)
        (self.proc / "2" / "status").write_text("Name:\tkthreadd\n")
        self.journal = Journal()

    def library(
        self, processes: Literal["client", "host-proc"] = "client", **changed: object
    ) -> DeliveredLibrary:
        """Return an installer of it."""
        control = VgpuControl(
            host_directory=str(self.host), library=str(self.source), processes=processes
        )
        settings = Settings(vgpu_control=control, gpu=Gpu(proc_root=str(self.proc)))
        return DeliveredLibrary(
            control_library.RECOGNITION,
            msgspec.structs.replace(settings, **changed),
            self.journal,
            instead=INSTEAD,
        )


@pytest.fixture
def delivery(tmp_path: Path) -> Delivery:
    """A good library and its program."""
    return Delivery(tmp_path)


async def test_the_library_and_its_program_are_installed(delivery: Delivery) -> None:
    """vgpu-manager:§13.5 has the text of ld.so.preload; the program lies where the library in the
    container looks for it, in a directory that nobody can list.
    """
    path = await delivery.library().install()
    name = os.path.basename(path)
    assert names(delivery.host) == sorted([name, "ld.so.preload", "registry"])
    assert name.removeprefix("libvgpu-control.so.").isalnum()
    assert read(path) == delivery.source.read_bytes()
    preload = delivery.host / "ld.so.preload"
    assert preload.read_bytes() == b"/etc/vgpu-manager/driver/libvgpu-control.so"
    client = delivery.host / "registry" / "device-client"
    assert client.read_bytes() == (delivery.source.parent / "device-client").read_bytes()
    assert (client.stat().st_mode & 0o777, client.parent.stat().st_mode & 0o777) == (0o755, 0o711)
    (entry,) = delivery.journal.entries
    assert (entry.event, entry.facts["backend"]) == ("library.installed", "vgpu-control")


async def test_neither_is_ever_written_to_where_it_lies(delivery: Delivery) -> None:
    """Containers have the library mapped and run the program: what is newer gets an inode of its
    own.
    """
    library = delivery.library()
    old, client = await library.install(), delivery.host / "registry" / "device-client"
    inode = client.stat().st_ino
    assert await library.install() == old
    assert client.stat().st_ino == inode
    delivery.source.write_bytes(stand_in() + b"newer")
    with client.open("rb") as running:
        (delivery.source.parent / "device-client").write_bytes(b"\x7fELF newer")
        new = await library.install()
        assert running.read() == b"\x7fELF, and no program"
    assert new != old
    assert read(old) == stand_in()
    assert client.read_bytes() == b"\x7fELF newer"


@pytest.mark.parametrize("machine", [X86_64, AARCH64])
async def test_the_layout_is_recognised_on_both_processors(
    machine: int, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On aarch64 a number takes two instructions."""
    monkeypatch.setattr(
        platform, "machine", lambda: {X86_64: "x86_64", AARCH64: "aarch64"}[machine]
    )
    delivery.source.write_bytes(stand_in(machine=machine))
    assert await delivery.library().install()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((b"cuMemCreate", b"cuMemBreate"), "does not export cuMemCreate, so it limits nothing"),
        (
            (b"MANAGER_COMPATIBILITY_MODE", b"MANAGER_COMPATIBILITY_NODE"),
            "does not know MANAGER_COMPATIBILITY_MODE, so it is not vgpu-manager's library",
        ),
        (
            ((0x56474346).to_bytes(4, "little"), b"abcd"),
            r"by which vgpu\.config is recognised, so it is of a version before v1\.0\.0",
        ),
        (((0x534D4E44).to_bytes(4, "little"), b"abcd"), r"by which sm_node\.config is recognised"),
        ((b"\x7fELF", b"\x7fELG"), "not an ELF file"),
    ],
)
async def test_a_library_that_would_not_limit_is_refused(
    change: tuple[bytes, bytes], said: str, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vgpu-manager:D20: a library before v1.0.0 reads another layout, so nothing would be
    limited.
    """
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    content = stand_in(machine=X86_64)
    assert change[0] in content
    delivery.source.write_bytes(content.replace(*change))
    library = delivery.library()
    with pytest.raises(
        HostFileError,
        match=rf"{said}.*deliver libvgpu-control\.so.*, or set vgpuManager\.isolation",
    ):
        await library.install()
    assert library.path == ""
    assert names(delivery.host) == ["ld.so.preload"]


def test_hami_core_s_library_is_no_such_library(delivery: Delivery) -> None:
    """An operator has both on the node, and confuses them."""
    other = deliver_stand_in_library(delivery.host.parent / "other")
    delivery.source.write_bytes(other.read_bytes())
    with pytest.raises(HostFileError, match="does not export cuMemCreate"):
        asyncio.run(delivery.library().install())


async def test_nothing_is_offered_without_the_program(delivery: Delivery) -> None:
    """vgpu-manager §9: the library ends each process whose registration fails. The remedy is to
    deliver it: the folder is mounted, since the library was read from there.
    """
    (delivery.source.parent / "device-client").unlink()
    library = delivery.library()
    said = r"cannot read .*/device-client: No such file or directory; deliver vgpu-manager's device"
    with pytest.raises(HostFileError, match=said):
        await library.install()
    assert library.path == ""
    assert await delivery.library("host-proc").install()


async def test_a_text_in_the_program_s_place_is_refused(delivery: Delivery) -> None:
    """Every process of every container would end with it."""
    (delivery.source.parent / "device-client").write_text("not here yet")
    with pytest.raises(HostFileError, match=r"device-client is not a program.*deliver.*or set"):
        await delivery.library().install()


async def test_an_agent_without_host_pids_does_not_offer_what_takes_them(
    delivery: Delivery,
) -> None:
    """The kernel tells such an agent no number of a process that connects, so it could prove
    nobody. Simulated GPUs need no proof, and containers that see the host's /proc need no agent.
    """
    (delivery.proc / "2" / "status").write_text("Name:\tpython\n")
    with pytest.raises(HostFileError, match=r"does not show the host's processes.*hostPID.*or set"):
        await delivery.library().install()
    assert await delivery.library("host-proc").install()
    assert await delivery.library(simulate="/sim").install()


async def test_a_bad_delivery_leaves_the_good_library_in_use(delivery: Delivery) -> None:
    """It may be one that is still being copied."""
    library = delivery.library()
    good = await library.install()
    delivery.source.write_bytes(stand_in()[:-10])
    os.utime(delivery.source, (2, 2))
    with pytest.raises(HostFileError, match="still being copied"):
        await library.install()
    assert library.path == good


def read(path: str) -> bytes:
    """The content."""
    return Path(path).read_bytes()
