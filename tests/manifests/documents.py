"""The manifests as Python objects, for tests that hold them against the code they deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.settings import settings as settings_of

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
DEFAULTS = settings_of()
NAME = "vgpu-agent"
COMPONENTS = MANIFESTS / "components"
# Why each folder of the node is there: the setting whose default it is. (path, type, may be
# written) per component, "" for the base.
HOST_FOLDERS = {
    "": {
        (str(DEFAULTS.kubelet.device_plugin_directory), "Directory", True),
        (str(DEFAULTS.kubelet.pod_resources_socket.parent), "Directory", False),
        (DEFAULTS.binding.cdi_directory, "DirectoryOrCreate", True),
        (DEFAULTS.state_directory, "DirectoryOrCreate", True),
    },
    "hami-core": {
        (DEFAULTS.hami_core.host_directory, "DirectoryOrCreate", True),
    },
}


def documents_of(name: str) -> list[Any]:
    """Every document of a file below manifests/."""
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def rights_of(role: Any) -> set[tuple[str, str]]:
    """(resource, verb) of every rule; the core group only, and never a wildcard."""
    assert all(rule["apiGroups"] == [""] for rule in role["rules"])
    return {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
