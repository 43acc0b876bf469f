"""Repeated registrations of a device plugin, the cases that forbid one,
and their log lines (kubelet V6).
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.kubelet.backend import U0, FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.concurrency import Revision, Supervisor, TaskState
from vgpu_agent.kubelet import registration, server
from vgpu_agent.model import Resource
from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet
from vgpu_agent.status import PluginState

RESOURCE = "nvidia.com/gpu.shared"


async def _all_offered(kubelet: SimulatedKubelet, number: int = 8) -> None:
    await kubelet.until(lambda: kubelet.resource(RESOURCE).allocatable == number)


async def _registered_again(kubelet: SimulatedKubelet, before: int) -> None:
    await kubelet.until(
        lambda: (
            len(kubelet.called("list", RESOURCE)) > before
            and kubelet.resource(RESOURCE).allocatable == 8
        )
    )


def _sockets(kubelet: SimulatedKubelet) -> list[str]:
    return sorted(
        path.name for path in kubelet.plugins.iterdir() if path.name.startswith("vgpu-agent-")
    )


async def test_a_refusing_kubelet_is_asked_once(kubelet: SimulatedKubelet, node: Node) -> None:
    """kubelet V6: one Register, state failed with kubelet's words, no tight loop,
    no socket left.
    """
    kubelet.faults.refuse_version = True
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))

    await kubelet.until(lambda: plugin.status.state is PluginState.FAILED)
    await asyncio.sleep(0.3)  # time for a loop, if there were one

    assert len(kubelet.called("Register")) == 1
    assert "is not supported by kubelet" in plugin.status.last_error
    assert _sockets(kubelet) == []
    (report,) = [report for report in node.supervisor.reports if report.name.startswith("plugin")]
    assert (report.state, report.restarts) == (TaskState.RUNNING, 0)


async def test_a_refused_resource_waits_for_another_kubelet(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V6: a newer kubelet in its place may take it.
    Until then the state and its error stay.
    """
    kubelet.faults.refuse_version = True
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: plugin.status.state is PluginState.FAILED)

    await kubelet.stop()
    (kubelet.plugins / "kubelet.sock").unlink()
    await asyncio.sleep(0.1)
    assert (plugin.status.state, "is not supported" in plugin.status.last_error) == (
        PluginState.FAILED,
        True,
    )
    kubelet.faults.refuse_version = False
    await kubelet.start()

    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)
    assert len(kubelet.called("Register")) == 2
    assert plugin.status.last_error == ""


async def test_another_kubelet_that_refuses_as_well_is_asked_once(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V6: one Register for each kubelet."""
    kubelet.faults.refuse_version = True
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: plugin.status.state is PluginState.FAILED)

    await kubelet.restart()
    await kubelet.until(lambda: len(node.events("plugin.refused")) == 2)
    await asyncio.sleep(0.3)  # time for a loop, if there were one

    assert len(kubelet.called("Register")) == 2
    assert plugin.status.state is PluginState.FAILED


async def test_a_refused_resource_can_be_stopped(kubelet: SimulatedKubelet, node: Node) -> None:
    """Stopping does not wait for another kubelet."""
    kubelet.faults.refuse_version = True
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: plugin.status.state is PluginState.FAILED)

    await asyncio.wait_for(plugin.stop(), PATIENCE_SECONDS)

    assert plugin.status.state is PluginState.STOPPED


async def test_what_kubelet_was_told_is_known_while_a_stream_is_open(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The last list's ids, without the unhealthy ones among the healthy.
    Nothing before there is a stream.
    """
    backend = FakeBackend(shared_resource())
    plugin = node.offer(shared_resource(), backend)
    assert plugin.last_sent is None
    await _all_offered(kubelet)

    backend.lose(U0)
    await _all_offered(kubelet, number=4)

    assert plugin.last_sent is not None
    assert {entry.id.id for entry in plugin.last_sent.devices if entry.healthy} == set(
        kubelet.resource(RESOURCE).healthy
    )
    assert {device.id for device in plugin.last_sent.offered} == {
        device.id for device in shared_resource().ids
    }
    assert plugin.last_sent.seconds_ago < PATIENCE_SECONDS


async def test_who_waits_for_the_list_sees_one_that_came_before_the_answer_to_register(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelets connect before they answer. An agent that takes over waits in this way while no call
    is answered.
    """
    lists, register = Revision(), registration.register

    async def answered_late(*args: Any, **kwargs: Any) -> None:
        await register(*args, **kwargs)
        await lists.newer_than(0)

    monkeypatch.setattr(server, "register", answered_late)
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()), lists=lists)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while plugin.last_sent is None:
            await lists.newer_than(lists.version)


async def test_registering_again_on_request_is_a_new_server(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """One new Register on a fresh socket, the reason in the journal,
    and the complaint stays until it is taken back.
    """
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)
    plugin.status.not_listed = "not listed"

    plugin.register_again("not listed")
    await _registered_again(kubelet, before=1)
    await kubelet.until(lambda: plugin.status.ready)

    registers = kubelet.called("Register")
    assert len(registers) == 2
    assert registers[0].facts["endpoint"] != registers[1].facts["endpoint"]
    assert node.events("plugin.registering_again") == [
        {"resource": RESOURCE, "reason": "not listed"}
    ]
    assert plugin.status.last_error == "not listed"


async def test_a_registration_counts_the_ids_of_the_moment(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The number of ids follows the backend, not the resource with which the plugin began."""
    backend = FakeBackend(shared_resource())
    plugin = node.offer(shared_resource(), backend)
    await _all_offered(kubelet)
    backend.resources[RESOURCE] = Resource(
        RESOURCE, "nvidia", shared_resource().ids[:3], holders_per_device=4
    )

    plugin.register_again("the list has changed")
    await kubelet.until(lambda: kubelet.resource(RESOURCE).allocatable == 3)
    await kubelet.until(lambda: len(node.events("plugin.registered")) == 2)

    assert [event["ids"] for event in node.events("plugin.registered")] == [8, 3]


async def test_a_failing_kubelet_is_tried_again_with_growing_pauses(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Each pause is longer than the one before, and one line of journal says it (iktos:D10,
    aws:D4, vgpu-manager:D2).
    """
    kubelet.faults.failing_registrations = 4
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))

    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)  # the list may be there before the answer

    times = [call.at for call in kubelet.called("Register")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pauses) == 4
    assert all(
        pause >= expected for pause, expected in zip(pauses, (0.05, 0.1, 0.2, 0.4), strict=True)
    )
    assert plugin.status.registration_failures == 4
    assert len({str(event["reason"]) for event in node.events("plugin.registering_again")}) == 1
    assert plugin.status.last_error == ""


async def test_a_kubelet_that_opens_no_stream_is_registered_with_again(
    directory: Path, kubelet: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration without a stream is worth nothing."""
    kubelet.faults.open_no_stream = True
    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=1.0) as supervisor:
        node = Node(directory, supervisor, monkeypatch, STREAM_OPEN_TIMEOUT_SECONDS=0.1)
        node.watch_directory()
        plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
        await kubelet.until(lambda: len(kubelet.called("Register")) >= 2)

        kubelet.faults.open_no_stream = False
        await _all_offered(kubelet)
        await plugin.stop()

    assert "opened no stream within 0.1 s" in str(
        node.events("plugin.registering_again")[0]["reason"]
    )
