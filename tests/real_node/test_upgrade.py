"""A rolling update on a real node under a stream of bare pods, which the kubelet fails for good if
it has no healthy ids at their admission.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.real_node.agents import GPU, NodeAgent, shared, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import pod
from tests.real_node.volcano import IDS, VGPU, vgpu
from tests.real_node.volcano_node import COARSE_CONFIG, U0, U1, volcano_agent

pytestmark = [pytest.mark.timeout(600), pytest.mark.alone]

# More of both where the figures of docs/performance.md are measured.
UPDATES = int(os.environ.get("UPGRADE_TEST_UPDATES", "3"))
PAUSE_SECONDS = 0.2
_WINDOW = re.compile(
    "no healthy devices present|has been stopped|client connection is closing|from server: EOF"
)
_LINE = re.compile(
    r".\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*"
    r'"(Mark all resources Unhealthy for resource|Processed device updates for resource)"'
    r' resourceName="([^"]+)"'
)
# Without a hand-over it is the time that an agent needs to start, a second or more. On a machine
# whose cores are all busy with starting pods, a single window may be longer.
MEDIAN_WINDOW_SECONDS = 0.5
# Enough numbers for pods whose containers a slow machine has yet to end.
CONFIG = COARSE_CONFIG.replace("gpuMemoryFactor", "deviceSplitCount: 50, gpuMemoryFactor")
Report = Callable[[str, object], None]


class Pods(threading.Thread):
    """Creates a pod five times a second until it is stopped, and keeps count of them.

    The pods are bound at creation, so that the kubelet and no scheduler meets the window.
    """

    def __init__(self, rig: Rig, make: Callable[[str], dict[str, Any]], prefix: str) -> None:
        super().__init__(daemon=True)
        self._rig, self._make, self._prefix = rig, make, prefix
        self._over = threading.Event()
        self.names: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            while not self._over.wait(PAUSE_SECONDS):
                name = f"{self._prefix}-{len(self.names)}"
                self._rig.create_pod(self._make(name))
                self.names.append(name)
        except Exception as err:  # noqa: BLE001 - the test reports it, whatever it is
            self.error = err

    def stop(self) -> list[str]:
        """End the stream, and return the names of all pods."""
        self._over.set()
        self.join()
        assert self.error is None, self.error
        return self.names


def _phases(rig: Rig, names: list[str]) -> dict[str, str]:
    """Wait until each pod has ended, and return its phase with the message."""
    phases: dict[str, str] = {}

    def all_ended() -> bool:
        for item in rig.api.get("/api/v1/namespaces/default/pods")["items"]:
            status = item["status"]
            phases[item["metadata"]["name"]] = f"{status['phase']} {status.get('message', '')}"
        return all(phases[name].startswith(("Succeeded", "Failed")) for name in names)

    try:
        rig.wait_for(all_ended, 90, what="all pods to end")
    except TimeoutError as err:
        raise AssertionError(phases) from err
    return {name: phases[name].strip() for name in names}


def _windows(rig: Rig, since: int) -> list[float]:
    """The seconds for which the kubelet had no healthy ids, for each resource that was registered
    again, by the kubelet's own log from byte ``since`` on.
    """
    gone: dict[str, float] = {}
    windows = []
    for line in rig.layout.log("kubelet-1").read_bytes()[since:].decode().splitlines():
        if not (found := _LINE.match(line)):
            continue
        hours, minutes, seconds, text, resource = found.groups()
        moment = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        if text.startswith("Mark"):
            gone[resource] = moment
        elif resource in gone:
            windows.append((moment - gone.pop(resource)) % 86400)
    assert not gone, gone
    return windows


def _upgrade_under_load(
    agent: NodeAgent, make: Callable[[str], dict[str, Any]], report: Report
) -> None:
    rig, windows, failed, number = agent.rig, [], [], 0
    for update in range(UPDATES):
        pods = Pods(rig, make, f"up{update}")
        pods.start()
        time.sleep(3 * PAUSE_SECONDS)  # some pods before, and below some after
        since = rig.layout.log("kubelet-1").stat().st_size
        agent.upgrade()
        time.sleep(3 * PAUSE_SECONDS)
        names = pods.stop()
        windows += _windows(rig, since)
        phases = _phases(rig, names)
        failed += [phase for phase in phases.values() if phase.startswith("Failed")]
        number += len(names)
        for name in names:
            rig.delete_pod(name)
        assert "agent.took_over" in agent.events()
    report("pods", number)
    report("failed", len(failed))
    report("window_ms", [round(1000 * window, 1) for window in sorted(windows)])
    assert statistics.median(windows) < MEDIAN_WINDOW_SECONDS, windows
    # The kubelet leaves a window that no agent can close, and some pods may hit it; no other fails.
    # It also cuts off the call under way when it closes the old connection.
    assert all(_WINDOW.search(phase) for phase in failed), failed
    assert len(failed) <= max(2, round(3 * sum(windows) / PAUSE_SECONDS)), (failed, windows)


@pytest.fixture
def nvidia(rig: Rig) -> Iterator[NodeAgent]:
    """An agent with shares of two GPUs."""
    agent = NodeAgent(rig, shared(50), gpus=2)
    try:
        agent.start()
        wait_allocatable(rig, 100)
        yield agent
    finally:
        agent.close()


@pytest.fixture
def volcano(rig: Rig) -> Iterator[NodeAgent]:
    """An agent whose pods decide."""
    agent = volcano_agent(rig, CONFIG)
    try:
        agent.start()
        wait_allocatable(rig, 100, resource=VGPU + "number")
        yield agent
    finally:
        agent.close()


def test_shares_of_nvidias_plugin(nvidia: NodeAgent, record_property: Report) -> None:
    """Ids name their GPUs."""

    def make(name: str) -> dict[str, Any]:
        return pod(name, command="true", limits={GPU: 1}, nodeName=nvidia.rig.node_name())

    _upgrade_under_load(nvidia, make, record_property)


def test_pods_of_volcano(volcano: NodeAgent, record_property: Report) -> None:
    """The pod decides, and the agent that answers Allocate need not be the one that is asked before
    the start.
    """
    node = volcano.rig.node_name()

    def make(name: str) -> dict[str, Any]:
        now = str(int(time.time()))
        segment = f"{(U0, U1)[len(name) % 2]},NVIDIA,1,0:"
        made = pod(name, command="true", limits=vgpu(1, 1), nodeName=node)
        made["metadata"]["annotations"] = {
            VGPU + "node": node,
            VGPU + "time": now,
            "volcano.sh/bind-time": now,
            "volcano.sh/bind-phase": "allocating",
            IDS: segment,
            "volcano.sh/devices-to-allocate": segment,
        }
        return made

    _upgrade_under_load(volcano, make, record_property)
