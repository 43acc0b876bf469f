"""A configuration of NVIDIA's device plugin (schema v1), translated into our keys;
no other module knows both.

Its document is a file of its own (``nvidiaConfigFile``, ``--config-file``, ``CONFIG_FILE``) or the
section ``nvidiaConfig`` of our file. The result is the same document with our keys and its lines.
`reading` judges it like our own; sentences about it name NVIDIA's keys. Keys, defaults and edge
cases: nvidia §2.

NVIDIA's plugin silently drops a key that is unknown or in the wrong section. Here each is a warning
that names the right place (nvidia D10). Keys that it parses and drops (``resources``, ``rename``,
``devices``, one replica) count here.
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
ONLY_THERE = ("flags", "imex")  # at the top of such a document, and never of ours

# Their key → ours.
_VALUES: Final = {
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
    "belongs to gpu-feature-discovery and has no effect here; keep that running for its labels"
)
_WITHOUT_EFFECT: Final = {
    "flags.useNodeFeatureAPI": _FEATURE_DISCOVERY,
    "flags.gfd": _FEATURE_DISCOVERY,
}
# There with nothing below, they are a mistake that upstream refuses as well.
_NEVER_EMPTY = ("sharing.timeSlicing", "sharing.mps")
# "" means that they are not set.
_OPTIONAL_TEXTS = (
    "flags.nvidiaDriverRoot",
    "flags.nvidiaDevRoot",
    "flags.plugin.nvidiaCTKPath",
    "flags.plugin.containerDriverRoot",
)
# What upstream's YAML reads as true and false beyond `true` and `false`.
_SWITCH_WORDS: Final = {
    word: value
    for value, words in ((True, ("y", "yes", "on", "true")), (False, ("n", "no", "off", "false")))
    for plain in words
    for word in (plain, plain.capitalize(), plain.upper())
}
_KNOWN: Final = (*_VALUES, *_WITHOUT_EFFECT)
_MAX_WARNINGS = 20
# Values as they are compared with those in the file; tuples, because those may be lists.
_VERSIONS: Final = (None, "", VERSION)  # upstream: nothing means v1
_UNSHARED: Final = (None, "", "all")  # a rename and devices that upstream does not drop
_USUAL_NAMES: Final = (("*", "gpu"), ("*", "nvidia.com/gpu"))


def translate_file(content: bytes) -> Translation:
    """The document in the file ``content``. An empty one means NVIDIA's defaults, as upstream."""
    root, faults = yaml.read(content)
    if root is None:
        return Translation(
            faults=tuple(faults),
            warnings=() if faults else (yaml.Fault(1, "", "is empty, so it changes nothing"),),
        )
    return _Translator("", faults).translate(root)


def translate_section(node: yaml.Node) -> Translation:
    """The document in the section `SECTION` of our file."""
    return _Translator(f"{SECTION}.", []).translate(node)


