"""``vgpu-agent sim …``: make a node of simulated GPUs and change it while agents run on it.

Every action opens the directory, makes one change and ends; agents see it at their next NVML call.
Arguments that are invalid for every node are refused by the parser (exit status 2), those that are
invalid only for this node by the node (1).
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from vgpu_agent.sim.holder import hold
from vgpu_agent.sim.models import models
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import RECOVERY_ACTIONS, GpuDescription, SimulatedNode

_LONGEST_SECONDS: Final = 86400
_MAX_TIMES: Final = 1_000_000  # how often a fault may come at most, unless it comes for ever
_EXAMPLES: Final = """\
examples:
  vgpu-agent sim create /tmp/node --gpus 8 --model A100-SXM4-80GB --numa-nodes 2
  vgpu-agent run --simulate /tmp/node
  vgpu-agent sim xid /tmp/node --gpu 3 --code 79          GPU 3 reports that it fell off the bus
  vgpu-agent sim lose /tmp/node --gpu 5                   … and GPU 5 really does
  vgpu-agent sim mig /tmp/node --gpu 0 --profiles 3g.40gb,1g.10gb
  vgpu-agent sim fault /tmp/node nvmlDeviceGetMemoryInfo --gpu 2 --code 999 --times 1
  vgpu-agent sim list /tmp/node
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sim`` and its actions; each sets ``run`` to a function that takes the parsed arguments
    and returns an exit code.
    """
    sim = subparsers.add_parser(
        "sim",
        help="make and change simulated GPUs",
        description=(
            "Make a node of simulated GPUs in a directory, and change it while agents run on it."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = sim.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_create(actions)
    _add_list(actions)
    _add_health(actions)
    _add_use(actions)
    _add_fault(actions)
    _action(
        actions, "models", _models, "list the GPU models that can be simulated", directory=False
    )


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    directory: bool = True,
    gpu: bool = False,
) -> argparse.ArgumentParser:
    """Add an action that ``run`` carries out. With ``directory`` it takes the argument DIR, with
    ``gpu`` the flag ``--gpu``.
    """
    parser = actions.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    parser.set_defaults(run=run)
    if directory:
        parser.add_argument(
            "directory", metavar="DIR", type=Path, help="directory of the simulated node"
        )
    if gpu:
        parser.add_argument(
            "--gpu", required=True, metavar="N", help="number (at creation) or UUID of the GPU"
        )
    return parser


# the values of arguments --------------------------------------------------------------------------


def _whole(lowest: int, highest: int) -> Callable[[str], int]:
    """An argparse type: a whole number within bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {lowest} to {highest}, got {text!r}"
            )
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds above 0 and up to {_LONGEST_SECONDS}, got {text!r}"
        )
    return seconds


def _times(text: str) -> int:
    if text != "-1" and not (text.isdecimal() and 1 <= int(text) <= _MAX_TIMES):
        raise argparse.ArgumentTypeError(
            f"expected 1 to {_MAX_TIMES}, or -1 for ever, got {text!r}"
        )
    return int(text)


def _percent_or_auto(text: str) -> int | None:
    if text != "auto" and not (text.isdecimal() and int(text) <= 100):
        raise argparse.ArgumentTypeError(f"expected 0 to 100, or auto, got {text!r}")
    return None if text == "auto" else int(text)


def _instance(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not first.isdecimal() or not second.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected the ids of a GPU and a compute instance, like 7:0, got {text!r}"
        )
    return int(first), int(second)


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 0,0,1,1, got {text!r}") from None


# create, list, models -----------------------------------------------------------------------------


