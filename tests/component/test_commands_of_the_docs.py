"""The commands of README.md and docs/ that need one node, run as they are written there: by bash in
a copy of the checkout, beside an agent on simulated GPUs and the scheduler extender.

Only addresses and the names of pods are replaced. `kubectl` is the stand-in that runs
``vgpu-agent`` where the pod is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.component.fake_kubectl import FakeKubectl
from tests.component.vgpu_extender import ExtenderStage, asks, extender_stage
from tests.component.volcano import NODE
from tests.docs_commands import COMMANDS, NVIDIA_FILE, ROOT, Command, Way
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.sim.agent_process import AgentProcess, ExtenderProcess
from vgpu_agent.sim.stand_in_library import deliver_stand_in_library

_FAMILIES = """\
families: {nvidia: false, volcanoVgpu: true, vgpuManager: true}
volcanoVgpu: {gpuMemoryFactor: 64}
"""
_NODE_CONFIG = """\
version: v1
configs:
  - {nodeName: another, deviceSplitCount: 5}
  - {nodeName: node-a, deviceSplitCount: 10}
"""
# No output is their success.
_SILENT = re.compile(r"^(?:install |sed -i |sleep )|-X PUT")
# doctor's exit status is what it has found, and this node has faults on purpose.
_STATUSES = {"doctor": {0, 1, 2}}
_POD = "default/gpu-pod"


class Place(NamedTuple):
    """A machine for the commands: bash runs in ``folder``, with this environment."""

    folder: Path
    environment: dict[str, str]
    replaced: tuple[tuple[str, str], ...]

    def text(self, command: Command) -> str:
        """The command for bash."""
        text = command.text
        for pattern, replacement in self.replaced:
            text = re.sub(pattern, replacement, text)
        return f"set -o pipefail; {text}"

    async def run(self, command: Command) -> tuple[int, str, str]:
        """Exit status and both outputs; what is written into a file counts as output."""
        text = self.text(command)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", text),
            cwd=self.folder,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            if "--watch" in text:  # without an end of its own
                assert process.stdout is not None
                first = await process.stdout.readuntil(b"GPU")
                os.killpg(process.pid, signal.SIGTERM)
                await process.communicate()
                return 0, first.decode(), ""
            out, err = await process.communicate()
        if written := re.search(r"(?<!2)> ?(\w[\w.]*)$", text):
            out += (self.folder / written[1]).read_bytes()
        return process.returncode or 0, out.decode(errors="replace"), err.decode()


def _programs(folder: Path, kubectl: FakeKubectl) -> None:
    """Make a directory with the programs that a reader has on PATH, and ``.venv/bin``."""
    agent = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m vgpu_agent "$@"\n'
    (folder / ".venv" / "bin").mkdir(parents=True)
    for path, text in {
        folder / ".venv" / "bin" / "vgpu-agent": agent,
        kubectl.folder / "vgpu-agent": agent,
        kubectl.folder / "sudo": '#!/bin/sh\nexec "$@"\n',
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    kubectl.write()


def _checkout(folder: Path) -> None:
    """The repository's folders, and the files that the pages have the reader make."""
    for name in ("bin", "manifests"):
        shutil.copytree(ROOT / name, folder / name)
    files = {"nvidia.yaml": NVIDIA_FILE, "FILE": NVIDIA_FILE, "nodeConfig.yaml": _NODE_CONFIG}
    # curl's own settings: an answer that is an error is a failure.
    files |= {"config.yaml": "version: v1\n", ".curlrc": "fail\nshow-error\nsilent\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / ".local" / "bin").mkdir(parents=True)


@pytest.fixture
async def place(folder: Path) -> AsyncIterator[Place]:
    """An agent that shares two GPUs, the extender, a pod that runs, and a checkout."""
    async with extender_stage(folder / "s") as stage, contextlib.AsyncExitStack() as stack:
        deliver_stand_in_library(folder / "s" / "vgpu")
        agent = await stage.start_agent(_FAMILIES)
        kubeconfig = folder / "s" / "cluster" / "kubeconfig"
        extender = ExtenderProcess(folder / "extender.log", kubeconfig=kubeconfig)
        await extender.start()
        stack.push_async_callback(extender.terminate)
        await extender.until_ready()
        stage.create("gpu-pod", asks(1, 10, 1024))
        await stage.cluster.running("gpu-pod")
        kubectl = _kubectl(folder, stage, agent, extender)
        (folder / "checkout").mkdir()
        _checkout(folder / "checkout")
        _programs(folder / "checkout", kubectl)
        (grant,) = (await agent.get(f"/debug/allocations?pod={_POD}"))["allocations"]
        yield Place(
            folder / "checkout",
            kubectl.environment
            | {
                "HOME": str(folder / "checkout"),
                "CURL_HOME": str(folder / "checkout"),
                "AGENT": "AGENT",
                "COLUMNS": "80",
                "VGPU_AGENT_DEBUG_LISTEN": agent.debug_address,
                "VGPU_AGENT_SCHEDULER": extender.public_address,
            },
            (
                (r"(?:127\.0\.0\.1|localhost|POD-IP):9394", agent.public_address),
                (r"(?:127\.0\.0\.1|localhost):9395", agent.debug_address),
                (r"127\.0\.0\.1:3456", extender.public_address),
                (r"NAMESPACE/(?:NAME|POD)|default/vgpu-test|(?:ml|serve)/\w+-\d", _POD),
                (r"\bds/vgpu-agent\b", "AGENT"),
                (r"\bdeploy/vgpu-scheduler -c extender\b", "SCHEDULER"),
                (r"\bTOKEN\b", grant["token"]),
                (r"\bNODE\b", NODE),
                (r"/var/log/vgpu-agent\.log", str(stage.log)),
                (r"\bsleep \d+", "sleep 0"),
            ),
        )


def _kubectl(
    folder: Path, stage: ExtenderStage, agent: AgentProcess, extender: ExtenderProcess
) -> FakeKubectl:
    kubectl = FakeKubectl(folder / "path")
    to_agent = {"VGPU_AGENT_DEBUG_LISTEN": agent.debug_address}
    to_extender = {"VGPU_AGENT_SCHEDULER": extender.public_address}
    kubectl.add("vgpu-agent", "AGENT", NODE, environment=to_agent, log=stage.log)
    kubectl.add("vgpu-scheduler", "SCHEDULER", NODE, environment=to_extender)
    kubectl.bound = {_POD: NODE}
    return kubectl


async def _problems(place: Place, commands: Iterable[Command]) -> list[str]:
    """The faults of commands that are run one after the other."""
    wrong = []
    for command in commands:
        status, out, err = await place.run(command)
        expected = next((some for word, some in _STATUSES.items() if word in command.text), {0})
        if status not in expected or not (out.strip() or _SILENT.search(command.text)):
            wrong.append(f"{command.place}\n  status {status}\n{out[-300:]}{err[-500:]}")
    return wrong


@pytest.mark.timeout(400)  # fifty processes, on a machine that is five times slower
async def test_the_commands_do_what_the_pages_say(place: Place) -> None:
    """Each ends well and prints something. The same one is run once. Those of kubectl share no file
    with the others, and run beside them.
    """
    commands = {
        place.text(command): command for command in COMMANDS if command.way is Way.SIMULATED
    }
    kubectl = [each for each in commands.values() if each.text.startswith("kubectl")]
    others = [each for each in commands.values() if each not in kubectl]
    wrong = await asyncio.gather(_problems(place, kubectl), _problems(place, others))
    assert not any(wrong), "\n".join(itertools.chain(*wrong))
