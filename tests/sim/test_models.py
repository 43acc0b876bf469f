"""The models' data: sane, so that no test uses a card that cannot exist."""

from __future__ import annotations

import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import links
from vgpu_agent.sim.layout import LINKS, PROFILES
from vgpu_agent.sim.models import Model, model_of, models

EVERY = pytest.mark.parametrize("model", models().values(), ids=lambda model: model.key)


def test_the_models_that_were_promised() -> None:
    """T4 to B200, and one whose MIG profiles come with every suffix."""
    assert list(models()) == [
        "T4",
        "V100-SXM2-32GB",
        "A10",
        "A100-SXM4-40GB",
        "A100-SXM4-80GB",
        "H100-80GB-HBM3",
        "H200-141GB",
        "L40S",
        "B200",
        "RTX-PRO-6000",
    ]


def test_a_model_is_found_in_any_case() -> None:
    """People type."""
    assert model_of("a100-sxm4-80gb").key == "A100-SXM4-80GB"


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    """One sentence."""
    with pytest.raises(
        SimulationError, match="unknown GPU model 'RTX 3'; there are T4, V100-SXM2-32GB, A10"
    ):
        model_of("RTX 3")


@EVERY
def test_limits_are_in_order(model: Model) -> None:
    """Idle below limit, slowdown below shutdown, reserved below total."""
    assert model.power_watts["idle"] < model.power_watts["minimum"] <= model.power_watts["maximum"]
    assert (
        model.temperature_limits["gpu_max"]
        < model.temperature_limits["slowdown"]
        < model.temperature_limits["shutdown"]
    )
    assert 0 < model.reserved_mib < model.memory_mib // 10
    assert all(idle <= most for idle, most in zip(model.clocks_idle, model.clocks_max, strict=True))


@EVERY
def test_row_remapping_came_with_ampere(model: Model) -> None:
    """NVML_DEVICE_ARCH_AMPERE is 7."""
    assert model.row_remapping == (model.architecture >= 7)


@EVERY
def test_mig_tables_fit_the_card(model: Model) -> None:
    """A profile's instances together have no more than the card,
    and its places are as many as its instances need.
    """
    for profile in model.mig:
        assert profile.profile < PROFILES
        assert profile.instances <= len(profile.starts)
        assert profile.instances * profile.memory_mib <= model.memory_mib
        assert profile.instances * profile.multiprocessors <= model.multiprocessors
        assert profile.instances * profile.slices <= 7
        assert max(profile.starts) + profile.size <= 8
    assert len({profile.id for profile in model.mig}) == len(model.mig)


@EVERY
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 5, 8, 16])
def test_wiring_is_mutual_and_within_the_links_there_are(model: Model, gpus: int) -> None:
    """This holds for any number of GPUs."""
    wires = links.wires(model, gpus)

    assert len(wires) == gpus
    assert all(len(row) <= model.nvlink_count <= LINKS for row in wires)
    between = [
        [sum(wire == links.Wire(links.TO_GPU, peer) for wire in row) for peer in range(gpus)]
        for row in wires
    ]
    assert between == [list(column) for column in zip(*between, strict=True)]


@pytest.mark.parametrize("gpus", [8, 16])
def test_switches_are_not_mistaken_for_gpus(gpus: int) -> None:
    """No two devices of a node share a PCI bus."""
    buses = [links.bus_of(gpu) for gpu in range(gpus)]
    switches = {wire.peer for row in links.wires(model_of("A100-SXM4-80GB"), gpus) for wire in row}

    assert len(set(buses)) == gpus
    assert max(buses) <= 0xFF
    assert switches.isdisjoint(buses)
