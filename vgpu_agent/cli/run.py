"""The command ``vgpu-agent run``: reads the configuration, configures the log, runs `agent`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys

from vgpu_agent import log
from vgpu_agent.config import load, options
from vgpu_agent.families import registry  # noqa: F401 - registers the families' settings and flags

_EXAMPLES = """\
examples:
  vgpu-agent run --config /etc/vgpu-agent/config.yaml
  vgpu-agent run --simulate /tmp/node --kubelet-dir /tmp/kubelet --log-format console

SIGHUP registers every resource with the kubelet again; in a terminal, it ends the agent. A changed
configuration file needs no signal. Exit status: 0 after SIGTERM or SIGINT, 1 when the agent cannot
start (no driver, port in use), 2 when the configuration is wrong. The reason is on stderr, in the
form of the log (--log-format): an event command.failed where it is JSON, a line of text
otherwise.
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


# 110 pods and HTTP servers at their connection limits need fewer than 2,000 descriptors. A higher
# limit would only let the kernel's table of descriptors grow.
_MAX_DESCRIPTORS = 65536


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, `_MAX_DESCRIPTORS` at most. In many
    containers the soft limit is 1,024, for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_soft = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < new_soft:
        # a sandbox may forbid this; then the HTTP servers accept fewer connections
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))


def _run(arguments: argparse.Namespace) -> int:
    # The kernel ignores SIGTERM for process 1 of a container unless there is a handler. Until the
    # agent installs its own, SIGTERM ends the process as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags = options.given(arguments)
    # the errors of a wrong configuration have the form of the log, too
    log.configure(log_format=load.log_format(flags, os.environ))
    loaded = load.load(flags, os.environ)
    log_settings = loaded.settings.log
    # `cache_loggers`: nothing in this process configures the log again
    log.configure(log_format=log_settings.format, level=log_settings.level, cache_loggers=True)
    _raise_descriptor_limit()
    # The import takes 200 ms, and an invalid configuration is reported before it.
    from vgpu_agent import agent  # noqa: PLC0415

    if asyncio.run(agent.run(loaded)):
        # In an upgrade, the next agent had taken over and this process only waited to be stopped,
        # but that agent is gone. Begin again in this process, because the kubelet waits longer and
        # longer before it restarts a container.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves
    return 0
