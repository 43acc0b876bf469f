"""The configuration files of volcano-vgpu-device-plugin, read as they are,
so that they need no rewriting to change over.

Two texts: ``device-config.yaml`` from the ConfigMap ``volcano-vgpu-device-config``, and the mounted
``config.json`` of ``volcano-vgpu-node-config`` (volcano-vgpu §5). Each becomes an `Overlay` over
`settings.VolcanoVgpu`, and a list of its problems. The replaced plugin silently drops a whole file
for one wrong type (volcano-vgpu D23). Here a wrong value costs that value only, and is named with
its key. Called by `agent` at start and whenever a text has changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import schema, yaml
from vgpu_agent.config.problems import shown, shown_key
from vgpu_agent.families.volcano_vgpu.geometries import ModelGeometries, read_geometries
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

DEVICE_CONFIG = "device-config.yaml"
NODE_CONFIG = "config.json"
CONFIG_MAP = "volcano-vgpu-device-config"  # with the first of the two (volcano-vgpu §5.1)
NODE_CONFIG_MAP = "volcano-vgpu-node-config"  # from which the second is mounted
# the second one is where Volcano's own manifests put the ConfigMap
NAMESPACES = ("kube-system", "volcano-system")

HIDDEN = "filterdevices"
GEOMETRIES = "knownMigGeometries"

_TOP = "nvidia"
_NODES = "nodeconfig"
# As many problems as a log line can carry; a megabyte of junk must not become a megabyte of log.
_MOST_PROBLEMS = 20
_MOST_HIDDEN = 256

# Key of the file → attribute of the settings.
_DEVICE_KEYS = {
    "resourceCountName": "number_resource",
    "resourceMemoryName": "memory_resource",
    "resourceCoreName": "cores_resource",
    "resourceMemoryPercentageName": "memory_percentage_resource",
    "deviceSplitCount": "device_split_count",
    "deviceCoreScaling": "device_core_scaling",
    "deviceMemoryScaling": "device_memory_scaling",
    "gpuMemoryFactor": "gpu_memory_factor",
    "disableCoreLimit": "disable_core_limit",
}
# Names that the replaced plugin's documentation has for keys that its code calls otherwise.
_DOCUMENTED_AS = {"disablecorelimit": "disableCoreLimit", "defaultMem": "defaultMemory"}
_NODE_KEYS = {
    "devicesplitcount": "device_split_count",
    "devicecorescaling": "device_core_scaling",
    "devicememoryscaling": "device_memory_scaling",
    "operatingmode": "operating_mode",
    "migstrategy": "mig_strategy",
}
# The replaced plugin does nothing with them either. Its own defaults, or none, are no request.
_WITHOUT_EFFECT: dict[str, Any] = {
    "overwriteEnv": False,
    "defaultMemory": 0,
    "defaultCores": 0,
    "defaultGPUNum": 1,
    "resourcePriorityName": "",
    "passDeviceSpecs": False,
    "migstrategy": "none",  # of the ConfigMap; the node's is followed
}
_ATTRIBUTES = {key.attribute: key for key in schema.keys(VolcanoVgpu).values()}


@dataclasses.dataclass(frozen=True)
class Overlay:
    """The values that one file sets.

    Attributes:
        values: attribute of `VolcanoVgpu` → value that it accepts.
        hidden_uuids: GPUs that are not to be offered.
        hidden_indices: the same by NVML index.
        geometries: ``knownMigGeometries``: how GPUs may be divided in the operating mode mig.
        problems: one sentence each, with key, value and expectation; the rest of the file counts.
        spoilt: attributes with a value that is wrong; `HIDDEN` for ``filterdevices``, `GEOMETRIES`
            for those.
        readable: the file could be read at all.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hidden_uuids: frozenset[str] = frozenset()
    hidden_indices: frozenset[int] = frozenset()
    geometries: tuple[ModelGeometries, ...] = ()
    problems: tuple[str, ...] = ()
    spoilt: frozenset[str] = frozenset()
    readable: bool = True

    @property
    def sound(self) -> bool:
        """Tell whether all values of the file are right,
        so that it can replace a later one that is wrong.
        """
        return self.readable and not self.spoilt

    def after(self, before: Overlay) -> Overlay:
        """Return this file where it is right, and ``before`` where it is wrong.

        A mistake in an edited ConfigMap must not give every node another memory unit, or GPUs that
        were hidden, under running pods.
        """
        if not self.readable:
            return dataclasses.replace(before, problems=self.problems)
        values = {
            **{name: value for name, value in before.values.items() if name in self.spoilt},
            **self.values,
        }
        # Positions in an annotation count through a group, so half of the geometries would be other
        # geometries.
        geometries = before.geometries if GEOMETRIES in self.spoilt else self.geometries
        if HIDDEN not in self.spoilt:
            return dataclasses.replace(self, values=values, geometries=geometries)
        uuids, indices = (
            self.hidden_uuids | before.hidden_uuids,
            self.hidden_indices | before.hidden_indices,
        )
        return dataclasses.replace(
            self, values=values, geometries=geometries, hidden_uuids=uuids, hidden_indices=indices
        )

    def over(self, settings: VolcanoVgpu, *, but: Collection[str] = ()) -> VolcanoVgpu:
        """Return ``settings`` with the values of this file, except for the attributes in ``but``.

        The order of the replaced plugin (volcano-vgpu §5.2) is ConfigMap, then given flags, then
        the node's entry. So for the ConfigMap ``but`` has the attributes that a flag or a variable
        has set.
        """
        return msgspec.structs.replace(
            settings, **{name: value for name, value in self.values.items() if name not in but}
        )


