"""A container runtime's treatment of CDI names: it reads the specs of a directory, and returns
their edits for a container.

Used by the simulated cluster. Written from the CDI specification 0.6
(https://github.com/cncf-tags/container-device-interface). It shares nothing with the agent's own
writer of specs. A name that a real runtime would not find is not found here either, and a file that
a real one would refuse is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

_NAME = re.compile(r"([a-z0-9.-]+/[A-Za-z0-9_-]+)=([A-Za-z0-9][A-Za-z0-9_.:-]*)")
_SPEC_KEYS = {"cdiVersion", "kind", "annotations", "devices", "containerEdits"}
_EDIT_KEYS = {"env", "deviceNodes", "mounts", "hooks", "additionalGids"}


@dataclasses.dataclass(frozen=True)
class Received:
    """The environment, mounts and device nodes that a container receives at a start, or the part
    of them that one spec or device adds.

    Attributes:
        environment: variable → value.
        mounts: path in the container → (path on the host, whether it is read-only).
        device_nodes: paths in the container.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mounts: Mapping[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    device_nodes: frozenset[str] = frozenset()

    def joined(self, later: Received) -> Received:
        """Merge both; where they disagree, ``later`` wins, as in a runtime, which applies CDI edits
        last.
        """
        return Received(
            {**self.environment, **later.environment},
            {**self.mounts, **later.mounts},
            self.device_nodes | later.device_nodes,
        )


def received(
    answer: messages.ContainerAllocateResponse,
    directory: Path | None,
    variables: Mapping[str, str] | None = None,
) -> Received:
    """Return what a container receives when it starts with this answer; reads files.

    Args:
        answer: the answers of the device plugins, as the kubelet has merged them.
        directory: where CDI specs lie; None for a runtime that does not know CDI, and ignores
            names.
        variables: those of the container in the pod's spec. The kubelet appends them to the
            answer's variables, so they win over these. The runtime applies CDI edits to the
            finished OCI specification of the container, so the edits win over both (kubelet's
            GenerateRunContainerOptions, CDI's ContainerEdits.Apply).

    Raises:
        SimulationError: a name that no spec has, or a spec that no runtime would take: such a
            container does not start.
    """
    own = Received(
        {**answer.envs, **(variables or {})},
        {each.container_path: (each.host_path, each.read_only) for each in answer.mounts},
        frozenset(each.container_path for each in answer.devices),
    )
    if directory is None:
        return own
    names = [each.name for each in answer.cdi_devices]
    for key, value in answer.annotations.items():
        names += value.split(",") if key.startswith("cdi.k8s.io/") else []
    for edits in _edits(dict.fromkeys(names), directory):
        own = own.joined(edits)
    return own


def _edits(names: Iterable[str], directory: Path) -> Iterable[Received]:
    """Yield the edits of each device, and before the first device of a spec the edits that all its
    devices have in common.
    """
    common: set[str] = set()  # the kinds whose common edits have been yielded
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise SimulationError(
                f"CDI device injection failed: {name!r} is no qualified device name"
            )
        found = [
            (spec, _container_edits(device.get("containerEdits") or {}))
            for spec in _specs(directory)
            if spec["kind"] == matched[1]
            for device in spec["devices"]
            if device["name"] == matched[2]
        ]
        if len(found) != 1:
            what = "conflicting" if found else "unresolvable"
            raise SimulationError(f"CDI device injection failed: {what} CDI devices {name}")
        spec, edits = found[0]
        if spec.get("containerEdits") and spec["kind"] not in common:
            common.add(spec["kind"])
            yield _container_edits(spec["containerEdits"])
        yield edits


def _specs(directory: Path) -> Iterable[dict[str, Any]]:
    try:
        with os.scandir(directory) as entries:
            found = sorted(
                (entry for entry in entries if entry.name.endswith(".json")),
                key=lambda entry: entry.name,
            )
    except FileNotFoundError:
        return
    for entry in found:
        try:
            status = entry.stat()
            spec = _spec(entry.path, status.st_ino, status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            continue  # it was there a moment ago
        except ValueError as err:
            raise SimulationError(f"CDI spec {entry.path} cannot be read: {err}") from err
        unknown = spec.keys() - _SPEC_KEYS
        if unknown or not spec.get("devices"):
            raise SimulationError(
                f"CDI spec {entry.path} is refused: unknown {sorted(unknown)}, devices "
                f"{spec.get('devices')}"
            )
        yield spec


@functools.lru_cache(maxsize=1024)
def _spec(path: str, *_: int) -> Any:
    """Read the file. The cache also depends on its inode number, time of change and size. Runtimes
    do not read it for each container either.
    """
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _container_edits(edits: Mapping[str, Any]) -> Received:
    if not edits or edits.keys() - _EDIT_KEYS:
        raise SimulationError(f"invalid device, empty or unknown edits: {sorted(edits)}")
    mounts = {
        mount["containerPath"]: (mount["hostPath"], "ro" in mount.get("options", ()))
        for mount in edits.get("mounts") or ()
    }
    environment = dict(line.split("=", 1) for line in edits.get("env") or ())
    return Received(
        environment, mounts, frozenset(node["path"] for node in edits.get("deviceNodes") or ())
    )
