"""Settings from their four sources, each value with where it came from, or every problem at once.

Called by `cli` before anything else is built (a wrong configuration ends the command before a socket is opened), and by `watch` for new
content of the file. Defaults < file < environment < flags; an empty variable counts as not set.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
import stat
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import checks, foreign_variables, options, schema, yaml
from vgpu_agent.config.problems import Problems, shown, shown_key
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LARGEST_FILE_BYTES = 1024 * 1024
VERSION = "v1"
DEFAULT_ORIGIN = "default"
SIMULATE_ORIGIN = "derived from simulate"

_LONGEST_GUESSED = 60


@dataclasses.dataclass(frozen=True)
class Sources:
    """What `load` was given, so that `watch` can do it again with new content of the file.

    Attributes:
        flags: what `options.given` returned.
        environment: those of the process's variables that concern us; the others may hold secrets.
        file: the configuration file as the user named it, None without one.
    """

    flags: Mapping[str, str]
    environment: Mapping[str, str]
    file: str | None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A configuration that can be used.

    Attributes:
        settings: the values.
        origins: for each path of `schema.values`: ``default``, ``config.yaml:12``, ``environment X``, ``flag --x`` or
            ``derived from simulate``.
        warnings: sentences about what was ignored; not errors.
        sources: what it was made of.
        digest: SHA-256 of the file's content, "" without a file.
    """

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    sources: Sources
    digest: str


def load(flags: Mapping[str, str], environment: Mapping[str, str]) -> Loaded:
    """The configuration of this process.

    Args:
        flags: the flags that were given, as from `options.given`.
        environment: ``os.environ``, or what a test puts in its place.

    Raises:
        ConfigError: the file cannot be read, or something in it, in the environment or in the flags is wrong; one sentence each.
    """
    file = flags.get(options.CONFIG_FLAG, environment.get(options.CONFIG_VARIABLE, "")) or None
    sources = Sources(dict(flags), options.relevant(environment), file)
    return load_content(sources, None if file is None else read(file))


def load_content(sources: Sources, content: bytes | None) -> Loaded:
    """As `load`, with the file's content already read; None without a file.

    Raises:
        ConfigError: as for `load`.
    """
    reading = _Reading()
    if content is not None and sources.file is not None:
        reading.take_file(sources.file, content)
    reading.take_environment(sources.environment)
    reading.take_flags(sources.flags)
    reading.derive_from_simulate()
    settings = reading.finish()
    return Loaded(
        settings=settings,
        origins=reading.origins(settings),
        warnings=tuple(_warnings(settings, sources.environment)),
        sources=sources,
        digest="" if content is None else digest_of(content),
    )


def read(file: str) -> bytes:
    """The content of ``file``.

    Raises:
        ConfigError: it cannot be read; chained to the OSError when there is one.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: a FIFO without a writer must not hang us
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise ConfigError([f"{file}: is {kind}; expected a YAML file"])
            with open(descriptor, "rb", closefd=False) as stream:
                content = stream.read(LARGEST_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        reason = err.strerror if isinstance(err, OSError) else "not a file name"
        raise ConfigError([f"{file}: cannot be read: {reason}; give {options.CONFIG_FLAG} an existing, readable file"]) from err
    if len(content) > LARGEST_FILE_BYTES:
        raise ConfigError([f"{file}: is larger than {LARGEST_FILE_BYTES} bytes; no configuration is, look whether it is the right file"])
    return content


def digest_of(content: bytes) -> str:
    """What `Loaded.digest` is made of."""
    return hashlib.sha256(content).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a value stands: for `Loaded.origins`, for the beginning of a sentence, and its line when it is in the file."""

    origin: str
    prefix: str
    line: int = 0

    @property
    def names_the_key(self) -> bool:
        """Whether the sentence needs no dotted path, because a flag or a variable says enough."""
        return self.line == 0


