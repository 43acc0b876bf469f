"""GPUs that answer only after the agent has started (``failOnInitError: false``),
under containers that hold them already.
"""

from __future__ import annotations

from tests.allocation.without_pods import without_pods
from tests.golden import U0, golden_inventory
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Holding, Inventory, KubeletRecords, Owner

GPU = "nvidia.com/gpu"


def test_a_grant_of_a_gpu_that_came_later_knows_its_memory_and_keeps_its_place() -> None:
    """The book was rebuilt without a GPU to look at.
    Afterwards it is the book of a normal start.
    """
    inventory = Inventory()
    ledger = Ledger()
    allocator = Allocator(
        without_pods(
            ledger=ledger,
            families=Families((NvidiaFamily(NvidiaOptions()),)),
            inventory=lambda: inventory,
            journal=Journal(),
        )
    )
    records = KubeletRecords((Holding(GPU, (U0,), Owner("main", "uid", "default", "train")),))
    allocator.refresh_offer()
    allocator.confirm(records, reservation_seconds=60, initial=True)
    assert list(ledger.foreign_ids) == [U0]

    inventory = golden_inventory()
    allocator.refresh_offer()
    assert allocator.confirm(records, reservation_seconds=60) == []

    (grant,) = ledger.grants
    assert [share.memory_mib for share in grant.shares] == [inventory.gpus[0].memory_mib]
    assert not ledger.foreign_ids
    assert (ledger.free_ids(GPU), ledger.audit()) == (1, [])
