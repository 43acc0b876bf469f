"""Simulated GPUs for pynvml in this process: after `preload`, ``pynvml.nvmlInit()`` finds the
simulated driver.

Called by `agent.composition` for ``--simulate DIR`` and by tests, before pynvml is first
initialised. The library is loaded by its path; the loader then resolves pynvml's own
``libnvidia-ml.so.1`` to it, because a library with that soname is loaded already.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import layout
from vgpu_agent.sim.build import LIBRARY, build
from vgpu_agent.sim.state import STATE_FILE, SimulatedNode

if TYPE_CHECKING:
    from pathlib import Path

STATE_VARIABLE: Final = "VGPU_AGENT_SIM_STATE"


def preload(directory: Path) -> None:
    """Make this process see the GPUs of the simulated node in ``directory``.

    May be called again for another node when NVML is shut down: the library looks for its state
    file at the next nvmlInit.

    Raises:
        SimulationError: no usable node is there, the library cannot be built, or another NVML is
            loaded already.
    """
    SimulatedNode.open(directory)
    path = build()
    library = ctypes.CDLL(str(path))
    if not hasattr(ctypes.CDLL(LIBRARY), "vgpusim_layout"):
        raise SimulationError(
            f"a real {LIBRARY} is loaded in this process already; simulate in a fresh process"
        )
    library.vgpusim_layout.restype = ctypes.c_char_p
    built = library.vgpusim_layout().decode()
    if built != layout.description():
        raise SimulationError(
            f"{path} was built for another state file ({built}); remove it and try again"
        )
    os.environ[STATE_VARIABLE] = str(directory.absolute() / STATE_FILE)
