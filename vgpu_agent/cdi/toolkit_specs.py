"""The CDI specs that NVIDIA's container toolkit keeps on this node, read at intervals.

With ``cdi.source: toolkit`` containers refer to the spec of the toolkit, which its own service
keeps up to date. The agent writes none. It only makes sure that a name exists before a resource
that needs the name is offered. `controller` uses this module or `generated_specs`, through the same
interface.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cdi import rules
from vgpu_agent.cdi.document import LARGEST_BYTES, Spec, decode
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import CdiError
from vgpu_agent.families.device_lists import TOOLKIT_KIND as GPU_KIND
from vgpu_agent.status import CdiSpecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.journal import Journal

_VENDOR = GPU_KIND.partition("/")[0]  # nvidia.com, of the kind nvidia.com/gpu
STATIC_DIRECTORY = "/etc/cdi"  # runtimes read this directory and the one of the settings
_SUFFIXES = (".json", ".yaml", ".yml")
# Hidden files, and our own specs of grants, of which there may be a thousand.
_SKIPPED_PREFIXES = (".", "vgpu-agent-")


class _SpecFile(msgspec.Struct, frozen=True):
    """One file as it was last read.

    Attributes:
        signature: inode, size and time of change in nanoseconds; another one means another content.
        changed_at: the time of change, in unix seconds.
        spec: its spec; None where it has an error, or is of another vendor.
        error: why it cannot be used.
    """

    signature: tuple[int, int, int]
    changed_at: float
    spec: Spec | None = None
    error: str = ""


class ToolkitSpecs:
    """The specs of vendor ``nvidia.com`` in some directories.

    State: the files as they were last read, by path. A file is read again when it has changed.
    """

    def __init__(
        self, directories: Sequence[str], journal: Journal, *, look_seconds: float
    ) -> None:
        """Build it.

        Args:
            directories: where runtimes look for specs, in ascending priority.
            journal: records files that cannot be used.
            look_seconds: the interval between two readings.
        """
        self._directories = tuple(dict.fromkeys(directories))
        self._journal = journal
        self._look_seconds = look_seconds
        self._files: dict[str, _SpecFile] = {}
        # qualified name → the files of one directory that both define it
        self._ambiguous: dict[str, tuple[str, ...]] = {}
        self.tried = asyncio.Event()  # set after the first reading
        self.revision = Revision()  # advances when a file has changed, appeared or gone

    @property
    def names(self) -> frozenset[str]:
        """The qualified names that runtimes can resolve."""
        return (
            frozenset(name for spec in self.specs for name in spec.names) - self._ambiguous.keys()
        )

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs that a runtime would accept."""
        return tuple(file.spec for file in self._files.values() if file.spec is not None)

    @property
    def error(self) -> str:
        """The reason why the GPUs, or some of them, have no usable names; empty when all have."""
        for name, paths in sorted(self._ambiguous.items()):
            if name.startswith(f"{GPU_KIND}="):
                return (
                    f"{name} is in {' and in '.join(paths)}, so runtimes use neither; remove one "
                    "of them"
                )
        if any(spec.kind == GPU_KIND for spec in self.specs):
            return ""
        broken = "; ".join(
            f"{path} {file.error}" for path, file in self._files.items() if file.error
        )
        return broken or (
            f"there is no CDI spec of kind {GPU_KIND} in {' or '.join(self._directories)}; "
            "create it with the container toolkit (service nvidia-cdi-refresh, or nvidia-ctk cdi "
            "generate), or set cdi.source: generated"
        )

    @property
    def statuses(self) -> tuple[CdiSpecStatus, ...]:
        """The status of each file of the vendor; where there is none, one that says so."""
        found = [
            CdiSpecStatus(
                kind=file.spec.kind if file.spec else _VENDOR,
                path=path,
                devices=tuple(device.name for device in file.spec.devices) if file.spec else (),
                made_at=file.changed_at,
                error=file.error,
            )
            for path, file in self._files.items()
            if file.spec is not None or file.error
        ]
        return tuple(found) or (CdiSpecStatus(GPU_KIND, self._directories[-1], error=self.error),)

    def knows(self, mode: str) -> bool:
        """Tell whether a device mode, such as ``gds``, has a spec on this node."""
        return f"{_VENDOR}/{mode}=all" in self.names

    async def run(self, beat: Callable[[], None]) -> None:
        """Read the directories at intervals, until cancelled."""
        while True:
            beat()
            await self.look()
            await asyncio.sleep(self._look_seconds)

    async def look(self) -> None:
        """Read the directories once."""
        files = await asyncio.to_thread(self._read_all)
        for path, file in files.items():
            before = self._files.get(path)
            if file.error and (before is None or before.error != file.error):
                self._journal.record(
                    "cdi.unusable_spec", level="warning", path=path, error=file.error
                )
        changed = files != self._files
        self._files, self._ambiguous = files, _ambiguous(files)
        self.tried.set()
        if changed:
            self.revision.advance()

    def _read_all(self) -> dict[str, _SpecFile]:
        files: dict[str, _SpecFile] = {}
        for directory in self._directories:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = sorted(os.listdir(directory))
            for name in names:
                if name.endswith(_SUFFIXES) and not name.startswith(_SKIPPED_PREFIXES):
                    path = os.path.join(directory, name)
                    with contextlib.suppress(FileNotFoundError):
                        files[path] = self._read(path)
        return files

    def _read(self, path: str) -> _SpecFile:
        """Read the file unless it is unchanged. The spec of another vendor is left out.

        Raises:
            FileNotFoundError: it is gone.
        """
        try:
            status = os.stat(path)
            signature = status.st_ino, status.st_size, status.st_mtime_ns
            known = self._files.get(path)
            if known is not None and known.signature == signature:
                return known
            with open(path, "rb") as file:
                content = file.read(LARGEST_BYTES + 1)
        except FileNotFoundError:
            raise
        except OSError as err:
            error = f"cannot be read: {err.strerror or err}"
            return _SpecFile(signature=(0, 0, 0), changed_at=0.0, error=error)
        spec, error = _spec(content, is_yaml=not path.endswith(".json"))
        return _SpecFile(signature, status.st_mtime, spec, error)


def _ambiguous(files: Mapping[str, _SpecFile]) -> dict[str, tuple[str, ...]]:
    """Return the names that two files of one directory define, each with these files.
    Neither file has priority, so runtimes cannot resolve such a name.
    """
    paths: collections.defaultdict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path, file in files.items():
        for name in file.spec.names if file.spec else ():
            paths[os.path.dirname(path), name].append(path)
    return {name: tuple(found) for (_, name), found in paths.items() if len(found) > 1}


def _spec(content: bytes, *, is_yaml: bool) -> tuple[Spec | None, str]:
    """Return the spec if its vendor is NVIDIA, or the error that makes it unusable."""
    if f"{_VENDOR}/".encode() not in content:
        return None, ""
    try:
        spec = decode(content, is_yaml=is_yaml)
    except CdiError as err:
        return None, str(err)
    if not spec.kind.startswith(f"{_VENDOR}/"):
        return None, ""
    found = rules.problems(spec)
    return (None, f"would be refused by runtimes: {'; '.join(found[:3])}") if found else (spec, "")
