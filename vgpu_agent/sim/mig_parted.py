"""A stand-in for ``nvidia-mig-parted`` that divides simulated GPUs, for the demo and for tests.

    python -m vgpu_agent.sim.mig_parted DIRECTORY export
    python -m vgpu_agent.sim.mig_parted DIRECTORY apply -f FILE -c CONFIGURATION

It prints and reads the real tool's YAML (version v1), leaves GPUs alone that a configuration does
not name, and refuses to divide a GPU on which a process runs. `deliver` writes a script with the
real tool's command line; `misbehave` sets the faults from then on. Each call is a line in
``mig-parted.log`` of the simulated node's directory.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.state import GpuDescription, SimulatedNode

if TYPE_CHECKING:
    from collections.abc import Sequence

# Files in the directory of a simulated node. The second one has the present fault, if there is one.
_LOG, _FAULTS = "mig-parted.log", "mig-parted.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Misbehaviour:
    """A fault of the simulated tool.

    Attributes:
        command: in which command, ``export`` or ``apply``; empty for both.
        seconds: it takes that long first.
        hangs: it never ends, and ignores SIGTERM.
        fails: it prints this on stderr and ends with status 1; empty for success.
        prints: it prints this instead of the right output; None for the right one.
        divides: it makes instances of these profiles instead of the wanted ones, and reports
            nothing; None for the wanted ones.
    """

    command: str = ""
    seconds: float = 0.0
    hangs: bool = False
    fails: str = ""
    prints: str | None = None
    divides: tuple[str, ...] | None = None


def deliver(node: Path, script: Path) -> Path:
    """Write ``script``, which does on the simulated node in the directory ``node`` what
    nvidia-mig-parted does on a real one.
    """
    script.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join([sys.executable, "-m", "vgpu_agent.sim.mig_parted", str(node)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return script


def misbehave(node: Path, fault: Misbehaviour | None) -> None:
    """Let all calls for the node in that directory go wrong in this way from now on; None for no
    fault.
    """
    faults = node / _FAULTS
    if fault is None:
        faults.unlink(missing_ok=True)
        return
    unfinished = faults.with_suffix(".new")
    unfinished.write_text(json.dumps(dataclasses.asdict(fault)))
    unfinished.replace(faults)


def calls(node: Path) -> list[list[str]]:
    """The arguments of every call for the node in that directory, oldest first."""
    log = node / _LOG
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _plugged(node: SimulatedNode) -> list[GpuDescription]:
    """List the GPUs that the driver shows, by their NVML index."""
    return [gpu for gpu in node.describe() if gpu.condition != "unplugged"]


def _export(node: SimulatedNode) -> str:
    entries = []
    for index, gpu in enumerate(_plugged(node)):
        instances = dict(collections.Counter(gpu.mig_devices))
        entries.append(
            {"devices": [index], "mig-enabled": bool(instances), "mig-devices": instances}
        )
    text: str = yaml.safe_dump(
        {"version": "v1", "mig-configs": {"current": entries}}, sort_keys=False
    )
    return text


def _apply(
    node: SimulatedNode, path: Path, configuration: str, instead: Sequence[str] | None
) -> None:
    """Divide the GPUs as the configuration of that name in the file says. With a fault,
    ``instead`` has the profiles that each of them gets in place of the wanted ones.
    """
    root: Any = yaml.safe_load(path.read_text())
    if root.get("version") != "v1" or configuration not in root["mig-configs"]:
        raise SimulationError(f"error selecting MIG config: {configuration!r} is not in {path}")
    for entry in root["mig-configs"][configuration]:
        known = _plugged(node)
        for index in range(len(known)) if entry["devices"] == "all" else entry["devices"]:
            if known[index].processes:
                raise SimulationError(
                    f"error clearing MigConfig: GPU {index} is In use by another client"
                )
            wanted = [
                profile for profile, count in entry["mig-devices"].items() for _ in range(count)
            ]
            node.set_mig(known[index].number, wanted if instead is None else instead)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="nvidia-mig-parted", description="A stand-in for nvidia-mig-parted."
    )
    parser.add_argument("node", type=Path, help="directory of the simulated GPUs")
    parser.add_argument("command", choices=("export", "apply"))
    parser.add_argument("-f", "--config-file", type=Path)
    parser.add_argument("-c", "--selected-config", default="")
    given = parser.parse_args(arguments)
    faults = given.node / _FAULTS
    fault = Misbehaviour(**json.loads(faults.read_text())) if faults.exists() else Misbehaviour()
    if fault.command not in {"", given.command}:
        fault = Misbehaviour()
    if fault.hangs:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with (given.node / _LOG).open("a") as log:
        log.write(json.dumps(list(sys.argv[2:] if arguments is None else arguments[1:])) + "\n")
    time.sleep(fault.seconds)
    if fault.hangs:
        while True:
            time.sleep(3600)
    if fault.fails:
        sys.stderr.write(fault.fails + "\n")
        return 1
    try:
        node = SimulatedNode.open(given.node)
        if given.command == "export":
            sys.stdout.write(_export(node) if fault.prints is None else fault.prints)
        else:
            _apply(node, given.config_file, given.selected_config, fault.divides)
            sys.stdout.write(
                "MIG configuration applied successfully\n" if fault.prints is None else fault.prints
            )
    except SimulationError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
