"""``vgpu-agent mount-regions``: mounts the slots in which the regions
of containers cannot grow (`runtime.region_slots`).

An init container of the DaemonSet runs it with the privilege to mount, which the agent itself does
without (manifests/components/region-slots).
"""

from __future__ import annotations

import argparse
import os

from vgpu_agent.config import load, options
from vgpu_agent.errors import ConfigError
from vgpu_agent.families import registry  # noqa: F401 - the families bring their sections and flags
from vgpu_agent.isolation.hami_core import containers_directory
from vgpu_agent.mps.directories import mount_tmpfs
from vgpu_agent.runtime.region_slots import MOST_SLOTS, directory_beside, mount_slots

_DESCRIPTION = """\
Mounts a small file system in memory for the region of each container, below
hamiCore.hostDirectory. What is mounted already stays. It takes the privilege to mount. The agent
uses the slots that it finds.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``mount-regions``."""
    parser = subparsers.add_parser(
        "mount-regions",
        help="mount the slots in which containers' regions cannot grow",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count",
        type=int,
        default=128,
        metavar="N",
        help=(
            f"how many containers with a limit by hami-core run at most, up to {MOST_SLOTS} "
            "(default: 128)"
        ),
    )
    options.add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.count <= MOST_SLOTS:
        raise ConfigError([f"--count {arguments.count}: give a number from 1 to {MOST_SLOTS}"])
    loaded = load.load(options.given(arguments), os.environ)
    regions = containers_directory(loaded.settings.hami_core.host_directory)
    mounted = mount_slots(regions, arguments.count, mount_tmpfs)
    print(f"{directory_beside(regions)}: {arguments.count} slots, {mounted} of them mounted now")
    return 0
