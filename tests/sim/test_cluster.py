"""The simulated cluster by itself: pods without devices go through the life
that kubelet gives them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from vgpu_agent.sim.cluster import SimulatedCluster

# grpcio takes locks when a server goes, which the watch for blocking calls would make an error of.
pytestmark = pytest.mark.component

DEFAULT = "default-scheduler"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: socket names are limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="vgs", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def cluster(short: Path) -> AsyncIterator[SimulatedCluster]:
    """A cluster without any agent."""
    async with SimulatedCluster(short, node="n") as cluster:
        yield cluster


async def test_containers_start_in_order(cluster: SimulatedCluster) -> None:
    """A plain init container ends before the next one starts, a restartable one stays,
    and the status says so.
    """
    cluster.create_pod("p", [{}, {}], init=[({}, False), ({}, True)], scheduler=DEFAULT)
    await cluster.running("p")
    assert [each.container for each in cluster.started] == ["init0", "init1", "c0", "c1"]
    status = cluster.pod("p")["status"]
    assert ["terminated" in one["state"] for one in status["initContainerStatuses"]] == [
        True,
        False,
    ]


async def test_a_crashed_container_starts_again_and_an_ended_pod_does_not(
    cluster: SimulatedCluster,
) -> None:
    """Restarts are counted; a finished pod keeps its object."""
    cluster.create_pod("p", {}, scheduler=DEFAULT)
    await cluster.running("p")
    await cluster.crash("p")
    assert len(cluster.starts("p")) == 2
    assert cluster.pod("p")["status"]["containerStatuses"][0]["restartCount"] == 1
    cluster.finish("p")
    assert cluster.phase("p") == "Succeeded"


async def test_a_deleted_pod_goes_and_its_name_is_free(cluster: SimulatedCluster) -> None:
    """The kubelet ends it, and takes on the next of that name as another pod."""
    first = cluster.create_pod("p", {}, scheduler=DEFAULT)
    await cluster.running("p")
    cluster.delete_pod("p")
    await cluster.until(lambda: not cluster.exists("p"))
    second = cluster.create_pod("p", {}, scheduler=DEFAULT)
    await cluster.running("p")
    assert [each.pod_uid for each in cluster.started] == [
        first["metadata"]["uid"],
        second["metadata"]["uid"],
    ]


async def test_an_image_that_is_pulled_holds_the_start(cluster: SimulatedCluster) -> None:
    """The pod is admitted and waits."""
    done = cluster.pull("main")
    cluster.create_pod("p", {}, scheduler=DEFAULT, node="n")
    await asyncio.sleep(0.2)
    assert cluster.started == []
    done()
    await cluster.running("p")


async def test_what_the_node_does_not_have_is_not_bound(cluster: SimulatedCluster) -> None:
    """The plain scheduler counts, and a wait in vain reports how the pods are."""
    cluster.create_pod("p", {"example.com/gpu": 1}, scheduler=DEFAULT)
    with pytest.raises(TimeoutError, match=r"p.*not bound"):
        await cluster.running("p", timeout_seconds=0.2)


async def test_nothing_of_it_shows_as_a_request(cluster: SimulatedCluster) -> None:
    """Only others' requests are counted."""
    cluster.create_pod("p", {}, scheduler=DEFAULT)
    await cluster.running("p")
    assert cluster.api.requests == []
