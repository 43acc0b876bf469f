"""A container's share when an extender has claimed it (vgpu-manager §4.2, §7.2, §12.3)."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.golden import (
    CLAIM,
    KEYS,
    ONE,
    container,
    family,
    pod,
    question,
    written,
)
from tests.families.vgpu_manager.node import INVENTORY, NUMBER, U0, U1
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.family import Decision
from vgpu_agent.model import Share
from vgpu_agent.pods import ContainerKind, Pod

BY = "the scheduler, in nvidia.com/pre-allocated"


def test_the_golden_claim_is_followed() -> None:
    """vgpu-manager:§13.3, whatever ids the kubelet has chosen."""
    decision = family().decide(question(pod(annotations=written())))
    assert decision == Decision((Share(U0, 1024, 10),), BY, by_scheduler=True)


def test_each_container_has_the_claim_of_its_name() -> None:
    """vgpu-manager:D28: neither order nor predicate-time decides anything."""
    about = pod(
        container("init", ContainerKind.INIT, number=1),
        container("side", ContainerKind.SIDECAR, number=1, memory=100),
        container("train", number=2, cores=50, memory=8192),
        annotations=written(
            f"train[0_{U0}_50_8192,1_{U1}_50_8192];init[1_{U1}_100_24576];side[0_{U0}_0_100]",
            real_allocated="train[9_x_1_1]",
            predicate_time="9223372036854775807",
        ),
    )
    decide = family().decide
    assert decide(question(about, "init")).shares == (Share(U1, 24576, 100),)
    assert decide(question(about, "side")).shares == (Share(U0, 100, 0),)
    assert decide(question(about, "train")).shares == (Share(U0, 8192, 50), Share(U1, 8192, 50))


def test_real_allocated_gives_nothing() -> None:
    """Only what a scheduler claims counts for a start; the rest the agent places."""
    about = pod(annotations={KEYS.real_allocated: f"default[1_{U1}_10_1024]"})
    decision = family().decide(question(about))
    assert decision.by_agent
    assert decision.shares == (Share(U0, 1024, 10),)


def test_the_uuid_counts_where_the_index_is_another() -> None:
    """NVML's indices shift when a card is gone; the evidence names it."""
    decision = family().decide(question(pod(annotations=written(f"default[7_{U0}_10_1024]"))))
    assert decision.shares == (Share(U0, 1024, 10),)
    assert decision.by == f"{BY}, which has index 7 for {U0}, which is 0; the UUID counts"


def test_memory_is_that_of_the_oversold_card() -> None:
    """With twice the memory offered, the whole card has 49152 MiB."""
    of = family(memory_scaling=2.0)
    about = pod(container(number=1), annotations=written(f"default[0_{U0}_100_49152]"))
    assert of.decide(question(about, of=of)).shares == (Share(U0, 49152, 100),)


def test_a_container_without_a_claim_is_placed() -> None:
    """The agent itself writes claims one by one, as containers start."""
    about = pod(ONE, container("late", number=1, memory=512), annotations=written())
    decision = family().decide(question(about, "late"))
    assert decision.by_agent
    assert decision.shares == (Share(U0, 512, 0),)


def test_what_runs_is_recalled_from_its_pod() -> None:
    """After a restart, where no record is left."""
    recalled = family().recall(question(pod(annotations=written())))
    by = "the annotation nvidia.com/pre-allocated"
    assert recalled == Decision((Share(U0, 1024, 10),), by, by_scheduler=True)
    assert family().recall(question(pod())) is None


