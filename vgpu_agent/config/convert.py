"""A configuration of NVIDIA's device plugin, written as one of ours: the output of
``vgpu-agent config convert``.

The output has only the settings that the file itself sets, so that both files mean the same. Keys
without effect are comments at the top. Called by `cli`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_agent.config import load, schema
from vgpu_agent.config.example import yaml_value
from vgpu_agent.config.reading import DEFAULT_ORIGIN, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec


def convert(file: str, content: bytes) -> str:
    """Return the YAML text for ``content`` of the file that is called ``file``.

    Raises:
        ConfigError: something in it is wrong; one sentence each, as when the agent reads it.
    """
    name = file if file.isprintable() else ascii(file)
    loaded = load.load_contents(
        load.Sources(flags={}, environment={}, file=None),
        load.Contents(nvidia_file=name, nvidia=content),
    )
    given = {path for path, origin in loaded.origins.items() if origin != DEFAULT_ORIGIN}
    lines = [
        f"# Made from {name}, a configuration of NVIDIA's device plugin.",
        *(f"# warning: {warning}" for warning in loaded.warnings),
        f"version: {VERSION}",
        *_section(schema.root(), loaded.settings, given, path="", indent=""),
    ]
    return "\n".join(lines) + "\n"


def _section(
    section: schema.Struct, values: msgspec.Struct, given: set[str], path: str, indent: str
) -> Iterator[str]:
    """Yield the lines of a section of our settings. ``given`` has the paths of the settings that
    the file sets, and ``path`` is that of the section with a dot at its end, such as ``plugin.``.
    """
    # `section`: the type of the section below the key; `items`: that of the items of a list of
    # sections; both None for a value
    for key in schema.keys(section).values():
        key_path, value = path + key.name, getattr(values, key.attribute)
        if key.section is not None:
            if below := list(_section(key.section, value, given, f"{key_path}.", f"{indent}  ")):
                yield f"{indent}{key.name}:"
                yield from below
        elif key.items is not None and value:
            if any(known.startswith(f"{key_path}[") for known in given):
                yield f"{indent}{key.name}:"
                yield from _items(key.items, value, given, key_path, indent)
        elif key_path in given:
            yield f"{indent}{key.name}: {yaml_value(value)}"


def _items(
    items: schema.Struct, values: tuple[Any, ...], given: set[str], path: str, indent: str
) -> Iterator[str]:
    for index, value in enumerate(values):
        lines = list(_section(items, value, given, f"{path}[{index}].", f"{indent}    "))
        yield f"{indent}  - {lines[0].lstrip()}"
        yield from lines[1:]
