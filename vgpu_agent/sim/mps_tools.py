"""The installation of stand-ins for ``nvidia-cuda-mps-control`` and ``nvidia-smi`` in a directory,
and their faults.

Called by tests and the demo, which set the names of the two programs in `mps.host_tools` to their
paths. Everything about one installation lies in its directory, so each of several nodes can have
its own.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import py_compile
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from vgpu_agent.sim import mps_control

_PACKAGE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class MpsTools:
    """The stand-ins in one directory.

    State: files of that directory: the two programs, ``calls``, which they append to, and
    ``faults.json``, which they read.
    """

    directory: Path

    @classmethod
    def install(cls, directory: Path, node: Path) -> MpsTools:
        """Write the programs into ``directory``, which is made if need be; ``nvidia-smi`` sets the
        compute mode of GPUs of the simulated node whose directory is ``node``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        tools = cls(directory)
        # -I -S: without the caller's variables and packages for Python, and quick, because it is
        # started for each command. Compiled, because Python keeps no compiled form of a file that
        # it runs.
        compiled = directory / "mps_control.pyc"
        py_compile.compile(mps_control.__file__, str(compiled), doraise=True)
        _program(tools.control, [sys.executable, "-I", "-S", str(compiled), str(directory)])
        variables = f"PYTHONPATH={shlex.quote(str(_PACKAGE.parent.parent))} "
        _program(
            tools.smi,
            [sys.executable, "-m", "vgpu_agent.sim.nvidia_smi", str(directory), str(node)],
            variables,
        )
        return tools

    @property
    def control(self) -> Path:
        """The stand-in for ``nvidia-cuda-mps-control``."""
        return self.directory / "nvidia-cuda-mps-control"

    @property
    def smi(self) -> Path:
        """The stand-in for ``nvidia-smi``."""
        return self.directory / "nvidia-smi"

    @property
    def calls(self) -> list[dict[str, Any]]:
        """List the calls of the programs: ``tool``, ``arguments``, ``commands``, ``environment``,
        oldest first.
        """
        path = self.directory / mps_control.CALLS_FILE
        lines = path.read_text().splitlines() if path.exists() else []
        return [ast.literal_eval(line) for line in lines]

    def misbehave(self, **faults: str) -> None:
        """Set the faults from now on, by command of the control program (``start`` is its call with
        ``-d``; ``nvidia_smi`` is that program): ``hang``, ``crash``, ``refuse``, ``nonsense`` or
        ``forget`` (does nothing, and reports success; not for ``nvidia_smi``), or one that
        `mps_control` adds.
        """
        text = json.dumps(
            {name.replace("nvidia_smi", "nvidia-smi"): kind for name, kind in faults.items()}
        )
        unfinished = self.directory / "faults.json.new"
        unfinished.write_text(text)
        unfinished.replace(self.directory / "faults.json")

    def behave(self) -> None:
        """End all faults."""
        self.misbehave()

    def client(self, pipe: Path | str) -> subprocess.Popen[str]:
        """Start a stand-in for a CUDA program, a client of the daemon at ``pipe``; the first line
        of its output has the limits that apply to it.
        """
        return subprocess.Popen(
            [self.control, "client"],
            env={mps_control.PIPE_VARIABLE: str(pipe)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def daemon_pid(pipe: Path | str) -> int | None:
    """Read the process id of the daemon at ``pipe``; None when there is none.

    The number is checked, because callers kill this process and clients can write the file: -1
    would mean every process of this machine.
    """
    try:
        pid = int((Path(pipe) / mps_control.PID_FILE).read_text())
        is_ours = (
            pid > 1
            and Path(mps_control.__file__).name.encode()
            in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except (OSError, ValueError):
        return None
    return pid if is_ours else None


def end_daemon(pipe: Path | str) -> None:
    """Kill the daemon at ``pipe``, if any, as the kernel would when memory runs out."""
    if (pid := daemon_pid(pipe)) is not None:
        os.kill(pid, signal.SIGKILL)


def _program(path: Path, words: list[str], variables: str = "") -> None:
    path.write_text(f'#!/bin/sh\n{variables}exec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
