"""The specs of another program on this node, and their names, looked at again and again.

With ``cdi.source: toolkit`` containers refer to the spec of NVIDIA's container toolkit, which its
own service keeps up to date. We write nothing. We only make sure that a name exists before the
kubelet may give it out. Same shape as `generated_specs` towards `agent`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

from vgpu_agent.cdi import rules
from vgpu_agent.cdi.document import LARGEST_BYTES, Spec, decode
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import CdiError
from vgpu_agent.families.device_lists import TOOLKIT_KIND as GPU_KIND
from vgpu_agent.status import CdiSpecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.journal import Journal

_VENDOR = GPU_KIND.partition("/")[0]
STATIC_DIRECTORY = "/etc/cdi"  # besides the directory of the settings; runtimes look into both
_ENDS = (".json", ".yaml", ".yml")
_OURS = (".", "vgpu-agent-")  # specs of grants, of which there may be a thousand


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    """One file: its change marks, its spec, or its error."""

    signature: tuple[int, int, int]
    changed_at: float
    spec: Spec | None = None
    error: str = ""


class ToolkitSpecs:
    """The specs of vendor ``nvidia.com`` in some directories.

    State: the last reading, by path; a file is read again when it has changed.
    """

    def __init__(
        self, directories: Sequence[str], journal: Journal, *, look_seconds: float
    ) -> None:
        """Build it.

        Args:
            directories: where runtimes look for specs, the one that wins last.
            journal: files that cannot be used are recorded there.
            look_seconds: how often they are looked at.
        """
        self._directories = tuple(dict.fromkeys(directories))
        self._journal = journal
        self._look_seconds = look_seconds
        self._files: dict[str, _Read] = {}
        # names that files of one directory both have
        self._ambiguous: dict[str, tuple[str, ...]] = {}
        self.settled = asyncio.Event()  # they were looked at
        self.revision = Revision()

    @property
    def names(self) -> frozenset[str]:
        """The qualified names that runtimes can resolve."""
        return (
            frozenset(name for spec in self.specs for name in spec.names) - self._ambiguous.keys()
        )

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs that a runtime would take."""
        return tuple(read.spec for read in self._files.values() if read.spec is not None)

    @property
    def error(self) -> str:
        """The reason why the GPUs have no names; empty when there is a spec of them."""
        for name, paths in sorted(self._ambiguous.items()):
            if name.startswith(f"{GPU_KIND}="):
                return (
                    f"{name} is in {' and in '.join(paths)}, so runtimes use neither; remove one "
                    "of them"
                )
        if any(spec.kind == GPU_KIND for spec in self.specs):
            return ""
        broken = "; ".join(
            f"{path} {read.error}" for path, read in self._files.items() if read.error
        )
        return broken or (
            f"there is no CDI spec of kind {GPU_KIND} in {' or '.join(self._directories)}; "
            "create it with the container toolkit (service nvidia-cdi-refresh, or nvidia-ctk cdi "
            "generate), or set cdi.source: generated"
        )

    @property
    def statuses(self) -> tuple[CdiSpecStatus, ...]:
        """One for each file."""
        found = [
            CdiSpecStatus(
                read.spec.kind if read.spec else _VENDOR,
                path,
                tuple(device.name for device in read.spec.devices) if read.spec else (),
                read.changed_at,
                read.error,
            )
            for path, read in self._files.items()
            if read.spec is not None or read.error
        ]
        return tuple(found) or (CdiSpecStatus(GPU_KIND, self._directories[-1], error=self.error),)

    def knows(self, mode: str) -> bool:
        """Tell whether a mode has a spec on this node."""
        return f"{_VENDOR}/{mode}=all" in self.names

    async def run(self, beat: Callable[[], None]) -> None:
        """Read the directories at intervals, until cancelled."""
        while True:
            beat()
            await self.look()
            await asyncio.sleep(self._look_seconds)

    async def look(self) -> None:
        """Look at the directories once."""
        files = await asyncio.to_thread(self._look)
        for path, read in files.items():
            before = self._files.get(path)
            if read.error and (before is None or before.error != read.error):
                self._journal.record(
                    "cdi.unusable_spec", level="warning", path=path, error=read.error
                )
        changed = files != self._files
        self._files, self._ambiguous = files, _ambiguous(files)
        self.settled.set()
        if changed:
            self.revision.advance()

    def _look(self) -> dict[str, _Read]:
        files: dict[str, _Read] = {}
        for directory in self._directories:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = sorted(os.listdir(directory))
            for name in names:
                if name.endswith(_ENDS) and not name.startswith(_OURS):
                    path = os.path.join(directory, name)
                    with contextlib.suppress(FileNotFoundError):
                        files[path] = self._file(path)
        return files

    def _file(self, path: str) -> _Read:
        """Read the file. Return nothing at all where it is another vendor's.

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
            return _Read((0, 0, 0), 0.0, error=f"cannot be read: {err.strerror or err}")
        spec, error = _spec(content, is_yaml=not path.endswith(".json"))
        return _Read(signature, status.st_mtime, spec, error)


def _ambiguous(files: Mapping[str, _Read]) -> dict[str, tuple[str, ...]]:
    """Names that two files of one directory have, with the files: neither directory wins, and a
    runtime resolves them not at all.
    """
    paths: collections.defaultdict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path, read in files.items():
        for name in read.spec.names if read.spec else ():
            paths[os.path.dirname(path), name].append(path)
    return {name: tuple(found) for (_, name), found in paths.items() if len(found) > 1}


def _spec(content: bytes, *, is_yaml: bool) -> tuple[Spec | None, str]:
    """Return the spec, if it is one of NVIDIA's, and its error."""
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
