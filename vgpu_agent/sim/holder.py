"""A live process on a simulated GPU. It takes a process slot of the GPU, a row of its table of
processes in the state file, and locks it; NVML lists the process until it exits or is killed.

`SimulatedNode.start_process` runs it as ``python -m vgpu_agent.sim.holder DIR …``, and
``vgpu-agent sim process`` runs it in the foreground. It must be a process of its own, because a
process loses its POSIX locks when it closes any descriptor of the state file.
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

READY: Final = "holding"  # the first word of the line that says that the slot is taken
_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def hold(directory: Path, gpu: int | str, use: ProcessUse, *, seconds: float | None = None) -> None:
    """Use ``gpu`` as this process until ``seconds`` have passed, or SIGINT or SIGTERM arrives.

    Args:
        directory: the directory of the simulated node.
        gpu: the number or UUID of the GPU.
        use: the usage that NVML shows.
        seconds: the duration; None for no limit.

    Raises:
        SimulationError: there is no such GPU, or its 64 slots are all taken.
    """
    # block the signals, so that the slot is always released
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        node = SimulatedNode.open(directory)
        number = node.gpu_number(gpu)
        # never closed, because closing it would release the lock
        descriptor = os.open(node.state_path, os.O_RDWR | os.O_CLOEXEC)
        with node.writing():
            row = _take_slot(node, number, descriptor)
            use.fill(row, pid=os.getpid())
            # A process cannot see its own POSIX locks, so the simulated NVML in this process
            # recognises this slot by pid and namespace.
            row.pid_namespace = os.stat("/proc/self/ns/pid").st_ino
            row.kind = layout.Process.LIVE
        sys.stdout.write(f"{READY} {use.memory_mib} MiB on GPU {number} as pid {os.getpid()}\n")
        sys.stdout.flush()
        if seconds is None:
            signal.sigwait(_END_SIGNALS)
        else:
            signal.sigtimedwait(_END_SIGNALS, seconds)
        row.kind = layout.Process.FREE
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_slot(node: SimulatedNode, gpu: int, descriptor: int) -> layout.Process:
    """Lock and return the first free slot. The slot of a killed process is free as well."""
    row: layout.Process
    for slot, row in enumerate(node.state.gpus[gpu].processes):
        if row.kind == layout.Process.FIXED:
            continue  # shows a pid that was written into the state, and has no lock
        if try_lock(descriptor, gpu, slot):
            return row
    raise SimulationError(
        f"all {layout.PROCESSES} process slots of GPU {gpu} are taken; end one of its processes "
        "first"
    )


def main(arguments: list[str] | None = None) -> int:
    """Hold a slot with the arguments of ``SimulatedNode.start_process``."""
    parser = argparse.ArgumentParser(
        prog="python -m vgpu_agent.sim.holder", description="run a process on a simulated GPU"
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
