"""The use that containers make of their cards, where the library of `isolation.vgpu_control` limits
them, and their limits as they are written: read from the files in their directories, over and over,
for the metrics and for the check of limits (`web.limits`).

A container may write into two of the four files, or put anything in their place. So nothing is
followed and nothing is mapped, and what cannot be read is not known. Its limits and the list of its
processes are in a directory that it can only read. Which of its processes are on a card comes from
the driver and the kernel, where the agent sees the host's processes. One loop, started by `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import stat
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeVar

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation import vgpu_control
from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_config import ReadConfig, is_looser, read_config
from vgpu_agent.isolation.vgpu_tables import read_sm_node, read_vmem
from vgpu_agent.log import ChangeFilter
from vgpu_agent.model import ControlledUse, WrittenLimit
from vgpu_agent.runtime import process_list
from vgpu_agent.runtime.cgroups import member_of
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.region_slots import behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.isolation.vgpu_config import SlotLimit
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import GpuUsage
    from vgpu_agent.pods import PodCache

_DEADLINE_SECONDS = 30.0
_LONGEST_LIST_BYTES = process_list.MAX_READ * 11
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CONFIG = f"/{vgpu_control.CONFIG_FILE}"
_MAX_PROCESSES = 1024  # of one card
_ALL_CORES = 100

_Read = TypeVar("_Read")


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The driver's last answer about the use of cards, and when it came (unix seconds)."""

    usage: tuple[GpuUsage, ...] = ()
    at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """A container whose files are looked for; ``required``: it has been started with a share."""

    pod_uid: str
    namespace: str
    pod: str
    name: str
    container_id: str
    required: bool

    @property
    def directory(self) -> str:
        return f"{self.pod_uid}_{self.name}"


