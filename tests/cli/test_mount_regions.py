"""``vgpu-agent mount-regions``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vgpu_agent.cli import main as command_line
from vgpu_agent.config import schema
from vgpu_agent.families.nvidia.plugin_config import translate_file

CONFIG = "version: v1\nfamilies: {{volcanoVgpu: true}}\nhamiCore: {{hostDirectory: {}}}\n"
OTHERS = "vgpu-control: no family that is on uses it, so it needs no slots\n"


@pytest.mark.parametrize("count", ["0", "1000"])
def test_a_number_that_makes_no_sense_is_refused(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before anything is mounted."""
    assert command_line.main(["mount-regions", "--count", count]) == command_line.USAGE
    assert capsys.readouterr().err == f"--count {count}: give a number from 1 to 999\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_is_mounted_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The init container runs at each start of the agent's pod,
    while containers have their regions in the slots.
    """
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(tmp_path))
    slots = tmp_path / "vgpu" / "slots"
    try:
        assert command_line.main(["mount-regions", "--config", str(config), "--count", "2"]) == 0
        (slots / "001" / "file").write_text("in use")
        assert command_line.main(["mount-regions", "--config", str(config), "--count", "3"]) == 0
        assert (slots / "001" / "file").read_text() == "in use"
        assert capsys.readouterr().out == (
            f"{slots}: 2 slots, 2 of them mounted now\n{OTHERS}"
            f"{slots}: 3 slots, 1 of them mounted now\n{OTHERS}"
        )
    finally:
        for slot in sorted(slots.iterdir()):
            subprocess.run(["umount", str(slot)], check=True)


@pytest.mark.parametrize(
    ("families", "only"), [("{}", []), ("{volcanoVgpu: true}", ["--backend", "vgpu-control"])]
)
def test_nothing_is_mounted_for_a_backend_that_is_not_asked_for(
    families: str,
    only: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A family that is off needs no slots, and a container that mounts for one backend has no
    directory of the others.
    """
    monkeypatch.setattr(
        "vgpu_agent.cli.mount_regions.mount_tmpfs", lambda *_: pytest.fail("mounts")
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        f"version: v1\nfamilies: {families}\nhamiCore: {{hostDirectory: {tmp_path}/vgpu}}\n"
        f"vgpuControl: {{hostDirectory: {tmp_path}/manager}}\n"
    )
    assert command_line.main(["mount-regions", "--config", str(config), *only]) == 0
    assert capsys.readouterr().out.endswith(OTHERS)
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_named_backend_gets_its_slots_while_no_family_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The family may be switched on later, when nobody mounts any more."""
    mounted: list[str] = []
    monkeypatch.setattr(
        "vgpu_agent.cli.mount_regions.mount_tmpfs", lambda path, _: mounted.append(path)
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"version: v1\nhamiCore: {{hostDirectory: {tmp_path}}}\n")
    arguments = ["mount-regions", "--config", str(config), "--count", "2", "--backend", "hami-core"]
    assert command_line.main(arguments) == 0
    assert mounted == [f"{tmp_path}/vgpu/slots/000", f"{tmp_path}/vgpu/slots/001"]
    assert "2 slots, 2 of them mounted now" in capsys.readouterr().out


def test_who_may_not_mount_is_told_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the path and the remedy, exit status 1."""

    def refuse(path: str, options: str) -> None:
        raise PermissionError(1, os.strerror(1), f"{path} {options}")

    monkeypatch.setattr("vgpu_agent.cli.mount_regions.mount_tmpfs", refuse)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(tmp_path))
    assert command_line.main(["mount-regions", "--config", str(config)]) == command_line.FAILED
    said = capsys.readouterr().err
    assert (
        f"cannot mount a slot for a region at {tmp_path}/vgpu/slots/000: Operation not permitted; "
        "let the container"
    ) in said


def test_no_configuration_that_a_label_chooses_decides_about_slots() -> None:
    """The command reads none of them (namedConfig), so no key of theirs may be one of those by
    which it knows families, backends and directories.
    """
    decisive = ("families", "hamiCore", "vgpuControl", "volcanoVgpu", "vgpuManager")
    ours = {path for path in schema.value_paths() if path.startswith(decisive)}
    assert {"families.vgpuManager", "vgpuControl.hostDirectory", "vgpuManager.isolation"} <= ours
    for path in ours:
        named = translate_file(f"version: v1\n{path.partition('.')[0]}: {{}}\n".encode())
        assert not named.members, path
    every = translate_file(
        b"version: v1\nflags: {migStrategy: single, plugin: {passDeviceSpecs: true}}\n"
    )
    assert every.members.keys().isdisjoint(decisive)
