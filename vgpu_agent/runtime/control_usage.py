"""The GPU usage of containers under `isolation.vgpu_control`, and the limits as they are written in
each container's ``vgpu.config``; for the metrics and for the check of limits (`web.limits`).

One loop, started by `agent`, reads four files in the directory of each container. The container can
write two of them, the samples of its compute and its spilled memory (allocated for a card, but in
the host's memory), or replace them with anything. So the agent follows no links and maps no file,
and treats an unreadable file as unknown. The other two, the limits and the list of processes, are
in a directory that the container can only read. If the agent sees the host's processes, it also
gets the processes on each card from the driver, and the container of each from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation import vgpu_control
from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_config import ReadConfig, is_looser, read_config
from vgpu_agent.isolation.vgpu_tables import read_sm_node, read_vmem
from vgpu_agent.log import ChangeFilter
from vgpu_agent.model import ControlledUse, WrittenLimit
from vgpu_agent.runtime import process_list
from vgpu_agent.runtime.cgroups import container_of
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.region_slots import resolve_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.isolation.vgpu_config import SlotLimit
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import GpuUsage
    from vgpu_agent.pods import PodCache

_DEADLINE_SECONDS = 30.0  # for one reading of all containers; then it counts as hung
_MAX_LIST_BYTES = process_list.MAX_READ * 11  # a number of up to ten digits, and a newline
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CONFIG_SUFFIX = f"/{vgpu_control.CONFIG_FILE}"
_MAX_PROCESSES = 1024  # of one card
_ALL_CORES_PERCENT = 100

_Read = TypeVar("_Read")


class UsageReading(msgspec.Struct, frozen=True):
    """The last usage of all GPUs that the driver has reported.

    Attributes:
        usage: the usage of each GPU.
        read_at: Unix seconds.
    """

    usage: tuple[GpuUsage, ...] = ()
    read_at: float = 0.0


class _Container(msgspec.Struct, frozen=True):
    """A container that may have files.

    Attributes:
        required: it was started with limits on extended resources. So a missing ``vgpu.config`` is
            reported, in case it has a share.
    """

    pod_uid: str
    namespace: str
    pod: str
    name: str
    container_id: str
    required: bool

    @property
    def directory_name(self) -> str:
        return f"{self.pod_uid}_{self.name}"


class ControlledUses:
    """The loop that reads the files of containers under vgpu-control.

    State: `uses`, replaced as a whole when a reading differs from the one before; and the limits
    that each container started with, as this agent has first read them.

    Args:
        pod_cache: the pods of this node.
        directories: the parents of the containers' directories, ``<pod UID>_<container>``. The
            first parent that has a directory of the container counts. It may be a link to a slot, a
            small file system (`region_slots`).
        journal: receives an entry when the files cannot be read in time.
        usage: returns the driver's last reading.
        proc_root: the mount point of procfs. Processes on cards are found only in the host's.
        pause_seconds: the pause between two readings.
    """

    def __init__(
        self,
        pod_cache: PodCache,
        directories: Sequence[str],
        journal: Journal,
        *,
        pause_seconds: float,
        usage: Callable[[], UsageReading] = UsageReading,
        proc_root: str = "/proc",
    ) -> None:
        self.uses: Latest[tuple[ControlledUse, ...]] = Latest(())
        self._pod_cache, self._directories = pod_cache, tuple(directories)
        self._journal, self._usage, self._proc_root = journal, usage, proc_root
        self._pause_seconds = pause_seconds
        self._changes = ChangeFilter()  # lets a reading that hangs be logged only once
        self._own_thread = OwnThread("use of controlled containers")
        # the limits that containers started with: name of the directory → index of the card →
        # limits on it
        self._initial_limits: dict[str, Mapping[int, SlotLimit]] = {}
        # names of the directories whose limits were looser at the last reading than at the start
        self._looser: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Read at intervals until cancelled."""
        while True:
            await self.read_once()
            await asyncio.sleep(self._pause_seconds)

    def note_written_file(self, path: str) -> None:
        """Store the limits of a ``vgpu.config`` that the agent has just written, because its
        container starts with them. Do nothing for any other file. Blocks.
        """
        directory = path.removesuffix(_CONFIG_SUFFIX)
        if directory == path or os.path.dirname(directory) not in self._directories:
            return
        with contextlib.suppress(OSError), _open(resolve_slot(directory), _DIRECTORY_FLAGS) as top:
            config = _read(top, vgpu_control.CONFIG_FILE, read_config)
            if isinstance(config, ReadConfig):
                self._initial_limits[os.path.basename(directory)] = config.limits

    async def read_once(self) -> None:
        """Read the files of all containers that have not ended, and publish changes."""
        containers = [
            _Container(
                pod.kubelet_uid,
                pod.namespace,
                pod.name,
                container.name,
                container.container_id,
                required=container.started and bool(container.limits),
            )
            for pod in self._pod_cache.pods
            if not pod.ended
            for container in pod.containers
        ]
        # Take the driver's reading before the files. A process registers with the agent before it
        # uses a card, so the list then has each process of the reading.
        usage = self._usage()
        try:
            found = await self._own_thread.run(
                self._directories[0],  # the path that the error names when the reading hangs
                lambda: tuple(self._read_all(containers, usage)),
                seconds=_DEADLINE_SECONDS,
            )
        except HostFileError as err:
            if self._changes.is_new("hangs"):
                self._journal.record("region.read_hangs", level="warning", error=str(err))
            return
        self._changes.forget("hangs")
        if found != self.uses.value:
            self.uses.publish(found)

    def _read_all(
        self, containers: Sequence[_Container], usage: UsageReading
    ) -> Iterator[ControlledUse]:
        """Read the files of ``containers``; runs in the thread."""
        on_cards = self._processes_on_cards(containers, usage)
        looser: set[str] = set()
        for container in containers:
            use = self._read_one(container, looser)
            if use is not None:
                yield msgspec.structs.replace(use, on_cards=on_cards.get(container, ()))
        self._looser = frozenset(looser)
        names = {container.directory_name for container in containers}
        for name in set(self._initial_limits) - names:
            self._initial_limits.pop(name, None)

    def _read_one(self, container: _Container, looser: set[str]) -> ControlledUse | None:
        for directory in self._directories:
            try:
                path = resolve_slot(f"{directory}/{container.directory_name}")
                with _open(path, _DIRECTORY_FLAGS) as top:
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
        """Read the files in the directory ``top``.

        Add the container's directory to ``looser`` if its limits are looser than those that it
        started with.
        """
        samples = _readable(_read(top, vgpu_control.SM_NODE_FILE, read_sm_node))
        spilled = _readable(_read(top, vgpu_control.VMEM_FILE, read_vmem))
        spilled_bytes = Counter[int]()  # by the card's index
        for row in spilled or ():
            spilled_bytes[row.index] += row.used_bytes
        config = _read(top, vgpu_control.CONFIG_FILE, read_config)
        return ControlledUse(
            container.namespace,
            container.pod,
            container.name,
            pids=_readable(_read(top, vgpu_control.PIDS_FILE, _parse_pids)),
            spilled_bytes=tuple(sorted(spilled_bytes.items())),
            # index of the card → percent of its compute that the container uses itself
            cores_percent=tuple((sample.index, sample.own_percent) for sample in samples or ()),
            limits=_limits(config) if isinstance(config, ReadConfig) else (),
            trouble=self._trouble(config, container, looser),
            registers_processes=isinstance(config, ReadConfig)
            # with the agent, for the library to know whose processes use a card
            and vgpu_control.is_client(config.compatibility),
        )

    def _trouble(
        self, config: ReadConfig | Unreadable | None, container: _Container, looser: set[str]
    ) -> str:
        """Return why the file does not limit the container as intended; empty if it does."""
        if config is None:
            return "its vgpu.config is missing"
        if isinstance(config, Unreadable):
            return f"its vgpu.config cannot be used: {config.reason}"
        if not config.is_of(container.pod_uid, container.name):
            return "its vgpu.config is that of another container"
        name = container.directory_name
        if not is_looser(config.limits, self._initial_limits.setdefault(name, config.limits)):
            return ""
        looser.add(name)
        # A single reading may find a new file before `note_written_file` has stored its limits. So
        # only the second one in a row counts.
        again = name in self._looser
        return "its vgpu.config was changed after the agent wrote it" if again else ""

    def _processes_on_cards(
        self, containers: Sequence[_Container], usage: UsageReading
    ) -> Mapping[_Container, tuple[tuple[str, int, int], ...]]:
        """Return the processes of each container on cards: (UUID of the card, PID, memory in MiB).

        The result is empty if the agent does not see the host's processes.
        """
        by_id = {
            (container.pod_uid, container.container_id): container
            for container in containers
            if container.container_id
        }
        # a process that began after the reading is another one with the same PID
        age_seconds = max(time.time() - usage.read_at, 0.0)
        seen_at = time.clock_gettime(time.CLOCK_BOOTTIME) - age_seconds
        found: dict[_Container, list[tuple[str, int, int]]] = defaultdict(list)
        for gpu in usage.usage if by_id else ():
            for pid, memory_mib in gpu.processes[:_MAX_PROCESSES]:
                key = container_of(self._proc_root, pid, seen_at=seen_at)
                owner = by_id.get((key.pod_uid, key.container_id)) if key is not None else None
                if owner is not None:
                    found[owner].append((gpu.uuid, pid, memory_mib))
        return {owner: tuple(processes) for owner, processes in found.items()}


