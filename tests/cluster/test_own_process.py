"""Another process on this package: a scheduler sees all pods and writes to them, without the agent.

What it needs is a client, a scope of its own, and a place for what it sees.
"""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.sim.api.server import ApiServer

pytestmark = pytest.mark.component  # it starts programs

_PROCESS = """
import asyncio, json, sys
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.journal import Journal
from vgpu_agent.pods import PodCache

async def main(url):
    journal, pods = Journal(), PodCache()
    client = ApiClient(Credentials(lambda: Access(url), "test"))
    everywhere = Scope("all pods", "/api/v1/pods", "status.phase!=Failed")
    reflector = Reflector(client, everywhere, decode.pod, pods, journal=journal)
    async with Supervisor(backoff_min_seconds=1, backoff_max_seconds=9) as supervisor:
        supervisor.start("watch", lambda: reflector.run(lambda: supervisor.beat("watch")))
        await reflector.synced.wait()
        for pod in pods.pods:
            patch = {"metadata": {"annotations": {"example.com/seen": pod.node}}}
            await client.patch(pod_path(pod.namespace, pod.name), patch)
    await client.close()

asyncio.run(main(sys.argv[1]))
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("vgpu_agent.")}
print(json.dumps(sorted(rooms)))
"""
_OF_A_NODE = {"agent", "cdi", "gpu", "grpc", "kubelet", "mig", "mps", "runtime", "web"}


async def test_a_process_without_the_agent_watches_and_writes(server: ApiServer) -> None:
    """Pods of two nodes, and not one room that only a GPU node has is imported."""
    for name, node in (("one", "n1"), ("two", "n2")):
        server.objects.create(
            "pods",
            {
                "metadata": {"name": name},
                "spec": {"nodeName": node, "containers": [{"name": "main"}]},
            },
            "default",
        )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROCESS, server.url, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 0
    assert _OF_A_NODE.isdisjoint(json.loads(answer))
    assert {
        pod["metadata"]["name"]: pod["metadata"]["annotations"]["example.com/seen"]
        for pod in server.objects.list("pods")
    } == {"one": "n1", "two": "n2"}
