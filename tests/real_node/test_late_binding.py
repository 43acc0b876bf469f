"""PreStartContainer and CDI names on a real kubelet and containerd: what late binding
(docs/architecture.md) will rest on.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real_node.agents import wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import container, pod
from tests.replacing import replace_text

RESOURCE = "vgpu-agent.test/late"
PRINT = 'ls /dev/granted; echo "GRANT=$GRANT_POD $GRANT_UID"; sleep 100000'
_PROJECT = Path(__file__).resolve().parents[2]
Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start_plugin(rig: Rig, tmp_path: Path) -> Iterator[Start]:
    """Starts the late-binding plugin beside the rig's kubelet."""
    running: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tests.real_node.late_plugin",
            str(rig.kubelet_dir()),
            str(rig.cdi_dir()),
            RESOURCE,
            "40",
        ]
        with (tmp_path / "plugin.log").open("ab") as output:
            running.append(subprocess.Popen(command, cwd=_PROJECT, stdout=output, stderr=output))
        wait_allocatable(rig, 40, resource=RESOURCE)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def _grant(rig: Rig, name: str, container_name: str = "main") -> str | None:
    lines = [
        line
        for line in rig.logs(name, container=container_name).splitlines()
        if line.startswith("GRANT=")
    ]
    return lines[-1].removeprefix("GRANT=") if lines else None


def _uid(rig: Rig, name: str) -> str:
    found = rig.pod(name)
    assert found is not None
    return str(found["metadata"]["uid"])


def test_each_container_gets_exactly_its_own_identity(rig: Rig, start_plugin: Start) -> None:
    """20 pods at once, every second with two such containers: the spec written at PreStartContainer
    reaches the right one, always. As most users' pods, these have a token, which the kubelet gets
    between Allocate and the start.
    """
    start_plugin()
    names = [f"late-{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        containers = [container("main", command=PRINT, limits={RESOURCE: 1})]
        if number % 2:
            containers.append(container("second", command=PRINT, limits={RESOURCE: 1}))
        rig.create_pod(pod(name, containers=containers, automountServiceAccountToken=True))
    for number, name in enumerate(names):
        rig.wait_for_phase(name, "Running", 60)
        for each in ("main", "second")[: 1 + number % 2]:
            grant = rig.wait_for(
                functools.partial(_grant, rig, name, each), 20, what=f"the output of {name}/{each}"
            )
            assert grant == f"default/{name}/{each} {_uid(rig, name)}"
            assert "/dev/granted" in rig.logs(name, container=each)


def test_a_refused_start_waits_with_our_text_and_goes_on_when_it_may(
    rig: Rig, start_plugin: Start
) -> None:
    """The pod is not failed: its status shows our text, kubelet asks again, and then it runs."""
    start_plugin()
    refusal = rig.cdi_dir() / "refuse"
    replace_text(refusal, "the pod has not been seen by the scheduler yet")
    rig.create_pod(pod("patient", command=PRINT, limits={RESOURCE: 1}))

    def waiting() -> str | None:
        statuses = (rig.pod("patient") or {}).get("status", {}).get("containerStatuses", [])
        return (
            str(statuses[0]["state"]["waiting"].get("message", "")) or None
            if statuses and "waiting" in statuses[0]["state"]
            else None
        )

    message = rig.wait_for(
        lambda: text if "PreStartContainer" in (text := waiting() or "") else None,
        30,
        what="our text in the status",
    )
    assert "the pod has not been seen by the scheduler yet" in message
    refusal.unlink()
    rig.wait_for_phase("patient", "Running", 60)
    grant = rig.wait_for(lambda: _grant(rig, "patient"), 20, what="the output of patient")
    assert grant == f"default/patient/main {_uid(rig, 'patient')}"


def test_after_a_graceful_stop_a_crashed_container_restarts_without_the_plugin(
    rig: Rig, start_plugin: Start
) -> None:
    """The last act of a stop is a registration without pre-start,
    so the kubelet calls no missing server.
    """
    plugin = start_plugin()
    rig.create_pod(pod("alone", command=PRINT, limits={RESOURCE: 1}, restartPolicy="Always"))
    rig.wait_for_phase("alone", "Running")
    plugin.terminate()
    assert plugin.wait(timeout=20) == 0
    wait_allocatable(rig, 0, resource=RESOURCE)
    # A moment later, so that the exec itself does not die with the container.
    rig.exec("alone", "sh", "-c", "(sleep 0.5; kill 1) </dev/null >/dev/null 2>&1 &")

    def restarted() -> bool | None:
        status = (rig.pod("alone") or {})["status"]["containerStatuses"][0]
        return True if status["restartCount"] >= 1 and "running" in status["state"] else None

    rig.wait_for(restarted, 60, what="a restart while the plugin is away")
    assert (
        rig.wait_for(lambda: _grant(rig, "alone"), 20) == f"default/alone/main {_uid(rig, 'alone')}"
    )
