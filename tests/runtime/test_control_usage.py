"""The use of cards by containers under vgpu-control, read from files that they may have changed."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from vgpu_agent.isolation.vgpu_tables import (
    SM_NODE_SIZE,
    SM_NODE_SLOT,
    VMEM_COUNT,
    VMEM_ROW,
    VMEM_SIZE,
    VMEM_SLOT_SIZE,
    sm_node_head,
    vmem_head,
)
from vgpu_agent.journal import Journal
from vgpu_agent.model import ControlledUse
from vgpu_agent.pods import Pod, PodCache, PodContainer
from vgpu_agent.runtime.control_usage import ControlledUses

UID = "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e"
_SLOTS = 128


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A container's directory with all files as its library and the agent fill them."""
    made = tmp_path / f"{UID}_main"
    for folder in ("config", "vmem_node", "sm_node"):
        (made / folder).mkdir(parents=True)
    (made / "config/pids.config").write_text("11\n12\n")
    spilled = bytearray(vmem_head().ljust(VMEM_SIZE, b"\0"))
    first = _SLOTS + VMEM_SLOT_SIZE  # of card 1
    for place, used in enumerate((512, 256)):
        VMEM_ROW.pack_into(spilled, first + place * VMEM_ROW.size, 11 + place, used)
    struct.pack_into("<I", spilled, first + VMEM_COUNT, 2)
    (made / "vmem_node/vmem_node.config").write_bytes(spilled)
    samples = bytearray(sm_node_head().ljust(SM_NODE_SIZE, b"\0"))
    fields = [0] * 20
    fields[4], fields[14] = 1, 25
    SM_NODE_SLOT.pack_into(samples, _SLOTS + 128, *fields)
    (made / "sm_node/sm_node.config").write_bytes(samples)
    return made


@pytest.fixture
def uses(directory: Path) -> ControlledUses:
    """The reader on a node with that container's pod."""
    book = PodCache()
    book.put(Pod(UID, "ml", "train", containers=(PodContainer("main"),)))
    return ControlledUses(book, str(directory.parent), Journal(), pause_seconds=1)


ALL = ControlledUse("ml", "train", "main", (11, 12), ((1, 768),), ((1, 25),))


async def test_processes_spilled_memory_and_compute_are_read(uses: ControlledUses) -> None:
    """Published once, and not again while nothing changes."""
    await uses.look()
    version = uses.uses.version
    await uses.look()
    assert (uses.uses.value, uses.uses.version) == ((ALL,), version)


async def test_a_container_that_has_ended_is_not_shown(
    uses: ControlledUses, directory: Path
) -> None:
    """Its directory may be there for a while longer."""
    pod = Pod(UID, "ml", "train", containers=(PodContainer("main"),))
    uses._pod_cache.end(pod)
    await uses.look()
    assert uses.uses.value == ()


def _as_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("spoil", [Path.unlink, _as_link, _as_pipe, _as_folder, _as_garbage])
@pytest.mark.parametrize(
    ("file", "known"),
    [
        ("config/pids.config", ControlledUse("ml", "train", "main", None, ((1, 768),), ((1, 25),))),
        (
            "vmem_node/vmem_node.config",
            ControlledUse("ml", "train", "main", (11, 12), (), ((1, 25),)),
        ),
        (
            "sm_node/sm_node.config",
            ControlledUse("ml", "train", "main", (11, 12), ((1, 768),), ()),
        ),
    ],
)
async def test_what_cannot_be_read_is_not_known_and_hides_nothing_else(
    uses: ControlledUses,
    directory: Path,
    file: str,
    known: ControlledUse,
    spoil: Callable[[Path], None],
) -> None:
    """Tenants own two of the files; links are not followed and pipes not waited for."""
    await asyncio.to_thread(spoil, directory / file)
    await uses.look()
    assert uses.uses.value == (known,)


async def test_a_folder_that_is_a_link_is_not_entered(
    uses: ControlledUses, directory: Path, tmp_path: Path
) -> None:
    """It could show another container's use as its own."""
    await asyncio.to_thread(_as_link, directory / "sm_node")
    await uses.look()
    assert uses.uses.value[0].cores_percent == ()
