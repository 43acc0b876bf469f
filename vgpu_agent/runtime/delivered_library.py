"""The installation of an operator's library for mounts into containers,
and beside it of ``ld.so.preload``, by which every program in a container loads it.

A library is installed only when its backend recognises it (`libraries`): it exports the functions
in which it limits a program, and reads the files that the agent writes. Any other file limits
nothing, whatever its name.

A library that is overwritten in place crashes every process that has it mapped (hami-core §0.3.6;
volcano-vgpu D21). So the content gets a name of its own, ``<name>.<12 hexadecimal digits of its
SHA-256>``, and stays as it is for good; a newer one lies beside it and is mounted by grants made
from then on. Old ones are left: each is some hundred KiB, and a container that still runs may need
it.

`agent` installs at start, before it offers a resource with the backend, and refreshes now and then.
An exception of `install` is the reason why such a resource is not offered. A bad delivery does not
displace the library that this agent has installed: new containers get that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import stat
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime import host_files
from vgpu_agent.runtime.elf import AARCH64, X86_64, ElfError, SharedObject

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.isolation.registry import LibraryBackend
    from vgpu_agent.journal import Journal

_LARGEST = 16 << 20  # bytes; the real ones have one to a few MiB

_MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}  # by the output of `uname -m`

# of the delivered file, by which a new delivery is noticed: device, inode, size, time of change
_Signature = tuple[int, int, int, int]


def _no_companions(_settings: Settings, _library: DeliveredLibrary) -> None:
    """Install nothing, as for most libraries."""


def _no_locks(_content: bytes) -> bool:
    return False


class Recognition(msgspec.Struct, frozen=True):
    """The facts by which one library is recognised.

    Attributes:
        backend: the backend that the library belongs to.
        product: what is to be delivered, for people.
        functions: the library must export one name of each entry, or it limits nothing.
        layout: the library and its content → the layout of the files that the library reads. Raises
            HostFileError with what is wrong with the library, which continues a sentence that
            begins with its path, and what to deliver instead.
        locks: its content → whether the library makes a lock file, which containers would share
            if each did not get a directory of its own for it.
        install_companions: installs what else containers need with the library, by the settings,
            and checks that the node has what that needs; raises HostFileError.
    """

    backend: LibraryBackend
    product: str
    functions: tuple[tuple[str, ...], ...]
    layout: Callable[[SharedObject, bytes], str]
    locks: Callable[[bytes], bool] = _no_locks
    install_companions: Callable[[Settings, DeliveredLibrary], None] = _no_companions


class DeliveredLibrary:
    """One library on this node.

    State: the files in ``host_directory``. In memory only the path of the installed one, and how
    its source looked then, so that a refresh without news costs a few system calls.

    Args:
        recognition: what is known of the library.
        settings: name the backend's directory, which is the same path on the host and in the agent,
            and the place where the operator delivers the library.
        journal: where an installation is recorded.
        instead: what else can be done, as the end of a sentence.
    """

    def __init__(
        self,
        recognition: Recognition,
        settings: Settings,
        journal: Journal,
        *,
        instead: str,
    ) -> None:
        backend = recognition.backend
        self._recognition = recognition
        self._settings = settings
        self.host_directory = backend.host_directory(settings)
        # where the operator delivers it; by default under its own name beside the installed ones
        self.source = backend.delivered(settings) or os.path.join(self.host_directory, backend.file)
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
        """Tell whether the installed library makes a lock file that containers would share."""
        return self._locks

    async def install(self) -> str:
        """Install the operator's library and ``ld.so.preload``, and return the library's path.
        Existing files stay. A library that was delivered again is installed beside the old one, and
        files that were deleted are made again.

        Raises:
            HostFileError: there is no library, it cannot be used on this node, or it cannot be
                written; the message has the remedy. The library installed before stays in use, as
                long as it is there.
        """
        before = self.path
        try:
            path, layout = await asyncio.to_thread(self._install)
        except HostFileError:
            if before and not await asyncio.to_thread(os.path.isfile, before):
                self._installed = None  # no container could be created that mounts it
            raise
        if path != before:
            self._journal.record(
                "library.installed",
                backend=self._recognition.backend.name,
                path=path,
                source=self.source,
                layout=layout,
            )
        return path

    def check(self) -> str:
        """Check the operator's library as `install` does, change nothing, and return its path.
        Blocks.

        Raises:
            HostFileError: there is no library, or it cannot be used on this node; the message has
                the remedy.
        """
        self._signature()
        self._checked(self.read(self.source, product=self._recognition.product))
        return self.source

    def read(self, path: str, *, product: str) -> bytes:
        """Return the content of a delivered file.

        Raises:
            HostFileError: it cannot be read, is no file, or is too large.
        """
        remedy = f"deliver {product} there, {self._instead}"
        try:
            # Not blocking: a pipe in its place would hold up every family.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                readable = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
                content = file.read(_LARGEST + 1) if readable else b""
        except FileNotFoundError as err:
            raise HostFileError(f"cannot read {path}: {err.strerror}; {remedy}") from err
        except OSError as err:
            raise host_files.file_error("read", path, err) from err
        if not stat.S_ISREG(status.st_mode):
            raise HostFileError(f"{path} is not a file; {remedy}")
        if max(len(content), status.st_size) > _LARGEST:
            raise HostFileError(f"{path} is larger than {_LARGEST >> 20} MiB; {remedy}")
        return content

    def file_error(self, path: str, what: str, remedy: str) -> HostFileError:
        """The error for a delivered file that cannot be used: what is wrong, and what helps."""
        return HostFileError(f"{path} {what}; {remedy}, {self._instead}")

    def _install(self) -> tuple[str, str]:
        preload = os.path.join(self.host_directory, "ld.so.preload")
        # The library's path in containers, without a newline, as the replaced plugins write it.
        write_if_different(preload, self._recognition.backend.library.encode())
        # Only root may be able to replace it. This is checked now, or the node would offer shares,
        # and each start would be refused.
        host_files.require_only_root([preload])
        signature = self._signature()
        path, layout = self._in_place(signature), ""
        if not path:
            content = self.read(self.source, product=self._recognition.product)
            layout = self._checked(content)
            name = self._recognition.backend.file
            digest = hashlib.sha256(content).hexdigest()[:12]
            path = os.path.join(self.host_directory, f"{name}.{digest}")
            write_if_different(path, content)
        self._recognition.install_companions(self._settings, self)
        if layout:
            self._installed = signature, path
            self._locks = self._recognition.locks(content)
        return path, layout

    def _in_place(self, signature: _Signature) -> str:
        """Return the installed library if the delivered file is still the same; otherwise ""."""
        if self._installed is None or self._installed[0] != signature:
            return ""
        return self._installed[1] if os.path.isfile(self._installed[1]) else ""

    def _signature(self) -> _Signature:
        try:
            status = os.stat(self.source)
        except OSError as err:
            raise HostFileError(
                f"no usable library at {self.source}: {err.strerror}; deliver "
                f"{self._recognition.product} there ({self._recognition.backend.setting} names the "
                f"place), {self._instead}"
            ) from err
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _checked(self, content: bytes) -> str:
        """The layout of the files that the library reads.

        Raises:
            HostFileError: it is no shared library for this machine, it is incomplete, it is another
                library, or its layout is not that of the agent's files, or cannot be read.
        """
        deliver = f"deliver {self._recognition.product} there"
        try:
            library = SharedObject(content)
            missing = [
                " or ".join(names)
                for names in self._recognition.functions
                if not any(map(library.exports, names))
            ]
        except ElfError as err:
            raise self.file_error(self.source, str(err), deliver) from err
        here = platform.machine()
        if library.machine != _MACHINES.get(here, library.machine):
            raise self.file_error(
                self.source,
                f"is built for a processor (ELF machine {library.machine}) other than this node's, "
                f"{here}",
                deliver,
            )
        if missing:
            raise self.file_error(
                self.source,
                f"does not export {', '.join(missing)}, so it limits nothing",
                deliver,
            )
        try:
            return self._recognition.layout(library, content)
        except HostFileError as err:
            raise HostFileError(f"{self.source} {err}, {self._instead}") from err


def write_if_different(path: str, content: bytes, mode: int = 0o644) -> None:
    """Put ``content`` under ``path``, unless it is there; see `host_files.replace_file`."""
    if not host_files.has(path, content):
        host_files.replace_file(path, content, mode)
