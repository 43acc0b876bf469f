"""The node's offer to the kubelet (volcano-vgpu §1)."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import constants
from tests.families.volcano_vgpu.golden import (
    CORES,
    INVENTORY,
    MEMORY,
    NUMBER,
    PERCENTAGE,
    U0,
    U1,
    family,
)
from tests.patience import quickest_call
from tests.settings import settings as settings_of
from vgpu_agent.device_ids import NumberedIds, list_size_bytes
from vgpu_agent.errors import ConfigError, RequestRefusedError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.families.volcano_vgpu.files import Overlay
from vgpu_agent.families.volcano_vgpu.requests import Names
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, Gpu, Inventory, Resource

BUDGET = 3_670_016


def _offered(inventory: Inventory = INVENTORY, **options: object) -> dict[str, Resource]:
    return {resource.name: resource for resource in family(**options).resources(inventory)}


def _node(count: int, memory_mib: int) -> Inventory:
    return Inventory(
        1,
        tuple(
            Gpu(f"GPU-{number:08d}-aaaa-bbbb-cccc-000000000000", number, number, "H", memory_mib)
            for number in range(count)
        ),
    )


def test_g2_ids_of_the_three_resources() -> None:
    """``volcano-vgpu:G2``: 20, 200 and 49152 ids, as kubelet's checkpoint may hold them already."""
    offered = _offered()
    assert [(name, len(resource.ids)) for name, resource in offered.items()] == [
        (NUMBER, 20),
        (MEMORY, 49152),
        (CORES, 200),
    ]
    assert [entry.id for entry in offered[NUMBER].ids] == [
        f"{uuid}-{number}" for uuid in (U0, U1) for number in range(10)
    ]
    assert [offered[CORES].ids[place].id for place in (0, 99, 100)] == [
        f"{U0}-core-0",
        f"{U0}-core-99",
        f"{U1}-core-0",
    ]
    assert [offered[MEMORY].ids[place].id for place in (0, 24575, -1)] == [
        f"{U0}-memory-0",
        f"{U0}-memory-24575",
        f"{U1}-memory-24575",
    ]
    assert {entry.numa_node for resource in offered.values() for entry in resource.ids} == {None}


def test_only_the_number_is_booked_and_answered() -> None:
    """``volcano-vgpu:G9``, ``volcano-vgpu:D10``: memory and cores are there to be counted, and
    kubelet is never asked to ask about any.
    """
    offered = _offered()
    number = offered[NUMBER]
    assert (number.decided_by, number.pre_start_required, number.holders_per_device) == (
        Decider.POD,
        True,
        10,
    )
    for name in (MEMORY, CORES):
        assert (offered[name].decided_by, offered[name].pre_start_required) == (
            Decider.NOBODY,
            False,
        )
    assert not any(resource.offers_preference for resource in offered.values())


def test_cards_are_counted_by_minor_number() -> None:
    """NVML's order may differ; schedulers count by minor."""
    swapped = Inventory(
        1,
        (
            msgspec.structs.replace(INVENTORY.gpus[1], index=0),
            msgspec.structs.replace(INVENTORY.gpus[0], index=1),
        ),
    )
    assert [entry.device for entry in _offered(swapped)[NUMBER].ids][:1] == [U0]


def test_memory_and_core_scaling_have_their_effect() -> None:
    """``volcano-vgpu:D8``: more ids, and a ledger that books as much."""
    offered = _offered(memory_scaling=1.8, cores_scaling=1.5, factor=2)
    assert len(offered[MEMORY].ids) == 2 * (44236 // 2)
    assert len(offered[CORES].ids) == 300
    assert (offered[NUMBER].memory_scaling, offered[NUMBER].cores_scaling) == (1.8, 1.5)


def test_the_percentage_is_a_fourth_resource_where_it_is_asked_for() -> None:
    """``volcano-vgpu:D8``: without it, schedulers from 1.13 leave such pods pending."""
    resource = _offered(offer_percentage=True)[PERCENTAGE]
    assert len(resource.ids) == 2 * 10 * 100
    assert resource.decided_by is Decider.NOBODY


def test_no_id_is_offered_twice() -> None:
    """The kubelet mixes the health of equal ids up. The ledger refuses them."""
    offered = family(offer_percentage=True, split=100, cores_scaling=12.0).resources(INVENTORY)
    ledger = Ledger()
    ledger.offer(offered)
    assert [resource.name for resource in ledger.resources] == sorted(
        resource.name for resource in offered
    )


def test_hidden_cards_and_cards_in_mig_mode_are_not_offered() -> None:
    """``filterdevices`` by UUID or index. A GPU
    that is cut into instances runs nothing as a whole.
    """
    assert {entry.device for entry in _offered(hidden_uuids=frozenset({U0}))[NUMBER].ids} == {U1}
    assert {entry.device for entry in _offered(hidden_indices=frozenset({1}))[NUMBER].ids} == {U0}
    split = Inventory(
        1, (INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], mig_enabled=True))
    )
    assert {entry.device for entry in _offered(split)[NUMBER].ids} == {U0}


def test_a_card_stays_hidden_when_one_before_it_is_lost() -> None:
    """NVML moves the indices up. It is still the same card that was to be left alone."""
    first, second = INVENTORY.gpus
    lost = Inventory(
        1, (msgspec.structs.replace(first, present=False), msgspec.structs.replace(second, index=0))
    )
    assert {
        entry.device for entry in _offered(lost, hidden_indices=frozenset({1}))[NUMBER].ids
    } == {U0}


def test_a_node_without_cards_offers_nothing() -> None:
    """No GPU, or none to share."""
    assert _offered(Inventory()) == {}
    assert _offered(hidden_uuids=frozenset({U0, U1})) == {}


