"""The use of each GPU: the family that it serves, since when, for which pods, which wait, and why
ids of other families are held back.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import (
    ILL,
    SERVE,
    TRAIN,
    Clock,
    book,
    held,
    make,
    reconcile,
    replicated,
)
from vgpu_agent.device_ids import IdBlock, NumberedIds
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.ledger.uses import GpuUse, HeldBack
from vgpu_agent.model import Resource, Share

NUMBER = "volcano.sh/vgpu-number"
VGPU = replicated(2, name=NUMBER, family="volcano-vgpu", prefix="v-")
LENT = "the GPU serves nvidia until its last share is returned"


def claim(pod: str, *, order: int, gpu: str = U0, family: str = "volcano-vgpu") -> Claim:
    """A claim on ``gpu`` by the pod ``ml/<pod>``."""
    return Claim(gpu, family, f"ml/{pod}", f"uid-{pod}", 1000.0 + order, order)


def test_a_gpu_serves_its_family_since_the_oldest_grant_that_is_left(clock: Clock) -> None:
    """Its pods are named, oldest first. A reservation that the kubelet has not named yet counts
    without a name.
    """
    ledger = make(clock, replicated(4), VGPU)
    assert ledger.uses == (GpuUse(U0), GpuUse(U1))
    first = book(ledger, f"{U0}::0")
    clock.now += 60
    book(ledger, f"{U0}::1")
    book(ledger, f"{U0}::2")
    reconcile(ledger, held(f"{U0}::0"), held(f"{U0}::1", owner=SERVE))
    use = ledger.uses[0]
    assert use == GpuUse(
        U0, "nvidia", 1000.0, or_earlier=False, pods=("default/train", "default/serve"), unnamed=1
    )
    assert use.holders == 3
    ledger.release(first.number)
    assert ledger.uses[0].since == 1060.0


def test_after_a_restart_the_time_is_that_of_the_restart_or_earlier(clock: Clock) -> None:
    """The kubelet's records tell no times, so nothing is called younger than it is."""
    ledger = make(clock, replicated(4))
    reconcile(ledger, held(f"{U0}::0"), initial=True)
    clock.now += 60
    book(ledger, f"{U0}::1")
    assert ledger.uses[0] == GpuUse(
        U0, "nvidia", 1000.0, or_earlier=True, pods=("default/train",), unnamed=1
    )
    book(ledger, f"{U1}::1")
    assert not ledger.uses[1].or_earlier


def test_claims_are_those_of_their_gpu_oldest_first(clock: Clock) -> None:
    """They replace each other as a whole, and a change is news for every list and page."""
    ledger = make(clock, replicated(4), VGPU)
    late, early, other = (
        claim("late", order=7),
        claim("early", order=3),
        claim("other", order=5, gpu=U1),
    )
    before = ledger.revision.version
    ledger.claim([late, early, other])
    assert ledger.revision.version > before
    assert ledger.claims == (early, other, late)
    assert [use.claims for use in ledger.uses] == [(early, late), (other,)]
    before = ledger.revision.version
    ledger.claim([other, late, early])
    assert ledger.revision.version == before
    ledger.claim([])
    assert not ledger.claims


def test_ids_that_others_hold_back_are_counted_by_reason_and_not_by_gpu(clock: Clock) -> None:
    """One line a reason, with the ids that are Unhealthy for it in the kubelet's list."""
    ledger = make(clock, replicated(4), VGPU)
    assert ledger.held_back(NUMBER) == ()
    book(ledger, f"{U0}::0")
    assert ledger.held_back(NUMBER) == (HeldBack(LENT, "nvidia", (U0,), 2),)
    assert ledger.held_back("nvidia.com/gpu") == ()
    book(ledger, f"{U1}::0")
    assert ledger.held_back(NUMBER) == (HeldBack(LENT, "nvidia", (U0, U1), 4),)


def test_an_ill_gpu_is_held_back_for_its_illness_although_it_serves_somebody(clock: Clock) -> None:
    """Waiting for its pods would not help."""
    ledger = make(clock, replicated(4), VGPU)
    book(ledger, f"{U1}::0")
    ledger.observe(golden_inventory(U1=ILL))
    assert ledger.held_back(NUMBER) == (HeldBack(ILL.reason, "", (U1,), 2),)


def test_thousands_of_ids_are_counted_by_their_blocks(clock: Clock) -> None:
    """Memory is offered by the MiB."""
    memory = Resource(
        "volcano.sh/vgpu-memory",
        "volcano-vgpu",
        NumberedIds((IdBlock("a-", 40960, U0), IdBlock("b-", 40960, U1))),
    )
    ledger = make(clock, replicated(4), memory)
    book(ledger, f"{U0}::0")
    assert [each.ids for each in ledger.held_back("volcano.sh/vgpu-memory")] == [40960]


def test_a_gpu_that_is_gone_is_in_use_as_long_as_its_pod_holds_it(clock: Clock) -> None:
    """No other family has it yet, and its line must not vanish from the page."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U1}::0")
    whole = golden_inventory()
    ledger.observe(msgspec.structs.replace(whole, gpus=whole.gpus[:1]))
    assert [(use.gpu, use.family) for use in ledger.uses] == [(U0, ""), (U1, "nvidia")]


def test_a_refusal_names_its_gpu_once(clock: Clock) -> None:
    """``device GPU-… cannot take GPU-…`` read like two GPUs."""
    ledger = make(clock, replicated(4), VGPU)
    book(ledger, f"{U0}::0")
    with pytest.raises(UnhealthyDeviceError) as caught:
        ledger.reserve(NUMBER, [f"v-{U0}::0"], [Share(U0)])
    assert str(caught.value) == f"v-{U0}::0 is not available: {LENT}"
    assert str(caught.value).count(U0) == 1
    assert (caught.value.device, caught.value.advice) == (U0, "")
    assert TRAIN.pod_name not in str(caught.value)
