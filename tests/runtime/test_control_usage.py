"""The use of cards by containers under vgpu-control, read from files that they may have changed."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.runtime.contained import Kubepods, kubepods
from vgpu_agent.isolation.vgpu_config import SIZE, Owner, SlotLimit, config_parts
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
from vgpu_agent.model import ControlledUse, GpuUsage, WrittenLimit
from vgpu_agent.pods import Pod, PodCache, PodContainer
from vgpu_agent.runtime.control_usage import ControlledUses, UsageReading

UID = "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e"
CARD = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
_SLOTS = 128
LIMIT = SlotLimit(
    CARD,
    total_bytes=3 << 30,
    real_bytes=3 << 30,
    hard_core=30,
    soft_core=30,
    core_limit=True,
    hard_limit=True,
    memory_limit=True,
    oversold=False,
)


def config(limit: SlotLimit = LIMIT, *, uid: str = UID, compatibility: int = 200) -> bytes:
    """A whole ``vgpu.config`` as the agent writes it."""
    owner = Owner(
        uid,
        "train",
        "ml",
        "main",
        "",
        compatibility,
        sm_watcher=False,
        tracks_virtual_memory=True,
    )
    whole = bytearray(SIZE)
    for offset, part in config_parts(owner, {1: limit}):
        whole[offset : offset + len(part)] = part
    return bytes(whole)


def write_config(directory: Path, content: bytes) -> None:
    """Write the container's file."""
    (directory / "config/vgpu.config").write_bytes(content)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A container's directory with all files as its library and the agent fill them."""
    made = tmp_path / f"{UID}_main"
    for folder in ("config", "vmem_node", "sm_node"):
        (made / folder).mkdir(parents=True)
    (made / "config/pids.config").write_text("11\n12\n")
    write_config(made, config())
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
    return ControlledUses(book, [str(directory.parent)], Journal(), pause_seconds=1)


ALL = ControlledUse(
    "ml",
    "train",
    "main",
    (11, 12),
    ((1, 768),),
    ((1, 25),),
    limits=(WrittenLimit(CARD, 3 << 30, 30),),
    registers_processes=True,
)


async def test_processes_spilled_memory_and_compute_are_read(uses: ControlledUses) -> None:
    """Published once, and not again while nothing changes."""
    await uses.read_once()
    version = uses.uses.version
    await uses.read_once()
    assert (uses.uses.value, uses.uses.version) == ((ALL,), version)


async def test_a_container_that_has_ended_is_not_shown(
    uses: ControlledUses, directory: Path
) -> None:
    """Its directory may be there for a while longer."""
    pod = Pod(UID, "ml", "train", containers=(PodContainer("main"),))
    uses._pod_cache.end(pod)
    await uses.read_once()
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
        ("config/pids.config", msgspec.structs.replace(ALL, pids=None)),
        ("vmem_node/vmem_node.config", msgspec.structs.replace(ALL, spilled_bytes=())),
        ("sm_node/sm_node.config", msgspec.structs.replace(ALL, cores_percent=())),
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
    await uses.read_once()
    assert uses.uses.value == (known,)


async def test_a_folder_that_is_a_link_is_not_entered(
    uses: ControlledUses, directory: Path, tmp_path: Path
) -> None:
    """It could show another container's use as its own."""
    await asyncio.to_thread(_as_link, directory / "sm_node")
    await uses.read_once()
    assert uses.uses.value[0].cores_percent == ()


@pytest.mark.parametrize(
    ("spoil", "trouble"),
    [
        (Path.unlink, "its vgpu.config is missing"),
        (_as_link, "its vgpu.config cannot be used: "),
        (_as_pipe, "its vgpu.config cannot be used: it is no file"),
        (_as_folder, "its vgpu.config cannot be used: it is no file"),
        (_as_garbage, "its vgpu.config cannot be used: it does not begin like one"),
        (lambda path: os.truncate(path, 100), "it has 100 bytes instead of 8192"),
        (
            lambda path: path.write_bytes(config(uid="another")),
            "its vgpu.config is that of another container",
        ),
    ],
)
async def test_a_file_that_limits_nothing_is_named(
    uses: ControlledUses, directory: Path, spoil: Callable[[Path], None], trouble: str
) -> None:
    """The library falls back to its environment, or to no limit."""
    await asyncio.to_thread(spoil, directory / "config/vgpu.config")
    await uses.read_once()
    (found,) = uses.uses.value
    assert trouble in found.trouble
    assert (found.limits, found.pids) == ((), (11, 12)) or "another" in trouble


@pytest.mark.parametrize(
    "changes",
    [
        {"total_bytes": 4 << 30},
        {"real_bytes": 4 << 30},
        {"hard_core": 31},
        {"soft_core": 31},
        {"core_limit": False},
        {"hard_limit": False},
        {"memory_limit": False},
        {"oversold": True},
        {"uuid": "GPU-x"},
    ],
)
async def test_a_file_that_allows_more_than_it_did_is_named(
    uses: ControlledUses, directory: Path, changes: dict[str, object]
) -> None:
    """Also where only its compute policy has changed, of which the grant says nothing. It is told
    at the second look: the file of a container's next start may be there a moment before the agent
    has taken note of it.
    """
    changed = config(msgspec.structs.replace(LIMIT, **changes))
    await uses.read_once()
    write_config(directory, changed)
    await uses.read_once()
    assert uses.uses.value[0].trouble == ""
    await uses.read_once()
    assert uses.uses.value[0].trouble == "its vgpu.config was changed after the agent wrote it"
    await asyncio.to_thread(
        uses.note_written_file, str(directory / "config/vgpu.config")
    )  # it was the agent
    await uses.read_once()
    assert uses.uses.value[0].trouble == ""


