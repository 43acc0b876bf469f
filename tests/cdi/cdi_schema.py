"""The CDI 0.6.0 specs that a container runtime accepts, as a JSON schema of our own.

Facts from the specification and from the checks of its reference implementation: an unknown field
refuses the whole file, a device must have at least one edit, names and annotation keys have a fixed
form, a variable has a name and an equals sign.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_PATH = {"type": "string", "pattern": "^/"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


_ANNOTATIONS = {
    "type": "object",
    "propertyNames": {
        "pattern": (
            r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,"
            r"61}[A-Za-z0-9])?$"
        )
    },
    "additionalProperties": _TEXT,
}

_EDITS = _object(
    [],
    env={"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}},
    deviceNodes={
        "type": "array",
        "items": _object(
            ["path"],
            path=_PATH,
            hostPath=_PATH,
            type={"enum": ["b", "c", "u", "p"]},
            major={"type": "integer", "minimum": 0},
            minor={"type": "integer", "minimum": 0},
            fileMode={"type": "integer"},
            permissions={"type": "string", "pattern": "^[rwm]*$"},
            uid={"type": "integer"},
            gid={"type": "integer"},
        ),
    },
    mounts={
        "type": "array",
        "items": _object(
            ["hostPath", "containerPath"],
            hostPath=_PATH,
            containerPath=_PATH,
            type=_TEXT,
            options={"type": "array", "items": _TEXT},
        ),
    },
    hooks={"type": "array"},
)

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_object(
        ["cdiVersion", "kind", "devices"],
        cdiVersion={"enum": ["0.3.0", "0.4.0", "0.5.0", "0.6.0"]},
        kind={
            "type": "string",
            "pattern": (
                r"^[A-Za-z][-A-Za-z0-9_.]*[A-Za-z0-9]/"
                r"[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
            ),
        },
        annotations=_ANNOTATIONS,
        containerEdits=_EDITS,
        devices={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["name", "containerEdits"],
                name={"type": "string", "pattern": r"^[A-Za-z0-9]([-A-Za-z0-9_.:]*[A-Za-z0-9])?$"},
                annotations=_ANNOTATIONS,
                containerEdits={**_EDITS, "minProperties": 1},
            ),
        },
    ),
}
