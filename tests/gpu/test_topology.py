"""Links between GPUs, read from the simulation and counted from plain values."""

from __future__ import annotations

from vgpu_agent.gpu import inventory
from vgpu_agent.gpu.capabilities import Capabilities
from vgpu_agent.gpu.inventory import NumaNodes
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.gpu.topology import count_nvlinks, read_links
from vgpu_agent.sim.state import SimulatedNode

ADDRESSES = {"A": "0000:01:00.0", "B": "0000:02:00.0"}


def test_every_pair_is_read_in_both_directions(node: SimulatedNode, nvml: Nvml) -> None:
    """Four GPUs make twelve entries; GPUs of one NUMA node are closer than those across."""
    cards = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    ).cards

    links, troubles = read_links(nvml, [(card.gpu, card.handle) for card in cards])

    assert troubles == []
    assert len(links) == 12
    assert links[node.uuids[0], node.uuids[1]] == links[node.uuids[1], node.uuids[0]]
    assert links[node.uuids[0], node.uuids[1]].pci < links[node.uuids[0], node.uuids[2]].pci == 50
    assert links[node.uuids[0], node.uuids[3]].nvlinks > 0


def test_a_gpu_that_is_lost_meanwhile_costs_only_its_own_pairs(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """nvidia D4: topology never fails for the others."""
    cards = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    ).cards
    node.lose(3)

    links, troubles = read_links(nvml, [(card.gpu, card.handle) for card in cards])

    assert (node.uuids[0], node.uuids[1]) in links
    assert (node.uuids[1], node.uuids[2]) in links
    assert links[node.uuids[0], node.uuids[1]].nvlinks > 0
    assert any(node.uuids[3] in trouble for trouble in troubles)


def test_each_link_counts_once_though_both_ends_report_it() -> None:
    """Two cards with four links between them have four links."""
    assert (
        count_nvlinks(ADDRESSES, {"A": [ADDRESSES["B"]] * 4, "B": [ADDRESSES["A"]] * 4})[
            frozenset("AB")
        ]
        == 4
    )


def test_an_end_that_does_not_answer_is_covered_by_the_other() -> None:
    """One card is lost while it is read. The other one knows how many links there are."""
    assert count_nvlinks(ADDRESSES, {"A": [ADDRESSES["B"]] * 4})[frozenset("AB")] == 4


def test_switches_are_no_peers() -> None:
    """Links that end at a switch are not direct links between GPUs."""
    assert count_nvlinks(ADDRESSES, {"A": ["0000:c4:00.0"] * 12})[frozenset("AB")] == 0
