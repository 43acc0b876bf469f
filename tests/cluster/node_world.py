"""An API server in memory with one Node, its watch,
and one publisher of a changeable desired state, on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.cluster.fake_api import NODE, FakeApi, WatchedNode, node
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.concurrency import Revision
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import DesiredNode, Node

REGISTER, HANDSHAKE, LOCK = (
    "volcano.sh/node-vgpu-register",
    "volcano.sh/node-vgpu-handshake",
    "hamivgpu",
)
GPUS = "volcano.sh/gpu-number"
READY = ("True", "AllGpus", "2 GPUs")


class World:
    """An API server with the Node n1, its watch,
    and one publisher of a changeable desired state.
    """

    def __init__(
        self,
        desired_state: DesiredNode | None = None,
        *,
        delay_seconds: float = 0.05,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        self.api, self.journal, self.wake = FakeApi(), Journal(), Revision()
        self.watched = WatchedNode(self.api, delay_seconds=delay_seconds)
        self.desired_state = desired_state or DesiredNode(annotations={REGISTER: "U0,10:"})
        self.asked_at: list[float] = []
        self.publisher = self.another()
        self.api.put(NODE, node(**(annotations or {})))

    def another(self) -> NodePublisher:
        """A publisher as a new process would build it."""
        return NodePublisher(
            self.api,
            "n1",
            self.watched.latest,
            self.ask,
            self.wake,
            self.journal,
            lambda: 1000 + asyncio.get_running_loop().time(),
        )

    def ask(self, seen: Node, now: float) -> DesiredNode:
        """The families' answer."""
        self.asked_at.append(now)
        return self.desired_state

    def desire(self, **parts: Any) -> None:
        """Change the desired state of the families from now on."""
        self.desired_state = DesiredNode(**parts)
        self.wake.advance()

    @property
    def annotations(self) -> dict[str, str]:
        """Return the Node's annotations."""
        found: dict[str, str] = self.api.objects[NODE]["metadata"].get("annotations", {})
        return found

    @property
    def patches(self) -> list[Mapping[str, Any]]:
        """Bodies of the merge patches so far."""
        return [request.body for request in self.api.requests if request.verb == "patch"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


def ignore() -> None:
    """A heartbeat without a listener."""
