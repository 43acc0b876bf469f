"""The rules of vgpu-manager for new pods: options, durations and the size of Nodes. Changes and
refusals are tested with the webhook (tests/webhook), as the API server sees them.
"""

from __future__ import annotations

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, container, entry, node_texts, pod
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.admission import AdmissionOptions, LargestNode
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.vgpu_manager.admission.family import build
from vgpu_agent.families.vgpu_manager.grace import seconds_of


def test_one_family_has_rules_for_new_pods() -> None:
    """The webhook finds it by its declaration."""
    (family,) = [family for family in FAMILIES if family.admission is not None]
    assert family.admission is not None
    changes = family.admission(AdmissionOptions(scheduler_name="s")).changes(pod(container()))
    assert changes.scheduler == "s"


def test_defaults_that_no_scheduler_knows_are_refused_at_the_start() -> None:
    """Otherwise each pod would be refused for what the operator has written."""
    options = AdmissionOptions(
        domain="No_Domain", node_policy="tight", device_policy="spread", topology_mode="nvlink"
    )
    with pytest.raises(ConfigError) as caught:
        build(options)
    domain, node, topology = caught.value.problems
    assert domain == '--domain: expected a DNS name in small letters, got "No_Domain"'
    assert node.startswith("--default-node-policy: 'tight' is unknown, expected binpack, ")
    assert topology.startswith("--default-topology-mode: 'nvlink' is unknown, expected numa, ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1m30s", 90),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("1500ms", 1.5),
        ("2us", 2e-6),
        ("2µs", 2e-6),
        ("+30s", 30),
        ("30000000000ns", 30),
        ("1.s", 1),
        ("1.0000000000001s", 1),
        ("9223372036s", 9223372036),
        ("0", -1),
        ("30", -1),
        ("s", -1),
        ("-5s", -1),
        ("++5s", -1),
        ("1m+5s", -1),
        ("+", -1),
        (".s", -1),
        ("30S", -1),
        ("٣s", -1),
        ("9223372037s", -1),  # more than Go can hold
        ("5s ", -1),
        ("", -1),
        ("1s" * 40, -1),
    ],
)
def test_durations_are_those_of_go(text: str, seconds: float) -> None:
    """vgpu-manager §4.1."""
    assert seconds_of(text) == pytest.approx(seconds)


def test_the_size_of_a_node_counts_cards_that_are_out_of_order() -> None:
    """They come back, so a pod may wait for them."""
    entries = [entry(0, healthy=False, memory=81920), entry(1), entry(2, mig=True)]
    found = build(AdmissionOptions()).size_of(node_texts(entries, memoryFactor=1024))
    assert found == LargestNode(gpus=3, memory_units=80)


@pytest.mark.parametrize("texts", [{}, {KEYS.node_register: "nonsense", KEYS.node_config: "{}"}])
def test_a_node_that_does_not_tell_has_no_size(texts: dict[str, str]) -> None:
    """It bounds nothing."""
    assert build(AdmissionOptions()).size_of(texts) == LargestNode()


def test_sizes_are_joined_by_the_larger_one() -> None:
    """Each amount is compared on its own, because the Node with the most GPUs need not have the
    largest GPU.
    """
    assert LargestNode(8, 10).joined(LargestNode(2, 80)) == LargestNode(8, 80)
    stated = LargestNode(8, is_limit=True)
    assert LargestNode(2, 80).joined(stated) == LargestNode(8, 80, is_limit=True)
    assert stated.joined(LargestNode(16, 80)) == LargestNode(16, 80, is_limit=True)
