#!/usr/bin/env python3
"""Write vgpu_agent/sim/native/stubs.inc: every NVML name that nvidia-ml-py looks up and the
simulator does not answer itself.

Called by scripts/generate after nvidia-ml-py was upgraded; ``--check`` (called by the tests and CI)
only says whether it is stale.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "vgpu_agent" / "sim" / "native"
STUBS = NATIVE / "stubs.inc"

# A name at the head of a definition: after the return type, or as the first argument of one of the
# macros that define entry points.
_DEFINITIONS = re.compile(
    r"^NVML_API "
    r".*?\b(nvml\w+)\(|^(?:TEXT|NUMBER|LINK_NUMBER|PROCESS_LIST|CODEC_UTILISATION)\((nvml\w+)",
    re.MULTILINE,
)
_LOOK_UPS = re.compile(r"""_nvmlGetFunctionPointer\(\s*["'](nvml\w+)["']""")


def looked_up() -> set[str]:
    """Every name that the installed nvidia-ml-py passes to dlsym,
    read from its source because nothing lists them.
    """
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        sys.exit("generate_nvml_stubs: nvidia-ml-py is not installed; run scripts/setup")
    return set(_LOOK_UPS.findall(Path(found.origin).read_text(encoding="utf-8")))


def answered() -> set[str]:
    """Every name that a C file of the simulator defines."""
    names: set[str] = set()
    for source in sorted(NATIVE.glob("*.c")):
        for pair in _DEFINITIONS.findall(source.read_text(encoding="utf-8")):
            names.update(filter(None, pair))
    return names


def main() -> int:
    """Write the file, or with ``--check`` compare it; 1 when it is stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 when the committed file is stale",
    )
    check = parser.parse_args().check
    wanted = "".join(f"STUB({name})\n" for name in sorted(looked_up() - answered()))
    if check:
        current = STUBS.read_text(encoding="utf-8") if STUBS.exists() else ""
        if current != wanted:
            print(f"{STUBS} is stale: run scripts/generate_nvml_stubs.py", file=sys.stderr)
        return int(current != wanted)
    STUBS.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
