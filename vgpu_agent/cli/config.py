"""``vgpu-agent config check|show|example|convert``:
what a configuration means, before and without running it.

Called by the command line, which turns the ConfigError of a wrong configuration into one line for
each problem and exit status 2, or 1 where it was to be checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import helm_values, load, manifests, options, schema, yaml
from vgpu_agent.config.convert import convert
from vgpu_agent.config.example import example, yaml_value
from vgpu_agent.errors import CheckFailedError, ConfigError
from vgpu_agent.families import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.families.plugin_files import Findings

# The exit status of `check` for values of NVIDIA's Helm chart: they are no configuration, and are
# explained instead.
_EXIT_EXPLAINED = 3

_DESCRIPTION = """\
examples:
  vgpu-agent config example > config.yaml
  vgpu-agent config check config.yaml
  vgpu-agent config check manifests/configmap.yaml
  vgpu-agent config check config.yaml --node-name NODE --node-config-path $PWD/nodeConfig.yaml
  vgpu-agent config show config.yaml --log-level debug
  vgpu-agent config convert nvidia-device-plugin.yaml > config.yaml
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``config``; each of its commands leaves ``run`` in the parsed arguments,
    which returns the exit status.
    """
    command = subparsers.add_parser(
        "config",
        help="check, show, write or convert a configuration",
        epilog=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command.add_subparsers(metavar="COMMAND", required=True)

    check = commands.add_parser(
        "check",
        help=(
            "report the problems of a configuration, as a file or in its ConfigMap; exit status 0 "
            "without any, 1 with some, 2 for a wrong call, 3 for values of NVIDIA's Helm chart"
        ),
    )
    check.add_argument(
        "file", nargs="?", metavar="FILE", help="the file to check, the same as --config FILE"
    )
    options.add_arguments(check)
    check.set_defaults(run=_check)

    show = commands.add_parser("show", help="show each value and where it comes from")
    show.add_argument(
        "file", nargs="?", metavar="FILE", help="the file to show, the same as --config FILE"
    )
    show.add_argument("--json", action="store_true", help="one JSON object: path → {value, origin}")
    options.add_arguments(show)
    show.set_defaults(run=_show)

    write = commands.add_parser(
        "example", help="write a commented file with every key and its default"
    )
    write.set_defaults(run=_example)

    translate = commands.add_parser(
        "convert",
        help=(
            "convert a configuration of NVIDIA's device plugin; exit status 0, or 2 when it is "
            "wrong"
        ),
    )
    translate.add_argument(
        "file", metavar="FILE", help="the file of NVIDIA's plugin, - for standard input"
    )
    translate.set_defaults(run=_convert)


def _check(arguments: argparse.Namespace) -> int:
    flags = _flags(arguments)
    file = flags.get(options.CONFIG_FLAG, os.environ.get(options.CONFIG_VARIABLE, ""))
    # a file that cannot be read is a wrong call
    content = load.read(file) if file else None
    root = yaml.read(content)[0] if content is not None else None
    try:
        if content is not None and root is not None:
            if manifests.is_config_map(root):
                return _check_config_map(file, root, flags)
            if helm_values.is_values_file(root):
                return _explain_values(file, root)
        return _check_text(file, content, flags)
    except ConfigError as err:
        raise CheckFailedError(err.problems) from err


def _check_config_map(file: str, root: yaml.Node, flags: Mapping[str, str]) -> int:
    """Check each text in the data of a ConfigMap, as the agent reads it once it is mounted."""
    problems: list[str] = []
    for key, text in manifests.texts(file, root).items():
        name = f"{file} data.{key}"
        try:
            if manifests.is_of_nvidias_plugin(text):
                # nothing of our own but the flags, so that only this text is judged
                loaded = load.load_contents(
                    load.Sources(flags=flags, environment={}, file=None),
                    load.Contents(own=None, nvidia_file=name, nvidia=text.encode()),
                )
                _print_warnings(loaded)
                print(f"{name}: ok, a configuration of NVIDIA's device plugin")
            else:
                _check_text(name, text.encode(), flags)
        except ConfigError as err:
            problems += err.problems
    if problems:
        raise ConfigError(problems)
    return 0


def _explain_values(file: str, root: yaml.Node) -> int:
    """Say what the values of NVIDIA's chart come to here, and convert its configurations. Sentences
    are comments, so that the whole output is YAML.
    """
    print(f"# {file}: values of the Helm chart of NVIDIA's device plugin, not a configuration")
    for line in helm_values.explanations(root):
        print(f"# {line}")
    problems: list[str] = []
    for name, text in helm_values.configurations(root).items():
        print(f"---\n# config.map.{name}")
        try:
            print(convert(f"{file} config.map.{name}", text.encode()), end="")
        except ConfigError as err:
            problems += err.problems
    if problems:
        raise ConfigError(problems)
    return _EXIT_EXPLAINED


def _check_text(file: str, content: bytes | None, flags: Mapping[str, str]) -> int:
    sources = load.Sources(flags=flags, environment=options.relevant(os.environ), file=file or None)
    loaded = load.load_text(sources, content)
    _print_warnings(loaded)
    # `collisions`: conflicts between families, with which an agent would start
    errors, meanings = list(loaded.collisions), list[str]()
    for path, findings in _plugin_files(loaded):
        errors += findings.errors
        # `part_in_force`: which part of the file counts for this node; empty where all of it does
        meanings += [f"{path}: ok{findings.part_in_force and ', '}{findings.part_in_force}"]
        for note in findings.notes:
            print(f"warning: {note}", file=sys.stderr)
    if errors:
        raise ConfigError(errors)
    print(f"{loaded.files or 'defaults, environment and flags (no file)'}: ok")
    for meaning in meanings:
        print(meaning)
    return 0


def _plugin_files(loaded: load.Loaded) -> Iterator[tuple[str, Findings]]:
    """Yield the path and the findings of each file that the configuration names for a plugin that a
    family replaces. If a file is missing, print a warning where its path is not a default: it may
    be mounted on the nodes only.

    Raises:
        ConfigError: such a file cannot be read.
    """
    asked_for = {
        value
        for key, value in schema.values(loaded.settings)
        if isinstance(value, str) and loaded.origins[key] != "default"
    }
    for file in (file for family in registry.FAMILIES for file in family.files):
        if not (path := file.path(loaded.settings)):
            continue
        if os.path.exists(path):
            # the second argument names the file in an error
            text = load.read(path, file.name).decode(errors="replace")
            yield path, file.findings(loaded.settings, text)
        elif path in asked_for:
            print(f"warning: {path}: is not here, so it was not checked", file=sys.stderr)


def _show(arguments: argparse.Namespace) -> int:
    loaded = _loaded(arguments)
    rows = [(path, value, loaded.origins[path]) for path, value in schema.values(loaded.settings)]
    if arguments.json:
        answer: dict[str, dict[str, Any]] = {
            path: {"value": value, "origin": origin} for path, value, origin in rows
        }
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
        return 0
    lines = [(path, yaml_value(value), origin) for path, value, origin in rows]
    path_width, value_width = (max(len(line[column]) for line in lines) for column in (0, 1))
    for path, value, origin in lines:
        print(f"{path:{path_width}}  {value:{value_width}}  {origin}")
    return 0


def _example(_: argparse.Namespace) -> int:
    print(example(), end="")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.file == "-":
        file, content = "standard input", sys.stdin.buffer.read(load.LARGEST_FILE_BYTES + 1)
        if len(content) > load.LARGEST_FILE_BYTES:
            most = load.LARGEST_FILE_BYTES
            raise ConfigError([f"{file}: is larger than {most} bytes; a configuration is smaller"])
    else:
        file, content = arguments.file, load.read(arguments.file, "config convert")
    print(convert(file, content), end="")
    return 0


def _loaded(arguments: argparse.Namespace) -> load.Loaded:
    """Return the configuration that ``run`` loads with these arguments, before a label of the Node
    adds a named one (`namedConfig`). Warnings go to stderr.
    """
    loaded = load.load(_flags(arguments), os.environ)
    _print_warnings(loaded)
    return loaded


def _flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the flags that were given; a file without a flag counts as that of ``--config``."""
    flags = options.given(arguments)
    if arguments.file is not None:
        if flags.get(options.CONFIG_FLAG, arguments.file) != arguments.file:
            raise ConfigError(
                [
                    (
                        f"two files given, {arguments.file} and {options.CONFIG_FLAG} "
                        f"{flags[options.CONFIG_FLAG]}; name one"
                    )
                ]
            )
        flags[options.CONFIG_FLAG] = arguments.file
    return flags


def _print_warnings(loaded: load.Loaded) -> None:
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