@pytest.mark.parametrize(
    ("count", "memory_mib", "factor"),
    [
        (2, 24576, 1),
        (1, 53000, 1),
        (1, 81920, 2),
        (2, 32768, 2),
        (8, 81920, 16),
        (8, 144384, 32),
        (16, 196608, 64),
    ],
)
def test_the_unit_grows_until_the_list_fits(count: int, memory_mib: int, factor: int) -> None:
    """``volcano-vgpu:D9``: 8 × 80 GB work out of the box. The unit is the smallest power of two
    that fits, as kubelet measures it.
    """
    inventory = _node(count, memory_mib)
    memory = _offered(inventory, factor=0)[MEMORY]
    assert len(memory.ids) == count * (memory_mib // factor)
    assert isinstance(memory.ids, NumberedIds)
    assert list_size_bytes(memory.ids) <= BUDGET
    with pytest.raises(ConfigError) if factor > 1 else contextlib.nullcontext():
        family(factor=max(1, factor // 2)).resources(inventory)


def test_a_unit_that_is_too_small_is_refused_with_the_one_that_fits() -> None:
    """``volcano-vgpu:D9``, kubelet V13: at start, with the setting's name."""
    with pytest.raises(ConfigError) as caught:
        family(factor=2).resources(_node(8, 81920))
    (problem,) = caught.value.problems
    assert problem.startswith("volcano.sh/vgpu-memory: 327680 ids make a device list of ")
    assert problem.endswith("volcanoVgpu.gpuMemoryFactor: 16 would fit, or 0 to have it chosen")


def test_the_remedy_names_the_place_that_counts() -> None:
    """``volcano-vgpu:D9``: the shipped ConfigMap says 1 and beats the agent's own setting,
    so that setting would be no remedy.
    """
    with pytest.raises(ConfigError) as caught:
        family(factor=2, set_in=(("gpuMemoryFactor", "volcano-vgpu-device-config"),)).resources(
            _node(8, 81920)
        )
    assert caught.value.problems[0].endswith(
        "gpuMemoryFactor in volcano-vgpu-device-config: 16 would fit, or 0 to have it chosen"
    )


def test_other_lists_are_measured_as_well() -> None:
    """Too much scaling is a mistake of the configuration, not a list that kubelet drops."""
    with pytest.raises(ConfigError) as caught:
        family(cores_scaling=100.0, split=1000, offer_percentage=True, factor=0).resources(
            _node(16, 8192)
        )
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [CORES, PERCENTAGE]
    assert "volcanoVgpu.deviceCoreScaling: choose less" in caught.value.problems[0]


def test_a_fleet_of_cards_is_offered_in_no_time() -> None:
    """The ids are not made, and the unit is found by sums."""
    assert _offered(_node(16, 196608), factor=0)
    assert quickest_call(lambda: _offered(_node(16, 196608), factor=0), within_seconds=0.1) < 0.1


@given(count=st.integers(1, 4), memory_mib=st.integers(0, 3000), budget=st.integers(4096, 300_000))
def test_whatever_the_node_the_chosen_unit_fits(count: int, memory_mib: int, budget: int) -> None:
    """The same inventory gives the same unit, and the list is never too long."""
    inventory = _node(count, memory_mib)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            constants.use(monkeypatch, {constants.MESSAGE_BUDGET: budget})
            memory = _offered(inventory, factor=0, split=1, cores_scaling=0.1)[MEMORY]
    except ConfigError:
        assert budget < 4 * 10 * 70  # not even the ten ids of the cores
        return
    assert isinstance(memory.ids, NumberedIds)
    assert list_size_bytes(memory.ids) <= budget


def test_more_gpus_than_there_are_is_refused_at_once() -> None:
    """Each must be another card, so it could never be had.
    Other resources are no request for cards.
    """
    of, offered = family(), _offered()
    with pytest.raises(
        RequestRefusedError,
        match=(
            "3 are asked for, and each must be another GPU; this node shares 2; ask for at most 2"
        ),
    ):
        of.check(offered[NUMBER], [f"{U0}-{number}" for number in range(3)])
    of.check(offered[NUMBER], [f"{U0}-0", f"{U0}-1"])
    of.check(offered[MEMORY], [f"{U0}-memory-{number}" for number in range(3000)])


def test_records_of_todays_and_of_default_names_are_ours() -> None:
    """The kubelet's checkpoint may be from before the names were changed."""
    of = family(names=Names(number="volcano.sh/gpu-share"))
    assert [of.owns(name) for name in ("volcano.sh/gpu-share", NUMBER, MEMORY, PERCENTAGE)] == [
        Ownership.CERTAIN
    ] * 4
    assert not of.owns("volcano.sh/gpu-memory")


def test_the_settings_are_the_options() -> None:
    """Defaults of the settings, and the GPUs that the node's own file hides."""
    options = VolcanoVgpuOptions.from_settings(
        settings_of(), VolcanoVgpu(), lists=ListOptions(id_strategy="index")
    )
    assert options == VolcanoVgpuOptions(
        lists=ListOptions(id_strategy="index", enabled=("gdrcopy", "gds", "mofed"))
    )
    hiding = VolcanoVgpuOptions.from_settings(
        settings_of(),
        VolcanoVgpu(),
        lists=ListOptions(),
        node_config=Overlay({}, frozenset({U0}), frozenset({3})),
    )
    assert hiding.hidden_uuids == {U0}
    assert hiding.hidden_indices == {3}
    assert VolcanoVgpuFamily(options, NoIsolation()).name == "volcano-vgpu"
