"""Pods of vgpu-manager, from the scheduler's claim to what the container got, with the agent's real
process.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.vgpu_extender import (
    DOMAIN,
    METRICS_NODE,
    NUMBER,
    PHASE,
    PLANNED,
    PRE,
    REAL,
    REGISTER,
    TIME,
    ExtenderStage,
    asks,
    extender_stage,
)
from tests.component.volcano import NODE, U0, U1
from vgpu_agent.sim.vgpu_manager.formats import FINISHED_TIME, Claim, parse_register


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ExtenderStage]:
    """A node with two A10 in a cluster with the extender."""
    async with extender_stage(folder) as stage:
        yield stage


async def test_from_claim_to_container_and_back(stage: ExtenderStage) -> None:
    """vgpu-manager §13.3: the scheduler's claim, the container's card, and how the pod ends."""
    await stage.start_agent()
    stage.create("gpu-pod", asks(1, 10, 1024))
    await stage.cluster.running("gpu-pod")
    await stage.settled("gpu-pod")
    stage.check()
    text = f"main[0_{U0}_10_1024]"
    assert stage.cluster.annotations("gpu-pod") == {
        PRE: text,
        REAL: text,
        PLANNED: NODE,
        TIME: FINISHED_TIME,
    }
    assert stage.labels("gpu-pod") == {PHASE: "succeed", METRICS_NODE: NODE}
    (grant,) = (await stage.agent.get("/debug/allocations?pod=default/gpu-pod"))["allocations"]
    assert [
        (share["gpu"], share["memory_mib"], share["cores_percent"]) for share in grant["shares"]
    ] == [(U0, 1024, 10)]


async def test_the_node_is_described_before_kubelet_hears_of_it(stage: ExtenderStage) -> None:
    """A scheduler never sees a number of vGPUs on a node whose cards it does not know."""
    shown: list[bool] = []

    def look() -> bool:
        registered = bool(stage.cluster.kubelet.called("Register"))
        if registered and not shown:
            shown.append(REGISTER in stage.cluster.node_object()["metadata"].get("annotations", {}))
        return registered

    stage.configure()
    stage.deliver_library()
    await stage.new_agent().start()
    await stage.cluster.kubelet.until(look)
    assert shown == [True]
    cards = parse_register(stage.cluster.node_object()["metadata"]["annotations"][REGISTER])
    assert cards is not None
    assert [card.uuid for card in cards] == [U0, U1]


async def test_every_shape_of_a_pod(stage: ExtenderStage) -> None:
    """Two GPU containers, a container before them without, two cards, a sidecar;
    each gets the claim under its own name (vgpu-manager §4.2).
    """
    await stage.start_agent()
    stage.create("two", asks(1, 10, 100), asks(1, 20, 200))
    stage.create("plain-first", {}, asks(1, 5, 300))
    stage.create("both-cards", asks(2, 5, 400))
    stage.create("side", asks(1, 10, 600), init=[(asks(1, 5, 700), True), ({}, False)])
    names = ("two", "plain-first", "both-cards", "side")
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()
    assert [list(stage.claims(name)) for name in names] == [
        ["c0", "c1"],
        ["c1"],
        ["main"],
        ["init0", "main"],
    ]


async def test_a_storm_of_unequal_pods(stage: ExtenderStage) -> None:
    """The kubelet admits them in another order than they were bound in, and its ids are of other
    cards; every container has its own claim (vgpu-manager §12.3).
    """
    await stage.start_agent()
    stage.cluster.hold_admission = True
    names = [f"storm-{number:02}" for number in range(18)]
    for number, name in enumerate(names):
        stage.create(name, asks(1, 1 + number % 5, 500 + 7 * number))
    await stage.cluster.until(
        lambda: all(stage.cluster.pod(name)["spec"].get("nodeName") for name in names),
        "all to be bound",
    )
    await stage.cluster.admit_in_order(reversed(names))
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()
    assert "start.refused" not in [line["msg"] for line in stage.agent.log_lines()]


async def test_a_gang_of_several_pods_at_once(stage: ExtenderStage) -> None:
    """Its members are bound as they come, and all of them run (vgpu-manager §4.5)."""
    await stage.start_agent()
    names = [f"gang-{number}" for number in range(4)]
    for number, name in enumerate(names):
        stage.create(
            name,
            asks(1, 20, 2000 + number),
            asks(1, 5, 100 + number),
            annotations={"scheduling.k8s.io/group-name": "gang"},
        )
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()


async def test_a_claim_for_an_unhealthy_card_waits(stage: ExtenderStage) -> None:
    """The start is refused with the reason and tried again, until the card is well; the claim
    stays. Meanwhile the Node says that the card is not healthy (vgpu-manager §3).
    """
    await stage.start_agent()
    stage.cluster.hold_admission = True
    stage.create("waits", asks(1, 10, 1024))
    await stage.cluster.until(
        lambda: bool(stage.cluster.pod("waits")["spec"].get("nodeName")), "it to be bound"
    )
    assert stage.claims("waits") == {"main": (Claim(0, U0, 10, 1024),)}
    stage.gpus.lose(U0)

    def health() -> list[bool]:
        text = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
        return [card.is_healthy for card in parse_register(text) or ()]

    await stage.cluster.until(lambda: health() == [False, True], "the card to be announced as ill")
    await stage.cluster.admit_in_order(["waits"])
    await stage.cluster.until(lambda: bool(stage.cluster.refusals), "a refusal")
    pod, container, text = stage.cluster.refusals[0]
    assert (pod, container) == ("waits", "main")
    assert U0 in text
    stage.gpus.restore(U0)
    await stage.cluster.running("waits")
    await stage.settled("waits")
    stage.check()
    await stage.cluster.until(lambda: health() == [True, True], "the card to be announced as well")


async def test_without_an_extender_the_agent_places(stage: ExtenderStage) -> None:
    """For a pod without a claim the agent chooses, and writes the scheduler's own keys, so that one
    that comes later counts them.
    """
    await stage.start_agent()
    names = [f"plain-{number}" for number in range(4)]
    for number, name in enumerate(names):
        stage.create(name, asks(1, 20, 1000 + number), scheduler="", node=NODE)
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()
    stage.create("later", asks(1, 30, 1000))  # 80 % of the first card are taken
    await stage.cluster.running("later")
    (first,) = {card.uuid for name in names for card in stage.claims(name)["main"]}
    (card,) = stage.claims("later")["main"]
    assert {card.uuid} == {U0, U1} - {first}
    stage.check()


async def test_the_memory_factor_counts_in_claims(stage: ExtenderStage) -> None:
    """vgpu-manager §5.3: a limit is in units of the node, the claim in MiB."""
    await stage.start_agent(factor=64)
    stage.create("p", asks(1, 10, 16))
    await stage.cluster.running("p")
    await stage.settled("p")
    assert stage.claims("p")["main"][0].memory == 1024
    stage.check()


@pytest.mark.parametrize("claim", [f"main[0_{U0}_100_20000]", "main[x]", f"other[0_{U0}_10_10]"])
async def test_a_forged_claim_gives_no_more_than_was_asked(
    stage: ExtenderStage, claim: str
) -> None:
    """A user writes the scheduler's annotations into the pod: more than its limits, a malformed
    text and a claim without the container. None of them gets more, and others start.
    """
    await stage.start_agent()
    forged = {PRE: claim, PLANNED: NODE, TIME: str(time.time_ns())}
    stage.create("forged", asks(1, 10, 1024), annotations=forged, node=NODE)
    stage.create("honest", asks(1, 10, 1024))
    await stage.cluster.running("honest")
    if "other" in claim:
        await stage.cluster.running("forged")  # the agent places what is not claimed
        (grant,) = (await stage.agent.get("/debug/allocations?pod=default/forged"))["allocations"]
        assert [share["memory_mib"] for share in grant["shares"]] == [1024]
        return
    await stage.cluster.until(lambda: bool(stage.cluster.refusals), "a refusal")
    assert {(pod, container) for pod, container, _ in stage.cluster.refusals} == {
        ("forged", "main")
    }
    assert PRE in stage.cluster.refusals[0][2]
    assert stage.cluster.starts("forged") == []


async def test_an_init_container_that_hands_its_ids_on(stage: ExtenderStage) -> None:
    """The kubelet gives both the same ids; each must have its own claim, and the pod end as served
    (vgpu-manager §4.2).
    """
    await stage.start_agent()
    stage.create("init", asks(1, 10, 500), init=[(asks(1, 30, 5000), False)])
    await stage.cluster.running("init")
    stage.check()
    await stage.settled("init")


async def test_it_is_switched_off_again(stage: ExtenderStage) -> None:
    """Running pods keep what they have; no scheduler is told of GPUs any more, and with
    `withdrawAtStop` the Node's annotations are gone (vgpu-manager §3).
    """
    stage.withdraws = True
    await stage.start_agent()
    stage.create("p", asks(1, 10, 1024))
    await stage.cluster.running("p")
    await stage.settled("p")
    await stage.agent.terminate()
    metadata = stage.cluster.node_object()["metadata"]
    written = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    assert [key for key in written if key.startswith(f"{DOMAIN}/node-")] == []
    stage.configure("families: {nvidia: true, vgpuManager: false}\n")
    await stage.agent.start()
    await stage.offered("nvidia.com/gpu")
    await stage.cluster.until(lambda: int(stage.allocatable.get(NUMBER, 0)) == 0, "no more vGPUs")
    assert stage.cluster.phase("p") == "Running"
    stage.check()
