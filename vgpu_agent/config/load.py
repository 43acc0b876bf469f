"""Load the settings from their sources, each value with its origin; all problems are in one error.

Called by `cli` before anything else is built (a wrong configuration ends the command before a
socket is opened), by `watch` for new content of the files, by `agent.named_configuration` for
the file that a label of the Node chooses, and by `convert`, which translates a file of NVIDIA's
plugin. Defaults < file of NVIDIA's plugin < our file < environment < flags; an empty variable
counts as not set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config import checks, collisions, families, foreign_settings, options, yaml
from vgpu_agent.config.documents import Translation
from vgpu_agent.config.problems import shown
from vgpu_agent.config.reading import Reading
from vgpu_agent.config.suggestions import nearest
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.config.settings import Settings

LARGEST_FILE_BYTES = 1024 * 1024


class Sources(msgspec.Struct, frozen=True):
    """The input of `load`, kept so that `watch` can load again with new content of the files.

    To change to another configuration file of NVIDIA's plugin at run time, replace `flags` with a
    mapping in which `options.NVIDIA_CONFIG_FLAG` (``--config-file``) names that file, or "" for
    none. Then call `load_sources`, or pass to `watch.changes` a function that returns the current
    sources.

    Attributes:
        flags: flag → text, as typed: ``{"--listen": ":9394"}``.
        environment: those of the process's variables that concern us; the others may hold secrets.
        file: the configuration file as the user named it, None without one.
    """

    flags: Mapping[str, str]
    environment: Mapping[str, str]
    file: str | None


class Contents(msgspec.Struct, frozen=True):
    """The content of the files that were read.

    Attributes:
        own: the content of our file, None without one.
        nvidia_file: the configuration file of NVIDIA's plugin, "" without one.
        nvidia: its content, None without one.
    """

    own: bytes | None = None
    nvidia_file: str = ""
    nvidia: bytes | None = None

    @property
    def digest(self) -> str:
        """A digest that differs between different contents."""
        digest = hashlib.sha256(os.fsencode(self.nvidia_file))
        for content in (self.own, self.nvidia):
            digest.update(b"-" if content is None else b"%d:%b" % (len(content), content))
        return digest.hexdigest()


# A dataclass, because its representation leaves out the content of files.
@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that can be used.

    Attributes:
        settings: the values.
        origins: the dotted path of each setting → where its value comes from: ``default``,
            ``config.yaml:12``, ``environment X``, ``flag --x`` or ``derived from simulate``.
        warnings: sentences about ignored or doubtful settings; not errors.
        sources: the sources it was made of.
        contents: the content of the files.
        collisions: sentences about conflicts between families (`collisions`). ``config check``
            refuses them; an agent starts, logs them and does not offer the resources in conflict.
    """

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    sources: Sources
    contents: Contents = dataclasses.field(repr=False)
    collisions: tuple[str, ...] = ()

    @property
    def files(self) -> str:
        """The files that were read, for people; "" for none."""
        return " and ".join(file for file in (self.sources.file, self.contents.nvidia_file) if file)


def load(flags: Mapping[str, str], environment: Mapping[str, str]) -> Loaded:
    """Load the configuration of this process.

    Args:
        flags: the flags that were given, with their texts, as `options.given` returns them.
        environment: ``os.environ``, or what a test puts in its place.

    Raises:
        ConfigError: a file cannot be read, or something in it, in the environment or in the flags
            is wrong; one sentence each.
    """
    file = flags.get(options.CONFIG_FLAG, environment.get(options.CONFIG_VARIABLE, "")) or None
    return load_sources(
        Sources(flags=dict(flags), environment=options.relevant(environment), file=file)
    )


