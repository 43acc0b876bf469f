"""Entry point of the command line: the parser, and the conversion of errors into a line on stderr
and an exit status.

Exit status: 0 success, 1 failure, 2 wrong usage (flags or configuration) or a running agent that
cannot be reached, 130 interrupted. For ``config check``, a wrong configuration is the result, and
thus 1. ``status`` returns 1 for a node with problems. ``doctor`` returns 0 without faults, 1 with
warnings and 2 with errors. A command is a module with `add_parser`; its parser
leaves ``run`` in the parsed arguments, a function that takes them and returns the exit status.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from vgpu_agent import __version__
from vgpu_agent.errors import AgentError, CheckFailedError, ConfigError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 2, 130  # exit statuses

# The thresholds of the three generations of the garbage collector (`gc.set_threshold`) while a
# command starts. Imports create some 100,000 objects that stay. With the defaults the collector
# took a tenth of the time from the start of the agent to its registrations. A command that keeps
# running sets others when its start is over (`memory.freeze_objects`).
_START_GC_THRESHOLDS = 50_000, 20, 10

# Commands in the order of --help. A module is imported only for its own command, so that `status`
# does not import the agent's libraries. The simulator's commands exist only in a checkout, not in a
# wheel or the image.
_SIMULATOR = "vgpu_agent.sim"
_COMMANDS = {
    "run": ("vgpu_agent.cli.run", "run the agent on this node"),
    "status": (
        "vgpu_agent.cli.status",
        "show the GPUs, resources, pods and problems of the running agent",
    ),
    "gpus": ("vgpu_agent.cli.gpus", "show each GPU with its figures, its health and its holders"),
    "pods": ("vgpu_agent.cli.pods", "show which container holds which share of which GPU"),
    "events": (
        "vgpu_agent.cli.events",
        "show what happened on the node recently, and what the agent decided",
    ),
    "explain": (
        "vgpu_agent.cli.explain",
        "explain why a pod does not start on this node, or what it has",
    ),
    "top": ("vgpu_agent.cli.top", "show live how much of each GPU is granted and used"),
    "doctor": (
        "vgpu_agent.cli.doctor",
        "check what the agent needs of this node, with a remedy for each fault",
    ),
    "support-bundle": (
        "vgpu_agent.cli.support_bundle",
        "collect all that a bug report needs in one archive",
    ),
    "scheduler": (
        "vgpu_agent.cli.scheduler",
        "place pods on Nodes, as an extender of kube-scheduler",
    ),
    "why": (
        "vgpu_agent.cli.why",
        "ask the scheduler extender why a pod does not start, or where its cards are",
    ),
    "config": ("vgpu_agent.cli.config", "check, show, write or convert a configuration"),
    "webhook": (
        "vgpu_agent.cli.webhook",
        "complete and check new pods that ask for shares of GPUs, as an admission webhook",
    ),
    "mount-regions": (
        "vgpu_agent.cli.mount_regions",
        "mount small file systems in memory for the files in which containers record their usage",
    ),
    "completion": (
        "vgpu_agent.cli.completion",
        "print a script that completes this command line in a shell",
    ),
    "man": ("vgpu_agent.cli.manual", "print the manual page"),
    "sim": (f"{_SIMULATOR}.cli.sim", "create and change simulated GPUs"),
    "demo": (f"{_SIMULATOR}.cli.demo", "demonstrate the agent on a simulated node"),
    "version": ("vgpu_agent.cli.version", "print the version"),
}

# These take the flags of all settings. Importing the module of one declares all settings, so that
# `_suggestion` can compare a wrong flag with theirs.
_WITH_SETTINGS = ("run", "doctor", "support-bundle", "config")

_EXAMPLES = """\
examples:
  vgpu-agent run --config /etc/vgpu-agent/config.yaml
  vgpu-agent status
  vgpu-agent config check config.yaml

`vgpu-agent COMMAND --help` tells more about a command.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with `USAGE`."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    gc.set_threshold(*_START_GC_THRESHOLDS)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, unknown = _parser(words).parse_known_args(words)
        # argparse would refer to the top help, which does not list a command's flags
        if unknown:
            _Parser(prog=f"vgpu-agent {_command(words)}".strip()).error(
                f"unrecognized arguments: {' '.join(unknown)}"
                f"{_suggestion(_command(words), unknown)}"
            )
        status: int = arguments.run(arguments)
    except ConfigError as err:
        status = FAILED if isinstance(err, CheckFailedError) else USAGE
        if not _logged(words, err.problems, status):
            for problem in err.problems:
                print(problem, file=sys.stderr)
        return status
    except AgentError as err:
        status = UNREACHABLE if isinstance(err, UnreachableError) else FAILED
        if not _logged(words, [str(err)], status):
            print(f"vgpu-agent: {err}", file=sys.stderr)
        return status
    except BrokenPipeError:
        return FAILED  # the reader of our output has closed it
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _logged(words: Sequence[str], problems: Sequence[str], status: int) -> bool:
    """Log the problems that end the command, and return True, if this process has a log in JSON. A
    collector then finds them by their event, and meets no line of another form.
    """
    # Only a command with a log has imported it, so that the others need not pay for it.
    log = sys.modules.get("vgpu_agent.log")
    if log is None or not log.writes_json_to_stderr():
        return False
    for problem in problems:
        log.get(__name__).error(
            "command.failed", command=_command(words), error=problem, exit_status=status
        )
    return True


def _command(words: Sequence[str]) -> str:
    """Return the name of the command in the words of the command line; empty without one."""
    return next((word for word in words if not word.startswith("-")), "")


def _suggestion(command: str, unknown: Sequence[str]) -> str:
    """Return the end of an error message that proposes the setting's flag closest to the first
    unknown one; empty when none is close.
    """
    if command not in _WITH_SETTINGS:
        return ""
    # Imported only for wrong usage, so that other calls start quickly.
    from vgpu_agent.config.options import options  # noqa: PLC0415
    from vgpu_agent.config.suggestions import nearest  # noqa: PLC0415

    written = unknown[0].partition("=")[0]
    guess = nearest(written, [flag for option in options() for flag in option.flags])
    return f"; did you mean {guess}?" if guess and written.startswith("-") else ""


def whole_parser(*, simulator: bool = True) -> argparse.ArgumentParser:
    """Return the parser with the options of all commands, for `completion` and `manual`.

    Args:
        simulator: with the commands that only a checkout has, where this is one.
    """
    return _with_commands(
        [
            name
            for name, (module, _) in _COMMANDS.items()
            if simulator or not module.startswith(_SIMULATOR)
        ],
        _COMMANDS,
    )


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    return _with_commands(_COMMANDS, (_command(words),))


def _with_commands(listed: Iterable[str], with_options: Container[str]) -> argparse.ArgumentParser:
    """Return the parser with the commands in ``listed``. Only those that are also in
    ``with_options`` have their options; the others are there for the help.
    """
    parser = _Parser(
        prog="vgpu-agent",
        description="Shares the NVIDIA GPUs of one Kubernetes node between its pods.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vgpu-agent {__version__}")
    subparsers: Any = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name in listed:
        module, summary = _COMMANDS[name]
        if module.startswith(_SIMULATOR) and importlib.util.find_spec(_SIMULATOR) is None:
            continue
        if name in with_options:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser
