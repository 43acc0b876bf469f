"""Translate a configuration of NVIDIA's device plugin (schema v1) into the agent's keys.

The document is a separate file (``nvidiaConfigFile``, ``--config-file``, ``CONFIG_FILE``) or the
section ``nvidiaConfig`` of the agent's own file. The result is the same document with the agent's
keys and the original line numbers. `config.reading` checks it like the agent's own file, and its
messages name NVIDIA's keys. Keys, defaults and edge cases: nvidia §2. This is the only module that
knows both schemas.

NVIDIA's plugin silently ignores a key that is unknown or in the wrong section. The agent warns, and
names the right place (nvidia D10). NVIDIA's plugin also parses some keys without using them
(``resources``, ``rename``, ``devices``), and refuses ``replicas: 1``. The agent applies all of
these.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Final

from vgpu_agent.config import options, schema, yaml
from vgpu_agent.config.documents import Translation
from vgpu_agent.config.problems import shown, shown_key
from vgpu_agent.config.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SECTION = "nvidiaConfig"
VERSION = "v1"
PLUGIN_ONLY_KEYS = ("flags", "imex")  # top-level keys that the agent's own schema lacks

# NVIDIA's key → the agent's key.
_OUR_KEYS: Final = {
    "flags.migStrategy": "plugin.migStrategy",
    "flags.failOnInitError": "gpu.failOnInitError",
    "flags.deviceDiscoveryStrategy": "gpu.discovery",
    "flags.mpsRoot": "mps.root",
    "flags.nvidiaDriverRoot": "gpu.driverRoot",
    "flags.nvidiaDevRoot": "gpu.devRoot",
    "flags.gdrcopyEnabled": "plugin.gdrcopyEnabled",
    "flags.gdsEnabled": "plugin.gdsEnabled",
    "flags.mofedEnabled": "plugin.mofedEnabled",
    "flags.plugin.passDeviceSpecs": "plugin.passDeviceSpecs",
    "flags.plugin.deviceListStrategy": "plugin.deviceListStrategy",
    "flags.plugin.deviceIDStrategy": "plugin.deviceIdStrategy",
    "flags.plugin.cdiAnnotationPrefix": "plugin.cdiAnnotationPrefix",
    "flags.plugin.nvidiaCTKPath": "cdi.hookPath",
    "flags.plugin.containerDriverRoot": "cdi.containerDriverRoot",
    "flags.plugin.sharedDevicesAllocationPolicy": "plugin.sharedDevicesAllocationPolicy",
    "resources.gpus": "resources.gpus",
    "resources.mig": "resources.mig",
    "sharing.timeSlicing.renameByDefault": "sharing.timeSlicing.renameByDefault",
    "sharing.timeSlicing.failRequestsGreaterThanOne": (
        "sharing.timeSlicing.failRequestsGreaterThanOne"
    ),
    "sharing.timeSlicing.resources": "sharing.timeSlicing.resources",
    "sharing.mps.renameByDefault": "sharing.mps.renameByDefault",
    "sharing.mps.failRequestsGreaterThanOne": "sharing.mps.failRequestsGreaterThanOne",
    "sharing.mps.resources": "sharing.mps.resources",
    "imex.channelIDs": "plugin.imexChannelIds",
    "imex.required": "plugin.imexRequired",
}
_STRATEGIES = "flags.plugin.deviceListStrategy"
_FEATURE_DISCOVERY = (
    "belongs to gpu-feature-discovery and has no effect here; keep gpu-feature-discovery running "
    "for its labels, or set nodeStatus.featureLabels"
)
_IGNORED: Final = {
    "flags.useNodeFeatureAPI": _FEATURE_DISCOVERY,
    "flags.gfd": _FEATURE_DISCOVERY,
}
# Sections that must not be present without content. NVIDIA's plugin refuses this as well.
_NEVER_EMPTY = ("sharing.timeSlicing", "sharing.mps")
# Keys for which "" is the same as no value.
_OPTIONAL_TEXTS = (
    "flags.nvidiaDriverRoot",
    "flags.nvidiaDevRoot",
    "flags.plugin.nvidiaCTKPath",
    "flags.plugin.containerDriverRoot",
)
# All texts that the YAML library of NVIDIA's plugin reads as true or false.
_YAML_BOOLEANS: Final = {
    word: value
    for value, words in ((True, ("y", "yes", "on", "true")), (False, ("n", "no", "off", "false")))
    for plain in words
    for word in (plain, plain.capitalize(), plain.upper())
}
_KNOWN: Final = (*_OUR_KEYS, *_IGNORED)
_MAX_WARNINGS = 20
# Tuples and not sets, because a value in the file may be a list, which cannot be hashed.
_VERSIONS: Final = (None, "", VERSION)  # in NVIDIA's plugin, no version means v1
# the values of `rename` and `devices` with which the agent and NVIDIA's plugin do the same
_UPSTREAM_VALUES: Final = (None, "", "all")
_USUAL_NAMES: Final = (("*", "gpu"), ("*", "nvidia.com/gpu"))  # (pattern, name) that both accept


def translate_file(content: bytes) -> Translation:
    """Translate the content of a file. An empty file means the defaults, as in NVIDIA's plugin."""
    root, faults = yaml.read(content)
    if root is None:
        return Translation(
            faults=tuple(faults),
            warnings=() if faults else (yaml.Fault(1, "", "is empty, so it changes nothing"),),
        )
    return _Translator("", faults).translate(root)


def translate_section(node: yaml.Node) -> Translation:
    """Translate the content of the section `SECTION` of the agent's own file."""
    return _Translator(f"{SECTION}.", []).translate(node)


class _Translator:
    """The translator of one document. State: the part of the result that is complete."""

    def __init__(self, prefix: str, faults: list[yaml.Fault]) -> None:
        self._prefix = prefix  # stands before a key's path in messages
        self._members: dict[str, yaml.Node] = {}
        self._keys: dict[str, str] = {}  # the agent's path → NVIDIA's, for messages
        self._faults = faults
        self._warnings: list[yaml.Fault] = []
        self._present_sections: set[str] = set()

    def translate(self, root: yaml.Node) -> Translation:
        """Translate the whole document."""
        if root.value is not None and not isinstance(root.value, dict):
            # after ``nvidiaConfig: |``, the whole section is one text
            block = (
                f"; remove the text after {SECTION}:"
                if self._prefix and isinstance(root.value, str)
                else ""
            )
            self._fault(
                root.line,
                "",
                f"expected keys such as version: {VERSION}, got {shown(root.value)}{block}",
            )
        elif fault := yaml.kubernetes_object(root):  # the ConfigMap instead of its content
            self._fault(*fault)
        elif root.value is not None:
            members = dict(root.value)
            version = members.pop("version", None)
            if version is not None and version.value not in _VERSIONS:
                self._fault(
                    version.line, "version", f"expected {VERSION}, got {shown(version.value)}"
                )
            self._present_sections.update(_section_paths(members))
            self._translate_section(members, "")
        self._warnings.sort(key=lambda warning: warning.line)
        more = len(self._warnings) - _MAX_WARNINGS
        if more > 0:
            self._warnings[_MAX_WARNINGS:] = [
                yaml.Fault(self._warnings[_MAX_WARNINGS].line, "", f"and {more} more like these")
            ]
        return Translation(self._members, self._keys, tuple(self._faults), tuple(self._warnings))

    def _translate_section(self, members: Mapping[str, yaml.Node], section: str) -> None:
        for name, node in self._known_members(members, section, _children(section)).items():
            path = f"{section}.{name}" if section else name
            if path in _IGNORED:
                self._warn(node.line, path, _IGNORED[path])
            elif path in _OUR_KEYS:
                self._translate_value(path, node)
            else:
                self._translate_subsection(path, node)

    def _translate_subsection(self, path: str, node: yaml.Node) -> None:
        if node.value is None and path not in _NEVER_EMPTY:
            return
        members = {} if node.value is None else node.value
        if not isinstance(members, dict):
            self._fault(node.line, path, f"expected a mapping, got {shown(node.value)}")
            return
        if path in _NEVER_EMPTY:  # `config.reading` requires the list
            self._our_section(path.split("."), node.line)
            self._keys[path] = self._prefix + path
        self._translate_section(members, path)

    def _translate_value(self, path: str, node: yaml.Node) -> None:
        key = schema.value_paths()[_OUR_KEYS[path]]
        if node.value is None:
            # for a list that must not be empty: its section, which may be left out instead
            if not key.can_be_omitted_with:
                return  # null means no value, as in JSON
            # an empty list, which is refused
            node = yaml.Node([], node.line)
        if key.items is not None:  # the keys of the items of a list
            node = self._translate_items(path, key.items, node)
        elif node.value == "" and path in _OPTIONAL_TEXTS:
            return
        elif path == _STRATEGIES and isinstance(node.value, str):
            if "," in node.value:
                self._fault(
                    node.line,
                    path,
                    f"expected a list such as [envvar, cdi-cri], got {shown(node.value)}",
                )
                return
            node = yaml.Node([yaml.Node(node.value, node.line)], node.line)
        elif key.is_switch and isinstance(node.value, str):
            node = yaml.Node(_YAML_BOOLEANS.get(node.value, node.value), node.line)
        # Some keys of other families have the same source in NVIDIA's file, and are set with it.
        for ours in (_OUR_KEYS[path], *options.keys_also_set(_OUR_KEYS[path], in_file=True)):
            self._put(ours, path, node)

    def _translate_items(self, path: str, items: schema.Struct, node: yaml.Node) -> yaml.Node:
        """Return the list with the keys of its items in the agent's spelling.

        They differ from NVIDIA's only in upper and lower case.
        """
        if not isinstance(node.value, list):
            return node
        found = []
        for index, item in enumerate(node.value):
            if not isinstance(item.value, dict):
                found.append(item)
                continue
            corrected = self._known_members(
                item.value, f"{path}[{index}]", list(schema.keys(items))
            )
            found.append(
                yaml.Node(
                    {
                        name: member
                        for name, member in corrected.items()
                        if member.value is not None
                    },
                    item.line,
                )
            )
            self._warn_of_applied_keys(f"{path}[{index}]", corrected)
        return yaml.Node(found, node.line)

    def _warn_of_applied_keys(self, path: str, members: Mapping[str, yaml.Node]) -> None:
        """Warn of keys that NVIDIA's plugin replaces with its defaults and the agent applies.

        With them, the same file may give different resource names.
        """
        warning = (
            "NVIDIA's plugin ignores this and the agent applies it; remove it to keep the "
            "resources as they were"
        )
        plain = {name: node.value for name, node in members.items()}
        for name in ("rename", "devices"):
            if plain.get(name) not in _UPSTREAM_VALUES:
                self._warn(members[name].line, f"{path}.{name}", warning)
        if "pattern" in members and (plain["pattern"], plain.get("name")) not in _USUAL_NAMES:
            self._warn(members["pattern"].line, path, warning)

    def _known_members(
        self, members: Mapping[str, yaml.Node], section: str, known: list[str]
    ) -> dict[str, yaml.Node]:
        """Return the members whose keys are ``known``, in that spelling, and warn of the others.

        NVIDIA's plugin ignores the difference between upper and lower case.
        """
        folded = {name.lower(): name for name in known}
        found: dict[str, yaml.Node] = {}
        for written, node in members.items():
            path = f"{section}.{shown_key(written)}" if section else shown_key(written)
            if (name := folded.get(written.lower())) is None:
                self._warn(node.line, path, self._unknown_key_text(section, written, known))
            elif name in found:
                self._fault(
                    node.line,
                    path,
                    f"given twice, first on line {found[name].line}; keep one of them",
                )
            else:
                found[name] = node
        return found

    def _unknown_key_text(self, section: str, written: str, known: list[str]) -> str:
        """Return a warning about the key ``written``, with the path that was probably meant."""
        # further warnings are only counted, so no search for a path is needed
        if len(self._warnings) >= _MAX_WARNINGS:
            return "unknown key, it has no effect"
        paths = _paths_by_name()
        if found := paths.get(written.lower()):
            return (
                "has no effect here; did you mean "
                f"{self._prefix}{self._nearest_path(section, found)}?"
            )
        if guess := nearest(written, known):
            return f"unknown key, it has no effect; did you mean {guess}?"
        if guess := nearest(written, paths):
            return (
                "unknown key, it has no effect; did you mean "
                f"{self._prefix}{self._nearest_path(section, paths[guess])}?"
            )
        return "unknown key, it has no effect"

    def _nearest_path(self, section: str, paths: list[str]) -> str:
        """Return the path that has most sections in common with ``section``.

        Among equal paths it is one whose own section is in the document, or else the first.
        """
        return max(
            paths,
            key=lambda path: (
                _common_sections(path, section),
                path.rpartition(".")[0] in self._present_sections,
            ),
        )

    def _put(self, ours: str, theirs: str, node: yaml.Node) -> None:
        *sections, name = ours.split(".")
        self._our_section(sections, node.line)[name] = node
        self._keys[ours] = self._prefix + theirs

    def _our_section(self, sections: list[str], line: int) -> dict[str, yaml.Node]:
        """Return the members of a section of the result, which is created if it is missing."""
        members = self._members
        for section in sections:
            subsection = members.setdefault(section, yaml.Node({}, line)).value
            if not isinstance(subsection, dict):
                raise TypeError(f"{section} is a value and a section")
            members = subsection
        return members

    def _fault(self, line: int, path: str, text: str) -> None:
        self._faults.append(yaml.Fault(line, (self._prefix + path).rstrip("."), text))

    def _warn(self, line: int, path: str, text: str) -> None:
        self._warnings.append(yaml.Fault(line, (self._prefix + path).rstrip("."), text))


