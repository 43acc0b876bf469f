"""``vgpu-agent man``: the manual page, made from the parsers as ``--help`` is (`command_tree`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vgpu_agent import __version__
from vgpu_agent.cli import command_tree, debug_address, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from vgpu_agent.cli.command_tree import Command, Parameter

_EXAMPLES = """examples:
  vgpu-agent man | man -l -
  vgpu-agent man > /usr/local/share/man/man1/vgpu-agent.1"""
_EXIT_STATUS = (
    ("0", "success"),
    ("1", "failure; for the command status a node with problems, for the command doctor warnings"),
    (
        "2",
        "wrong usage or configuration; the agent cannot be reached; for the command doctor errors",
    ),
    ("130", "interrupted"),
)
_ENVIRONMENT = (
    (
        debug_address.ENVIRONMENT,
        f"where the agent serves /debug, for the commands that ask it ({debug_address.DEFAULT})",
    ),
    ("VGPU_AGENT_SCHEDULER", "where the scheduler extender listens, for the command why"),
    ("NO_COLOR", "no colours, also on a terminal"),
    ("COLUMNS", "the width of tables, instead of that of the terminal"),
)


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "man",
        help="print the manual page",
        description="Print the manual page, in roff.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the page."""
    print(page(), end="")
    return 0


def page() -> str:
    """Return the manual page in roff, without the commands of the simulator."""
    program, *known = command_tree.commands(main.whole_parser(simulator=False))
    lines = [
        f'.TH VGPU\\-AGENT 1 "" "vgpu\\-agent {__version__}" "User Commands"',
        '.\\" Written by vgpu-agent man from the parsers of the commands.',
        ".SH NAME",
        "vgpu\\-agent \\- share the NVIDIA GPUs of one Kubernetes node between its pods",
        ".SH SYNOPSIS",
        ".B vgpu\\-agent",
        "\\fICOMMAND\\fR [\\fIOPTION\\fR...]",
        ".SH DESCRIPTION",
        _text(program.description),
        ".SH OPTIONS",
        *_parameters(program),
        ".SH COMMANDS",
    ]
    for command in known:
        lines += _command(command)
    lines.append(".SH EXIT STATUS")
    for status, text in _EXIT_STATUS:
        lines += [".TP", f".B {status}", _text(text)]
    lines.append(".SH ENVIRONMENT")
    for name, text in _ENVIRONMENT:
        lines += [".TP", f".B {_text(name)}", _text(text)]
    lines += [
        ".PP",
        _text(
            "Each setting of vgpu-agent run has a variable; vgpu-agent config example prints their "
            "names."
        ),
    ]
    return "\n".join(lines) + "\n"


def _command(command: Command) -> Iterator[str]:
    yield f'.SS "vgpu\\-agent {_text(" ".join(command.words))}"'
    yield _text(f"{command.description[:1].upper()}{command.description[1:].rstrip('.')}.")
    yield from _parameters(command)
    if command.epilog:
        yield from (".PP", ".nf", *(_text(line) for line in command.epilog.splitlines()), ".fi")


def _parameters(command: Command) -> Iterator[str]:
    """Yield the options and arguments of a command, each with its help."""
    for parameter in command.parameters:
        yield from (".TP", _name(parameter), _text(parameter.text or "see the examples"))


def _name(parameter: Parameter) -> str:
    """Return the flags of an option, and what its value is called or may be."""
    names = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in parameter.flags)
    value = "|".join(parameter.values) or parameter.metavar if parameter.metavar else ""
    return f"{names} \\fI{_text(value)}\\fR".strip() if value else names


def _text(text: str) -> str:
    """Escape a text for roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
