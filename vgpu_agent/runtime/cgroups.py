"""Look up the container of a process, and the processes of a container, by their cgroups.

The kubelet creates a cgroup for each pod, and below it one for each container. The names depend on
the cgroup driver (`cgroupfs` or `systemd`); cgroup v1, v2 and the hybrid hierarchy are supported. A
process can create cgroups with arbitrary names below that of its container. So the outermost
matching name decides, and the search for pods never descends into the cgroup of a pod. All
functions read /proc or /sys/fs/cgroup and can block, so call them in a thread.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

# The names that the kubelet and runtimes use. With systemd, a UID has underscores for its dashes.
_POD_SLICE = re.compile(
    r"(?:[a-z0-9]+-)*kubepods(?:-burstable|-besteffort)?-pod([A-Za-z0-9][A-Za-z0-9._]{0,127})\.slice"
)
_POD_DIRECTORY = re.compile(r"pod([A-Za-z0-9][A-Za-z0-9.-]{0,127})")
_CONTAINER = re.compile(r"(?:cri-containerd-|crio-|docker-)?([A-Za-z0-9]{8,128})(?:\.scope)?")

# Directories below the root: "" for cgroup v2, the hierarchies of v1 in which every container has a
# cgroup, and "unified", where a hybrid node mounts v2.
_HIERARCHIES = ("", "memory", "pids", "cpu", "systemd", "unified")

_MAX_PROC_FILE_BYTES = 64 * 1024  # of /proc/<pid>/cgroup and /proc/<pid>/stat
_MAX_PROCS_FILE_BYTES = 1024 * 1024  # of one cgroup.procs: about a hundred thousand processes
_MAX_POD_DEPTH = 6  # of a pod's cgroup; it is three levels deeper if the kubelet is in a container
_MAX_NODE_CGROUPS = 20_000  # read on a node, outside of pods
_MAX_CHILD_CGROUPS = 256  # read below one pod or container
MAX_PROCESSES = 16_384  # of one container

_START_TIME_FIELD = 19  # index in /proc/<pid>/stat after the process name in parentheses
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ContainerKey(msgspec.Struct, frozen=True):
    """The identity of a container, as the names of cgroups show it.

    Attributes:
        pod_uid: the kubelet's UID of the pod.
        container_id: the id that the container runtime gave the container.
    """

    pod_uid: str
    container_id: str


def parse_container(text: str) -> ContainerKey | None:
    """Return the container that ``text``, the content of /proc/<pid>/cgroup, names; None if it
    names no container, or several.

    If this process has a cgroup namespace of its own, the paths are relative to its root and begin
    with ``/..``.
    """
    found = {
        one
        for line in text.splitlines()
        if (one := _container_in_path(line.split(":", 2)[-1].split("/"))) is not None
    }
    return found.pop() if len(found) == 1 else None


def container_of(proc_root: str, pid: int, *, seen_at: float) -> ContainerKey | None:
    """Return the container of a process; None if the process has ended or is in no container.

    Args:
        proc_root: the mount point of procfs.
        pid: the id of the process.
        seen_at: the time at which the id was found, in seconds since boot. A process that started
            later is another one with the same id.
    """
    before = _start_time(proc_root, pid)
    if before is None or before > seen_at:
        return None
    text = _read_text(f"{proc_root}/{pid}/cgroup", _MAX_PROC_FILE_BYTES)
    return parse_container(text) if text and _start_time(proc_root, pid) == before else None


class PodCgroups:
    """The cgroups of this node's pods.

    State: a cache of the directories of pods.

    Args:
        root: the mount point of the host's cgroups, usually /sys/fs/cgroup.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._pods: dict[str, str] = {}  # UID → directory

    def processes(self, wanted: ContainerKey) -> tuple[int, ...]:
        """Return the ids of a container's processes in ascending order; none without a cgroup."""
        directory = self._find_container(wanted)
        if directory is None:
            directory = self._search_hierarchies(wanted)
        return _processes(directory) if directory is not None else ()

    def _find_container(self, wanted: ContainerKey) -> str | None:
        pod = self._pods.get(wanted.pod_uid)
        if pod is None:
            return None
        for entry in _child_directories(pod, _MAX_CHILD_CGROUPS):
            matched = _CONTAINER.fullmatch(os.path.basename(entry))
            if matched is not None and matched[1] == wanted.container_id:
                return entry
        return None

    def _search_hierarchies(self, wanted: ContainerKey) -> str | None:
        """Read the directories of all pods again, and return that of the container.

        The first hierarchy that has the container is used.
        """
        for hierarchy in _HIERARCHIES:
            base = os.path.join(self._root, hierarchy)
            if not os.path.exists(f"{base}/cgroup.procs"):
                continue
            self._pods = dict(_pods_below(base))
            if directory := self._find_container(wanted):
                return directory
        return None


