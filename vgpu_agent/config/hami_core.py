"""Settings of the isolation backend `hami-core`: the section ``hamiCore``. Part of the schema in
`settings`.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import AbsolutePath, OptionalPath


class HamiCore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The isolation backend `hami-core`: HAMi's libvgpu.so, which the operator puts onto the
    node.
    """

    host_directory: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "Directory on the node for the library, ld.so.preload and the containers' regions "
                "(HOOK_PATH)."
            )
        ),
    ] = "/usr/local/vgpu"
    library: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Where the operator's libvgpu.so is delivered; it is installed from there under a "
                "name made of its content. Empty: `libvgpu.so` in `hostDirectory`."
            )
        ),
    ] = ""
    disable_variable: Annotated[
        Literal["whole-gpus", "ignore", "honor"],
        Meta(
            description=(
                "Which pods may switch their limit off by setting the variable "
                "CUDA_DISABLE_CONTROL. whole-gpus: those that have all memory of their GPUs, so "
                "that nobody else has a share of them. ignore: none. honor: all, as with the "
                "replaced plugin, so that any pod can take the memory of its neighbours."
            )
        ),
    ] = "whole-gpus"
