"""Spread and packed: the tables of nvidia §6.2, and what must hold for any question."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.sharing import DISTRIBUTED, PACKED, choose_replicas


def _device(id_: str) -> str:
    return id_.partition("::")[0]


def _choose(
    gpus: int,
    replicas: int,
    available: list[str] | None,
    size: int,
    policy: str,
    required: tuple[str, ...] = (),
) -> list[str]:
    every = [f"{gpu}::{n}" for gpu in range(gpus) for n in range(replicas)]
    totals = collections.Counter(_device(id_) for id_ in every)
    return choose_replicas(
        totals=totals,
        device_of=_device,
        available=every if available is None else available,
        required=required,
        size=size,
        policy=policy,
    )


@pytest.mark.parametrize(
    ("gpus", "replicas", "available", "size", "policy", "per_gpu"),
    [
        pytest.param(
            2,
            2,
            ["0::0", "0::1", "1::1"],
            2,
            DISTRIBUTED,
            {"0": 1, "1": 1},
            id="1: 2 GPU x 2, one of GPU 1 held",
        ),
        pytest.param(
            2, 4, None, 2, DISTRIBUTED, {"0": 1, "1": 1}, id="2: 2 GPU x 4, size 2, distributed"
        ),
        pytest.param(
            3,
            2,
            None,
            3,
            DISTRIBUTED,
            {"0": 1, "1": 1, "2": 1},
            id="3: 3 GPU x 2, size 3, distributed",
        ),
        pytest.param(
            2, 4, None, 4, DISTRIBUTED, {"0": 2, "1": 2}, id="4: 2 GPU x 4, size 4, distributed"
        ),
        pytest.param(2, 4, None, 2, PACKED, {"0": 2}, id="5: 2 GPU x 4, size 2, packed"),
        pytest.param(3, 2, None, 3, PACKED, {"0": 2, "1": 1}, id="6: 3 GPU x 2, size 3, packed"),
        pytest.param(2, 4, None, 4, PACKED, {"0": 4}, id="7: 2 GPU x 4, size 4, packed"),
        pytest.param(2, 4, None, 5, PACKED, {"0": 4, "1": 1}, id="8: 2 GPU x 4, size 5, packed"),
    ],
)
def test_tables_of_the_contract(
    gpus: int,
    replicas: int,
    available: list[str] | None,
    size: int,
    policy: str,
    per_gpu: dict[str, int],
) -> None:
    """nvidia:§6.2-1, nvidia:§6.2-2, nvidia:§6.2-3, nvidia:§6.2-4, nvidia:§6.2-5, nvidia:§6.2-6,
    nvidia:§6.2-7 and nvidia:§6.2-8: each row takes as many replicas of each GPU as the table says.
    """
    chosen = _choose(gpus, replicas, available, size, policy)
    assert collections.Counter(map(_device, chosen)) == per_gpu


def test_the_same_input_spreads_or_packs_by_policy() -> None:
    """nvidia:§6.2-9, the contrast: only the policy differs."""
    available = ["0::1", "0::2", "0::3", "1::0", "1::1", "1::2", "1::3"]
    assert [_device(id_) for id_ in _choose(2, 4, available, 1, DISTRIBUTED)] == ["1"]
    assert [_device(id_) for id_ in _choose(2, 4, available, 1, PACKED)] == ["0"]


@pytest.mark.parametrize("policy", [DISTRIBUTED, PACKED])
def test_more_than_there_is_cannot_be_chosen(policy: str) -> None:
    """nvidia:§6.2-10: needed > candidates is an error, which names both numbers.
    The allocator then makes a simple pick.
    """
    with pytest.raises(CapacityError, match="5 ids are requested, 4 available"):
        _choose(2, 2, None, 5, policy)


def test_required_ids_come_first_and_count_as_held() -> None:
    """A required replica of GPU 0 makes the spread go to GPU 1."""
    assert _choose(2, 2, None, 2, DISTRIBUTED, required=("0::1",)) == ["0::1", "1::0"]


@given(
    gpus=st.integers(1, 6),
    replicas=st.integers(1, 5),
    policy=st.sampled_from([DISTRIBUTED, PACKED]),
    chooser=st.data(),
)
def test_any_answer_is_complete_free_of_repeats_and_deterministic(
    gpus: int, replicas: int, policy: str, chooser: st.DataObject
) -> None:
    """nvidia:D5: whatever is free, the answer has the size asked for,
    contains what was required and is the same again.
    """
    every = [f"{gpu}::{n}" for gpu in range(gpus) for n in range(replicas)]
    available = chooser.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    size = chooser.draw(st.integers(1, len(available)))
    required = tuple(available[: chooser.draw(st.integers(0, size))])
    chosen = _choose(gpus, replicas, available, size, policy, required)
    assert len(set(chosen)) == size
    assert set(required) <= set(chosen) <= set(available)
    assert chosen == _choose(gpus, replicas, available, size, policy, required)


@given(gpus=st.integers(1, 6), replicas=st.integers(1, 5), size=st.integers(1, 30))
def test_distributed_is_as_even_as_can_be(gpus: int, replicas: int, size: int) -> None:
    """On an empty node no GPU gives two more replicas than another."""
    counts = collections.Counter(
        map(_device, _choose(gpus, replicas, None, min(size, gpus * replicas), DISTRIBUTED))
    )
    assert max(counts.values()) - min(counts[str(gpu)] for gpu in range(gpus)) <= 1
