"""Settings from their four sources, each value with where it came from, or every problem at once.

Called by `cli` before anything else is built (a wrong configuration ends the command before a socket is opened), and by `watch` for new
content of the file. Defaults < file < environment < flags; an empty variable counts as not set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from typing import TYPE_CHECKING

from vgpu_agent.config import checks, foreign_variables, options
from vgpu_agent.config.problems import shown
from vgpu_agent.config.reading import Reading
from vgpu_agent.config.suggestions import nearest
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vgpu_agent.config.settings import Settings

LARGEST_FILE_BYTES = 1024 * 1024


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
    reading = Reading()
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


def _warnings(settings: Settings, environment: Mapping[str, str]) -> Iterable[str]:
    for name in options.unknown_variables(environment):
        guess = options.PREFIX + near if (near := nearest(name.removeprefix(options.PREFIX), options.our_names())) else None
        yield f"environment variable {name}: unknown and ignored" + (f", did you mean {guess}?" if guess else "")
    yield from foreign_variables.without_effect(settings, environment)
    for path, word in checks.doubtful_xids(settings):
        yield f'{path}: {shown(word)} is ignored; expected XID numbers separated by commas, "all" or "xids"'