class _Reading:
    """One pass over all sources. State: what was accepted so far, where it stood, and what was wrong."""

    def __init__(self) -> None:
        self._accepted: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        self._refused: set[str] = set()
        self._problems = Problems()
        self._file = ""

    def take_file(self, file: str, content: bytes) -> None:
        """Accept what the file says."""
        self._file = file
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as err:
            line = content.count(b"\n", 0, err.start) + 1
            self._problems.add(f"{file}:{line}", "", f"is not UTF-8 (byte 0x{content[err.start]:02x}); save it as UTF-8", line=line)
            return
        root, faults = yaml.parse(text)
        for fault in faults:
            self._problem(fault.line, fault.path, fault.text)
        if root is None:
            # Not "all defaults": a write that was cut short must not switch sharing off under running pods.
            if not faults:
                self._problem(1, "version", f"missing, the file is empty; add the line version: {VERSION}")
            return
        if not isinstance(root.value, dict):
            self._problem(root.line, "", f"expected keys such as version: {VERSION}, got {shown(root.value)}")
            return
        members = dict(root.value)
        self._check_version(members.pop("version", None), root.line)
        self._accepted = self._section(Settings, members, "")

    def take_environment(self, environment: Mapping[str, str]) -> None:
        """Accept the variables of `options.OPTIONS`; an empty one counts as not set."""
        for option in options.OPTIONS:
            if value := environment.get(option.variable, ""):
                place = _Place(f"environment {option.variable}", f"environment variable {option.variable}")
                self._take_text(option.path, value, place)

    def take_flags(self, flags: Mapping[str, str]) -> None:
        """Accept the flags that were given, the empty ones too."""
        for option in options.OPTIONS:
            if option.flag in flags:
                self._take_text(option.path, flags[option.flag], _Place(f"flag {option.flag}", option.flag))

    def derive_from_simulate(self) -> None:
        """Let the roots that nobody set lie in the directory of simulated GPUs."""
        directory = self._accepted.get("simulate", "")
        if not directory:
            return
        for path, value in (
            ("gpu.driverRoot", directory),
            ("gpu.sysfsRoot", os.path.join(directory, "sys")),
            ("gpu.procRoot", os.path.join(directory, "proc")),
        ):
            if path not in self._places:
                self._set(path, value, _Place(SIMULATE_ORIGIN, self._places["simulate"].prefix, self._places["simulate"].line))

    def finish(self) -> Settings:
        """The settings.

        Raises:
            ConfigError: anything was wrong.
        """
        settings = msgspec.convert(self._accepted, Settings)
        for conflict in checks.conflicts(settings):
            if not any(path in self._refused for path, _ in conflict.blame):  # one mistake, one sentence
                path, text = next((blamed for blamed in conflict.blame if blamed[0] in self._places), conflict.blame[0])
                self._complain(path, self._places.get(path, _Place(DEFAULT_ORIGIN, DEFAULT_ORIGIN)), text)
        self._problems.raise_if_any()
        return settings

    def origins(self, settings: Settings) -> dict[str, str]:
        """Where each value of ``settings`` came from."""
        return {path: self._places[path].origin if path in self._places else DEFAULT_ORIGIN for path, _ in schema.values(settings)}

    def _check_version(self, version: yaml.Node | None, first_line: int) -> None:
        if version is None:
            self._problem(first_line, "version", f"missing, add the line version: {VERSION}")
        elif version.value != VERSION:
            self._problem(version.line, "version", f"expected {VERSION}, got {shown(version.value)}")

    def _section(self, section: schema.Struct, members: Mapping[str, yaml.Node], prefix: str) -> dict[str, Any]:
        known = schema.keys(section)
        accepted: dict[str, Any] = {}
        for name, node in members.items():
            if name not in known:
                advice = "" if self._problems.enough else f", {_suggestion(name, known, prefix)}"
                self._problem(node.line, prefix + shown_key(name), f"unknown key{advice}")
                continue
            found = self._value(known[name], node, prefix + name)
            if found is not None:
                accepted[name] = found
        return accepted

    def _value(self, key: schema.Key, node: yaml.Node, path: str) -> Any:
        """The accepted value, None when it was refused."""
        if key.section is not None:
            return self._subsection(key.section, node, path)
        if key.items is not None:
            return self._items(key.items, node, path)
        value = node.value
        place = _Place(f"{self._file}:{node.line}", f"{self._file}:{node.line}", node.line)
        try:
            accepted = key.accept(value)
        except schema.NotAcceptedError as err:
            self._refuse(path, place, f"expected {err}, got {shown(value)}")
            return None
        self._places[path] = place
        return accepted

    def _subsection(self, section: schema.Struct, node: yaml.Node, path: str) -> dict[str, Any] | None:
        members = {} if node.value is None else node.value  # a section whose keys are all commented out is an empty one
        if not isinstance(members, dict):
            self._refuse_below(path, node, f"expected a mapping, got {shown(node.value)}")
            return None
        if checks.RESOURCES_PATH.rpartition(".")[0] == path and "resources" not in members:
            self._problem(node.line, checks.RESOURCES_PATH, "missing; list what is shared, or leave timeSlicing out")
        return self._section(section, members, path + ".")

    def _items(self, items: schema.Struct, node: yaml.Node, path: str) -> list[dict[str, Any]] | None:
        if not isinstance(node.value, list):
            self._refuse_below(path, node, f"expected a list, got {shown(node.value)}")
            return None
        if not node.value:
            self._problem(node.line, path, "expected at least one resource, got an empty list; leave timeSlicing out to share nothing")
        accepted: list[dict[str, Any]] = []
        named: dict[str, int] = {}
        for index, item in enumerate(node.value):
            item_path = f"{path}[{index}]"
            if not isinstance(item.value, dict):
                self._refuse_below(item_path, item, f"expected name and replicas, got {shown(item.value)}")
                continue
            found = self._section(items, item.value, item_path + ".")
            for key in schema.keys(items).values():
                if key.default is msgspec.NODEFAULT and key.name not in item.value:
                    self._refuse_below(f"{item_path}.{key.name}", item, f"missing, expected {key.expectation}")
            if "name" in found:
                found["name"] = self._resource_name(found["name"], item.value["name"].line, f"{item_path}.name", named)
            if all(key.default is not msgspec.NODEFAULT or key.name in found for key in schema.keys(items).values()):
                accepted.append(found)
        return accepted

    def _resource_name(self, name: str, line: int, path: str, named: dict[str, int]) -> str:
        """The complete name; ``named`` remembers the line of each."""
        complete = checks.complete_resource_name(name)
        if problem := checks.resource_name_problem(complete):
            self._problem(line, path, problem)
        elif complete in named:
            self._problem(line, path, f"{shown(complete)} stands twice, first on line {named[complete]}; keep one of them")
        named.setdefault(complete, line)
        return complete

    def _take_text(self, path: str, text: str, place: _Place) -> None:
        key = schema.value_paths()[path]
        if key.is_path and text and "\0" not in text:
            text = os.path.abspath(text)  # a person on the command line means "from here"
        try:
            self._set(path, key.accept_text(text), place)
        except schema.NotAcceptedError as err:
            self._refuse(path, place, f"expected {err}, got {shown(text)}")

    def _set(self, path: str, value: Any, place: _Place) -> None:
        *sections, name = path.split(".")
        target = self._accepted
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
        self._places[path] = place
        self._refused.discard(path)

    def _refuse(self, path: str, place: _Place, text: str) -> None:
        self._refused.add(path)
        self._complain(path, place, text)

    def _refuse_below(self, path: str, node: yaml.Node, text: str) -> None:
        """Refuse a whole section; values that lie in it are not to be blamed for anything else."""
        self._refused.update(known for known in schema.value_paths() if known.startswith(f"{path}."))
        self._refused.add(path)
        self._problem(node.line, path, text)

    def _complain(self, path: str, place: _Place, text: str) -> None:
        self._problems.add(place.prefix, "" if place.names_the_key else path, text, line=place.line)

    def _problem(self, line: int, path: str, text: str) -> None:
        self._problems.add(f"{self._file}:{line}", path, text, line=line)


