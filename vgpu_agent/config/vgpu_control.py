"""Settings of the isolation backend `vgpu-control`: the section ``vgpuControl``. Part of the schema
in `settings`.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import AbsolutePath, OptionalPath


class VgpuControl(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The isolation backend `vgpu-control`: vgpu-manager's libvgpu-control.so, which the operator
    puts onto the node.
    """

    host_directory: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "Directory on the node for the library, ld.so.preload and the containers' files."
            )
        ),
    ] = "/etc/vgpu-manager"
    library: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Where the operator's libvgpu-control.so is delivered; it is installed from there "
                "under a name made of its content. With `processes: client`, device-client lies "
                "beside it. Empty: `libvgpu-control.so` in `hostDirectory`."
            )
        ),
    ] = ""
    processes: Annotated[
        Literal["client", "host-proc"],
        Meta(
            description=(
                "How the library tells a container's processes from others on the GPU, which the "
                "driver names by their PIDs on the host. client: each process registers with "
                "the agent, which needs hostPID for it and writes the container's list. host-proc: "
                "containers have the host's whole /proc mounted, as with the replaced plugin, so "
                "that tenants see each other's processes and command lines."
            )
        ),
    ] = "client"
    disable_variable: Annotated[
        Literal["whole-gpus", "ignore", "honor"],
        Meta(
            description=(
                "Which pods may switch their limit off by setting the variable "
                "DISABLE_VGPU_CONTROL. whole-gpus: those that have all memory of their GPUs, so "
                "that nobody else has a share of them. ignore: none. honor: all, as with the "
                "replaced plugin, so that any pod can take the memory of its neighbours."
            )
        ),
    ] = "whole-gpus"