def _add_create(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "create", _create, "make a node of simulated GPUs")
    parser.add_argument(
        "--gpus",
        type=_whole(1, 16),
        default=2,
        metavar="COUNT",
        help="how many GPUs, 1 to 16 (default: 2)",
    )
    parser.add_argument(
        "--model", default="A100-SXM4-80GB", help="see `sim models` (default: A100-SXM4-80GB)"
    )
    numa = parser.add_mutually_exclusive_group()
    numa.add_argument(
        "--numa",
        type=_numbers,
        metavar="0,0,1,1",
        help="NUMA node of each GPU, -1 for none (default: 0 for all)",
    )
    numa.add_argument(
        "--numa-nodes",
        type=_whole(1, 16),
        metavar="COUNT",
        help="spread the GPUs evenly over this many NUMA nodes",
    )
    parser.add_argument(
        "--seed", default="", help="nodes of different seeds do not share GPU UUIDs"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a node that is there; restart agents that use it",
    )
    # for arguments that do not go together: prints a message and exits with status 2
    parser.set_defaults(refuse=parser.error)


def _create(arguments: argparse.Namespace) -> int:
    node = SimulatedNode.create(
        arguments.directory,
        model=arguments.model,
        gpus=arguments.gpus,
        numa=_numa_nodes(arguments),
        seed=arguments.seed,
        force=arguments.force,
    )
    print(f"created {arguments.gpus} × {node.describe()[0].name} in {arguments.directory}")
    print(f"run an agent on it: vgpu-agent run --simulate {shlex.quote(str(arguments.directory))}")
    return 0


