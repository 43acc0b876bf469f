"""A stand-in for ``nvidia-ctk cdi generate``: it describes simulated GPUs in a CDI spec, as
NVIDIA's tool describes real ones.

With ``--simulate`` the agent runs it in place of the real tool, as a process and with the same
options, so that only the program differs. Its devices exist on this machine: the simulated device
nodes (or /dev/null, where no device may be made) and the simulated driver's library. Tests let it
hang, fail or print nonsense, and read how it was called (`StandInCtk`).

usage: python -m vgpu_agent.sim.nvidia_ctk cdi generate [OPTIONS]
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.build import LIBRARY, build
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.sim.trees import capability_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

COMMAND: Final = (sys.executable, "-m", "vgpu_agent.sim.nvidia_ctk")

_FAULTS: Final = "nvidia-ctk.faults.json"
_CALLS: Final = "nvidia-ctk.calls.jsonl"
# the driver's device nodes that containers get beside those of their GPUs
_CONTROL: Final = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
_OPTIONS: Final = frozenset(
    {
        "format",
        "mode",
        "vendor",
        "class",
        "device-name-strategy",
        "driver-root",
        "dev-root",
        "nvidia-cdi-hook-path",
    }
    | {"disable-hook", "feature-flag"}
)
# The files that the real tool looks for in each of its modes for devices that are not GPUs.
_MODE_NODES: Final = {"gdrcopy": ("gdrdrv",), "gds": ("nvidia-fs*",), "mofed": ("infiniband/*",)}
_LIBRARY_FOLDER: Final = "/usr/lib/x86_64-linux-gnu"
_DISABLED_HOOKS: Final = "NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS"
_VERSION: Final = (1, 20, 0)  # of the tool that is imitated, unless a test sets another
_HOOKS_CAN_BE_DISABLED: Final = (1, 17, 5)  # since that version
# The first and the last version that describes each hook, in the order of the real tool's specs.
_HOOKS: Final = {
    "create-symlinks": ((1, 0, 0), _VERSION),
    "enable-cuda-compat": ((1, 17, 5), _VERSION),
    "update-ldcache": ((1, 0, 0), _VERSION),
    "disable-device-node-modification": ((1, 17, 8), _VERSION),
    "update-application-profile": ((1, 20, 0), _VERSION),
    "chmod": ((1, 0, 0), (1, 17, 8)),
}


class StandInCtk:
    """The tests' handle on the stand-in of one simulated node.

    State: two files beside the node's, one with the faults to come, and one with a line for each
    call.
    """

    def __init__(self, node_directory: Path) -> None:
        self._faults, self._calls = node_directory / _FAULTS, node_directory / _CALLS

    def misbehave(
        self,
        *,
        hang_seconds: float = 0.0,
        print_text: str | None = None,
        fail: str = "",
        without: Iterable[str] = (),
        edits: Any = None,
        version: str = "",
    ) -> None:
        """Be slow, print this instead of a spec, fail with this error, leave out these devices,
        replace these keys of the spec's ``containerEdits`` for all devices, or be of this version.
        """
        faults = {
            "hang": hang_seconds,
            "print": print_text,
            "fail": fail,
            "without": list(without),
            "edits": edits,
            "version": version,
        }
        unfinished = self._faults.with_suffix(".new")
        unfinished.write_text(json.dumps(faults))
        unfinished.replace(self._faults)

    def behave(self) -> None:
        """End all faults."""
        self._faults.unlink(missing_ok=True)

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call, oldest first."""
        if not self._calls.exists():
            return []
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return its exit status."""
    try:
        sys.stdout.write(_output(arguments) + "\n")
    except SimulationError as err:
        text = str(err).replace('"', '\\"')
        sys.stderr.write(f'time="2026-01-01T00:00:00Z" level=error msg="{text}"\n')
        return 1
    return 0


def _output(arguments: Sequence[str]) -> str:
    if list(arguments[:2]) != ["cdi", "generate"]:
        raise SimulationError(f"No help topic for '{' '.join(arguments)}'")
    options: dict[str, str] = {}
    disabled: list[str] = []
    for argument in arguments[2:]:
        name, _, value = argument.removeprefix("--").partition("=")
        if name not in _OPTIONS:
            raise SimulationError(f"flag provided but not defined: -{name}")
        options[name] = value
        disabled += value.split(",") if name == "disable-hook" else []
    directory = Path(options["driver-root"])  # the simulated node's own
    with (directory / _CALLS).open("a") as calls:
        calls.write(json.dumps(list(arguments)) + "\n")
    faults: dict[str, Any] = (
        json.loads((directory / _FAULTS).read_text()) if (directory / _FAULTS).exists() else {}
    )
    version = tuple(map(int, (faults.get("version") or "1.20.0").split(".")))
    if version < _HOOKS_CAN_BE_DISABLED and disabled:
        raise SimulationError("flag provided but not defined: -disable-hook")
    if version >= _HOOKS_CAN_BE_DISABLED and not disabled:  # an option beats the variable
        disabled = [name for name in os.environ.get(_DISABLED_HOOKS, "").split(",") if name]
    hooks = [
        name
        for name, (since, until) in _HOOKS.items()
        if since <= version <= until and name not in disabled and "all" not in disabled
    ]
    time.sleep(faults.get("hang") or 0)
    if faults.get("fail"):
        raise SimulationError(f"failed to generate CDI spec: {faults['fail']}")
    if faults.get("print") is not None:
        return str(faults["print"])
    try:
        spec = _spec(options, faults, hooks)
    except SimulationError as err:
        raise SimulationError(
            f"failed to generate CDI spec: failed to create device CDI specs: {err}"
        ) from err
    if not spec["devices"]:
        raise SimulationError(
            'failed to write CDI spec to STDOUT: failed add device "all": invalid device, empty '
            "device edits"
        )
    return json.dumps(spec)


def _spec(
    options: Mapping[str, str], faults: Mapping[str, Any], hooks: Sequence[str]
) -> dict[str, Any]:
    dev = Path(options["dev-root"]) / "dev"
    kind = f"{options['vendor']}/{options['class']}"
    edits: dict[str, Any] = {}
    if options["mode"] in _MODE_NODES:
        found = [
            path for pattern in _MODE_NODES[options["mode"]] for path in sorted(dev.glob(pattern))
        ]
        devices = [("all", [_node(path, dev) for path in found])] if found else []
    else:
        left_out = faults.get("without") or ()
        node = SimulatedNode.open(Path(options["driver-root"]))
        devices = [
            (name, nodes)
            for name, nodes in _devices(node, options["device-name-strategy"], dev)
            if name not in left_out
        ]
        everything = {each["path"]: each for _, nodes in devices for each in nodes}
        devices.append(("all", list(everything.values())))
        edits = _common_edits(options, dev, node.state.driver_version.decode(), hooks) | (
            faults.get("edits") or {}
        )
    named = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name, nodes in devices]
    return {"cdiVersion": "0.5.0", "kind": kind, "devices": named} | (
        {"containerEdits": edits} if edits else {}
    )


def _devices(
    node: SimulatedNode, strategy: str, dev: Path
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield name and device nodes of each GPU that is not in MIG mode, and of each MIG instance. If
    one GPU is lost, raise an error as the real tool does.
    """
    present = [gpu for gpu in node.state.gpus[: node.state.gpu_count] if gpu.present]
    for index, gpu in enumerate(present):
        if gpu.lost:
            raise SimulationError(f"error getting device handle for index '{index}': GPU is lost")
        own = _node(dev / f"nvidia{gpu.minor}", dev)
        if not gpu.mig_current:
            yield gpu.uuid.decode() if strategy == "uuid" else str(index), [own]
            continue
        for number, mig in enumerate(each for each in gpu.mig_devices if each.used):
            # the numbers of the device nodes that open the GPU instance and its compute instance
            caps = [
                capability_number(gpu.minor, mig.gpu_instance),
                capability_number(gpu.minor, mig.gpu_instance, mig.compute_instance),
            ]
            nodes = [own, *(_node(dev / "nvidia-caps" / f"nvidia-cap{cap}", dev) for cap in caps)]
            yield mig.uuid.decode() if strategy == "uuid" else f"{index}:{number}", nodes


