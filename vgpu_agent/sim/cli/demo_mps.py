"""The demo's story about MPS: two pods compute on one GPU at the same time, and the daemon that
they share is killed.

It has a node of its own, whose ``nvidia-cuda-mps-control`` and ``nvidia-smi`` are stand-ins that
behave like the real ones; a client program of the daemon reports its limits. Called by `demo` after
its main part; everything it starts ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from vgpu_agent.errors import AgentError, SimulationError
from vgpu_agent.sim.agent_process import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

    from vgpu_agent.sim.cli.narrator import Narrator
    from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet
    from vgpu_agent.sim.mps_tools import MpsTools

_GPU = "nvidia.com/gpu"
_PODS = ("infer-a", "infer-b")

_CONFIG = """\
version: v1
sharing:
  mps:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
"""
# other values for constants of the agent's modules: shorter times, so that the demo is quick
_CONSTANTS = {
    "vgpu_agent.mps.daemon:PROBE_SECONDS": 0.2,
    "vgpu_agent.mps.daemon:BACKOFF_MIN_SECONDS": 0.2,
}


async def play_mps(directory: Path, narrator: Narrator) -> None:
    """Play the story below ``directory``, which must have a short path, because sockets are made in
    it.

    Raises:
        AgentError: a check failed; the message holds the agent's last lines.
        TimeoutError: something did not happen in time.
    """
    # The kubelet needs the extra packages of the simulation, and this module is imported without
    # them.
    from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet  # noqa: PLC0415
    from vgpu_agent.sim.mps_tools import MpsTools, end_daemon  # noqa: PLC0415
    from vgpu_agent.sim.state import SimulatedNode  # noqa: PLC0415

    narrator.scene(
        "MPS: pods compute on one GPU at the same time (another node, with stand-ins for NVIDIA's "
        "tools)"
    )
    await asyncio.to_thread(
        SimulatedNode.create, directory / "gpus", model="A100-SXM4-80GB", gpus=1
    )
    tools = await asyncio.to_thread(MpsTools.install, directory / "tools", directory / "gpus")
    config = directory / "config.yaml"
    await asyncio.to_thread(config.write_text, _CONFIG)
    kubelet = SimulatedKubelet(directory / "kubelet")
    await kubelet.start()
    agent = AgentProcess(
        directory / "agent.log",
        kubelet=directory / "kubelet",
        simulate=directory / "gpus",
        config=config,
        constants=_CONSTANTS
        | {
            "vgpu_agent.mps.host_tools:CONTROL_BINARY": str(tools.control),
            "vgpu_agent.mps.host_tools:SMI_BINARY": str(tools.smi),
        },
    )
    story = _Story(kubelet, agent, tools, directory / "gpus" / "mps" / _GPU / "pipe", narrator)
    try:
        await story.play()
    except (AgentError, TimeoutError) as err:
        tail = await asyncio.to_thread(agent.log_tail)
        raise SimulationError(
            f"{err}\nlast lines of the log of the agent with MPS:\n{tail}"
        ) from err
    finally:
        with contextlib.suppress(AgentError):
            await agent.terminate()
        await asyncio.to_thread(end_daemon, directory / "gpus" / "mps" / _GPU / "pipe")
        await kubelet.stop()


class _Story:
    """The scenes, on a node that is already built."""

    def __init__(
        self,
        kubelet: SimulatedKubelet,
        agent: AgentProcess,
        tools: MpsTools,
        pipe: Path,
        narrator: Narrator,
    ) -> None:
        """Build it.

        Args:
            kubelet: the kubelet of the node, which is listening.
            agent: the agent, not started yet.
            tools: the stand-ins for NVIDIA's programs.
            pipe: the directory in which the MPS daemon makes its pipes, and clients find it.
            narrator: prints the scenes and counts the checks.
        """
        self._kubelet, self._agent, self._tools, self._pipe, self._narrator = (
            kubelet,
            agent,
            tools,
            pipe,
            narrator,
        )

    async def play(self) -> None:
        """Play all scenes in order.

        Raises:
            AgentError: a check failed.
            TimeoutError: something did not happen in time.
        """
        await self._pods_get_their_shares()
        await self._the_daemon_is_killed()
        await self._the_agent_is_killed()

    async def _pods_get_their_shares(self) -> None:
        from vgpu_agent.sim.kubelet.kubelet import Container  # noqa: PLC0415 - as in `play_mps`

        await self._agent.start()
        await self._agent.until_ready()
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == 4)
        daemon = await self._daemon()
        (memory_mib,) = daemon["memory_limit_mib"].values()
        narrator = self._narrator
        narrator.prove(
            (memory_mib, daemon["thread_percentage"]) == (81920 // 4, 25),
            f"the resource is offered once its daemon has confirmed: {memory_mib} MiB and "
            f"{daemon['thread_percentage']} % a client",
        )
        for name in _PODS:
            pod = await self._kubelet.admit(name, [Container("main", {_GPU: 1})])
            variable = "CUDA_MPS_PIPE_DIRECTORY"
            narrator.say(f"     {name}: {variable}={pod.answers['main'].envs[variable]}")
        line = await self._client()
        narrator.say(f"     a program of {_PODS[0]} connected to the daemon, with {line}")
        narrator.prove("threads=25.0" in line, "a client gets the limits of one share")

    async def _the_daemon_is_killed(self) -> None:
        from vgpu_agent.sim.mps_tools import end_daemon  # noqa: PLC0415 - as in `play_mps`

        await self._agent.until("/debug/mps", lambda answer: bool(answer["daemons"][0]["clients"]))
        await self._agent.until(
            "/debug/pods", lambda answer: {pod["name"] for pod in answer["pods"]} >= set(_PODS)
        )
        await asyncio.to_thread(end_daemon, self._pipe)
        lost = await self._agent.until_logged("mps.daemon_lost")
        self._narrator.say(
            f"     mps.daemon_lost: {', '.join(lost['pods'])} had {len(lost['clients'])} client(s)"
        )
        named = sorted(lost["pods"]) == [f"default/{name}" for name in _PODS]
        self._narrator.prove(
            named, "the daemon is killed: its clients are counted and their pods named"
        )
        await self._agent.until(
            "/debug/mps", lambda answer: answer["daemons"][0]["state"] == "running"
        )
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == 4)
        self._narrator.prove(
            "threads=25.0" in await self._client(),
            "a new one is there, with the limits in force, for programs that start again",
        )

    async def _the_agent_is_killed(self) -> None:
        await self._agent.kill()
        await self._agent.start()
        await self._agent.until_ready()
        daemon = await self._daemon()
        self._narrator.prove(
            daemon["adopted"] and bool(daemon["clients"]),
            "the agent is killed: the next one adopts the daemon, and no client is lost",
        )

    async def _daemon(self) -> dict[str, Any]:
        answer = await self._agent.until(
            "/debug/mps",
            lambda answer: [daemon["state"] for daemon in answer["daemons"]] == ["running"],
        )
        return dict(answer["daemons"][0])

    async def _client(self) -> str:
        """Start a client program, which ends with the daemon; return the limits that it prints."""
        client = await asyncio.to_thread(self._tools.client, self._pipe)
        if client.stdout is None:
            raise SimulationError("the client of the MPS daemon has no output")
        return (await asyncio.to_thread(client.stdout.readline)).strip()
