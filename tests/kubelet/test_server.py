"""The life of a device plugin beside a kubelet that restarts, forgets,
refuses and dawdles (kubelet V1 to V17).
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kubelet.backend import U0, U1, FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually, quickest
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import UnknownDeviceError
from vgpu_agent.grpc.server import GrpcServer
from vgpu_agent.grpc.sockets import bind
from vgpu_agent.kubelet import server
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.kubelet.records import read_records
from vgpu_agent.kubelet.registration import register
from vgpu_agent.model import Resource
from vgpu_agent.sim.kubelet.faults import AdmissionError
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet
from vgpu_agent.status import PluginState

RESOURCE = "nvidia.com/gpu.shared"


async def _all_offered(
    kubelet: SimulatedKubelet, resource: str = RESOURCE, number: int = 8
) -> None:
    """Wait until as many are allocatable and their list is noted,
    which happens once the kubelet's checkpoint is written.
    """

    def offered() -> bool:
        lists = kubelet.called("list", resource)
        return (
            kubelet.resource(resource).allocatable
            == number
            == (lists[-1].facts["healthy"] if lists else 0)
        )

    await kubelet.until(offered)


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


async def test_a_resource_is_served_registered_and_listed(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V1: kubelet asks for the options while our Register is pending, and gets them."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))

    await _all_offered(kubelet)

    register, options = kubelet.called("Register")[0], kubelet.called("GetDevicePluginOptions")[0]
    assert kubelet.calls.index(register) < kubelet.calls.index(options)
    assert register.facts["version"] == "v1beta1"
    await kubelet.until(lambda: plugin.status.ready)
    assert (
        plugin.status.registrations,
        plugin.status.registration_failures,
        plugin.status.last_error,
    ) == (1, 0, "")
    assert plugin.status.endpoint == register.facts["endpoint"]


@pytest.mark.parametrize("pre_start", [True, False])
@pytest.mark.parametrize("prefers", [True, False])
async def test_both_places_have_the_same_options(
    kubelet: SimulatedKubelet, node: Node, pre_start: bool, prefers: bool
) -> None:
    """``vgpu-manager:D5``: a kubelet that trusts Register alone must call PreStartContainer too."""
    resource = msgspec.structs.replace(
        shared_resource(pre_start_required=pre_start), offers_preference=prefers
    )
    node.offer(resource, FakeBackend(resource))
    await _all_offered(kubelet)
    for call in ("Register", "GetDevicePluginOptions"):
        (facts,) = (asked.facts for asked in kubelet.called(call))
        assert (facts["pre_start"], facts["preferred"]) == (pre_start, prefers)


async def test_the_socket_is_for_root_alone(kubelet: SimulatedKubelet, node: Node) -> None:
    """Mode 0600."""
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    (name,) = _sockets(kubelet)

    assert stat.S_IMODE((kubelet.plugins / name).stat().st_mode) == 0o600


async def test_kubelets_return_is_a_new_socket_and_one_register(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V2: sockets wiped, kubelet.sock made anew.
    The full list is back at once, on a socket of another name.
    """
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    before = len(kubelet.called("Register"))

    await kubelet.restart()
    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)

    registers = kubelet.called("Register")
    assert len(registers) - before == 1
    assert registers[0].facts["endpoint"] != registers[-1].facts["endpoint"]
    assert _sockets(kubelet) == [plugin.status.endpoint]
    assert node.status.restarts_seen == 1


