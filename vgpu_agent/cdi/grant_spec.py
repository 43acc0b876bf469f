"""The CDI spec of one grant: the runtime reads it when the container is created,
and the agent after a restart.

`runtime.grants` makes the text of a spec file here, and reads the record of a grant back out of it.
Format: CDI 0.6.0, the first version with annotations, which hold the record, or a newer one where
inlined edits need it (https://github.com/cncf-tags/container-device-interface). The runtime refuses
a whole file over one unknown field, so there is nothing else of ours in it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.allocation.carrier import CDI_KIND, GrantRecord, InlinedEdits
from vgpu_agent.errors import HostFileError, quoted
from vgpu_agent.model import Owner, Share
from vgpu_agent.pods import is_container_name, is_uid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.isolation.edits import Edits, MemoryMount

CDI_VERSION = "0.6.0"
# the versions that inlined edits (those behind the CDI names of other specs) may require
_NEWER = ("0.7.0", "0.8.0", "1.0.0", "1.1.0")

# CDI demands the form of Kubernetes annotations: a DNS prefix, a slash, a short name; 256 KiB in
# all.
_PREFIX = CDI_KIND.partition("/")[0] + "/"

# the value of a container annotation that names CDI devices: their names with commas between
_NAMES = re.compile(
    r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[A-Za-z0-9._:-]+(,[A-Za-z0-9._-]+/"
    r"[A-Za-z0-9._-]+=[A-Za-z0-9._:-]+)*"
)

# The fields that the edits of a grant and the inlined edits may both have → what identifies an
# entry, of which there may be only one.
_KEYS: dict[str, Callable[[Any], str]] = {
    "env": lambda line: str(line.partition("=")[0]),
    "deviceNodes": lambda node: str(node["path"]),
    "mounts": lambda mount: str(mount["containerPath"]),
}


class _Device(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct):
    """The fields that we need of our own file. Anything else in it is for the runtime."""

    kind: str
    devices: tuple[_Device, ...]
    annotations: dict[str, str]


def other_names(edits: Edits) -> tuple[str, ...]:
    """List the CDI names in ``edits``, also those in annotations, each once: a spec cannot refer to
    them, only contain their edits.

    Raises:
        HostFileError: an annotation has a value that is no list of CDI names.
    """
    others = {key: value for key, value in edits.annotations.items() if not _NAMES.fullmatch(value)}
    if others:
        raise HostFileError(
            f"a CDI spec cannot give annotations to a container ({', '.join(others)}); choose "
            "binding.mode early"
        )
    annotated = (name for value in edits.annotations.values() for name in value.split(","))
    return tuple(dict.fromkeys([*edits.cdi_names, *annotated]))


def spec_text(record: GrantRecord, edits: Edits, inlined: InlinedEdits | None = None) -> bytes:
    """Make the content of the grant's spec file; the same for the same grant.

    Args:
        record: becomes annotations. `GrantRecord` explains their values.
        edits: those of the container.
        inlined: the edits behind the names that `other_names` lists; None where they were not
            looked up.

    Raises:
        HostFileError: the edits contain what a CDI spec cannot bring into a container.
    """
    if (names := other_names(edits)) and inlined is None:
        raise HostFileError(
            f"a CDI spec cannot carry other CDI names ({', '.join(names)}); choose the device list "
            "strategy envvar, or binding.mode early"
        )
    inlined = inlined or InlinedEdits(version=CDI_VERSION, container_edits={})
    spec = {
        "cdiVersion": inlined.version if inlined.version in _NEWER else CDI_VERSION,
        "kind": CDI_KIND,
        "annotations": _annotations(record),
        "devices": [
            {
                "name": record.token,
                "containerEdits": _joined(_container_edits(record, edits), inlined.container_edits),
            }
        ],
    }
    return msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n"


def read_record(content: bytes, token: str) -> GrantRecord:
    """Read the record in a spec file, which must be that of ``token``.

    Raises:
        HostFileError: it is not one of ours, or damaged; the text says where.
    """
    try:
        spec = msgspec.json.decode(content, type=_Spec)
        if spec.kind != CDI_KIND or [device.name for device in spec.devices] != [token]:
            raise HostFileError(f"expected exactly the device {CDI_KIND}={token}")
        return _record(
            token, {name.removeprefix(_PREFIX): value for name, value in spec.annotations.items()}
        )
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as err:
        raise HostFileError(str(err)) from err


def _container_edits(record: GrantRecord, edits: Edits) -> dict[str, Any]:
    environment = edits.environment
    if not environment and not edits.mounts and not edits.device_nodes and not edits.memory_mounts:
        # the runtime refuses a device without any edit
        environment = {"VGPU_AGENT_GRANT": record.token}
    made: dict[str, Any] = {}
    if environment:
        made["env"] = [f"{name}={value}" for name, value in environment.items()]
    if edits.device_nodes:
        made["deviceNodes"] = [
            {
                "path": node.container_path,
                "hostPath": node.host_path,
                "permissions": node.permissions,
            }
            for node in edits.device_nodes
        ]
    if edits.mounts or edits.memory_mounts:
        # The options that the kubelet's own mounts have; without (r)bind the runtime would look for
        # a file system to mount.
        made["mounts"] = [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
            }
            for mount in edits.mounts
        ] + [_in_memory(mount) for mount in edits.memory_mounts]
    return made


def _in_memory(mount: MemoryMount) -> dict[str, Any]:
    options = [
        "nosuid",
        "nodev",
        "noexec",
        "mode=1777",
        f"size={mount.size_kib}k",
        f"nr_inodes={mount.files}",
    ]
    return {
        "hostPath": "tmpfs",
        "containerPath": mount.container_path,
        "type": "tmpfs",
        "options": options,
    }


def _joined(own: dict[str, Any], inlined: Mapping[str, Any]) -> dict[str, Any]:
    """Join two objects ``containerEdits``. For the same variable or path the inlined edit wins,
    as with a runtime that resolves the names itself.
    """
    if not inlined:
        return own
    made: dict[str, Any] = {**own, **inlined}
    for field, key in _KEYS.items():
        if both := {key(each): each for each in (*own.get(field, ()), *inlined.get(field, ()))}:
            made[field] = list(both.values())
    return made


def _annotations(record: GrantRecord) -> dict[str, str]:
    # the keys are names of annotations, without their prefix
    facts = {
        "family": record.family,
        "resource": record.resource,
        "ids": str(record.id_count),
        "pod-uid": record.owner.pod_uid,
        "namespace": record.owner.namespace,
        "pod": record.owner.pod,
        "container": record.owner.container,
        "shares": msgspec.json.encode(record.shares).decode(),
        "by": record.decider,
        "decided-at": repr(record.decided_at),
        "collected": record.own_directory,  # on the host; the agent removes it once the pod is gone
        # a scheduler decided, so the shares may exceed the device's compute or number of holders
        **({"may-overcommit": "true"} if record.may_overcommit else {}),
        # the init containers that this start shows not to be running, so they hold nothing now
        **({"rules-out": ",".join(record.inits_not_running)} if record.inits_not_running else {}),
    }
    return {_PREFIX + name: value for name, value in facts.items()}


def _record(token: str, facts: dict[str, str]) -> GrantRecord:
    try:
        owner = Owner(facts["container"], facts["pod-uid"], facts["namespace"], facts["pod"])
        if not is_uid(owner.pod_uid) or not is_container_name(owner.container):
            named = f"UID {quoted(owner.pod_uid)} and container {quoted(owner.container)}"
            raise HostFileError(f"annotations: expected names that Kubernetes allows, got {named}")
        inits_not_running = tuple(facts["rules-out"].split(",")) if facts.get("rules-out") else ()
        if not all(map(is_container_name, inits_not_running)):
            raise HostFileError(
                f"annotation {_PREFIX}rules-out: expected names of containers with commas between, "
                f"got {quoted(facts['rules-out'])}"
            )
        own_directory = facts["collected"]
        if own_directory and (
            not os.path.isabs(own_directory) or os.path.normpath(own_directory) != own_directory
        ):
            raise HostFileError(
                f"annotation {_PREFIX}collected: expected an absolute path, got {own_directory!r}"
            )
        return GrantRecord(
            token=token,
            family=facts["family"],
            resource=facts["resource"],
            id_count=int(facts["ids"]),
            owner=owner,
            shares=msgspec.json.decode(facts["shares"], type=tuple[Share, ...]),
            decider=facts["by"],
            decided_at=float(facts["decided-at"]),
            own_directory=own_directory,
            may_overcommit=facts.get("may-overcommit") == "true",
            inits_not_running=inits_not_running,
        )
    except KeyError as err:
        raise HostFileError(f"annotation {_PREFIX}{err.args[0]} is missing") from err
    except ValueError as err:
        raise HostFileError(f"annotations: {err}") from err
