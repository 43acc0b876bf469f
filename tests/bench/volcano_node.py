"""The node on which the benchmark's parts for Volcano measure:
simulated GPUs, up to 110 pods, an API server 20 ms away.

Used by `volcano` and `mixed`. The scheduler's part is done here, by writing pods as it would leave
them: bound, with its annotations, in one change.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cluster import SimulatedCluster
from vgpu_agent.sim.kubelet.endpoint import Timing
from vgpu_agent.sim.stand_in_library import deliver_stand_in_library
from vgpu_agent.sim.state import SimulatedNode

NODE = "node-a"
NUMBER, MEMORY, CORES = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"
RESOURCES = (NUMBER, MEMORY, CORES)
PODS = 110  # as many as kubelet takes by default
LATENCY_SECONDS = 0.020
SEATS = 60  # of each GPU
_IN_MEMORY = "/dev/shm"

# As it is deployed, but for paths, seats, and memory counted in MiB, which makes 49,152 ids.
CONFIG = """\
version: v1
nodeName: {node}
kubeconfig: {folder}/cluster/kubeconfig
stateDirectory: {folder}/state
families: {families}
binding: {{mode: {mode}, cdiDirectory: {cdi}}}
volcanoVgpu: {{deviceSplitCount: {seats}, gpuMemoryFactor: 1, nodeConfigFile: ''}}
hamiCore: {{hostDirectory: {folder}/vgpu}}
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The node's GPUs, and the families that share them.

    Attributes:
        gpus: how many there are.
        gpu_mib: the memory of each, which Volcano counts in MiB.
        families: the configuration's section of that name, in one line, and what else belongs to
            them.
        cards: on how many of the GPUs Volcano's pods are placed.
        pods: of Volcano, when the node is full.
    """

    gpus: int = 2
    gpu_mib: int = 24 * 1024
    families: str = "{nvidia: false, volcanoVgpu: true}"
    cards: int = 2
    pods: int = PODS

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the GPUs, in their order."""
        return tuple(
            f"GPU-{number:08}-aaaa-bbbb-cccc-{number:012}" for number in range(1, self.gpus + 1)
        )


ALONE = Plan()


