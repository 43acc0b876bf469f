"""The texts of vgpu-manager's extender, as the simulated extender reads and writes them."""

from __future__ import annotations

import pytest

from tests.sim.vgpu_manager.objects import CONFIG, REGISTER, U0, U1, register
from vgpu_agent.sim.vgpu_manager.formats import (
    Claim,
    parse_config,
    parse_register,
    read_claims,
    write_claims,
)


def test_the_golden_claim_is_written_and_read_back() -> None:
    """vgpu-manager §13.3: the very text of the contract."""
    text = f"default[0_{U0}_10_1024]"
    assert write_claims({"default": [Claim(0, U0, 10, 1024)]}) == text
    assert read_claims(text) == {"default": (Claim(0, U0, 10, 1024),)}


def test_several_containers_and_cards() -> None:
    """vgpu-manager §4.2: the example there; cards are sorted by their index."""
    claims = {
        "init": (Claim(0, U0, 100, 24576),),
        "train": (Claim(1, U1, 50, 8192), Claim(0, U0, 50, 8192)),
    }
    text = f"init[0_{U0}_100_24576];train[0_{U0}_50_8192,1_{U1}_50_8192]"
    assert write_claims(claims) == text
    read = read_claims(f" {text} ;")
    assert read is not None
    assert write_claims(read) == text


@pytest.mark.parametrize("text", ["", ";", "a[0_x_1]", "a[0_x_1_2", "a[b_x_1_2]"])
def test_a_text_that_is_no_claim(text: str) -> None:
    """The extender treats it as none."""
    assert read_claims(text) is None


def test_the_golden_node() -> None:
    """vgpu-manager §13.1: what an extender makes of it."""
    cards = parse_register(REGISTER)
    assert cards is not None
    assert [(card.uuid, card.seats, card.memory, card.cores) for card in cards] == [
        (U0, 10, 24576, 100),
        (U1, 10, 24576, 100),
    ]
    config = parse_config(CONFIG)
    assert config is not None
    assert (config.split, config.memory_factor) == (10, 1)


@pytest.mark.parametrize("text", ["", "{}x", "[1]", '[{"id":0}]', register(id=5)])
def test_a_register_that_cannot_be_used(text: str) -> None:
    """A gap in the ids would end the real extender's process, so the whole node is left out."""
    assert parse_register(text) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"deviceSplit":"x","memoryFactor":1}'])
def test_a_configuration_that_cannot_be_used(text: str) -> None:
    """The node is left out."""
    assert parse_config(text) is None
