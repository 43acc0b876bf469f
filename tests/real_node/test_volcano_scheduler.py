"""The stand-in Volcano scheduler against a real API server and kubelet;
no agent, a Node advertised by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.real_node.rig import Rig, running_rig
from tests.real_node.volcano import (
    IDS,
    Advertised,
    VolcanoScheduler,
    annotations_of,
    environment,
    printing,
    vgpu,
    volcano_pod,
    wait_bound,
    wait_unschedulable,
)

U0, U1 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
# volcano-vgpu G1
REGISTER = (
    f"{U0},10,24576,NVIDIA-NVIDIA A10,true,hami-core:{U1},10,24576,NVIDIA-NVIDIA "
    "A10,true,hami-core:"
)
RESOURCES = {
    "volcano.sh/vgpu-number": 20,
    "volcano.sh/vgpu-cores": 200,
    "volcano.sh/vgpu-memory": 49152,
}


@pytest.fixture(scope="module")
def rig(cluster_available: None) -> Iterator[Rig]:
    """A node on which no plugin has registered Volcano's resources: kubelet would put its own
    number over what is advertised by hand.
    """
    with running_rig() as running:
        yield running


@pytest.fixture
def advertised(rig: Rig) -> Iterator[Advertised]:
    """The golden node of the contract, without a plugin that serves its resources."""
    with Advertised(rig, RESOURCES, {"volcano.sh/node-vgpu-register": REGISTER}) as node:
        yield node


def _asking(
    name: str, number: int = 1, memory: int | None = None, cores: int | None = None
) -> dict[str, object]:
    return volcano_pod(name, containers=[printing(limits=vgpu(number, memory, cores))])


def test_g3_on_a_real_api_server(rig: Rig, advertised: Advertised) -> None:
    """volcano-vgpu:G3: the real API server lays the Binding's annotations over the pod as it sets
    the node. The kubelet starts the pod.
    """
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("g3", 1, 3000, 50))
        written = wait_bound(rig, "g3")
        assert abs(int(written["volcano.sh/vgpu-time"]) - time.time()) < 30
        assert written == {
            "volcano.sh/vgpu-node": rig.node_name(),
            "volcano.sh/vgpu-time": written["volcano.sh/vgpu-time"],
            "volcano.sh/bind-time": written["volcano.sh/vgpu-time"],
            "volcano.sh/bind-phase": "allocating",
            IDS: f"{U1},NVIDIA,3000,50:",
            "volcano.sh/devices-to-allocate": f"{U1},NVIDIA,3000,50:",
        }
        rig.wait_for_phase("g3", "Running")
        assert environment(rig, "g3")["HOSTNAME"] == "g3"


def test_what_the_real_scheduler_did_on_this_rig(rig: Rig, advertised: Advertised) -> None:
    """volcano-vgpu:G6 and volcano-vgpu:G8 with binpack:
    cards, segments, and the refusal of what is too much, in its words.
    """
    with VolcanoScheduler(rig, policy="binpack"):
        rig.create_pod(_asking("one", 1, 4, 30))
        assert wait_bound(rig, "one")[IDS] == f"{U0},NVIDIA,4,30:"
        rig.create_pod(_asking("both", 2, 6))
        assert wait_bound(rig, "both")[IDS] == f"{U0},NVIDIA,6,0:{U1},NVIDIA,6,0:"
        rig.create_pod(
            volcano_pod(
                "two",
                containers=[printing("side"), *(printing(name, vgpu(1, 2)) for name in ("a", "b"))],
            )
        )
        assert wait_bound(rig, "two")[IDS] == f"{U0},NVIDIA,2,0:;{U0},NVIDIA,2,0:"
        rig.create_pod(_asking("large", 2, 24570))
        assert (
            wait_unschedulable(rig, "large")
            == "0/1 nodes are unavailable: 1 hami-vgpuDeviceSharing error."
        )
        # The scheduler writes the event on its own, some time after the condition.
        events = rig.wait_for(
            lambda: rig.api.get(
                "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=large"
            )["items"],
            what="the scheduler's event of the pod",
        )
        assert {event["reason"] for event in events} == {"FailedScheduling"}


def test_a_scheduler_killed_in_a_burst_gives_nothing_twice(
    rig: Rig, advertised: Advertised
) -> None:
    """kill -9 in the middle of twenty binds: the next one reads from the annotations what is given,
    and both cards are filled exactly.
    """
    names = [f"burst-{number:02}" for number in range(20)]
    with VolcanoScheduler(rig, policy="spread") as scheduler:
        for name in names[:10]:
            rig.create_pod(_asking(name, 1, 2457))
        rig.wait_for(
            lambda: IDS in annotations_of(rig, names[3]) or None, what="the first pods to be bound"
        )
        scheduler.kill()
        for name in names[10:]:
            rig.create_pod(_asking(name, 1, 2457))
        scheduler.start()
        given = [wait_bound(rig, name)[IDS] for name in names]
    assert sorted(given) == [f"{U0},NVIDIA,2457,0:"] * 10 + [f"{U1},NVIDIA,2457,0:"] * 10


def test_a_gang_waits_until_there_is_room_for_all(rig: Rig, advertised: Advertised) -> None:
    """Four pods of a group where three fit: none is bound until the one in their way is gone."""
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("holder", 1, 20000))
        wait_bound(rig, "holder")
        names = [f"gang-{number}" for number in range(4)]
        for name in names:
            containers = [printing(limits=vgpu(1, 8000))]
            rig.create_pod(volcano_pod(name, containers=containers, group="gang", min_member=4))
        assert "pod group is not ready" in rig.wait_for(
            lambda: (
                text if "3 can be placed" in (text := wait_unschedulable(rig, names[0])) else None
            ),
            what="the gang to be complete",
        )
        assert all(IDS not in annotations_of(rig, name) for name in names)
        rig.delete_pod("holder")
        assert all(IDS in wait_bound(rig, name) for name in names)


def test_the_old_way_on_a_real_api_server(rig: Rig, advertised: Advertised) -> None:
    """Annotations first, with the node lock held, then the Binding:
    a watch sees the pod annotated and not yet bound.
    """
    advertised.annotate(node_vgpu_handshake="Reported now")
    version = rig.api.get("/api/v1/namespaces/default/pods")["metadata"]["resourceVersion"]
    with VolcanoScheduler(rig, old=True, node_lock=True):
        rig.create_pod(_asking("old", 1, 3000))
        assert wait_bound(rig, "old")[IDS] == f"{U1},NVIDIA,3000,0:"
        watched = rig.api.text(
            f"/api/v1/namespaces/default/pods?watch=1&resourceVersion={version}&timeoutSeconds=1"
        ).splitlines()
        assert any(f"{U1},NVIDIA,3000,0:" in line and '"nodeName"' not in line for line in watched)
        node = rig.node()["metadata"]["annotations"]
        assert node["volcano.sh/node-vgpu-handshake"].startswith("Requesting_")
        assert "hamivgpu" in node
