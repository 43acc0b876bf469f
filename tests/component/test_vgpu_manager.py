"""Pods of vgpu-manager's extender, from its claim to what the container got and back,
with the agent's real process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.vgpu_manager import (
    EXTENDER,
    PHASE,
    PRE,
    REAL,
    TIME,
    U0,
    U1,
    ManagerStage,
    asks,
    manager_stage,
)
from tests.component.volcano import NODE

FINISHED = "9223372036854775807"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


async def test_from_claim_to_container_and_back(stage: ManagerStage) -> None:
    """vgpu-manager:§13.3: the pod ends as after the replaced plugin's Allocate, and what its
    scheduler has written stays.
    """
    await stage.start_agent()
    claim = f"main[1_{U1}_10_1024]"
    came = await stage.serve("gpu-pod", asks(1, 1024, 10), claim)
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == U1
    assert await stage.shares("gpu-pod") == {"main": [(U1, 1024, 10)]}
    await stage.phase("gpu-pod", "succeed")
    assert stage.cluster.annotations("gpu-pod") == {
        PRE: claim,
        REAL: claim,
        "nvidia.com/predicate-node": NODE,
        TIME: FINISHED,
    }
    assert stage.labels("gpu-pod") == {PHASE: "succeed", "nvidia.com/metrics-node": NODE}


async def test_a_pod_of_the_plain_scheduler_is_placed_and_counted(stage: ManagerStage) -> None:
    """Extenders count what the agent has placed, because it writes their keys too."""
    await stage.start_agent()
    stage.cluster.create_pod("plain", asks(1), scheduler="default-scheduler")
    await stage.cluster.running("plain")
    await stage.phase("plain", "succeed")
    written = stage.cluster.annotations("plain")
    assert written[PRE] == written[REAL] == f"main[0_{U0}_100_23028]"
    assert written["nvidia.com/predicate-node"] == NODE


async def test_init_containers_and_sidecars_have_claims_of_their_own(stage: ManagerStage) -> None:
    """The kubelet hands the ids of an init container on, and neither gets the other's claim."""
    await stage.start_agent()
    claims = f"init0[1_{U1}_20_2000];init1[0_{U0}_5_500];main[0_{U0}_30_3000]"
    stage.create(
        "train",
        asks(1, 3000, 30),
        claims,
        init=[(asks(1, 2000, 20), False), (asks(1, 500, 5), True)],
    )
    await stage.cluster.running("train")
    visible = {
        name: [
            one.environment["NVIDIA_VISIBLE_DEVICES"] for one in stage.cluster.starts("train", name)
        ]
        for name in ("init0", "init1", "main")
    }
    assert visible == {"init0": [U1], "init1": [U0], "main": [U0]}
    assert stage.cluster.refusals == []
    await stage.phase("train", "succeed")
    assert await stage.shares("train") == {"init1": [(U0, 500, 5)], "main": [(U0, 3000, 30)]}
    assert stage.cluster.annotations("train")[REAL] == claims
    await stage.cluster.crash("train")
    assert stage.cluster.starts("train")[-1].environment["NVIDIA_VISIBLE_DEVICES"] == U0


async def test_an_agent_that_stops_lets_no_container_start_with_anothers_claim(
    stage: ManagerStage,
) -> None:
    """Without PreStartContainer the main container would find the init container's spec under the
    name of their ids, so such a start waits for the next agent.
    """
    await stage.start_agent()
    ended = stage.cluster.pull("main")
    claims = f"init0[1_{U1}_20_2000];main[0_{U0}_30_3000]"
    stage.create("train", asks(1, 3000, 30), claims, init=[(asks(1, 2000, 20), False)])
    await stage.cluster.until(lambda: bool(stage.cluster.starts("train", "init0")), "init0")
    await stage.agent.terminate()
    ended()
    await stage.cluster.until(lambda: bool(stage.cluster.refusals), "a start to be refused")
    assert stage.cluster.starts("train") == []
    await stage.agent.start()
    await stage.cluster.running("train")
    (came,) = stage.cluster.starts("train")
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == U0
    assert await stage.shares("train") == {"main": [(U0, 3000, 30)]}


