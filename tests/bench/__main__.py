"""The agent's cost and speed on simulated GPUs:
its own process, an independent kubelet stand-in, limits to be met.

Run by ``scripts/bench``. Its last part runs beside a real kubelet, where there can be one. Each
figure has a limit, and its way of measurement is stated beside it. A part with a figure beyond its
limit is measured once more (`of_two_measurements`). The exit status is 1 when a limit is missed.
The machine matters: compare figures of one run, and runs on one machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from tests.bench import (
    drop_in,
    mixed,
    nvidia,
    real_node,
    scheduler,
    storm,
    vgpu_manager,
    volcano,
)
from tests.bench.figures import Figure, of_two_measurements
from tests.bench.processors import REFERENCE_SECONDS, seconds_for_additions
from tests.real_node.rig.host import missing_requirement

REAL_NODE, SCHEDULER = "node", "scheduler"
PARTS = {
    "nvidia": ("nvidia.com/gpu, 8 GPUs × 10 replicas", nvidia.measure),
    "drop-in": (
        "nvidia.com/gpu and MIG: every list strategy, the choice of GPUs, slices that come and go",
        drop_in.measure,
    ),
    "volcano": (
        (
            "volcano.sh/vgpu-*, 110 pods on 2 GPUs of 24 GiB, API server 20 ms away; processors of "
            "its own"
        ),
        volcano.measure,
    ),
    "vgpu-manager": (
        "nvidia.com/vgpu-number, 110 pods on 2 GPUs, API server 20 ms away; processors of its own",
        vgpu_manager.measure,
    ),
    "mixed": (
        (
            "nvidia.com/gpu, AWS's vgpu and volcano.sh/vgpu-*, 110 pods on 8 GPUs of 6 GiB, API "
            "server 20 ms away"
        ),
        mixed.measure,
    ),
    "storm": (
        (
            "what tenants and neighbours can throw, at once, at an agent in a memory cgroup; needs "
            "root"
        ),
        storm.measure,
    ),
    SCHEDULER: (
        "the scheduler extender, 5,000 nodes × 8 cards, beside a real kube-scheduler",
        scheduler.measure,
    ),
    REAL_NODE: ("volcano.sh/vgpu-* on a real node, 20 pods at once", real_node.measure),
}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="measures the agent on simulated GPUs; status 1 when a limit is missed",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a part")
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    arguments = parser.parse_args()
    machine = (
        f"Python {platform.python_version()} ({Path(sys.executable).resolve()}), {os.cpu_count()} "
        f"processors; limits are for one that makes 5,000,000 additions in {REFERENCE_SECONDS} s"
    )
    # figures of another Python or machine are other figures
    _say(machine)
    met, found = True, {}
    for part in [arguments.only] if arguments.only else PARTS:
        title, _ = PARTS[part]
        if (
            part in {REAL_NODE, SCHEDULER}
            and not arguments.only
            and (reason := missing_requirement())
        ):
            _say(f"{title}: left out: {reason}")
            continue
        figures = _measured(part)
        if not all(figure.met for figure in figures):
            missed = ", ".join(figure.name for figure in figures if not figure.met)
            _say(f"{part}: measuring again, because of: {missed}")
            figures = of_two_measurements(figures, _measured(part))
        met = met and all(figure.met for figure in figures)
        found[part] = [{**dataclasses.asdict(figure), "met": figure.met} for figure in figures]
        if not arguments.json:
            width = max(len(figure.name) for figure in figures)
            # what it is for
            print(  # noqa: T201
                title,
                *(f"{figure.name:{width}}  {figure.line}" for figure in figures),
                "",
                sep="\n",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(found, indent=2))  # noqa: T201 - what it is for
    return 0 if met else 1


def _measured(part: str) -> list[Figure]:
    """Measure a part once; the limits are those for the speed of the processor meanwhile."""
    _, measure = PARTS[part]
    seconds = seconds_for_additions()
    folder = Path(tempfile.mkdtemp(prefix="vgb", dir="/tmp"))  # a short path, for sockets
    try:
        figures = asyncio.run(measure(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = max(seconds, seconds_for_additions())
    slower = max(1.0, seconds / REFERENCE_SECONDS)
    # also beside JSON, whose limits are the multiplied ones
    _say(f"{part}: additions in {seconds:.2f} s, limits of times × {slower:.2f}")
    return [figure.on_slower_processor(slower) for figure in figures]


def _say(text: str) -> None:
    """Tell the person who waits; the figures alone go to stdout."""
    print(text, file=sys.stderr)  # noqa: T201 - what the program is for


if __name__ == "__main__":
    sys.exit(main())
