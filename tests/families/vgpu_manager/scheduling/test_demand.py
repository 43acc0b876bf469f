"""The demand of a pod on its Node."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, container, pod
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand, PodDemand, total
from vgpu_agent.pods import ContainerKind, PodContainer

MAIN, INIT, SIDECAR = ContainerKind.MAIN, ContainerKind.INIT, ContainerKind.SIDECAR


def test_the_request_of_the_contract_is_read() -> None:
    """vgpu-manager §13.3."""
    found = read_demand(pod(container("default", cores=10, memory=1024)), KEYS)
    assert found == PodDemand(Demand((ContainerDemand(MAIN, 1, 10, 1024),)), ("default",))


def test_a_pod_that_asks_for_no_card_is_not_ours() -> None:
    """The extender hands its Nodes back as they are."""
    assert read_demand(pod(PodContainer("main", limits={"nvidia.com/gpu": 1})), KEYS) is None


def test_a_pod_of_which_not_all_was_read_is_refused() -> None:
    """A limit may be missing, and would count as a whole card."""
    cut = msgspec.structs.replace(pod(container("main", memory=5)), has_more_requests=True)
    with pytest.raises(RequestRefusedError, match="names more GPU resources"):
        read_demand(cut, KEYS)


def test_a_pod_with_very_many_containers_that_ask_for_cards_is_refused() -> None:
    """Cards are searched for each of them on each Node, and the extender answers nobody else
    meanwhile.
    """
    several = [container(f"c{place}", memory=5) for place in range(17)]
    assert read_demand(pod(*several[:16]), KEYS) is not None
    with pytest.raises(RequestRefusedError, match="17 of its containers ask"):
        read_demand(pod(*several), KEYS)


def test_defaults_are_those_of_schedulers() -> None:
    """Neither cores nor memory is a whole card; cores alone take all memory, and memory alone is
    not limited in compute (vgpu-manager §5.3).
    """
    found = read_demand(
        pod(container("whole"), container("cores", cores=30), container("memory", memory=5)), KEYS
    )
    assert found is not None
    assert [(each.cores_percent, each.memory_units) for each in found.demand.containers] == [
        (100, None),
        (30, None),
        (0, 5),
    ]


def test_words_are_read_as_schedulers_read_them() -> None:
    """Unknown ones count as none (vgpu-manager §4.1)."""
    found = read_demand(
        pod(
            node_policy=" BinPack ",
            device_policy="tightest",
            topology_mode="numa-strict",
            memory_policy="virt",
            include_type="A10, ,H100",
            exclude_uuid="GPU-1",
        ),
        KEYS,
    )
    assert found is not None
    assert msgspec.structs.replace(found.demand, containers=()) == Demand(
        (),
        "binpack",
        "none",
        "numa-strict",
        "virtual",
        ("a10", "h100"),
        exclude_uuids=("gpu-1",),
    )


@pytest.mark.parametrize(
    ("asking", "words", "message"),
    [
        (container(number=17), {}, "vgpu-number is '17'; expected a number of GPUs, at most 16"),
        (container(cores=101), {}, "vgpu-cores is '101'; expected percent"),
        (container(memory=2**50), {}, "vgpu-memory is"),
        (
            PodContainer("main", unreadable_limits={KEYS.number: "one"}),
            {},
            "vgpu-number is 'one'; expected a number of GPUs",
        ),
        (container(), {"include_type": "x" * 5000}, "include-gpu-type has 5000 characters"),
        (
            container(),
            {"exclude_uuid": ",".join(map(str, range(65)))},
            "exclude-gpu-uuid has 65 entries; expected at most 64",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_once(
    asking: PodContainer, words: dict[str, str], message: str
) -> None:
    """The text names pod and key, and no Node is looked at."""
    with pytest.raises(RequestRefusedError, match=message):
        read_demand(pod(asking, **words), KEYS)


def test_the_sum_is_that_of_the_time_when_most_runs() -> None:
    """Init containers run one after the other, beside the sidecars (vgpu-manager §5.3)."""
    demand = Demand(
        (
            ContainerDemand(INIT, 4, 10, 100),
            ContainerDemand(INIT, 1, 90, None),
            ContainerDemand(SIDECAR, 1, 5, 7),
            ContainerDemand(MAIN, 1, 20, 30),
            ContainerDemand(MAIN, 2, 20, 30),
        )
    )
    assert total(demand, 2, 500) == (1 + 4, 2 * 7 + 2 * 400, 5 + 90)
