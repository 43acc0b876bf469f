"""Probes: the decisive checks, and the text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from vgpu_agent.concurrency import TaskReport, TaskState
from vgpu_agent.model import Health
from vgpu_agent.status import NvmlState, NvmlStatus, PluginState, Problem, ProblemKind, WatchStatus
from vgpu_agent.web import probes

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus

NOW = 1_800_000_000.0


@pytest.fixture
def node(node: AgentStatus) -> AgentStatus:
    """A node without any problem."""
    healthy = [msgspec.structs.replace(gpu, health=Health()) for gpu in node.inventory.gpus]
    node.inventory = msgspec.structs.replace(node.inventory, gpus=tuple(healthy), failures=())
    node.ledger.unknown_ids = ()
    return node


def test_a_healthy_agent_says_one_word(node: AgentStatus) -> None:
    """Nothing to read when nothing is wrong."""
    verdict = probes.live(node, NOW, verbose=False)
    assert (verdict.ok, verdict.text) == (True, "alive\n")
    verdict = probes.ready(node, NOW, verbose=False)
    assert (verdict.ok, verdict.text) == (True, "ready\n")


def test_each_reason_is_one_line_whatever_it_quotes(node: AgentStatus) -> None:
    """A reason may quote a foreign message with line breaks."""
    node.not_ready = (
        Problem(ProblemKind.NVML, "", "hung in\nnvmlInit"),
        Problem(ProblemKind.RESOURCE, "nvidia.com/gpu", "not registered"),
    )
    verdict = probes.ready(node, NOW, verbose=False)
    assert (verdict.ok, verdict.text) == (
        False,
        "[-] nvml: hung in nvmlInit\n[-] resource nvidia.com/gpu: not registered\nnot ready\n",
    )


def test_problems_that_stop_nothing_are_listed_and_decide_nothing(node: AgentStatus) -> None:
    """``ready`` alone would mean that nothing is wrong."""
    node.config_needs_restart = ("listen",)
    verdict = probes.ready(node, NOW, verbose=False)
    assert (verdict.ok, verdict.text) == (
        True,
        "[~] config: takes effect after a restart: listen\nready\n",
    )
    assert probes.live(node, NOW, verbose=False).text == "alive\n"


def test_one_cause_is_one_line_however_many_resources_it_stops(node: AgentStatus) -> None:
    """A node with MIG may have a dozen resources, and all of them wait for the kubelet."""
    node.not_ready = tuple(
        Problem(ProblemKind.RESOURCE, f"mig-{number}", "the kubelet is away")
        for number in range(10)
    )
    assert probes.ready(node, NOW, verbose=False).text.splitlines() == [
        "[-] resource mig-0, mig-1, mig-2, mig-3 and 6 more: the kubelet is away",
        "not ready",
    ]


def test_only_a_stuck_loop_makes_the_agent_not_alive(node: AgentStatus) -> None:
    """A restart mends no driver and no kubelet, so they must not cause one."""
    node.not_ready = (Problem(ProblemKind.NVML, "", "hung"),)
    assert probes.live(node, NOW, verbose=False).ok
    node.not_alive = (Problem(ProblemKind.TASK, "health", "no heartbeat for 40 s"),)
    verdict = probes.live(node, NOW, verbose=False)
    assert (verdict.ok, verdict.text) == (
        False,
        "[-] task health: no heartbeat for 40 s\nnot alive\n",
    )


def test_verbose_lists_every_check(node: AgentStatus) -> None:
    """The checks appear in the order in which things depend on each other."""
    assert probes.ready(node, NOW, verbose=True).text.splitlines() == [
        "[+] nvml: answering",
        "[+] kubelet: socket present",
        "[+] resource nvidia.com/gpu: registered, stream open, 10 of 20 ids healthy",
        "[+] config: in force",
        "[+] event loop: 1.0 ms late (99th percentile), 250.0 ms at worst",
        "[+] task health: running",
        "ready",
    ]


def test_verbose_marks_what_is_odd_without_deciding_by_it(node: AgentStatus) -> None:
    """The verdict is the agent's: the lines only show where to look."""
    node.nvml = NvmlStatus(NvmlState.HUNG, "nvmlDeviceGetCount_v2", since=NOW - 9)
    node.kubelet.socket_present = False
    node.plugins = (
        msgspec.structs.replace(node.plugins[0], state=PluginState.WAITING, stream_open=False),
    )
    node.config_problems = ("config.yaml:3: no", "label a/b: nor")
    node.tasks = (
        TaskReport("health", last_heartbeat_at=NOW - 15, stuck_after_seconds=5),
        TaskReport("watch", state=TaskState.BACKING_OFF, last_error="OSError: gone"),
    )
    verdict = probes.ready(node, NOW, verbose=True)
    assert verdict.ok
    assert verdict.text.splitlines() == [
        (
            "[~] config: the newest configuration is not in force: config.yaml:3: no; correct it, "
            "nothing has to be restarted"
        ),
        (
            "[~] config: the newest configuration is not in force: label a/b: nor; correct it, "
            "nothing has to be restarted"
        ),
        "[~] nvml: hung, in nvmlDeviceGetCount_v2",
        "[~] kubelet: no socket in /var/lib/kubelet",
        "[~] resource nvidia.com/gpu: waiting for kubelet, stream closed, 10 of 20 ids healthy",
        "[~] config: the newest configuration is not in force",
        "[+] event loop: 1.0 ms late (99th percentile), 250.0 ms at worst",
        "[~] task health: no heartbeat for 10 s longer than allowed",
        "[~] task watch: backing off (OSError: gone)",
        "ready",
    ]


def test_an_outage_of_the_api_server_is_listed_and_fails_no_probe(
    volcano_node: AgentStatus,
) -> None:
    """Pods that were seen can start. A ConfigMap that may not be read is not even that."""
    quiet, *_ = volcano_node.cluster.watches
    volcano_node.cluster.watches = (
        quiet,
        WatchStatus(
            "this node", synced=True, failing_since=NOW - 80, last_error="no answer within 15 s"
        ),
        WatchStatus("ConfigMap volcano-system/x", failing_since=NOW - 80, essential=False),
    )
    verdict = probes.ready(volcano_node, NOW, verbose=True)
    assert verdict.ok
    assert (
        "[+] watch of pods of this node: complete\n[~] watch of this node: failing for 80 s: no "
        "answer within 15 s\n"
    ) in verdict.text
    assert "ConfigMap" not in verdict.text
