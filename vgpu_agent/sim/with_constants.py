"""A launcher that runs a Python module with other values for constants of the package.

usage: python -m vgpu_agent.sim.with_constants CONSTANTS MODULE [ARGUMENT]...

CONSTANTS is a JSON object such as ``{"vgpu_agent.kubelet.server:RETRY_MIN_SECONDS": 0.05}``. So in
a test or the demo the agent's real process does in a second what takes minutes on a node. No
shipped module uses this one.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from typing import TYPE_CHECKING

from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE = "vgpu_agent.sim.with_constants"


def set_constants(constants: Mapping[str, float | str]) -> None:
    """Set constants, named ``module:NAME``, in this process.

    Raises:
        SimulationError: there is no such module, or it has no number, or no text, of that name.
    """
    for name, value in constants.items():
        module_name, _, constant = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, ValueError) as err:
            raise SimulationError(f"{name}: there is no module {module_name}: {err}") from err
        before = getattr(module, constant, None) if constant.isupper() else None
        kind = "text" if isinstance(value, str) else "numeric"
        if not isinstance(before, str if kind == "text" else int | float):
            raise SimulationError(f"{name}: {module_name} has no {kind} constant {constant}")
        setattr(module, constant, value)


def main() -> None:
    """Run the module that the command line names, as ``python -m`` does."""
    constants, module, *arguments = sys.argv[1:]
    set_constants(json.loads(constants))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