class ControlledUses:
    """The reader.

    State: `uses`, replaced as a whole after each look that found a change, and the limits that each
    container was given, as this agent has seen them first.

    Args:
        book: the pods that live.
        directories: where containers have a directory of their own, ``<pod UID>_<container>``; the
            first that has one counts.
        journal: files that cannot be read in time are recorded there.
        measured: the driver's last answer.
        proc_root: where the host's processes are seen, if they are.
        pause_seconds: between two looks.
    """

    def __init__(
        self,
        pod_cache: PodCache,
        directories: Sequence[str],
        journal: Journal,
        *,
        pause_seconds: float,
        measured: Callable[[], Measured] = Measured,
        proc_root: str = "/proc",
    ) -> None:
        self.uses: Latest[tuple[ControlledUse, ...]] = Latest(())
        self._pod_cache, self._directories = pod_cache, tuple(directories)
        self._journal, self._measured, self._proc_root = journal, measured, proc_root
        self._pause_seconds = pause_seconds
        self._changes = ChangeFilter()
        self._own_thread = OwnThread("use of controlled containers")
        self._given: dict[str, Mapping[int, SlotLimit]] = {}  # directory's name → its limits
        self._looser: frozenset[str] = frozenset()  # directories' names, at the look before

    async def run(self) -> None:
        """Look at intervals, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_seconds)

    def made(self, path: str) -> None:
        """Take the limits of a file that the agent has just made as those that its container was
        given; any other file is left alone. Blocks.
        """
        directory, name = path.removesuffix(_CONFIG), os.path.basename(path.removesuffix(_CONFIG))
        if directory == path or os.path.dirname(directory) not in self._directories:
            return
        with contextlib.suppress(OSError), _opened(behind(directory), _FOLDER) as top:
            if isinstance(found := _read(top, vgpu_control.CONFIG_FILE, read_config), ReadConfig):
                self._given[name] = found.limits

    async def look(self) -> None:
        """Read the files of every live container once, and publish what has changed."""
        containers = [
            _Container(
                pod.kubelet_uid,
                pod.namespace,
                pod.name,
                one.name,
                one.container_id,
                one.started and bool(one.limits),
            )
            for pod in self._pod_cache.pods
            if not pod.ended
            for one in pod.containers
        ]
        # before the files: a process registers before it uses a card
        measured = self._measured()
        try:
            found = await self._own_thread.run(
                self._directories[0],
                lambda: tuple(self._read_all(containers, measured)),
                seconds=_DEADLINE_SECONDS,
            )
        except CarrierError as err:
            if self._changes.is_new("hangs"):
                self._journal.record("region.read_hangs", level="warning", error=str(err))
            return
        self._changes.over("hangs")
        if found != self.uses.value:
            self.uses.publish(found)

    def _read_all(
        self, containers: Sequence[_Container], measured: Measured
    ) -> Iterator[ControlledUse]:
        """Runs in the thread."""
        on_cards = self._on_cards(containers, measured)
        looser: set[str] = set()
        for container in containers:
            use = self._read_one(container, looser)
            if use is not None:
                yield dataclasses.replace(use, on_cards=on_cards.get(container, ()))
        self._looser = frozenset(looser)
        names = {container.directory for container in containers}
        for name in set(self._given) - names:
            self._given.pop(name, None)

    def _read_one(self, container: _Container, looser: set[str]) -> ControlledUse | None:
        for directory in self._directories:
            try:
                with _opened(behind(f"{directory}/{container.directory}"), _FOLDER) as top:
                    return self._use(top, container, looser)
            except OSError:
                continue
        if not container.required:
            return None
        return ControlledUse(
            container.namespace,
            container.pod,
            container.name,
            trouble="it has no vgpu.config on this node",
        )

    def _use(self, top: int, container: _Container, looser: set[str]) -> ControlledUse:
        samples = _known(_read(top, vgpu_control.SM_NODE_FILE, read_sm_node))
        spilled = _known(_read(top, vgpu_control.VMEM_FILE, read_vmem))
        totals = Counter[int]()
        for row in spilled or ():
            totals[row.index] += row.used_bytes
        config = _read(top, vgpu_control.CONFIG_FILE, read_config)
        return ControlledUse(
            container.namespace,
            container.pod,
            container.name,
            pids=_known(_read(top, vgpu_control.PIDS_FILE, _pids)),
            spilled_bytes=tuple(sorted(totals.items())),
            cores_percent=tuple((one.index, one.own_percent) for one in samples or ()),
            limits=_limits(config) if isinstance(config, ReadConfig) else (),
            trouble=self._trouble(config, container, looser),
            registers=isinstance(config, ReadConfig)
            and vgpu_control.is_client(config.compatibility),
        )

    def _trouble(
        self, config: ReadConfig | Unreadable | None, container: _Container, looser: set[str]
    ) -> str:
        """Explain why a file does not limit the container; empty when it does."""
        if config is None:
            return "its vgpu.config is missing"
        if isinstance(config, Unreadable):
            return f"its vgpu.config cannot be used: {config.reason}"
        if not config.is_of(container.pod_uid, container.name):
            return "its vgpu.config is that of another container"
        name = container.directory
        if not is_looser(config.limits, self._given.setdefault(name, config.limits)):
            return ""
        looser.add(name)
        # one look may come between the file of a new start and `made`
        again = name in self._looser
        return "its vgpu.config was changed after the agent wrote it" if again else ""

    def _on_cards(
        self, containers: Sequence[_Container], measured: Measured
    ) -> Mapping[_Container, tuple[tuple[str, int, int], ...]]:
        """The containers' processes on cards. An agent without host PIDs is told of none."""
        known = {(one.pod_uid, one.container_id): one for one in containers if one.container_id}
        age_seconds = max(time.time() - measured.at, 0.0)
        seen_at = time.clock_gettime(time.CLOCK_BOOTTIME) - age_seconds
        found: dict[_Container, list[tuple[str, int, int]]] = defaultdict(list)
        for usage in measured.usage if known else ():
            for pid, memory_mib in usage.processes[:_MAX_PROCESSES]:
                of = member_of(self._proc_root, pid, seen_at=seen_at)
                owner = known.get((of.pod_uid, of.container_id)) if of is not None else None
                if owner is not None:
                    found[owner].append((usage.uuid, pid, memory_mib))
        return {owner: tuple(processes) for owner, processes in found.items()}


def _limits(config: ReadConfig) -> tuple[WrittenLimit, ...]:
    return tuple(
        WrittenLimit(
            limit.uuid,
            limit.total_bytes if limit.memory_limit else 0,
            limit.hard_core if limit.core_limit else _ALL_CORES,
        )
        for _, limit in sorted(config.limits.items())
    )


def _known(found: _Read | Unreadable | None) -> _Read | None:
    return None if isinstance(found, Unreadable) else found


def _read(
    top: int,
    path: str,
    read: Callable[[int, Callable[[int, int], bytes]], _Read | Unreadable],
) -> _Read | Unreadable | None:
    """Return what a file says; None where there is none."""
    folder, _, name = path.partition("/")
    try:
        with _opened(folder, _FOLDER, top) as inner, _opened(name, _FILE, inner) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return Unreadable("it is no file")
            return read(status.st_size, lambda offset, length: os.pread(file, length, offset))
    except FileNotFoundError:
        return None
    except OSError as err:
        return Unreadable(err.strerror or str(err))


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
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
