"""Read the configuration files of volcano-vgpu-device-plugin, the plugin that this family replaces.

They are read unchanged, so that operators need not rewrite them when they switch over. There are
two: ``device-config.yaml`` from the ConfigMap ``volcano-vgpu-device-config``, and ``config.json``,
mounted from the ConfigMap ``volcano-vgpu-node-config`` (volcano-vgpu §5).

Each text becomes an `Overlay`: values that replace those of `settings.VolcanoVgpu`, and a list of
the problems in the text. The replaced plugin silently drops a whole file for one wrong type
(volcano-vgpu D23). Here only the wrong value is ignored, and it is reported with its key. Called by
`agent` at start and whenever a text has changed.
"""

from __future__ import annotations

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
CONFIG_MAP = "volcano-vgpu-device-config"  # has device-config.yaml (volcano-vgpu §5.1)
NODE_CONFIG_MAP = "volcano-vgpu-node-config"  # has config.json
# Where the ConfigMap is looked for, in this order. Volcano's own manifests put it into
# volcano-system.
NAMESPACES = ("kube-system", "volcano-system")

HIDDEN = "filterdevices"
GEOMETRIES = "knownMigGeometries"

_TOP = "nvidia"  # the top-level key in device-config.yaml
_NODES = "nodeconfig"  # that in config.json, for a list with an entry for each node
# A megabyte of junk in a file must not become a megabyte of log.
_MAX_PROBLEMS = 20
_MAX_HIDDEN = 256

# Key of device-config.yaml → attribute of the settings.
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
# Misspelt keys in the replaced plugin's documentation → the keys that its code reads.
_DOCUMENTED_AS = {"disablecorelimit": "disableCoreLimit", "defaultMem": "defaultMemory"}
# Key of a node's entry in config.json, in lower case → attribute of the settings.
_NODE_KEYS = {
    "devicesplitcount": "device_split_count",
    "devicecorescaling": "device_core_scaling",
    "devicememoryscaling": "device_memory_scaling",
    "operatingmode": "operating_mode",
    "migstrategy": "mig_strategy",
}
# Keys that the replaced plugin ignores as well → their default there. A key with its default, or
# with no value, is not reported.
_WITHOUT_EFFECT: dict[str, Any] = {
    "overwriteEnv": False,
    "defaultMemory": 0,
    "defaultCores": 0,
    "defaultGPUNum": 1,
    "resourcePriorityName": "",
    "passDeviceSpecs": False,
    "migstrategy": "none",  # ignored in the ConfigMap only; the one in config.json counts
}
# attribute of the settings → its declaration
_ATTRIBUTES = {key.attribute: key for key in schema.keys(VolcanoVgpu).values()}


class Overlay(msgspec.Struct, frozen=True):
    """The values that one file sets.

    Attributes:
        values: attribute of `VolcanoVgpu` → value.
        hidden_uuids: the UUIDs of GPUs that must not be offered.
        hidden_indices: the NVML indices of GPUs that must not be offered.
        geometries: ``knownMigGeometries``: how GPUs may be divided in the operating mode mig.
        problems: one sentence for each, with the key, the value and what was expected.
        wrong: attributes with a wrong value; `HIDDEN` stands for ``filterdevices``, `GEOMETRIES`
            for ``knownMigGeometries``.
        readable: the file as a whole could be read.
    """

    values: Mapping[str, Any] = msgspec.field(default_factory=dict)
    hidden_uuids: frozenset[str] = frozenset()
    hidden_indices: frozenset[int] = frozenset()
    geometries: tuple[ModelGeometries, ...] = ()
    problems: tuple[str, ...] = ()
    wrong: frozenset[str] = frozenset()
    readable: bool = True

    @property
    def is_valid(self) -> bool:
        """Tell whether the file has no wrong value. A later text with a wrong value then falls back
        to this one.
        """
        return self.readable and not self.wrong

    def falling_back_to(self, previous: Overlay) -> Overlay:
        """Return this overlay with the values of ``previous`` for the keys that are wrong here.

        A mistake in an edited ConfigMap must not change the MiB in one unit of the memory resource
        on every node, or offer GPUs that were hidden, while pods run.
        """
        if not self.readable:
            return msgspec.structs.replace(previous, problems=self.problems)
        values = {
            **{name: value for name, value in previous.values.items() if name in self.wrong},
            **self.values,
        }
        # A pod's annotation names a MIG instance by its position in a group, one of the ways to
        # divide a GPU. Without the wrong entries, the positions would mean other instances.
        geometries = previous.geometries if GEOMETRIES in self.wrong else self.geometries
        if HIDDEN not in self.wrong:
            return msgspec.structs.replace(self, values=values, geometries=geometries)
        uuids, indices = (
            self.hidden_uuids | previous.hidden_uuids,
            self.hidden_indices | previous.hidden_indices,
        )
        return msgspec.structs.replace(
            self, values=values, geometries=geometries, hidden_uuids=uuids, hidden_indices=indices
        )

    def applied_to(self, settings: VolcanoVgpu, *, keep: Collection[str] = ()) -> VolcanoVgpu:
        """Return ``settings`` with the values of this file, except for the attributes in ``keep``.

        In the replaced plugin, flags override the ConfigMap, and the node's entry in config.json
        overrides both (volcano-vgpu §5.2). So for the ConfigMap, ``keep`` names the attributes that
        a flag or an environment variable has set.
        """
        return msgspec.structs.replace(
            settings, **{name: value for name, value in self.values.items() if name not in keep}
        )


