"""A file that passes for HAMi's libvgpu.so as far as the agent looks at it, where the real one is not to be had.

The demo and component tests deliver it as an operator would deliver the real one. It limits nothing, and no program can load it: it is the
head of an ELF shared object for this machine, and the size of the shared region where a compiler leaves it in the code.
"""

from __future__ import annotations

import platform
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF(5) for what `uname -m` says
_REGION_BYTES = 2_008_952  # of layouts 1.1 and 1.2 (hami-core contract §2.1)
_SHARED_OBJECT = 3


def deliver_stand_in_library(host_directory: Path) -> Path:
    """Write ``libvgpu.so`` into a directory, which is made if need be, and return its path."""
    code = b"\xbe" + _REGION_BYTES.to_bytes(4, "little")  # mov esi, size
    after = 64 + len(code)
    machine = _MACHINES.get(platform.machine(), 0)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", _SHARED_OBJECT, machine, 1, 0, 64, after, 0, 64, 56, 0, 64, 1, 0)
    host_directory.mkdir(parents=True, exist_ok=True)
    path = host_directory / "libvgpu.so"
    path.write_bytes(head + code + bytes(64))
    return path
