"""Pods that hold a dead GPU: their label, and when they are evicted; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.cluster.fake_api import pod, pod_at, pod_of, running
from tests.cluster.gpu_world import U0, XID, World, gpu, grant, ignore
from vgpu_agent.cluster.gpu_evictions import GpuEvictions, desired_labels
from vgpu_agent.errors import ClusterError
from vgpu_agent.model import Owner
from vgpu_agent.pods import (
    GPU_HEALTH_LABEL,
    MIRROR_POD,
    ContainerKind,
    DesiredPod,
    PodContainer,
)

pytestmark = pytest.mark.looptime

AFTER = 300.0


class Evicting(World):
    """A world with the part under test; pod ``a`` holds the first GPU, ``b`` the second."""

    def __init__(self) -> None:
        super().__init__((gpu(0, U0), gpu(1, "GPU-1")))
        self.evictions = GpuEvictions(
            self.api, self.events, self.facts, self.pods, AFTER, self.journal
        )

    def run(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Run both loops."""
        return running(self.evictions.run(ignore), self.events.run(ignore))

    @property
    def evicted(self) -> list[str]:
        """The paths of the requests for evictions."""
        return [request.path for request in self.api.requests if request.path.endswith("/eviction")]

    def recorded(self, event: str) -> list[dict[str, Any]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == event]


async def test_a_pod_is_evicted_after_its_time_on_a_dead_gpu() -> None:
    """By the Eviction API, once, with an event for its owner; its neighbour stays."""
    world = Evicting()
    async with world.run():
        world.fail(U0)
        await asyncio.sleep(AFTER - 10)
        assert world.evicted == []
        await asyncio.sleep(20)
        assert world.evicted == [f"{pod_at('a')}/eviction"]
        await asyncio.sleep(600)
    assert len(world.evicted) == 1
    assert world.told("Pod") == [
        (
            "a",
            "GpuPodEvicted",
            (f"evicted because it has held GPU 0 ({U0}) for 300 s since that failed: {XID}"),
        )
    ]
    assert world.evictions.counts == {"evicted": 1, "postponed": 0, "failed": 0}


async def test_a_recovery_ends_the_time() -> None:
    """A card that fails for four minutes every hour evicts nobody."""
    world = Evicting()
    async with world.run():
        for _ in range(3):
            world.fail(U0)
            await asyncio.sleep(AFTER - 20)
            world.recover(U0)
            await asyncio.sleep(60)
    assert world.evicted == []


async def test_a_gpu_that_recovers_during_the_requests_keeps_its_pods() -> None:
    """With many pods and a slow API server, minutes may lie between the first request and the
    last.
    """
    world = Evicting()

    def recover_others(_verb: str, path: str, _body: object) -> None:
        if path.endswith("/eviction"):
            for uuid in (U0, "GPU-1"):
                world.recover(uuid)

    world.api.fault = recover_others
    world.grants = [grant(1, "a", U0), grant(2, "b", "GPU-1")]
    async with world.run():
        world.fail(U0)
        world.fail("GPU-1")
        await asyncio.sleep(AFTER + 20)
    assert len(world.evicted) == 1


async def test_a_budget_postpones_and_the_pod_goes_when_it_allows() -> None:
    """429 is the answer of the API server while a PodDisruptionBudget forbids it."""
    world = Evicting()
    budget = ClusterError("POST: 429 budget", status=429, retry_after_seconds=10.0)
    world.api.fault = lambda _, path, __: budget if path.endswith("/eviction") else None
    async with world.run():
        world.fail(U0)
        await asyncio.sleep(AFTER + 300)
        tries = len(world.evicted)
        assert 3 <= tries < 30
        assert pod_at("a") in world.api.objects
        world.api.fault = None
        await asyncio.sleep(60)
    assert pod_at("a") not in world.api.objects
    assert world.evictions.counts["evicted"] == 1
    assert len(world.recorded("gpu_evictions.postponed")) == 1


