"""The command ``vgpu-agent mount-regions``, which mounts the slots for region files.

A region is a file in which the library of an isolation backend keeps a container's limits or use.
The container can write to it. A slot is a small file system in memory for the regions of one
container, so that it cannot fill the node's disk (`runtime.region_slots`).

An init container of the DaemonSet runs this command, because mounting takes a privilege that the
agent itself does not have (manifests/components/region-slots).
"""

from __future__ import annotations

import argparse
import os

from vgpu_agent.config import load, options
from vgpu_agent.errors import ConfigError
from vgpu_agent.families import registry  # noqa: F401 - adds the families' flags
from vgpu_agent.isolation.registry import BACKENDS
from vgpu_agent.mps.directories import mount_tmpfs
from vgpu_agent.runtime.libraries import used_backends
from vgpu_agent.runtime.region_slots import MAX_SLOTS, mount_slots, slots_directory

_DESCRIPTION = """\
Mounts slots below the host directory of each isolation backend that a family uses, such as
hamiCore.hostDirectory. A slot is a small file system in memory for the files in which one container
records its usage. So a container cannot fill the node's disk. Slots that are mounted already stay.
Mounting takes a privileged container. The agent uses the slots that it finds.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``mount-regions``."""
    parser = subparsers.add_parser(
        "mount-regions",
        help="mount small file systems in memory for the regions of containers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count",
        type=int,
        default=128,
        metavar="N",
        help=(
            "the number of slots: how many containers limited by one backend may run at once, up "
            f"to {MAX_SLOTS} (default: 128)"
        ),
    )
    parser.add_argument(
        "--backend",
        choices=[backend.name for backend in BACKENDS],
        help=(
            "only for this backend, also while no family uses it; for a container into which only "
            "this backend's directory is mounted"
        ),
    )
    options.add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.count <= MAX_SLOTS:
        raise ConfigError([f"--count {arguments.count}: give a number from 1 to {MAX_SLOTS}"])
    loaded = load.load(options.given(arguments), os.environ)
    used = used_backends(loaded.settings)
    for backend in BACKENDS:
        if arguments.backend not in {None, backend.name}:
            continue
        # A backend that is named by --backend and whose directory is mounted gets slots even if no
        # family uses it yet: a change of the configuration file may switch such a family on while
        # the agent runs. A configuration of NVIDIA's plugin, which a label of the Node chooses,
        # cannot switch one on, and is not read here.
        named = arguments.backend is not None
        prepared = named and os.path.isdir(backend.host_directory(loaded.settings))
        if backend.name not in used and not prepared:
            print(f"{backend.name}: no family that is on uses it, so it needs no slots")
            continue
        regions = backend.containers_directory(loaded.settings)
        mounted = mount_slots(regions, arguments.count, mount_tmpfs)
        print(f"{slots_directory(regions)}: {arguments.count} slots, {mounted} of them mounted now")
    return 0
