"""Read the node configuration of vgpu-manager: one file for the whole cluster, with an entry for
each node or kind of node (vgpu-manager §1.6).

It is YAML (``version: v1`` and ``configs``) or a JSON array with comments, and is read unchanged.
The first entry whose ``nodeName`` is the node's name, or a regular expression for it, beats flags
and settings. A file with an error anywhere changes nothing: its previous content stays in force,
and a message names the error with its line. Called by `spec` whenever the file or the settings have
changed.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import schema, yaml
from vgpu_agent.config.device_answers import Plugin
from vgpu_agent.config.problems import shown, shown_key, shown_list
from vgpu_agent.config.suggestions import nearest
from vgpu_agent.families.device_lists import CDI_STRATEGIES
from vgpu_agent.families.plugin_files import Findings
from vgpu_agent.families.vgpu_manager.exclusion import read_excluded
from vgpu_agent.families.vgpu_manager.settings import SECTION, VgpuManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.device_lists import ListOptions
    from vgpu_agent.families.spec import NodeFacts

FILE = "vgpu-manager node configuration"  # the name of the file among those of `NodeFacts`

_VERSION = "v1"
_LARGEST_CHARACTERS = 1024 * 1024  # a ConfigMap has no more
# A file of 2,000 nodes with ten keys each; one of this size is read in 0.2 s.
_MAX_VALUES = 50_000
_MAX_PROBLEMS = 20
_MAX_NOTES = 20
_LONGEST_PATTERN = 1024
_PATTERN_MEMORY_BYTES = 1024 * 1024

# A name with these characters only matches nothing but itself.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9-]+\Z")
# Strings, comments and tabs of JSON. The end of the text also ends a string or comment, so that no
# part of the text is read twice.
_JSON_PARTS = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*(?:"|\\?\Z))|//[^\n]*|/\*.*?(?:\*/|\Z)|\t""", re.DOTALL
)

# A star as in a shell pattern: not after a character that a regular expression may repeat on
# purpose.
_SHELL_STAR = re.compile(r"(?<![+.*)\]\\}?])\*")
_ANY_CHARACTERS = "; write .* for any characters"

# key of an entry → attribute: here of `Plugin`, the settings ``plugin`` of the whole agent, and in
# `_OWN_KEYS` of `VgpuManager`, those of this family
_PLUGIN_KEYS = {
    "deviceListStrategy": "device_list_strategy",
    "gdsEnabled": "gds_enabled",
    "mofedEnabled": "mofed_enabled",
    "gdrcopyEnabled": "gdrcopy_enabled",
}
_IMEX_KEYS = {"channelIDs": "imex_channel_ids", "required": "imex_required"}
_OWN_KEYS = {
    "deviceSplitCount": "device_split_count",
    "deviceMemoryScaling": "device_memory_scaling",
    "deviceMemoryFactor": "device_memory_factor",
    "deviceCoresScaling": "device_cores_scaling",
    "excludeDevices": "exclude_devices",
    "migStrategy": "mig_strategy",
    "openKernelModules": "open_kernel_modules",
}
_NAME, _IMEX = "nodeName", "imex"
_WITHOUT_EFFECT = {
    "cgroupDriver": "has no effect; the agent finds a container's cgroup with either driver"
}
_KEYS = (_NAME, *_OWN_KEYS, *_PLUGIN_KEYS, _IMEX, *_WITHOUT_EFFECT)
# attribute → its declaration in the settings of the family, and of the whole agent
_OWN = {key.attribute: key for key in schema.keys(VgpuManager).values()}
_PLUGIN = {key.attribute: key for key in schema.keys(Plugin).values()}


