"""``knownMigGeometries`` of Volcano's ConfigMap:
into which groups of MIG instances a GPU of a model may be divided.

Scheduler and agent read the same text, and an annotation names an instance by its position in it
(volcano-vgpu §4.3, §5.1). So it is taken whole or not at all: in a part of it, a position would
mean another instance. Called by `files`; the family `volcano-vgpu` works with the result.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config.problems import shown, shown_key

if TYPE_CHECKING:
    from collections.abc import Callable

    Problem = Callable[[str, str], None]  # takes (path, the expectation and the value found)

# The group in ``GPU-…[group-position]``, without the characters at which annotations are split.
_GROUP = re.compile(r"[^-\[\],;:\s]{1,63}\Z")
_PROFILE = re.compile(r"([0-9]+c\.)?[0-9]+g\.[0-9]+gb(\+[a-z0-9.]+)*\Z", re.ASCII)
_MAX_INSTANCES = 8  # of one GPU, by NVML
_LARGEST_MIB = 2**31 - 1
_MAX_ENTRIES = 256  # of any list; the API server takes a megabyte


class MigProfile(msgspec.Struct, frozen=True):
    """``count`` instances of one profile; ``memory_mib`` is the scheduler's figure for each,
    a little above the driver's.
    """

    name: str
    memory_mib: int
    count: int


class MigGroup(msgspec.Struct, frozen=True):
    """One way to divide a GPU; the order of the profiles counts."""

    name: str
    profiles: tuple[MigProfile, ...]


class ModelGeometries(msgspec.Struct, frozen=True):
    """The groups for GPUs whose product name has one of ``models`` in it,
    in the order in which a scheduler tries them.
    """

    models: tuple[str, ...]
    groups: tuple[MigGroup, ...]


def read_geometries(path: str, value: Any, problem: Problem) -> tuple[ModelGeometries, ...]:
    """Read the geometries of ``value``. After a call of ``problem`` the result is not to be used.

    Args:
        path: its place in the file.
        value: plain lists and mappings.
        problem: takes each fault (`Problem`).
    """
    if value is None or value == []:
        return ()
    return tuple(
        _model(f"{path}[{place}]", entry, problem)
        for place, entry in enumerate(_list(path, value, problem))
    )


def _model(path: str, entry: Any, problem: Problem) -> ModelGeometries:
    members = _members(path, entry, ("models", "allowedGeometries"), problem)
    models = _list(f"{path}.models", members.get("models"), problem)
    for place, model in enumerate(models):
        if not isinstance(model, str) or not model:
            problem(
                f"{path}.models[{place}]",
                f"expected a part of the GPU's product name, got {shown(model)}",
            )
    groups = tuple(
        _group(f"{path}.allowedGeometries[{place}]", group, problem)
        for place, group in enumerate(
            _list(f"{path}.allowedGeometries", members.get("allowedGeometries"), problem)
        )
    )
    for name, count in collections.Counter(group.name for group in groups).items():
        if count > 1:
            problem(
                f"{path}.allowedGeometries",
                f"{count} groups are called {shown(name)}; give each a name of its own",
            )
    return ModelGeometries(tuple(model for model in models if isinstance(model, str)), groups)


def _group(path: str, entry: Any, problem: Problem) -> MigGroup:
    members = _members(path, entry, ("group", "geometries"), problem)
    name = members.get("group")
    if not isinstance(name, str) or not _GROUP.match(name):
        problem(
            f"{path}.group",
            f"expected a name without '-', brackets, blanks and ',;:', got {shown(name)}",
        )
    profiles = tuple(
        _profile(f"{path}.geometries[{place}]", profile, problem)
        for place, profile in enumerate(
            _list(f"{path}.geometries", members.get("geometries"), problem)
        )
    )
    if sum(profile.count for profile in profiles) > _MAX_INSTANCES:
        problem(
            f"{path}.geometries",
            f"expected instances, at most {_MAX_INSTANCES}, got "
            f"{sum(profile.count for profile in profiles)}",
        )
    return MigGroup(str(name), profiles)


def _profile(path: str, entry: Any, problem: Problem) -> MigProfile:
    members = _members(path, entry, ("name", "memory", "count"), problem)
    name = members.get("name")
    if not isinstance(name, str) or not _PROFILE.match(name):
        problem(f"{path}.name", f"expected a MIG profile such as 1g.10gb, got {shown(name)}")
    memory = _number(
        f"{path}.memory", members.get("memory"), _LARGEST_MIB, "MiB of one instance", problem
    )
    return MigProfile(
        str(name),
        memory,
        _number(f"{path}.count", members.get("count"), _MAX_INSTANCES, "instances", problem),
    )


def _number(path: str, value: Any, most: int, what: str, problem: Problem) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return value
    problem(path, f"expected a number of {what}, 1 to {most}, got {shown(value)}")
    return 0


def _list(path: str, value: Any, problem: Problem) -> list[Any]:
    if isinstance(value, list) and value and len(value) <= _MAX_ENTRIES:
        return value
    problem(path, f"expected a list of 1 to {_MAX_ENTRIES} entries, got {shown(value)}")
    return []


def _members(path: str, entry: Any, known: tuple[str, ...], problem: Problem) -> dict[str, Any]:
    if not isinstance(entry, dict):
        problem(path, f"expected a mapping of {', '.join(known)}, got {shown(entry)}")
        return {}
    for name in entry:
        if name not in known:
            problem(f"{path}.{shown_key(name)}", f"unknown key; expected one of {', '.join(known)}")
    return entry
