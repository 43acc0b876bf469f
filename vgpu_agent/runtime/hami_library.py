"""Recognise HAMi-core's libvgpu.so among the files that an operator supplies for containers.

A file is recognised if it exports the functions in which HAMi-core limits a program, contains the
name of the variable by which only HAMi-core finds its region, and loads in its machine code, as a
constant, the size of the region's layout that the agent writes. Called by `delivered_library`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation import hami_core, hami_region
from vgpu_agent.isolation.registry import HAMI_CORE
from vgpu_agent.runtime.delivered_library import Recognition
from vgpu_agent.runtime.elf import code_loads

if TYPE_CHECKING:
    from vgpu_agent.runtime.elf import SharedObject

_PRODUCT = "HAMi-core's libvgpu.so"

# Functions that find the driver's functions, allocate, report the memory, and launch kernels. Each
# entry lists the names of one function in different releases; all releases from HAMi 2.4.1 to 2.10
# export one of them (hami-core §3.1, §3.2).
_FUNCTIONS = (
    ("dlsym",),
    ("cuGetProcAddress", "cuGetProcAddress_v2"),
    ("cuMemAlloc_v2",),
    ("cuMemAllocManaged",),
    ("cuMemAllocPitch_v2",),
    ("cuMemFree_v2",),
    ("cuMemGetInfo_v2",),
    ("cuLaunchKernel",),
    ("nvmlDeviceGetMemoryInfo",),
)

# Other interposers export the same functions. Only HAMi-core finds its region by this variable.
_REGION_VARIABLE = b"CUDA_DEVICE_MEMORY_SHARED_CACHE\0"

# The size of the region's structure, and the releases that have it (hami-core §2.1).
# `hami_region.SIZE` is one more: the library writes a byte after the structure.
_OUR_LAYOUT = hami_region.SIZE - 1
_OTHER_LAYOUTS = {
    804_680: "HAMi before 2.3",
    1_197_896: "HAMi 2.3 to 2.4.0",
    2_008_984: "HAMi 2.8.1",
}
_SHOWN_LAYOUT = "1.1 or 1.2"  # they differ in nothing that the agent writes


def _layout(library: SharedObject, content: bytes) -> str:
    """The layout of the library's shared region.

    Raises:
        HostFileError: it is not HAMi-core, or its layout is not that of the agent's regions, or
            cannot be read.
    """
    if _REGION_VARIABLE not in content:
        raise HostFileError(
            f"does not know {_REGION_VARIABLE[:-1].decode()}, so it is not HAMi-core; deliver "
            f"{_PRODUCT} there"
        )
    # A region of the wrong layout would mean no limit at all (hami-core §0.3.10).
    for size, version in _OTHER_LAYOUTS.items():
        if code_loads(library, content, size):
            raise HostFileError(
                f"is of {version}, whose shared region ({size} bytes) does not have layout "
                f"{_SHOWN_LAYOUT}, so it would not limit anything; deliver the library of HAMi "
                "2.8.2 or newer"
            )
    if not code_loads(library, content, _OUR_LAYOUT):
        raise HostFileError(
            f"has a shared region of unknown layout: the size of layout {_SHOWN_LAYOUT}, "
            f"{_OUR_LAYOUT}, is not in its code, so nothing shows that it reads the agent's "
            "limits; deliver a library of HAMi 2.4.1 to 2.10 other than 2.8.1"
        )
    return _SHOWN_LAYOUT


RECOGNITION = Recognition(
    backend=HAMI_CORE,
    product=_PRODUCT,
    functions=_FUNCTIONS,
    layout=_layout,
    locks=hami_core.uses_lock,  # whether it makes a lock file, which containers would share
)
