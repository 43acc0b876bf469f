"""The choice among several configurations of NVIDIA's plugin, as that plugin's config-manager makes
it for a node. Its settings are the section ``namedConfig``.

The configurations are the keys of a ConfigMap, mounted as a directory. A label of the Node names
one of them (nvidia §13). `agent` follows label and directory, and asks `choose` whenever one of
them may have changed. A key is thus the name of a file in the directory.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from collections.abc import Callable, Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.documents import Choice
from vgpu_agent.config.problems import shown
from vgpu_agent.config.types import OptionalPath

DEFAULT_KEY = "default"  # the key that the fallback strategy `named` looks for
_KEYS_SHOWN = 10  # in a message, at most

# Kubernetes: an optional DNS prefix and a slash, then up to 63 characters.
_LABEL = (
    r"\A([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"
)


class NamedConfig(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several v1 configurations of NVIDIA's plugin, of which a label of the Node chooses one."""

    directory: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Directory with one file for each configuration, usually a mounted ConfigMap. "
                "Empty: off."
            )
        ),
    ] = ""
    label: Annotated[
        str,
        Meta(
            pattern=_LABEL,
            extra={"expected": "the name of a label"},
            description="The label of the Node whose value is the name of a file in the directory.",
        ),
    ] = "nvidia.com/device-plugin.config"
    default: Annotated[
        str,
        Meta(description="The file for nodes without the label. Empty: fallbackStrategies decide."),
    ] = ""
    fallback_strategies: Annotated[
        tuple[Literal["named", "single", "empty"], ...],
        Meta(
            extra={"expected": "a list of named, single and empty"},
            description=(
                "For nodes without the label, in this order. named: the file `default`. single: "
                "the only file. empty: none."
            ),
        ),
    ] = ("named", "single", "empty")


def choose(settings: NamedConfig, label_value: str, keys: Collection[str]) -> Choice:
    """Choose the configuration for a node with ``label_value`` (empty:
    no label) where the configurations ``keys`` exist; nvidia §13.

    A label that names no configuration chooses nothing: NVIDIA's config-manager ends with an error,
    and its README says that the label is skipped. Neither is right for a node that serves pods, so
    it becomes a problem that operators see.
    """
    if label_value:
        if label_value in keys:
            return Choice(label_value, reason=f"label {settings.label}={label_value}")
        return Choice(
            problem=_missing(
                settings,
                f"label {settings.label} of this node",
                label_value,
                keys,
                "correct the label",
            )
        )
    if settings.default:
        if settings.default in keys:
            return Choice(settings.default, reason="namedConfig.default")
        return Choice(
            problem=_missing(
                settings, "namedConfig.default", settings.default, keys, "correct the default"
            )
        )
    for strategy in settings.fallback_strategies:
        found = _STRATEGIES[strategy](keys)
        if found is not None:
            return Choice(found, reason=f"namedConfig.fallbackStrategies: {strategy}")
    tried = ", ".join(settings.fallback_strategies) or "none"
    return Choice(
        problem=(
            f"this node has no label {settings.label}, there is no namedConfig.default, and none "
            f"of namedConfig.fallbackStrategies ({tried}) fits {settings.directory} (which has "
            f"{_listed(keys)}); label the node with one of them"
        )
    )


def _named(keys: Collection[str]) -> str | None:
    return DEFAULT_KEY if DEFAULT_KEY in keys else None


def _single(keys: Collection[str]) -> str | None:
    return next(iter(keys)) if len(keys) == 1 else None


def _empty(_keys: Collection[str]) -> str | None:
    return ""  # no configuration, which is a valid choice


# strategy → the keys → the chosen one; None where the strategy does not apply
_STRATEGIES: dict[str, Callable[[Collection[str]], str | None]] = {
    "named": _named,
    "single": _single,
    "empty": _empty,
}


def _missing(settings: NamedConfig, who: str, name: str, keys: Collection[str], remedy: str) -> str:
    """Return the sentence that ``who``, a label or a setting, names a configuration that is not
    there.
    """
    return (
        f"{who} names the configuration {shown(name)}, but {settings.directory} has "
        f"{_listed(keys)}; add it to the ConfigMap or {remedy}"
    )


def _listed(keys: Collection[str]) -> str:
    if not keys:
        return "none"
    first = sorted(keys)[:_KEYS_SHOWN]
    return ", ".join(first) + (
        f" and {len(keys) - len(first)} more" if len(keys) > len(first) else ""
    )
