"""Asking kubelet about one pod: quick, but not always possible,
and never more often than kubelet allows (kubelet §13).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kubelet.backend import FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import KubeletError
from vgpu_agent.kubelet.pod_resources import (
    GetNotPossibleError,
    KubeletBusyError,
    PodResources,
    RateLimiter,
)
from vgpu_agent.sim.kubelet.kubelet import Container, Pod, SimulatedKubelet

R = "nvidia.com/gpu.shared"
P = [("default", "p")]


async def _admitted(kubelet: SimulatedKubelet, node: Node) -> Pod:
    resource = shared_resource()
    node.offer(resource, FakeBackend(resource))
    await kubelet.until(lambda: kubelet.resource(resource.name).allocatable == len(resource.ids))
    await kubelet.admit("other", [Container("c", {R: 1})])
    return await kubelet.admit(
        "p",
        [Container("init", {R: 1}, init=True), Container("c", {R: 2}), Container("without", {})],
    )


@pytest.fixture
async def pod_resources(kubelet: SimulatedKubelet) -> AsyncIterator[PodResources]:
    """A client whose clock stands still, so that no call is ever allowed again."""
    client = PodResources(
        kubelet.directory / "pod-resources" / "kubelet.sock",
        timeout_seconds=PATIENCE_SECONDS,
        clock=lambda: 100.0,
    )
    with contextlib.closing(client):
        yield client


async def test_one_pod_is_told_as_list_would_tell_it(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """The same holdings, of that pod alone; plain init containers are not in it."""
    pod = await _admitted(kubelet, node)
    told = await pod_resources.get(P)
    assert told == tuple(held for held in await pod_resources.list() if held.owner.pod == "p")
    assert [(held.owner.container, held.ids) for held in told] == [
        ("c", tuple(kubelet.ids_of(pod, "c", R)))
    ]
    assert await pod_resources.get(P, lambda resource: resource != R) == ()
    assert (pod_resources.gets_answered, pod_resources.lists_answered) == (2, 1)


async def test_a_pod_that_kubelet_does_not_know_holds_nothing(
    kubelet: SimulatedKubelet, node: Node, pod_resources: PodResources
) -> None:
    """It is missing in a List, too. Others are reported all the same."""
    await _admitted(kubelet, node)
    assert await pod_resources.get([("default", "nobody")]) == ()
    assert [held.owner.pod for held in await pod_resources.get([("default", "nobody"), *P])] == [
        "p"
    ]


@pytest.mark.parametrize("fault", ["no_get", "get_disabled"])
async def test_a_kubelet_without_get_is_not_asked_again_until_it_restarts(
    kubelet: SimulatedKubelet, pod_resources: PodResources, fault: str
) -> None:
    """Before 1.27 it has none, before 1.34 it is usually switched off.
    Its next start makes another socket.
    """
    setattr(kubelet.faults, fault, True)
    for _ in range(3):
        with pytest.raises(GetNotPossibleError, match="has no Get"):
            await pod_resources.get(P)
    assert len(kubelet.called("Get")) == 1
    assert await pod_resources.list() == ()

    setattr(kubelet.faults, fault, False)
    await kubelet.restart()
    assert await pod_resources.get(P) == ()


async def test_get_leaves_some_calls_to_others(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """The kubelet answers ten calls at once;
    eight of them for Get, after which List is still answered.
    """
    for _ in range(8):
        await pod_resources.get(P)
    with pytest.raises(GetNotPossibleError, match="as often as it allows"):
        await pod_resources.get(P)
    assert len(kubelet.called("Get")) == 8
    assert await pod_resources.list() == ()


async def test_after_a_refused_get_list_waits_a_moment_and_is_answered(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """Others have used up what kubelet allows. That is no reason to leave it alone for seconds."""
    kubelet.faults.exhausted_gets = 1
    for _ in range(2):
        with pytest.raises(GetNotPossibleError, match=r"too often|as often as it allows"):
            await pod_resources.get(P)
    assert len(kubelet.called("Get")) == 1
    assert await pod_resources.list() == ()
    asked = {what: kubelet.called(what)[0].at for what in ("Get", "List")}
    assert asked["List"] - asked["Get"] >= 0.015


async def test_a_busy_kubelet_is_not_asked_about_one_pod_either(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """kubelet V12: all questions share the pause."""
    kubelet.faults.exhausted_lists = 1
    with pytest.raises(KubeletBusyError):
        await pod_resources.list()
    with pytest.raises(KubeletBusyError):
        await pod_resources.get(P)
    assert kubelet.called("Get") == []


async def test_without_a_kubelet_get_fails_like_any_call(tmp_path: Path) -> None:
    """No socket says nothing about what the next kubelet can do."""
    with pytest.raises(KubeletError, match="is the kubelet running"):
        await PodResources(tmp_path / "kubelet.sock", timeout_seconds=1).get(P)


async def test_the_stand_in_refuses_what_kubelet_would_refuse(kubelet: SimulatedKubelet) -> None:
    """Ten calls at once and a hundred a second, for all callers together."""
    clients = [
        PodResources(
            kubelet.directory / "pod-resources" / "kubelet.sock", timeout_seconds=PATIENCE_SECONDS
        )
        for _ in range(40)
    ]
    began = time.monotonic()
    answers = await asyncio.gather(*(client.list() for client in clients), return_exceptions=True)
    for client in clients:
        client.close()
    answered = answers.count(())
    assert 10 <= answered <= 11 + (time.monotonic() - began) * 100
    assert answered + sum(isinstance(answer, KubeletBusyError) for answer in answers) == 40


def test_a_rate_limiter_refills_with_time() -> None:
    """It allows so many at once, and so many a second.
    Unconditional calls count as well, and are never owed.
    """
    now = 50.0
    limiter = RateLimiter(4, 10.0, lambda: now)
    assert [limiter.take_if_left(3), limiter.take_if_left(2), limiter.take_if_left(1)] == [
        True,
        False,
        True,
    ]
    limiter.take_anyway(5)
    now += 0.1
    assert [limiter.take_if_left(1), limiter.take_if_left(1)] == [True, False]
    now += 100
    assert [limiter.take_if_left(5), limiter.take_if_left(4)] == [False, True]
    now += 100
    limiter.empty()
    assert not limiter.take_if_left(1)


async def test_a_forbidden_list_asks_nothing(
    kubelet: SimulatedKubelet, pod_resources: PodResources
) -> None:
    """Get may still be asked: it makes the kubelet forget nothing."""
    pod_resources.forbid_lists("another agent is taking over")
    with pytest.raises(KubeletError, match="is not listed: another agent is taking over"):
        await pod_resources.list()
    assert await pod_resources.get(P) == ()
    assert not kubelet.called("List")
    pod_resources.allow_lists()
    assert await pod_resources.list() == ()