class _Reader:
    """The values and problems of one file, collected while it is read."""

    def __init__(self, file: str) -> None:
        self._file = file  # its name, for messages
        self._count = 0  # of all problems, also those beyond `_MAX_PROBLEMS`
        self._problems: list[str] = []
        self._readable = True
        self.wrong: set[str] = set()
        self.values: dict[str, Any] = {}
        self.hidden_uuids: set[str] = set()
        self.hidden_indices: set[int] = set()
        self.geometries: tuple[ModelGeometries, ...] = ()

    def report(self, path: str, text: str) -> None:
        """Note a problem with the key ``path``; empty for the whole file."""
        self._count += 1
        if self._count <= _MAX_PROBLEMS:
            self._problems.append(": ".join(part for part in (self._file, path, text) if part))

    def reject(self, path: str, text: str) -> None:
        """Ignore the whole file, because it is not the expected kind of file."""
        self._readable = False
        self.report(path, f"{text}; it is not used, and its previous content stays in force")

    def take(self, path: str, attribute: str, value: Any) -> None:
        """Accept a value as the settings would, or record its fault."""
        key = _ATTRIBUTES[attribute]
        is_bool = isinstance(key.default, bool)
        is_whole = (
            isinstance(value, float)
            and value.is_integer()
            and isinstance(key.default, int)
            and not is_bool
        )
        try:
            # The replaced plugin's documentation has boolean values in quotes, and so have many
            # ConfigMaps.
            accepted = (
                key.accept_text(value)
                if is_bool and isinstance(value, str)
                else key.accept(int(value) if is_whole else value)
            )
            self.values[attribute] = accepted
        except schema.NotAcceptedError as err:
            self.wrong.add(attribute)
            self.report(path, f"expected {err}, got {shown(value)}; it is left as it was")

    def hide(self, path: str, value: Any) -> None:
        """Read ``filterdevices``, the GPUs that must not be offered."""
        count = self._count
        self._hide(path, value)
        if self._count != count:
            self.wrong.add(HIDDEN)

    def _hide(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            self.report(path, f"expected a mapping of uuid and index, got {shown(value)}")
            return
        for name, member in value.items():
            if name.lower() not in ("uuid", "index"):
                self.report(f"{path}.{shown_key(name)}", "unknown key; expected uuid or index")
            elif member is not None and not isinstance(member, list):
                self.report(f"{path}.{name}", f"expected a list, got {shown(member)}")
            else:
                self._hide_each(f"{path}.{name}", name.lower(), (member or [])[:_MAX_HIDDEN])

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
                self.report(f"{path}[{place}]", f"expected {expected}, got {shown(member)}")

    def take_geometries(self, path: str, value: Any) -> None:
        """Read ``knownMigGeometries``: all of them, or none where one is wrong."""
        count = self._count
        found = read_geometries(path, value, self.report)
        if self._count != count:
            self.wrong.add(GEOMETRIES)
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
            frozenset(self.wrong),
            self._readable,
        )


