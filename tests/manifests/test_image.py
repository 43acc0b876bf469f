"""The Containerfile and the script that builds the image, against the manifests that deploy it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.manifests.documents import ROOT
from vgpu_agent import __version__

pytestmark = pytest.mark.component  # it starts programs


def test_the_image_is_of_this_version_and_knows_its_commit() -> None:
    """The label and the variable that ``build_info`` shows.
    The build ignores what it does not copy.
    """
    containerfile = (ROOT / "Containerfile").read_text()
    assert f'org.opencontainers.image.version="{__version__}"' in containerfile
    assert "VGPU_AGENT_COMMIT=${COMMIT}" in containerfile
    allowed = {
        line[1:]
        for line in (ROOT / ".containerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set(re.findall(r"^COPY (?!--)(\S+)", containerfile, flags=re.MULTILINE))
    assert copied == allowed


def test_the_image_script_builds_what_the_manifests_deploy(kustomization: Any) -> None:
    """Under the name that the kustomization sets; from the files that the Containerfile takes, so
    that no change of one is overlooked.
    """
    script = (ROOT / "scripts" / "image").read_text()
    image = kustomization["images"][0]
    assert f'default="{image["newName"]}:{image["newTag"]}"' in script
    (names,) = re.findall(r"^SOURCES = \((.*)\)$", script, flags=re.MULTILINE)
    allowed = {
        line[1:]
        for line in (ROOT / ".containerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(re.findall(r'"([^"]+)"', names)) == allowed | {"Containerfile", ".containerignore"}


def test_the_last_stage_of_the_image_needs_no_shell() -> None:
    """Its base may have none. Each RUN there names a program, and the command is Python."""
    containerfile = (ROOT / "Containerfile").read_text()
    last = containerfile[containerfile.rindex("\nFROM ") :]
    assert [
        line
        for line in last.splitlines()
        if line.startswith("RUN ") and not line.startswith('RUN ["python3"')
    ] == []
    assert "#!/bin/sh" not in containerfile


def _shipped(folder: Path) -> Path:
    """Copy the package as the Containerfile does, and return the folder to import it from."""
    shutil.copytree(
        ROOT / "vgpu_agent", folder / "vgpu_agent", ignore=shutil.ignore_patterns("__pycache__")
    )
    removed = re.findall(
        r"^RUN rm -r /opt/vgpu-agent/lib/(\S+)$",
        (ROOT / "Containerfile").read_text(),
        flags=re.MULTILINE,
    )
    assert removed == ["vgpu_agent/sim"]
    shutil.rmtree(folder / removed[0])
    return folder


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )


_IMPORT_ALL = """
import importlib, pkgutil, vgpu_agent
for module in pkgutil.walk_packages(vgpu_agent.__path__, "vgpu_agent."):
    if module.name != "vgpu_agent.__main__":
        importlib.import_module(module.name)
print(vgpu_agent.__file__)
"""


def test_the_image_has_no_simulator_and_its_agent_needs_none(tmp_path: Path) -> None:
    """Simulated GPUs, their C code, the demo and its stand-ins have no business on a node
    with real GPUs.
    """
    folder = _shipped(tmp_path)
    assert [
        file.name
        for file in folder.rglob("*")
        if file.suffix in {".c", ".h", ".inc"} or "demo" in file.name
    ] == []
    imported = _run(folder, "-c", _IMPORT_ALL)
    assert imported.stdout == f"{folder}/vgpu_agent/__init__.py\n", imported.stderr
    shown = _run(folder, "-m", "vgpu_agent", "--help").stdout
    assert "run the agent on this node" in shown
    assert "simulated" not in shown


def test_an_agent_without_the_simulator_says_so(tmp_path: Path) -> None:
    """The flag is there, because flags and settings are the same everywhere."""
    folder = _shipped(tmp_path)
    kubelet = folder / "kubelet"
    (kubelet / "device-plugins").mkdir(parents=True)
    (folder / "node").mkdir()
    flags = [
        "--simulate",
        str(folder / "node"),
        "--kubelet-dir",
        str(kubelet),
        "--listen",
        "127.0.0.1:0",
        "--debug-listen",
        "127.0.0.1:0",
    ]
    ran = _run(folder, "-m", "vgpu_agent", "run", *flags)
    assert ran.returncode == 1
    line = json.loads(ran.stderr.splitlines()[-1])
    assert line["msg"] == "command.failed"
    assert line["error"].startswith("--simulate: the image does not contain the simulator")


def test_a_wheel_has_no_simulator(tmp_path: Path) -> None:
    """A wheel has the same parts as the image."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "vgpu_agent/cli/main.py" in names
    assert [name for name in names if name.startswith("vgpu_agent/sim/") or "demo" in name] == []
