"""The reading of all configuration sources into settings, the place of each value, and the errors.

`load` makes a `Reading`, passes it the sources in ascending priority (NVIDIA's file, our file,
environment variables, flags), and takes the settings and the origin of each value.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import checks, collisions, families, options, schema, yaml
from vgpu_agent.config.former_keys import former_keys
from vgpu_agent.config.problems import Problems, shown, shown_key, shown_list
from vgpu_agent.config.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.config.documents import Translation
    from vgpu_agent.config.settings import Settings

VERSION = "v1"
DEFAULT_ORIGIN = "default"
SIMULATE_ORIGIN = "derived from simulate"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place in a source that a value comes from.

    Attributes:
        origin: as in `Loaded.origins`.
        prefix: the same as the beginning of an error message.
        line: in a file; 0 elsewhere.
        key: the key's name in the file, where that is not our dotted path.
        replaced_plugin: the file is one of NVIDIA's plugin.
    """

    origin: str
    prefix: str
    line: int = 0
    key: str = ""
    replaced_plugin: bool = False

    @property
    def names_the_key(self) -> bool:
        """Tell whether ``prefix`` is a flag or a variable, which names the key well enough."""
        return self.line == 0


class Reading:
    """One pass over all sources.

    State: the accepted values, their places, the paths whose values were refused, and the errors.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._refused: set[str] = set()
        self._problems = Problems()
        self._former: list[str] = []
        # The document that is being taken: its path, and, if it is one of NVIDIA's plugin, our
        # path of a key → the key's path in that document.
        self._file = ""
        self._plugin_keys: Mapping[str, str] | None = None

    @property
    def former(self) -> Sequence[str]:
        """A message for each key of an earlier version that our file still has."""
        return self._former

    def take_nvidia(self, file: str, document: Translation) -> None:
        """Accept the values of a configuration of NVIDIA's plugin.
        Messages about it name its keys, not ours.
        """
        self._file, self._plugin_keys = file, document.keys
        for fault in document.faults:
            self._problems.add(f"{file}:{fault.line}", fault.path, fault.text, line=fault.line)
        self._accepted = self._section(schema.root(), document.members, "")
        self._plugin_keys = None

    def take_file(self, file: str, root: yaml.Node | None, faults: Sequence[yaml.Fault]) -> None:
        """Accept the values of our file, except a document of NVIDIA's plugin in it."""
        self._file = file
        for fault in faults:
            self._report(fault.line, fault.path, fault.text)
        if root is None:
            # An empty file is an error and does not mean all defaults: it may be a write that was
            # cut short, and defaults would switch sharing off under running pods.
            if not faults:
                self._report(
                    1, "version", f"missing, the file is empty; add the line version: {VERSION}"
                )
            return
        if not isinstance(root.value, dict):
            self._report(
                root.line, "", f"expected keys such as version: {VERSION}, got {shown(root.value)}"
            )
            return
        if whole_object := yaml.kubernetes_object(root):
            self._report(*whole_object)
            return
        members = {
            name: node for name, node in root.value.items() if name != families.document().section
        }
        self._check_version(members.pop("version", None), root.line)
        _merge(self._accepted, self._section(schema.root(), members, ""))

    def take_environment(self, environment: Mapping[str, str]) -> None:
        """Accept the variables of `options.options`; empty ones count as not set."""
        for option in options.options():
            if name := option.given_in(environment):
                self._take_option(
                    option,
                    environment[name],
                    Place(f"environment {name}", f"environment variable {name}"),
                )

    def take_flags(self, flags: Mapping[str, str]) -> None:
        """Accept the flags that were given, also empty ones."""
        for option in options.options():
            for name in option.flags:
                if name in flags:
                    self._take_option(option, flags[name], Place(f"flag {name}", name))

    def refuse(self, source: str, text: str) -> None:
        """Note an error in a flag or a variable that belongs to no key."""
        self._problems.add(source, "", text)

    def derive_from_simulate(self) -> None:
        """Set the roots of driver, devices and procfs, unless they are set, to the directory
        of simulated GPUs.
        """
        directory = self._accepted.get("simulate", "")
        if not directory:
            return
        for path, value in (
            ("gpu.driverRoot", directory),
            *((path, "") for path in ("gpu.devRoot",) if self._is_listed_default(path)),
            ("gpu.procRoot", os.path.join(directory, "proc")),
        ):
            if path not in self._places or self._is_listed_default(path):
                self._set(
                    path,
                    value,
                    Place(
                        SIMULATE_ORIGIN,
                        self._places["simulate"].prefix,
                        self._places["simulate"].line,
                    ),
                )

    def finish(self) -> Settings:
        """Return the settings.

        Raises:
            ConfigError: a source has an error, or values conflict.
        """
        settings = msgspec.convert(self._accepted, schema.root())
        for conflict in checks.conflicts(settings):
            # A refused value has its message already.
            if not any(path in self._refused for path, _ in conflict.blame):
                path, text = self._blamed(conflict)
                self._report_at(
                    path, self._places.get(path, Place(DEFAULT_ORIGIN, DEFAULT_ORIGIN)), text
                )
        self._problems.raise_if_any()
        return settings

    def collisions(self, settings: Settings) -> tuple[str, ...]:
        """A message for each conflict between families in ``settings``,
        with the place of the setting to change.
        """
        found = Problems()
        for conflict in collisions.collisions(settings):
            path, text = self._blamed(conflict)
            place = self._places.get(path, Place(DEFAULT_ORIGIN, DEFAULT_ORIGIN))
            found.add(
                place.prefix,
                "" if place.names_the_key else place.key or path,
                text,
                line=place.line,
            )
        return found.sentences

    def origins(self, settings: Settings) -> dict[str, str]:
        """Return the origin of each value of ``settings``."""
        return {
            path: self._places[path].origin if path in self._places else DEFAULT_ORIGIN
            for path, _ in schema.values(settings)
        }

    def _blamed(self, conflict: checks.Conflict) -> tuple[str, str]:
        """Return the first path of the conflict that was set, with its message."""
        return next(
            (blamed for blamed in conflict.blame if blamed[0] in self._places), conflict.blame[0]
        )

    def _is_listed_default(self, path: str) -> bool:
        """Tell whether the root ``path`` is "/" only because a file of NVIDIA's plugin lists the
        defaults, as most such files do.
        """
        place = self._places.get(path)
        section, _, name = path.partition(".")
        return place is not None and place.replaced_plugin and self._accepted[section][name] == "/"

    def _check_version(self, version: yaml.Node | None, first_line: int) -> None:
        if version is None:
            self._report(first_line, "version", f"missing, add the line version: {VERSION}")
        elif version.value != VERSION:
            self._report(version.line, "version", f"expected {VERSION}, got {shown(version.value)}")

    def _section(
        self, section: schema.Struct, members: Mapping[str, yaml.Node], prefix: str
    ) -> dict[str, Any]:
        known = schema.keys(section)
        accepted: dict[str, Any] = {}
        for name, node in members.items():
            if name not in known:
                if self._plugin_keys is None and self._is_former(node, prefix + name):
                    continue
                advice = "" if self._problems.enough else f", {_advice(name, known, prefix)}"
                self._report(node.line, prefix + shown_key(name), f"unknown key{advice}")
                continue
            found = self._value(known[name], node, prefix + name)
            if found is not None:
                accepted[name] = found
        return accepted

    def _is_former(self, node: yaml.Node, path: str) -> bool:
        """Tell whether ``path`` is a key of an earlier version, or a section of such keys only;
        note a message for each key.
        """
        all_former = former_keys()
        if instead := all_former.get(path):
            self._former.append(
                f"{self._file}:{node.line}: {path}: is gone: {instead}; remove the line"
            )
            return True
        former = {key.removeprefix(f"{path}.") for key in all_former if key.startswith(f"{path}.")}
        members = {} if node.value is None else node.value
        if not former or not isinstance(members, dict):
            return False
        for name, member in members.items():
            if not self._is_former(member, f"{path}.{name}"):
                self._report(
                    member.line,
                    f"{path}.{shown_key(name)}",
                    f"unknown key, {suggestion(name, former)}",
                )
        return True

    def _value(self, key: schema.Key, node: yaml.Node, path: str) -> Any:
        """Return the accepted value; None when it was refused."""
        if key.section is not None:
            return self._subsection(key.section, node, path)
        if key.items is not None:
            return self._items(key, key.items, node, path)
        value = _plain(node)
        place = self._place(node.line, path)
        try:
            accepted = key.accept(value)
        except schema.NotAcceptedError as err:
            self._refuse(
                path,
                place,
                f"expected {err}, got {shown_list(value) if key.takes_lists else shown(value)}",
            )
            return None
        self._places[path] = place
        return accepted

    def _subsection(
        self, section: schema.Struct, node: yaml.Node, path: str
    ) -> dict[str, Any] | None:
        # A section whose keys are all commented out has the value null.
        members = {} if node.value is None else node.value
        if not isinstance(members, dict):
            self._refuse_below(path, node, f"expected a mapping, got {shown(node.value)}")
            return None
        for key in schema.keys(section).values():
            if (
                key.required
                and key.name not in members
                and f"{path}.{key.name}[0].name" not in self._places
            ):
                self._report(
                    node.line,
                    f"{path}.{key.name}",
                    f"missing; list what is shared, or leave {key.required} out",
                )
        return self._section(section, members, path + ".")

    def _items(
        self, key: schema.Key, items: schema.Struct, node: yaml.Node, path: str
    ) -> list[dict[str, Any]] | None:
        if not isinstance(node.value, list):
            self._refuse_below(path, node, f"expected a list, got {shown(node.value)}")
            return None
        for stale in [known for known in self._places if known.startswith(f"{path}[")]:
            del self._places[stale]  # a list replaces the list of a source with lower priority
        if not node.value and key.required:
            self._report(
                node.line,
                path,
                f"expected at least one resource, got an empty list; leave {key.required} out to "
                "share nothing",
            )
        if not node.value:
            self._places[path] = self._place(node.line, path)
        needed = [
            member.name
            for member in schema.keys(items).values()
            if member.default is msgspec.NODEFAULT
        ]
        found = [
            self._item(items, item, f"{path}[{index}]") for index, item in enumerate(node.value)
        ]
        if key.repeated is not None:
            self._refuse_repeated(path, node.value, found, key.repeated)
        return [item for item in found if all(name in item for name in needed)]

    def _item(self, items: schema.Struct, node: yaml.Node, path: str) -> dict[str, Any]:
        """Return the accepted keys of one item; without those that are missing or wrong."""
        needed = [key for key in schema.keys(items).values() if key.default is msgspec.NODEFAULT]
        if not isinstance(node.value, dict):
            self._refuse_below(
                path,
                node,
                f"expected {' and '.join(key.name for key in needed)}, got {shown(node.value)}",
            )
            return {}
        found = self._section(items, node.value, path + ".")
        for key in needed:
            if key.name not in node.value:
                self._refuse_below(
                    f"{path}.{key.name}", node, f"missing, expected {key.expectation}"
                )
        self._complete_names(items, node.value, found, path)
        return found

    def _refuse_repeated(
        self,
        path: str,
        nodes: list[yaml.Node],
        found: list[dict[str, Any]],
        repeated: Callable[
            [Mapping[str, Any], Sequence[Mapping[str, Any]]], schema.Repeated | None
        ],
    ) -> None:
        lines = [_line_of(node, "name") for node in nodes]
        for index, entry in enumerate(found):
            if other := repeated(entry, found[:index]):
                line = _line_of(nodes[index], other.key)
                self._report(
                    line,
                    f"{path}[{index}].{other.key}",
                    other.text.format(line=lines[other.position]),
                )

    def _complete_names(
        self,
        items: schema.Struct,
        members: Mapping[str, yaml.Node],
        found: dict[str, Any],
        path: str,
    ) -> None:
        """Complete the resource names in ``found``, and refuse invalid ones."""
        for key in schema.keys(items).values():
            if key.completed is None or key.name not in found:
                continue
            if found[key.name]:
                found[key.name], problem = key.completed(found[key.name])
                if problem:
                    self._report(members[key.name].line, f"{path}.{key.name}", problem)
            elif key.default is msgspec.NODEFAULT:
                self._report(
                    members[key.name].line,
                    f"{path}.{key.name}",
                    f'expected {key.expectation}, got ""',
                )

    def _take_option(self, option: options.Option, text: str, place: Place) -> None:
        taken = option.taken_from(text) if option.taken_from is not None else text
        if taken is None:
            self._refuse(option.path, place, f"expected {option.expected}, got {shown(text)}")
            return
        self._refused.discard(option.path)
        for path in (option.path, *options.keys_set_with(option.path)):
            if option.path not in self._refused:  # it has its message already
                self._take_text(path, taken, place)

    def _take_text(self, path: str, text: str, place: Place) -> None:
        key = schema.value_paths()[path]
        if key.is_path and text and "\0" not in text:
            text = os.path.abspath(text)  # relative to the current directory
        try:
            self._set(path, key.accept_text(text), place)
        except schema.NotAcceptedError as err:
            self._refuse(path, place, f"expected {err}, got {shown(text)}")

    def _set(self, path: str, value: Any, place: Place) -> None:
        *sections, name = path.split(".")
        target = self._accepted
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
        self._places[path] = place
        self._refused.discard(path)

    def _refuse(self, path: str, place: Place, text: str) -> None:
        self._refused.add(path)
        self._report_at(path, place, text)

    def _refuse_below(self, path: str, node: yaml.Node, text: str) -> None:
        """Refuse a whole section; its values get no further messages."""
        self._refused.update(
            known for known in schema.value_paths() if known.startswith(f"{path}.")
        )
        self._refused.add(path)
        self._report(node.line, path, text)

    def _report_at(self, path: str, place: Place, text: str) -> None:
        self._problems.add(
            place.prefix, "" if place.names_the_key else place.key or path, text, line=place.line
        )

    def _report(self, line: int, path: str, text: str) -> None:
        self._report_at(path, self._place(line, path), text)

    def _place(self, line: int, path: str) -> Place:
        """Return the place of the key ``path`` in the current document."""
        where = f"{self._file}:{line}"
        return Place(
            where,
            where,
            line,
            "" if self._plugin_keys is None else _plugin_key(self._plugin_keys, path),
            self._plugin_keys is not None,
        )


