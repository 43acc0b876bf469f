"""A resource whose name changes while containers hold it (``renameByDefault``):
its ids stay, and kubelet counts them anew.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import (
    SERVE,
    TRAIN,
    WHOLE,
    Clock,
    book,
    held,
    make,
    reconcile,
    replica_shares,
    replicated,
    whole_shares,
    words,
)
from vgpu_agent.errors import UnhealthyDeviceError


def test_a_renamed_whole_gpu_is_not_given_away_twice(clock: Clock) -> None:
    """renameByDefault keeps the id: the container that holds it under the old name keeps the GPU
    for itself.
    """
    renamed = msgspec.structs.replace(WHOLE, name="nvidia.com/gpu.shared")
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    ledger.offer([renamed])
    assert words(ledger, renamed.name) == {U0: False, U1: True}
    with pytest.raises(UnhealthyDeviceError, match="earlier settings"):
        ledger.reserve(renamed.name, [U0], whole_shares([U0]))
    assert ledger.foreign_ids == (U0,)


def test_an_id_under_two_names_has_a_holder_under_each(clock: Clock) -> None:
    """The kubelet counts by resource, so after a renaming both containers are right, and no pass
    may play one off against the other.
    """
    renamed = replicated(4, name="nvidia.com/gpu.shared")
    id_ = f"{U0}::0"
    ledger = make(clock, replicated(4))
    book(ledger, id_)
    reconcile(ledger, held(id_))
    ledger.offer([renamed])
    ledger.reserve(renamed.name, [id_], replica_shares([id_]))
    records = (held(id_), held(id_, owner=SERVE, resource=renamed.name))
    assert [reconcile(ledger, *records) for _ in range(3)] == [["ledger.named"], [], []]
    assert [(grant.resource, grant.owner) for grant in ledger.grants] == [
        ("nvidia.com/gpu", TRAIN),
        (renamed.name, SERVE),
    ]
