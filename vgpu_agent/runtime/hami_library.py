"""The installation of the operator's libvgpu.so for mounts into containers,
and of ``ld.so.preload`` beside it.

A library is installed only when it exports the functions in which HAMi-core limits a program, and
when the layout of its shared region, read from its code, is that of the agent's regions. Any other
file limits nothing, whatever its name.

A library that is overwritten in place crashes every process that has it mapped (hami-core §0.3.6;
volcano-vgpu D21). So the content gets a name of its own, ``libvgpu.so.<12 hexadecimal digits of its
SHA-256>``, and stays as it is for good; a newer one lies beside it and is mounted by grants made
from then on. Old ones are left: each is some hundred KiB, and a container that still runs may need
it.

`agent` installs at start, before it offers a resource with `hami-core`, and refreshes now and then.
An exception of `install` is the reason why such a resource is not offered. A bad delivery does not
displace the library that this agent has installed: new containers get that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import stat
from typing import TYPE_CHECKING

from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation import hami_core, hami_region
from vgpu_agent.runtime import host_files
from vgpu_agent.runtime.elf import AARCH64, X86_64, ElfError, SharedObject

if TYPE_CHECKING:
    from vgpu_agent.journal import Journal

_REMEDY = "deliver HAMi-core's libvgpu.so there"
_LARGEST = 16 << 20  # bytes; the real one has about one MiB

_MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}  # by the output of `uname -m`

# Without one of these the library limits nothing: functions that find the driver's functions,
# allocate, report the memory, and launch kernels. Each line is met by any of its names. All
# releases from HAMi 2.4.1 to 2.10 have them (hami-core §3.1, §3.2).
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

# sizeof of the shared region, and the users of it (hami-core §2.1).
_OUR_LAYOUT = hami_region.SIZE - 1
_OTHER_LAYOUTS = {
    804_680: "HAMi before 2.3",
    1_197_896: "HAMi 2.3 to 2.4.0",
    2_008_984: "HAMi 2.8.1",
}
_SHOWN_LAYOUT = "1.1 or 1.2"  # they differ in nothing that the agent writes

_Signature = tuple[int, int, int, int]


class HamiLibrary:
    """The library on this node.

    State: the files in ``host_directory``. In memory only the path of the installed one, and how
    its source looked then, so that a refresh without news costs a few system calls.

    Args:
        host_directory: the settings' ``hamiCore.hostDirectory``; the same path on the host and in
            the agent.
        library: where the operator delivers it; empty for ``libvgpu.so`` in ``host_directory``.
        journal: where an installation is recorded.
        instead: what else can be done, as the end of a sentence.
    """

    def __init__(
        self, host_directory: str, library: str, journal: Journal, *, instead: str
    ) -> None:
        self._host_directory = host_directory
        self._source = library or os.path.join(host_directory, "libvgpu.so")
        self._journal = journal
        self._instead = instead
        self._installed: tuple[_Signature, str] | None = None
        self._locks = False

    @property
    def path(self) -> str:
        """The installed library, which grants mount from now on; empty while there is none."""
        return self._installed[1] if self._installed else ""

    @property
    def locks(self) -> bool:
        """The installed library makes a lock file in `hami_core.LOCK_DIRECTORY`."""
        return self._locks

    async def install(self) -> str:
        """Install the operator's library and ``ld.so.preload``, and return the library's path.
        Existing files stay.

        Raises:
            CarrierError: there is no library, it cannot be used on this node, or it cannot be
                written; has the remedy. The library installed before stays in use, as long as it is
                there.
        """
        before = self.path
        try:
            path, layout = await asyncio.to_thread(self._install)
        except CarrierError:
            if before and not await asyncio.to_thread(os.path.isfile, before):
                self._installed = None  # no container could be created that mounts it
            raise
        if path != before:
            self._journal.record(
                "hami.library_installed", path=path, source=self._source, layout=layout
            )
        return path

    async def refresh(self) -> str:
        """Do the same for a library that may have been delivered anew,
        and for files that were deleted.
        """
        return await self.install()

    def _install(self) -> tuple[str, str]:
        preload = os.path.join(self._host_directory, "ld.so.preload")
        # Without a newline, as the replaced plugin writes it.
        _write_if_different(preload, hami_core.LIBRARY.encode())
        # else each start would be refused, on a node that offers shares
        host_files.require_only_root([preload])
        signature = self._signature()
        if (
            self._installed is not None
            and self._installed[0] == signature
            and os.path.isfile(self._installed[1])
        ):
            return self._installed[1], ""
        content = self._read()
        layout = _checked(content, self._source, self._instead)
        path = os.path.join(
            self._host_directory, f"libvgpu.so.{hashlib.sha256(content).hexdigest()[:12]}"
        )
        _write_if_different(path, content)
        self._installed = signature, path
        self._locks = hami_core.uses_lock(content)
        return path, layout

    def _signature(self) -> _Signature:
        try:
            status = os.stat(self._source)
        except OSError as err:
            raise CarrierError(
                f"no usable library at {self._source}: {err.strerror}; deliver HAMi-core's "
                f"libvgpu.so there (hamiCore.library names the place), {self._instead}"
            ) from err
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> bytes:
        try:
            # Not blocking: a pipe in its place would hold up every family.
            descriptor = os.open(self._source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                readable = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
                content = file.read(_LARGEST + 1) if readable else b""
        except OSError as err:
            raise host_files.trouble("read", self._source, err) from err
        if not stat.S_ISREG(status.st_mode):
            raise CarrierError(f"{self._source} is not a file; {_REMEDY}, {self._instead}")
        if max(len(content), status.st_size) > _LARGEST:
            raise CarrierError(
                f"{self._source} is larger than {_LARGEST >> 20} MiB; {_REMEDY}, {self._instead}"
            )
        return content


def _write_if_different(path: str, content: bytes) -> None:
    if not host_files.has(path, content):
        host_files.replace_file(path, content)


def _checked(content: bytes, source: str, instead: str) -> str:
    """The layout of the library's shared region.

    Raises:
        CarrierError: it is no shared library for this machine, it is not all there, it is not
            HAMi-core, or its layout is another than that of the agent's regions, or cannot be read.
    """
    try:
        library = SharedObject(content)
        missing = [
            " or ".join(names) for names in _FUNCTIONS if not any(map(library.exports, names))
        ]
    except ElfError as err:
        raise CarrierError(f"{source} {err}; {_REMEDY}, {instead}") from err
    here = platform.machine()
    if library.machine != _MACHINES.get(here, library.machine):
        raise CarrierError(
            f"{source} is built for another processor (ELF machine {library.machine}) than this "
            f"node's, {here}; {_REMEDY}, {instead}"
        )
    if missing:
        raise CarrierError(
            f"{source} does not export {', '.join(missing)}, so it limits nothing; {_REMEDY}, "
            f"{instead}"
        )
    if _REGION_VARIABLE not in content:
        raise CarrierError(
            f"{source} does not know {_REGION_VARIABLE[:-1].decode()}, so it is not HAMi-core; "
            f"{_REMEDY}, {instead}"
        )
    # A region of the wrong layout would mean no limit at all (hami-core §0.3.10).
    for size, version in _OTHER_LAYOUTS.items():
        if _loads(library, content, size):
            raise CarrierError(
                f"{source} is of {version}, whose shared region has another layout ({size} bytes) "
                f"than {_SHOWN_LAYOUT}, and would not limit anything; deliver the library of HAMi "
                f"2.8.2 or newer, {instead}"
            )
    if not _loads(library, content, _OUR_LAYOUT):
        raise CarrierError(
            f"{source} has a shared region of unknown layout: the size of layout {_SHOWN_LAYOUT}, "
            f"{_OUR_LAYOUT}, is not in its code, so nothing shows that it reads the agent's "
            f"limits; deliver a library of HAMi 2.4.1 to 2.10 other than 2.8.1, {instead}"
        )
    return _SHOWN_LAYOUT


def _loads(library: SharedObject, content: bytes, number: int) -> bool:
    """Tell whether the library's code has an instruction that loads the number."""
    # on x86-64 an operand, elsewhere a constant among the code
    plain = number.to_bytes(4, "little")
    return any(
        content.find(plain, begin, end) >= 0
        or (library.machine == AARCH64 and _loads_in_halves(content[begin:end], number))
        for begin, end in library.code
    )


# On aarch64 a number takes two instructions on one register, which compilers leave together or a
# few instructions apart: mov for its lower half, and movk for its upper half. Both end with the
# register's number, and their first bit is its width.
_MOVE, _KEEP = 0x52800000, 0x72A00000
_REGISTER, _WIDE = 0x1F, 1 << 31
_APART_BYTES = 32


def _loads_in_halves(code: bytes, number: int) -> bool:
    first, second, third, fourth = (_MOVE | (number & 0xFFFF) << 5).to_bytes(4, "little")
    parts = (
        bytes([first]),
        bytes([first | _REGISTER]),
        bytes([second, third]),
        bytes([fourth]),
        bytes([fourth | 0x80]),
    )
    # also where two overlap
    move = re.compile(b"(?=([%b-%b]%b[%b%b]))" % tuple(map(re.escape, parts)), re.DOTALL)
    for found in move.finditer(code):
        at = found.start()
        if at % 4:
            continue
        own = int.from_bytes(found[1], "little") & (_REGISTER | _WIDE)
        keep = (_KEEP | number >> 16 << 5 | own).to_bytes(4, "little")
        if any(
            code[place : place + 4] == keep for place in range(at + 4, at + 4 + _APART_BYTES, 4)
        ):
            return True
    return False
