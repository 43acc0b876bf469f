"""The check that a delivered file is vgpu-manager's libvgpu-control.so, and the installation of the
program that comes with the library.

The file must export the functions in which the library limits a program, contain the name of a
variable that no other library reads (`_MODE_VARIABLE`), and have the magic numbers of its three
binary files (`_MAGICS`). The first of them, that of ``vgpu.config``, came with layout 1, in
v1.0.0; libraries before it have none (vgpu-manager §7.7). A later layout with the same magic number
could not be told from this one.

Where processes register with the agent (`process_registry`, vgpu-manager §9), the library runs
``device-client`` at the start of every process, and a process whose client fails ends. So the
program is installed beside the registry's socket, and without it nothing is offered. Called by
`delivered_library`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation import vgpu_config, vgpu_control, vgpu_tables
from vgpu_agent.isolation.registry import VGPU_CONTROL
from vgpu_agent.runtime import host_files
from vgpu_agent.runtime.container_usage import HostProcesses
from vgpu_agent.runtime.delivered_library import Recognition, write_if_different
from vgpu_agent.runtime.elf import code_loads

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.runtime.delivered_library import DeliveredLibrary
    from vgpu_agent.runtime.elf import SharedObject

_PRODUCT = "libvgpu-control.so of vgpu-manager v1.0.0 or newer"
_SHOWN_LAYOUT = "1"  # of ``vgpu.config``, for the journal
CLIENT = "device-client"
_CLIENT_MODE = 0o755
_ELF = b"\x7fELF"

# Functions that find the driver's functions, allocate, report the memory, and launch kernels
# (vgpu-manager §8.1). The library must export one name of each entry.
_FUNCTIONS = (
    ("dlsym",),
    ("cuGetProcAddress", "cuGetProcAddress_v2"),
    ("cuMemAlloc_v2",),
    ("cuMemAllocManaged",),
    ("cuMemCreate",),
    ("cuMemFree_v2",),
    ("cuMemGetInfo_v2",),
    ("cuLaunchKernel",),
    ("nvmlDeviceGetMemoryInfo",),
)

# The variable that says how to tell processes apart; no other interposer reads it.
_MODE_VARIABLE = b"MANAGER_COMPATIBILITY_MODE\0"

_MAGICS = {
    vgpu_config.MAGIC: "vgpu.config",
    vgpu_tables.VMEM_MAGIC: "vmem_node.config",
    vgpu_tables.SM_NODE_MAGIC: "sm_node.config",
}


def _layout(library: SharedObject, content: bytes) -> str:
    """The layout of ``vgpu.config`` that the library reads; ``content`` is the library's file.

    Raises:
        HostFileError: it is not vgpu-manager's, or of a version before the layout.
    """
    if _MODE_VARIABLE not in content:
        raise HostFileError(
            f"does not know {_MODE_VARIABLE[:-1].decode()}, so it is not vgpu-manager's library; "
            f"deliver {_PRODUCT} there"
        )
    missing = [
        file
        for magic, file in _MAGICS.items()
        # An instruction loads the number (`code_loads`), or the compiler has left it among the
        # constants.
        if not code_loads(library, content, magic) and magic.to_bytes(4, "little") not in content
    ]
    if missing:
        raise HostFileError(
            f"has nowhere the number by which {' and '.join(missing)} is recognised, so it is of a "
            "version before v1.0.0, whose files have another layout, and would not limit "
            f"anything; deliver {_PRODUCT} there"
        )
    return _SHOWN_LAYOUT


def _install_client(settings: Settings, library: DeliveredLibrary) -> None:
    """Install ``device-client``, which lies beside the delivered library, for containers to run.
    Do nothing where their processes do not register.

    A file that is running is never written to: a new one takes its name.

    Raises:
        HostFileError: there is no such file, it is no program, or the agent could not tell which
            container registers.
    """
    # this `CLIENT` is the value of the setting with which processes register, not the program
    if settings.vgpu_control.processes != vgpu_control.CLIENT:
        return
    proc_root = settings.gpu.proc_root
    if not settings.simulate and not HostProcesses(proc_root).visible:
        raise library.file_error(
            proc_root,
            "does not show the host's processes, so the agent cannot tell whose process registers "
            "with it, and every process of a container would end",
            "run the agent with hostPID (manifests/components/vgpu-control)",
        )
    source = os.path.join(os.path.dirname(library.source), CLIENT)
    product = "vgpu-manager's device-client"
    content = library.read(source, product=product)
    if not content.startswith(_ELF):
        raise library.file_error(
            source,
            "is not a program, and every process of a container would end without it",
            f"deliver {product} there",
        )
    directory = vgpu_control.registry_directory(library.host_directory)
    host_files.make_directory(directory, vgpu_control.REGISTRY_MODE)
    write_if_different(os.path.join(directory, CLIENT), content, _CLIENT_MODE)


RECOGNITION = Recognition(
    backend=VGPU_CONTROL,
    product=_PRODUCT,
    functions=_FUNCTIONS,
    layout=_layout,
    install_companions=_install_client,
)
