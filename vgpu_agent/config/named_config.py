"""Settings about NVIDIA's named configurations: the section ``namedConfig``.

Part of the schema in `settings`; read by `agent`, which follows the node's label. Meaning: nvidia §13.
"""

# Without `from __future__ import annotations`: msgspec would evaluate each annotation, a text then, twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import OptionalPath

# Kubernetes: an optional DNS prefix and a slash, then up to 63 characters.
_LABEL = r"\A([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"


class NamedConfig(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several v1 configurations of NVIDIA's plugin, of which a label of the Node chooses one."""

    directory: Annotated[
        OptionalPath,
        Meta(description="Directory with one file for each configuration, usually a mounted ConfigMap. Empty: off."),
    ] = ""
    label: Annotated[
        str,
        Meta(
            pattern=_LABEL,
            extra={"expected": "the name of a label"},
            description="The label of the Node whose value is the name of a file in the directory.",
        ),
    ] = "nvidia.com/device-plugin.config"
    default: Annotated[str, Meta(description="The file for nodes without the label. Empty: fallbackStrategies decide.")] = ""
    fallback_strategies: Annotated[
        tuple[Literal["named", "single", "empty"], ...],
        Meta(
            extra={"expected": "a list of named, single and empty"},
            description="For nodes without the label, in this order. named: the file `default`. single: the only file. empty: none.",
        ),
    ] = ("named", "single", "empty")
