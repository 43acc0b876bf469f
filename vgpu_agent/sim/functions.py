"""The names of NVML's functions, so that a misspelt fault is refused instead of waiting for ever.

`SimulatedNode.fault` asks. A fault that never happens would look like an agent that copes with it.
"""

from __future__ import annotations

import re
from functools import cache

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import build

_FUNCTION = re.compile(r"nvml\w+")
_LONGEST = 63  # struct sim_fault has 64 bytes for it


@cache
def _known_functions() -> frozenset[str]:
    text = "".join(source.read_text(encoding="utf-8") for source in build.sources())
    return frozenset(_FUNCTION.findall(text))


def check_function(function: str) -> None:
    """Refuse what no NVML call is named: neither exactly, nor without its version,
    nor by a prefix and ``*``.

    Raises:
        SimulationError: names it.
    """
    prefix = function.removesuffix("*")
    known = _known_functions()
    versions = re.compile(re.escape(prefix) + r"(_v\d)?")
    fits = any(
        name.startswith(prefix) if function != prefix else versions.fullmatch(name)
        for name in known
    )
    if not function.startswith("nvml") or not fits or len(function) > _LONGEST:
        raise SimulationError(
            f"NVML has no function {function!r}; give a name like nvmlDeviceGetMemoryInfo, or a "
            "prefix and *"
        )
