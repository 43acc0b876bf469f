"""The memory on which a restart during an outage relies."""

from __future__ import annotations

from pathlib import Path

import pytest

from vgpu_agent.agent.remembered import Remembered, RememberedFile

FACTS = Remembered(
    "node-a", "v1.31.0", "containerd://2.0.0", {"device-config.yaml": ("nvidia: {}",)}
)


async def test_what_was_kept_is_recalled_by_the_next_process(tmp_path: Path) -> None:
    """The directory is made, and the Node as far as it is known comes out again."""
    await RememberedFile(str(tmp_path / "state")).write(FACTS)
    recalled = await RememberedFile(str(tmp_path / "state")).read("node-a")
    assert recalled == FACTS
    assert recalled.as_node.runtime_version == "containerd://2.0.0"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["remembered.json"]


async def test_another_nodes_memory_is_nobodys(tmp_path: Path) -> None:
    """A disk that was moved to another node says nothing about this one."""
    await RememberedFile(str(tmp_path)).write(FACTS)
    assert await RememberedFile(str(tmp_path)).read("node-b") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"node": 7}', b"\xff\xfe"])
async def test_a_damaged_memory_is_none(tmp_path: Path, content: bytes) -> None:
    """It is a cache: the API server says it again."""
    (tmp_path / "remembered.json").write_bytes(content)
    assert await RememberedFile(str(tmp_path)).read("node-a") is None


async def test_a_directory_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    """Nothing depends on the memory while the API server answers."""
    (tmp_path / "file").write_text("")
    file = RememberedFile(str(tmp_path / "file"))
    await file.write(FACTS)
    await file.write(FACTS)
    assert await file.read("node-a") is None
