"""The part of the demo about Volcano: two pods share one GPU, each with 3000 MiB and half of the
compute.

It starts a simulated API server, kubelet and container runtime, a stand-in for Volcano's scheduler,
and a second agent on another node with ``families.volcanoVgpu``. `demo` calls it after its main
part. All that it starts is stopped at its end. The library that limits the pods is a stand-in that
limits nothing, because there is no GPU.
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

# The resources that the pods ask for: GPUs, and of each the memory and the compute.
_NUMBER, _MEMORY, _CORES = (
    "volcano.sh/vgpu-number",
    "volcano.sh/vgpu-memory",
    "volcano.sh/vgpu-cores",
)
# Annotations: of a pod, the cards that the scheduler has chosen; of the Node, its cards.
_IDS, _REGISTER = "volcano.sh/vgpu-ids-new", "volcano.sh/node-vgpu-register"
_MEMORY_MIB, _CORES_PERCENT = 3000, 50
_PODS = ("infer-a", "infer-b")
# The variables of a container that the demo shows: its card, and the limits of memory and compute.
_SHOWN = ("NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_SM_LIMIT")

_CONFIG = """\
version: v1
nodeName: {node}
kubeconfig: {directory}/cluster/kubeconfig
stateDirectory: {directory}/state
families:
  nvidia: false
  volcanoVgpu: true
binding:
  cdiDirectory: {directory}/cluster/cdi
hamiCore:
  hostDirectory: {directory}/vgpu
