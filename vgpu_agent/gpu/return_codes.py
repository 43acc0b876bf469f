"""NVML's return codes that mean something to this agent (nvml.h, ``nvmlReturn_t``), and the
remedies for a failed initialisation.

Used by `nvml`, which turns codes into `NvmlError`, and by callers that treat one kind of failure
differently from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15

_LIBRARY_NOT_FOUND = 12
_VERSION_MISMATCH = 18

ABSENT = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})
"""The codes for something that this card, driver or container does not have. They are ordinary
answers and no faults.
"""

NORMAL = ABSENT | {NOT_FOUND, TIMEOUT}
"""The codes that are not counted as errors of NVML in the agent's status and metrics: those of
`ABSENT`, "there is nothing", and a wait for events that ended without one.
"""


def remedies(code: int, driver_root: Path, *, in_container: bool) -> tuple[str, ...]:
    """Advise an administrator about a driver that could not be initialised: sentences without their
    full stops, the most likely remedy first.

    Args:
        code: NVML's answer.
        driver_root: where the driver is looked for.
        in_container: the agent runs in a container, which has no driver unless NVIDIA's container
            runtime adds it.
    """
    if code == _VERSION_MISMATCH:
        return (
            (
                "The driver was updated under a running agent: restart the agent, and the node if "
                "that does not help"
            ),
        )
    if code != _LIBRARY_NOT_FOUND:
        return ("Check that the nvidia kernel module is loaded (lsmod), and /dev/nvidiactl there",)
    runtime = (
        "Have NVIDIA's container runtime start this container: set the pod's runtimeClassName, "
        "usually to nvidia, or make it the default runtime of the node"
    )
    install = (
        f"Install the NVIDIA driver on the node, or set driverRoot (now {driver_root}) to where it "
        "is installed"
    )
    return (runtime, install) if in_container else (install,)