def _suggestion(name: str, known: Iterable[str], prefix: str) -> str:
    known = known if prefix else ("version", *known)
    if guess := _nearest(name, known):
        return f"did you mean {guess}?"
    # A key in the wrong section is the mistake that NVIDIA's plugin swallows (nvidia contract §2, its issue 1433).
    if elsewhere := [path for path in _paths_everywhere() if path.rpartition(".")[2] == name]:
        return f"did you mean {elsewhere[0]}?"
    return f"expected {', '.join(known)}"


def _paths_everywhere() -> list[str]:
    sections = {path.rpartition(".")[0] for path in schema.value_paths()} - {""}
    return [*schema.value_paths(), *sorted(sections)]


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that a person who wrote ``name`` probably meant; case, ``-`` and ``_`` count for nothing."""
    if len(name) > _LONGEST_GUESSED:
        return None
    folded = {_folded(word): word for word in known}
    found = difflib.get_close_matches(_folded(name), folded, n=1, cutoff=0.7)
    return folded[found[0]] if found else None


def _folded(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def _warnings(settings: Settings, environment: Mapping[str, str]) -> Iterable[str]:
    for name in options.unknown_variables(environment):
        guess = options.PREFIX + near if (near := _nearest(name.removeprefix(options.PREFIX), options.our_names())) else None
        yield f"environment variable {name}: unknown and ignored" + (f", did you mean {guess}?" if guess else "")
    yield from foreign_variables.without_effect(settings, environment)
    for path, word in checks.doubtful_xids(settings):
        yield f'{path}: {shown(word)} is ignored; expected XID numbers separated by commas, "all" or "xids"'