def log_format(flags: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the format of the log that a configuration with errors asks for; never raises. An
    unknown format, or one in a file that cannot be read, counts as the default.
    """
    key = "log.format"
    text = next(
        (
            flags[flag]
            for option in options.options()
            if option.path == key
            for flag in option.flags
            if flag in flags
        ),
        "",
    ) or options.text_of(key, environment)
    file = flags.get(options.CONFIG_FLAG, environment.get(options.CONFIG_VARIABLE, ""))
    if not text and file:
        with contextlib.suppress(ConfigError):
            text = _text_at(yaml.read(read(file))[0], "log", "format")
    return "console" if text == "console" else "json"


def load_sources(sources: Sources) -> Loaded:
    """Load like `load`, but from sources that were put together before. Blocks.

    Raises:
        ConfigError: as for `load`.
    """
    return load_text(sources, None if sources.file is None else read(sources.file))


def load_text(sources: Sources, own: bytes | None) -> Loaded:
    """Load like `load_sources`, but with the content of our file already read (None without one),
    which messages call ``sources.file``.

    Raises:
        ConfigError: as for `load`.
    """
    file = nvidia_file(sources, own)
    content = read(file, nvidia_file_named_by(sources)) if file else None
    return load_contents(sources, Contents(own=own, nvidia_file=file, nvidia=content))


def load_contents(sources: Sources, contents: Contents) -> Loaded:
    """Load like `load`, but with everything already read.

    Raises:
        ConfigError: as for `load`.
    """
    reading = Reading()  # takes one source after the other; a later one replaces earlier values
    root, faults = (None, []) if contents.own is None else yaml.read(contents.own)
    # the plugin's configuration ("document"): a file of its own, or a section of our file
    file, document = _nvidia_document(sources, contents, root)
    reading.add_plugin_document(file, document)
    if contents.own is not None and sources.file is not None:
        reading.add_file(sources.file, root, faults)
    reading.add_environment(sources.environment)
    reading.add_flags(sources.flags)
    # with simulated GPUs, settings for directories of the node (driver, devices, procfs, MPS,
    # state) that no source has set point into the directory of the simulation
    reading.derive_from_simulate()
    settings = reading.finish()
    document_warnings = [
        # after the line number: the key, which may be empty, and the sentence
        f"{file}:{warning.line}: " + ": ".join(filter(None, warning[1:]))
        for warning in document.warnings
    ]
    return Loaded(
        settings=settings,
        origins=reading.origins(settings),
        warnings=(
            *document_warnings,
            *reading.removed_key_warnings,
            *_warnings(settings, sources, contents),
        ),
        sources=sources,
        contents=contents,
        collisions=reading.collisions(settings),
    )


def nvidia_file(sources: Sources, own: bytes | None) -> str:
    """Return the path of the configuration file of NVIDIA's plugin; "" for none. ``own`` is the
    content of our file, which may name it.

    With ``namedConfig.directory`` only the flag names one: a label of the Node chooses the file,
    and the code that watches the label passes it as that flag. A mistake in our file is
    not reported here, but by `load_contents`.
    """
    if options.NVIDIA_CONFIG_FLAG in sources.flags:
        return sources.flags[options.NVIDIA_CONFIG_FLAG]
    root = None if own is None else yaml.read(own)[0]
    key = families.plugin_document().directory_key  # ``namedConfig.directory`` as a dotted path
    directory = options.text_of(key, sources.environment) or _text_at(root, *key.split("."))
    if directory:
        return ""
    if file := options.text_of("nvidiaConfigFile", sources.environment):
        return file
    file = _text_at(root, "nvidiaConfigFile")
    return file if file.startswith("/") else ""


def nvidia_file_named_by(sources: Sources) -> str:
    """Return the flag, the variable or the key that names the file of NVIDIA's plugin,
    if one does.
    """
    if options.NVIDIA_CONFIG_FLAG in sources.flags:
        return options.NVIDIA_CONFIG_FLAG
    return (
        options.NVIDIA_CONFIG_VARIABLE
        if options.text_of("nvidiaConfigFile", sources.environment)
        else "nvidiaConfigFile"
    )


def _text_at(root: yaml.Node | None, *path: str) -> str:
    """Return the text at that path of keys in a YAML document; "" where there is none."""
    node = root
    for name in path:
        node = node.value.get(name) if node is not None and isinstance(node.value, dict) else None
    return node.value if node is not None and isinstance(node.value, str) else ""


def _nvidia_document(
    sources: Sources, contents: Contents, root: yaml.Node | None
) -> tuple[str, Translation]:
    """Return the file of the configuration of NVIDIA's plugin, and that configuration translated
    into the agent's keys; both empty where there is none. ``root`` is the content of our file.
    """
    members = root.value if root is not None and isinstance(root.value, dict) else {}
    declared = families.plugin_document()
    # the key of our file under which such a configuration may stand
    section = members.get(declared.section)
    if contents.nvidia is not None:
        found = declared.translate_file(contents.nvidia)
        if section is None:
            return contents.nvidia_file, found
        problem = (
            f"is not read, because {sources.file}:{section.line} has a configuration of that "
            f"plugin as {declared.section}; keep one of them"
        )
        return contents.nvidia_file, msgspec.structs.replace(
            found, faults=(*found.faults, yaml.Fault(line=1, path="", text=problem))
        )
    if section is None or sources.file is None:
        return "", Translation()
    return sources.file, declared.translate_section(section)


def read(file: str, named_by: str = options.CONFIG_FLAG) -> bytes:
    """Return the content of ``file``, which ``named_by`` (a flag, a variable, a key) names.

    Raises:
        ConfigError: it cannot be read; chained to the OSError when there is one.
    """
    try:
        # O_NONBLOCK: a FIFO without a writer must not hang us
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise ConfigError([f"{file}: is {kind}; expected a YAML file"])
            with open(descriptor, "rb", closefd=False) as stream:
                content = stream.read(LARGEST_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        reason = err.strerror if isinstance(err, OSError) else "not a file name"
        raise ConfigError(
            [f"{file}: cannot be read: {reason}; give {named_by} an existing, readable file"]
        ) from err
    if len(content) > LARGEST_FILE_BYTES:
        raise ConfigError(
            [
                (
                    f"{file}: is larger than {LARGEST_FILE_BYTES} bytes; a configuration is "
                    "smaller, so check the path"
                )
            ]
        )
    return content


def _warnings(settings: Settings, sources: Sources, contents: Contents) -> Iterator[str]:
    for name in options.unknown_variables(sources.environment):
        guess = (
            options.PREFIX + near
            if (near := nearest(name.removeprefix(options.PREFIX), options.names_without_prefix()))
            else None
        )
        yield f"environment variable {name}: unknown and ignored" + (
            f", did you mean {guess}?" if guess else ""
        )
    # the variables and flags of replaced plugins that mean nothing here
    yield from foreign_settings.without_effect(settings, sources.environment)
    yield from foreign_settings.flags_without_effect(settings, sources.flags)
    for path, word in checks.doubtful_xids(settings):
        yield (
            f'{path}: {shown(word)} is ignored; expected XID numbers separated by commas, "all" or '
            '"xids"'
        )
    yield from checks.without_effect(settings)
    # families whose pods are spread over GPUs that other families could use
    yield from collisions.spreading_warnings(settings)
    for family in families.DECLARED:
        for flag in (
            flag for option in family.options for flag in option.flags if flag in sources.flags
        ):
            if not settings.is_on(family.name):
                yield f"{flag}: has no effect without the family; set {family.key}: true"
    if settings.nvidia_config_file and not contents.nvidia_file:
        yield (
            f"nvidiaConfigFile: {settings.nvidia_config_file} is not read, a configuration from "
            "namedConfig.directory takes its place"
        )
