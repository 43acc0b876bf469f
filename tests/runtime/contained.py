"""Processes in real cgroups, named as kubelet and container runtime name those of pods."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from vgpu_agent.runtime.cgroups import ContainerKey

CGROUPS = Path("/sys/fs/cgroup")

# Connects to the path that it is told and passes the connection on: the kernel keeps who connected.
_CONNECTS = """
import socket, sys
to = socket.socket(fileno=int(sys.argv[1]))
print(flush=True)
for line in sys.stdin:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(line.rstrip())
    socket.send_fds(to, [b"x"], [connection.fileno()])
    connection.close()
"""


class Contained:
    """A process in the cgroup of a container."""

    def __init__(self, cgroup: Path) -> None:
        ours, theirs = socket.socketpair()
        self._connections = ours
        enters = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        command = [sys.executable, "-S", "-E", "-c", _CONNECTS, str(theirs.fileno())]
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", enters, str(cgroup), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n", "the process could not enter its cgroup"

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, path: Path) -> socket.socket:
        """A connection that this process has made."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n".encode())
        self.process.stdin.flush()
        _, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        return connection

    def move(self, cgroup: Path) -> None:
        """Move it into another cgroup."""
        (cgroup / "cgroup.procs").write_text(str(self.pid))

    def end(self) -> None:
        """Kill it, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._connections.close()


class Container:
    """A container's cgroup, and its processes."""

    def __init__(self, directory: Path, member: ContainerKey, name: str) -> None:
        self.directory, self.member, self.name = directory, member, name
        self._processes: list[Contained] = []

    def start(self, below: str = "") -> Contained:
        """Start a process, in a cgroup ``below`` that of the container."""
        cgroup = self.directory / below
        cgroup.mkdir(parents=True, exist_ok=True)
        self._processes.append(Contained(cgroup))
        return self._processes[-1]

    def end(self) -> None:
        """End all processes and remove the cgroup, as the kubelet does."""
        for process in self._processes:
            process.end()
        self._processes.clear()
        _remove(self.directory)


class Kubepods:
    """The cgroups of pods, below one of this test's own; removed at the end."""

    def __init__(self, base: Path) -> None:
        self._root = base / f"vgpu-agent-test-{os.getpid()}"
        self._containers: list[Container] = []

    def __enter__(self) -> Self:
        self._root.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for container in self._containers:
            container.end()
        _remove(self._root)

    def container(
        self, pod_uid: str = "", name: str = "main", *, systemd: bool = False
    ) -> Container:
        """A container of a pod, as the drivers `cgroupfs` and `systemd` name it."""
        uid, container_id = pod_uid or str(uuid.uuid4()), uuid.uuid4().hex * 2
        directory = (
            self._root
            / "kubepods.slice"
            / "kubepods-burstable.slice"
            / f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
            / f"cri-containerd-{container_id}.scope"
            if systemd
            else self._root / "kubepods" / "burstable" / f"pod{uid}" / container_id
        )
        directory.mkdir(parents=True)
        made = Container(directory, ContainerKey(uid, container_id), name)
        self._containers.append(made)
        return made


def _remove(directory: Path) -> None:
    for folder, _, _ in sorted(os.walk(directory), reverse=True):
        for _ in range(500):  # until the kernel has let go of the last process
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)


def bases() -> list[Path]:
    """The hierarchies of this machine in which cgroups for processes can be made."""
    return [
        base
        for base in (CGROUPS, CGROUPS / "unified", CGROUPS / "pids")
        if (base / "cgroup.procs").exists()
    ]


@contextlib.contextmanager
def kubepods(base: Path | None = None) -> Iterator[Kubepods]:
    """The cgroups of pods in a hierarchy; the test is left out where this machine allows none."""
    usable = [base] if base is not None else bases()
    if not usable or os.geteuid() != 0 or not os.access(usable[0], os.W_OK):
        pytest.skip("it takes root and a writable cgroup hierarchy")
    try:
        (usable[0] / f"vgpu-agent-probe-{os.getpid()}").mkdir()
        (usable[0] / f"vgpu-agent-probe-{os.getpid()}").rmdir()
    except OSError:
        pytest.skip("it takes root and a writable cgroup hierarchy")
    with Kubepods(usable[0]) as made:
        yield made
