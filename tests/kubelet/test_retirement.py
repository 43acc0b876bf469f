"""The last act of a device plugin: whether containers may start again while the agent is away."""

from __future__ import annotations

import asyncio

import pytest

from tests.kubelet.backend import FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from vgpu_agent.sim.kubelet.endpoint import Endpoint
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet
from vgpu_agent.status import PluginState

RESOURCE = "nvidia.com/gpu.shared"


async def _all_offered(kubelet: SimulatedKubelet) -> None:
    await kubelet.until(lambda: kubelet.resource(RESOURCE).allocatable == 8)


def _sockets(kubelet: SimulatedKubelet) -> list[str]:
    return sorted(
        path.name for path in kubelet.plugins.iterdir() if path.name.startswith("vgpu-agent-")
    )


async def test_the_last_act_of_a_pre_start_resource_is_a_registration_without(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """A container that crashes while we are away must be able to start again
    without being asked for.
    """
    resource = shared_resource(pre_start_required=True)
    backend = FakeBackend(resource)
    plugin = node.offer(resource, backend)
    await _all_offered(kubelet)
    pod = await kubelet.admit("train", [Container("c", {RESOURCE: 1})])

    await plugin.stop()
    await kubelet.until(lambda: kubelet.resource(RESOURCE).allocatable == 0)

    assert len(kubelet.called("Register")) == 2
    assert (await kubelet.start_container(pod, "c")).envs != {}
    assert backend.started == []


async def test_the_last_registration_waits_until_the_kubelet_has_noticed_the_end_of_the_stream(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that notices it later takes down the client of that registration for it. It then
    kept ids healthy that had no server (seen on a busy node), and its next pods would fail.
    """
    noticed = kubelet._stream_ended

    async def late(endpoint: Endpoint, reason: str) -> None:
        await asyncio.sleep(0.3)
        await noticed(endpoint, reason)

    monkeypatch.setattr(kubelet, "_stream_ended", late)
    resource = shared_resource(pre_start_required=True)
    plugin = node.offer(resource, FakeBackend(resource))
    await _all_offered(kubelet)

    await plugin.stop()
    await kubelet.until(lambda: kubelet.resource(RESOURCE).allocatable == 0)

    (_, last), ended = kubelet.called("Register"), kubelet.called("stream ended")[0]
    assert ended.at < last.at


async def test_a_stop_does_not_wait_for_a_kubelet_that_never_notices(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen kubelet closes no connection, and the pod's grace period is limited."""
    stopped = asyncio.Event()

    async def frozen(_endpoint: Endpoint, _reason: str) -> None:
        await stopped.wait()

    monkeypatch.setattr(kubelet, "_stream_ended", frozen)
    resource = shared_resource(pre_start_required=True)
    plugin = node.offer(resource, FakeBackend(resource))
    await _all_offered(kubelet)

    try:
        async with asyncio.timeout(8):
            await plugin.stop()
    finally:
        stopped.set()  # the end of the test closes connections, which ends streams, too


async def test_answers_that_may_be_wrong_are_not_let_through_while_nobody_can_be_asked(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Binding early: no registration without pre-start, so a crashed container waits for the
    agent's return instead of a wrong GPU.
    """
    resource = shared_resource(pre_start_required=True)
    backend = FakeBackend(resource)
    backend.right_by_itself = False
    plugin = node.offer(resource, backend)
    await _all_offered(kubelet)

    await plugin.stop()

    assert len(kubelet.called("Register")) == 1
    assert node.events("plugin.retired") == []
    assert (plugin.status.state, _sockets(kubelet)) == (PluginState.STOPPED, [])


async def test_a_resource_without_pre_start_just_goes(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """There is no last registration where it would change nothing."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    await plugin.stop()

    assert len(kubelet.called("Register")) == 1


async def test_a_last_registration_that_fails_costs_nothing(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The kubelet may be stopping at the same time.
    The agent ends all the same, without a socket left.
    """
    resource = shared_resource(pre_start_required=True)
    plugin = node.offer(resource, FakeBackend(resource))
    await _all_offered(kubelet)
    kubelet.faults.failing_registrations = 1

    await plugin.stop()

    assert (plugin.status.state, _sockets(kubelet)) == (PluginState.STOPPED, [])
