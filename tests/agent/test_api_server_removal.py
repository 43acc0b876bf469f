"""The Node after the agent's removal: the cleanup, and a report of it only when it has happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agent.volcano_parts import NODE, Wired, volcano_settings, wired
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.concurrency import Revision
from vgpu_agent.config.binding import Cluster
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer

REGISTER, HANDSHAKE = "volcano.sh/node-vgpu-register", "volcano.sh/node-vgpu-handshake"
LEAVES = Cluster(withdraw_at_stop=True)


@pytest.fixture(autouse=True)
def _library_reads_files(loop_may_block: None) -> None:
    """kubernetes-asyncio reads the kubeconfig in a coroutine;
    the agent runs that in a loop of its own, in a thread.
    """


def on_the_node(server: ApiServer) -> dict[str, Any]:
    """Annotations and labels that begin with a name of ours or Volcano's."""
    metadata = server.objects.get("nodes", NODE)["metadata"]
    keys = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    return {
        key: value
        for key, value in keys.items()
        if key.startswith(("volcano.sh/", "vgpu-agent.internal/"))
    }


async def published(parts: Wired) -> None:
    """The Node says what it offers."""
    await parts.families.apply(parts.settings)
    parts.cluster.start_writers(
        parts.allocator, parts.refusals, Notices(), Revision(), lambda _: ()
    )
    await parts.cluster.until_node_written(PATIENCE_SECONDS)


@pytest.fixture
async def server() -> Any:
    """With our Node, which carries another client's label."""
    async with ApiServer() as running:
        running.objects.create(
            "nodes",
            {
                "metadata": {"name": NODE, "labels": {"nvidia.com/gpu.present": "true"}},
                "status": {
                    "nodeInfo": {
                        "kubeletVersion": "v1.36.3",
                        "containerRuntimeVersion": "containerd://2.1.0",
                    }
                },
            },
        )
        yield running


async def test_annotations_and_labels_go_with_the_agent(tmp_path: Path, server: ApiServer) -> None:
    """``volcano-vgpu:D24``: what stays is the handshake that old schedulers read as "no GPUs here",
    and what others have put there.
    """
    async with wired(await volcano_settings(tmp_path, server, cluster=LEAVES)) as parts:
        await published(parts)
        assert {"vgpu-agent.internal/volcano-vgpu-isolation", REGISTER} < on_the_node(server).keys()
        await parts.cluster.withdraw(PATIENCE_SECONDS)
        assert parts.journalled("cluster.cleaned_up") == [{}]
    (left,) = on_the_node(server).items()
    assert left[0] == HANDSHAKE
    assert left[1].startswith("Deleted_")
    assert server.objects.get("nodes", NODE)["metadata"]["labels"] == {
        "nvidia.com/gpu.present": "true"
    }


async def test_the_node_is_cleaned_up_when_the_api_server_is_back_in_time(
    tmp_path: Path, server: ApiServer
) -> None:
    """One refused write is no reason to leave the node as it is."""
    async with wired(await volcano_settings(tmp_path, server, cluster=LEAVES)) as parts:
        await published(parts)
        server.faults = [
            Fault(
                FaultKind.STATUS,
                verb="patch",
                resource="nodes",
                code=503,
                reason="ServiceUnavailable",
                times=2,
            )
        ]
        await parts.cluster.withdraw(PATIENCE_SECONDS)
        assert parts.journalled("cluster.cleaned_up") == [{}]
    assert on_the_node(server).keys() == {HANDSHAKE}


async def test_a_cleanup_that_failed_is_not_reported_as_done(
    tmp_path: Path, server: ApiServer
) -> None:
    """The API server refuses until the time is over:
    the journal says what stays and how to take it off.
    """
    async with wired(await volcano_settings(tmp_path, server, cluster=LEAVES)) as parts:
        await published(parts)
        server.faults = [
            Fault(
                FaultKind.STATUS,
                verb="patch",
                resource="nodes",
                code=503,
                reason="ServiceUnavailable",
            )
        ]
        await parts.cluster.withdraw(0.5)
        assert parts.journalled("cluster.cleaned_up") == []
        (facts,) = parts.journalled("cluster.cleanup_failed")
    assert facts["gave_up_after_seconds"] == 0.5
    assert "kubectl" in str(facts["remedy"])
    assert REGISTER in on_the_node(server)


async def test_an_agent_that_comes_back_leaves_everything(
    tmp_path: Path, server: ApiServer
) -> None:
    """An update must not make schedulers forget the node."""
    async with wired(await volcano_settings(tmp_path, server)) as parts:
        await published(parts)
        before = on_the_node(server)
        await parts.cluster.withdraw(PATIENCE_SECONDS)
        assert parts.journalled("cluster.cleaned_up") == []
    assert on_the_node(server) == before
