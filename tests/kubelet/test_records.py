"""The kubelet's two records as one picture,
and what remains of it when one of them fails (kubelet §13).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kubelet.backend import U0, U1, FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.errors import KubeletError
from vgpu_agent.kubelet.checkpoint import CheckpointEntry
from vgpu_agent.kubelet.pod_resources import (
    AllocatableUnsupportedError,
    KubeletBusyError,
    PodResources,
)
from vgpu_agent.kubelet.records import join, read_records
from vgpu_agent.model import Holding, Owner
from vgpu_agent.sim.kubelet.kubelet import Container, Pod, SimulatedKubelet
from vgpu_agent.sim.kubelet.records import Allocation

R = "nvidia.com/gpu.shared"


def _listed(pod: str, container: str, *ids: str) -> Holding:
    return Holding(R, ids, Owner(container, namespace="ns", pod=pod))


def _stored(uid: str, container: str, *ids: str) -> CheckpointEntry:
    return CheckpointEntry(uid, container, R, {"0": list(ids)})


def _held(uid: str, pod: str, container: str, *ids: str) -> Holding:
    return Holding(R, ids, Owner(container, uid, "ns" if pod else "", pod))


def test_the_checkpoint_adds_the_uid() -> None:
    """Name from the one, UID from the other, joined by container and ids.
    The order of ids does not matter.
    """
    assert join([_listed("p", "c", "a", "b")], [_stored("u", "c", "b", "a")]) == (
        _held("u", "p", "c", "a", "b"),
    )


def test_two_pods_with_equal_containers_are_told_apart_by_their_ids() -> None:
    """Replicas of one Deployment differ in nothing else."""
    joined = join(
        [_listed("p1", "c", "a"), _listed("p2", "c", "b")],
        [_stored("u2", "c", "b"), _stored("u1", "c", "a")],
    )

    assert joined == (_held("u1", "p1", "c", "a"), _held("u2", "p2", "c", "b"))


def test_what_pod_resources_lists_is_held_even_when_the_checkpoint_is_silent() -> None:
    """The file is written a moment later than the memory that List shows."""
    assert join([_listed("p", "c", "a")], []) == (_held("", "p", "c", "a"),)


def test_an_ended_pod_in_the_checkpoint_holds_nothing() -> None:
    """The kubelet rewrites the file late. List is more recent."""
    assert join([_listed("p", "c", "a")], [_stored("u", "c", "a"), _stored("ended", "c", "b")]) == (
        _held("u", "p", "c", "a"),
    )


def test_contradicting_uids_are_not_guessed() -> None:
    """A damaged file that gives one id to two pods must not mix them up."""
    assert join([_listed("p", "c", "a")], [_stored("u1", "c", "a"), _stored("u2", "c", "a")])[
        0
    ] == _held("", "p", "c", "a")


def test_ids_from_two_pods_are_not_guessed_either() -> None:
    """A container cannot be half of one pod and half of another."""
    assert (
        join([_listed("p", "c", "a", "b")], [_stored("u1", "c", "a"), _stored("u2", "c", "b")])[
            0
        ].owner.pod_uid
        == ""
    )


def test_an_init_container_whose_ids_were_taken_over_is_not_a_second_holder() -> None:
    """Init container and successor have the same ids. An id has one holder."""
    assert join([_listed("p", "c", "a")], [_stored("u", "init", "a"), _stored("u", "c", "a")]) == (
        _held("u", "p", "c", "a"),
    )


def test_an_init_container_keeps_what_nobody_took_over() -> None:
    """It asked for two, its successor for one:
    the kubelet gives the second id to no other pod while the pod lives.
    """
    joined = join(
        [_listed("p", "c", "a")], [_stored("u", "init", "a", "b"), _stored("u", "c", "a")]
    )

    assert joined == (_held("u", "p", "c", "a"), _held("u", "p", "init", "b"))


def test_resources_are_told_apart() -> None:
    """The same id string under another resource is another id."""
    other = Holding("other", ("a",), Owner("c", namespace="ns", pod="q"))

    assert join([_listed("p", "c", "a"), other], [_stored("u", "c", "a")]) == (
        _held("u", "p", "c", "a"),
        other,
    )


def test_the_checkpoint_alone_names_pods_by_uid() -> None:
    """No names, each id once: of two containers with the same ids the one with more
    of them counts.
    """
    joined = join(
        None, [_stored("u", "c", "a"), _stored("u", "init", "a", "b"), _stored("v", "c", "x")]
    )

    assert joined == (_held("u", "", "init", "a", "b"), _held("v", "", "c", "x"))


@pytest.fixture
async def pod_resources(directory: Path) -> AsyncIterator[PodResources]:
    """The client of the simulated kubelet."""
    with contextlib.closing(
        PodResources(directory / "pod-resources" / "kubelet.sock", timeout_seconds=PATIENCE_SECONDS)
    ) as client:
        yield client


async def _admitted(kubelet: SimulatedKubelet, node: Node) -> str:
    node.offer(shared_resource(), FakeBackend(shared_resource()))
    await kubelet.until(lambda: kubelet.resource(R).allocatable == 8)
    return (await kubelet.admit("p", [Container("c", {R: 5})], namespace="ns")).uid


async def test_both_sources_make_the_whole_picture(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """kubelet V11 through the socket: one List entry an id, on two NUMA nodes, and one holding."""
    uid = await _admitted(kubelet, node)

    records = await read_records(pod_resources, node.settings.checkpoint_path)

    (holding,) = records.holdings
    assert (records.complete, records.trouble) == (True, "")
    assert (holding.owner, len(holding.ids)) == (Owner("c", uid, "ns", "p"), 5)


async def test_a_busy_kubelet_is_left_alone_for_a_while(
    kubelet: SimulatedKubelet, node: Node
) -> None:
    """kubelet V12: RESOURCE_EXHAUSTED means pauses that grow, without a call in between.
    The service goes on.
    """
    now = 100.0
    client = PodResources(
        kubelet.directory / "pod-resources" / "kubelet.sock",
        timeout_seconds=PATIENCE_SECONDS,
        clock=lambda: now,
    )
    await _admitted(kubelet, node)
    kubelet.faults.exhausted_lists = 2

    pauses = []
    for _ in range(2):
        with pytest.raises(KubeletBusyError, match="asked too often") as busy:
            await client.list()
        with pytest.raises(KubeletBusyError) as again:
            await client.list()
        assert str(again.value) == str(busy.value), "one trouble is one line in the log"
        pauses.append(busy.value.retry_in_seconds)
        now += busy.value.retry_in_seconds

    assert pauses == [1.0, 2.0]
    assert len(kubelet.called("List")) == 2
    assert len(await client.list()) == 1
    client.close()
    assert await kubelet.admit("q", [Container("c", {R: 1})])


async def test_without_pod_resources_the_checkpoint_says_what_it_can(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """The picture may contain ended pods, so nothing may be released on its word."""
    uid = await _admitted(kubelet, node)
    kubelet.faults.exhausted_lists = 1

    records = await read_records(pod_resources, node.settings.checkpoint_path)

    assert (records.complete, "asked too often" in records.trouble) == (False, True)
    assert [holding.owner for holding in records.holdings] == [Owner("c", uid)]


async def test_without_a_readable_checkpoint_pod_resources_are_still_the_truth(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """A foreign format must not keep ended pods in the ledger for ever. Names are known, UIDs are
    not, and the trouble is reported.
    """
    await _admitted(kubelet, node)
    node.settings.checkpoint_path.write_text("{}", encoding="utf-8")

    records = await read_records(pod_resources, node.settings.checkpoint_path)

    assert (records.complete, "cannot be understood" in records.trouble) == (True, True)
    assert [holding.owner for holding in records.holdings] == [Owner("c", "", "ns", "p")]


async def test_without_either_there_is_an_empty_and_incomplete_picture(directory: Path) -> None:
    """A kubelet that is not up yet: two troubles, no exception."""
    checkpoint = directory / "checkpoint"
    checkpoint.write_text("", encoding="utf-8")

    records = await read_records(
        PodResources(directory / "none.sock", timeout_seconds=1), checkpoint
    )

    assert (records.holdings, records.complete) == ((), False)
    assert records.trouble.startswith("pod-resources: List: cannot connect to")
    assert "is the kubelet running, and is its pod-resources directory mounted?" in records.trouble
    assert "is empty" in records.trouble


async def test_a_kubelet_without_the_api_is_explained(kubelet: SimulatedKubelet) -> None:
    """Its registration socket serves no pod-resources, like a kubelet that is too old."""
    client = PodResources(kubelet.plugins / "kubelet.sock", timeout_seconds=PATIENCE_SECONDS)

    with pytest.raises(
        KubeletError, match=r"has no pod-resources API v1; Kubernetes 1\.20 or newer is needed"
    ):
        await client.list()


async def test_what_can_be_allocated_is_every_healthy_id(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """kubelet §13: held or not, by resource; ids of an unhealthy GPU are left out."""
    backend = FakeBackend(shared_resource())
    node.offer(shared_resource(), backend)
    await kubelet.until(lambda: kubelet.resource(R).allocatable == 8)
    await kubelet.admit("p", [Container("c", {R: 2})])

    assert await pod_resources.allocatable({R: shared_resource().ids}) == {
        R: frozenset(device.id for device in shared_resource().ids)
    }
    backend.lose(U0)
    await kubelet.until(lambda: kubelet.resource(R).allocatable == 4)
    left = frozenset(device.id for device in shared_resource().ids if device.device == U1)
    assert await pod_resources.allocatable({R: shared_resource().ids}) == {R: left}


async def test_a_kubelet_that_does_not_tell_what_can_be_allocated(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """An error of its own kind, and List goes on."""
    kubelet.faults.no_allocatable = True

    with pytest.raises(
        AllocatableUnsupportedError, match=r"^pod-resources: .*has no GetAllocatableResources"
    ):
        await pod_resources.allocatable({R: shared_resource().ids})

    assert await pod_resources.list() == ()


async def test_what_can_be_allocated_is_not_asked_of_a_busy_kubelet(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """kubelet V12: both questions share the pause."""
    kubelet.faults.exhausted_lists = 1
    with pytest.raises(KubeletBusyError):
        await pod_resources.list()

    with pytest.raises(KubeletBusyError, match=r"^pod-resources: the kubelet was asked too often"):
        await pod_resources.allocatable({R: shared_resource().ids})

    assert kubelet.called("GetAllocatableResources") == []


async def test_a_list_that_does_not_come_is_an_error(kubelet: SimulatedKubelet) -> None:
    """Each call has its time."""
    kubelet.faults.list_delay_seconds = FOR_EVER_SECONDS

    with pytest.raises(KubeletError, match=r"not answered within|DEADLINE_EXCEEDED"):
        await PodResources(
            kubelet.directory / "pod-resources" / "kubelet.sock", timeout_seconds=0.05
        ).list()


async def test_a_list_above_four_mebibytes_is_accepted(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """The kubelet repeats every id of every container.
    Its own client allows 16 MiB, we set no limit.
    """
    ids = [f"GPU-aaaaaaaa-0000-4000-8000-000000000000::{number}" for number in range(60_000)]
    kubelet.pods["u"] = Pod("p", "ns", "u", (Container("c", {R: len(ids)}),))
    kubelet._records.allocations = [Allocation("u", "c", R, {"-1": ids}, b"")]

    assert await pod_resources.list() == (_listed("p", "c", *ids),)
