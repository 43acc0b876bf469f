"""``kubectl vgpu`` over two real agents on simulated nodes, through a stand-in for kubectl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.test_why import EXPLAINED, answering
from tests.component.commands import Ran
from tests.component.conftest import Stage
from tests.component.fake_kubectl import PLUGIN, FakeKubectl
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.web.debug import to_json


async def plugin(kubectl: FakeKubectl, *words: str, folder: Path | None = None) -> Ran:
    """Run ``kubectl vgpu`` with these words to its end."""
    await asyncio.to_thread(kubectl.write)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PLUGIN),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=kubectl.environment,
        cwd=folder,
    )
    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        out, err = await process.communicate()
    return Ran(process.returncode or 0, out, err.decode())


def served_by(agent: AgentProcess) -> dict[str, str]:
    """The environment of a pod that has this agent."""
    return {"VGPU_AGENT_DEBUG_LISTEN": agent.debug_address}


@pytest.fixture
async def cluster(stage: Stage) -> AsyncIterator[tuple[FakeKubectl, Stage, Stage]]:
    """Two nodes whose agents are ready, and the stand-in that knows their pods."""
    (stage.folder / "b").mkdir()
    other = await asyncio.to_thread(Stage, stage.folder / "b")
    await other.kubelet.start()
    kubectl = FakeKubectl(stage.folder / "path")
    try:
        for node, each in (("node-a", stage), ("node-b", other)):
            agent = await each.ready_agent()
            kubectl.add("vgpu-agent", f"agent-{node}", node, environment=served_by(agent))
        yield kubectl, stage, other
    finally:
        for agent in other.agents:
            with contextlib.suppress(Exception):
                await agent.terminate()
        await other.kubelet.stop()


async def test_status_is_a_table_a_node(cluster: tuple[FakeKubectl, Stage, Stage]) -> None:
    """In the order of the nodes' names, and nothing on stderr when all have answered."""
    kubectl, stage, _ = cluster
    await stage.admit("train")
    await stage.agents[0].until("/debug/status", lambda found: found["pods"][0]["name"] == "train")
    ran = await plugin(kubectl, "status", "--context", "prod")
    assert (ran.status, ran.err) == (0, "")
    first, second = ran.text.index("---- node-a"), ran.text.index("---- node-b")
    assert first < ran.text.index("A100-SXM4-40GB") < second
    assert "train" in ran.text[first:second]
    assert "no pod holds a share" in ran.text[second:]
    assert all(call[:2] == ["--context", "prod"] for call in kubectl.calls)

    ran = await plugin(kubectl, "top")
    assert (ran.status, ran.err) == (0, "")
    assert ran.text.count("A100-SXM4-40GB") == 4
    assert ran.text.count("MEMORY USED") == 2

    ran = await plugin(kubectl, "status", "--node", "node-b", "--json")
    found = json.loads(ran.out)
    assert list(found["nodes"]) == ["node-b"]
    assert len(found["nodes"]["node-b"]["gpus"]) == 2


async def test_nodes_that_do_not_answer_are_named_and_the_others_shown(
    cluster: tuple[FakeKubectl, Stage, Stage],
) -> None:
    """Status 3 and the reason of each: a hanging kubelet, a refused exec, a pod that waits."""
    kubectl, *_ = cluster
    kubectl.add("vgpu-agent", "agent-c", "node-c", fails="error: unable to upgrade connection")
    kubectl.add("vgpu-agent", "agent-d", "node-d", phase="Pending", waiting="ImagePullBackOff")
    kubectl.add("vgpu-agent", "agent-e", "node-e", hangs=True)
    ran = await plugin(kubectl, "status", "--timeout", "15")
    assert ran.status == 3
    assert "---- node-a" in ran.text
    assert "---- node-c" not in ran.text
    assert ran.err.splitlines() == [
        "node node-c did not answer: error: unable to upgrade connection",
        "node node-d did not answer: its pod agent-d is Pending, ImagePullBackOff",
        "node node-e did not answer: no answer within 15 s (--timeout)",
        "2 of 5 nodes answered",
    ]
    ran = await plugin(kubectl, "status", "--node", "node-c")
    assert (ran.status, ran.text) == (1, "")


