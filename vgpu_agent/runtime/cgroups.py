"""The control groups of containers: which container a process belongs to, and which processes
belong to a container.

The kubelet gives each pod a cgroup and each container one below it, on cgroup v1, v2 and the
mixture of both, with the drivers `cgroupfs` and `systemd`. A process may make cgroups below the one
of its container and name them as it likes. So it is always the outermost name that counts, and a
search never looks below the cgroup of a pod. Everything here reads /proc and /sys/fs/cgroup and
belongs into a thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# The names that kubelet and runtimes give (systemd writes dashes of a UID as underscores).
_POD_SLICE = re.compile(
    r"(?:[a-z0-9]+-)*kubepods(?:-burstable|-besteffort)?-pod([A-Za-z0-9][A-Za-z0-9._]{0,127})\.slice"
)
_POD_DIRECTORY = re.compile(r"pod([A-Za-z0-9][A-Za-z0-9.-]{0,127})")
_CONTAINER = re.compile(r"(?:cri-containerd-|crio-|docker-)?([A-Za-z0-9]{8,128})(?:\.scope)?")

# The hierarchies of cgroup v1 in which every container has a cgroup, and where a node with both
# versions mounts the second.
_HIERARCHIES = ("", "memory", "pids", "cpu", "systemd", "unified")

_LONGEST_ANSWER = 64 * 1024  # of /proc/<pid>/cgroup and /proc/<pid>/stat
_LONGEST_LIST = 1024 * 1024  # of one cgroup.procs; a hundred thousand processes
_MAX_DEPTH = 6  # of a pod's cgroup; kubelets that run in a container are three deeper than others
_MAX_CGROUPS = 20_000  # of a node, outside of pods
_MAX_BELOW = 256  # cgroups that a container may have made
MAX_PROCESSES = 16_384  # of one container

_START_TIME_FIELD = 19  # of /proc/<pid>/stat, behind the name in parentheses
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """The container that a process belongs to: the kubelet's UID of the pod, and the runtime's id
    of the container.
    """

    pod_uid: str
    container_id: str


def member(text: str) -> Member | None:
    """Return the container that /proc/<pid>/cgroup names; None where it names none, or several.

    Seen from a cgroup namespace, a path begins with ``/..`` and lacks what it has in common with
    that of the namespace.
    """
    found = {
        one
        for line in text.splitlines()
        if (one := _named_by(line.split(":", 2)[-1].split("/"))) is not None
    }
    return found.pop() if len(found) == 1 else None


def member_of(proc_root: str, pid: int, *, seen_at: float) -> Member | None:
    """Return the container of the process ``pid``; None when it has ended, or is in none.

    Args:
        proc_root: where procfs is mounted.
        pid: of the process.
        seen_at: seconds since the boot; a process that began later is not the one that is meant.
    """
    before = _started_at(proc_root, pid)
    if before is None or before > seen_at:
        return None
    text = _text(f"{proc_root}/{pid}/cgroup", _LONGEST_ANSWER)
    return member(text) if text and _started_at(proc_root, pid) == before else None


class PodCgroups:
    """The cgroups of this node's pods. State: where they were found last.

    Args:
        root: where cgroups are mounted, those of the host and not only the agent's own.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._pods: dict[str, str] = {}  # UID → directory

    def processes(self, wanted: Member) -> tuple[int, ...]:
        """The processes of a container, by number; none when it has no cgroup any more."""
        directory = self._container(wanted)
        if directory is None:
            directory = self._search(wanted)
        return _processes(directory) if directory is not None else ()

    def _container(self, wanted: Member) -> str | None:
        pod = self._pods.get(wanted.pod_uid)
        if pod is None:
            return None
        for entry in _below(pod, _MAX_BELOW):
            matched = _CONTAINER.fullmatch(os.path.basename(entry))
            if matched is not None and matched[1] == wanted.container_id:
                return entry
        return None

    def _search(self, wanted: Member) -> str | None:
        """Read the pods again, from the first hierarchy that has the container."""
        for hierarchy in _HIERARCHIES:
            base = os.path.join(self._root, hierarchy)
            if not os.path.exists(f"{base}/cgroup.procs"):
                continue
            self._pods = dict(_pods_below(base))
            if directory := self._container(wanted):
                return directory
        return None


def _named_by(components: list[str]) -> Member | None:
    for place, component in enumerate(components):
        uid = _pod_uid(component)
        if uid:
            behind = components[place + 1] if place + 1 < len(components) else ""
            matched = _CONTAINER.fullmatch(behind)
            return Member(uid, matched[1]) if matched is not None else None
    return None


def _pod_uid(name: str) -> str:
    if (matched := _POD_SLICE.fullmatch(name)) is not None:
        return matched[1].replace("_", "-")
    matched = _POD_DIRECTORY.fullmatch(name)
    return matched[1] if matched is not None and not name.endswith(".slice") else ""


def _pods_below(base: str) -> Iterator[tuple[str, str]]:
    """UID and directory of each pod, without a look into what belongs to one."""
    left = _MAX_CGROUPS
    level = [base]
    for _ in range(_MAX_DEPTH):
        deeper: list[str] = []
        for directory in level:
            for entry in _below(directory, left):
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
    for _ in range(_MAX_BELOW):
        if not waiting or len(found) >= MAX_PROCESSES:
            break
        at = waiting.pop()
        for line in _text(f"{at}/cgroup.procs", _LONGEST_LIST).split():
            if line.isdecimal() and line != "0":  # 0: one that this PID namespace does not show
                found.add(int(line))
        waiting += _below(at, _MAX_BELOW)
    return tuple(sorted(found)[:MAX_PROCESSES])


def _below(directory: str, most: int) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            directories = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            return list(itertools.islice(directories, max(most, 0)))
    except OSError:  # it has ended meanwhile
        return []


def _started_at(proc_root: str, pid: int) -> float | None:
    """Seconds from the boot to the begin of the process; None when there is none."""
    fields = _text(f"{proc_root}/{pid}/stat", _LONGEST_ANSWER).rpartition(")")[2].split()
    if len(fields) <= _START_TIME_FIELD or not fields[_START_TIME_FIELD].isdecimal():
        return None
    return int(fields[_START_TIME_FIELD]) / _TICKS


def _text(path: str, most: int) -> str:
    """The content of a file of the kernel's; empty when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        pieces: list[bytes] = []
        while most > 0 and (piece := os.read(descriptor, most)):
            pieces.append(piece)
            most -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:  # ESRCH: it ended between open and read
        return ""
    finally:
        os.close(descriptor)