REMEDY = "delete the pod, so that its owner makes a new one that is scheduled anew"


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        ("default[", "is no <container>[<claim>,…]"),
        (f"{CLAIM};{CLAIM}", "container 'default' is named twice"),
        (
            f"default[0_{U0}_10_1024,1_{U1}_10_1024]",
            "2 GPUs were chosen for container default, and",
        ),
        (
            "default[0_GPU-other_10_1024]",
            "node gpu-node-1 offers no GPU 'GPU-other'; it offers GPU-",
        ),
        (f"default[0_{U0}_10_1025]", "1025 MiB are not what container default asks for"),
        (f"default[0_{U0}_10_0]", "0 MiB of memory for container default would mean no limit"),
        (f"default[0_{U0}_10_-1]", "-1 MiB of memory for container default would mean no limit"),
        (f"default[0_{U0}_11_1024]", "11 % of the compute are not what container default asks"),
        (f"default[0_{U0}_0_1024]", "0 % of the compute are not what"),
        (f"default[0_{U0}_-5_1024]", "-5 % of the compute are not what"),
    ],
)
def test_a_claim_that_cannot_be_is_refused_with_one_sentence(claims: str, told: str) -> None:
    """vgpu-manager:D16: every user can write annotations; they give no more than the limits."""
    _refused(pod(annotations=written(claims)), told)


def test_a_card_is_claimed_once() -> None:
    """The cards of one container are distinct (vgpu-manager §5.5)."""
    about = pod(
        container(number=2, cores=10, memory=1024),
        annotations=written(f"default[0_{U0}_10_1024,0_{U0}_10_1024]"),
    )
    _refused(about, "a GPU is named twice for container default")


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ("", "no nvidia.com/predicate-node beside it says for which node"),
        ("gpu-node-2", "the GPUs were chosen for a node other than gpu-node-1"),
    ],
)
def test_a_claim_for_no_node_or_another_is_refused(node: str, told: str) -> None:
    """A copied template, or a pod whose owner has chosen the node."""
    _refused(pod(annotations=written(predicate_node=node)), told)


def test_a_divided_card_is_not_offered() -> None:
    """Extenders read that it is in MIG mode a moment later."""
    gpus = (msgspec.structs.replace(INVENTORY.gpus[0], mig_enabled=True), INVENTORY.gpus[1])
    inventory = msgspec.structs.replace(INVENTORY, gpus=gpus)
    with pytest.raises(RequestRefusedError, match=f"offers no GPU '{U0}'; it offers {U1}"):
        family().decide(question(pod(annotations=written()), inventory=inventory))


def test_a_container_that_the_pod_does_not_have_is_refused() -> None:
    """The kubelet's records are about another specification."""
    with pytest.raises(RequestRefusedError, match="has no container of that name"):
        family().decide(question(pod(annotations=written()), "other"))


def _refused(about: Pod, told: str) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        family().decide(question(about))
    text = str(caught.value)
    assert told in text
    assert "pod default/gpu-pod" in text
    assert len(text) < 900
    assert family().recall(question(about)) is None
    assert family().named_gpus(about, INVENTORY) == {}


def test_the_cards_of_a_pod_are_named_by_container() -> None:
    """The kubelet is advised to give ids of them, and other families leave them."""
    about = pod(
        container("init", ContainerKind.INIT, number=1),
        container("train", number=2),
        container("log"),
        container("odd", number=10_000_000),
        annotations=written(
            f"init[1_{U1}_100_24576];train[0_{U0}_100_24576,1_{U1}_100_24576];odd[0_{U0}_1_1]"
        ),
    )
    assert family().named_gpus(about, INVENTORY) == {"init": (U1,), "train": (U0, U1)}


def test_claims_beyond_a_card_name_nothing() -> None:
    """Such a pod would never start whole, and would keep other families from the card. Init
    containers come before the others.
    """
    init, main = container("init", ContainerKind.INIT, number=1), container("main", number=1)
    whole = f"0_{U0}_100_24576"
    fits = pod(init, main, annotations=written(f"init[{whole}];main[{whole}]"))
    assert family().named_gpus(fits, INVENTORY) == {"init": (U0,), "main": (U0,)}
    side = container("side", ContainerKind.SIDECAR, number=1, memory=1)
    beyond = pod(side, main, annotations=written(f"side[0_{U0}_0_1];main[{whole}]"))
    assert family().named_gpus(beyond, INVENTORY) == {}


def test_more_cards_than_there_are_are_refused_at_once() -> None:
    """Such a pod can never start here."""
    of = family()
    (resource,) = of.resources(INVENTORY)
    of.check(resource, ["a", "b"])
    with pytest.raises(RequestRefusedError, match=f"{NUMBER}: 3 are asked for.* at most 2"):
        of.check(resource, ["a", "b", "c"])