async def test_register_follows_kubelet_sock_and_not_the_end_of_a_pause(
    directory: Path, kubelet: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubelet was away for a while, and the pauses between tries have become long; scripts/bench
    holds the way to Register to 300 ms.
    """
    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=1.0) as supervisor:
        node = Node(
            directory,
            supervisor,
            monkeypatch,
            RETRY_MIN_SECONDS=60.0,
            RETRY_MAX_SECONDS=60.0,
        )
        node.watch_directory()
        plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
        await _all_offered(kubelet)
        before = len(kubelet.called("list"))

        await kubelet.stop()
        await eventually(lambda: node.events("plugin.registering_again"))
        await kubelet.start()
        await kubelet.until(lambda: len(kubelet.called("list")) > before)
        await plugin.stop()

    assert len(kubelet.called("Register")) == 2


async def test_two_quick_restarts_end_with_one_registration(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The second restart may hit any step of the reaction to the first."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    await kubelet.restart()
    await kubelet.restart(away_seconds=0.02)
    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)

    assert _sockets(kubelet) == [plugin.status.endpoint]


async def test_a_cancelled_stream_leads_to_a_new_registration(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V3: socket files untouched, only the stream is gone."""
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    await kubelet.cancel_stream(RESOURCE)
    await _registered_again(kubelet, before=1)

    assert len(kubelet.called("Register")) == 2


async def test_a_deleted_socket_leads_to_a_new_one(kubelet: SimulatedKubelet, node: Node) -> None:
    """kubelet V4: only our own socket file goes. The server behind it would never notice."""
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    (name,) = _sockets(kubelet)
    await kubelet.until(lambda: name in node.watch.state.value.sockets)

    (kubelet.plugins / name).unlink()
    await _registered_again(kubelet, before=1)

    assert name not in _sockets(kubelet)
    assert [event["reason"] for event in node.events("plugin.registering_again")] == [
        f"the agent's socket {name} has been deleted or replaced"
    ]


@pytest.mark.parametrize("deleted_before", ["it serves", "its registration"])
async def test_a_socket_that_a_new_kubelet_has_deleted_is_not_registered(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch, deleted_before: str
) -> None:
    """A kubelet that comes back deletes all sockets before it listens. Had it been told of a
    deleted one, it would have failed every pod until somebody noticed.
    """
    deleted = list[str]()

    if deleted_before == "its registration":

        async def delete_first(path: Path, *, endpoint: str, **others: Any) -> None:
            if not deleted:
                deleted.append(endpoint)
                await asyncio.to_thread((kubelet.plugins / endpoint).unlink)
            await register(path, endpoint=endpoint, **others)

        monkeypatch.setattr(server, "register", delete_first)
    else:

        def delete_at_once(path: Path, setting: str) -> socket.socket:
            listener = bind(path, setting)
            if not deleted:
                deleted.append(path.name)
                path.unlink()
            return listener

        monkeypatch.setattr(server, "bind", delete_at_once)
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    (registered,) = kubelet.called("Register")
    assert deleted[0] not in str(registered)
    (again,) = node.events("plugin.registering_again")
    assert again["reason"] == (
        f"the agent's socket {deleted[0]} was deleted while it was registered: the kubelet has "
        "restarted"
    )


async def test_two_agents_with_one_resource_do_not_disturb_each_other(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V5: unique endpoints. The later registration's list is equal to the first."""
    first = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: first.status.ready)
    second = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: second.status.ready)
    await kubelet.until(lambda: len(kubelet.called("list")) == 2)

    lists = kubelet.called("list")
    assert lists[0].facts["bytes"] == lists[1].facts["bytes"]
    assert first.status.endpoint != second.status.endpoint
    assert _sockets(kubelet) == sorted([first.status.endpoint, second.status.endpoint])


async def test_allocate_goes_to_the_backend_and_back(kubelet: SimulatedKubelet, node: Node) -> None:
    """GetPreferredAllocation, Allocate and the container's environment, as in an admission."""
    backend = FakeBackend(shared_resource())
    node.offer(shared_resource(), backend)
    await _all_offered(kubelet)

    pod = await kubelet.admit("train", [Container("c", {RESOURCE: 2})])

    assert backend.allocated == [(RESOURCE, tuple(kubelet.ids_of(pod, "c", RESOURCE)))]
    assert dict(pod.answers["c"].envs) == {"NVIDIA_VISIBLE_DEVICES": U1}