def _container_in_path(components: list[str]) -> ContainerKey | None:
    for index, component in enumerate(components):
        uid = _pod_uid(component)
        if uid:
            child = components[index + 1] if index + 1 < len(components) else ""
            matched = _CONTAINER.fullmatch(child)
            return ContainerKey(uid, matched[1]) if matched is not None else None
    return None


def _pod_uid(name: str) -> str:
    """Return the UID in the name of a pod's cgroup; "" for any other name."""
    if (matched := _POD_SLICE.fullmatch(name)) is not None:
        return matched[1].replace("_", "-")
    matched = _POD_DIRECTORY.fullmatch(name)
    return matched[1] if matched is not None and not name.endswith(".slice") else ""


def _pods_below(base: str) -> Iterator[tuple[str, str]]:
    """Yield UID and directory of each pod below ``base``, the root of a hierarchy, without reading
    the directories of pods.
    """
    left = _MAX_NODE_CGROUPS  # cgroups that may still be read
    level = [base]
    for _ in range(_MAX_POD_DEPTH):
        deeper: list[str] = []
        for directory in level:
            for entry in _child_directories(directory, left):
                left -= 1
                uid = _pod_uid(os.path.basename(entry))
                if uid:
                    yield uid, entry
                else:
                    deeper.append(entry)
        level = deeper


def _processes(directory: str) -> tuple[int, ...]:
    found: set[int] = set()
    waiting = [directory]
    for _ in range(_MAX_CHILD_CGROUPS):
        if not waiting or len(found) >= MAX_PROCESSES:
            break
        cgroup = waiting.pop()
        for line in _read_text(f"{cgroup}/cgroup.procs", _MAX_PROCS_FILE_BYTES).split():
            if line.isdecimal() and line != "0":  # 0: a process outside of this PID namespace
                found.add(int(line))
        waiting += _child_directories(cgroup, _MAX_CHILD_CGROUPS)
    return tuple(sorted(found)[:MAX_PROCESSES])


def _child_directories(directory: str, limit: int) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            directories = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            return list(itertools.islice(directories, max(limit, 0)))
    except OSError:  # the cgroup was removed meanwhile
        return []


def _start_time(proc_root: str, pid: int) -> float | None:
    """Return the start time of the process in seconds since boot; None if there is no process."""
    fields = _read_text(f"{proc_root}/{pid}/stat", _MAX_PROC_FILE_BYTES).rpartition(")")[2].split()
    if len(fields) <= _START_TIME_FIELD or not fields[_START_TIME_FIELD].isdecimal():
        return None
    return int(fields[_START_TIME_FIELD]) / _TICKS_PER_SECOND


def _read_text(path: str, max_bytes: int) -> str:
    """Return the first ``max_bytes`` of a kernel file; "" if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        pieces: list[bytes] = []
        while max_bytes > 0 and (piece := os.read(descriptor, max_bytes)):
            pieces.append(piece)
            max_bytes -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:  # ESRCH: the process ended between open and read
        return ""
    finally:
        os.close(descriptor)
