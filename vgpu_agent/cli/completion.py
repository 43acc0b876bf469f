"""``vgpu-agent completion``: a script that completes the command line in bash, zsh or fish.

The scripts are made from the parsers (`command_tree`) and call nothing: completion stays quick on a
busy node. A `Command` has its words (its name below the names of the commands that it belongs to,
none for the program itself), the names of the commands below it, and its parameters. A `Parameter`
is an option or, without flags, an argument. Each script is made from all commands (``known``).
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from vgpu_agent.cli import command_tree, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from vgpu_agent.cli.command_tree import Command, Parameter

_EXAMPLES = """examples:
  source <(vgpu-agent completion bash)                         in ~/.bashrc
  vgpu-agent completion zsh > ~/.zfunc/_vgpu-agent             a directory of $fpath
  vgpu-agent completion fish > ~/.config/fish/completions/vgpu-agent.fish"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        help="print a script that completes this command line in a shell",
        description="Print a script that completes this command line in bash, zsh or fish.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    known = list(command_tree.commands(main.whole_parser()))
    print("\n".join(_SHELLS[arguments.shell](known)))
    return 0


def _bash(known: list[Command]) -> Iterator[str]:
    yield "# bash completion of vgpu-agent; made by: vgpu-agent completion bash"
    yield "_vgpu_agent() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command="" word'
    yield "    COMPREPLY=()"
    yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield from _path_of_command(known, '        case "$command $word" in', "        ")
    yield "    done"
    yield '    case "$command:$prev" in'
    for pattern, values in _with_values(known):
        yield f'        {pattern}) COMPREPLY=($(compgen -W {values} -- "$cur")); return ;;'
    for pattern in _with_files(known):
        yield f'        {pattern}) COMPREPLY=($(compgen -f -- "$cur")); return ;;'
    yield "    esac"
    yield '    case "$command" in'
    for command in known:
        words = " ".join(name for name, _ in _offered(command))
        yield f"        {shlex.quote(' '.join(command.words))}) "
        yield f'            COMPREPLY=($(compgen -W {shlex.quote(words)} -- "$cur")) ;;'
    yield "    esac"
    yield "}"
    yield "complete -o default -F _vgpu_agent vgpu-agent"


def _zsh(known: list[Command]) -> Iterator[str]:
    yield "#compdef vgpu-agent"
    yield "# zsh completion of vgpu-agent; made by: vgpu-agent completion zsh"
    yield "_vgpu_agent() {"
    yield '    local command="" word prev=${words[CURRENT-1]}'
    yield "    local -a names options"
    yield '    for word in "${(@)words[2,CURRENT-1]}"; do'
    yield from _path_of_command(known, '        case "$command $word" in', "        ")
    yield "    done"
    yield '    case "$command:$prev" in'
    for pattern, values in _with_values(known):
        yield f"        {pattern}) compadd -- {' '.join(shlex.split(values))}; return ;;"
    for pattern in _with_files(known):
        yield f"        {pattern}) _files; return ;;"
    yield "    esac"
    yield '    case "$command" in'
    for command in known:
        described = [f"{name}:{text}" if text else name for name, text in _offered(command)]
        names = " ".join(shlex.quote(text) for text in described if not text.startswith("-"))
        options = " ".join(shlex.quote(text) for text in described if text.startswith("-"))
        yield f"        {shlex.quote(' '.join(command.words))})"
        yield f"            names=({names}); options=({options}) ;;"
    yield "    esac"
    yield "    _describe 'command' names || _describe -o 'option' options || _files"
    yield "}"
    # read by source, or from a directory of $fpath
    yield 'if [ "$funcstack[1]" = _vgpu-agent ]; then _vgpu_agent "$@"'
    yield "else compdef _vgpu_agent vgpu-agent; fi"


def _fish(known: list[Command]) -> Iterator[str]:
    yield "# fish completion of vgpu-agent; made by: vgpu-agent completion fish"
    for command in known:
        condition = _fish_condition(command)
        for name in command.commands:
            text = next(each.summary for each in known if each.words == (*command.words, name))
            yield f"complete -c vgpu-agent -f {condition} -a {name} -d {_fish_quoted(text)}"
        for parameter in command.parameters:
            value = ""
            if parameter.values:
                value = f" -x -a {_fish_quoted(' '.join(parameter.values))}"
            elif parameter.metavar:
                value = " -r" if parameter.takes_file else " -x"
            if parameter.flags:
                flags = " ".join(_fish_flag(flag) for flag in parameter.flags)
                text = _fish_quoted(_short(parameter.text))
                yield f"complete -c vgpu-agent {condition} {flags}{value} -d {text}"
            elif parameter.values:
                yield f"complete -c vgpu-agent -f {condition}{value.replace(' -x', '')}"


def _fish_condition(command: Command) -> str:
    if not command.words:
        return "-n __fish_use_subcommand"
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
    if command.commands:
        seen += f"; and not __fish_seen_subcommand_from {' '.join(command.commands)}"
    return f"-n '{seen}'"


def _fish_flag(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _path_of_command(known: list[Command], head: str, indent: str) -> Iterator[str]:
    """Yield the ``case`` by which a script, word by word, finds the command that is being typed,
    and puts its words into the shell variable ``command``. ``head`` is the first of the lines.
    """
    yield head
    for command in known:
        if command.words:
            *above, name = command.words
            pattern = shlex.quote(f"{' '.join(above)} {name}")
            yield f"{indent}    {pattern}) command={shlex.quote(' '.join(command.words))} ;;"
    yield f"{indent}esac"


def _with_values(known: list[Command]) -> Iterator[tuple[str, str]]:
    """Yield the patterns of ``command:flag`` and the values that may follow."""
    for command, parameter in _with_value(known):
        if parameter.values:
            yield _pattern(command, parameter), shlex.quote(" ".join(parameter.values))


def _with_files(known: list[Command]) -> Iterator[str]:
    """Yield the patterns of ``command:flag`` that a path follows."""
    for command, parameter in _with_value(known):
        if parameter.takes_file and not parameter.values:
            yield _pattern(command, parameter)


def _with_value(known: list[Command]) -> Iterator[tuple[Command, Parameter]]:
    """Yield the options that take a value, each with its command."""
    for command in known:
        for parameter in command.parameters:
            if parameter.flags and parameter.metavar:
                yield command, parameter


def _pattern(command: Command, parameter: Parameter) -> str:
    words = " ".join(command.words)
    return "|".join(shlex.quote(f"{words}:{flag}") for flag in parameter.flags)


def _offered(command: Command) -> Iterator[tuple[str, str]]:
    """Yield what may stand next, with its text: commands, values of arguments, options."""
    yield from ((name, "") for name in command.commands)
    for parameter in command.parameters:
        if parameter.flags:
            yield from ((flag, _short(parameter.text)) for flag in parameter.flags)
        else:
            yield from ((value, "") for value in parameter.values)


def _short(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:69]}…"


_SHELLS: dict[str, Callable[[list[Command]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