async def test_an_unknown_id_fails_the_pod_with_our_text(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V8, kubelet side: a gRPC error with the backend's words.
    The stream and the next pod are not disturbed.
    """
    backend = FakeBackend(shared_resource())
    node.offer(shared_resource(), backend)
    await _all_offered(kubelet)
    backend.failure = UnknownDeviceError("unknown device id x; known are 8 ids")

    with pytest.raises(AdmissionError, match="unknown device id x; known are 8 ids"):
        await kubelet.admit("bad", [Container("c", {RESOURCE: 1})])
    backend.failure = None
    await kubelet.admit("good", [Container("c", {RESOURCE: 1})])

    assert backend.allocated != []
    assert kubelet.called("stream ended") == []


async def test_pre_start_is_called_at_each_start(kubelet: SimulatedKubelet, node: Node) -> None:
    """The ids of the container, again at a restart of it."""
    resource = shared_resource(pre_start_required=True)
    backend = FakeBackend(resource)
    node.offer(resource, backend)
    await _all_offered(kubelet)
    pod = await kubelet.admit("train", [Container("c", {RESOURCE: 1})])

    await kubelet.start_container(pod, "c")
    await kubelet.start_container(pod, "c")

    assert backend.started == [(RESOURCE, tuple(kubelet.ids_of(pod, "c", RESOURCE)))] * 2


async def test_no_call_decides_after_the_resource_was_handed_over(
    kubelet: SimulatedKubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that was made to forget its client does not close the connection. By then the next
    agent reads what containers have.
    """
    resource = shared_resource(pre_start_required=True)
    begun, decided = asyncio.Event(), []

    class Slow(FakeBackend):
        async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
            begun.set()
            await asyncio.sleep(5)
            decided.append(resource)

    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=1.0) as supervisor:
        node = Node(directory, supervisor, monkeypatch, DRAIN_SECONDS=0.2)
        node.watch_directory()
        plugin = node.offer(resource, Slow(resource))
        await _all_offered(kubelet)
        pod = await kubelet.admit("train", [Container("c", {RESOURCE: 1})])
        starting = asyncio.ensure_future(kubelet.start_container(pod, "c"))
        await begun.wait()
        assert await plugin.unlink()
        await plugin.end_streams()
        await plugin.hand_over()
        assert not _sockets(kubelet)
        await asyncio.wait([starting], timeout=PATIENCE_SECONDS)
        assert starting.exception() is not None
        assert decided == []


async def test_a_missing_kubelet_is_waited_for(directory: Path, node: Node) -> None:
    """kubelet V14: no socket, no crash loop, no serving in vain;
    registered as soon as kubelet is there.
    """
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await eventually(lambda: plugin.status.state is PluginState.WAITING)
    assert plugin.status.registration_failures == 0
    kubelet = SimulatedKubelet(directory)

    await kubelet.start()
    await _all_offered(kubelet)
    await plugin.stop()
    await kubelet.stop()

    assert len(kubelet.called("Register")) == 1


