"""Links between GPUs, read from the simulation and counted from plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated import simulated_node
from vgpu_agent.gpu import inventory
from vgpu_agent.gpu.capabilities import Capabilities
from vgpu_agent.gpu.inventory import NumaNodes
from vgpu_agent.gpu.nvml import Handle, Nvml
from vgpu_agent.gpu.return_codes import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED
from vgpu_agent.gpu.topology import Links, count_nvlinks, read_links
from vgpu_agent.model import Gpu, Link
from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.state import SimulatedNode

ADDRESSES = {"A": "0000:01:00.0", "B": "0000:02:00.0"}


def cards_of(node: SimulatedNode, nvml: Nvml) -> list[tuple[Gpu, Handle]]:
    """All GPUs, as a reading has them."""
    cards = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    ).cards
    return [(card.gpu, card.handle) for card in cards]


def links_of(node: SimulatedNode, nvml: Nvml) -> tuple[Links, list[str]]:
    """The links of all GPUs, and what could not be read."""
    return read_links(nvml, cards_of(node, nvml))


@contextlib.contextmanager
def opened(node: SimulatedNode) -> Iterator[Nvml]:
    """The driver of ``node``."""
    preload(node.directory)
    nvml = Nvml()
    nvml.load(Path("/"))
    try:
        yield nvml
    finally:
        nvml.shutdown()


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


def test_direct_links_are_no_links_to_switches(node: SimulatedNode, nvml: Nvml) -> None:
    """Four A100 are wired directly, with four links to each of three peers."""
    links, _ = links_of(node, nvml)
    assert {(link.nvlinks, link.switch_links) for link in links.values()} == {(4, 0)}


def test_links_to_switches_are_as_wide_as_the_narrower_gpu(tmp_path: Path) -> None:
    """vgpu-manager §3: eight H100 meet at NVSwitches with eighteen links each; on one of them six
    are down, and another one has none.
    """
    board = simulated_node(tmp_path, "H100-80GB-HBM3", 8)
    for link in range(6):
        board.state.gpus[2].links[link].up = 0
    for link in range(18):
        board.state.gpus[5].links[link].up = 0
    with opened(board) as nvml:
        links, troubles = links_of(board, nvml)
    assert troubles == []
    uuids = board.uuids
    assert links[uuids[0], uuids[1]] == Link(20, 0, 18)
    assert links[uuids[0], uuids[2]] == links[uuids[2], uuids[0]] == Link(40, 0, 12)
    assert {links[uuids[5], other].switch_links for other in uuids if other != uuids[5]} == {0}


def test_an_uneven_mesh_is_counted_pair_by_pair(tmp_path: Path) -> None:
    """Eight V100: one link to some peers, two to others, none to three."""
    board = simulated_node(tmp_path, "V100-SXM2-32GB", 8)
    with opened(board) as nvml:
        links, _ = links_of(board, nvml)
    first, *others = board.uuids
    assert [links[first, other].nvlinks for other in others] == [1, 1, 2, 2, 0, 0, 0]


def test_a_card_without_nvlink_is_quickly_asked_and_no_error(tmp_path: Path) -> None:
    """Every link is "not supported", which is normal for a card and not counted as an error."""
    board = simulated_node(tmp_path, "T4", 8)
    with opened(board) as nvml:
        cards_of(board, nvml)
        before = nvml.calls
        links, troubles = links_of(board, nvml)
        assert nvml.calls - before < 2 * 8 * 40
        assert nvml.errors == 0
    assert troubles == []
    assert {(link.nvlinks, link.switch_links) for link in links.values()} == {(0, 0)}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND])
@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
    ],
)
def test_a_link_that_a_card_does_not_have_is_skipped(
    tmp_path: Path, function: str, code: int
) -> None:
    """vgpu-manager §3: the links behind it count. A driver that does not tell the address of a
    switch may still tell that it is one.
    """
    board = simulated_node(tmp_path, "H100-80GB-HBM3", 8)
    board.fault(function, gpu=0, code=code, times=1)
    with opened(board) as nvml:
        links, troubles = links_of(board, nvml)
        assert nvml.errors == 0
    assert troubles == []
    left = 18 if function == "nvmlDeviceGetNvLinkRemotePciInfo" else 17
    assert links[board.uuids[0], board.uuids[1]].switch_links == left


def test_any_other_error_costs_the_links_of_that_gpu_and_says_so(tmp_path: Path) -> None:
    """The PCI distances of all pairs are known all the same."""
    board = simulated_node(tmp_path, "H100-80GB-HBM3", 8)
    board.fault("nvmlDeviceGetNvLinkState", gpu=0, code=999, times=1)
    with opened(board) as nvml:
        links, (trouble,) = links_of(board, nvml)
    assert trouble.startswith(f"NVLinks of {board.uuids[0]}: ")
    assert links[board.uuids[0], board.uuids[1]] == Link(20)
    assert links[board.uuids[1], board.uuids[2]].switch_links == 18
