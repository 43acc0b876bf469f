"""Pods that the kubelet failed while the agent was away are named once after its start;
on virtual time.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from typing import Any

import pytest

from tests.cluster.fake_api import FakeApi, running
from tests.cluster.node_world import ignore
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.failed_pods import REASON, FailedPods, failed_at_admission
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.sim.api.server import ApiServer

pytestmark = pytest.mark.looptime

NOW = 1_795_200_692.0
NUMBER = "volcano.sh/vgpu-number"
AWAY = (
    "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate "
    f"unhealthy devices {NUMBER}, which is unexpected"
)
GONE = (
    f"Pod was rejected: Allocate failed due to cannot allocate unregistered device {NUMBER}, which "
    "is unexpected"
)


def _pod(
    name: str,
    message: str = AWAY,
    *,
    seconds_ago: float = 5,
    resource: str = NUMBER,
    reason: str = "UnexpectedAdmissionError",
) -> Any:
    at = dt.datetime.fromtimestamp(NOW - seconds_ago, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"name": name, "namespace": "jobs", "uid": name},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {resource: "1"}}}]},
        "status": {"phase": "Failed", "reason": reason, "message": message, "startTime": at},
    }


class Start:
    """A started agent on a node with these failed pods."""

    def __init__(self, *pods: Any) -> None:
        self.api, self.journal = FakeApi(), Journal()
        self.api.put("/api/v1/pods", {"metadata": {}, "items": list(pods)})
        self.events = Events(self.api, "vgpu-agent", "n1", self.journal)
        self.failed = FailedPods(
            self.api,
            "n1",
            lambda: Node("n1", uid="u"),
            lambda: {NUMBER},
            self.events,
            self.journal,
            lambda: NOW,
        )

    async def run(self, seconds: float = 10) -> None:
        """Let that much time pass."""
        async with running(self.failed.run(ignore), self.events.run(ignore)):
            await asyncio.sleep(seconds)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The journal's lines about them."""
        return [
            entry.facts for entry in self.journal.entries if entry.event == "pods.failed_while_down"
        ]


async def test_pods_that_failed_while_the_agent_was_away_are_counted_and_named() -> None:
    """One line in the log, one event on the Node, and the number for a metric."""
    start = Start(_pod("b"), _pod("a", GONE))
    await start.run()
    (line,) = start.lines
    assert line["pods"] == ["jobs/a", "jobs/b"]
    assert start.failed.found == 2
    (event,) = start.api.below("/api/v1/namespaces/default/events")
    assert (event["reason"], event["involvedObject"]["kind"]) == (REASON, "Node")
    assert event["message"] == (
        "2 pods failed at admission while no vgpu-agent was registered on this node: jobs/a, jobs/b"
    )


async def test_pods_that_failed_for_other_reasons_are_not_blamed_on_a_restart() -> None:
    """Long ago, without our resources, refused by us, or failed by themselves."""
    start = Start(
        _pod("old", seconds_ago=3600),
        _pod("others", resource="example.com/fpga"),
        _pod("refused", "Pod was rejected: Allocate failed due to rpc error: …"),
        _pod("crashed", reason="Error"),
        {"metadata": 1},
    )
    await start.run()
    assert start.lines == []
    assert start.failed.found == 0
    assert [request.verb for request in start.api.requests] == ["get"]


async def test_a_thousand_failed_pods_are_one_short_line() -> None:
    """Twenty are named."""
    start = Start(*(_pod(f"p{number:04}" + "x" * 300) for number in range(1000)))
    await start.run()
    (line,) = start.lines
    assert line["error"].startswith(
        "1000 pods failed at admission while no vgpu-agent was registered on this node: "
        "among them jobs/p0000"
    )
    assert len(line["pods"]) == 20
    assert len(line["error"]) < 4096
    (request,) = [request for request in start.api.requests if request.verb == "get"]
    assert request.body == {"fieldSelector": "spec.nodeName=n1,status.phase=Failed", "limit": "100"}


async def test_an_api_server_that_is_away_is_asked_a_few_times() -> None:
    """It is a courtesy: never a loop for ever, and an answer counts whenever it comes."""
    start = Start(_pod("a"))
    start.api.fault = lambda verb, *_: ClusterError("connection refused") if verb == "get" else None
    async with running(start.failed.run(ignore)):
        await asyncio.sleep(20)
        start.api.fault = None
        await asyncio.sleep(60)
    assert start.failed.found == 1
    gone = Start(_pod("a"))
    gone.api.fault = lambda *_: ClusterError("connection refused")
    await gone.run(3600)
    assert len(gone.api.requests) == 8


@pytest.mark.looptime(False)  # over HTTP, which takes real time
async def test_the_failed_pods_of_a_node_are_all_found_whatever_one_tenant_leaves(
    server: ApiServer, client: ApiClient
) -> None:
    """Pods of nearly 1.5 MiB that are more than one answer may have as a whole, and more small ones
    than a page has. They come first by their namespace.
    """
    large = {"env": [{"name": f"V{place}", "value": "x" * 100_000} for place in range(14)]}
    sizes = [*([large] * 13), *([{}] * 130)]
    for place, more in enumerate(sizes):
        _put_failed_pod(server, "aaa", f"p{place}", more)
    _put_failed_pod(server, "team-b", "victim", {})
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    found = [json.loads(raw)["metadata"] async for raw in failed_at_admission(client, "n1", beat)]
    assert len(found) == len(sizes) + 1
    assert found[-1]["name"] == "victim"
    assert beats > 13
    pages = [request for request in server.requests if request.path == "/api/v1/pods"]
    assert len(pages) == 2


def _put_failed_pod(
    server: ApiServer, namespace: str, name: str, container: dict[str, Any]
) -> None:
    spec = {"nodeName": "n1", "containers": [{"name": "main", **container}]}
    pod = {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
    server.objects.create("pods", pod, namespace)
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
    server.objects.set_status("pods", name, status, namespace)
