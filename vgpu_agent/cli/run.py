"""``vgpu-agent run``: reads the configuration, sets up the log and hands over to `agent`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal

from vgpu_agent import log
from vgpu_agent.config import load, options
from vgpu_agent.families import registry  # noqa: F401 - the families bring their sections and flags

_EXAMPLES = """\
examples:
  vgpu-agent run --config /etc/vgpu-agent/config.yaml
  vgpu-agent run --simulate /tmp/node --kubelet-dir /tmp/kubelet --log-format console

SIGHUP registers every resource with the kubelet anew; in a terminal, it ends the agent. A changed
configuration file needs no signal. Exit status: 0 after SIGTERM or SIGINT, 1 when the agent cannot
start (no driver, port in use), 2 when the configuration is wrong.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``run``."""
    parser = subparsers.add_parser(
        "run",
        help="run the agent on this node",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_arguments(parser)
    parser.set_defaults(run=_run)


# More would be nothing but memory for a table in the kernel; 110 pods and full HTTP servers take
# below 2,000.
_MAX_DESCRIPTORS = 65536


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the container may have:
    the soft limit is 1,024 in many, for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # a sandbox may forbid it; then the listeners take fewer connections
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run(arguments: argparse.Namespace) -> int:
    # As process 1 of a container we have no default reaction to SIGTERM; until the agent has its
    # own, leave as for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loaded = load.load(options.given(arguments), os.environ)
    log.configure(
        log_format=loaded.settings.log.format, level=loaded.settings.log.level, for_good=True
    )
    _raise_descriptor_limit()
    # 200 ms of libraries that a wrong configuration should not wait for
    from vgpu_agent import agent  # noqa: PLC0415

    asyncio.run(agent.run(loaded))
    return 0
