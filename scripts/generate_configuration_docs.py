#!/usr/bin/env python3
"""Write docs/configuration.md from the schema;
with ``--check``, fail when the file is not what would be written.

Called by ``scripts/generate`` and, with ``--check``, by the tests.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import msgspec  # noqa: E402 - likewise

from vgpu_agent.config import difference, options, schema  # noqa: E402 - the path comes first
from vgpu_agent.config.example import example, yaml_value  # noqa: E402 - likewise
from vgpu_agent.families import registry  # noqa: E402, F401 - their sections belong to the page

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
<!-- Written by scripts/generate_configuration_docs.py from vgpu_agent/config and vgpu_agent/families; change those. -->
# Configuration

Nothing needs to be configured: without a file the agent offers every GPU whole, as
`nvidia.com/gpu`. What you want otherwise goes into one YAML file, `--config FILE`:

```yaml
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
```

| command | what it does |
|---|---|
| `vgpu-agent config example` | writes a commented file with every key and its default (it stands at the end of this page) |
| `vgpu-agent config check FILE` | says what is wrong with a file, or with the texts in a ConfigMap, everything at once; see [below](#checking) |
| `vgpu-agent config convert FILE` | writes a configuration of NVIDIA's device plugin as one of the agent's |
| `vgpu-agent config show --config FILE` | each value and where it came from; `--json` for programs |
| `curl localhost:9395/debug/config` | the same from the running agent |

## Checking

`vgpu-agent config check FILE` takes three kinds of files:

| file | what happens |
|---|---|
| a configuration | It is checked together with the flags and variables of the call, as `run` would read it |
| a manifest of kind ConfigMap | Each text in its `data` is checked in the same way, or as a configuration of NVIDIA's plugin if it has `flags`. Messages have the key, as in `configmap.yaml data.config.yaml:3`; the line counts within that text |
| a values file of NVIDIA's Helm chart | It says what each value comes to here, in comments, and writes the configurations of `config.map` as ones of the agent |

| exit status | meaning |
|---|---|
| 0 | nothing is wrong |
| 1 | the configuration is wrong; a line on stderr for each problem |
| 2 | the arguments are invalid: an unknown flag, two files, or a file that cannot be read |
| 3 | a values file was explained; the agent cannot use it as it is |

## Who wins

A flag beats an environment variable, which beats the file, which beats a configuration file of
NVIDIA's device plugin, which beats the default. An empty variable counts as not set. A relative
path in a flag or a variable starts from the working directory; paths in the file are absolute.
Flags of the replaced plugins are read as Go reads them: one dash or two, `--flag=value`, a switch
alone, a list repeated or separated by commas.

"""

RULES = """\
## A configuration of NVIDIA's device plugin

A file of its schema v1 is read as it is: given as `--config-file`, as `CONFIG_FILE`, or as the
section `nvidiaConfig` of the agent's own file. Each value becomes the setting that means the same,
and `config show` names the line from which it came. What the plugin drops without a word counts
here or is named in a warning: keys that it does not know, keys in the wrong section, `resources`,
`rename` and `devices`. With `namedConfig.directory`, a label of the node chooses the file. A table
of everything is in [coming-from-nvidia-device-plugin.md](coming-from-nvidia-device-plugin.md).

## Variables that mean nothing

A variable that begins with `VGPU_AGENT_` and stands in no table is reported as a warning, unless
Kubernetes put it there for a Service. So is a variable of NVIDIA's or Volcano's plugin that the
agent does not follow, where it would have had an effect.

## What the file may look like

* `version: v1` must be there; an empty file is refused, because it may be a write that was cut
  short.
* A key that does not exist is an error, with a suggestion. A key that stands twice is an error,
  too. A key of an earlier version is a warning, which says what the agent does instead.
* Plain values are what JSON would call them: `true`, `false`, `null`, numbers, else text. So `yes`,
  `on`, `012` and `1:30` are text, and a key that wants true or false refuses `yes`.
* Anchors, aliases, tags, a second document, and more than 1 MiB are refused.

All mistakes are reported together, one a line, and the agent ends with status 2 before anything is
registered:

```
config.yaml:7: sharing.timeSlicing.renameByDefualt: unknown key, did you mean renameByDefault?
config.yaml:12: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, got "four"
--listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "9394"
```

## Changes while the agent runs

The content of the files is looked at every two seconds. It makes no difference whether
one was edited, replaced, or swapped by a ConfigMap (mount the ConfigMap as a directory: Kubernetes
never updates a `subPath` mount). Keys marked *live* below take effect at once; a change of another
key is logged and waits for a restart. A file that cannot be used is logged line by line and the
settings from before stay in force; so they do when the file vanishes.

## Every key

"""


def document() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        *_options(),
        "\n",
        RULES,
        *_section(schema.root(), ""),
        "## The example file\n\n```yaml\n",
        example(),
        "```\n",
    ]
    return "".join(parts)


def _options() -> Iterator[str]:
    yield "| flag | environment variable | key |\n|---|---|---|\n"
    yield f"| `{options.CONFIG_FLAG}` | `{options.CONFIG_VARIABLE}` | the file itself |\n"
    for option in options.options():
        yield (
            f"| {_names(option.flags)} | {_names(option.variables)} | "
            f"{_names((option.path, *options.keys_also_set(option.path)))} |\n"
        )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(section: schema.Struct, path: str) -> Iterator[str]:
    keys = schema.keys(section).values()
    if path:
        text = textwrap.fill(schema.section_text(section), 100, break_on_hyphens=False)
        yield f"### {path}\n\n{text}\n\n"
    if any(key.section is None for key in keys):
        yield "| key | default | accepts | live | meaning |\n|---|---|---|---|---|\n"
        for key in keys:
            if key.section is None:
                yield _row(key, f"{path}.{key.name}" if path else key.name)
        yield "\n"
    for key in keys:
        if below := key.section:
            yield from _section(below, f"{path}.{key.name}" if path else key.name)


def _row(key: schema.Key, path: str) -> str:
    live = "yes" if difference.takes_effect_at_once(path) else ""
    row = (
        f"| `{key.name}` | `{yaml_value(key.default)}` | {key.expectation} | {live} | {key.text} "
        "|\n"
    )
    for item in schema.keys(key.items).values() if key.items else ():
        default = (
            "required" if item.default is msgspec.NODEFAULT else f"`{yaml_value(item.default)}`"
        )
        row += (
            f"| `{key.name}[].{item.name}` | {default} | {item.expectation} | {live} | {item.text} "
            "|\n"
        )
    return row


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when docs/configuration.md is not up to date; write nothing",
    )
    if parser.parse_args().check:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != document():
            print(
                "docs/configuration.md is not up to date; run "
                "scripts/generate_configuration_docs.py",
                file=sys.stderr,
            )
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
