"""The family volcano-vgpu on a real node: the stand-in scheduler writes, the agent binds late, and
containers print what they found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_node.agents import NodeAgent
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import pod
from tests.real_node.volcano import (
    IDS,
    VolcanoScheduler,
    annotations_of,
    vgpu,
    volcano_pod,
    wait_bound,
    wait_unschedulable,
)
from tests.real_node.volcano_node import (
    MEMORY_MIB,
    REGISTER,
    U0,
    U1,
    seen,
    showing,
    start_vgpu,
    volcano_agent,
    wait_running,
    wait_served,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def agent(volcano_rig: Rig) -> Iterator[NodeAgent]:
    """One agent for all tests here."""
    running = volcano_agent(volcano_rig)
    try:
        yield start_vgpu(running)
    finally:
        running.close()


def _asking(
    name: str, number: int = 1, memory: int | None = None, cores: int | None = None, **more: Any
) -> dict[str, Any]:
    return volcano_pod(name, containers=[showing(limits=vgpu(number, memory, cores))], **more)


def _history(rig: Rig, version: str, name: str) -> list[dict[str, Any]]:
    """Return the pod after each change since ``version``."""
    lines = rig.api.text(
        f"/api/v1/namespaces/default/pods?watch=1&resourceVersion={version}&timeoutSeconds=1"
    ).splitlines()
    found = [json.loads(line)["object"] for line in lines]
    return [each for each in found if each["metadata"]["name"] == name]


def test_g3_g4_g5_from_the_scheduler_to_the_end(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:G1, volcano-vgpu:G3, volcano-vgpu:G4, volcano-vgpu:G5: what is written, what the
    container finds, how the pod ends.
    """
    rig = volcano_rig
    card = f"10,{MEMORY_MIB},NVIDIA-NVIDIA A10,true,hami-core"
    assert rig.node()["metadata"]["annotations"][REGISTER] == f"{U0},{card}:{U1},{card}:"
    version = rig.api.get("/api/v1/namespaces/default/pods")["metadata"]["resourceVersion"]
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("golden", 1, 3000, 50))
        found, after = seen(rig, "golden"), wait_served(rig, "golden")
    bound = next(each for each in _history(rig, version, "golden") if each["spec"].get("nodeName"))
    written, uid = bound["metadata"]["annotations"], bound["metadata"]["uid"]
    assert written[IDS] == written["volcano.sh/devices-to-allocate"] == f"{U1},NVIDIA,3000,50:"
    assert (written["volcano.sh/vgpu-node"], written["volcano.sh/bind-phase"]) == (
        rig.node_name(),
        "allocating",
    )
    ended = {
        "volcano.sh/devices-to-allocate": "",
        "volcano.sh/bind-phase": "success",
        "volcano.sh/vgpu-time": "18446744073709551615",
    }
    assert after == written | ended

    cache = found.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    ours = {
        name: value
        for name, value in found.environment.items()
        if name.startswith(("NVIDIA_", "CUDA_"))
    }
    assert ours == {
        "NVIDIA_VISIBLE_DEVICES": U1,
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache,
        "CUDA_REDIRECT": "/usr/local/vgpu/libvgpu.so",
    }
    read_only = {path for path, options in found.mounts.items() if options.split(",")[0] == "ro"}
    assert {"/usr/local/vgpu/libvgpu.so", "/etc/ld.so.preload"} <= read_only
    assert {"/tmp/cudevshr.cache", cache} <= found.mounts.keys() - read_only
    assert found.region == (19920718, 1, 3000 * MIB, 0, 50, 100)
    assert rig.exec("golden", "cat", "/etc/ld.so.preload") == "/usr/local/vgpu/libvgpu.so"

    directory = agent.folder / "hook/vgpu/regions" / f"{uid}_main"
    (spec,) = [path for path in rig.cdi_dir().iterdir() if uid in path.read_text()]
    assert directory.is_dir()
    rig.delete_pod("golden")
    rig.wait_for(
        lambda: not (directory.exists() or spec.exists()) or None,
        what="the grant's files to be collected",
    )


