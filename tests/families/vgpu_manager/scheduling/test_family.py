"""The holding of a pod by its annotations, which any user may have written."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, container, pod
from vgpu_agent.families.vgpu_manager.claims import ClaimsTextError
from vgpu_agent.families.vgpu_manager.scheduling.family import holding_of
from vgpu_agent.placement.nodes.book import HeldCard, Holding
from vgpu_agent.pods import ContainerKind, Pod

UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"


def bound(pre: str = "", real: str = "", phase: str = "Running") -> Pod:
    """A pod on a Node whose scheduler planned ``pre`` and which has received ``real``."""
    return msgspec.structs.replace(
        pod(
            container("init", kind=ContainerKind.INIT),
            container("default", cores=10, memory=1024),
            pre_allocated=pre,
            real_allocated=real,
        ),
        node="gpu-node-1",
        phase=phase,
    )


def test_the_claim_of_the_contract_counts_once_the_pod_is_bound() -> None:
    """vgpu-manager §13.3."""
    text = f"default[0_{UUID}_10_1024]"
    assert holding_of(bound(text), KEYS) == Holding(
        "gpu-node-1", (ContainerKind.MAIN,), ((HeldCard(UUID, 10, 1024),),)
    )
    assert holding_of(msgspec.structs.replace(bound(text), node=""), KEYS) is None
    for phase in ("Succeeded", "Failed"):
        assert holding_of(bound(text, phase=phase), KEYS) is None
    assert holding_of(bound(), KEYS) is None


def test_what_a_container_has_received_counts_and_the_plan_for_the_others() -> None:
    """The agent may have given other cards than a plain scheduler planned (vgpu-manager §4.4)."""
    plan, other = f"init[0_{UUID}_1_1];default[0_{UUID}_1_1]", "GPU-other"
    partly, whole = f"init[1_{other}_2_2]", f"init[1_{other}_2_2];default[1_{other}_2_2]"
    kinds = (ContainerKind.INIT, ContainerKind.MAIN)
    assert holding_of(bound(plan, partly), KEYS) == Holding(
        "gpu-node-1", kinds, ((HeldCard(other, 2, 2),), (HeldCard(UUID, 1, 1),))
    )
    assert holding_of(bound(plan, whole), KEYS) == Holding(
        "gpu-node-1", kinds, ((HeldCard(other, 2, 2),),) * 2
    )
    assert holding_of(bound("", partly), KEYS) == Holding(
        "gpu-node-1", kinds[:1], ((HeldCard(other, 2, 2),),)
    )


@pytest.mark.parametrize(("pre", "real"), [("nonsense", ""), ("", "default[0_x]")])
def test_claims_that_are_nonsense_are_told(pre: str, real: str) -> None:
    """The pod counts for nothing then, so somebody should know."""
    with pytest.raises(ClaimsTextError):
        holding_of(bound(pre, real), KEYS)


@pytest.mark.parametrize("spoiled", ["nonsense", "a[0_x_0_0];a[0_x_0_0]"])
def test_one_text_counts_although_the_other_is_nonsense(spoiled: str) -> None:
    """A user who spoils the one must not free the cards of the other."""
    good = f"default[0_{UUID}_10_1024]"
    for pre, real in ((good, spoiled), (spoiled, good)):
        found = holding_of(bound(pre, real), KEYS)
        assert found is not None
        assert found.cards == ((HeldCard(UUID, 10, 1024),),)


def test_a_longer_plan_does_not_hide_what_was_received() -> None:
    """A user may add containers to the plan, which the pod does not have."""
    real = f"default[0_{UUID}_10_1024]"
    found = holding_of(bound(f"default[0_{UUID}_0_0];more[0_{UUID}_0_0]", real), KEYS)
    assert found is not None
    assert found.cards == ((HeldCard(UUID, 10, 1024),),)


def test_amounts_below_zero_count_for_nothing() -> None:
    """A user could otherwise make a card look larger than it is."""
    found = holding_of(bound(f"default[0_{UUID}_-50_-9999]"), KEYS)
    assert found is not None
    assert found.cards == ((HeldCard(UUID, 0, 0),),)
