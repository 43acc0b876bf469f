"""The stand-in itself: as strict and as unkind as the real device manager,
because other tests rest on it (kubelet §2 to §13).
"""

from __future__ import annotations

import contextlib
import json
import stat
import time

import pytest

from tests.kubelet.backend import U0, U1, FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.model import Resource
from vgpu_agent.sim.kubelet.faults import AdmissionError, ContainerStartError
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet

R = "nvidia.com/gpu.shared"


async def _offered(
    kubelet: SimulatedKubelet, node: Node, resource: Resource | None = None
) -> FakeBackend:
    resource = resource or shared_resource()
    backend = FakeBackend(resource)
    node.offer(resource, backend)
    await kubelet.until(lambda: kubelet.resource(resource.name).allocatable == len(resource.ids))
    return backend


async def test_later_containers_take_over_the_ids_of_init_containers(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The init container comes first whatever its place.
    What it had is used before anything new.
    """
    await _offered(kubelet, node)

    pod = await kubelet.admit(
        "p", [Container("main", {R: 3}), Container("init", {R: 2}, init=True)]
    )

    assert set(kubelet.ids_of(pod, "init", R)) < set(kubelet.ids_of(pod, "main", R))
    assert len(kubelet.ids_of(pod, "main", R)) == 3


async def test_two_containers_of_a_pod_share_no_id(kubelet: SimulatedKubelet, node: Node) -> None:
    """Only init containers hand their ids on."""
    await _offered(kubelet, node)

    pod = await kubelet.admit("p", [Container("a", {R: 3}), Container("b", {R: 3})])

    assert not set(kubelet.ids_of(pod, "a", R)) & set(kubelet.ids_of(pod, "b", R))


async def test_ids_of_an_ended_pod_are_free_at_the_next_allocation(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Lazily, as in the real one: the checkpoint names the pod until then."""
    await _offered(kubelet, node)
    pod = await kubelet.admit("p", [Container("c", {R: 8})])

    await kubelet.delete(pod)
    assert pod.uid in (kubelet.plugins / "kubelet_internal_checkpoint").read_text(encoding="utf-8")
    await kubelet.admit("q", [Container("c", {R: 8})])

    assert pod.uid not in (kubelet.plugins / "kubelet_internal_checkpoint").read_text(
        encoding="utf-8"
    )


async def test_a_pod_that_ended_is_not_listed(kubelet: SimulatedKubelet, node: Node) -> None:
    """pod-resources forgets it before it answers; plain init containers it never shows."""
    await _offered(kubelet, node)
    ended = await kubelet.admit("ended", [Container("c", {R: 1})])
    await kubelet.admit("p", [Container("init", {R: 2}, init=True), Container("c", {R: 1})])
    await kubelet.delete(ended)

    with contextlib.closing(
        PodResources(
            kubelet.directory / "pod-resources" / "kubelet.sock", timeout_seconds=PATIENCE_SECONDS
        )
    ) as client:
        listed = await client.list()

    assert [
        (holding.owner.pod, holding.owner.container, len(holding.ids)) for holding in listed
    ] == [("p", "c", 1)]


async def test_the_checkpoint_has_kubelets_form(kubelet: SimulatedKubelet, node: Node) -> None:
    """Ids by NUMA node, the answer as base64, healthy ids as registered,
    for root alone (kubelet §9).
    """
    backend = await _offered(kubelet, node)
    pod = await kubelet.admit("p", [Container("c", {R: 5})])
    backend.lose(U0)
    # a list is noted once the checkpoint is written
    await kubelet.until(lambda: kubelet.called("list", R)[-1].facts["healthy"] == 4)
    path = kubelet.plugins / "kubelet_internal_checkpoint"

    content = json.loads(path.read_text(encoding="utf-8"))

    (entry,) = content["Data"]["PodDeviceEntries"]
    assert (entry["PodUID"], entry["ContainerName"], entry["ResourceName"]) == (pod.uid, "c", R)
    assert sorted(entry["DeviceIDs"]) == ["0", "1"]
    assert content["Data"]["RegisteredDevices"] == {R: [f"{U1}::{replica}" for replica in range(4)]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_devices_without_topology_stand_under_minus_one(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The key that kubelet uses when it knows no NUMA node."""
    await _offered(kubelet, node, Resource(R, "nvidia", (DeviceId("a", U0),)))
    await kubelet.admit("p", [Container("c", {R: 1})])

    content = json.loads(
        (kubelet.plugins / "kubelet_internal_checkpoint").read_text(encoding="utf-8")
    )

    assert content["Data"]["PodDeviceEntries"][0]["DeviceIDs"] == {"-1": ["a"]}


async def test_allocations_survive_a_restart_and_devices_do_not(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Until the plugin is back: capacity 0, running pods keep their ids, new pods are refused."""
    await _offered(kubelet, node)
    pod = await kubelet.admit("p", [Container("c", {R: 2})])
    ids = kubelet.ids_of(pod, "c", R)
    await node.plugins[0].stop()

    await kubelet.restart()

    assert (kubelet.ids_of(pod, "c", R), kubelet.resource(R).capacity) == (ids, 0)
    with pytest.raises(
        AdmissionError, match=f"cannot allocate unregistered device {R}, which is unexpected"
    ):
        await kubelet.admit("q", [Container("c", {R: 1})])


async def test_an_unreadable_checkpoint_leaves_no_allocations(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The real one logs it and goes on without any knowledge."""
    await _offered(kubelet, node)
    pod = await kubelet.admit("p", [Container("c", {R: 2})])
    (kubelet.plugins / "kubelet_internal_checkpoint").write_text("{", encoding="utf-8")

    await kubelet.restart()

    assert kubelet.ids_of(pod, "c", R) == []


async def test_the_end_of_a_stream_makes_every_id_unhealthy(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacity stays, allocatable is 0 at once, new pods are refused. After five minutes the
    resource is gone (kubelet §5).
    """
    await _offered(kubelet, node)

    await node.plugins[0].stop()
    await kubelet.until(lambda: kubelet.resource(R).allocatable == 0)

    assert kubelet.resource(R).capacity == 8
    with pytest.raises(
        AdmissionError, match="no healthy devices present; cannot allocate unhealthy devices"
    ):
        await kubelet.admit("p", [Container("c", {R: 1})])
    later = time.monotonic() + 301
    monkeypatch.setattr("vgpu_agent.sim.kubelet.kubelet.time.monotonic", lambda: later)
    assert kubelet.resource(R).capacity == 0


async def test_the_end_of_an_old_stream_takes_the_new_registration_down(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Endpoints are known by resource only.
    The survivor has to notice and register again (kubelet §3).
    """
    await _offered(kubelet, node)
    await _offered(kubelet, node)
    await kubelet.until(lambda: node.plugins[1].status.ready)

    await node.plugins[0].stop()

    await kubelet.until(
        lambda: len(kubelet.called("Register")) == 3 and kubelet.resource(R).allocatable == 8
    )


async def test_a_list_above_four_mebibytes_ends_the_stream(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The wall behind the message budget (kubelet §10): the resource stays at 0."""
    huge = Resource(
        R, "nvidia", tuple(DeviceId(f"{U0}::{number}", U0, 1) for number in range(70_000))
    )

    node.offer(huge, FakeBackend(huge))
    await kubelet.until(lambda: kubelet.called("stream ended") != [])

    assert "RESOURCE_EXHAUSTED" in kubelet.called("stream ended")[0].facts["reason"]
    assert kubelet.resource(R).capacity == 0


async def test_too_many_devices_are_refused(kubelet: SimulatedKubelet, node: Node) -> None:
    """With the real kubelet's words. What the pod already had is cleaned up at the next
    allocation.
    """
    await _offered(kubelet, node)

    with pytest.raises(AdmissionError, match=r"Requested: 5, Available: 2, which is unexpected"):
        await kubelet.admit("p", [Container("a", {R: 6}), Container("b", {R: 5})])

    await kubelet.admit("q", [Container("a", {R: 8})])


async def test_a_resource_that_nobody_registered_is_ignored(kubelet: SimulatedKubelet) -> None:
    """Another client may have patched it into the node's status."""
    pod = await kubelet.admit("p", [Container("c", {"example.com/thing": 1})])

    assert kubelet.ids_of(pod, "c", "example.com/thing") == []


async def test_a_poor_preference_is_filled_up(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is a hint: unknown ids are dropped, missing ones added."""
    await _offered(kubelet, node)

    async def prefer(*_: object) -> list[str]:
        return ["unknown", f"{U1}::3"]

    monkeypatch.setattr(kubelet._endpoints[R], "prefer", prefer)
    pod = await kubelet.admit("p", [Container("c", {R: 2})])

    assert set(kubelet.ids_of(pod, "c", R)) == {f"{U1}::3", f"{U0}::0"}


async def test_a_plugin_that_goes_between_two_calls_has_been_stopped(
    kubelet: SimulatedKubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers which ids it prefers, and its stream has ended before it is asked
    for them (kubelet §3).
    """
    await _offered(kubelet, node)

    async def prefer(*_: object) -> list[str]:
        await node.plugins[0].stop()
        await kubelet.until(lambda: kubelet.called("stream ended") != [])
        return [f"{U1}::3"]

    monkeypatch.setattr(kubelet._endpoints[R], "prefer", prefer)
    with pytest.raises(AdmissionError, match="has been stopped"):
        await kubelet.admit("p", [Container("c", {R: 1})])


async def test_answers_of_two_resources_are_united_and_the_first_one_wins(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """Environment, annotations, mounts and devices by path; CDI names are all kept."""
    edits = {
        "a.example/x": Edits(
            {"E": "a", "A": "1"},
            (Mount("/m", "/a"),),
            (DeviceNode("/d", "/a"),),
            {"k": "a"},
            ("v/c=a", "v/c=0"),
        ),
        "b.example/x": Edits(
            {"E": "b", "B": "1"},
            (Mount("/m", "/b"),),
            (DeviceNode("/d", "/b"),),
            {"k": "b"},
            ("v/c=b", "v/c=0"),
        ),
    }
    for name, answer_of_backend in edits.items():
        resource = Resource(name, "nvidia", (DeviceId(f"{name}-0", U0, 0),))
        backend = await _offered(kubelet, node, resource)
        backend.edits = answer_of_backend

    pod = await kubelet.admit("p", [Container("c", dict.fromkeys(edits, 1))])

    answer = pod.answers["c"]
    first = answer.envs["E"]
    assert dict(answer.envs) == {"E": first, "A": "1", "B": "1"}
    assert (
        [mount.host_path for mount in answer.mounts]
        == [device.host_path for device in answer.devices]
        == [f"/{first}"]
    )
    assert dict(answer.annotations) == {"k": first}
    assert sorted(cdi.name for cdi in answer.cdi_devices) == ["v/c=0", "v/c=a", "v/c=b"]


async def test_pre_start_is_skipped_between_a_restart_and_the_plugins_return(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """The real one knows no options then, so nothing may depend on this call alone (kubelet §6)."""
    backend = await _offered(kubelet, node, shared_resource(pre_start_required=True))
    pod = await kubelet.admit("p", [Container("c", {R: 1})])
    await node.supervisor.stop(f"plugin {R} 1")
    await kubelet.until(lambda: kubelet.called("stream ended") != [])

    with pytest.raises(ContainerStartError, match="has been stopped"):
        await kubelet.start_container(pod, "c")
    await kubelet.restart()
    await kubelet.start_container(pod, "c")

    assert backend.started == []


async def test_waiting_in_vain_says_what_happened_instead(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """A failing test should explain itself."""
    await _offered(kubelet, node)

    with pytest.raises(
        TimeoutError, match=r"in vain; last calls: .*Register nvidia\.com/gpu\.shared"
    ):
        await kubelet.until(lambda: False, timeout_seconds=0.1)
