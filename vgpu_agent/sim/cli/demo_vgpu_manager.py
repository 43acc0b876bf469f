"""The demo's story about vgpu-manager: two containers of one pod and a second pod have their own
parts of the GPUs, as its scheduler claimed them. A claim here is vgpu-manager's: the share of a
card that is planned for a container, in the annotation ``pre-allocated``.

It starts a simulated API server, kubelet and container runtime, a stand-in for vgpu-manager's
scheduler, and another agent on a node of its own with ``families.vgpuManager``. Called by `demo`;
everything it starts ends with it. The library for the containers is a stand-in, too, and limits
nothing, because there is no GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import AgentError, SimulationError
from vgpu_agent.sim.agent_process import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

    from vgpu_agent.sim.cli.narrator import Narrator
    from vgpu_agent.sim.cluster import SimulatedCluster

_NUMBER, _CORES, _MEMORY = (f"nvidia.com/vgpu-{name}" for name in ("number", "cores", "memory"))
_REGISTER = "nvidia.com/node-device-register"  # an annotation: the node's GPUs
# the claims as the scheduler has planned them, and as the agent has granted them
_PLANNED, _REAL = "nvidia.com/pre-allocated", "nvidia.com/real-allocated"
_PHASE = "nvidia.com/assigned-phase"  # a label: how far the pod's assignment has come
_SCHEDULER = "vgpu-scheduler"
# pod → the limits of each of its containers
_ASKED = {
    "train": [{_NUMBER: 1, _CORES: 50, _MEMORY: 8000}, {_NUMBER: 1, _CORES: 10, _MEMORY: 1024}],
    "infer": [{_NUMBER: 2, _CORES: 20, _MEMORY: 3000}],
}

_CONFIG = """\
version: v1
nodeName: {node}
kubeconfig: {directory}/cluster/kubeconfig
stateDirectory: {directory}/state
families:
  nvidia: false
  vgpuManager: true
binding:
  cdiDirectory: {directory}/cluster/cdi
vgpuControl:
  hostDirectory: {directory}/control
"""


async def play_vgpu_manager(directory: Path, narrator: Narrator) -> None:
    """Play the story below ``directory``, which must have a short path: sockets are in it.
    ``narrator`` prints it, and fails the demo when something that it is to prove does not hold.

    Raises:
        AgentError: a check failed; the message holds the agent's last lines.
        TimeoutError: something did not happen in time.
    """
    # These need the extra packages of the simulation, and this module is imported without them.
    from vgpu_agent.sim.cluster import SimulatedCluster  # noqa: PLC0415
    from vgpu_agent.sim.stand_in_library import deliver_stand_in_control_library  # noqa: PLC0415
    from vgpu_agent.sim.state import SimulatedNode  # noqa: PLC0415

    # the stand-in scheduler runs in this process, and its log is not part of the story
    log.configure(level="error")
    narrator.scene(
        "vgpu-manager: three containers share two GPUs (another node, with a stand-in for its "
        "scheduler and an agent of its own)"
    )
    await asyncio.to_thread(SimulatedNode.create, directory / "gpus", model="A10", gpus=2)
    await asyncio.to_thread(deliver_stand_in_control_library, directory / "control")
    config = directory / "config.yaml"
    async with SimulatedCluster(directory / "cluster") as cluster:
        await asyncio.to_thread(
            config.write_text, _CONFIG.format(node=cluster.node, directory=directory)
        )
        agent = AgentProcess(
            directory / "agent.log",
            kubelet=cluster.kubelet_directory,
            simulate=directory / "gpus",
            config=config,
        )
        try:
            await _Story(cluster, agent, narrator).play()
        except (AgentError, TimeoutError) as err:
            tail = await asyncio.to_thread(agent.log_tail)
            raise SimulationError(
                f"{err}\nlast lines of the log of vgpu-manager's agent:\n{tail}"
            ) from err
        finally:
            with contextlib.suppress(AgentError):
                await agent.terminate()


class _Story:
    """The scenes, on a node that is already built."""

    def __init__(self, cluster: SimulatedCluster, agent: AgentProcess, narrator: Narrator) -> None:
        self._cluster, self._agent, self._narrator = cluster, agent, narrator

    async def play(self) -> None:
        """Play all scenes in order.

        Raises:
            AgentError: a check failed.
            TimeoutError: something did not happen in time.
        """
        await self._vgpus_are_offered()
        await self._pods_run()
        self._containers_have_their_claims()
        await self._annotations_show_success()

    async def _vgpus_are_offered(self) -> None:
        cluster = self._cluster
        await self._agent.start()
        await self._agent.until_ready()

        def offered() -> int:
            status = cluster.node_object()["status"].get("allocatable") or {}
            return int(status.get(_NUMBER, 0))

        await cluster.until(lambda: offered() > 0, "the Node to show vGPUs")
        self._narrator.prove(
            _REGISTER in cluster.node_object()["metadata"].get("annotations", {}),
            f"the Node offers {offered()} × {_NUMBER} and describes its GPUs to the scheduler",
        )
        await cluster.start_extender()  # the stand-in for vgpu-manager's scheduler

    async def _pods_run(self) -> None:
        for name, limits in _ASKED.items():
            self._cluster.create_pod(name, limits, scheduler=_SCHEDULER)
        await self._cluster.running(*_ASKED)
        for name in _ASKED:
            self._narrator.say(f"     {name}: {_PLANNED}: {self._written(name, _PLANNED)}")
        self._narrator.prove(
            all(self._written(name, _PLANNED) for name in _ASKED),
            "the scheduler wrote a claim for each container, and the pods run",
        )

    def _containers_have_their_claims(self) -> None:
        # The parser of the stand-in scheduler; imported late as in `play_vgpu_manager`.
        from vgpu_agent.sim.vgpu_manager.formats import read_claims  # noqa: PLC0415

        checked = 0
        for name in _ASKED:
            for container, cards in (read_claims(self._written(name, _PLANNED)) or {}).items():
                (received,) = self._cluster.starts(name, container)
                expected = {"NVIDIA_VISIBLE_DEVICES": ",".join(card.uuid for card in cards)}
                for card in cards:  # `index`: the card's number on the node
                    expected[f"CUDA_MEM_LIMIT_{card.index}"] = f"{card.memory}m"
                    expected[f"CUDA_CORE_LIMIT_{card.index}"] = str(card.cores)
                got = {key: received.environment.get(key, "") for key in expected}
                shown = ", ".join(f"{key}={value}" for key, value in got.items())
                self._narrator.say(f"     {name}/{container} started with {shown}")
                if got != expected:
                    raise SimulationError(
                        f"container {container} of pod {name} started with {got}, and the "
                        f"scheduler wrote {expected}"
                    )
                checked += 1
        self._narrator.prove(
            checked == sum(map(len, _ASKED.values())),
            "each container has the GPUs and limits that were claimed for it, whatever ids the "
            "kubelet picked",
        )

    async def _annotations_show_success(self) -> None:
        def done(name: str) -> bool:
            labels = self._cluster.pod(name)["metadata"].get("labels") or {}
            return labels.get(_PHASE) == "succeed"

        await self._cluster.until(lambda: all(map(done, _ASKED)), "the pods to be marked as served")
        self._narrator.prove(
            all(self._written(name, _REAL) == self._written(name, _PLANNED) for name in _ASKED),
            f"{_REAL} repeats the claims, and {_PHASE} is succeed, as with the replaced plugin",
        )

    def _written(self, name: str, key: str) -> str:
        return self._cluster.annotations(name).get(key, "")
