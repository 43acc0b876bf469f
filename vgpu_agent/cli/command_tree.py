"""The command line as data: each command with its options, read from its argparse parser.

Used by `completion` and `manual`, so that both show what ``--help`` shows.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Parameter(NamedTuple):
    """An option or an argument of a command.

    Attributes:
        flags: such as ``-o`` and ``--output``; empty for an argument.
        metavar: the name of its value; empty for a switch.
        values: what the value may be; empty for any text.
        text: the help.
    """

    flags: tuple[str, ...]
    metavar: str
    values: tuple[str, ...]
    text: str

    @property
    def takes_file(self) -> bool:
        """Tell whether the value is the path of a file or directory."""
        return re.search(r"FILE|DIR|PATH|SOCKET|NODE_DIRECTORY", self.metavar) is not None


class Command(NamedTuple):
    """A command.

    Attributes:
        words: its name, below the names of the commands that it belongs to; empty for the program.
        summary: one line.
        description: a paragraph, or the summary.
        epilog: examples and exit statuses, in lines.
        parameters: its options and arguments.
        commands: the names of the commands below it.
    """

    words: tuple[str, ...]
    summary: str
    description: str
    epilog: str
    parameters: tuple[Parameter, ...]
    commands: tuple[str, ...]


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = (), summary: str = ""
) -> Iterator[Command]:
    """Yield the command of a parser and those below it, each before the ones below."""
    # argparse has no public way to list what a parser accepts
    below = [
        action
        for action in parser._actions  # noqa: SLF001 - see above
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - see above
    ]
    yield Command(
        words,
        summary,
        parser.description or summary,
        (parser.epilog or "").strip("\n"),
        tuple(_parameters(parser)),
        tuple(name for action in below for name in action.choices),
    )
    for action in below:
        summaries = {each.dest: each.help or "" for each in action._choices_actions}  # noqa: SLF001 - see above
        for name, each in action.choices.items():
            yield from commands(each, (*words, name), summaries.get(name, ""))


def _parameters(parser: argparse.ArgumentParser) -> Iterator[Parameter]:
    formatter = parser._get_formatter()  # noqa: SLF001 - as in `commands`
    for action in parser._actions:  # noqa: SLF001 - as in `commands`
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as in `commands`
            continue
        metavar = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        yield Parameter(
            tuple(action.option_strings),
            metavar if isinstance(metavar, str) and action.nargs != 0 else "",
            tuple(str(value) for value in action.choices or ()),
            " ".join(formatter._expand_help(action).split()) if action.help else "",  # noqa: SLF001 - as in `commands`
        )
