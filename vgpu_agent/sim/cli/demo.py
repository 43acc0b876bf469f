"""``vgpu-agent demo``: the agent's main job, shown on a simulated node with its command ``run``.

A story in five scenes: pods get their shares; a GPU breaks and recovers; the agent is killed and
restarted under running pods; the kubelet restarts; a wrong request is refused. Shorter stories
follow about Volcano (`demo_volcano`), vgpu-manager (`demo_vgpu_manager`), scheduling
(`demo_scheduler`) and MPS (`demo_mps`). Each scene states what it proves and checks it.

With ``--check`` the demo does not wait for a person, and the exit status shows the result. Without
it the node stays up, with the addresses to curl, until Ctrl-C. However the demo ends, its agents
end. Unless a signal kills it at once (SIGKILL, SIGQUIT), it also removes the temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vgpu_agent.errors import AgentError, SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cli.demo_mps import play_mps
from vgpu_agent.sim.cli.demo_scheduler import play_scheduler
from vgpu_agent.sim.cli.demo_vgpu_manager import play_vgpu_manager
from vgpu_agent.sim.cli.demo_volcano import play_volcano
from vgpu_agent.sim.cli.narrator import Narrator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.sim.kubelet.kubelet import Pod, SimulatedKubelet
    from vgpu_agent.sim.state import SimulatedNode

_GPU = "nvidia.com/gpu"
_REPLICAS = 4
_QUIET_SECONDS = 2  # how long a GPU must answer without a new fault before it is offered again
_SCENES = 9  # five here, and one of each of the other stories
_FOLLOW_SECONDS = 0.5  # how often the staying demo asks the agent for changes, to tell them
_PUBLIC_PORT, _DEBUG_PORT = 9394, 9395  # the agent's defaults, so that the README's commands work
# signals that end the demo, besides Ctrl-C
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
# exit status when the demo is ended from outside before its last scene
_EXIT_TERMINATED = 128 + signal.SIGTERM

_CONFIG = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: {_GPU}
        replicas: {_REPLICAS}
gpu:
  recovery:
    quietSeconds: {_QUIET_SECONDS}   # a minute by default; the demo is in a hurry
"""

