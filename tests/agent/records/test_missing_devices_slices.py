"""The parent GPU of each MIG instance, remembered over a restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.golden import U0, U1
from vgpu_agent.agent.records.missing_devices import InstanceFile
from vgpu_agent.ledger.accounting import Device

SLICES = {"MIG-a": Device("MIG-a", U1, 4864), "MIG-b": Device("MIG-b", U0, 9856)}


async def test_what_was_kept_is_recalled_by_the_next_process(tmp_path: Path) -> None:
    """In the same order: the oldest are forgotten first."""
    await InstanceFile(str(tmp_path / "state")).write(SLICES)

    recalled = await InstanceFile(str(tmp_path / "state")).read()

    assert list(recalled.items()) == list(SLICES.items())
    assert await asyncio.to_thread(os.listdir, tmp_path / "state") == ["slices.json"]


async def test_a_node_without_instances_has_no_file(tmp_path: Path) -> None:
    """Nothing to remember, nothing written."""
    file = InstanceFile(str(tmp_path))
    await file.write({})

    assert await file.read() == {}
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    """The ledger changes with every pod, and the instances with a division only."""
    file = InstanceFile(str(tmp_path))
    await file.write(SLICES)
    await asyncio.to_thread((tmp_path / "slices.json").unlink)
    await file.write(dict(SLICES))
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    await file.write({"MIG-a": SLICES["MIG-a"]})
    assert list(await InstanceFile(str(tmp_path)).read()) == ["MIG-a"]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'[{"uuid": 7}]', b"\xff\xfe"])
async def test_a_damaged_memory_is_none(tmp_path: Path, content: bytes) -> None:
    """It is a cache. An instance of which nothing is known holds up nothing."""
    (tmp_path / "slices.json").write_bytes(content)
    assert await InstanceFile(str(tmp_path)).read() == {}


async def test_a_directory_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    """With the setting; everything else goes on."""
    (tmp_path / "file").write_text("")
    file = InstanceFile(str(tmp_path / "file"))
    with capture_logs() as lines:
        await file.write(SLICES)
        await file.write(SLICES)
    assert [line["event"] for line in lines] == ["state.not_written"]
    assert lines[0]["remedy"].startswith("make stateDirectory a directory with room")
