#!/usr/bin/env python3
"""Write docs/vgpu-agent.1, the manual page, from the parsers of the command line;
with ``--check``, fail when the file is not what would be written.

Called by ``scripts/generate`` and, with ``--check``, by the tests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from vgpu_agent.cli import manual  # noqa: E402 - the path comes first

TARGET = ROOT / "docs" / "vgpu-agent.1"


def main() -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when stale")
    page = manual.page()
    if not parser.parse_args().check:
        TARGET.write_text(page)
        return 0
    if TARGET.exists() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is stale; run scripts/generate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