def test_g8_two_gpu_containers_behind_a_sidecar(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:G8, volcano-vgpu:D1, volcano-vgpu:D3: each container has its own segment, and
    one without a request has nothing.
    """
    rig = volcano_rig
    containers = [
        showing("side"),
        showing("first", vgpu(1, 3000)),
        showing("plain"),
        showing("second", vgpu(1, 4000, 30)),
    ]
    with VolcanoScheduler(rig):
        rig.create_pod(volcano_pod("mixed", containers=containers))
        assert wait_bound(rig, "mixed")[IDS] == f"{U1},NVIDIA,3000,0:;{U1},NVIDIA,4000,30:"
        assert wait_served(rig, "mixed")["volcano.sh/devices-to-allocate"] == ";"
    assert seen(rig, "mixed", "first").region == (19920718, 1, 3000 * MIB, 0, 100, 100)
    assert seen(rig, "mixed", "second").region == (19920718, 1, 4000 * MIB, 0, 30, 100)
    for name in ("side", "plain"):
        found = seen(rig, "mixed", name)
        assert (found.limit, found.gpus, found.region) == ("", "", ())


def test_g6_two_gpus_for_one_container(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:G6: both cards are visible, each with its limit."""
    with VolcanoScheduler(volcano_rig):
        volcano_rig.create_pod(_asking("both", 2, 3000, 50))
        found = seen(volcano_rig, "both")
    assert set(found.gpus.split(",")) == {U0, U1}
    assert found.region == (19920718, 2, 3000 * MIB, 3000 * MIB, 50, 50)


def test_an_init_container_with_a_gpu_and_the_container_after_it(
    volcano_rig: Rig, agent: NodeAgent
) -> None:
    """volcano-vgpu:D14: kubelet gives both the same ids, so both get what was decided for the one
    that keeps them; none is refused.
    """
    rig = volcano_rig
    made = volcano_pod(
        "prepared",
        containers=[showing(limits=vgpu(1, 2000))],
        initContainers=[showing("before", vgpu(1, 1000), then="true")],
    )
    with VolcanoScheduler(rig):
        rig.create_pod(made)
        main, before = seen(rig, "prepared"), seen(rig, "prepared", "before")
        wait_served(rig, "prepared")
    assert (main.limit, main.gpus, main.region[2]) == ("2000m", U1, 2000 * MIB)
    assert (before.limit, before.gpus, before.region[2]) == ("2000m", U1, 2000 * MIB)


def test_twenty_unequal_pods_bound_within_one_second(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:D2: no time stamp tells them apart, and every container has its own limit.
    Nothing was guessed and none refused.
    """
    rig = volcano_rig
    limits = {f"burst-{number:02}": 100 + 10 * number for number in range(20)}
    for name, memory in limits.items():
        rig.create_pod(_asking(name, 1, memory))
    with VolcanoScheduler(rig, policy="spread"):
        decided = {name: wait_bound(rig, name) for name in limits}
        wait_running(rig, limits)
        assert (
            max(times := [int(each["volcano.sh/bind-time"]) for each in decided.values()])
            - min(times)
            <= 1
        )
        for name, memory in limits.items():
            found = seen(rig, name)
            assert (found.limit, found.region[2]) == (f"{memory}m", memory * MIB)
            assert found.gpus == decided[name][IDS].partition(",")[0]
        for name in limits:
            wait_served(rig, name)
    assert "start.refused" not in agent.events()


def test_a_gang_of_four(volcano_rig: Rig, agent: NodeAgent) -> None:
    """The pods of a group are bound together, and all of them run with their own limits."""
    rig = volcano_rig
    names = {f"gang-{number}": 500 + number for number in range(4)}
    with VolcanoScheduler(rig, policy="binpack"):
        for name, memory in names.items():
            rig.create_pod(_asking(name, 1, memory, group="gang", min_member=4))
        wait_running(rig, names)
        assert {name: seen(rig, name).limit for name in names} == {
            name: f"{memory}m" for name, memory in names.items()
        }


def test_spread_uuid_and_type(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Spread alternates; a pod gets the card that it names, and none when its type is excluded."""
    rig = volcano_rig
    with VolcanoScheduler(rig, policy="spread"):
        for name in ("spread-1", "spread-2"):
            rig.create_pod(_asking(name, 1, 1000))
            wait_bound(rig, name)
        rig.create_pod(
            _asking(
                "named",
                1,
                1000,
                annotations={"volcano.sh/vgpu-use-gpuuuid": U1, "nvidia.com/use-gputype": "a10"},
            )
        )
        rig.create_pod(
            _asking("excluded", 1, 1000, annotations={"nvidia.com/nouse-gputype": "A10"})
        )
        assert [seen(rig, name).gpus for name in ("spread-1", "spread-2", "named")] == [U0, U1, U1]
        wait_unschedulable(rig, "excluded")


def test_binpack(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Both pods are on the first card."""
    rig = volcano_rig
    with VolcanoScheduler(rig, policy="binpack"):
        for name in ("packed-1", "packed-2"):
            rig.create_pod(_asking(name, 1, 1000))
            wait_bound(rig, name)
        assert [seen(rig, name).gpus for name in ("packed-1", "packed-2")] == [U0, U0]


def test_an_unhealthy_card_is_avoided(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:D6: schedulers ignore health, so an ill card is announced as full,
    and comes back when it is well.
    """
    rig = volcano_rig

    def announced() -> str:
        return str(rig.node()["metadata"]["annotations"][REGISTER])

    well = announced()
    agent.simulated.lose(U1)
    rig.wait_for(
        lambda: f"{U1},0,{MEMORY_MIB},NVIDIA-NVIDIA A10,false" in announced() or None,
        what="the card to be announced as ill",
    )
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("healthy", 1, 1000))
        assert seen(rig, "healthy").gpus == U0
    agent.simulated.restore(U1)
    rig.wait_for(lambda: announced() == well or None, what="the card to be announced again")


def test_a_scheduler_that_is_killed_in_a_burst(volcano_rig: Rig, agent: NodeAgent) -> None:
    """The next one reads from the annotations what is given.
    Every container has what was decided for it.
    """
    rig = volcano_rig
    limits = {f"torn-{number}": 400 + number for number in range(8)}
    with VolcanoScheduler(rig, policy="binpack") as scheduler:
        for name, memory in limits.items():
            rig.create_pod(_asking(name, 1, memory))
        wait_bound(rig, "torn-0")
        scheduler.kill()
        scheduler.start()
        wait_running(rig, limits)
        decided = {name: annotations_of(rig, name)[IDS] for name in limits}
    for name, memory in limits.items():
        found = seen(rig, name)
        assert (f"{memory}m", decided[name]) == (found.limit, f"{found.gpus},NVIDIA,{memory},0:")


def test_the_old_protocol_with_the_node_lock(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Handshake, patch before bind, node lock:
    the agent answers and gives the lock back, so one pod follows the other.
    """
    rig = volcano_rig
    limits = {f"old-{number}": 1000 + number for number in range(3)}
    with VolcanoScheduler(rig, old=True, node_lock=True):
        for name, memory in limits.items():
            rig.create_pod(_asking(name, 1, memory))
        wait_running(rig, limits)
        assert {name: seen(rig, name).limit for name in limits} == {
            name: f"{memory}m" for name, memory in limits.items()
        }
        rig.wait_for(
            lambda: "hamivgpu" not in rig.node()["metadata"]["annotations"] or None,
            what="the lock to be given back",
        )


def test_under_the_plain_scheduler_the_agent_places(volcano_rig: Rig, agent: NodeAgent) -> None:
    """The same pods without Volcano: binpack on this node, and the annotations afterwards,
    for a Volcano that comes later.
    """
    rig = volcano_rig
    limits = {f"plain-{number}": 400 + number for number in range(4)}
    for name, memory in limits.items():
        rig.create_pod(pod(name, containers=[showing(limits=vgpu(1, memory, 20))]))
    wait_running(rig, limits)
    cards = set()
    for name, memory in limits.items():
        found, after = seen(rig, name), wait_served(rig, name)
        cards.add(found.gpus)
        assert (found.limit, found.region[2], found.region[4]) == (f"{memory}m", memory * MIB, 20)
        assert (after[IDS], after["volcano.sh/vgpu-node"]) == (
            f"{found.gpus},NVIDIA,{memory},20:",
            rig.node_name(),
        )
    assert len(cards) == 1
    with VolcanoScheduler(rig, policy="binpack"):
        rig.create_pod(_asking("later", 1, 400, 30))  # 80 % of that card's compute are taken
        assert {seen(rig, "later").gpus} == {U0, U1} - cards
