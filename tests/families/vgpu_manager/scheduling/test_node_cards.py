"""The cards of a Node by its annotations, and Nodes whose texts are nonsense."""

from __future__ import annotations

import json

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, cards, entry, node_texts, uuid
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes.cards import Card, NodeCards, Unfit
from vgpu_agent.placement.nodes.reasons import Reason

GOLDEN = {
    "nvidia.com/node-config-info": (
        '{"deviceSplit":10,"coresScaling":1,"memoryFactor":1,"memoryScaling":1}'
    ),
    "nvidia.com/node-device-register": (
        '[{"id":0,"type":"NVIDIA A10","uuid":"GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28","core":100,'
        '"memory":24576,"number":10,"numa":0,"mig":false,"busId":"0000:3b:00.0","capability":8.6,'
        '"healthy":true},{"id":1,"type":"NVIDIA A10","uuid":"GPU-7f1c2a90-5b64-4d1e-9c3f-'
        '2f8e6d7b1a45","core":100,"memory":24576,"number":10,"numa":1,"mig":false,"busId":'
        '"0000:af:00.0","capability":8.6,"healthy":true}]'
    ),
    "nvidia.com/node-device-topology": (
        '[{"index":0,"links":{"1":[1]}},{"index":1,"links":{"0":[1]}}]'
    ),
}


def test_a_node_of_the_contract_is_read() -> None:
    """vgpu-manager §13.1."""
    found = read_cards(GOLDEN, 20, Keys())
    assert isinstance(found, NodeCards)
    assert found.hardware.cards == tuple(
        Card(None, "NVIDIA A10", 24576, 100, 10, numa) for numa in (0, 1)
    )
    assert found.hardware.links == ((0, 1, (1,)), (1, 0, (1,)))
    assert (found.hardware.memory_factor, found.hardware.is_oversold) == (1, False)
    assert found.uuids[1] == "GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45"


def test_nodes_of_one_kind_have_equal_hardware() -> None:
    """A result for one of them counts for all, whatever their cards' UUIDs are."""
    other = read_cards(node_texts([entry(card, uuid=uuid(7, card)) for card in range(2)]), 20, KEYS)
    assert isinstance(other, NodeCards)
    assert other.hardware == cards(2).hardware
    assert hash(other.hardware) == hash(cards(2).hardware)
    assert other.uuids != cards(2).uuids


def test_cards_that_must_not_be_given_are_kept_with_their_reason() -> None:
    """Pods may still run on them, so their numbers stay."""
    found = cards(3, changed={0: {"healthy": False}, 2: {"mig": True, "numa": -1}})
    assert [card.blocked for card in found.hardware.cards] == [
        Reason.DeviceUnhealthy,
        None,
        Reason.DeviceMIGEnabled,
    ]
    assert found.hardware.cards[2].numa is None


@pytest.mark.parametrize(
    ("register", "note"),
    [
        ("[]", "no card"),
        (json.dumps([entry(0), entry(2)]), "the cards' ids are 0, 2, not 0, 1, …"),
        (json.dumps([entry(0), entry(0)]), "the cards' ids are 0, 0, not 0, 1, …"),
        (json.dumps([entry(0), entry(1, uuid=uuid(0, 0))]), "is the UUID of two cards"),
        (json.dumps([entry(-1)]), "Expected `int` >= 0"),
        (json.dumps([entry(64)]), "Expected `int` <= 63"),
        (json.dumps([entry(0, memory=-1)]), "Expected `int` >= 0"),
        (json.dumps([entry(0, memory=2**60)]), "Expected `int` <= "),
        (json.dumps([entry(0, uuid="GPU_0")]), "Expected `str` matching regex"),
        (json.dumps([entry(0, uuid="GPU-0;x[")]), "Expected `str` matching regex"),
        (json.dumps([entry(0, uuid="GPU-0\n")]), "Expected `str` matching regex"),
        (json.dumps([entry(0, core=float("nan"))]), "JSON is malformed"),
        (json.dumps([{"id": 0}]), "missing required field `uuid`"),
        ("[" * 100_000, ""),
        ('{"a": 1}', "Expected `array`"),
        ("\x00", "JSON is malformed"),
    ],
)
def test_a_register_that_is_nonsense_makes_its_node_unfit(register: str, note: str) -> None:
    """A gap in the ids panics vgpu-manager's extender, and with it the whole cluster's scheduling
    (vgpu-manager §12.3).
    """
    found = read_cards({**node_texts([entry(0)]), KEYS.node_register: register}, 10, KEYS)
    assert isinstance(found, Unfit)
    assert found.reason is Reason.NodeBadVGPURegister
    assert note in found.note
    assert len(found.note) < 300


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", Reason.NodeNoVGPUConfig),
        ("nonsense", Reason.NodeBadVGPUConfig),
        ('{"deviceSplit":10,"memoryFactor":1,"memoryScaling":-1}', Reason.NodeBadVGPUConfig),
        ('{"deviceSplit":10,"memoryFactor":1,"memoryScaling":NaN}', Reason.NodeBadVGPUConfig),
        ('{"deviceSplit":0,"memoryFactor":1,"memoryScaling":1}', Reason.NodeNotVGPUEnabled),
        ('{"deviceSplit":10,"memoryFactor":0,"memoryScaling":1}', Reason.NodeBadMemoryFactor),
        ('{"deviceSplit":10,"memoryFactor":-5,"memoryScaling":1}', Reason.NodeBadMemoryFactor),
    ],
)
def test_a_configuration_that_is_nonsense_makes_its_node_unfit(config: str, reason: Reason) -> None:
    """Each has the reason of vgpu-manager §5.2."""
    found = read_cards({**node_texts([entry(0)]), KEYS.node_config: config}, 10, KEYS)
    assert isinstance(found, Unfit)
    assert found.reason is reason


def test_a_node_without_slots_or_register_is_not_enabled() -> None:
    """The kubelet sets the slots to 0 when no plugin answers, and annotations stay."""
    texts = node_texts([entry(0)])
    assert read_cards(texts, 0, KEYS) == Unfit(Reason.NodeNotVGPUEnabled)
    assert read_cards({}, 10, KEYS) == Unfit(Reason.NodeNoVGPURegister)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        '[{"index":0,"links":{"1":"x"}}]',
        '[{"index":0,"links":{"7":[5]}},{"index":9,"links":{"0":[5]}},{"index":-1,"links":{"0":[5]}}]',
        '[{"index":0,"links":{"0":[5],"x":[5],"99999999999":[5]}}]',
    ],
)
def test_links_that_are_nonsense_count_as_unknown(text: str) -> None:
    """They serve to choose well; the Node can still be used."""
    found = read_cards({**node_texts([entry(0), entry(1)]), KEYS.node_topology: text}, 20, KEYS)
    assert isinstance(found, NodeCards)
    assert found.hardware.links == ()