def _common_edits(
    options: Mapping[str, str], dev: Path, driver_version: str, hooks: Sequence[str]
) -> dict[str, Any]:
    edits: dict[str, Any] = {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [_node(dev / name, dev) for name in _CONTROL if (dev / name).exists()],
    }
    # Mount the library under the name with the driver's version, as the real tool does, and under
    # the name to which the tool's hooks would link it.
    # `build` returns the path of the compiled library on this machine.
    targets, how = (
        (f"{LIBRARY.removesuffix('.1')}.{driver_version}", LIBRARY),
        ["ro", "nosuid", "nodev", "rbind", "rprivate"],
    )
    edits["mounts"] = [
        {"hostPath": str(build()), "containerPath": f"{_LIBRARY_FOLDER}/{name}", "options": how}
        for name in targets
    ]
    program = options.get("nvidia-cdi-hook-path", "")
    # a hook that is not there would keep every container from starting
    if os.access(program, os.X_OK):
        edits["hooks"] = [_hook(program, name, driver_version) for name in hooks]
    return edits


def _hook(program: str, name: str, driver_version: str) -> dict[str, Any]:
    base = os.path.basename(program)
    arguments = {
        "create-symlinks": ["--link", f"{LIBRARY}::{_LIBRARY_FOLDER}/{LIBRARY.removesuffix('.1')}"],
        "enable-cuda-compat": [f"--host-driver-version={driver_version}"],
        "update-ldcache": ["--folder", _LIBRARY_FOLDER],
        "chmod": ["--mode", "755", "--path", "/dev/nvidia-caps"],
    }
    command = [base, "hook"] if base == "nvidia-ctk" else [base]
    hook = {
        "hookName": "createContainer",
        "path": program,
        "args": [*command, name, *arguments.get(name, [])],
    }
    return {**hook, "env": ["NVIDIA_CTK_DEBUG=false"]}


def _node(path: Path, dev: Path) -> dict[str, Any]:
    """Return a device node of the container; where none could be made on this machine, the
    container gets /dev/null under its name.
    """
    within = f"/dev/{path.relative_to(dev)}"
    found = path if path.exists() and stat.S_ISCHR(path.stat().st_mode) else Path("/dev/null")
    number = found.stat().st_rdev
    return {
        "path": within,
        "hostPath": str(found),
        "major": os.major(number),
        "minor": os.minor(number),
        "fileMode": 0o666,
        "permissions": "rwm",
    }


def _run() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _run()
