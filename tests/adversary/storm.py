"""Everything that tenants and neighbours can throw at one agent, at once,
while well-behaved pods want to start.

The agent's real process runs in a memory cgroup as large as the DaemonSet's limit.
`scripts/bench --only storm` throws all of it and holds the figures; tests/adversary/test_storm.py
throws a tenth of the files with every run of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.adversary.memory_cgroup import MemoryCgroup
from tests.component.volcano import NODE, NUMBER, VGPU, VolcanoStage, asks, volcano_stage
from vgpu_agent.sim.agent_process import AgentProcess

LIMIT_MIB = 256  # resources.limits.memory of manifests/daemonset.yaml
PODS = 110  # as many as a kubelet takes by default
CONNECTIONS = 1_000

# What the API server takes of one pod: annotations of 256 KiB in all, and an object of 1.5 MiB.
_ANNOTATIONS_BYTES = 250 * 1024
_ENVIRONMENT_BYTES = 1_100_000
# which ask for a GPU besides, and name it in an annotation as long as an annotation can be
_HOSTILE_PODS = 10
_CONNECT_AT_ONCE = 100


@dataclasses.dataclass(frozen=True)
class Endured:
    """Measurements of an agent in a storm.

    Attributes:
        starts: seconds of each PreStartContainer of a well-behaved pod.
        peak_mib: the most memory that the process had resident (VmHWM).
        kills: processes that the kernel killed in the cgroup.
        restarted: the process is another one than before.
        alive: seconds that ``/livez`` took to say yes in the end.
    """

    starts: tuple[float, ...]
    peak_mib: float
    kills: int
    restarted: bool
    alive: float


class StormStage(VolcanoStage):
    """A node whose agent runs in a memory cgroup."""

    cgroup: MemoryCgroup

    def new_agent(self) -> AgentProcess:
        """The agent of this node, in its cgroup, not started."""
        self.agent = AgentProcess(
            self.log,
            kubelet=self.cluster.kubelet_directory,
            simulate=self.gpus.directory,
            config=self.config,
            through=self.cgroup.command,
            constants=self.constants,
        )
        return self.agent


async def endure(stage: StormStage, *, files: int, starts: int) -> Endured:
    """Throw everything at the agent of ``stage``, and start well-behaved pods meanwhile.

    Args:
        stage: a node in a cluster with Volcano's scheduler, no agent yet.
        files: how many a tenant has left in the folder that a plugin before gave it.
        starts: how many pods are started, one after the other.
    """
    await asyncio.to_thread(
        _fill,
        stage.folder / "vgpu" / "vgpu" / "containers" / f"{'0' * 8}-0000-4000-8000-{'0' * 12}_main",
        files,
    )
    _create_largest_pods(stage)
    await stage.start_agent(VGPU)
    pid = stage.agent.pid
    with _slow_connections(stage.agent.public_address) as connect:
        await connect()
        began = time.monotonic()
        for number in range(starts):
            name = f"good-{number}"
            await stage.serve(name, asks(1, 16))
            stage.cluster.delete_pod(name)
            # bound early
            await stage.cluster.until(lambda name=name: not stage.cluster.exists(name))  # type: ignore[misc]  # mypy does not infer a lambda with a default
        timings = [
            timing.seconds
            for timing in stage.cluster.kubelet.timings("PreStartContainer", NUMBER, since=began)
        ]
        asked = time.monotonic()
        status, text = await stage.agent.get_text("/livez")
        assert status == 200, text
        alive = time.monotonic() - asked
    peak_kib = int(_status_line(stage.agent.pid, "VmHWM"))
    return Endured(
        tuple(timings), peak_kib / 1024, stage.cgroup.kills, stage.agent.pid != pid, alive
    )


def _create_largest_pods(stage: VolcanoStage) -> None:
    """Bind as many pods as a node takes to ours, each as large as the API server lets one be."""
    junk = "x" * 32_000
    annotations = {
        f"tenant.example/junk-{number}": junk for number in range(_ANNOTATIONS_BYTES // len(junk))
    }
    environment = [
        {"name": f"JUNK_{number}", "value": junk}
        for number in range(_ENVIRONMENT_BYTES // len(junk))
    ]
    for number in range(PODS):
        hostile = number < _HOSTILE_PODS
        chosen = {
            "volcano.sh/vgpu-ids-new": "GPU-" + "9" * (_ANNOTATIONS_BYTES - 100),
            "volcano.sh/vgpu-node": NODE,
        }
        container = {
            "name": "main",
            "image": "example",
            "env": environment,
            "resources": {"limits": {NUMBER: "1"} if hostile else {}},
        }
        stage.cluster.objects.create(
            "pods",
            {
                "metadata": {
                    "name": f"large-{number}",
                    "annotations": chosen if hostile else annotations,
                },
                "spec": {
                    "schedulerName": "default-scheduler",
                    "nodeName": NODE,
                    "containers": [container],
                },
            },
        )


def _fill(directory: Path, files: int) -> None:
    """Make a folder with that many files, as a container may that has the folder mounted."""
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        for number in range(files):
            os.close(
                os.open(
                    f"junk-{number}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=descriptor
                )
            )
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _slow_connections(address: str) -> Iterator[AsyncConnector]:
    """Connections that send a few bytes of a request and then wait, from a neighbour pod."""
    sockets: list[socket.socket] = []
    try:
        yield AsyncConnector(address, sockets)
    finally:
        for each in sockets:
            each.close()


class AsyncConnector:
    """Opens `CONNECTIONS` connections when called;
    those that the agent closes at once count as opened.
    """

    def __init__(self, address: str, sockets: list[socket.socket]) -> None:
        self._address, self._sockets = address, sockets

    async def __call__(self) -> None:
        """Open them, some at a time."""
        for _ in range(CONNECTIONS // _CONNECT_AT_ONCE):
            await asyncio.gather(*(self._open() for _ in range(_CONNECT_AT_ONCE)))

    async def _open(self) -> None:
        host, _, port = self._address.rpartition(":")
        opened = socket.socket()
        opened.setblocking(False)
        self._sockets.append(opened)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            await loop.sock_connect(opened, (host, int(port)))
            await loop.sock_sendall(opened, b"GET /metrics HTTP/1.1\r\nHost: a")


def _status_line(pid: int, name: str) -> str:
    """A number of /proc/<pid>/status, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


@contextlib.asynccontextmanager
async def storm_stage(folder: Path, cgroup: MemoryCgroup) -> AsyncIterator[StormStage]:
    """A stage whose agent lives in ``cgroup``; kubelet tries refused starts again after some
    seconds, as the real one does.
    """
    async with volcano_stage(folder, of=StormStage, retry_seconds=5.0) as stage:
        assert isinstance(stage, StormStage)
        stage.cgroup = cgroup
        yield stage
