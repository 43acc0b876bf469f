"""The list of ids for the kubelet, and their health:
illness, loss, and a GPU that still serves in another way.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import (
    ILL,
    WHOLE,
    Clock,
    book,
    held,
    make,
    reconcile,
    replicated,
    words,
)
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.model import Resource, Share


def test_all_ids_of_a_gpu_flip_together(clock: Clock) -> None:
    """kubelet V7: 4 replicas, one illness, 4 unhealthy ids."""
    ledger = make(clock, replicated(4))
    ledger.observe(golden_inventory(U1=ILL))
    assert [id_ for id_, healthy in words(ledger).items() if not healthy] == [
        f"{U1}::{n}" for n in range(4)
    ]
    ledger.observe(golden_inventory())
    assert all(words(ledger).values())


def test_a_lost_gpu_stays_in_the_list_as_unhealthy(clock: Clock) -> None:
    """kubelet V16: all ids of GPU 1 stay while U1::0 is held, all Unhealthy."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U1}::0")
    whole = golden_inventory()
    ledger.observe(msgspec.structs.replace(whole, gpus=whole.gpus[:1]))
    assert [healthy for id_, healthy in words(ledger).items() if id_.startswith(U1)] == [False] * 4


def test_a_held_id_of_a_gpu_that_was_lost_before_the_start_is_listed_as_unhealthy(
    clock: Clock,
) -> None:
    """After a restart beside a dead card, the kubelet still learns that its holder's id is ill
    (else pod status says Healthy).
    """
    whole = golden_inventory()
    ledger = make(
        clock,
        Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0, 0),)),
        inventory=msgspec.structs.replace(whole, gpus=whole.gpus[:1]),
    )
    reconcile(ledger, held(U1), initial=True)
    assert words(ledger) == {U0: True, U1: False}
    assert ledger.foreign_ids == (U1,)


def test_a_whole_gpu_that_is_held_is_not_shared_until_it_is_returned(clock: Clock) -> None:
    """After replicas were configured, a pod from before keeps its card to itself.
    The other card is shared at once.
    """
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    ledger.offer([replicated(4)])
    assert {id_: ok for id_, ok in words(ledger).items() if ok} == {
        f"{U1}::{n}": True for n in range(4)
    }
    with pytest.raises(UnhealthyDeviceError, match="earlier settings"):
        book(ledger, f"{U0}::0")
    reconcile(ledger)
    reconcile(ledger)
    assert all(words(ledger).values())


def test_a_gpu_that_is_still_shared_is_not_given_as_a_whole(clock: Clock) -> None:
    """The other direction: replicas were switched off while one is held."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::2")
    ledger.offer([WHOLE])
    assert words(ledger) == {U0: False, U1: True}


def test_a_gpu_serves_one_family_at_a_time(clock: Clock) -> None:
    """While one family holds a share, the other family's ids on that GPU are unhealthy.
    They return with the last share.
    """
    ledger = make(
        clock,
        replicated(2),
        replicated(2, name="volcano.sh/vgpu-number", family="volcano-vgpu", prefix="v-"),
    )
    grant = book(ledger, f"{U0}::0")
    assert [ok for id_, ok in words(ledger, "volcano.sh/vgpu-number").items() if U0 in id_] == [
        False,
        False,
    ]
    with pytest.raises(
        UnhealthyDeviceError, match="serves nvidia until its last share is returned"
    ):
        ledger.reserve("volcano.sh/vgpu-number", [f"v-{U0}::0"], [Share(U0)])
    ledger.release(grant.number)
    assert all(words(ledger, "volcano.sh/vgpu-number").values())
