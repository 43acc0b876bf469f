"""The table of allocation policies: each name has a function, and what holds for all of them."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.policies import ALIGNED, ONE_GPU, POLICIES, SPREAD, IdRequest, choose
from vgpu_agent.placement.sharing import DISTRIBUTED, PACKED


def request(
    gpus: int,
    replicas: int,
    size: int,
    *,
    available: list[str] | None = None,
    required: tuple[str, ...] = (),
) -> IdRequest:
    """On GPUs 0, 1… with ids 0::0, 0::1…"""
    every = {f"{gpu}::{number}": str(gpu) for gpu in range(gpus) for number in range(replicas)}
    return IdRequest(
        list(every) if available is None else available,
        required,
        size,
        every,
        collections.Counter(every.values()),
    )


def test_there_is_an_entry_for_each_policy() -> None:
    """Those of NVIDIA's plugin, of iktos's fork, and one for memory in units."""
    assert set(POLICIES) == {ALIGNED, DISTRIBUTED, PACKED, SPREAD, ONE_GPU}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (DISTRIBUTED, ["0::0", "1::0", "2::0"]),
        (PACKED, ["0::0", "0::1", "0::2"]),
        (SPREAD, ["0::0", "1::0", "2::0"]),
        (ONE_GPU, ["0::0", "0::1", "0::2"]),
    ],
)
def test_each_policy_by_name(policy: str, expected: list[str]) -> None:
    """Three of three GPUs with three replicas each, nothing held."""
    assert choose(policy, request(3, 3, 3)) == expected


def test_spread_and_distributed_differ_where_gpus_have_different_numbers_of_replicas() -> None:
    """Spread takes a GPU with 3 of 4 free, distributed one with 1 of 1 free.

    Spread compares free ids, distributed held ones.
    """
    every = {"0::0": "0", **{f"1::{number}": "1" for number in range(4)}}
    asked = IdRequest(
        ["0::0", "1::1", "1::2", "1::3"], (), 1, every, collections.Counter(every.values())
    )
    assert choose(SPREAD, asked) == ["1::1"]
    assert choose(DISTRIBUTED, asked) == ["0::0"]


def test_a_gpu_that_the_container_has_comes_last_in_spreading() -> None:
    """However many replicas it has free."""
    available = ["0::0", "0::1", "0::2", "1::0"]
    assert choose(SPREAD, request(2, 3, 2, available=available, required=("0::2",))) == [
        "0::2",
        "1::0",
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_id_that_nobody_knows_is_said(policy: str) -> None:
    """Instead of a KeyError, which would fail the pod for a preference."""
    with pytest.raises(CapacityError, match="not available: GPU-x"):
        choose(policy, request(2, 1, 1, required=("GPU-x",)))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    gpus=st.integers(1, 5),
    replicas=st.integers(1, 4),
    data=st.data(),
)
def test_any_answer_is_complete_and_the_same_again(
    policy: str, gpus: int, replicas: int, data: st.DataObject
) -> None:
    """nvidia:D4 and nvidia:D5: what is not available plays no part,
    and the answer has the size asked for or there is none.
    """
    count = 1 if policy == ALIGNED else replicas
    every = [f"{gpu}::{number}" for gpu in range(gpus) for number in range(count)]
    available = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    size = data.draw(st.integers(1, len(available)))
    required = tuple(available[: data.draw(st.integers(0, size))])
    asked = request(gpus, count, size, available=available, required=required)
    try:
        chosen = choose(policy, asked)
    except CapacityError:
        most = max(collections.Counter(id_.partition("::")[0] for id_ in available).values())
        assert policy == ONE_GPU
        assert size > most or len({id_.partition("::")[0] for id_ in required}) > 1 or required
    else:
        assert len(set(chosen)) == size
        assert set(required) <= set(chosen) <= set(available)
        assert chosen == choose(policy, asked)
        assert policy != ONE_GPU or len({id_.partition("::")[0] for id_ in chosen}) == 1
