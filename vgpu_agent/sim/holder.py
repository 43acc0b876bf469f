"""A live process on a simulated GPU: it takes a slot and a lock, and NVML shows it until it ends,
in any way.

Run as ``python -m vgpu_agent.sim.holder DIR …`` by `SimulatedNode.start_process`, and in the
foreground by ``vgpu-agent sim process``.
Must be a process of its own: POSIX locks vanish when their process closes any descriptor of the
state file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Final

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import layout
from vgpu_agent.sim.processes import ProcessUse, try_lock
from vgpu_agent.sim.state import SimulatedNode

READY: Final = "holding"
_ENDS: Final = (signal.SIGINT, signal.SIGTERM)


def hold(directory: Path, gpu: int | str, use: ProcessUse, *, seconds: float | None = None) -> None:
    """Be a process that uses ``gpu``, until ``seconds`` are over or SIGINT or SIGTERM comes.

    Raises:
        SimulationError: no such GPU or MIG instance, or its 64 slots are all taken.
    """
    # from now on they wait for us, so that the slot is always given back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        node = SimulatedNode.open(directory)
        number = node.gpu_number(gpu)
        # never closed: that would give up the lock
        descriptor = os.open(node.state_path, os.O_RDWR | os.O_CLOEXEC)
        with node.writing():
            row = _take_slot(node, number, descriptor)
            use.fill(row, pid=os.getpid())
            row.pid_namespace = os.stat("/proc/self/ns/pid").st_ino
            row.kind = layout.Process.LIVE
        sys.stdout.write(f"{READY} {use.memory_mib} MiB on GPU {number} as pid {os.getpid()}\n")
        sys.stdout.flush()
        if seconds is None:
            signal.sigwait(_ENDS)
        else:
            signal.sigtimedwait(_ENDS, seconds)
        row.kind = layout.Process.FREE
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_slot(node: SimulatedNode, gpu: int, descriptor: int) -> layout.Process:
    """The first slot whose lock can be had; a slot that a killed process left is taken over."""
    row: layout.Process
    for slot, row in enumerate(node.state.gpus[gpu].processes):
        if row.kind == layout.Process.FIXED:
            continue
        if try_lock(descriptor, gpu, slot):
            return row
    raise SimulationError(
        f"all {layout.PROCESSES} process slots of GPU {gpu} are taken; end one of its processes "
        "first"
    )


def main(arguments: list[str] | None = None) -> int:
    """Hold a slot as ``SimulatedNode.start_process`` has requested."""
    parser = argparse.ArgumentParser(
        prog="python -m vgpu_agent.sim.holder", description="be a process on a simulated GPU"
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--use", required=True, help="the fields of ProcessUse as JSON")
    options = parser.parse_args(arguments)
    try:
        hold(options.directory, options.gpu, ProcessUse.from_json(options.use))
    except SimulationError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
