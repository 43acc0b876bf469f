"""The choice among several named configurations for a node: that of NVIDIA's config-manager, as a function.

The configurations are the keys of a ConfigMap, mounted as a directory. A label of the Node names one of them (nvidia
§13). Called by `agent.named_configuration` whenever the label or the directory may have changed. Reads of the
directory are here as well, because the rule for keys is part of the choice.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent.config.problems import shown
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

DEFAULT_KEY = "default"  # the key that the fallback strategy `named` looks for
_KEYS_SHOWN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One answer to "which configuration?".

    Attributes:
        key: the configuration's name; empty for none at all, which is valid where ``problem`` is empty.
        reason: the reason of the choice, for people.
        problem: why nothing could be chosen, with the remedy; the settings in force stay.
    """

    key: str = ""
    reason: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Shelf:
    """The configurations there are, and what chooses among them where no label does; fields as the keys of ``namedConfig``."""

    directory: str
    label: str
    default: str
    fallback_strategies: Sequence[str]

    def path(self, key: str) -> str:
        """The file of the configuration ``key``."""
        return os.path.join(self.directory, key)


def choose(shelf: Shelf, label_value: str, keys: Collection[str]) -> Choice:
    """Choose the configuration for a node with ``label_value`` (empty: no label) where ``keys`` exist; nvidia §13.

    A label that names no configuration chooses nothing: NVIDIA's ends with an error, and its README says that the
    label is skipped. Neither is right for a node that serves pods, so it is a visible problem.
    """
    if label_value:
        if label_value in keys:
            return Choice(label_value, f"label {shelf.label}={label_value}")
        return Choice(problem=_missing(shelf, f"label {shelf.label} of this node", label_value, keys, "correct the label"))
    if shelf.default:
        if shelf.default in keys:
            return Choice(shelf.default, "namedConfig.default")
        return Choice(problem=_missing(shelf, "namedConfig.default", shelf.default, keys, "correct the default"))
    for strategy in shelf.fallback_strategies:
        found = _STRATEGIES[strategy](keys)
        if found is not None:
            return Choice(found, f"namedConfig.fallbackStrategies: {strategy}")
    tried = ", ".join(shelf.fallback_strategies) or "none"
    return Choice(
        problem=f"this node has no label {shelf.label}, there is no namedConfig.default, and none of namedConfig.fallbackStrategies "
        f"({tried}) fits {shelf.directory} (which has {_listed(keys)}); label the node with one of them"
    )


def keys_in(directory: str) -> frozenset[str]:
    """The keys of the ConfigMap that is mounted at ``directory``: its files, through links, without the kubelet's own entries (``..data``).

    Blocks.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return frozenset(entry.name for entry in entries if not entry.name.startswith("..") and Path(entry).is_file())
    except OSError as err:
        raise ConfigError(
            [f"namedConfig.directory: {directory} cannot be read: {err.strerror}; mount the ConfigMap with the configurations there"]
        ) from err


def _named(keys: Collection[str]) -> str | None:
    return DEFAULT_KEY if DEFAULT_KEY in keys else None


def _single(keys: Collection[str]) -> str | None:
    return next(iter(keys)) if len(keys) == 1 else None


def _empty(_keys: Collection[str]) -> str | None:
    return ""


_STRATEGIES: dict[str, Callable[[Collection[str]], str | None]] = {"named": _named, "single": _single, "empty": _empty}


def _missing(shelf: Shelf, who: str, name: str, keys: Collection[str], remedy: str) -> str:
    return f"{who} names the configuration {shown(name)}, but {shelf.directory} has {_listed(keys)}; add it to the ConfigMap or {remedy}"


def _listed(keys: Collection[str]) -> str:
    if not keys:
        return "none"
    first = sorted(keys)[:_KEYS_SHOWN]
    return ", ".join(first) + (f" and {len(keys) - len(first)} more" if len(keys) > len(first) else "")