def _numa_nodes(arguments: argparse.Namespace) -> list[int] | None:
    numa: list[int] | None = arguments.numa
    if arguments.numa_nodes is None:
        return numa
    if arguments.numa_nodes > arguments.gpus:
        arguments.refuse(
            f"argument --numa-nodes: expected 1 to the number of GPUs, {arguments.gpus}, got "
            f"{arguments.numa_nodes}"
        )
    return [gpu * arguments.numa_nodes // arguments.gpus for gpu in range(arguments.gpus)]


def _add_list(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(
        actions, "list", _list, "show the GPUs of a simulated node and their condition"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _list(arguments: argparse.Namespace) -> int:
    gpus = SimulatedNode.open(arguments.directory).describe()
    if arguments.json:
        print(json.dumps([asdict(gpu) for gpu in gpus], indent=2))
        return 0
    rows: list[tuple[str, ...]] = [
        (
            "GPU",
            "UUID",
            "MODEL",
            "MEMORY",
            "NUMA",
            "CONDITION",
            "RECOVERY ACTION",
            "PROCESSES",
            "MIG",
        )
    ]
    rows += [_row(gpu) for gpu in gpus]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _row(gpu: GpuDescription) -> tuple[str, ...]:
    return (
        str(gpu.number),
        gpu.uuid,
        gpu.name,
        f"{gpu.memory_mib} MiB",
        "-" if gpu.numa_node is None else str(gpu.numa_node),
        gpu.condition,
        gpu.recovery_action,
        str(gpu.processes),
        ",".join(gpu.mig_devices) or "-",
    )


def _models(_: argparse.Namespace) -> int:
    for model in models().values():
        mig = ", ".join(profile.name for profile in model.mig) or "no MIG"
        print(
            f"{model.key:16} {model.name:24} {model.memory_mib:>6} MiB  NVLink {model.nvlink:9}  "
            f"{mig}"
        )
    return 0


# health -------------------------------------------------------------------------------------------


def _add_health(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    xid = _action(actions, "xid", _xid, "raise an XID on a GPU", gpu=True)
    xid.add_argument(
        "--code",
        type=_whole(1, 65535),
        required=True,
        metavar="XID",
        help="for example 79, GPU has fallen off the bus",
    )
    xid.add_argument(
        "--mig",
        type=_instance,
        default=(None, None),
        metavar="GI:CI",
        help="on one MIG instance only, by its GPU and compute instance id",
    )
    lose = _action(actions, "lose", _lose, "let a GPU fall off the bus, without an event", gpu=True)
    lose.add_argument(
        "--entirely",
        action="store_true",
        help="calls with handles from before do not return the GPU's identity either",
    )
    _action(
        actions,
        "restore",
        lambda arguments: _change(arguments, SimulatedNode.restore, "answers again"),
        "undo lose",
        gpu=True,
    )
    _action(
        actions,
        "unplug",
        lambda arguments: _change(
            arguments, SimulatedNode.unplug, "is unplugged: the driver no longer lists it"
        ),
        "take a GPU away",
        gpu=True,
    )
    _action(
        actions,
        "plug",
        lambda arguments: _change(arguments, SimulatedNode.plug, "is plugged in again"),
        "undo unplug",
        gpu=True,
    )
    action = _action(
        actions,
        "recovery-action",
        _recovery_action,
        "set what the driver asks for to recover a GPU",
        gpu=True,
    )
    action.add_argument(
        "wanted",
        metavar="ACTION",
        choices=list(RECOVERY_ACTIONS),
        help=(
            f"one of {', '.join(RECOVERY_ACTIONS)}; the last is a driver that does not know the "
            "question"
        ),
    )
    remap = _action(actions, "remap", _remap, "set a GPU's remapped rows", gpu=True)
    remap.add_argument(
        "--corrected",
        type=_whole(0, 65535),
        default=0,
        metavar="ROWS",
        help="remapped for correctable errors",
    )
    remap.add_argument(
        "--uncorrected",
        type=_whole(0, 65535),
        default=0,
        metavar="ROWS",
        help="remapped for uncorrectable errors",
    )
    remap.add_argument("--pending", action="store_true", help="a remapping waits for a GPU reset")
    remap.add_argument("--failed", action="store_true", help="a remapping has failed")
    temperature = _action(actions, "temperature", _temperature, "set a GPU's temperature", gpu=True)
    temperature.add_argument(
        "celsius", metavar="CELSIUS", type=_whole(0, 150), help="degrees Celsius"
    )


def _change(
    arguments: argparse.Namespace, change: Callable[[SimulatedNode, str], None], done: str
) -> int:
    """Change the GPU that the arguments name, and say what was done: the end of a sentence."""
    node = SimulatedNode.open(arguments.directory)
    change(node, arguments.gpu)
    print(f"GPU {arguments.gpu} of {arguments.directory} {done}")
    return 0


def _xid(arguments: argparse.Namespace) -> int:
    gpu_instance, compute_instance = arguments.mig
    where = "" if gpu_instance is None else f", MIG instance {gpu_instance}:{compute_instance}"
    return _change(
        arguments,
        lambda node, gpu: node.xid(
            gpu, arguments.code, gpu_instance=gpu_instance, compute_instance=compute_instance
        ),
        f"has reported XID {arguments.code}{where}",
    )


def _lose(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda node, gpu: node.lose(gpu, entirely=arguments.entirely),
        "has fallen off the bus; undo it with `sim restore`",
    )


def _recovery_action(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda node, gpu: node.recovery_action(gpu, arguments.wanted),
        f"has the recovery action {arguments.wanted}",
    )


def _remap(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda node, gpu: node.remap(
            gpu,
            corrected=arguments.corrected,
            uncorrected=arguments.uncorrected,
            pending=arguments.pending,
            failed=arguments.failed,
        ),
        f"has remapped {arguments.corrected} rows for corrected and {arguments.uncorrected} for "
        f"uncorrected errors{', more are pending' * arguments.pending}"
        f"{', and remapping has failed' * arguments.failed}",
    )


def _temperature(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda node, gpu: node.temperature(gpu, arguments.celsius),
        f"has {arguments.celsius} °C",
    )


# use ----------------------------------------------------------------------------------------------


def _add_use(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mig = _action(actions, "mig", _mig, "cut a GPU into MIG instances", gpu=True)
    mig.add_argument(
        "--profiles",
        required=True,
        metavar="3g.40gb,1g.10gb",
        help="one instance each; empty switches MIG off",
    )
    process = _action(
        actions, "process", _process, "run a process that uses a GPU, until Ctrl-C", gpu=True
    )
    process.add_argument(
        "--memory-mib", type=_whole(0, 1 << 20), required=True, metavar="MIB", help="memory it uses"
    )
    process.add_argument(
        "--sm-percent",
        type=_whole(0, 100),
        default=0,
        metavar="PERCENT",
        help="share of the GPU's time it uses",
    )
    process.add_argument(
        "--mig", type=_instance, default=(None, None), metavar="GI:CI", help="in this MIG instance"
    )
    process.add_argument("--seconds", type=_seconds, metavar="S", help="end after this long")
    utilisation = _action(actions, "utilisation", _utilisation, "fix a GPU's utilisation", gpu=True)
    utilisation.add_argument(
        "--percent",
        type=_percent_or_auto,
        required=True,
        metavar="P",
        help="0 to 100, or auto: what its processes use",
    )


def _mig(arguments: argparse.Namespace) -> int:
    node = SimulatedNode.open(arguments.directory)
    node.set_mig(
        arguments.gpu, [word.strip() for word in arguments.profiles.split(",") if word.strip()]
    )
    for uuid in node.mig_uuids(arguments.gpu):
        print(uuid)
    return 0


def _process(arguments: argparse.Namespace) -> int:
    gpu_instance, compute_instance = arguments.mig
    use = ProcessUse(
        memory_mib=arguments.memory_mib,
        sm_percent=arguments.sm_percent,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
    )
    # this process becomes the one that uses the GPU, until it is ended
    hold(arguments.directory, arguments.gpu, use, seconds=arguments.seconds)
    return 0


def _utilisation(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda node, gpu: node.utilisation(gpu, arguments.percent),
        "has the utilisation of its processes"
        if arguments.percent is None
        else f"has a utilisation of {arguments.percent} %",
    )


# faults -------------------------------------------------------------------------------------------


def _add_fault(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "fault", _fault, "make NVML calls fail or be slow")
    parser.add_argument(
        "function", nargs="?", metavar="FUNCTION", help="an NVML name, or a prefix and *"
    )
    parser.add_argument("--gpu", metavar="N", help="only calls about this GPU (number or UUID)")
    parser.add_argument(
        "--code",
        type=_whole(1, 999),
        metavar="CODE",
        help="NVML return code, for example 999 unknown, 15 lost, 4 no permission",
    )
    parser.add_argument(
        "--times", type=_times, default=-1, metavar="COUNT", help="how often (default: for ever)"
    )
    parser.add_argument(
        "--delay-ms",
        type=_whole(0, 3_600_000),
        default=0,
        metavar="MS",
        help="how long each such call takes first",
    )
    parser.add_argument("--clear", action="store_true", help="forget all faults instead")
    parser.set_defaults(refuse=parser.error)


def _fault(arguments: argparse.Namespace) -> int:
    if (arguments.function is None) is not arguments.clear:
        arguments.refuse("name one NVML function, or give --clear, which forgets all faults")
    node = SimulatedNode.open(arguments.directory)
    if arguments.clear:
        node.clear_faults()
        print(f"{arguments.directory} has no faults now")
        return 0
    if arguments.code is None and not arguments.delay_ms:
        arguments.refuse(f"a fault of {arguments.function} needs --code, --delay-ms or both")
    node.fault(
        arguments.function,
        gpu=arguments.gpu,
        code=arguments.code,
        times=arguments.times,
        delay_ms=arguments.delay_ms,
    )
    effects = [
        *([f"take {arguments.delay_ms} ms"] if arguments.delay_ms else []),
        *([] if arguments.code is None else [f"fail with NVML code {arguments.code}"]),
    ]
    often = "" if arguments.times == -1 else f" {arguments.times} times"
    whose = "" if arguments.gpu is None else f" of GPU {arguments.gpu}"
    print(f"calls of {arguments.function}{whose} {' and '.join(effects)}{often}")
    return 0