_EXAMPLES = """\
examples:
  vgpu-agent demo            plays the story, then keeps running until Ctrl-C
  vgpu-agent demo --check    plays the story, prints what it proved, exits 0 or 1
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="play the main job on a simulated node",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not wait for a person; exit 0 when everything was as it should be",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        # imported only to check that it is there, so that the user sees no traceback
        import grpc as _grpc  # noqa: F401, PLC0415
    except ImportError as err:
        raise SimulationError(
            "the demo needs more packages than the agent; scripts/demo installs and runs it"
        ) from err
    # A short path: sockets lie below it, and their names are limited to 107 bytes.
    directory = Path(
        tempfile.mkdtemp(prefix="vgpu-demo-", dir="/tmp" if Path("/tmp").is_dir() else None)  # noqa: S108
    )
    try:
        return asyncio.run(_Demo(directory, check=arguments.check).play())
    except asyncio.CancelledError:
        return _EXIT_TERMINATED
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Demo:
    """The story, and the simulated parts that it needs.

    State: the simulated node, kubelet and agent below ``directory``.
    """

    def __init__(self, directory: Path, *, check: bool) -> None:
        self._directory = directory
        self._check = check
        self._narrator = Narrator(_SCENES)
        self._kubelet: SimulatedKubelet
        self._node: SimulatedNode
        self._agent: AgentProcess

    async def play(self) -> int:
        """Play all scenes and return the exit status."""
        # needs the extra packages, see _run
        from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet  # noqa: PLC0415
        from vgpu_agent.sim.state import SimulatedNode  # noqa: PLC0415 - same

        _end_gracefully()
        began = time.monotonic()
        self._narrator.say(
            "A simulated node with 2 × A100, a simulated kubelet, and the agent's own `vgpu-agent "
            "run`."
        )
        self._node = await asyncio.to_thread(
            SimulatedNode.create,
            self._directory / "node",
            model="A100-SXM4-80GB",
            gpus=2,
            numa=[0, 1],
        )
        config = self._directory / "config.yaml"
        await asyncio.to_thread(config.write_text, _CONFIG)
        self._kubelet = SimulatedKubelet(self._directory / "kubelet")
        await self._kubelet.start()
        self._agent = AgentProcess(
            self._directory / "agent.log",
            kubelet=self._directory / "kubelet",
            simulate=self._directory / "node",
            config=config,
            listen=_address(_PUBLIC_PORT, ephemeral=self._check),
            debug_listen=_address(_DEBUG_PORT, ephemeral=self._check),
            # other values for constants of the agent's modules
            constants={"vgpu_agent.gpu.watch:POLL_SECONDS": 1.0},
        )
        try:
            # `counting`: a terminal shows for how long the next line has been awaited
            async with self._narrator.counting():
                await self._scenes()
                await play_volcano(self._directory / "volcano", self._narrator)
                await play_vgpu_manager(self._directory / "manager", self._narrator)
                await play_scheduler(self._directory / "scheduler", self._narrator)
                await play_mps(self._directory / "mps", self._narrator)
            self._narrator.say(
                f"\n{self._narrator.proofs} things checked in {time.monotonic() - began:.1f} s."
            )
            if not self._check:
                await self._stay()
        except (AgentError, TimeoutError) as err:
            print(f"\nNOT AS IT SHOULD BE: {err}", file=sys.stderr)
            print(
                "last lines of the log of the first node's agent:\n"
                f"{await asyncio.to_thread(self._agent.log_tail)}",
                file=sys.stderr,
            )
            return 1
        finally:
            with contextlib.suppress(AgentError):
                await self._agent.terminate()
            await self._kubelet.stop()
        return 0

    async def _scenes(self) -> None:
        pods = await self._pods_get_their_shares()
        await self._a_gpu_breaks_and_recovers()
        await self._the_agent_is_killed(pods)
        await self._kubelet_restarts()
        await self._a_wrong_request_is_refused()

    async def _pods_get_their_shares(self) -> list[Pod]:
        self._narrator.scene(f"Pods get their shares ({_REPLICAS} replicas of each GPU)")
        await self._agent.start()
        await self._agent.until_ready()
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == 2 * _REPLICAS)
        self._narrator.prove(True, f"the node's allocatable shows {2 * _REPLICAS} {_GPU}")
        pods = [await self._admit(f"serve-{letter}") for letter in "abc"]
        pods.append(await self._admit("train", number=2))
        await self._ledger_naming(4)
        self._narrator.prove(
            len({id_ for pod in pods for id_ in self._kubelet.ids_of(pod, "main", _GPU)}) == 5,
            "4 pods hold 5 shares, each id given once",
        )
        both = self._visible(pods[-1]).split(",")
        self._narrator.prove(
            len(set(both)) == 2, "the pod that asked for 2 sees two different GPUs"
        )
        await self._show_gpus("who got which GPU: curl {debug}/debug/pods")
        return pods

    async def _a_gpu_breaks_and_recovers(self) -> None:
        self._narrator.scene("GPU 0 falls off the bus (XID 79), and comes back")
        broken = self._node.uuids[0]
        began = time.monotonic()
        self._node.xid(0, 79)
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == _REPLICAS)
        self._narrator.prove(
            True,
            f"all {_REPLICAS} shares of GPU 0 are Unhealthy at kubelet after "
            f"{time.monotonic() - began:.2f} s; GPU 1 goes on",
        )
        pod = await self._admit("while-broken")
        self._narrator.prove(self._visible(pod) != broken, "a new pod lands on the healthy GPU")
        await self._ledger_naming(5)
        await self._show_gpus("what is wrong with it: curl {debug}/debug/devices")
        await self._kubelet.until(
            lambda: self._kubelet.resource(_GPU).allocatable == 2 * _REPLICAS, timeout_seconds=20
        )
        self._narrator.prove(
            True,
            f"{time.monotonic() - began:.1f} s after the fault it is offered again: it answers, "
            f"and was quiet for {_QUIET_SECONDS} s",
        )

    async def _the_agent_is_killed(self, pods: list[Pod]) -> None:
        self._narrator.scene("The agent is killed (kill -9) and started again under running pods")
        before = {grant["pod"]: grant["ids"] for grant in (await self._ledger_naming(5))["grants"]}
        await self._agent.kill()
        await self._agent.start()
        rebuilt = await self._agent.until_logged("ledger.rebuilt")
        registered = await self._agent.until_logged("plugin.registered")
        self._narrator.prove(
            rebuilt["grants"] == 5 and rebuilt["ts"] <= registered["ts"],
            "it knew all 5 pods before it registered anything",
        )
        after = {grant["pod"]: grant["ids"] for grant in (await self._ledger_naming(5))["grants"]}
        self._narrator.prove(after == before, "every pod holds the very ids it held before")
        await self._agent.until_ready()
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == 2 * _REPLICAS)
        pod = await self._admit("after-restart")
        taken = {id_ for other in pods for id_ in self._kubelet.ids_of(other, "main", _GPU)}
        self._narrator.prove(
            not taken & set(self._kubelet.ids_of(pod, "main", _GPU)), "a new pod gets a free share"
        )

    async def _kubelet_restarts(self) -> None:
        self._narrator.scene("kubelet restarts: it forgets every plugin and wipes their sockets")
        registrations = len(self._kubelet.called("Register"))
        began = time.monotonic()
        await self._kubelet.restart()
        await self._kubelet.until(lambda: len(self._kubelet.called("Register")) > registrations)
        self._narrator.prove(
            True, f"registered again {(time.monotonic() - began) * 1000:.0f} ms after it stopped"
        )
        await self._kubelet.until(lambda: self._kubelet.resource(_GPU).allocatable == 2 * _REPLICAS)
        await self._ledger_naming(6)
        self._narrator.prove(True, "allocatable and all 6 pods are what they were")

    async def _a_wrong_request_is_refused(self) -> None:
        self._narrator.scene("More than there is")
        # needs the extra packages, see _run
        from vgpu_agent.sim.kubelet.faults import AdmissionError  # noqa: PLC0415

        try:
            await self._admit("greedy", number=3)
        except AdmissionError as err:
            self._narrator.prove(
                "Requested: 3, Available: 1" in str(err),
                f"refused, and nobody else is disturbed: {err}",
            )
        else:
            self._narrator.prove(False, "a pod got 3 shares where 1 was left")
        await self._ledger_naming(6)

    async def _stay(self) -> None:
        agent = self._agent
        usual_port = agent.debug_address == f"127.0.0.1:{_DEBUG_PORT}"
        elsewhere = "" if usual_port else f" --debug-listen {agent.debug_address}"
        commands = "\n".join(
            f"  .venv/bin/vgpu-agent {words}{elsewhere}"
            for words in ("status", "top", "pods", "events --since 5m", "explain default/train")
        )
        for address, usual in (
            (agent.public_address, _PUBLIC_PORT),
            (agent.debug_address, _DEBUG_PORT),
        ):
            if address != f"127.0.0.1:{usual}":
                self._narrator.say(
                    f"\nSomething else listens on port {usual}, so this agent took {address}."
                )
        self._narrator.command(
            f"""