class NodeConfig(msgspec.Struct, frozen=True):
    """The meaning of a node configuration for one node.

    Attributes:
        own: attribute of `VgpuManager` → value.
        plugin: attribute of `Plugin`, the settings ``plugin`` of the whole agent → value.
        entry: the entry that counts, e.g. ``configs[2]``; empty where none is for this node.
        problems: one sentence for each error, with file, line, key, value and expectation.
        notes: one sentence for each key of the entry that has no effect.
    """

    own: Mapping[str, Any] = msgspec.field(default_factory=dict)
    plugin: Mapping[str, Any] = msgspec.field(default_factory=dict)
    entry: str = ""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Tell whether the file has no error."""
        return not self.problems

    def applied_to(self, vgpu: VgpuManager) -> VgpuManager:
        """Return ``vgpu`` with the values of this file."""
        return msgspec.structs.replace(vgpu, **self.own)

    def lists(self, lists: ListOptions, plugin: Plugin) -> ListOptions:
        """Return ``lists``, how containers get their devices, with the values of this file.

        Args:
            lists: as the settings of the whole agent say.
            plugin: those settings.
        """
        wanted = msgspec.structs.replace(plugin, **self.plugin)
        strategies = lists.strategies
        if "device_list_strategy" in self.plugin and not self._lacks_specs(plugin):
            strategies = wanted.device_list_strategy
        return msgspec.structs.replace(
            lists,
            strategies=strategies,
            enabled=wanted.device_modes,
            imex_channels=lists.imex_channels if wanted.imex_channel_ids else (),
        )

    def ruled_out(self, plugin: Plugin) -> tuple[str, ...]:
        """Return a sentence for each value that the settings of the whole agent rule out."""
        wanted = msgspec.structs.replace(plugin, **self.plugin)
        problems = []
        if self._lacks_specs(plugin):
            problems.append(
                "deviceListStrategy: the CDI specs of a node are made as plugin.deviceListStrategy "
                "says; set that to a cdi strategy, too"
            )
        for attribute, key in (("imex_channel_ids", "channelIDs"), ("imex_required", "required")):
            if getattr(wanted, attribute) and not getattr(plugin, attribute):
                problems.append(
                    f"imex.{key}: the channels of a node are looked for as "
                    f"plugin.{_PLUGIN[attribute].name} says; set that, too"
                )
        return tuple(f"{self.entry}.{problem}" for problem in problems)

    def _lacks_specs(self, plugin: Plugin) -> bool:
        """Tell whether the entry wants CDI names although no CDI specs are made."""
        wanted = self.plugin.get("device_list_strategy", ())
        return _names_cdi(wanted) and not _names_cdi(plugin.device_list_strategy)


def in_force(settings: Settings, facts: NodeFacts) -> NodeConfig:
    """Return the node configuration that counts: the newest one without an error, with the problems
    of the newest.
    """
    path = settings.section(VgpuManager).node_config_file
    # oldest first: the newest, and while that has an error, those back to the last one without
    texts = facts.texts.get(FILE, ())
    if not path:
        return NodeConfig()
    if not texts and FILE not in facts.unreadable:
        return NodeConfig(
            problems=(
                (
                    f"{path}: does not exist, so flags and settings count; mount it, or correct "
                    f"{SECTION}.nodeConfigFile"
                ),
            )
        )
    found = [read_node_config(text, settings.node_name_or_hostname, path) for text in texts]
    valid = next((config for config in reversed(found) if config.is_valid), NodeConfig())
    problems = found[-1].problems if found else ()
    if trouble := facts.unreadable.get(FILE):
        problems = (*problems, f"{path}: cannot be read: {trouble}; make it readable")
    if problems:
        stays = "its previous content stays in force" if valid.entry else "flags and settings count"
        problems = (*problems, f"{path}: until that is corrected, {stays}")
    return msgspec.structs.replace(valid, problems=problems)


def is_valid(settings: Settings, text: str) -> bool:
    """Tell whether the file with this text has no error."""
    path = settings.section(VgpuManager).node_config_file
    return read_node_config(text, settings.node_name_or_hostname, path).is_valid


def findings(settings: Settings, text: str) -> Findings:
    """Judge the file with this text for the node of the settings, for ``vgpu-agent config``: people
    ask before they apply it.
    """
    path, node = settings.section(VgpuManager).node_config_file, settings.node_name_or_hostname
    config = read_node_config(text, node, path)
    ruled_out = tuple(f"{path}: {problem}" for problem in config.ruled_out(settings.plugin))
    meaning = (
        f"{config.entry} counts for node {node}"
        if config.entry
        else f"no entry is for node {node}, so flags and settings count"
    )
    return Findings(
        errors=(*config.problems, *ruled_out), notes=config.notes, part_in_force=meaning
    )


@functools.lru_cache(maxsize=4)
def read_node_config(text: str, node: str, file: str) -> NodeConfig:
    """Read ``text`` for the node ``node``. Never raises: the result has the problems.

    Args:
        text: of the file.
        node: the node's name.
        file: its path, for messages; one that ends with ``.json`` may have comments as in C.
    """
    reader = _Reader(file, node)
    if len(text) > _LARGEST_CHARACTERS:
        reader.report(1, "", f"is larger than {_LARGEST_CHARACTERS} characters; check the path")
        return reader.result()
    is_json = file.endswith(".json")
    plain = _JSON_PARTS.sub(_without_comment, text) if is_json else text
    root, faults = yaml.parse(plain, max_values=_MAX_VALUES)
    for fault in faults:
        text = fault.text.replace("not YAML", "not JSON", 1) if is_json else fault.text
        reader.report(fault.line, fault.path, text)
    if root is not None:
        reader.read(root)
    elif not faults:
        reader.report(1, "", "is empty; expected entries with a nodeName")
    return reader.result()


class _Reader:
    """The problems of one file and the entry of one node, collected while it is read.

    A ``path`` is that of a key in the file, such as ``configs[2].nodeName``. A `yaml.Node` is a
    value with its line; ``node`` alone as a text is the node's name.
    """

    def __init__(self, file: str, node: str) -> None:
        self._file = file
        self._node = node
        self._count = 0
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._entry = ""
        self._own: dict[str, Any] = {}
        self._plugin: dict[str, Any] = {}

    def report(self, line: int, path: str, text: str) -> None:
        self._count += 1
        if self._count <= _MAX_PROBLEMS:
            self._problems.append(self._sentence(line, path, text))

    def result(self) -> NodeConfig:
        if (more := self._count - len(self._problems)) > 0:
            self._problems.append(f"{self._file}: and {more} more problems")
        if self._problems:
            return NodeConfig(problems=tuple(self._problems))
        return NodeConfig(
            self._own, self._plugin, self._entry, problems=(), notes=tuple(self._notes)
        )

    def read(self, root: yaml.Node) -> None:
        """Read the whole document."""
        entries, prefix = root, ""
        if isinstance(root.value, dict):
            if fault := yaml.kubernetes_object(root):  # the ConfigMap instead of its content
                self.report(*fault)
                return
            members = self._members(root.value, "", ("version", "configs"), counts=True)
            version = members.get("version")
            if version is not None and version.value != _VERSION:
                self.report(
                    version.line, "version", f"expected {_VERSION}, got {shown(version.value)}"
                )
            if "configs" not in members:
                self.report(root.line, "configs", _without_configs(root.value))
                return
            entries, prefix = members["configs"], "configs"
        if not isinstance(entries.value, list):
            self.report(
                entries.line,
                prefix,
                f"expected a list of entries with a nodeName, got {shown(entries.value)}",
            )
            return
        for place, entry in enumerate(entries.value):
            self._read_entry(f"{prefix}[{place}]", entry)

    def _read_entry(self, path: str, entry: yaml.Node) -> None:
        if not isinstance(entry.value, dict):
            self.report(
                entry.line, path, f"expected a mapping with a nodeName, got {shown(entry.value)}"
            )
            return
        members = self._members(entry.value, path, _KEYS, counts=not self._entry)
        name = members.pop(_NAME, None)
        ours = self._is_for_node(path, entry.line, name) and not self._entry
        own, plugin = dict[str, Any](), dict[str, Any]()
        for key, node in members.items():
            if node.value is None:  # not set, as in JSON
                continue
            where = f"{path}.{key}"
            if key in _WITHOUT_EFFECT:
                if ours:
                    self._note(node.line, where, f"{_WITHOUT_EFFECT[key]}; remove the key")
            elif key == _IMEX:
                self._read_imex(where, node, plugin)
            elif key in _OWN_KEYS:
                self._take(where, node, _OWN[_OWN_KEYS[key]], own)
            else:
                self._take(where, node, _PLUGIN[_PLUGIN_KEYS[key]], plugin)
        if ours:
            self._entry, self._own, self._plugin = path, own, plugin

    def _is_for_node(self, path: str, line: int, name: yaml.Node | None) -> bool:
        if name is None or not isinstance(name.value, str) or not name.value:
            self.report(
                line if name is None else name.line,
                f"{path}.{_NAME}",
                "expected a node's name or a regular expression for names, "
                f"{'and it is missing' if name is None else f'got {shown(name.value)}'}",
            )
            return False
        if name.value == self._node:
            return True
        if _PLAIN_NAME.match(name.value):
            return False
        if len(name.value) > _LONGEST_PATTERN:
            self.report(
                name.line,
                f"{path}.{_NAME}",
                f"has {len(name.value)} characters; expected at most {_LONGEST_PATTERN}",
            )
            return False
        matches, problem = _matches(name.value, self._node)
        if problem:
            self.report(
                name.line,
                f"{path}.{_NAME}",
                f"{shown(name.value)} is no regular expression (RE2): {problem}"
                f"{_ANY_CHARACTERS if '*' in name.value else ''}",
            )
        elif not matches:
            self._note_glob(f"{path}.{_NAME}", name.line, name.value)
        return matches

    def _note_glob(self, path: str, line: int, pattern: str) -> None:
        """Note a pattern that matches this node only if it is read as a shell pattern: the replaced
        plugin skips such an entry silently.
        """
        meant = _SHELL_STAR.sub(".*", pattern)
        if meant != pattern and _matches(meant, self._node)[0]:
            self._note(
                line,
                path,
                f"{shown(pattern)} is a regular expression, and does not match {self._node}; write "
                f"{shown(meant)} if this entry is for it",
            )

    def _read_imex(self, path: str, node: yaml.Node, plugin: dict[str, Any]) -> None:
        if not isinstance(node.value, dict):
            self.report(
                node.line, path, f"expected channelIDs and required, got {shown(node.value)}"
            )
            return
        for key, member in self._members(node.value, path, tuple(_IMEX_KEYS), counts=True).items():
            if member.value is not None:
                self._take(f"{path}.{key}", member, _PLUGIN[_IMEX_KEYS[key]], plugin)

    def _take(self, path: str, node: yaml.Node, key: schema.Key, into: dict[str, Any]) -> None:
        """Accept a value as the settings would, or report its fault."""
        value = node.plain  # without line numbers
        if key.is_list and not isinstance(value, list):  # one word, or several with commas
            words = value.split(",") if isinstance(value, str) else [value]
            value = [word.strip() if isinstance(word, str) else word for word in words]
        elif isinstance(value, float) and value.is_integer() and type(key.default) is int:
            value = int(value)
        try:
            accepted = key.accept(value)
        except schema.NotAcceptedError as err:
            # `takes_lists`: unlike `is_list`, also where a list is one of several forms
            got = shown_list(node.plain) if key.takes_lists else shown(node.plain)
            self.report(node.line, path, f"expected {err}, got {got}")
            return
        if key.attribute == "exclude_devices":
            for problem in read_excluded(accepted).problems:
                self.report(node.line, path, problem)
        into[key.attribute] = accepted

    def _members(
        self, members: Mapping[str, yaml.Node], path: str, known: Sequence[str], *, counts: bool
    ) -> dict[str, yaml.Node]:
        """Return the members whose keys are ``known``, under the known spelling: the replaced
        plugin ignores the case of keys. Other keys are noted if this part of the file ``counts``
        for the node.
        """
        folded = {key.lower(): key for key in known}
        found: dict[str, yaml.Node] = {}
        for written, node in members.items():
            where = f"{path}.{shown_key(written)}" if path else shown_key(written)
            if (key := folded.get(written.lower())) is None:
                if counts and len(self._notes) < _MAX_NOTES:
                    guess = nearest(written, known)
                    instead = f"did you mean {guess}?" if guess else "remove it"
                    self._note(node.line, where, f"unknown key, it has no effect; {instead}")
            elif key in found:
                self.report(
                    node.line,
                    where,
                    f"given twice, first on line {found[key].line}; keep one of them",
                )
            else:
                found[key] = node
        return found

    def _note(self, line: int, path: str, text: str) -> None:
        if len(self._notes) < _MAX_NOTES:
            self._notes.append(self._sentence(line, path, text))

    def _sentence(self, line: int, path: str, text: str) -> str:
        return ": ".join(part for part in (f"{self._file}:{line}", path, text) if part)


def _matches(pattern: str, node: str) -> tuple[bool, str]:
    """Tell whether the whole name matches, and what is wrong with the pattern, if anything.

    RE2 is the syntax of the replaced plugin, and takes linear time. With Python's own expressions,
    a typing error could hang the agent.
    """
    # Takes 10 ms and 3 MiB, and few files need it.
    import re2  # noqa: PLC0415

    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options).fullmatch(node) is not None, ""
    except re2.error as err:
        reason = err.args[0] if err.args else "unreadable"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        return False, shown(text)


def _without_configs(members: Mapping[str, yaml.Node]) -> str:
    """Say that the list is missing, and which key was probably meant."""
    text = "expected a list of entries with a nodeName, and it is missing"
    if any(key.lower() == _NAME.lower() for key in members):
        return f"{text}; write this entry as an item of a list"
    guess = next((key for key in members if nearest(key, ("configs",))), None)
    return f"{text}; is {shown_key(guess)} meant to be configs?" if guess else text


def _names_cdi(strategies: Sequence[str]) -> bool:
    return any(strategy in CDI_STRATEGIES for strategy in strategies)


def _without_comment(part: re.Match[str]) -> str:
    """Return a string as it is, and for a comment or tab a space and its line breaks."""
    return part["string"] or " " + "\n" * part[0].count("\n")
