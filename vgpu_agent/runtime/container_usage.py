"""The GPU use of this node's containers, for the metrics:
read over and over from their shared regions (the file in which HAMi-core counts what the
processes of a container use).

One loop, started by `agent`, copies the few pages of each region that matter. Nothing is mapped, so
a container that ends, or cuts its file short, cannot crash the agent. Only directories of pods that
are known to live are read: those that this agent makes, and those of the plugin that it replaces,
whose pods run on (volcano-vgpu §6).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import stat
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.hami_usage import RegionUse, Unreadable, read_region
from vgpu_agent.log import ChangeFilter
from vgpu_agent.model import ContainerUsage
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.region_slots import resolve_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import Pod, PodCache

# Where volcano-vgpu-device-plugin has put its containers' directories up to v1.11; later ones use
# the same place as this agent.
DIRECTORY_BEFORE_1_12 = "/tmp/vgpu/containers"  # noqa: S108 - a fact about that plugin

_REGION_SUFFIX = ".cache"
_MAX_FILES = 32  # of one directory; the container may fill it as it likes
_HANGS = "hangs"  # the subject in `_changes` for a reading that takes too long
_DEADLINE_SECONDS = 30.0  # for one reading of all regions; then it counts as hung
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# PID 2 is kthreadd on the host, and never in a container: where it is seen, PIDs are those of
# the host.
_KERNEL_PROCESS, _KERNEL_NAME = 2, "kthreadd"
_ENDED = ("Z", "X")  # zombie, dead (proc_pid_status(5))

_Names = dict[str, tuple["Pod", str]]  # directory name → pod and container


class ContainerUsages:
    """The reader of the regions of this node's containers.

    State: `usage`, replaced as a whole after each reading that found a change, and the unreadable
    regions already logged.
    """

    def __init__(
        self,
        pod_cache: PodCache,
        directories: Sequence[str],
        journal: Journal,
        *,
        pause_seconds: float,
        proc_root: str = "/proc",
    ) -> None:
        """Read nothing yet; `run` reads the regions in ``directories``.

        Args:
            pod_cache: the pods that live.
            directories: where containers have a directory of their own, ``<pod UID>_<container>``;
                the first that has one counts. It may be a link to a slot, a small file system
                (`region_slots`).
            journal: regions that cannot be read are recorded there.
            pause_seconds: between two readings of all regions.
            proc_root: where the host's processes are seen, if they are.
        """
        self.usage: Latest[tuple[ContainerUsage, ...]] = Latest(())
        # namespace/pod/container → why its region cannot be read, as of the last reading
        self.unreadable: Mapping[str, str] = {}
        self._pod_cache = pod_cache
        self._directories = tuple(dict.fromkeys(directories))
        self._journal = journal
        self._pause_seconds = pause_seconds
        self._processes = HostProcesses(proc_root)
        self._changes = ChangeFilter()  # unreadable regions by directory name, and `_HANGS`
        self._own_thread = OwnThread("container usage")

    async def run(self) -> None:
        """Read all regions at intervals, until cancelled."""
        while True:
            await self.read_once()
            await asyncio.sleep(self._pause_seconds)

    async def read_once(self) -> None:
        """Read every region once and publish what has changed."""
        names = self._live()
        try:
            found = await self._own_thread.run(
                "the regions of containers", lambda: self._read(names), seconds=_DEADLINE_SECONDS
            )
        except HostFileError as err:
            if self._changes.is_new(_HANGS):
                self._journal.record("region.read_hangs", level="warning", error=str(err))
            return
        self._changes.forget(_HANGS)
        self._journal_unreadable(
            names,
            {
                name: outcome.reason
                for name, outcome in found.items()
                if isinstance(outcome, Unreadable)
            },
        )
        # Two pods have the same name while one replaces the other. The one that was bound later
        # comes last, so its entry stays.
        usage = {
            (pod.namespace, pod.name, container): _entries(pod, container, outcome)
            for name, (pod, container) in names.items()
            if isinstance(outcome := found.get(name), RegionUse)
        }
        shown = tuple(entry for owner in sorted(usage) for entry in usage[owner])
        if shown != self.usage.value:
            self.usage.publish(shown)

    def _live(self) -> _Names:
        # The replaced plugin names a static pod by the API server's UID, the kubelet by the hash of
        # its file.
        return {
            f"{uid}_{container.name}": (pod, container.name)
            for pod in self._pod_cache.pods
            if not pod.ended
            for uid in (pod.uid, pod.kubelet_uid)
            for container in pod.containers
        }

    def _journal_unreadable(self, names: _Names, troubles: Mapping[str, str]) -> None:
        """Log one line for each unreadable region of a live container.
        Only its first reason is logged: the container
        can change its region, and so the reason, as often as it likes.

        Args:
            names: the directories of all live containers.
            troubles: name of a directory → why its region cannot be read.
        """
        self.unreadable = {
            f"{names[name][0].full_name}/{names[name][1]}": reason
            for name, reason in sorted(troubles.items())
        }
        for name, reason in troubles.items():
            if self._changes.is_new(name):
                pod, container = names[name]
                self._journal.record(
                    "region.unreadable",
                    level="warning",
                    pod=pod.full_name,
                    container=container,
                    directory=name,
                    reason=reason,
                )
        self._changes.keep_only(names)

    def _read(self, names: _Names) -> dict[str, RegionUse | Unreadable]:
        """Read the regions; called in a thread."""
        is_alive = self._processes.is_alive if self._processes.visible else _assume_alive
        found: dict[str, RegionUse | Unreadable] = {}
        for directory in self._directories:
            for name in names:
                if (
                    "/" not in name
                    and name not in found
                    and (outcome := _region(resolve_slot(f"{directory}/{name}"), is_alive))
                    is not None
                ):
                    found[name] = outcome
        return found


class HostProcesses:
    """The processes of the host as ``proc_root`` shows them, if it does (`visible`). Nothing is
    cached: every call reads it again.

    A process that is killed leaves its entry in the region behind, with all the memory it had
    (hami-core §2.4). So entries are checked before they are counted.
    """

    def __init__(self, proc_root: str) -> None:
        self._proc_root = proc_root

    @property
    def visible(self) -> bool:
        """Tell whether these are the host's processes;
        an agent without ``hostPID`` sees only its own.
        """
        return self._status(_KERNEL_PROCESS).get("Name") == _KERNEL_NAME

    def is_alive(self, hostpid: int, pid: int) -> bool:
        """Tell whether the process ``hostpid`` on the host, ``pid`` in its container, runs;
        only where they are `visible`.

        Without a PID on the host this is unknown and it counts as alive: memory that is in use
        must not be overlooked.
        """
        if hostpid <= 0:
            return True
        status = self._status(hostpid)
        if not status or status.get("State", "").startswith(_ENDED):
            return False
        # One PID for each PID namespace, the innermost last; another one there means that the host
        # has reused the PID for another process.
        return status.get("NSpid", str(pid)).split()[-1:] == [str(pid)]

    def _status(self, hostpid: int) -> dict[str, str]:
        """The process's status by keyword; empty when there is none."""
        try:
            with open(
                f"{self._proc_root}/{hostpid}/status", encoding="utf-8", errors="replace"
            ) as file:
                lines = file.read().splitlines()
        except OSError:  # also ESRCH, when it ends between open and read
            return {}
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _assume_alive(_hostpid: int, _pid: int) -> bool:
    return True


