"""The values of the Helm chart of NVIDIA's device plugin, in the terms of this agent.

Called by ``vgpu-agent config check``. Facts: the values.yaml of the chart, 0.14 to 0.19; the page
"Coming from NVIDIA's device plugin" has the same table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.config.problems import shown, shown_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.config.yaml import Node

_OF_THE_DAEMONSET = "the same field in manifests/daemonset.yaml"
_LABELS = "keep GPU Feature Discovery and Node Feature Discovery; the agent does not replace them"

# value of the chart → what it is here
_MEANINGS: Mapping[str, str] = {
    "config": "see the configurations below, and components/nvidia-config for several of them",
    "compatWithCPUManager": "plugin.passDeviceSpecs",
    "migStrategy": "plugin.migStrategy",
    "failOnInitError": "gpu.failOnInitError",
    "deviceListStrategy": "plugin.deviceListStrategy",
    "deviceIDStrategy": "plugin.deviceIdStrategy",
    "deviceDiscoveryStrategy": "gpu.discovery",
    "nvidiaDriverRoot": "gpu.driverRoot",
    "nvidiaDevRoot": "gpu.devRoot",
    "gdrcopyEnabled": "plugin.gdrcopyEnabled",
    "gdsEnabled": "plugin.gdsEnabled",
    "mofedEnabled": "plugin.mofedEnabled",
    "mps": "mps.root, and components/mps, which mounts it",
    "cdi": "cdi.hookPath and cdi.featureFlags, and components/cdi",
    "runtimeClassName": _OF_THE_DAEMONSET,
    "affinity": _OF_THE_DAEMONSET,
    "tolerations": _OF_THE_DAEMONSET,
    "nodeSelector": _OF_THE_DAEMONSET,
    "priorityClassName": _OF_THE_DAEMONSET,
    "resources": _OF_THE_DAEMONSET,
    "image": "images in manifests/kustomization.yaml",
    "namespaceOverride": "namespace in manifests/kustomization.yaml",
    "securityContext": "nothing to choose; components bring the capabilities that they need",
    "devicePlugin": "nothing to choose",
    "gfd": _LABELS,
    "nfd": _LABELS,
}
# Values of the chart that are not keys of ours, by which its files are recognised.
_MARKS = _MEANINGS.keys() - {"mps", "cdi", "resources"}


def is_values_file(root: Node) -> bool:
    """Tell whether a document is a values file of the chart. Those have no version, which every
    configuration of ours and of the plugin has.

    ``root``, here and below, is the root of the parsed YAML document.
    """
    members = root.value if isinstance(root.value, dict) else {}
    return "version" not in members and "kind" not in members and bool(_MARKS & members.keys())


def explanations(root: Node) -> Iterator[str]:
    """Yield a line for each value that is set: its name, its text if it has one, and the place of
    the same setting here.
    """
    members = root.value if isinstance(root.value, dict) else {}
    for name, node in members.items():
        value = "" if isinstance(node.value, dict | list) else f" ({shown(node.value)})"
        meaning = _MEANINGS.get(name, "not known; look for it in docs/configuration.md")
        yield f"{shown_key(name)}{value}: {meaning}"
    section = members.get("config")
    for name, meaning in (
        ("name", "the ConfigMap of that name has the configurations; check it in the same way"),
        ("default", "namedConfig.default"),
        ("fallbackStrategies", "namedConfig.fallbackStrategies"),
    ):
        if section is not None and isinstance(section.value, dict) and name in section.value:
            yield f"config.{name}: {meaning}"


def configurations(root: Node) -> Mapping[str, str]:
    """Return the plugin's configurations that the chart puts into its ConfigMap, by name."""
    node: Node | None = root
    for name in ("config", "map"):
        node = node.value.get(name) if node is not None and isinstance(node.value, dict) else None
    entries = node.value if node is not None and isinstance(node.value, dict) else {}
    return {
        shown_key(name): entry.value
        for name, entry in entries.items()
        if isinstance(entry.value, str)
    }
