"""``python -m vgpu_agent`` and the ``vgpu-agent`` script."""

from __future__ import annotations

import sys

from vgpu_agent.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