def read_device_config(text: str) -> Overlay:
    """Read the values of ``device-config.yaml``. Never raises: the overlay has the problems."""
    reader = _Reader(DEVICE_CONFIG)
    root, faults = yaml.parse(text)
    for fault in faults:
        report = reader.reject if root is None else reader.report
        report(f"line {fault.line}", ": ".join(part for part in (fault.path, fault.text) if part))
    if root is not None or not faults:
        for name, value in _device_members(reader, root.plain if root else None):
            _read_device_key(reader, f"{_TOP}.{shown_key(name)}", name, value)
    return reader.overlay()


def read_node_config(text: str, node: str) -> Overlay:
    """Read the values of ``config.json`` for the node ``node``. Never raises: the overlay has the
    problems.

    As in the replaced plugin, the last entry of the node counts, the case of keys does not matter,
    and 0 means "not set".
    """
    reader = _Reader(NODE_CONFIG)
    try:
        root = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as err:
        reader.reject("", f"is not JSON: {err}")
        return reader.overlay()
    entries = next((value for name, value in _lower_case_members(root) if name == _NODES), None)
    if not isinstance(entries, list):
        reader.reject(
            "", f'expected {{"{_NODES}": [ … ]}}, got {shown(root if entries is None else entries)}'
        )
        return reader.overlay()
    ours: list[tuple[str, Any]] = []
    for place, entry in enumerate(entries):
        path = f"{_NODES}[{place}]"
        members = dict(_lower_case_members(entry))
        if not isinstance(members.get("name"), str):
            reader.report(path, f"expected a mapping with a name, got {shown(entry)}")
        elif members["name"] == node:
            ours = [(path, members)]
    for path, members in ours:
        for name, value in members.items():
            _read_node_key(reader, f"{path}.{shown_key(name)}", name, value)
    return reader.overlay()


def merge_texts(texts: Sequence[str], read: Callable[[str], Overlay]) -> Overlay:
    """Return the overlay of the newest of ``texts``, with a value from an older text where the
    newer one is wrong.

    Args:
        texts: the last text without an error and those after it, oldest first.
        read: makes an overlay of one text.
    """
    overlay = Overlay()
    for text in texts:
        overlay = read(text).falling_back_to(overlay)
    return overlay


def _device_members(reader: _Reader, root: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(root, dict) or _TOP not in root:
        reader.reject("", f"has no key {_TOP}")
    elif isinstance(root[_TOP], dict):
        yield from root[_TOP].items()
    else:
        reader.reject(_TOP, f"expected a mapping, got {shown(root[_TOP])}")


def _read_device_key(reader: _Reader, path: str, name: str, value: Any) -> None:
    name = _DOCUMENTED_AS.get(name, name)
    if name == GEOMETRIES:
        reader.take_geometries(path, value)
    elif name in _WITHOUT_EFFECT:
        if value is not None and value != _WITHOUT_EFFECT[name]:
            reader.report(
                path,
                f"{shown(value)} has no effect, as in volcano-vgpu-device-plugin; remove the key",
            )
    elif name not in _DEVICE_KEYS:
        reader.report(
            path, f"unknown key; expected one of {', '.join([*_DEVICE_KEYS, GEOMETRIES])}"
        )
    elif value is not None:
        reader.take(path, _DEVICE_KEYS[name], value)


def _read_node_key(reader: _Reader, path: str, name: str, value: Any) -> None:
    if name == "name" or value is None or (name == "migstrategy" and value == "none"):
        # The shipped file has the strategy none, which the replaced plugin ignores.
        return
    if name in _NODE_KEYS:
        # 0 and an empty text mean "not set".
        if isinstance(value, bool) or value not in (0, ""):
            reader.take(path, _NODE_KEYS[name], value)
    elif name == "filterdevices":
        reader.hide(path, value)
    else:
        expected = ", ".join(["name", *_NODE_KEYS, "filterdevices"])
        reader.report(path, f"unknown key; expected one of {expected}")


def _lower_case_members(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object, with their keys in lower case; none for other values."""
    if isinstance(value, dict):
        yield from ((name.lower(), member) for name, member in value.items())
