"""Programs that come to a daemon before it has its limits:
those of pods that hold a share, and start again and again.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.mps.supervised import RESOURCE, Node, until, until_running
from vgpu_agent.mps.control import Control

NOBODY: frozenset[str] = frozenset()

# each test starts dozens of processes
pytestmark = [pytest.mark.component, pytest.mark.usefixtures("nothing_blocks")]


def _limits(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


async def test_a_server_that_was_started_before_the_limits_takes_them_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's issue 1946: a server keeps the limits of its first moment, none, for every client.
    The defaults are for the next server.
    """
    early: list[subprocess.Popen[str]] = []
    start = Control.start

    async def start_with_a_client(control: Control) -> None:
        await start(control)
        early.append(node.tools.client(node.pipe))
        assert _limits(early[0]) == "threads=100.0 memory="

    monkeypatch.setattr(Control, "start", start_with_a_client)
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        late = node.tools.client(node.pipe)
        assert _limits(late) == "threads=25.0 memory=0=20480M,1=20480M"
        assert node.events("mps.clients_without_limits")[0]["clients"] == [early[0].pid]
        for client in (*early, late):
            client.kill()
            client.communicate()
        await until(lambda: not supervision.statuses[0].clients)
        node.pods = ()
