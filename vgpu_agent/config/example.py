"""The commented example configuration. It is written from the schema, so it has every key and the
true defaults.

Called by ``config example`` and by the documentation generator. A test loads it and compares it
with the defaults.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import difference, options, schema
from vgpu_agent.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTH = 100
_COMMENTED_WIDTH = _WIDTH - len("  # ")
_HEADER = """\
Configuration of vgpu-agent, schema v1.
Every value here is the default; keep the lines that you change.
A flag beats an environment variable, which beats this file. Their names are in (brackets).
A configuration of NVIDIA's device plugin may be pasted unchanged below the key nvidiaConfig.
The other keys of this file beat it.
[live]: a change takes effect in a running agent. Changes of other keys need a restart."""
# Text that needs no quotes in YAML.
_UNQUOTED = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*\Z")
# Our reader takes the last four for text, other YAML parsers do not.
_NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off"}


def example() -> str:
    """Write a complete YAML file that loads to the defaults."""
    lines = [*_comment(_HEADER, ""), "version: v1", *_section(schema.root(), path="", indent="")]
    return "\n".join(lines) + "\n"


def yaml_value(value: Any) -> str:
    """Write ``value`` as YAML."""
    if isinstance(value, str):
        return value if _UNQUOTED.match(value) and value not in _NOT_TEXT else json.dumps(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    return shown(value)  # e.g. a number or a boolean, as YAML has it


def _section(section: schema.Struct, path: str, indent: str) -> Iterator[str]:
    for number, key in enumerate(schema.keys(section).values()):
        key_path = f"{path}.{key.name}" if path else key.name
        if number or not path:
            yield ""
        if key.section is None:
            yield from _comment(key.text + _other_sources(key_path), indent)
            yield f"{indent}{key.name}: {yaml_value(key.default)}"
        elif _has_required_list(key.section):
            yield from _comment(f"{key.text} To share, remove the first # of each line.", indent)
            yield from (f"{indent}# {line}".rstrip() for line in _commented_section(key, key_path))
        else:
            yield from _comment(key.text, indent)
            yield f"{indent}{key.name}:"
            yield from _section(key.section, key_path, indent + "  ")


def _commented_section(parent: schema.Key, path: str) -> Iterator[str]:
    """Write a section that has no valid default, because its list must not be empty."""
    yield f"{parent.name}:"
    for key in schema.keys(parent.section).values() if parent.section else ():
        yield from _comment(key.text + _other_sources(f"{path}.{key.name}"), "  ", _COMMENTED_WIDTH)
        if key.items is None:  # otherwise the type of the items of a list of sections
            yield f"  {key.name}: {yaml_value(key.default)}"
        else:
            yield f"  {key.name}:"
            yield from _item(key.items)


def _item(items: schema.Struct) -> Iterator[str]:
    """Write one item of a list, with an example for each value that has no default."""
    dash = "- "
    for key in schema.keys(items).values():
        yield from _comment(key.text, "    ", _COMMENTED_WIDTH)
        yield (
            f"    {dash}{key.name}: "
            f"{yaml_value(key.example if key.default is msgspec.NODEFAULT else key.default)}"
        )
        dash = "  "


def _other_sources(path: str) -> str:
    """Return the flags and variables that set the key, also those of another key that set it as
    well, and a mark if a change takes effect at once.
    """
    live = " [live]" if difference.takes_effect_at_once(path) else ""
    names = [
        name
        for option in options.options()
        if path in (option.path, *options.keys_also_set(option.path))
        for name in (*option.flags, *option.variables)
    ]
    return f" ({', '.join(names)}){live}" if names else live


def _has_required_list(section: schema.Struct) -> bool:
    """Tell whether the section has a list that must not be empty; the section can be left out."""
    # for such a list, `can_be_omitted_with` is the name of the section; empty for other keys
    return any(key.can_be_omitted_with for key in schema.keys(section).values())


def _comment(text: str, indent: str, width: int = _WIDTH) -> list[str]:
    wrap = textwrap.TextWrapper(
        width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
    )
    return [line for paragraph in text.splitlines() for line in wrap.wrap(paragraph)]
