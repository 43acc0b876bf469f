"""A client of our own that reads and writes the files of vgpu-control as the library does:
``vgpu_control_client.c``, compiled by the tests that use it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from vgpu_agent.isolation.edits import Provision
from vgpu_agent.sim.build import compiler

SOURCE = Path(__file__).with_name("vgpu_control_client.c")


def build_client(folder: Path) -> Path:
    """Compile the client, without any library but the system's own."""
    program = folder / "vgpu-control-client"
    command = [*compiler(), "-O2", "-Wall", "-Werror", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return program


def lay_out(provision: Provision, root: Path) -> None:
    """Give the files of a container the paths that it sees, below ``root``, as hard links: a
    runtime would mount them, which takes root.
    """
    for mount in provision.edits.mounts:
        source, target = Path(mount.host_path), root / mount.container_path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, target, copy_function=lambda old, new: Path(new).hardlink_to(old)
            )
        elif source.exists():
            target.hardlink_to(source)


def client(program: Path, root: Path, *words: object) -> list[str]:
    """Run the client; the lines that it prints.

    Raises:
        AssertionError: something is not as it must be for the library.
    """
    ran = subprocess.run(
        [str(program), str(root), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
