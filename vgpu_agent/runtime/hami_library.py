"""Installs the operator's libvgpu.so where containers mount it from, and ``ld.so.preload`` beside it.

A library that is overwritten in place crashes every process that has it mapped (hami-core contract §0.3 fact 6; volcano-vgpu:D21). So the
content gets a name of its own, ``libvgpu.so.<12 hexadecimal digits of its SHA-256>``, and stays as it is for good; a newer one lies beside
it and is mounted by grants made from then on. Old ones are left: each is some hundred KiB, and a container that still runs may need it.

`agent` installs at start, before it offers a resource with `hami-core`, and refreshes now and then; what `install` raises is the reason
why such a resource is not offered.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import struct
from typing import TYPE_CHECKING

from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation import hami_core, hami_region
from vgpu_agent.runtime import host_files

if TYPE_CHECKING:
    from vgpu_agent.journal import Journal

_INSTEAD = "or set volcanoVgpu.isolation to none, which shares without any limit"
_LARGEST = 256 << 20  # bytes; the real one is below one MiB

# e_machine of ELF(5) for what `uname -m` says.
_MACHINES = {"x86_64": 62, "aarch64": 183}
_X86_64 = 62
_SHARED_OBJECT = 3
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr, little endian

# sizeof of the shared region in the library's code, and who has it (hami-core contract §2.1).
_OUR_LAYOUT = hami_region.SIZE - 1
_OTHER_LAYOUTS = {804_680: "HAMi before 2.3", 1_197_896: "HAMi 2.3 to 2.4.0", 2_008_984: "HAMi 2.8.1"}

_Signature = tuple[int, int, int, int]


class HamiLibrary:
    """The library on this node.

    State: what lies in ``host_directory``. In memory only the path of the installed one, and how its source looked then, so that
    a refresh without news costs a few system calls.

    Args:
        host_directory: the settings' ``hamiCore.hostDirectory``; the same path on the host and in the agent.
        library: where the operator delivers it; empty for ``libvgpu.so`` in ``host_directory``.
    """

    def __init__(self, host_directory: str, library: str, journal: Journal) -> None:
        self._host_directory = host_directory
        self._source = library or os.path.join(host_directory, "libvgpu.so")
        self._journal = journal
        self._installed: tuple[_Signature, str] | None = None
        self._locks = False

    @property
    def path(self) -> str:
        """The installed library, which grants mount from now on; empty while there is none."""
        return self._installed[1] if self._installed else ""

    @property
    def locks(self) -> bool:
        """Whether the installed library makes a lock file in `hami_core.LOCK_DIRECTORY`."""
        return self._locks

    async def install(self) -> str:
        """Install what the operator has delivered, and ``ld.so.preload``; what is there already stays. Returns the library's path.

        Raises:
            CarrierError: there is no library, it cannot be used on this node, or it cannot be written; says what helps.
                What was installed before stays in use, as long as it is there.
        """
        before = self.path
        try:
            path, layout = await asyncio.to_thread(self._install)
        except CarrierError:
            if before and not await asyncio.to_thread(os.path.isfile, before):
                self._installed = None  # no container could be created that mounts it
            raise
        if path != before:
            self._journal.record("hami.library_installed", path=path, source=self._source, layout=layout)
        return path

    async def refresh(self) -> str:
        """The same, for a library that may have been delivered anew, and for files that somebody has deleted."""
        return await self.install()

    def _install(self) -> tuple[str, str]:
        preload = os.path.join(self._host_directory, "ld.so.preload")
        # Without a newline, as the replaced plugin writes it.
        _write_if_different(preload, hami_core.LIBRARY.encode())
        signature = self._signature()
        if self._installed is not None and self._installed[0] == signature and os.path.isfile(self._installed[1]):
            return self._installed[1], ""
        content = self._read()
        layout = _checked(content, self._source)
        path = os.path.join(self._host_directory, f"libvgpu.so.{hashlib.sha256(content).hexdigest()[:12]}")
        _write_if_different(path, content)
        self._installed = signature, path
        self._locks = hami_core.uses_lock(content)
        return path, layout

    def _signature(self) -> _Signature:
        try:
            status = os.stat(self._source)
        except OSError as err:
            raise CarrierError(
                f"no usable library at {self._source}: {err.strerror}; deliver HAMi-core's libvgpu.so there "
                f"(hamiCore.library names the place), {_INSTEAD}"
            ) from err
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> bytes:
        try:
            with open(self._source, "rb") as file:
                content = file.read(_LARGEST + 1)
        except OSError as err:
            raise host_files.trouble("read", self._source, err) from err
        if len(content) > _LARGEST:
            raise CarrierError(f"{self._source} is larger than {_LARGEST >> 20} MiB; deliver HAMi-core's libvgpu.so there, {_INSTEAD}")
        return content


def _write_if_different(path: str, content: bytes) -> None:
    if not host_files.has(path, content):
        host_files.replace_file(path, content)


def _checked(content: bytes, source: str) -> str:
    """What is known of the layout of its shared region: ``1.1 or 1.2``, which differ in nothing that we write, or ``unknown``.

    Raises:
        CarrierError: it is no shared library for this machine, it is not all there, or its layout is another than that of our regions.
    """
    problem = _problem(content)
    if problem:
        raise CarrierError(f"{source} {problem}; deliver HAMi-core's libvgpu.so there, {_INSTEAD}")
    # On x86-64 the size stands in the code as it is. A region of the wrong layout would mean no limit at all (fact 10).
    if _HEADER.unpack_from(content)[2] == _X86_64 and _number(_OUR_LAYOUT) not in content:
        for size, version in _OTHER_LAYOUTS.items():
            if _number(size) in content:
                raise CarrierError(
                    f"{source} is of {version}, whose shared region has another layout than 1.2, and would not limit anything; "
                    f"deliver the library of HAMi 2.8.2 or newer, {_INSTEAD}"
                )
        return "unknown"
    return "1.1 or 1.2" if _number(_OUR_LAYOUT) in content else "unknown"


def _problem(content: bytes) -> str:
    if len(content) < _HEADER.size or not content.startswith(b"\x7fELF"):
        return "is no ELF file" if content else "is empty"
    ident, kind, machine, _, _, programs, sections, _, _, program_size, program_count, section_size, section_count, _ = _HEADER.unpack_from(
        content
    )
    if ident[4] != 2 or ident[5] != 1:
        return "is not a 64-bit little-endian ELF file"
    if kind != _SHARED_OBJECT:
        return "is no shared library"
    here = platform.machine()
    if machine != _MACHINES.get(here, machine):
        return f"is built for another processor (ELF machine {machine}) than this node's, {here}"
    # The table of sections is the last thing in the file, so a copy that is under way is recognised by it.
    whole = max(programs + program_size * program_count, sections + section_size * section_count)
    if len(content) < whole:
        return f"is not complete: {len(content)} of {whole} bytes (still being copied?)"
    return ""


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")