The node stays up until Ctrl-C. In another terminal, in this folder:

{commands}
  curl '{agent.debug_address}/debug/?pretty'
  curl {agent.public_address}/metrics

Break a GPU ({_QUIET_SECONDS} s later it is back), and change the number of shares. What
the agent makes of it is shown here:

  .venv/bin/vgpu-agent sim xid {self._directory}/node --gpu 1 --code 79
  sed -i 's/replicas: {_REPLICAS}/replicas: {2 * _REPLICAS}/' {self._directory}/config.yaml

The agent's log is {agent.log_path}.
The page of this node: http://{agent.public_address}/"""
        )
        ended: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, *_ENDINGS):
            asyncio.get_running_loop().add_signal_handler(number, _once, ended, number)
        await self._keep_running(ended)
        if ended.result() is not signal.SIGHUP:  # the terminal is gone
            self._narrator.say("\nEnded. Agent, node and logs are gone.")

    async def _keep_running(self, ended: asyncio.Future[signal.Signals]) -> None:
        """Start the agent again whenever it dies, as kubelet would, until ``ended``, and tell what
        it makes of changes of the node.
        """
        death = asyncio.ensure_future(self._agent.wait(timeout_seconds=math.inf))
        told = await self._state()  # the last state that was told
        while not ended.done():
            either: list[asyncio.Future[Any]] = [death, ended]
            await asyncio.wait(either, timeout=_FOLLOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and not ended.done():
                await self._start_again(death.result())
                death = asyncio.ensure_future(self._agent.wait(timeout_seconds=math.inf))
            told = self._tell_changes(told, await self._state())
        death.cancel()

    async def _start_again(self, status: int) -> None:
        self._narrator.say(
            f"\nThe agent has ended ({_how(status)}). On a node, kubelet starts it again; so do we."
        )
        await self._agent.start()
        await self._agent.until_ready()
        grants = (await self._agent.get("/debug/ledger"))["grants"]
        self._narrator.say(
            f"It is ready again and knows the {len(grants)} containers that hold shares."
        )

    async def _state(self) -> dict[str, str]:
        """Return the state of each GPU and of each resource, as the agent has it; nothing while it
        does not answer.
        """
        try:
            status = await self._agent.get("/debug/status")
        except SimulationError:
            return {}
        gpus = {f"GPU {gpu['index']}": _health(gpu) for gpu in status["gpus"]}
        return gpus | {
            resource["resource"]: f"{resource['ids_healthy']} of {resource['ids']} ids are healthy"
            for resource in status["resources"]
        }

    def _tell_changes(self, before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
        """Tell what differs between two results of `_state`; return the later one that is not
        empty.
        """
        for part, state in now.items():
            if state != before.get(part, state):
                self._narrator.say(f"   {time.strftime('%H:%M:%S')} {part}: {state}")
        return now or before

    async def _admit(self, name: str, *, number: int = 1) -> Pod:
        # needs the extra packages, see _run
        from vgpu_agent.sim.kubelet.kubelet import Container  # noqa: PLC0415

        pod = await self._kubelet.admit(name, [Container("main", {_GPU: number})])
        await self._kubelet.start_container(pod, "main")
        return pod

    def _visible(self, pod: Pod) -> str:
        return str(pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"])

    async def _ledger_naming(self, pods: int) -> Any:
        """Return the ledger as soon as it names the pods of ``pods`` grants. The agent reads their
        names in the kubelet's records, about a second after the booking.
        """
        return await self._agent.until(
            "/debug/ledger",
            lambda ledger: len([grant for grant in ledger["grants"] if grant["pod"]]) == pods,
        )

    async def _show_gpus(self, caption: str) -> None:
        self._narrator.say("   " + caption.format(debug=f"http://{self._agent.debug_address}"))
        for gpu in (await self._agent.get("/debug/devices"))["gpus"]:
            self._narrator.say(
                f"     GPU {gpu['index']}  {', '.join(gpu['holders']) or '-'}  [{_health(gpu)}]"
            )


def _health(gpu: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (gpu["health"], gpu["health_reason"])))


def _end_gracefully() -> None:
    """Let SIGTERM and a closed terminal cancel the calling task: without its `finally`, the
    temporary directory and a stand-in of MPS's daemon would be left.
    """
    task = cast("asyncio.Task[int]", asyncio.current_task())  # a coroutine always runs in one
    for number in _ENDINGS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _once(ended: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if not ended.done():
        ended.set_result(number)


def _how(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _address(port: int, *, ephemeral: bool) -> str:
    """Return an address with the agent's usual port, for a person to curl, or with any free port
    when that is taken or ``ephemeral``.
    """
    if not ephemeral:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return f"127.0.0.1:{port}"
    return "127.0.0.1:0"
