"""The order in which a family takes GPUs where several share the node:
its own, free ones, and those of others last.
"""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.model import DeviceRoom, Link
from vgpu_agent.placement.mixing import ALONE, FREE, OTHERS, OWN, GpuUses, gpu_uses
from vgpu_agent.placement.policies import ALIGNED, ONE_GPU, POLICIES, SPREAD, IdRequest, choose
from vgpu_agent.placement.rooms import DeviceDemand, choose_rooms
from vgpu_agent.placement.sharing import DISTRIBUTED, PACKED

ROOMS = tuple(DeviceRoom(str(gpu), "", 24576, 24576, 100, 0, 10) for gpu in range(4))
WANT = DeviceDemand(1, lambda _: 1000, 0, "1 share")


def request(
    ranks: dict[str, int], replicas: int, size: int, *, required: tuple[str, ...] = ()
) -> IdRequest:
    """Return a request for ids of as many GPUs as there are ranks, each with as many free ids."""
    every = {f"{gpu}::{number}": gpu for gpu in ranks for number in range(replicas)}
    return IdRequest(
        list(every), required, size, every, collections.Counter(every.values()), ranks=ranks
    )


def test_a_family_has_four_kinds_of_gpus() -> None:
    """Its own and those that no other is offered lock no family out, and a free one does. One of
    others it cannot have, or not for long.
    """
    around = gpu_uses("a", frozenset("123"), [("1", "a"), ("3", "b")])
    assert {gpu: around.rank(gpu) for gpu in "0123"} == {"0": OWN, "1": OWN, "2": FREE, "3": OTHERS}


def test_a_gpu_that_a_scheduler_has_named_for_another_family_comes_last() -> None:
    """This includes one that serves this family:
    what is added to it keeps the other family's pod waiting.
    """
    around = gpu_uses("a", frozenset("012"), [("1", "a")], [("0", "b"), ("1", "b"), ("2", "a")])
    assert {gpu: around.rank(gpu) for gpu in "012"} == {"0": OTHERS, "1": OTHERS, "2": FREE}


def test_a_family_that_shares_no_gpu_chooses_as_if_it_were_alone() -> None:
    """Its answers are those of the replaced plugin on a node with one family, for any holdings."""
    assert gpu_uses("a", frozenset(), [("0", "a")]) == ALONE


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({"0": FREE, "1": OWN}, "1"),
        ({"0": OTHERS, "1": FREE}, "1"),
        ({"0": OWN, "1": FREE}, "0"),
        ({"0": OTHERS, "1": OTHERS}, "0"),
    ],
)
def test_one_id_is_of_a_gpu_of_the_lowest_rank(
    policy: str, ranks: dict[str, int], expected: str
) -> None:
    """By every policy: most containers want one."""
    assert choose(policy, request(ranks, 1, 1)) == [f"{expected}::0"]


@pytest.mark.parametrize("policy", [DISTRIBUTED, PACKED, ONE_GPU])
def test_several_ids_stay_on_the_own_gpu_while_it_has_them(policy: str) -> None:
    """A second GPU would be one less for the other families."""
    assert choose(policy, request({"0": FREE, "1": OWN, "2": OTHERS}, 3, 3)) == [
        "1::0",
        "1::1",
        "1::2",
    ]


def test_the_policy_decides_among_gpus_of_one_rank() -> None:
    """Two GPUs serve the family already: distributed spreads over the two."""
    assert choose(DISTRIBUTED, request({"0": FREE, "1": OWN, "2": OWN}, 3, 2)) == ["1::0", "2::0"]
    assert choose(PACKED, request({"0": FREE, "1": OWN, "2": OWN}, 3, 2)) == ["1::0", "1::1"]


def test_what_the_own_gpus_lack_comes_from_free_ones_before_those_of_others() -> None:
    """A request that is larger than what is left on the own GPU is still answered."""
    assert choose(DISTRIBUTED, request({"0": OTHERS, "1": FREE, "2": OWN}, 2, 3)) == [
        "2::0",
        "2::1",
        "1::0",
    ]


def test_spreading_takes_several_gpus_but_none_of_another_family() -> None:
    """Several replicas under iktos's rule are of several GPUs,
    which is what the container has asked for.
    """
    assert choose(SPREAD, request({"0": OTHERS, "1": FREE, "2": OWN}, 2, 2)) == ["1::0", "2::0"]
    assert choose(SPREAD, request({"0": OTHERS, "1": OTHERS, "2": OWN}, 2, 2)) == ["2::0", "2::1"]


def test_whole_gpus_are_aligned_among_those_of_the_lowest_ranks() -> None:
    """Links decide between GPUs that lock out as few families.
    One of another family is taken only when there are too few.
    """
    ranks = {"0": OWN, "1": OTHERS, "2": OWN, "3": OWN}
    links = {
        ("0", "1"): Link(0, 8),
        ("1", "0"): Link(0, 8),
        ("2", "3"): Link(0, 4),
        ("3", "2"): Link(0, 4),
    }
    every = {gpu: gpu for gpu in ranks}
    asked = {
        size: IdRequest(list(every), (), size, every, dict.fromkeys(every, 1), links, ranks)
        for size in (2, 4)
    }
    assert choose(ALIGNED, asked[2]) == ["2", "3"]
    assert choose(ALIGNED, asked[4]) == ["0", "1", "2", "3"]


def test_a_required_id_is_in_the_answer_whatever_its_rank() -> None:
    """The kubelet insists on it: an init container had it."""
    for policy in POLICIES:
        assert "0::0" in choose(policy, request({"0": OTHERS, "1": OWN}, 2, 2, required=("0::0",)))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    rank=st.sampled_from((OWN, FREE, OTHERS)),
    replicas=st.integers(1, 3),
    size=st.integers(1, 3),
)
def test_equal_ranks_change_no_answer(policy: str, rank: int, replicas: int, size: int) -> None:
    """GPUs of one rank are chosen as before, whether others held them or not."""
    replicas = 1 if policy == ALIGNED else max(replicas, size)
    one_rank, none = (request(dict.fromkeys("0123", each), replicas, size) for each in (rank, OWN))
    assert choose(policy, one_rank) == choose(policy, none)


def test_a_pod_without_a_scheduler_goes_to_a_gpu_that_serves_its_family() -> None:
    """Although nothing is booked of its memory yet,
    so that binpack by itself would take the first.
    """
    around = GpuUses(frozenset("0123"), serving=frozenset("2"))
    assert [
        room.device for room in choose_rooms(ROOMS, WANT, policy="binpack", gpu_uses=around)
    ] == ["2"]


def test_spread_is_chosen_by_an_operator_and_only_avoids_gpus_of_others() -> None:
    """An explicit setting counts before the mix.
    A GPU that another family waits for would not start the pod.
    """
    around = GpuUses(frozenset("0123"), serving=frozenset("2"), others=frozenset("0"))
    assert [
        room.device for room in choose_rooms(ROOMS, WANT, policy="spread", gpu_uses=around)
    ] == ["1"]
