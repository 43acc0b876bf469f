"""Units of memory so small that a pod's status cannot hold those that it asks for."""

from __future__ import annotations

import pytest

from vgpu_agent.agent.offers.families import long_status_cautions
from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds
from vgpu_agent.model import Decider, Resource

U0 = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
MEMORY = "volcano.sh/vgpu-memory"


def memory(count: int, prefix: str = f"{U0}-memory-") -> Resource:
    """A resource of one GPU with so many units."""
    ids = NumberedIds((IdBlock(f"{U0}-core-", 100, U0), IdBlock(prefix, count, U0)))
    return Resource(
        MEMORY,
        "volcano-vgpu",
        ids,
        decided_by=Decider.NOBODY,
        ids_setting="volcanoVgpu.gpuMemoryFactor",
    )


@pytest.mark.parametrize(
    ("count", "version", "times"),
    [
        (23_028, "v1.36.3", "2"),
        (40_960, "v1.37.0", "2"),
        (81_920, "v1.36.0-gke.1", "4"),
        (49_152, "2.0", "3"),
    ],
)
def test_a_gpu_with_more_units_than_a_status_can_hold_is_named(
    count: int, version: str, times: str
) -> None:
    """With the number that fits and how many times fewer ids a GPU must have. On a real kubelet
    22,000 were written and 23,028 were not.
    """
    (caution,) = long_status_cautions([memory(count)], version)
    assert caution.startswith(
        f"{MEMORY}: a GPU has {count} ids, and a pod that asks for more than about 21212 never "
        "shows Ready"
    )
    remedy = (
        f"Change volcanoVgpu.gpuMemoryFactor so that a GPU has at least {times} times fewer ids"
    )
    assert remedy in caution


@pytest.mark.parametrize(
    ("count", "version"),
    [(16_384, "v1.36.3"), (81_920, "v1.35.9"), (81_920, ""), (81_920, "unknown")],
)
def test_where_it_cannot_happen_nothing_is_said(count: int, version: str) -> None:
    """Few units, or a kubelet that writes none of them into the status, or is not known to."""
    assert list(long_status_cautions([memory(count)], version)) == []


def test_short_ids_leave_room_for_more() -> None:
    """GPU share's ids are ``0-17``, so the same status holds three times as many."""
    assert list(long_status_cautions([memory(49_152, prefix="0-")], "v1.36.3")) == []


def test_ids_of_whole_gpus_and_of_replicas_are_never_that_many() -> None:
    """They are kept one by one, and thousands are never needed."""
    ids = tuple(DeviceId(f"{U0}::{number}", U0) for number in range(10))
    assert (
        list(
            long_status_cautions(
                [Resource("nvidia.com/gpu", "nvidia", ids), Resource(MEMORY, "f", NumberedIds(()))],
                "v1.36.3",
            )
        )
        == []
    )