async def test_a_lost_patch_never_gives_a_claim_twice(stage: ManagerStage) -> None:
    """vgpu-manager:D17: what the containers have is in the ledger and in the kubelet's records;
    the annotation follows them when the API server takes it.
    """
    await stage.start_agent()
    claims = f"c0[0_{U0}_10_1000];c1[0_{U0}_20_2000]"
    stage.create("two", [asks(1, 1000, 10), asks(1, 2000, 20)], claims)
    await stage.cluster.running("two")
    await stage.phase("two", "succeed")
    emptied = {REAL: "", TIME: "1787331600123456789"}
    stage.cluster.objects.patch("pods", "two", {"metadata": {"annotations": emptied}}, "default")
    await stage.cluster.until(
        lambda: stage.cluster.annotations("two")[REAL] == claims, "the annotation to come back"
    )
    await stage.cluster.crash("two", "c1")
    assert await stage.shares("two") == {"c0": [(U0, 1000, 10)], "c1": [(U0, 2000, 20)]}


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        (f"main[0_{U0}_10_20000]", "20000 MiB are not what container main asks for"),
        (f"main[0_{U0}_0_1024]", "0 % of the compute are not what container main asks for"),
        ("main[9_GPU-other_10_1024]", "offers no GPU 'GPU-other'"),
        ("main[0_x", "is no <container>[<claim>,…]"),
    ],
)
async def test_a_forged_claim_gives_nothing(stage: ManagerStage, claims: str, told: str) -> None:
    """Every user who may create pods can write annotations."""
    await stage.start_agent()
    stage.create("forged", asks(1, 1024, 10), claims)
    await stage.cluster.until(lambda: bool(stage.cluster.refusals), "a start to be refused")
    assert told in stage.cluster.refusals[0][2]
    assert stage.cluster.starts("forged") == []


async def test_a_storm_of_unequal_pods_gets_its_claims_without_a_request(
    stage: ManagerStage,
) -> None:
    """vgpu-manager:D28, vgpu-manager:D29: bound in one second, with times in the wrong order. The
    agent lists pods once, at its start.
    """
    await stage.start_agent()
    names = [f"burst-{number:02}" for number in range(18)]
    for number, name in enumerate(names):
        card, memory, cores = number % 2, 500 + number, 1 + number % 5
        claims = f"main[{card}_{(U0, U1)[card]}_{cores}_{memory}]"
        stage.cluster.create_pod(name, asks(1, memory, cores), scheduler=EXTENDER)
        stage.bind(name, claims, **{TIME: str(1787331600123456789 - number)})
    await stage.cluster.running(*names)
    for number, name in enumerate(names):
        gpu = (U0, U1)[number % 2]
        assert await stage.shares(name) == {"main": [(gpu, 500 + number, 1 + number % 5)]}
        (came,) = stage.cluster.starts(name)
        assert came.environment["NVIDIA_VISIBLE_DEVICES"] == gpu
        await stage.phase(name, "succeed")
    assert stage.cluster.refusals == []
    asked = [one for one in stage.cluster.api.requests if one.resource == "pods"]
    assert len([one for one in asked if one.verb == "list"]) <= 1
    assert [one for one in asked if one.verb == "get"] == []


async def test_early_answers_carry_the_claims_too(folder: Path) -> None:
    """Runtimes that resolve no CDI names get everything in Allocate, and the start proves it."""
    async with manager_stage(folder, runtime_version="containerd://1.7.20") as stage:
        await stage.start_agent()
        claims = f"init0[0_{U0}_5_500];c0[0_{U0}_30_3000];c1[1_{U1}_20_2000]"
        stage.create(
            "train",
            [asks(1, 3000, 30), asks(1, 2000, 20)],
            claims,
            init=[(asks(1, 500, 5), False)],
        )
        await stage.cluster.running("train")
        visible = {
            name: stage.cluster.starts("train", name)[0].environment["NVIDIA_VISIBLE_DEVICES"]
            for name in ("init0", "c0", "c1")
        }
        assert visible == {"init0": U0, "c0": U0, "c1": U1}
        await stage.phase("train", "succeed")
        assert await stage.shares("train") == {"c0": [(U0, 3000, 30)], "c1": [(U1, 2000, 20)]}
        assert stage.cluster.annotations("train")[REAL] == claims
        claims = f"init0[1_{U1}_5_500];main[0_{U0}_30_3000]"
        stage.create("odd", asks(1, 3000, 30), claims, init=[(asks(1, 500, 5), False)])
        await stage.cluster.until(lambda: stage.cluster.phase("odd") == "Failed", "odd to fail")
        assert "which needs binding.mode late" in stage.cluster.pod("odd")["status"]["message"]
