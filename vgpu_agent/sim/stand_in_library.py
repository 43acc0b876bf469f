"""Files that the agent accepts as HAMi's libvgpu.so and as vgpu-manager's libvgpu-control.so, for
machines without the real libraries.

The demo and component tests deliver them as an operator would deliver the real ones. Each is a
shared object for this machine that exports the main functions of the library, and contains the
marks by which the agent recognises it: for HAMi-core the size of the region, as a number in an
instruction, and the name of the variable with the region's path; for the other its magic numbers
and the name of a variable. It limits nothing: all functions are the same trap instruction, so a
program that calls one of them ends.
"""

from __future__ import annotations

import platform
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

X86_64, AARCH64 = 62, 183  # e_machine of ELF(5)
_MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}  # by the output of `uname -m`

REGION_BYTES = 2_008_952  # a region in the layouts 1.1 and 1.2 of HAMi-core (hami-core §2.1)
REGION_VARIABLE = b"CUDA_DEVICE_MEMORY_SHARED_CACHE"

# Of the 450 functions that the real library exports, those without which it limits nothing
# (hami-core §3.1, §3.2).
FUNCTIONS = (
    "dlsym",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuMemAlloc_v2",
    "cuMemAllocManaged",
    "cuMemAllocPitch_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuLaunchKernel",
    "nvmlDeviceGetMemoryInfo",
)

# The same for libvgpu-control.so; the magic numbers of the files that it shares with the node; and
# the variable by which it is recognised (vgpu-manager §7.6, §7.7, §8.1).
CONTROL_FUNCTIONS = (*FUNCTIONS, "cuMemCreate")
CONTROL_MAGICS = (0x56474346, 0x564D4E44, 0x534D4E44)
CONTROL_VARIABLE = b"MANAGER_COMPATIBILITY_MODE"

_SHARED_OBJECT, _LOAD, _DYNAMIC = 3, 1, 2  # ET_DYN, PT_LOAD, PT_DYNAMIC
_READ_EXECUTE, _READ = 5, 4  # PF_R | PF_X, PF_R
_HEAD = 64 + 3 * 56  # the header and three program headers
_TRAPS = {AARCH64: b"\x00\x00\x20\xd4"}  # brk #0
_TRAP = b"\x0f\x0b\x90\x90"  # ud2


def deliver_stand_in_library(host_directory: Path) -> Path:
    """Write ``libvgpu.so`` into a directory, which is made if need be, and return its path."""
    host_directory.mkdir(parents=True, exist_ok=True)
    path = host_directory / "libvgpu.so"
    path.write_bytes(
        shared_object(
            FUNCTIONS, code=load_instruction(REGION_BYTES), strings=REGION_VARIABLE + b"\0"
        )
    )
    return path


def deliver_stand_in_control_library(host_directory: Path) -> Path:
    """Write ``libvgpu-control.so`` into a directory, which is made if need be, and return its path.
    Beside it lies a ``device-client``, the program that registers processes with the agent.
    """
    host_directory.mkdir(parents=True, exist_ok=True)
    (host_directory / "device-client").write_bytes(b"\x7fELF, and no program")
    path = host_directory / "libvgpu-control.so"
    path.write_bytes(control_library())
    return path


def control_library(*, machine: int | None = None) -> bytes:
    """The content of ``libvgpu-control.so`` for ``machine``, ELF's number of an architecture; by
    default for this machine.
    """
    return shared_object(
        CONTROL_FUNCTIONS,
        code=b"".join(
            load_instruction(magic, machine).ljust(8, b"\x90") for magic in CONTROL_MAGICS
        ),
        strings=CONTROL_VARIABLE + b"\0",
        machine=machine,
    )


def load_instruction(size: int, machine: int | None = None) -> bytes:
    """The instructions with which a compiler loads the number ``size`` on ``machine``, ELF's number
    of an architecture; by default on this machine.
    """
    if (machine or this_machine()) == AARCH64:
        low, high = size & 0xFFFF, size >> 16
        # mov w1, #low; movk w1, #high, lsl #16
        return struct.pack("<II", 0x52800001 | low << 5, 0x72A00001 | high << 5)
    return b"\xbe" + size.to_bytes(4, "little")  # mov esi, size


def this_machine() -> int:
    """ELF's number of this machine's architecture; 0 when it is neither x86-64 nor AArch64."""
    return _MACHINES.get(platform.machine(), 0)


def shared_object(
    exports: Sequence[str],
    *,
    imports: Sequence[str] = (),
    code: bytes = b"",
    strings: bytes = b"",
    machine: int | None = None,
) -> bytes:
    """A shared object as a dynamic linker sees it, without section headers.

    Args:
        exports: functions that it defines.
        imports: functions that it names and expects of other libraries.
        code: instructions that stand before those of the functions, in the executable part.
        strings: bytes in its constant data.
        machine: e_machine; by default this machine's.
    """
    machine = this_machine() if machine is None else machine
    code = (code + bytes(-len(code) % 4)) + _TRAPS.get(machine, _TRAP)
    end_of_code = _HEAD + len(code)
    names, symbols = b"\0", bytes(24)  # the string table, and the table of symbols
    for name in (*exports, *imports):
        # its section, and the address of the trap; both 0 for an import
        section, value = (1, end_of_code - 4) if name in exports else (0, 0)
        # global, a function
        symbols += struct.pack(
            "<IBBHQQ", len(names), 1 << 4 | 2, 0, section, value, 4 if section else 0
        )
        names += name.encode() + b"\0"
    number = len(symbols) // 24
    # the hash table has one bucket, in which each symbol refers to the next one
    chain = (0, *((place + 1) % number for place in range(1, number)))
    table = struct.pack(f"<{3 + number}I", 1, number, min(1, number - 1), *chain)  # one bucket
    # `at` is where the tables begin, and `places` has the address of each
    tables, places, at = b"", list[int](), end_of_code + -end_of_code % 8
    for part in (symbols, names, table, strings):
        places.append(at + len(tables))
        tables += part + bytes(-len(part) % 8)
    dynamic_at = at + len(tables)
    # DT_SYMTAB, DT_STRTAB, DT_STRSZ, DT_SYMENT, DT_HASH, DT_NULL
    tags = ((6, places[0]), (5, places[1]), (10, len(names)), (11, 24), (4, places[2]), (0, 0))
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    size = dynamic_at + len(dynamic)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        _SHARED_OBJECT,
        machine,
        1,
        0,
        64,
        0,
        0,
        64,
        56,
        3,
        64,
        0,
        0,
    )
    programs = (
        (_LOAD, _READ_EXECUTE, 0, 0, 0, end_of_code, end_of_code, 4096),
        (_LOAD, _READ, at, at, at, size - at, size - at, 8),
        (_DYNAMIC, _READ, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8),
    )
    head = header + b"".join(struct.pack("<IIQQQQQQ", *program) for program in programs)
    return (head + code).ljust(at, b"\0") + tables + dynamic
