"""Read all configuration sources into settings, and record the source of each value and the errors.

`load` creates a `Reading` and adds the sources to it in ascending priority: NVIDIA's file, the
agent's own file, environment variables, flags. Then it asks for the settings and for the origin of
each value.
"""

from __future__ import annotations

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

VERSION = "v1"  # of the format of our file, the value of its key ``version``
DEFAULT_ORIGIN = "default"
SIMULATE_ORIGIN = "derived from simulate"


class Place(msgspec.Struct, frozen=True):
    """The place in a source that a value comes from.

    Attributes:
        origin: the place as text, in the form that users see beside a value: ``config.yaml:12``,
            ``environment X``, ``flag --x``.
        prefix: the place as text, in the form that begins an error message.
        line: the line number in a file; 0 for a flag, a variable or a default.
        plugin_key: the key's dotted path in a file of NVIDIA's plugin; empty in any other source.
        in_plugin_document: the source is a configuration of NVIDIA's plugin.
    """

    origin: str
    prefix: str
    line: int = 0
    plugin_key: str = ""
    in_plugin_document: bool = False

    @property
    def prefix_names_key(self) -> bool:
        """Tell whether ``prefix`` is a flag or a variable, so that messages need not repeat the
        key.
        """
        return self.line == 0


class Reading:
    """One pass over all sources.

    State: the accepted values, their places, the dotted paths of refused values, and the errors.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, Any] = {}  # by key; the value of a section is such a mapping
        self._places: dict[str, Place] = {}  # by dotted path
        self._refused: set[str] = set()
        self._problems = Problems()
        self._removed_key_warnings: list[str] = []
        # The document that is being read: its path and, for one of NVIDIA's plugin, our path of
        # each key → the key's path in that document.
        self._file = ""
        self._plugin_keys: Mapping[str, str] | None = None

    @property
    def removed_key_warnings(self) -> Sequence[str]:
        """List a message for each key in our file that only earlier versions had."""
        return self._removed_key_warnings

    def add_plugin_document(self, file: str, document: Translation) -> None:
        """Accept the values of a configuration of NVIDIA's plugin. Messages about it name its keys,
        not ours.
        """
        self._file, self._plugin_keys = file, document.keys
        for fault in document.faults:
            self._problems.add(f"{file}:{fault.line}", fault.path, fault.text, line=fault.line)
        self._accepted = self._read_section(schema.root(), document.members, "")
        self._plugin_keys = None

    def add_file(self, file: str, root: yaml.Node | None, faults: Sequence[yaml.Fault]) -> None:
        """Accept the values of our file, except a document of NVIDIA's plugin in it."""
        self._file = file
        for fault in faults:
            self._report(fault.line, fault.path, fault.text)
        if root is None:
            # An empty file is an error, because it may come from an interrupted write. To use the
            # defaults instead would switch sharing off under running pods.
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
        # a whole ConfigMap, for example, instead of the text in it
        if manifest_fault := yaml.kubernetes_object(root):
            self._report(*manifest_fault)
            return
        members = {
            name: node
            for name, node in root.value.items()
            if name != families.plugin_document().section
        }
        self._check_version(members.pop("version", None), root.line)
        _merge(self._accepted, self._read_section(schema.root(), members, ""))

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """Accept the variables of `options.options`. An empty variable counts as not set."""
        for option in options.options():
            if name := option.given_in(environment):
                self._add_option(
                    option,
                    environment[name],
                    Place(f"environment {name}", f"environment variable {name}"),
                )

    def add_flags(self, flags: Mapping[str, str]) -> None:
        """Accept the flags of the command line, including those with an empty value."""
        for option in options.options():
            for name in option.flags:
                if name in flags:
                    self._add_option(option, flags[name], Place(f"flag {name}", name))

    def derive_from_simulate(self) -> None:
        """Point the roots of driver, devices, procfs, MPS and the state at the simulation: at the
        directory of a simulated node, which is the value of ``simulate``.

        A root that a source has set keeps its value.
        """
        directory = self._accepted.get("simulate", "")
        if not directory:
            return
        for path, value in (
            # an empty devRoot is the same as driverRoot
            ("gpu.driverRoot", directory),
            *((path, "") for path in ("gpu.devRoot",) if self._is_explicit_default(path)),
            ("gpu.procRoot", os.path.join(directory, "proc")),
            ("mps.root", os.path.join(directory, "mps")),
            ("stateDirectory", os.path.join(directory, "agent-state")),
        ):
            if path not in self._places or self._is_explicit_default(path):
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
        settings = msgspec.convert(self._accepted, schema.root())  # the class of all settings
        for conflict in checks.conflicts(settings):
            # an error has already been reported for a refused value
            if not any(path in self._refused for path, _ in conflict.to_change):
                path, text = self._first_set(conflict)
                self._report_at(
                    path, self._places.get(path, Place(DEFAULT_ORIGIN, DEFAULT_ORIGIN)), text
                )
        self._problems.raise_if_any()
        return settings

    def collisions(self, settings: Settings) -> tuple[str, ...]:
        """List a message for each conflict between families in ``settings``.

        Each message names the place of the setting to change.
        """
        found = Problems()
        for conflict in collisions.collisions(settings):
            path, text = self._first_set(conflict)
            place = self._places.get(path, Place(DEFAULT_ORIGIN, DEFAULT_ORIGIN))
            found.add(
                place.prefix,
                "" if place.prefix_names_key else place.plugin_key or path,
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

    def _first_set(self, conflict: checks.Conflict) -> tuple[str, str]:
        """Return the first path of the conflict that a source has set, with its message; the first
        path of all if no source has set one.
        """
        return next(
            (change for change in conflict.to_change if change[0] in self._places),
            conflict.to_change[0],
        )

    def _is_explicit_default(self, path: str) -> bool:
        """Tell whether the root ``path`` is "/" because a file of NVIDIA's plugin spells out that
        default, as most such files do.
        """
        place = self._places.get(path)
        section, _, name = path.partition(".")
        return (
            place is not None and place.in_plugin_document and self._accepted[section][name] == "/"
        )

    def _check_version(self, version: yaml.Node | None, first_line: int) -> None:
        if version is None:
            self._report(first_line, "version", f"missing, add the line version: {VERSION}")
        elif version.value != VERSION:
            self._report(version.line, "version", f"expected {VERSION}, got {shown(version.value)}")

    def _read_section(
        self, section: schema.Struct, members: Mapping[str, yaml.Node], prefix: str
    ) -> dict[str, Any]:
        """Return the accepted values of ``members``, the keys below a section; ``prefix`` is the
        section's dotted path with a dot at the end, or empty.
        """
        known = schema.keys(section)
        accepted: dict[str, Any] = {}
        for name, node in members.items():
            if name not in known:
                if self._plugin_keys is None and self._report_removed(node, prefix + name):
                    continue
                # beyond the number that is shown, problems are only counted
                advice = (
                    "" if self._problems.only_counts_more else f", {_advice(name, known, prefix)}"
                )
                self._report(node.line, prefix + shown_key(name), f"unknown key{advice}")
                continue
            found = self._read_value(known[name], node, prefix + name)
            if found is not None:
                accepted[name] = found
        return accepted

    def _report_removed(self, node: yaml.Node, path: str) -> bool:
        """Add a message for ``path`` if it is a key of an earlier version, or for each key in it if
        it is a section of such keys.

        Returns:
            False if it is neither, so that the key is unknown.
        """
        all_former = former_keys()  # path of a key → what the agent does now
        if instead := all_former.get(path):
            self._removed_key_warnings.append(
                f"{self._file}:{node.line}: {path}: is gone: {instead}; remove the line"
            )
            return True
        former = {key.removeprefix(f"{path}.") for key in all_former if key.startswith(f"{path}.")}
        members = {} if node.value is None else node.value
        if not former or not isinstance(members, dict):
            return False
        for name, member in members.items():
            if not self._report_removed(member, f"{path}.{name}"):
                self._report(
                    member.line,
                    f"{path}.{shown_key(name)}",
                    f"unknown key, {suggestion(name, former)}",
                )
        return True

    def _read_value(self, key: schema.Key, node: yaml.Node, path: str) -> Any:
        """Return the accepted value; None if it was refused."""
        if key.section is not None:
            return self._read_subsection(key.section, node, path)
        if key.items is not None:
            return self._read_list(key, key.items, node, path)
        value = _plain_value(node)
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

    def _read_subsection(
        self, section: schema.Struct, node: yaml.Node, path: str
    ) -> dict[str, Any] | None:
        # A section whose keys are all commented out has the value null.
        members = {} if node.value is None else node.value
        if not isinstance(members, dict):
            self._refuse_below(path, node, f"expected a mapping, got {shown(node.value)}")
            return None
        for key in schema.keys(section).values():
            # `can_be_omitted_with`: of a list that must not be empty, the section that can be left
            # out instead
            if (
                key.can_be_omitted_with
                and key.name not in members
                # nor has a source of lower priority an item of the list
                and f"{path}.{key.name}[0].name" not in self._places
            ):
                self._report(
                    node.line,
                    f"{path}.{key.name}",
                    f"missing; list what is shared, or leave {key.can_be_omitted_with} out",
                )
        return self._read_section(section, members, path + ".")

    def _read_list(
        self, key: schema.Key, items: schema.Struct, node: yaml.Node, path: str
    ) -> list[dict[str, Any]] | None:
        """Return the accepted items of a list of mappings, ``items`` being the class of one; None
        if it was refused.
        """
        if not isinstance(node.value, list):
            self._refuse_below(path, node, f"expected a list, got {shown(node.value)}")
            return None
        for stale in [known for known in self._places if known.startswith(f"{path}[")]:
            del self._places[stale]  # this list replaces that of a source with lower priority
        if not node.value and key.can_be_omitted_with:
            self._report(
                node.line,
                path,
                "expected at least one resource, got an empty list; leave "
                f"{key.can_be_omitted_with} out to share nothing",
            )
        if not node.value:
            self._places[path] = self._place(node.line, path)
        needed = [
            member.name
            for member in schema.keys(items).values()
            if member.default is msgspec.NODEFAULT
        ]
        found = [
            self._read_item(items, item, f"{path}[{index}]")
            for index, item in enumerate(node.value)
        ]
        if key.find_contradicted is not None:
            self._refuse_contradictions(path, node.value, found, key.find_contradicted)
        return [item for item in found if all(name in item for name in needed)]

    def _read_item(self, items: schema.Struct, node: yaml.Node, path: str) -> dict[str, Any]:
        """Return the accepted keys of one item, without missing and wrong ones."""
        needed = [key for key in schema.keys(items).values() if key.default is msgspec.NODEFAULT]
        if not isinstance(node.value, dict):
            self._refuse_below(
                path,
                node,
                f"expected {' and '.join(key.name for key in needed)}, got {shown(node.value)}",
            )
            return {}
        found = self._read_section(items, node.value, path + ".")
        for key in needed:
            if key.name not in node.value:
                self._refuse_below(
                    f"{path}.{key.name}", node, f"missing, expected {key.expectation}"
                )
        self._complete_names(items, node.value, found, path)
        return found

    def _refuse_contradictions(
        self,
        path: str,
        nodes: list[yaml.Node],
        found: list[dict[str, Any]],
        find_contradicted: Callable[
            [Mapping[str, Any], Sequence[Mapping[str, Any]]], schema.Contradicted | None
        ],
    ) -> None:
        """Report each item of the list at ``path`` that contradicts an earlier one.

        Args:
            path: the dotted path of the list.
            nodes: the items in the file.
            found: the accepted keys of the same items.
            find_contradicted: returns the earlier item that an item contradicts, such as one of the
                same name.
        """
        lines = [_line_of(node, "name") for node in nodes]
        for index, entry in enumerate(found):
            if other := find_contradicted(entry, found[:index]):
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
        """Add the domain to resource names in ``found`` without one, and refuse invalid names."""
        for key in schema.keys(items).values():
            if key.complete_name is None or key.name not in found:
                continue
            if found[key.name]:
                found[key.name], problem = key.complete_name(found[key.name])
                if problem:
                    self._report(members[key.name].line, f"{path}.{key.name}", problem)
            elif key.default is msgspec.NODEFAULT:
                self._report(
                    members[key.name].line,
                    f"{path}.{key.name}",
                    f'expected {key.expectation}, got ""',
                )

    def _add_option(self, option: options.Option, text: str, place: Place) -> None:
        value = option.convert(text) if option.convert is not None else text
        if value is None:
            self._refuse(option.path, place, f"expected {option.expected}, got {shown(text)}")
            return
        self._refused.discard(option.path)
        # an option may also set keys of families
        for path in (option.path, *options.keys_also_set(option.path)):
            if option.path not in self._refused:  # otherwise the error is already reported
                self._add_text(path, value, place)

    def _add_text(self, path: str, text: str, place: Place) -> None:
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
        """Refuse a whole section, and report no further errors for the values in it."""
        self._refused.update(
            known for known in schema.value_paths() if known.startswith(f"{path}.")
        )
        self._refused.add(path)
        self._report(node.line, path, text)

    def _report_at(self, path: str, place: Place, text: str) -> None:
        self._problems.add(
            place.prefix,
            "" if place.prefix_names_key else place.plugin_key or path,
            text,
            line=place.line,
        )

    def _report(self, line: int, path: str, text: str) -> None:
        self._report_at(path, self._place(line, path), text)

    def _place(self, line: int, path: str) -> Place:
        """Return the place of the key ``path`` in the current document."""
        where = f"{self._file}:{line}"
        return Place(
            origin=where,
            prefix=where,
            line=line,
            plugin_key=("" if self._plugin_keys is None else _plugin_key(self._plugin_keys, path)),
            in_plugin_document=self._plugin_keys is not None,
        )


def _advice(name: str, known: Iterable[str], prefix: str) -> str:
    """Return the remedy for the unknown key ``name`` below ``prefix``."""
    if prefix:
        return suggestion(name, known)
    document = families.plugin_document()
    if name in document.plugin_only_keys:
        return (
            f"a configuration of NVIDIA's plugin is given as {options.NVIDIA_CONFIG_FLAG}, or "
            f"goes below {document.section}"
        )
    return suggestion(name, ("version", *known, document.section))


def _plain_value(node: yaml.Node) -> Any:
    """Return the value without line numbers.

    Lists and mappings inside a list stay nodes, because no key accepts them there.
    """
    if isinstance(node.value, list):
        return [item if isinstance(item.value, dict | list) else item.value for item in node.value]
    return node.value


def _line_of(node: yaml.Node, name: str) -> int:
    """Return the line of the member ``name`` of ``node``; the line of ``node`` without one."""
    return (
        node.value[name].line if isinstance(node.value, dict) and name in node.value else node.line
    )


def _plugin_key(keys: Mapping[str, str], path: str) -> str:
    """Translate our ``path`` into a path in NVIDIA's document, by the longest prefix of it that
    ``keys`` has.
    """
    known, rest = path, ""
    while known and known not in keys:
        cut = max(known.rfind("."), known.rfind("["))
        known, rest = known[: max(cut, 0)], known[max(cut, 0) :] + rest
    return keys.get(known, "") + rest


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Set the values of ``source`` in ``target``, section by section; a list replaces a list."""
    for name, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value