async def test_kubelets_records_are_readable_before_the_first_register(
    directory: Path, kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V10, kubelet side: an agent that starts under running pods reads them
    without being registered.
    """
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    pod = await kubelet.admit("p", [Container("c", {RESOURCE: 1})], namespace="ns")
    await plugin.stop()
    before = len(kubelet.called("Register"))

    pod_resources = PodResources(
        directory / "pod-resources" / "kubelet.sock", timeout_seconds=PATIENCE_SECONDS
    )
    records = await read_records(pod_resources, node.settings.checkpoint_path)
    pod_resources.close()

    (holding,) = records.holdings
    assert (holding.owner.namespace, holding.owner.pod, holding.owner.pod_uid) == (
        "ns",
        "p",
        pod.uid,
    )
    assert len(kubelet.called("Register")) == before


async def test_two_resources_have_sockets_and_lists_of_their_own(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V17, kubelet side: no call names its resource, so the socket must.
    No id is in both lists.
    """
    cores = Resource(
        "nvidia.com/cores",
        "nvidia",
        tuple(DeviceId(f"cores-{number}", U0, 0) for number in range(5)),
    )
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    node.offer(cores, FakeBackend(cores))

    await _all_offered(kubelet)
    await _all_offered(kubelet, cores.name, 5)

    assert len(_sockets(kubelet)) == 2
    assert (
        not kubelet.resource(RESOURCE).healthy.keys() & kubelet.resource(cores.name).healthy.keys()
    )


async def test_a_preference_among_100_000_ids_through_the_socket(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V9: 5 MB of ids, which grpcio's own servers would refuse,
    answered within a second.
    """
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    available = [f"{U0}::{number}" for number in range(100_000)]

    async def asked() -> float:
        began = time.process_time()  # both ends are in this process
        assert await kubelet._endpoints[RESOURCE].prefer(available, [], 2) == available[:-3:-1]
        return time.process_time() - began

    assert await quickest(asked, within_seconds=1.0) < 1.0


async def test_stopping_ends_the_stream_cleanly_and_removes_the_socket(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The kubelet sees the end of the stream, not an error, although it keeps its connection."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    # and not as long as draining may take
    await asyncio.wait_for(plugin.stop(), PATIENCE_SECONDS / 2)
    await kubelet.until(lambda: kubelet.called("stream ended") != [])

    assert kubelet.called("stream ended")[0].facts["reason"] == "EOF"
    assert _sockets(kubelet) == []
    assert (plugin.status.state, plugin.status.ready) == (PluginState.STOPPED, False)


async def test_stopping_does_not_wait_for_a_register_that_hangs(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The kubelet may take 15 seconds for a Register. An agent that stops does not."""
    kubelet.faults.register_delay_seconds = FOR_EVER_SECONDS
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: kubelet.called("Register") != [])

    await asyncio.wait_for(plugin.stop(), PATIENCE_SECONDS / 2)

    assert _sockets(kubelet) == []


async def test_a_cancelled_plugin_removes_its_socket(kubelet: SimulatedKubelet, node: Node) -> None:
    """The supervisor's way to end a loop leaves nothing behind either."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    await node.supervisor.stop(f"plugin {RESOURCE} 1")

    assert _sockets(kubelet) == []
    assert plugin.status.state is PluginState.STOPPED


async def test_a_plugin_that_never_ran_can_be_stopped(node: Node) -> None:
    """Nothing to wait for."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))

    await asyncio.wait_for(plugin.stop(), PATIENCE_SECONDS)


async def test_new_ids_are_a_new_plugin(kubelet: SimulatedKubelet, node: Node) -> None:
    """A reload of the configuration stops one plugin and starts the next; capacity follows."""
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)
    fewer = Resource(RESOURCE, "nvidia", shared_resource().ids[:4], holders_per_device=4)

    await plugin.stop()
    node.offer(fewer, FakeBackend(fewer))
    await _all_offered(kubelet, number=4)


async def test_a_directory_that_cannot_be_written_is_one_error_and_a_retry(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only disk is reported once, tried again, and forgotten when it is over."""
    original = node.watch.directory
    await kubelet.until(lambda: node.watch.state.value.kubelet_socket is not None)
    monkeypatch.setattr(node.watch, "directory", original / "vanished")
    plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: node.events("plugin.registering_again") != [])
    await asyncio.sleep(0.2)  # time for more tries, which must not be more lines
    assert "the directory does not exist" in plugin.status.last_error
    assert len(node.events("plugin.registering_again")) == 1

    monkeypatch.setattr(node.watch, "directory", original)
    await _all_offered(kubelet)
    await kubelet.until(lambda: plugin.status.ready)  # the list may be there before the answer

    assert plugin.status.last_error == ""


async def test_a_directory_that_is_removed_and_made_again_is_survived(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """A cleanup removes too much. The next kubelet finds us all the same."""
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await _all_offered(kubelet)

    await kubelet.stop()
    # our own sockets may go at the same time
    await asyncio.to_thread(shutil.rmtree, kubelet.plugins, ignore_errors=True)
    await kubelet.start()

    await _all_offered(kubelet)


async def test_a_plugin_that_is_cancelled_while_it_starts_leaves_nothing(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket file is there, but its listener is not ready yet."""
    bound = asyncio.Event()

    async def never(*_: object) -> None:
        bound.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(GrpcServer, "start", never)
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await bound.wait()
    assert len(_sockets(kubelet)) == 1

    await node.supervisor.stop(f"plugin {RESOURCE} 1")

    assert _sockets(kubelet) == []