def _entries(pod: Pod, container: str, use: RegionUse) -> list[ContainerUsage]:
    return [
        ContainerUsage(
            pod.namespace,
            pod.name,
            container,
            device.index,
            device.uuid,
            device.used_bytes,
            device.limit_bytes,
            device.cores_percent,
            use.last_kernel_at,
            device.cores_limit_percent,
            use.processes,
            limits_cores=use.limits_cores,  # whether the library enforces the limits of compute
        )
        for device in use.devices
    ]


def _region(path: str, is_alive: Callable[[int, int], bool]) -> RegionUse | Unreadable | None:
    """Read the region in a container's directory; of several the one that was written last.
    None when there is none.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with os.scandir(folder) as entries:
            # Never opened: links, and devices, which do things when they are opened.
            files = [
                entry.name
                for entry in itertools.islice(entries, _MAX_FILES)
                if entry.is_file(follow_symlinks=False)
            ]
        outcomes = [
            outcome
            for file in files
            if file.endswith(_REGION_SUFFIX) and (outcome := _file(folder, file, is_alive))
        ]
    except OSError:
        return None
    finally:
        os.close(folder)
    outcomes.sort(key=lambda outcome: (isinstance(outcome[1], RegionUse), outcome[0]))
    return outcomes[-1][1] if outcomes else None


def _file(
    folder: int, name: str, is_alive: Callable[[int, int], bool]
) -> tuple[int, RegionUse | Unreadable] | None:
    """Return the time of the file's last write and its content;
    None when it is unusable or has vanished.
    """
    try:
        descriptor = os.open(name, _READ_ONLY, dir_fd=folder)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        outcome = read_region(
            status.st_size,
            lambda offset, length: os.pread(descriptor, length, offset),
            is_alive=is_alive,
        )
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if outcome is None else (status.st_mtime_ns, outcome)