def _children(section: str) -> list[str]:
    """List the keys and subsections of ``section`` in NVIDIA's schema."""
    prefix = f"{section}." if section else ""
    return list(
        dict.fromkeys(
            path.removeprefix(prefix).partition(".")[0]
            for path in _KNOWN
            if path.startswith(prefix)
        )
    )


def _common_sections(path: str, section: str) -> int:
    """Count the sections that ``path`` and ``section`` have in common, from the top."""
    pairs = zip(path.split("."), section.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@functools.cache
def _paths_by_name() -> dict[str, list[str]]:
    """Return lower-case name of a key or section in NVIDIA's schema → all its paths."""
    paths: dict[str, list[str]] = {}
    for path in _all_paths():
        paths.setdefault(path.rpartition(".")[2].lower(), []).append(path)
    return paths


def _all_paths() -> Iterator[str]:
    """Yield the path of each key and section in NVIDIA's schema, including keys of list items."""
    seen = set()
    for path in _KNOWN:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            if (part := ".".join(parts[:depth])) not in seen:
                seen.add(part)
                yield part
        if path in _OUR_KEYS and (items := schema.value_paths()[_OUR_KEYS[path]].items) is not None:
            yield from (f"{path}[].{name}" for name in schema.keys(items))


def _section_paths(members: Mapping[str, yaml.Node], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each mapping in a document."""
    for name, node in members.items():
        if isinstance(node.value, dict):
            yield prefix + name
            yield from _section_paths(node.value, f"{prefix}{name}.")