class _Reading:
    """One file while it is read."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._count = 0
        self._problems: list[str] = []
        self._readable = True
        self.spoilt: set[str] = set()
        self.values: dict[str, Any] = {}
        self.hidden_uuids: set[str] = set()
        self.hidden_indices: set[int] = set()
        self.geometries: tuple[ModelGeometries, ...] = ()

    def problem(self, path: str, text: str) -> None:
        self._count += 1
        if self._count <= _MOST_PROBLEMS:
            self._problems.append(": ".join(part for part in (self._file, path, text) if part))

    def unreadable(self, path: str, text: str) -> None:
        """The file as a whole is no such file."""
        self._readable = False
        self.problem(path, f"{text}; it is not used, and its previous content stays in force")

    def take(self, path: str, attribute: str, value: Any) -> None:
        """Accept a value as the settings would, or record its fault."""
        key = _ATTRIBUTES[attribute]
        truth = isinstance(key.default, bool)
        integral = (
            isinstance(value, float)
            and value.is_integer()
            and isinstance(key.default, int)
            and not truth
        )
        try:
            # The replaced plugin documents a truth value as a text, so it is in quotes in many a
            # ConfigMap.
            accepted = (
                key.accept_text(value)
                if truth and isinstance(value, str)
                else key.accept(int(value) if integral else value)
            )
            self.values[attribute] = accepted
        except schema.NotAcceptedError as err:
            self.spoilt.add(attribute)
            self.problem(path, f"expected {err}, got {shown(value)}; it is left as it was")

    def hide(self, path: str, value: Any) -> None:
        """``filterdevices``: GPUs that vanish from the list and from the annotation."""
        count = self._count
        self._hide(path, value)
        if self._count != count:
            self.spoilt.add(HIDDEN)

    def _hide(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            self.problem(path, f"expected a mapping of uuid and index, got {shown(value)}")
            return
        for name, member in value.items():
            if name.lower() not in ("uuid", "index"):
                self.problem(f"{path}.{shown_key(name)}", "unknown key; expected uuid or index")
            elif member is not None and not isinstance(member, list):
                self.problem(f"{path}.{name}", f"expected a list, got {shown(member)}")
            else:
                self._hide_each(f"{path}.{name}", name.lower(), (member or [])[:_MOST_HIDDEN])

    def _hide_each(self, path: str, kind: str, members: list[Any]) -> None:
        for place, member in enumerate(members):
            if kind == "uuid" and isinstance(member, str):
                self.hidden_uuids.add(member)
            elif (
                kind == "index"
                and isinstance(member, int)
                and not isinstance(member, bool)
                and member >= 0
            ):
                self.hidden_indices.add(member)
            else:
                expected = "the UUID of a GPU" if kind == "uuid" else "an integer ≥ 0"
                self.problem(f"{path}[{place}]", f"expected {expected}, got {shown(member)}")

    def divide(self, path: str, value: Any) -> None:
        """``knownMigGeometries``, all of them or, where something is wrong, none."""
        count = self._count
        found = read_geometries(path, value, self.problem)
        if self._count != count:
            self.spoilt.add(GEOMETRIES)
        else:
            self.geometries = found

    def overlay(self) -> Overlay:
        if (more := self._count - len(self._problems)) > 0:
            self._problems.append(f"{self._file}: and {more} more problems")
        return Overlay(
            self.values,
            frozenset(self.hidden_uuids),
            frozenset(self.hidden_indices),
            self.geometries,
            tuple(self._problems),
            frozenset(self.spoilt),
            self._readable,
        )


def read_device_config(text: str) -> Overlay:
    """Read the values of ``device-config.yaml``; never an error."""
    reading = _Reading(DEVICE_CONFIG)
    root, faults = yaml.parse(text)
    for fault in faults:
        say = reading.unreadable if root is None else reading.problem
        say(f"line {fault.line}", ": ".join(part for part in (fault.path, fault.text) if part))
    if root is not None or not faults:
        for name, value in _device_members(reading, root.plain if root else None):
            _take_of_devices(reading, f"{_TOP}.{shown_key(name)}", name, value)
    return reading.overlay()


def read_node_config(text: str, node: str) -> Overlay:
    """Read the values of ``config.json`` for the node of that name; never an error.

    The last entry of that name counts, keys are read in any case, and 0 means "not set", as the
    replaced plugin does it.
    """
    reading = _Reading(NODE_CONFIG)
    try:
        root = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as err:
        reading.unreadable("", f"is not JSON: {err}")
        return reading.overlay()
    entries = next((value for name, value in _members(root) if name == _NODES), None)
    if not isinstance(entries, list):
        reading.unreadable(
            "", f'expected {{"{_NODES}": [ … ]}}, got {shown(root if entries is None else entries)}'
        )
        return reading.overlay()
    ours: list[tuple[str, Any]] = []
    for place, entry in enumerate(entries):
        path = f"{_NODES}[{place}]"
        members = dict(_members(entry))
        if not isinstance(members.get("name"), str):
            reading.problem(path, f"expected a mapping with a name, got {shown(entry)}")
        elif members["name"] == node:
            ours = [(path, members)]
    for path, members in ours:
        for name, value in members.items():
            _take_of_node(reading, f"{path}.{shown_key(name)}", name, value)
    return reading.overlay()


def come_to(texts: Sequence[str], read: Callable[[str], Overlay]) -> Overlay:
    """Join the values of the texts of `plugin_files.texts_in_force`,
    and the problems of the newest.
    """
    overlay = Overlay()
    for text in texts:
        overlay = read(text).after(overlay)
    return overlay


def _device_members(reading: _Reading, root: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(root, dict) or _TOP not in root:
        reading.unreadable("", f"has no key {_TOP}")
    elif isinstance(root[_TOP], dict):
        yield from root[_TOP].items()
    else:
        reading.unreadable(_TOP, f"expected a mapping, got {shown(root[_TOP])}")


def _take_of_devices(reading: _Reading, path: str, name: str, value: Any) -> None:
    name = _DOCUMENTED_AS.get(name, name)
    if name == GEOMETRIES:
        reading.divide(path, value)
    elif name in _WITHOUT_EFFECT:
        if value is not None and value != _WITHOUT_EFFECT[name]:
            reading.problem(
                path,
                f"{shown(value)} has no effect, as in volcano-vgpu-device-plugin; remove the key",
            )
    elif name not in _DEVICE_KEYS:
        reading.problem(
            path, f"unknown key; expected one of {', '.join([*_DEVICE_KEYS, GEOMETRIES])}"
        )
    elif value is not None:
        reading.take(path, _DEVICE_KEYS[name], value)


def _take_of_node(reading: _Reading, path: str, name: str, value: Any) -> None:
    if name == "name" or value is None or (name == "migstrategy" and value == "none"):
        # the strategy is shipped as none, and the replaced plugin follows its flag in any case
        return
    if name in _NODE_KEYS:
        # 0 or nothing means that it is not set
        if isinstance(value, bool) or value not in (0, ""):
            reading.take(path, _NODE_KEYS[name], value)
    elif name == "filterdevices":
        reading.hide(path, value)
    else:
        expected = ", ".join(["name", *_NODE_KEYS, "filterdevices"])
        reading.problem(path, f"unknown key; expected one of {expected}")


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object with their keys in lower case, none of anything else."""
    if isinstance(value, dict):
        yield from ((name.lower(), member) for name, member in value.items())
