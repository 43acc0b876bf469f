"""A collecting agent in a process of its own, without any capability, as the DaemonSet has it:
``python -m tests.adversary.collector``.

Sweeps the directory of grants that is named on the command line, as often as is said, and prints
what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vgpu_agent.journal import Journal
from vgpu_agent.runtime.grants import GrantDirectory

REPOSITORY = Path(__file__).parents[2]
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def collect(containers: Path, *, rounds: int = 4, timeout_seconds: float = 120) -> Any:
    """Let such a process collect, and return what it has printed."""
    command = [
        *WITHOUT_CAPABILITIES,
        sys.executable,
        "-m",
        "tests.adversary.collector",
        str(containers),
        str(rounds),
    ]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


async def _main(containers: Path, rounds: int) -> dict[str, object]:
    journal, beats = Journal(), [time.monotonic()]
    freed: list[str] = []
    grants = GrantDirectory(
        str(containers.parent / "cdi"), journal, kept_directory=str(containers.parent / "kept")
    )
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(rounds):
        freed += await grants.sweep(
            str(containers),
            lambda name: name.startswith("alive"),
            lambda: beats.append(time.monotonic()),
        )
    beats.append(time.monotonic())
    return {
        "freed": sorted(freed),
        "left_over": dict(grants.left_over),
        "events": [entry.event for entry in journal.entries],
        "longest_silence": max(later - before for before, later in itertools.pairwise(beats)),
        "grown_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))) + "\n")