async def test_a_pod_is_explained_by_the_agent_of_its_node(
    cluster: tuple[FakeKubectl, Stage, Stage],
) -> None:
    """The plugin finds the node; a pod without one is a question for the scheduler."""
    kubectl, _, other = cluster
    await other.admit("train")
    await other.agents[0].until("/debug/status", lambda found: found["pods"][0]["name"] == "train")
    kubectl.bound = {"default/train": "node-b", "default/waits": "", "default/lost": "node-z"}
    ran = await plugin(kubectl, "explain", "default/train")
    assert ran.status == 0, ran.err
    assert ran.text.startswith("pod default/train\n")
    ran = await plugin(kubectl, "explain", "default/waits")
    assert ran.status == 1
    assert "kubectl vgpu why default/waits" in ran.err
    ran = await plugin(kubectl, "explain", "default/lost")
    assert ran.err == (
        "kubectl vgpu: node node-z has no pod of the agent; there are node-a, node-b\n"
    )
    ran = await plugin(kubectl, "explain", "default/nobody")
    assert 'pods "nobody" not found' in ran.err


async def test_the_scheduler_is_asked_until_one_replica_explains(folder: Path) -> None:
    """The replica that does not lead may not be ready."""
    kubectl = FakeKubectl(folder / "path")
    async with answering(to_json(EXPLAINED)) as (address, _):
        kubectl.add("vgpu-scheduler", "s-0", "node-a", fails="error: not ready")
        kubectl.add(
            "vgpu-scheduler", "s-1", "node-b", environment={"VGPU_AGENT_SCHEDULER": address}
        )
        ran = await plugin(kubectl, "why", "ml/train-0")
    assert ran.status == 0, ran.err
    assert ran.text.startswith("pod ml/train-0: no-room\n")
    ran = await plugin(kubectl, "why", "ml/train-0")
    assert ran.status == 1
    assert "s-0: error: not ready; s-1: " in ran.err


async def test_a_bundle_has_a_directory_a_node_and_their_logs(
    cluster: tuple[FakeKubectl, Stage, Stage],
) -> None:
    """One archive for the report, also where a node is away."""
    kubectl, stage, _ = cluster
    kubectl.add("vgpu-agent", "agent-c", "node-c", phase="Pending")
    ran = await plugin(kubectl, "bundle", folder=stage.folder)
    assert ran.status == 3
    (path,) = stage.folder.glob("vgpu-bundle-*.tar.gz")
    assert ran.text == f"{path.name}: 2 nodes\n"
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
        log = archive.extractfile("node-a/agent.log")
        assert log is not None
        assert "a line of the log of agent-node-a" in log.read().decode()
        away = archive.extractfile("did-not-answer.txt")
        assert away is not None
        assert away.read() == b"node-c: its pod agent-c is Pending\n"
    assert {"node-a/debug/status.json", "node-b/doctor.json", "node-b/MANIFEST.txt"} <= names


async def test_progress_is_shown_on_a_terminal(
    cluster: tuple[FakeKubectl, Stage, Stage],
) -> None:
    """A line that is gone at the end; nothing in a pipe, as the other tests see."""
    kubectl, *_ = cluster
    await asyncio.to_thread(kubectl.write)
    ours, theirs = pty.openpty()
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(PLUGIN), "status"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=kubectl.environment,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert ran.returncode == 0
    assert f"[{'#' * 10}{'.' * 10}] 1 of 2 nodes: status" in shown
    assert f"[{'#' * 20}] 2 of 2 nodes: status" in shown
    assert shown.endswith("\r\033[K")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("explain", "train-0"), "expected NAMESPACE/NAME"),
        (("status", "--timeout", "0"), "expected seconds above 0"),
        ((), "the following arguments are required"),
    ],
)
async def test_a_wrong_call_is_one_line_and_status_2(
    folder: Path, words: tuple[str, ...], text: str
) -> None:
    """The same as for the commands on the node."""
    ran = await plugin(FakeKubectl(folder / "path"), *words)
    assert ran.status == 2
    (line,) = ran.err.splitlines()
    assert text in line


async def test_a_cluster_without_agents_and_a_path_without_kubectl(folder: Path) -> None:
    """One line with the remedy for the first, and the reason for the second."""
    kubectl = FakeKubectl(folder / "path")
    ran = await plugin(kubectl, "status", "-n", "other")
    assert ran.status == 1
    assert "no pod with app.kubernetes.io/name=vgpu-agent in namespace other" in ran.err
    ran = await plugin(kubectl, "status", "--name", "pool-b-vgpu-agent")
    assert "no pod with app.kubernetes.io/name=pool-b-vgpu-agent in namespace vgpu" in ran.err
    empty = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(PLUGIN), "status"],
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert empty.stderr == "kubectl vgpu: kubectl is not in PATH\n"


def test_the_plugin_is_one_file_that_needs_only_python(folder: Path) -> None:
    """It is copied to a laptop: no package of the agent may be imported."""
    copied = shutil.copy(PLUGIN, folder / "kubectl-vgpu")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", copied, "--help"], capture_output=True, text=True, check=True
    )
    assert "kubectl vgpu status" in ran.stdout
    assert os.access(PLUGIN, os.X_OK)
