"""Offers of a node's cards by volcano-gpushare, its claims on the kubelet's records,
and the lock it releases on the Node.
"""

from __future__ import annotations

import msgspec
import pytest

from tests import constants
from tests.families.volcano_gpushare.parts import (
    MEMORY,
    NUMBER,
    UNHEALTHY,
    family_of,
    offer_of,
    view_of,
)
from tests.golden import golden_inventory
from vgpu_agent.device_ids import list_size_bytes
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.family import NodeView, Ownership
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Inventory
from vgpu_agent.nodes import Node


def test_a_node_without_cards_offers_nothing() -> None:
    """No GPU, no resource. A count from before is taken back so that the scheduler does not believe
    in cards.
    """
    family = family_of(inventory=Inventory())
    assert family.resources(Inventory()) == ()
    empty = NodeView(Node("node-a", capacity={NUMBER: "2"}), Inventory(), {}, {}, now=0.0)
    assert family.desired_node(empty).capacity == {NUMBER: "0"}
    assert family.desired_node(msgspec.structs.replace(empty, node=Node("node-a"))).capacity == {}


def test_the_size_of_the_list_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that decides about the factor is, to the byte,
    what the encoder would need for the ill list.
    """
    resource = offer_of()
    size = list_size_bytes(resource.ids)
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: size})
    assert offer_of() == resource
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: size - 1})
    with pytest.raises(ConfigError):
        offer_of()


def test_both_names_are_claimed() -> None:
    """After a change of strategy kubelet's records still speak of the other resource."""
    assert [family_of().owns(name) for name in (MEMORY, NUMBER)] == [Ownership.CERTAIN] * 2
    assert family_of().owns("volcano.sh/vgpu-number") is Ownership.NONE


def test_the_schedulers_lock_is_given_back_after_an_allocate() -> None:
    """The lock ``gpu`` goes once an Allocate came after it,
    guarded against one that is taken anew meanwhile.
    """
    locked = Node("node-a", annotations={"gpu": "2026-11-20T16:36:31Z"})  # unix second 1795192591
    desired_state = family_of().desired_node(view_of(node=locked, allocated_at=1795192592.0))
    assert desired_state.annotations == {UNHEALTHY: None, "gpu": None}
    assert desired_state.guarded == {"gpu"}
    assert (
        "gpu"
        not in family_of().desired_node(view_of(node=locked, allocated_at=1795192589.0)).annotations
    )


def test_a_gpu_in_mig_mode_is_unhealthy_and_keeps_its_number() -> None:
    """Nothing can use it as one piece. The cards behind it must not change their numbers
    for the scheduler.
    """
    first, second = golden_inventory().gpus
    family = VolcanoGpushareFamily(VolcanoGpushareOptions(factor=4096))
    inventory = Inventory(
        version=1, gpus=(msgspec.structs.replace(first, mig_enabled=True), second)
    )
    ledger = Ledger()
    ledger.observe(inventory)
    ledger.offer(family.resources(inventory))

    listed = {entry.id.id: entry.healthy for entry in ledger.listing("volcano.sh/gpu-memory")}

    assert listed == {f"{card}-{unit}": card == 1 for card in range(2) for unit in range(10)}
