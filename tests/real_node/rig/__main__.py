"""The command line of the rig, for people:
`scripts/cluster` runs this module in the project's virtual environment.

A cluster brought up here has no owner, so it stays until `down`. Those of tests end with their
tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from typing import NoReturn

from tests.real_node.rig import leftovers, lifecycle
from tests.real_node.rig.build import KUBERNETES
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import Layout, Options
from tests.real_node.rig.lifecycle import Rig

_DEFAULT_NAME = "play"
_EXAMPLES = """\
examples:
  scripts/cluster up                             one node; builds Kubernetes the first time: minutes
  scripts/cluster up --name big --nodes 2        another one beside it, with two nodes
  scripts/cluster up --numa 2 --topology-manager single-numa-node
  scripts/cluster kubectl get pods -A            any kubectl command, with files of this machine
  scripts/cluster --name big kubectl get nodes   in the cluster of that name
  scripts/cluster shell                          a shell on the node, with kubectl and ctr
  scripts/cluster logs kubelet-1 --follow
  scripts/cluster down --all
"""


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for wrong usage."""
    own, for_kubectl = _split_at_kubectl(arguments)
    options = _parser().parse_args(own)
    options.for_kubectl = for_kubectl
    try:
        return int(options.run(options) or 0)
    except RigError as err:
        sys.stderr.write(f"scripts/cluster: {err}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _split_at_kubectl(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments up to the command ``kubectl``, and kubectl's;
    argparse would claim options such as ``-n`` for itself.
    """
    # `kubectl`, `--name=X kubectl` or `--name X kubectl`
    for position, argument in enumerate(arguments[:3]):
        if argument == "kubectl":
            return arguments[: position + 1], arguments[position + 1 :]
    return arguments, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description=(
            "A real Kubernetes cluster on this machine, in namespaces of its own: etcd, control "
            "plane, kubelet, containerd."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_name(parser, default=_DEFAULT_NAME)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: object, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        # so that it may stand before or after the command
        _add_name(added, default=argparse.SUPPRESS)
        return added

    up = command("up", _up, "start a cluster and leave it running")
    up.add_argument(
        "--nodes", type=int, choices=(1, 2), default=1, help="Kubernetes nodes (default 1)"
    )
    up.add_argument(
        "--numa",
        type=int,
        choices=(1, 2),
        default=1,
        help="NUMA nodes that each kubelet sees (default 1)",
    )
    up.add_argument(
        "--topology-manager",
        default="none",
        metavar="POLICY",
        help="the kubelets' topologyManagerPolicy (default none)",
    )
    up.add_argument(
        "--cpu-manager",
        default="none",
        metavar="POLICY",
        help="the kubelets' cpuManagerPolicy (default none)",
    )
    down = command("down", _down, "end a cluster and remove everything of it")
    down.add_argument(
        "--all", action="store_true", help="every cluster, also those of running tests"
    )
    command("status", _status, "list the clusters and what runs in them")
    command("build", _build, "build and fetch what a cluster needs, without starting one")
    command(
        "kubectl", _kubectl, "run kubectl as cluster admin; everything behind the word is kubectl's"
    )
    shell = command("shell", _shell, "open a shell on a node")
    shell.add_argument("--node", type=int, choices=(1, 2), default=1)
    logs = command("logs", _logs, "print a component's log; without a component, list them")
    logs.add_argument("component", nargs="?")
    logs.add_argument("--follow", "-f", action="store_true", help="keep printing what is added")
    return parser


def _add_name(parser: argparse.ArgumentParser, *, default: str) -> None:
    parser.add_argument("--name", default=default, help=f"which cluster (default {_DEFAULT_NAME})")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _up(options: argparse.Namespace) -> None:
    wanted = Options(
        nodes=options.nodes,
        numa_nodes=options.numa,
        topology_manager_policy=options.topology_manager,
        cpu_manager_policy=options.cpu_manager,
    )
    rig = Rig(options.name, wanted, say=_say)
    rig.start(owned=False)
    named = "" if options.name == _DEFAULT_NAME else f"--name {options.name} "
    nodes = ", ".join(node.name for node in rig.nodes())
    _say(f"Kubernetes {KUBERNETES.version} is up after {rig.start_seconds:.1f} s: {nodes}. Next:")
    _say(f"  scripts/cluster {named}kubectl get nodes,pods -A")
    _say(
        f"  .venv/bin/vgpu-agent run --node-name {rig.node_name()} --kubelet-dir "
        f"{rig.kubelet_dir()} …   an agent on this node"
    )
    _say(f"  scripts/cluster {named}shell        a shell on the node, with kubectl and ctr")
    _say(f"  scripts/cluster {named}logs kubelet-1")
    _say(f"  scripts/cluster {named}down         it stays up until then")


def _down(options: argparse.Namespace) -> None:
    collected = leftovers.collect()
    wanted = [layout for layout in leftovers.rigs() if options.all or layout.name == options.name]
    for layout in wanted:
        Rig(layout.name).stop()
    names = sorted({*collected, *(layout.name for layout in wanted)})
    _say(f"removed {', '.join(names)}" if names else f"no cluster named {options.name!r} is up")


def _status(_: argparse.Namespace) -> None:
    layouts = leftovers.rigs()
    if not layouts:
        _say("no cluster is up; `scripts/cluster up` starts one")
    for layout in layouts:
        _say(_describe(layout))


def _describe(layout: Layout) -> str:
    rig = Rig(layout.name)
    if not rig.is_running():
        return (
            f"{layout.name}: remains of a killed one in {layout.run}; `scripts/cluster down` "
            "removes them"
        )
    if not layout.ready.exists():
        return f"{layout.name}: starting, or failed to; see {layout.logs}"
    nodes = "".join(f"\n  {node.name}: --kubelet-dir {node.kubelet_dir}" for node in rig.nodes())
    return f"{layout.name}: {', '.join(sorted(rig.components()))}{nodes}"


def _build(_: argparse.Namespace) -> None:
    for folder in lifecycle.prepare(_say):
        _say(str(folder))


def _kubectl(options: argparse.Namespace) -> NoReturn:
    command = Rig(options.name).kubectl_command(*options.for_kubectl)
    # kubectl takes over this process, with its terminal and its exit status
    os.execvp(command[0], command)  # noqa: S606


def _shell(options: argparse.Namespace) -> int:
    # As a child, so that the terminal's Ctrl-C ends what runs in the shell, not this process and
    # with it the way back.
    shell = "bash" if shutil.which("bash") else "sh"
    return subprocess.run(
        Rig(options.name).in_node(shell, node=options.node), check=False
    ).returncode


def _logs(options: argparse.Namespace) -> None:
    layout = Layout(options.name)
    files = {path.stem: path for path in sorted(layout.logs.glob("*.log"))}
    if not files:
        raise RigError(f"no cluster named {options.name!r} is up")
    if options.component is None:
        _say("\n".join(files))
        return
    if options.component not in files:
        raise RigError(f"no component {options.component!r}; there are {', '.join(files)}")
    command = [
        "tail",
        "-n",
        "+1",
        *(["--follow"] if options.follow else []),
        str(files[options.component]),
    ]
    os.execvp(command[0], command)  # noqa: S606 - as above


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
