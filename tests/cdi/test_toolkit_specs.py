"""The specs that the container toolkit keeps: which names are there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from vgpu_agent.cdi.toolkit_specs import ToolkitSpecs
from vgpu_agent.journal import Journal

TOOLKITS = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
devices:
- name: GPU-1
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
- name: all
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
"""
GDS = (
    '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gds", "devices": [{"name": "all", '
    '"containerEdits": {"env": ["A=b"]}}]}'
)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def _looked(specs: ToolkitSpecs) -> ToolkitSpecs:
    await specs.look()
    return specs


async def test_names_are_found_in_all_directories_and_formats(tmp_path: Path) -> None:
    """The toolkit writes YAML into one directory, and an administrator JSON into another."""
    await asyncio.to_thread(_write, tmp_path / "run" / "nvidia.yaml", TOOLKITS)
    await asyncio.to_thread(_write, tmp_path / "etc" / "gds.json", GDS)
    specs = await _looked(
        ToolkitSpecs([str(tmp_path / "etc"), str(tmp_path / "run")], Journal(), look_seconds=1)
    )
    assert specs.names == {"nvidia.com/gpu=GPU-1", "nvidia.com/gpu=all", "nvidia.com/gds=all"}
    assert specs.knows("gds")
    assert not specs.knows("mofed")
    assert not specs.error
    assert [status.path for status in specs.statuses] == [
        str(tmp_path / "etc" / "gds.json"),
        str(tmp_path / "run" / "nvidia.yaml"),
    ]


async def test_a_missing_spec_is_one_clear_error(tmp_path: Path) -> None:
    """It says where the tool looked, and which program makes the spec."""
    specs = await _looked(
        ToolkitSpecs([str(tmp_path / "none"), str(tmp_path)], Journal(), look_seconds=1)
    )
    assert not specs.names
    assert f"no CDI spec of kind nvidia.com/gpu in {tmp_path / 'none'} or {tmp_path}" in specs.error
    assert "nvidia-ctk cdi generate" in specs.error
    assert specs.statuses[0].error == specs.error


async def test_a_broken_spec_is_named_with_its_file(tmp_path: Path) -> None:
    """Garbage is reported once. Specs of other vendors and of grants do not matter here."""
    await asyncio.to_thread(_write, tmp_path / "nvidia.yaml", "kind: nvidia.com/gpu\ndevices: 7\n")
    await asyncio.to_thread(_write, tmp_path / "other.json", "{ not ours")
    await asyncio.to_thread(_write, tmp_path / "vgpu-agent-x.json", "nvidia.com/ but of a grant")
    journal = Journal()
    specs = await _looked(ToolkitSpecs([str(tmp_path)], journal, look_seconds=1))
    await specs.look()
    assert f"{tmp_path / 'nvidia.yaml'} is not a CDI spec" in specs.error
    assert [entry.event for entry in journal.entries] == ["cdi.unusable_spec"]


async def test_changes_are_seen_and_told(tmp_path: Path) -> None:
    """A spec comes, changes and goes. Another look without news wakes no reader."""
    specs = await _looked(ToolkitSpecs([str(tmp_path)], Journal(), look_seconds=1))
    path = tmp_path / "nvidia.yaml"
    await asyncio.to_thread(_write, path, TOOLKITS)
    await specs.look()
    first = specs.revision.value
    assert "nvidia.com/gpu=GPU-1" in specs.names
    await specs.look()
    assert specs.revision.value == first
    await asyncio.to_thread(_write, path, TOOLKITS.replace("GPU-1", "GPU-22"))
    await specs.look()
    assert "nvidia.com/gpu=GPU-22" in specs.names
    await asyncio.to_thread(os.unlink, path)
    await specs.look()
    assert not specs.names
    assert specs.revision.value == first + 2


async def test_a_name_in_two_files_of_one_directory_is_none(tmp_path: Path) -> None:
    """Runtimes refuse it, as after a copy of the spec that was kept beside it.
    In two directories the later one has it.
    """
    for path in ("etc/nvidia.yaml", "run/nvidia.yaml", "run/gds.json"):
        await asyncio.to_thread(
            _write, tmp_path / path, GDS if path.endswith(".json") else TOOLKITS
        )
    specs = await _looked(
        ToolkitSpecs([str(tmp_path / "etc"), str(tmp_path / "run")], Journal(), look_seconds=1)
    )
    assert "nvidia.com/gpu=GPU-1" in specs.names
    copy = tmp_path / "run/nvidia-before.yaml"
    await asyncio.to_thread(_write, copy, TOOLKITS)
    await specs.look()
    assert specs.names == {"nvidia.com/gds=all"}
    assert specs.error == (
        f"nvidia.com/gpu=GPU-1 is in {copy} and in {tmp_path / 'run/nvidia.yaml'}, so runtimes "
        "use neither; remove one of them"
    )
    await asyncio.to_thread(os.unlink, copy)
    await specs.look()
    assert "nvidia.com/gpu=GPU-1" in specs.names
    assert not specs.error
