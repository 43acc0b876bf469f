"""The configurations in a ConfigMap that is given as a manifest.

Called by ``vgpu-agent config check``. The agent itself reads the files that a ConfigMap is mounted
as, and refuses a manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.config import yaml
from vgpu_agent.config.problems import shown_key
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

# A key of a configuration of NVIDIA's plugin that ours does not have.
_ONLY_NVIDIAS = "flags"


def is_config_map(root: yaml.Node) -> bool:
    """Tell whether a document is a manifest of kind ConfigMap."""
    members = root.value if isinstance(root.value, dict) else {}
    kind = members.get("kind")
    return "apiVersion" in members and kind is not None and kind.value == "ConfigMap"


def texts(file: str, root: yaml.Node) -> Mapping[str, str]:
    """Return each key below ``data`` of the ConfigMap with its text.

    Args:
        file: the name of the manifest, for errors.
        root: the document.

    Raises:
        ConfigError: it has no data, or a value is not a text.
    """
    members = root.value if isinstance(root.value, dict) else {}
    data = members.get("data")
    if data is None or not isinstance(data.value, dict) or not data.value:
        line = data.line if data is not None else root.line
        text = "the ConfigMap has no text; expected one below a key such as config.yaml"
        raise ConfigError([f"{file}:{line}: data: {text}"])
    found, problems = {}, []
    for key, node in data.value.items():
        if isinstance(node.value, str):
            found[shown_key(key)] = node.value
        else:
            problems.append(
                f"{file}:{node.line}: data.{shown_key(key)}: expected a text; write | after the "
                "key and indent the text below it"
            )
    if problems:
        raise ConfigError(problems)
    return found


def is_of_nvidias_plugin(text: str) -> bool:
    """Tell whether a text is a configuration of NVIDIA's plugin rather than one of ours."""
    root, _ = yaml.parse(text)
    return root is not None and isinstance(root.value, dict) and _ONLY_NVIDIAS in root.value
