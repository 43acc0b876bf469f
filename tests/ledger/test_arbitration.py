"""GPUs that several families are offered: the basis of a choice on a mixed node."""

from __future__ import annotations

import msgspec

from tests.golden import U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Resource

OURS = Resource("a/gpu", "a", (DeviceId("0", U0), DeviceId("1", U1)))
THEIRS = Resource("b/gpu", "b", (DeviceId("1", U1),))


def test_a_gpu_is_shared_where_another_family_is_offered_it() -> None:
    """A family that is hidden from some GPUs leaves them to the others."""
    ledger = Ledger()
    ledger.observe(golden_inventory())
    ledger.offer([OURS, THEIRS])
    assert ledger.shared_gpus("a") == {U1}
    assert ledger.shared_gpus("b") == {U0, U1}


def test_it_follows_the_offers_and_the_gpus() -> None:
    """A family is switched off, a GPU is put into MIG mode:
    the answer of before must not be kept.
    """
    ledger = Ledger()
    ledger.observe(golden_inventory())
    undivided = msgspec.structs.replace(THEIRS, requires_mig_off=True)
    ledger.offer([OURS, undivided])
    assert ledger.shared_gpus("a") == {U1}
    ledger.observe(with_slices(golden_inventory(), U1=golden_slices()))
    # nothing of a divided GPU is given away by the other family
    assert ledger.shared_gpus("a") == frozenset()
    ledger.observe(golden_inventory())
    assert ledger.shared_gpus("a") == {U1}
    ledger.offer([OURS])
    assert ledger.shared_gpus("a") == frozenset()


def test_a_slice_belongs_to_its_gpu() -> None:
    """An offer of a slice is an offer of the GPU, which serves one family as a whole."""
    ledger = Ledger()
    slices = golden_slices()
    ledger.observe(with_slices(golden_inventory(), U1=slices))
    ledger.offer([OURS, Resource("b/mig", "b", (DeviceId(slices[0].uuid, slices[0].uuid),))])
    assert ledger.shared_gpus("a") == {U1}
    assert (ledger.gpu_of(slices[0].uuid), ledger.gpu_of(U0), ledger.gpu_of("GPU-gone")) == (
        U1,
        U0,
        "GPU-gone",
    )
