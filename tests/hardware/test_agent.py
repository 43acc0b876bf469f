"""The agent's process on the cards of this machine, as root; only the kubelet is a stand-in
(``scripts/test hardware``). Nothing is changed on a card.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cdi_reader import received
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet

pytestmark = [pytest.mark.hardware, pytest.mark.component]

GPU = "nvidia.com/gpu"


class Node(NamedTuple):
    """This machine as a node.

    Attributes:
        folder: for everything that the agent and the kubelet write.
        kubelet: the stand-in, running.
        agent: the agent's process, ready.
    """

    folder: Path
    kubelet: SimulatedKubelet
    agent: AgentProcess


@pytest.fixture
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """An agent with the configuration in the test's parameter."""
    if "cdi" in request.param and not shutil.which("nvidia-ctk"):
        pytest.skip("this machine has no nvidia-ctk")
    folder = Path(tempfile.mkdtemp(prefix="vgh", dir="/tmp"))
    (folder / "config.yaml").write_text(
        "version: v1\n"
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
        f"binding: {{cdiDirectory: {folder}/cdi}}\n"
        f"{request.param}"
    )
    kubelet = SimulatedKubelet(folder / "kubelet")
    await kubelet.start()
    agent = AgentProcess(
        folder / "agent.log",
        kubelet=folder / "kubelet",
        simulate=None,
        config=folder / "config.yaml",
    )
    try:
        await agent.start()
        await agent.until_ready()
        yield Node(folder, kubelet, agent)
    finally:
        with contextlib.suppress(SimulationError):
            await agent.terminate()
        await kubelet.stop()
        out = os.environ.get("OUT")
        if out:
            shutil.copy(folder / "agent.log", Path(out) / f"{os.getpid()}-agent.log")
        shutil.rmtree(folder, ignore_errors=True)


def _smi(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[value.strip() for value in line.split(",")] for line in lines]


@pytest.mark.parametrize("node", ["plugin: {passDeviceSpecs: true}\n"], indirect=True)
async def test_a_pod_gets_a_share_of_a_real_card(node: Node) -> None:
    """The whole way from the driver to the kubelet's answer; every device node is there."""
    cards = await asyncio.to_thread(_smi, "uuid", "name", "memory.total", "driver_version")
    uuids = [card[0] for card in cards]
    await node.kubelet.until(lambda: node.kubelet.resource(GPU).allocatable == 4 * len(uuids))
    pod = await node.kubelet.admit("train", [Container("main", {GPU: 1})])
    answer = pod.answers["main"]
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] in uuids
    assert any(device.container_path.startswith("/dev/nvidia") for device in answer.devices)
    _exist(*(device.host_path for device in answer.devices))
    _, metrics = await node.agent.get_text("/metrics")
    for uuid in uuids:
        assert uuid in metrics
    status = json.dumps(await node.agent.get("/debug/status"))
    for uuid, name, *_ in cards:
        assert uuid in status
        assert name in status
    await _no_warnings(node)


@pytest.mark.parametrize("node", ["plugin: {deviceListStrategy: [cdi-cri]}\n"], indirect=True)
async def test_the_generated_cdi_spec_names_what_this_machine_has(node: Node) -> None:
    """A runtime refuses a container for one file in a spec that is not there. Asks for the NVIDIA
    container toolkit, whose ``nvidia-ctk`` describes the driver's files.
    """
    (uuid, *_), *_ = await asyncio.to_thread(_smi, "uuid", "name")
    pod = await node.kubelet.admit("train", [Container("main", {GPU: 1})])
    found = await asyncio.to_thread(received, pod.answers["main"], node.folder / "cdi")
    assert "/dev/nvidiactl" in found.device_nodes
    specs = await asyncio.to_thread(_specs, node.folder / "cdi")
    assert uuid in json.dumps(specs)
    edits: list[dict[str, Any]] = [spec.get("containerEdits", {}) for spec in specs] + [
        device.get("containerEdits", {}) for spec in specs for device in spec["devices"]
    ]
    mounts = [mount["hostPath"] for edit in edits for mount in edit.get("mounts", ())]
    nodes = [item.get("hostPath", item["path"]) for e in edits for item in e.get("deviceNodes", ())]
    assert any("libcuda.so" in path for path in mounts)
    _exist(*mounts, *nodes)
    await _no_warnings(node)


async def _no_warnings(node: Node) -> None:
    """A sound machine gives nothing to complain of."""
    text = await asyncio.to_thread((node.folder / "agent.log").read_text)
    lines = [json.loads(line) for line in text.splitlines()]
    complaints = [line for line in lines if line["level"] in {"warning", "error", "critical"}]
    assert complaints == []


def _exist(*paths: str) -> None:
    assert [path for path in paths if not os.path.exists(path)] == []


def _specs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
