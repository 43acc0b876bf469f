"""A program that behaves like ``nvidia-smi -i GPU -c MODE`` on a simulated node, beside the
stand-in of the MPS control binary.

It writes the compute mode into the node's state, where NVML shows it. `mps_tools` installs it. The
file with the faults of `mps_control` has its faults, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.mps_control import fault, misbehave, record
from vgpu_agent.sim.state import SimulatedNode

# nvmlComputeMode_t
COMPUTE_MODES = {"DEFAULT": 0, "PROHIBITED": 2, "EXCLUSIVE_PROCESS": 3}

_EXIT_NO_DEVICE = 6  # for a GPU that is not there


def main(arguments: list[str], directory: str, node: str) -> int:
    """Set a GPU's compute mode; return the exit status."""
    record(directory, "nvidia-smi", arguments, [])
    if kind := fault(directory, "nvidia-smi"):
        return misbehave(kind)
    match arguments:
        case ["-i", gpu, "-c", mode] if mode in COMPUTE_MODES:
            return _set(Path(node), gpu, mode)
        case _:
            sys.stdout.write(
                "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
            )
            return 1


def _set(directory: Path, gpu: str, mode: str) -> int:
    node = SimulatedNode.open(directory)
    try:
        number = node.gpu_number(gpu)
    except SimulationError:
        sys.stdout.write("No devices were found\n")
        return _EXIT_NO_DEVICE
    with node.writing():
        node.state.gpus[number].compute_mode = COMPUTE_MODES[mode]
    sys.stdout.write(
        f"Set compute mode to {mode} for GPU {node.describe()[number].pci_address}.\nAll done.\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[3:], sys.argv[1], sys.argv[2]))
