"""The use that containers make of their cards, where the library of `isolation.vgpu_control` limits
them: read from the files in their directories, over and over, for the metrics.

A container may write into two of the three, or put anything in their place. So nothing is followed
and nothing is mapped, and what cannot be read is not known. One loop, started by `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_tables import read_sm_node, read_vmem
from vgpu_agent.log import ChangeFilter
from vgpu_agent.model import ControlledUse
from vgpu_agent.runtime import process_list
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.region_slots import behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import PodCache

_DEADLINE_SECONDS = 30.0
_LONGEST_LIST_BYTES = process_list.MAX_READ * 11
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_Read = TypeVar("_Read")


class ControlledUses:
    """The reader.

    State: `uses`, replaced as a whole after each look that found a change.
    """

    def __init__(
        self, pod_cache: PodCache, directory: str, journal: Journal, *, pause_seconds: float
    ) -> None:
        """Build it; ``directory`` has the containers' directories."""
        self.uses: Latest[tuple[ControlledUse, ...]] = Latest(())
        self._pod_cache, self._directory, self._journal = pod_cache, directory, journal
        self._pause_seconds = pause_seconds
        self._changes = ChangeFilter()
        self._own_thread = OwnThread("use of controlled containers")

    async def run(self) -> None:
        """Look at intervals, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_seconds)

    async def look(self) -> None:
        """Read the files of every live container once, and publish what has changed."""
        names = [
            (f"{pod.kubelet_uid}_{one.name}", pod.namespace, pod.name, one.name)
            for pod in self._pod_cache.pods
            if not pod.ended
            for one in pod.containers
        ]
        try:
            found = await self._own_thread.run(
                self._directory,
                lambda: tuple(
                    use
                    for name, *owner in names
                    if (use := _use(behind(f"{self._directory}/{name}"), *owner)) is not None
                ),
                seconds=_DEADLINE_SECONDS,
            )
        except CarrierError as err:
            if self._changes.is_new("hangs"):
                self._journal.record("region.read_hangs", level="warning", error=str(err))
            return
        self._changes.over("hangs")
        if found != self.uses.value:
            self.uses.publish(found)


def _use(directory: str, namespace: str, pod: str, container: str) -> ControlledUse | None:
    """Read one container's files; None where it has no directory."""
    try:
        top = os.open(directory, _FOLDER)
    except OSError:
        return None
    try:
        samples = _read(top, "sm_node/sm_node.config", read_sm_node)
        spilled = _read(top, "vmem_node/vmem_node.config", read_vmem)
        totals = Counter[int]()
        for row in spilled or ():
            totals[row.index] += row.used_bytes
        return ControlledUse(
            namespace,
            pod,
            container,
            pids=_read(top, f"config/{process_list.NAME}", _pids),
            spilled_bytes=tuple(sorted(totals.items())),
            cores_percent=tuple((one.index, one.own_percent) for one in samples or ()),
        )
    finally:
        os.close(top)


def _read(
    top: int,
    path: str,
    read: Callable[[int, Callable[[int, int], bytes]], _Read | Unreadable],
) -> _Read | None:
    """Return what a file says; None where it cannot be read."""
    folder, _, name = path.partition("/")
    try:
        with _opened(folder, _FOLDER, top) as inner, _opened(name, _FILE, inner) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return None
            found = read(status.st_size, lambda offset, length: os.pread(file, length, offset))
    except OSError:
        return None
    return None if isinstance(found, Unreadable) else found


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pids(size: int, read: Callable[[int, int], bytes]) -> tuple[int, ...] | Unreadable:
    """Return the host's numbers of the container's processes."""
    lines = read(0, min(size, _LONGEST_LIST_BYTES)).split()
    if not all(line.isdigit() and len(line) <= 10 for line in lines):
        return Unreadable("it has something else than numbers")
    return tuple(map(int, lines))