"""


async def play_volcano(directory: Path, narrator: Narrator) -> None:
    """Run this part of the demo.

    Args:
        directory: the parent of all files, with a path that is short enough for sockets in it.
        narrator: prints the scenes and counts the checks.

    Raises:
        AgentError: a check failed, or something did not happen in time. The message has the last
            lines of the agent's log.
    """
    # These need the extra packages of the simulation, and this module is imported without them.
    from vgpu_agent.sim.cluster import SimulatedCluster  # noqa: PLC0415
    from vgpu_agent.sim.stand_in_library import deliver_stand_in_library  # noqa: PLC0415
    from vgpu_agent.sim.state import SimulatedNode  # noqa: PLC0415

    # the stand-in scheduler runs in this process, and its log must not appear in the output
    log.configure(level="error")
    narrator.scene(
        "Volcano: two pods share one GPU (a second node, with an API server, a stand-in scheduler "
        "and an agent of its own)"
    )
    await asyncio.to_thread(SimulatedNode.create, directory / "gpus", model="T4", gpus=2)
    await asyncio.to_thread(deliver_stand_in_library, directory / "vgpu")
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
                f"{err}\nlast lines of the log of Volcano's agent:\n{tail}"
            ) from err
        finally:
            with contextlib.suppress(AgentError):
                await agent.terminate()


class _Story:
    """The scenes, on a simulated node that exists already."""

    def __init__(self, cluster: SimulatedCluster, agent: AgentProcess, narrator: Narrator) -> None:
        self._cluster, self._agent, self._narrator = cluster, agent, narrator

    async def play(self) -> None:
        """Run all scenes in order.

        Raises:
            AgentError: a check failed.
            TimeoutError: something did not happen in time.
        """
        await self._offer_the_node()
        await self._schedule_pods()
        self._check_limits_of_containers()
        await self._show_evidence()
        await self._check_annotations_after_start()

    async def _offer_the_node(self) -> None:
        # imported here for the same reason as in `play_volcano`
        from vgpu_agent.sim.volcano.scheduler import VolcanoSettings  # noqa: PLC0415

        cluster = self._cluster
        described = list[bool]()  # whether the Node had the annotation at the first registration

        def registered() -> bool:
            if cluster.kubelet.called("Register") and not described:
                described.append(
                    _REGISTER in cluster.node_object()["metadata"].get("annotations", {})
                )
            return bool(described)

        await self._agent.start()
        await cluster.until(registered, "the agent to register")
        self._narrator.prove(
            described[0],
            "the Node has the scheduler's annotation before the agent registers with the kubelet",
        )
        await self._agent.until_ready()
        await cluster.until(
            lambda: self._allocatable(_MEMORY) > 0 and self._allocatable(_CORES) > 0,
            "the Node to show vGPU",
        )
        await cluster.start_volcano(VolcanoSettings(policy="binpack"))

    async def _schedule_pods(self) -> None:
        for name in _PODS:
            self._cluster.create_pod(
                name, {_NUMBER: 1, _MEMORY: _MEMORY_MIB, _CORES: _CORES_PERCENT}
            )
        await self._cluster.running(*_PODS)
        written = {name: self._cluster.annotations(name)[_IDS] for name in _PODS}
        for name, text in written.items():
            self._narrator.say(f"     {name}: {_IDS}: {text}")
        cards = {text.partition(",")[0] for text in written.values()}
        self._narrator.prove(
            len(cards) == 1,
            f"the scheduler packed both pods onto one GPU, {cards.pop()}, and they run",
        )

    def _check_limits_of_containers(self) -> None:
        regions = set()
        for name in _PODS:
            (received,) = self._cluster.starts(name)
            shown = ", ".join(f"{key}={received.environment[key]}" for key in _SHOWN)
            self._narrator.say(f"     {name} started with {shown}")
            card, _, memory, cores = (
                self._cluster.annotations(name)[_IDS].removesuffix(":").split(",")
            )
            expected = dict(zip(_SHOWN, (card, f"{memory}m", cores), strict=True))
            if any(received.environment[key] != value for key, value in expected.items()):
                raise SimulationError(
                    f"pod {name} started with {dict(received.environment)}, but the scheduler "
                    f"wrote {expected}"
                )
            # the path inside a container is fixed by the library
            regions.add(received.mounts["/tmp/cudevshr.cache"])  # noqa: S108
        self._narrator.prove(
            len(regions) == len(_PODS),
            f"each container has the limits that the scheduler wrote, {_MEMORY_MIB} MiB and "
            f"{_CORES_PERCENT} %, and its own region",
        )

    async def _show_evidence(self) -> None:
        """Show the agent's evidence: the sentences that say how it knows the pod of each start."""
        self._narrator.say(
            "   the owner of each share and the evidence for it, from /debug/allocations:"
        )
        allocations = (await self._agent.get("/debug/allocations"))["allocations"]
        evidence = {allocation["pod"]: allocation["evidence"] for allocation in allocations}
        for name in _PODS:
            for sentence in evidence.get(name, ()):
                self._narrator.say(f"     {name}: {sentence}")
        uids = {name: self._cluster.pod(name)["metadata"]["uid"] for name in _PODS}
        identified = all(
            any(uid in sentence for sentence in evidence.get(name, ()))
            for name, uid in uids.items()
        )
        self._narrator.prove(
            identified,
            "the pod of each start was identified from the kubelet's own records, by its UID and "
            "container",
        )

    async def _check_annotations_after_start(self) -> None:
        def done(name: str) -> bool:
            return self._cluster.annotations(name).get("volcano.sh/bind-phase") == "success"

        await self._cluster.until(lambda: all(map(done, _PODS)), "the pods to be marked as started")
        for key, value in sorted(self._cluster.annotations(_PODS[0]).items()):
            self._narrator.say(f"     {_PODS[0]}: {key}: {value or '(empty)'}")
        left = [
            name
            for name in _PODS
            if self._cluster.annotations(name)["volcano.sh/devices-to-allocate"]
        ]
        self._narrator.prove(
            not left, "after the start, the annotations of the pods have no device left to allocate"
        )

    def _allocatable(self, resource: str) -> int:
        return int(
            (self._cluster.node_object()["status"].get("allocatable") or {}).get(resource, 0)
        )