async def test_a_file_that_allows_less_holds_the_limit(
    uses: ControlledUses, directory: Path
) -> None:
    """An operator may have lowered it."""
    await uses.read_once()
    less = msgspec.structs.replace(LIMIT, total_bytes=1 << 30, hard_core=5, soft_core=5)
    write_config(directory, config(less))
    await uses.read_once()
    await uses.read_once()
    assert (uses.uses.value[0].trouble, uses.uses.value[0].limits[0].memory_bytes) == ("", 1 << 30)


async def test_the_limits_that_the_agent_has_made_are_those_that_count(
    uses: ControlledUses, directory: Path
) -> None:
    """Not those of the first look, where somebody has changed them before."""
    path = directory / "config/vgpu.config"
    await asyncio.to_thread(uses.note_written_file, str(path))
    await asyncio.to_thread(uses.note_written_file, str(directory / "vmem_node/vmem_node.config"))
    await asyncio.to_thread(uses.note_written_file, "/elsewhere/config/vgpu.config")
    write_config(directory, config(msgspec.structs.replace(LIMIT, core_limit=False)))
    await uses.read_once()
    await uses.read_once()
    assert "changed" in uses.uses.value[0].trouble


async def test_a_container_that_runs_without_its_files_is_named(directory: Path) -> None:
    """One that has not been started yet, or has no share of anything, has none."""
    book = PodCache()
    asks = {"nvidia.com/vgpu-number": 1}
    book.put(
        Pod(
            UID,
            "ml",
            "train",
            containers=(
                PodContainer("gone", limits=asks, started=True),
                PodContainer("waits", limits=asks),
                PodContainer("plain", started=True),
            ),
        )
    )
    uses = ControlledUses(book, [str(directory.parent)], Journal(), pause_seconds=1)
    await uses.read_once()
    (found,) = uses.uses.value
    assert (found.container, found.trouble) == ("gone", "it has no vgpu.config on this node")


async def test_a_uid_that_is_cut_in_the_file_is_still_the_containers(tmp_path: Path) -> None:
    """The UID of a static pod's file may be longer than the field."""
    uid = "a" * 60
    directory = tmp_path / f"{uid}_main"
    (directory / "config").mkdir(parents=True)
    write_config(directory, config(uid=uid))
    book = PodCache()
    book.put(Pod(uid, "ml", "train", containers=(PodContainer("main"),)))
    uses = ControlledUses(book, [str(tmp_path)], Journal(), pause_seconds=1)
    await uses.read_once()
    assert [(use.trouble, len(use.limits)) for use in uses.uses.value] == [("", 1)]


@pytest.mark.parametrize(("compatibility", "registers"), [(1, False), (102, False), (236, True)])
async def test_the_file_says_whether_processes_register(
    uses: ControlledUses, directory: Path, compatibility: int, *, registers: bool
) -> None:
    """vgpu-manager §7.6; also of a container from before the setting was changed."""
    write_config(directory, config(compatibility=compatibility))
    await uses.read_once()
    assert uses.uses.value[0].registers_processes is registers


async def test_the_replaced_plugins_containers_are_read_where_it_has_put_them(
    uses: ControlledUses, directory: Path, tmp_path: Path
) -> None:
    """They run on while the agent takes over."""
    below = tmp_path / "containers"
    below.mkdir()
    both = ControlledUses(
        uses._pod_cache, [str(below), str(directory.parent)], Journal(), pause_seconds=1
    )
    await both.read_once()
    assert both.uses.value == (ALL,)
    await asyncio.to_thread(directory.rename, below / directory.name)
    both._directories = (str(below), str(directory.parent))
    await both.read_once()
    assert both.uses.value == (ALL,)


@pytest.fixture
def pods() -> Iterator[Kubepods]:
    """Cgroups of pods."""
    with kubepods() as made:
        yield made


@pytest.mark.component  # it starts programs
async def test_processes_on_a_card_are_those_that_the_kernel_counts_to_the_container(
    directory: Path, pods: Kubepods
) -> None:
    """Whatever the container writes into its files: the driver names the process, and its cgroup
    the container. A process that began after the driver's answer has only got the number.
    """
    container, other = pods.container(UID), pods.container()
    own, strange = container.start(), other.start()
    book = PodCache()
    named = PodContainer("main", container_id=container.member.container_id)
    book.put(Pod(UID, "ml", "train", containers=(named,)))
    on = GpuUsage(CARD, processes=((own.pid, 100), (strange.pid, 200), (os.getpid(), 300)))
    measured = UsageReading((on,), time.time())
    uses = ControlledUses(
        book, [str(directory.parent)], Journal(), pause_seconds=1, usage=lambda: measured
    )

    def on_cards() -> tuple[tuple[str, int, int], ...]:
        return uses.uses.value[0].on_cards

    await uses.read_once()
    assert on_cards() == ((CARD, own.pid, 100),)
    measured = UsageReading((on,), time.time() - 3600)
    await uses.read_once()
    assert on_cards() == ()
    gone = await asyncio.to_thread(subprocess.Popen, ["true"])
    await asyncio.to_thread(gone.wait)
    measured = UsageReading((GpuUsage(CARD, processes=((gone.pid, 1),)),), time.time())
    await uses.read_once()
    assert on_cards() == ()
