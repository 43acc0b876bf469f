"""Putting the simulated driver below a process's pynvml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import simulated_node
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.build import compiler
from vgpu_agent.sim.preload import preload


def _in_a_fresh_process(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_the_binding_finds_the_simulated_library_by_its_soname(tmp_path: Path) -> None:
    """A process that preloaded needs neither LD_LIBRARY_PATH nor a restart."""
    node = simulated_node(tmp_path, "T4", 3)
    program = (
        "import sys, pathlib, pynvml; from vgpu_agent.sim.preload import preload; "
        "preload(pathlib.Path(sys.argv[1]))\npynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount(), "
        "hasattr(pynvml.nvmlLib, 'vgpusim_layout'))"
    )

    assert _in_a_fresh_process(program, str(node.directory)) == "3 True\n"


def test_a_relative_directory_stays_the_same_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state's path is made absolute."""
    simulated_node(tmp_path, gpus=1)
    program = (
        "import os, pathlib, pynvml; from vgpu_agent.sim.preload import preload; "
        "preload(pathlib.Path('gpus')); os.chdir('/')\npynvml.nvmlInit(); "
        "print(pynvml.nvmlDeviceGetCount())"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)

    assert _in_a_fresh_process(program) == "1\n"


def test_a_directory_without_a_node(tmp_path: Path) -> None:
    """The error comes before anything is built or loaded."""
    with pytest.raises(
        SimulationError, match="holds no simulated node; create one with: vgpu-agent sim create"
    ):
        preload(tmp_path)


def test_a_real_driver_that_is_loaded_already(tmp_path: Path) -> None:
    """Two libraries of one soname look the same to the loader,
    so the simulation refuses to pretend.
    """
    node = simulated_node(tmp_path, gpus=1)
    other = tmp_path / "libnvidia-ml.so.1"
    (tmp_path / "other.c").write_text("int nvmlInit_v2(void) { return 0; }\n")
    subprocess.run(
        [
            *compiler(),
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
            other,
            tmp_path / "other.c",
        ],
        check=True,
    )
    program = (
        "import ctypes, sys, pathlib; ctypes.CDLL(sys.argv[2])\n"
        "from vgpu_agent.sim.preload import preload; preload(pathlib.Path(sys.argv[1]))"
    )

    assert "a real libnvidia-ml.so.1 is loaded in this process already" in _in_a_fresh_process(
        program, str(node.directory), str(other)
    )