async def test_a_missing_right_is_one_error_with_the_component() -> None:
    """Asked for again every few minutes, because it may be granted meanwhile."""

    def forbidden(_: str, path: str, __: Mapping[str, Any]) -> ClusterError | None:
        return ClusterError("forbidden", status=403) if path.endswith("/eviction") else None

    world = Evicting()
    world.api.fault = forbidden
    async with world.run():
        world.fail(U0)
        await asyncio.sleep(AFTER + 3600)
    (facts,) = world.recorded("gpu_evictions.forbidden")
    assert "components/eviction" in facts["error"]
    assert len(world.evicted) < 20


async def test_a_mirror_pod_and_one_that_is_being_deleted_are_left_alone() -> None:
    """Neither would come back elsewhere because of it."""
    world = Evicting()
    mirror = pod("a", **{MIRROR_POD: "hash"})
    world.api.put(pod_at("a"), mirror)
    world.pods.put(pod_of(world.api.objects[pod_at("a")]))
    async with world.run():
        world.fail(U0)
        await asyncio.sleep(AFTER + 60)
    assert world.evicted == []


def labels_of(world: World) -> dict[str, DesiredPod]:
    """The desired labels."""
    return desired_labels(world.facts, world.pods)


async def test_the_label_says_how_the_gpu_is_and_goes_with_its_recovery() -> None:
    """Pods that hold no dead GPU are not written to, unless they have the label."""
    world = World()
    assert labels_of(world) == {}
    world.fail(U0)
    assert labels_of(world) == {"uid-a": DesiredPod(labels={GPU_HEALTH_LABEL: "unhealthy"})}
    world.fail(U0, lost=True)
    assert labels_of(world) == {"uid-a": DesiredPod(labels={GPU_HEALTH_LABEL: "lost"})}
    world.recover(U0)
    labelled = pod("a")
    labelled["metadata"]["labels"] = {GPU_HEALTH_LABEL: "lost"}
    world.api.put(pod_at("a"), labelled)
    world.pods.put(pod_of(world.api.objects[pod_at("a")]))
    assert labels_of(world) == {"uid-a": DesiredPod(labels={GPU_HEALTH_LABEL: None})}


async def test_a_label_on_a_pod_without_a_gpu_costs_no_write() -> None:
    """Every tenant can write it."""
    world = World()
    world.grants = [grant(2, "b", U0)]
    labelled = pod("a")
    labelled["metadata"]["labels"] = {GPU_HEALTH_LABEL: "lost"}
    world.api.put(pod_at("a"), labelled)
    world.pods.put(pod_of(world.api.objects[pod_at("a")]))
    assert labels_of(world) == {}


@pytest.mark.parametrize(
    ("completed", "limits", "is_evicted"),
    [(True, {}, False), (False, {}, True), (True, {"nvidia.com/gpu": 1}, True)],
    ids=["completed", "running", "main-without-grant"],
)
async def test_a_pod_stays_whose_completed_init_container_had_the_dead_gpu(
    completed: bool, limits: dict[str, int], is_evicted: bool
) -> None:
    """It keeps the ids that no main container took over, and nothing of the pod uses them. Where a
    main container asks for the resource and has no grant, the checkpoint has named both for one id.
    """
    world = Evicting()
    await asyncio.sleep(1)  # the watch has shown the pods
    warm = PodContainer("warm", ContainerKind.INIT, running=not completed, completed=completed)
    containers = (warm, PodContainer("main", limits=limits))
    found = pod_of(world.api.objects[pod_at("a")])
    world.pods.put(msgspec.structs.replace(found, containers=containers))
    owner = Owner("warm", "uid-a", "default", "a")
    world.grants = [msgspec.structs.replace(grant(1, "a", U0), owner=owner)]
    async with world.run():
        world.fail(U0)
        await asyncio.sleep(400)
    assert world.evicted == [pod_at("a") + "/eviction"] * is_evicted