def _advice(name: str, known: Iterable[str], prefix: str) -> str:
    if prefix:
        return suggestion(name, known)
    document = families.document()
    if name in document.only_there:
        return (
            f"a configuration of NVIDIA's plugin is given as {options.NVIDIA_CONFIG_FLAG}, or "
            f"stands below {document.section}"
        )
    return suggestion(name, ("version", *known, document.section))


def _plain(node: yaml.Node) -> Any:
    """Return the value without line numbers. Nested lists and mappings in a list stay nodes,
    because no key accepts them there.
    """
    if isinstance(node.value, list):
        return [item if isinstance(item.value, dict | list) else item.value for item in node.value]
    return node.value


def _line_of(node: yaml.Node, name: str) -> int:
    """Return the line of a member of ``node``, or else the first line of ``node``."""
    return (
        node.value[name].line if isinstance(node.value, dict) and name in node.value else node.line
    )


def _plugin_key(keys: Mapping[str, str], path: str) -> str:
    """Translate our ``path`` into one of NVIDIA's document: replace the longest beginning of it
    that ``keys`` has.
    """
    known, rest = path, ""
    while known and known not in keys:
        cut = max(known.rfind("."), known.rfind("["))
        known, rest = known[: max(cut, 0)], known[max(cut, 0) :] + rest
    return keys.get(known, "") + rest


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Set the values of ``above`` in ``below``, section by section; a list replaces a list."""
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], value)
        else:
            below[name] = value