def _limits(config: ReadConfig) -> tuple[WrittenLimit, ...]:
    return tuple(
        WrittenLimit(
            limit.uuid,
            limit.total_bytes if limit.memory_limit else 0,  # 0: nothing limits memory
            # the percentage that the container always has
            limit.hard_core if limit.core_limit else _ALL_CORES_PERCENT,
        )
        for _, limit in sorted(config.limits.items())
    )


def _readable(found: _Read | Unreadable | None) -> _Read | None:
    """Return ``found``; None if the file is missing or cannot be read."""
    return None if isinstance(found, Unreadable) else found


def _read(
    top: int,
    path: str,
    parse: Callable[[int, Callable[[int, int], bytes]], _Read | Unreadable],
) -> _Read | Unreadable | None:
    """Open and parse the file ``path``, which has the form ``directory/name``.

    Args:
        top: the descriptor of the container's directory.
        path: relative to it.
        parse: parses a file, given its size and a function that reads at (offset, length).

    Returns:
        the content, why it cannot be read, or None if there is no such file.
    """
    directory, _, name = path.partition("/")
    try:
        with (
            _open(directory, _DIRECTORY_FLAGS, top) as inner,
            _open(name, _FILE_FLAGS, inner) as file,
        ):
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return Unreadable("it is no file")
            return parse(status.st_size, lambda offset, length: os.pread(file, length, offset))
    except FileNotFoundError:
        return None
    except OSError as err:
        return Unreadable(err.strerror or str(err))


@contextlib.contextmanager
def _open(path: str, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _parse_pids(size: int, read: Callable[[int, int], bytes]) -> tuple[int, ...] | Unreadable:
    """Return the PIDs of the container's processes, in the host's PID namespace."""
    lines = read(0, min(size, _MAX_LIST_BYTES)).split()
    if not all(line.isdigit() and len(line) <= 10 for line in lines):
        return Unreadable("it has something other than numbers")
    return tuple(map(int, lines))