class _Translator:
    """One document on its way. State: the result, as far as it has come."""

    def __init__(self, prefix: str, faults: list[yaml.Fault]) -> None:
        self._prefix = prefix
        self._members: dict[str, yaml.Node] = {}
        self._keys: dict[str, str] = {}
        self._faults = faults
        self._warnings: list[yaml.Fault] = []
        self._sections: set[str] = set()

    def translate(self, root: yaml.Node) -> Translation:
        """The whole document."""
        if root.value is not None and not isinstance(root.value, dict):
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
        elif fault := yaml.kubernetes_object(root):
            self._fault(*fault)
        elif root.value is not None:
            members = dict(root.value)
            version = members.pop("version", None)
            if version is not None and version.value not in _VERSIONS:
                self._fault(
                    version.line, "version", f"expected {VERSION}, got {shown(version.value)}"
                )
            self._sections.update(_sections_of(members))
            self._section(members, "")
        self._warnings.sort(key=lambda warning: warning.line)
        more = len(self._warnings) - _MAX_WARNINGS
        if more > 0:
            self._warnings[_MAX_WARNINGS:] = [
                yaml.Fault(self._warnings[_MAX_WARNINGS].line, "", f"and {more} more like these")
            ]
        return Translation(self._members, self._keys, tuple(self._faults), tuple(self._warnings))

    def _section(self, members: Mapping[str, yaml.Node], section: str) -> None:
        for name, node in self._spelt(members, section, _children(section)).items():
            path = f"{section}.{name}" if section else name
            if path in _WITHOUT_EFFECT:
                self._warn(node.line, path, _WITHOUT_EFFECT[path])
            elif path in _VALUES:
                self._value(path, node)
            else:
                self._subsection(path, node)

    def _subsection(self, path: str, node: yaml.Node) -> None:
        if node.value is None and path not in _NEVER_EMPTY:
            return
        members = {} if node.value is None else node.value
        if not isinstance(members, dict):
            self._fault(node.line, path, f"expected a mapping, got {shown(node.value)}")
            return
        if path in _NEVER_EMPTY:  # `reading` requires the list
            self._below(path.split("."), node.line)
            self._keys[path] = self._prefix + path
        self._section(members, path)

    def _value(self, path: str, node: yaml.Node) -> None:
        key = schema.value_paths()[_VALUES[path]]
        if node.value is None:
            if not key.required:  # a null sets nothing, as in JSON
                return
            node = yaml.Node([], node.line)
        if key.items is not None:
            node = self._items(path, key.items, node)
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
            node = yaml.Node(_SWITCH_WORDS.get(node.value, node.value), node.line)
        for ours in (_VALUES[path], *options.keys_set_with(_VALUES[path], in_file=True)):
            self._put(ours, path, node)

    def _items(self, path: str, items: schema.Struct, node: yaml.Node) -> yaml.Node:
        """The list with the keys of each item spelt as ours, which have the same names."""
        if not isinstance(node.value, list):
            return node
        found = []
        for index, item in enumerate(node.value):
            if not isinstance(item.value, dict):
                found.append(item)
                continue
            spelt = self._spelt(item.value, f"{path}[{index}]", list(schema.keys(items)))
            found.append(
                yaml.Node(
                    {name: member for name, member in spelt.items() if member.value is not None},
                    item.line,
                )
            )
            self._warn_of_what_counts_here(f"{path}[{index}]", spelt)
        return yaml.Node(found, node.line)

    def _warn_of_what_counts_here(self, path: str, members: Mapping[str, yaml.Node]) -> None:
        """Upstream replaces these with its defaults,
        so that a file which is moved over may publish other names than it did.
        """
        counts = (
            "NVIDIA's plugin ignores this and the agent applies it; remove it to keep the "
            "resources as they were"
        )
        plain = {name: node.value for name, node in members.items()}
        for name in ("rename", "devices"):
            if plain.get(name) not in _UNSHARED:
                self._warn(members[name].line, f"{path}.{name}", counts)
        if "pattern" in members and (plain["pattern"], plain.get("name")) not in _USUAL_NAMES:
            self._warn(members["pattern"].line, path, counts)

    def _spelt(
        self, members: Mapping[str, yaml.Node], section: str, known: list[str]
    ) -> dict[str, yaml.Node]:
        """The members whose keys are ``known``, spelt so: upstream does not look at upper and lower
        case. The others are warned of.
        """
        folded = {name.lower(): name for name in known}
        found: dict[str, yaml.Node] = {}
        for written, node in members.items():
            path = f"{section}.{shown_key(written)}" if section else shown_key(written)
            if (name := folded.get(written.lower())) is None:
                self._warn(node.line, path, self._where_it_counts(section, written, known))
            elif name in found:
                self._fault(
                    node.line,
                    path,
                    f"given twice, first on line {found[name].line}; keep one of them",
                )
            else:
                found[name] = node
        return found

    def _where_it_counts(self, section: str, written: str, known: list[str]) -> str:
        # only counted; a megabyte of junk needs no advice
        if len(self._warnings) >= _MAX_WARNINGS:
            return "unknown key, it has no effect"
        places = _places_by_name()
        if found := places.get(written.lower()):
            return (
                "has no effect here; did you mean "
                f"{self._prefix}{self._nearest_place(section, found)}?"
            )
        if guess := nearest(written, known):
            return f"unknown key, it has no effect; did you mean {guess}?"
        if guess := nearest(written, places):
            return (
                "unknown key, it has no effect; did you mean "
                f"{self._prefix}{self._nearest_place(section, places[guess])}?"
            )
        return "unknown key, it has no effect"

    def _nearest_place(self, section: str, places: list[str]) -> str:
        """Most of the way in common with ``section``, then one whose own section is there,
        then the first.
        """
        return max(
            places,
            key=lambda path: (_in_common(path, section), path.rpartition(".")[0] in self._sections),
        )

    def _put(self, ours: str, theirs: str, node: yaml.Node) -> None:
        *sections, name = ours.split(".")
        self._below(sections, node.line)[name] = node
        self._keys[ours] = self._prefix + theirs

    def _below(self, sections: list[str], line: int) -> dict[str, yaml.Node]:
        """The members of one of our sections, which is made where it is not there yet."""
        members = self._members
        for section in sections:
            below = members.setdefault(section, yaml.Node({}, line)).value
            if not isinstance(below, dict):
                raise TypeError(f"{section} is a value and a section")
            members = below
        return members

    def _fault(self, line: int, path: str, text: str) -> None:
        self._faults.append(yaml.Fault(line, (self._prefix + path).rstrip("."), text))

    def _warn(self, line: int, path: str, text: str) -> None:
        self._warnings.append(yaml.Fault(line, (self._prefix + path).rstrip("."), text))


def _children(section: str) -> list[str]:
    """The keys of NVIDIA's below ``section``."""
    prefix = f"{section}." if section else ""
    return list(
        dict.fromkeys(
            path.removeprefix(prefix).partition(".")[0]
            for path in _KNOWN
            if path.startswith(prefix)
        )
    )


def _in_common(path: str, section: str) -> int:
    """Count the sections that the two share, from the top."""
    pairs = zip(path.split("."), section.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@functools.cache
def _places_by_name() -> dict[str, list[str]]:
    """List the places of each name of NVIDIA's schema, in lower case."""
    places: dict[str, list[str]] = {}
    for path in _every_path():
        places.setdefault(path.rpartition(".")[2].lower(), []).append(path)
    return places


def _every_path() -> Iterator[str]:
    """Each key and each section of NVIDIA's schema, those of list items too."""
    seen = set()
    for path in _KNOWN:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            if (part := ".".join(parts[:depth])) not in seen:
                seen.add(part)
                yield part
        if path in _VALUES and (items := schema.value_paths()[_VALUES[path]].items) is not None:
            yield from (f"{path}[].{name}" for name in schema.keys(items))


def _sections_of(members: Mapping[str, yaml.Node], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all mappings in a document."""
    for name, node in members.items():
        if isinstance(node.value, dict):
            yield prefix + name
            yield from _sections_of(node.value, f"{prefix}{name}.")
