"""The simulated Volcano scheduler's books of MIG instances (volcano-vgpu §4.3)."""

from __future__ import annotations

from tests.sim.volcano.objects import ALLOCATABLE, U0, U1, asking, bound, node, pod
from vgpu_agent.sim.volcano.ledger import VgpuLedger
from vgpu_agent.sim.volcano.mig import Geometries
from vgpu_agent.sim.volcano.resources import Object

DEVICE_CONFIG = """
nvidia:
  gpuMemoryFactor: 1
  knownMigGeometries:
  - models: [A30, A100-SXM4-40GB]
    allowedGeometries:
    - {group: group1, geometries: [{name: 1g.5gb, memory: 5120, count: 7}]}
    - group: group2
      geometries:
      - {name: 2g.10gb, memory: 10240, count: 3}
      - {name: 1g.5gb, memory: 5120, count: 1}
"""
REGISTER = "".join(f"{uuid},10,40960,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig:" for uuid in (U0, U1))


def ledger_of(*pods: Object, config: str = DEVICE_CONFIG) -> VgpuLedger:
    """The ledger of two A100 in the mode mig with those pods on them."""
    allocatable = {**ALLOCATABLE, "volcano.sh/vgpu-memory": "81920"}
    ledger = VgpuLedger.of(
        node(register=REGISTER, allocatable=allocatable),
        pods,
        policy="none",
        requires_resources=True,
        geometries=Geometries.of(config),
    )
    assert ledger is not None
    return ledger


def place(ledger: VgpuLedger, memory: int, number: int = 1) -> str:
    """Return the cards of a new pod, with U0 and U1 for the long names;
    empty when it does not fit.
    """
    placed = ledger.place(pod("p", asking(number, memory)), 0)
    return (
        placed.annotations["volcano.sh/vgpu-ids-new"].replace(U0, "U0").replace(U1, "U1")
        if placed
        else ""
    )


def holding(*places: str, memory: int = 8000) -> Object:
    """A bound pod that has instances there."""
    text = (
        "".join(f"{each},NVIDIA,{memory},0:" for each in places).replace("U0", U0).replace("U1", U1)
    )
    return bound(pod("holder", asking(len(places))), {"volcano.sh/vgpu-ids-new": text})


def test_g12_the_smallest_instance_that_is_large_enough_by_the_first_group_that_has_one() -> None:
    """8000 on an empty card are ``group2-0``, with what was asked in the annotation and 10240 in
    the books; 5000 are ``group1-0``.
    """
    ledger = ledger_of()
    assert place(ledger, 8000) == "U1[group2-0],NVIDIA,8000,0:"
    assert [use.memory for use in ledger.uses] == [0, 10240]
    assert place(ledger_of(), 5000) == "U1[group1-0],NVIDIA,5000,0:"
    assert place(ledger_of(), 11000) == ""


def test_a_card_in_use_continues_with_its_group() -> None:
    """The next instance of it, and none of another group: a small pod gets the small instance of
    group2, or goes to the other card.
    """
    assert place(ledger_of(holding("U1[group2-0]")), 8000) == "U1[group2-1],NVIDIA,8000,0:"
    assert place(ledger_of(holding("U1[group2-0]")), 5000) == "U1[group2-3],NVIDIA,5000,0:"
    assert (
        place(ledger_of(holding("U1[group1-0]", memory=5000)), 8000)
        == "U0[group2-0],NVIDIA,8000,0:"
    )


def test_pods_of_one_round_get_the_same_instance() -> None:
    """The reference counts an instance once its pod is seen to be bound (volcano-vgpu D15),
    and its memory at once.
    """
    ledger = ledger_of()
    assert [place(ledger, 8000) for _ in range(4)] == ["U1[group2-0],NVIDIA,8000,0:"] * 4
    # 4 × 10240 is all that the card has
    assert place(ledger, 8000) == "U0[group2-0],NVIDIA,8000,0:"


def test_a_number_of_two_is_one_instance_of_each_card() -> None:
    """A third instance has no card."""
    assert place(ledger_of(), 8000, 2) == "U1[group2-0],NVIDIA,8000,0:U0[group2-0],NVIDIA,8000,0:"
    assert place(ledger_of(), 8000, 3) == ""


def test_without_geometries_cards_are_shared_whole() -> None:
    """Their memory is counted as in the other mode,
    and the plain UUID is written (volcano-vgpu §2.2).
    """
    assert place(ledger_of(config=""), 8000) == "U1,NVIDIA,8000,0:"