class VolcanoNode:
    """Simulated cluster, GPUs and the agent's process.

    State: which pods there are and what each holds of which GPU, so that no GPU is given out beyond
    its size.
    """

    def __init__(self, folder: Path, through: Sequence[str] = (), plan: Plan = ALONE) -> None:
        """Prepare it in ``folder``; the agent's process is started ``through`` a command,
        see `AgentProcess`.
        """
        self._folder, self.through, self.plan = folder, tuple(through), plan
        numa = [2 * number // plan.gpus for number in range(plan.gpus)]
        self.gpus = SimulatedNode.create(
            folder / "gpus", model="A10", gpus=plan.gpus, numa=numa, uuids=plan.uuids
        )
        for gpu in self.gpus.state.gpus[: plan.gpus]:
            gpu.memory_total = plan.gpu_mib * 1024**2
        self.cluster = SimulatedCluster(folder / "cluster", node=NODE)
        self.cluster.api.latency_seconds = LATENCY_SECONDS
        # In memory, as /run is on a node; `close` removes it.
        self.cluster.cdi_directory = Path(
            tempfile.mkdtemp(prefix="vgpu-agent-bench-cdi-", dir=_IN_MEMORY)
        )
        self.agent = AgentProcess(
            folder / "agent.log",
            kubelet=self.cluster.kubelet_directory,
            simulate=self.gpus.directory,
            config=folder / "config.yaml",
            through=through,
            module="tests.bench.in_cluster",
        )
        self.pods: dict[str, tuple[str, int]] = {}
        self._numbers = itertools.count()
        deliver_stand_in_library(folder / "vgpu")

    def configure(self, mode: str) -> None:
        """Write the agent's configuration; it takes effect at the next start."""
        families = self.plan.families
        text = CONFIG.format(
            node=NODE,
            folder=self._folder,
            cdi=self.cluster.cdi_directory,
            mode=mode,
            seats=SEATS,
            families=families,
        )
        (self._folder / "config.yaml").write_text(text)

    def close(self) -> None:
        """Remove what lies outside of the folder."""
        shutil.rmtree(self.cluster.cdi_directory, ignore_errors=True)

    async def start(self) -> None:
        """Start the agent, and wait until kubelet offers what it lists."""
        await self.agent.start()
        await self.agent.until_ready()
        kubelet = self.cluster.kubelet
        await self.cluster.until(
            lambda: all(kubelet.resource(name).allocatable for name in RESOURCES),
            "kubelet to offer vGPUs",
        )

    # Pods

    def bind(self, card: str = "") -> str:
        """A pod as the scheduler leaves it, on the GPU ``card`` or the one with the fewest;
        its name.

        Memory is 200 to 440 MiB, never the same twice in a row.
        """
        number = next(self._numbers)
        name, memory = f"p{number:04}", 200 + number * 53 % 241
        if not card:
            used = collections.Counter(given for given, _ in self.pods.values())
            card = min(self.plan.uuids[: self.plan.cards], key=lambda uuid: used[uuid])
        self.pods[name] = (card, memory)
        claim, now = f"{card},NVIDIA,{memory},1:", str(int(time.time()))
        annotations = {
            "volcano.sh/vgpu-node": NODE,
            "volcano.sh/vgpu-time": now,
            "volcano.sh/bind-time": now,
            "volcano.sh/bind-phase": "allocating",
            "volcano.sh/vgpu-ids-new": claim,
            "volcano.sh/devices-to-allocate": claim,
        }
        created = self.cluster.create_pod(
            name, {NUMBER: 1, MEMORY: memory, CORES: 1}, annotations=annotations
        )
        # By a Binding: of a pod that was made with a node's name the agent expects less.
        self.cluster.objects.bind(
            name, created["metadata"]["namespace"], {"target": {"name": NODE}}
        )
        return name

    async def serve(self, count: int) -> list[str]:
        """Bind that many pods at once, and wait until they run."""
        names = [self.bind() for _ in range(count)]
        await self.cluster.running(*names, timeout_seconds=120)
        return names

    async def served(self, names: Iterable[str]) -> None:
        """Wait until the agent has written for all of them that they have been allocated."""
        left = set(names)

        def written() -> bool:
            left.difference_update(
                [
                    name
                    for name in left
                    if self.cluster.annotations(name).get("volcano.sh/bind-phase") == "success"
                ]
            )
            return not left

        await self.cluster.until(written, "the pods' annotations", timeout_seconds=120)

    async def remove(self, names: Sequence[str]) -> None:
        """Delete pods, and wait until they are gone and the agent has nothing more
        to do about it.
        """
        for name in names:
            self.cluster.delete_pod(name)
            del self.pods[name]
        gone = set(names)
        await self.cluster.until(
            lambda: (
                not gone & {pod["metadata"]["name"] for pod in self.cluster.objects.list("pods")}
            ),
            "pods to go",
        )

    # Calls of others than kubelet

    def socket(self, resource: str) -> Path:
        """The socket of the agent's plugin for ``resource``, as registered with the kubelet."""
        return self.cluster.kubelet._endpoints[resource].socket_path

    def free(self, resource: str) -> list[str]:
        """The ids that no container holds; kubelet itself forgets those
        of ended pods at the next allocation.
        """
        kubelet = self.cluster.kubelet
        kubelet._records.clean_up(kubelet._live())
        return list(kubelet._records.free(resource))

    @contextlib.asynccontextmanager
    async def waiting(self, count: int) -> AsyncIterator[list[str]]:
        """Bind that many pods that the kubelet does not admit, and delete them in the end."""
        self.cluster.hold_admission = True
        names = [self.bind() for _ in range(count)]
        bound = {f"default/{name}" for name in names}
        await self.agent.until(
            "/debug/pods", lambda answer: bound <= {pod["pod"] for pod in answer["watched_pods"]}
        )
        try:
            yield names
        finally:
            await self.remove(names)
            self.cluster.hold_admission = False

    # What was measured

    def timings(self, method: str, resource: str, *, since: float) -> list[Timing]:
        """Calls to the plugin that began after `time.monotonic` was ``since``."""
        return self.cluster.kubelet.timings(method, resource, since=since)

    def requests_between(self, began: float, seconds: float) -> list[str]:
        """Requests to the API server in that time (`time.monotonic`),
        the beginning of watches apart.
        """
        offset = time.time() - time.monotonic()
        return [
            f"{request.verb} {request.path}"
            for request in self.cluster.api.requests
            if request.verb != "watch" and began <= request.at - offset <= began + seconds
        ]

    async def resident_mib(self) -> float:
        """VmRSS of the agent."""
        status = await asyncio.to_thread(Path(f"/proc/{self.agent.pid}/status").read_text)
        return (
            next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            / 1024
        )
