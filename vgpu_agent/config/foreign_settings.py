"""Environment variables and flags of the replaced plugins that ask for something this agent does
not do.

A DaemonSet that is moved over with its environment and its arguments keeps them. Some mean the same
here and are read by `options`, the others are ignored. What is ignored must not remain unnoticed.
So each variable that would have had an effect, and each such flag, is named once at the start, with
the remedy. Each family declares its own. Called by `load` for its warnings, and by `options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config import families
from vgpu_agent.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings

_TRUE, _FALSE = frozenset({"1", "t", "true"}), frozenset({"0", "f", "false"})


def _always(_: Settings) -> bool:
    return True


class ForeignVariable(msgspec.Struct, frozen=True):
    """One variable that is not followed.

    Attributes:
        name: the variable.
        in_force: returns the value in force, in the variable's own words; the variable is reported
            only where it differs.
        instead: the remedy, as the end of the sentence.
        concerns: tells whether the variable would have had an effect with these settings; asked
            only where its family is on.
    """

    name: str
    in_force: Callable[[Settings], str]
    instead: str
    concerns: Callable[[Settings], bool] = _always


class ForeignFlag(msgspec.Struct, frozen=True):
    """One flag that is accepted and not followed.

    Attributes:
        name: the flag, with two dashes.
        instead: why it is not needed, or the remedy, as the end of the sentence.
        asks_nothing: the value with which it asks for nothing; an empty one does so, too.
        in_force: returns the value in force, where settings decide on it; a flag with this value
            asks for nothing. Used instead of ``asks_nothing``.
    """

    name: str
    instead: str
    asks_nothing: str = ""
    in_force: Callable[[Settings], str] | None = None


# Our own flags of earlier versions, which an upgraded DaemonSet may still have.
_FORMER_FLAGS = (
    ForeignFlag("--sysfs-root", "sysfs is read at /sys; remove the flag", asks_nothing="/sys"),
)


def names() -> set[str]:
    """List the variables of all families that are not followed."""
    return {variable.name for family in families.DECLARED for variable in family.ignored_variables}


def flags() -> dict[str, ForeignFlag]:
    """Return the flags of all families that are not followed, and our own former ones, by name."""
    ignored = (flag for family in families.DECLARED for flag in family.ignored_flags)
    return {flag.name: flag for flag in (*_FORMER_FLAGS, *ignored)}


def without_effect(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that differs from the value in force; an empty variable
    counts as not set.
    """
    for variable in (
        variable
        for family in families.switched_on(settings)
        for variable in family.ignored_variables
    ):
        value = environment.get(variable.name, "")
        if (
            value
            and variable.concerns(settings)
            and _plain(value) != _plain(variable.in_force(settings))
        ):
            yield (
                f"environment variable {variable.name}: {shown(value)} has no effect here; "
                f"{variable.instead}"
            )


def flags_without_effect(settings: Settings, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each flag of `flags` among those that were ``given``."""
    known = flags()
    for name, value in given.items():
        if not value or (flag := known.get(name)) is None:
            continue
        # `quiet`: the value with which the flag asks for nothing; without one, each is reported
        quiet = flag.in_force(settings) if flag.in_force else flag.asks_nothing
        if not quiet or _plain(value) != _plain(quiet):
            yield f"{name}: {shown(value)} has no effect here; {flag.instead}"


def _plain(value: str) -> str:
    """Return one form of equivalent values: ``True`` and ``1`` (Go's ParseBool), a path with and
    without a trailing slash.
    """
    word = value.strip().lower()
    if word in _TRUE:
        return "true"
    if word in _FALSE:
        return "false"
    return value.strip().rstrip("/") or "/"
