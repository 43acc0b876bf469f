"""The Node's desired state for vgpu-manager's schedulers (vgpu-manager §3)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.vgpu_manager.node import CORES, INVENTORY, MEMORY, U0, U1, cards
from tests.golden import golden_slices
from vgpu_agent.families.family import NodeView
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.node_state import (
    cleanup,
    config_text,
    desired_node,
    link_types,
    register_text,
    too_long_texts,
    topology_text,
)
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.model import DeviceRoom, Gpu, Health, Inventory, Link
from vgpu_agent.nodes import DesiredNode, Node

CONFIG = "nvidia.com/node-config-info"
REGISTER = "nvidia.com/node-device-register"
TOPOLOGY = "nvidia.com/node-device-topology"
HEARTBEAT = "nvidia.com/node-device-heartbeat"
REGISTERED = (
    '[{"id":0,"type":"NVIDIA A10","uuid":"GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28","core":100,'
    '"memory":24576,"number":10,"numa":0,"mig":false,"busId":"0000:3b:00.0","capability":8.6,'
    '"healthy":true},{"id":1,"type":"NVIDIA A10","uuid":"GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45",'
    '"core":100,"memory":24576,"number":10,"numa":1,"mig":false,"busId":"0000:af:00.0",'
    '"capability":8.6,"healthy":true}]'
)
OPTIONS = VgpuManagerOptions(topology=True)
GPU_NODE = Node("gpu-node-1")


def desired(
    inventory: Inventory = INVENTORY,
    *,
    trouble: dict[str, str] | None = None,
    offered: bool = True,
    node: Node = GPU_NODE,
    others: frozenset[str] = frozenset(),
    **options: object,
) -> DesiredNode:
    """The desired Node; ``trouble`` is why a GPU cannot be had, ``others`` what other families
    offer.
    """
    rooms = tuple(
        DeviceRoom(gpu.uuid, (trouble or {}).get(gpu.uuid, ""))
        for gpu in inventory.gpus
        if not gpu.mig_enabled
    )
    chosen = msgspec.structs.replace(OPTIONS, **options)
    view = NodeView(
        node,
        inventory,
        {chosen.keys.number: rooms} if offered else {},
        {},
        0.0,
        offered=others,
    )
    return desired_node(view, chosen)


def entries(node: DesiredNode) -> list[dict[str, object]]:
    """The register annotation as a scheduler reads it, which ends at a gap."""
    text = node.annotations[REGISTER]
    assert text is not None
    found: list[dict[str, object]] = json.loads(text)
    assert [entry["id"] for entry in found] == list(range(len(found)))
    return found


def changed(place: int, **facts: object) -> Inventory:
    """The golden node with one GPU changed."""
    gpus = list(INVENTORY.gpus)
    gpus[place] = msgspec.structs.replace(gpus[place], **facts)
    return msgspec.structs.replace(INVENTORY, gpus=tuple(gpus))


def test_the_golden_node() -> None:
    """``vgpu-manager:§13.1``: byte for byte, annotations and labels."""
    node = desired()
    assert node.annotations == {
        CONFIG: '{"deviceSplit":10,"coresScaling":1,"memoryFactor":1,"memoryScaling":1}',
        REGISTER: REGISTERED,
        TOPOLOGY: '[{"index":0,"links":{"1":[1]}},{"index":1,"links":{"0":[1]}}]',
        HEARTBEAT: None,
    }
    assert len(REGISTERED) == 387
    assert node.labels == {
        "nvidia.com/node-driver-version": "570.86.10",
        "nvidia.com/node-cuda-version": "12.8",
        "nvidia.com/node-cuda-major": "12",
        "nvidia.com/node-cuda-minor": "8",
    }


def test_four_nvlinks_behind_one_switch() -> None:
    """``vgpu-manager:§13.1``: the bus and the links, in this order."""
    link = Link(10, 4)
    inventory = msgspec.structs.replace(INVENTORY, links={(U0, U1): link, (U1, U0): link})
    assert topology_text(inventory) == (
        '[{"index":0,"links":{"1":[5,10]}},{"index":1,"links":{"0":[5,10]}}]'
    )


def test_scaled_memory() -> None:
    """``vgpu-manager:§13.1``: twice the memory is 49152."""
    node = desired(memory_scaling=2.0)
    assert node.annotations[REGISTER] == REGISTERED.replace("24576", "49152")
    assert node.annotations[CONFIG] == (
        '{"deviceSplit":10,"coresScaling":1,"memoryFactor":1,"memoryScaling":2}'
    )


@pytest.mark.parametrize(
    ("scaling", "text"),
    [(1.0, "1"), (1.5, "1.5"), (0.1, "0.1"), (100.0, "100"), (1 / 3, "0.3333333333333333")],
)
def test_fractions_are_printed_as_by_go(scaling: float, text: str) -> None:
    """The shortest text that reads back the same, and none for a whole number."""
    options = msgspec.structs.replace(OPTIONS, cores_scaling=scaling)
    assert f'"coresScaling":{text},' in config_text(options)


@pytest.mark.parametrize(
    ("capability", "text"), [((8, 6), "8.6"), ((9, 0), "9"), ((12, 1), "12.1"), ((0, 0), "0")]
)
def test_the_compute_capability_is_a_number(capability: tuple[int, int], text: str) -> None:
    """``vgpu-manager:D33``: as a float32 is printed, without a fraction where there is none."""
    register = desired(changed(0, compute_capability=capability)).annotations[REGISTER]
    assert f'"capability":{text},"healthy"' in (register or "")


def test_memory_is_rounded_down_after_scaling() -> None:
    """An odd card: 15109 MiB, one and a half times."""
    assert entries(desired(changed(0, memory_mib=15109), memory_scaling=1.5))[0]["memory"] == 22663


def test_a_card_without_a_numa_node() -> None:
    """``vgpu-manager §3``: −1."""
    assert entries(desired(changed(1, numa_node=None)))[1]["numa"] == -1


def test_names_are_escaped_as_by_go() -> None:
    """A product name with a character that Go escapes keeps the text the same."""
    register = desired(changed(0, name='A<&>"é')).annotations[REGISTER]
    assert r'"type":"A\u003c\u0026\u003e\"é"' in (register or "")


@pytest.mark.parametrize(
    "trouble",
    ["XID 79", "the GPU serves nvidia until its last share is returned", "cordoned: maintenance"],
)
def test_a_card_that_cannot_be_had_is_unhealthy_until_it_can(trouble: str) -> None:
    """``vgpu-manager:D9``: the replaced plugin's never recover. One that serves another family
    attracts no pods either.
    """
    assert [entry["healthy"] for entry in entries(desired(trouble={U0: trouble}))] == [False, True]
    assert desired().annotations[REGISTER] == REGISTERED


def test_nothing_is_healthy_while_nothing_is_offered() -> None:
    """Without a library that limits, say: the kubelet has no ids, and schedulers must see it."""
    assert [entry["healthy"] for entry in entries(desired(offered=False))] == [False, False]


@pytest.mark.parametrize(
    "excluded", [{"excluded_uuids": frozenset({U0})}, {"excluded_indices": frozenset({0})}]
)
def test_excluded_cards_are_unhealthy(excluded: dict[str, Any]) -> None:
    """``vgpu-manager §3``: every number must be there."""
    assert [entry["healthy"] for entry in entries(desired(**excluded))] == [False, True]


def test_a_divided_card_is_marked() -> None:
    """``vgpu-manager §2.3``: it stays in the list, as healthy as it is, and is refused by another
    field.
    """
    divided = changed(0, mig_enabled=True, mig_instances=golden_slices())
    assert [(entry["mig"], entry["healthy"]) for entry in entries(desired(divided))] == [
        (True, True),
        (False, True),
    ]
    ill = changed(0, mig_enabled=True, health=Health(ok=False, reason="XID 79"))
    assert [entry["healthy"] for entry in entries(desired(ill))] == [False, True]


def test_a_lost_card_keeps_its_place() -> None:
    """NVML moves the numbers up; a claim in a pod names the number of before."""
    lost = msgspec.structs.replace(INVENTORY.gpus[0], present=False)
    moved = msgspec.structs.replace(INVENTORY.gpus[1], index=0)
    inventory = msgspec.structs.replace(INVENTORY, gpus=(lost, moved))
    found = entries(desired(inventory, trouble={U0: "the GPU does not answer"}))
    assert [(entry["uuid"], entry["healthy"]) for entry in found] == [(U0, False), (U1, True)]


def test_a_card_that_never_answered_leaves_no_gap() -> None:
    """``vgpu-manager:D11``: a gap ends the whole scheduler. What stands for the card can be given
    to nobody, and has a UUID of its own.
    """
    inventory = msgspec.structs.replace(
        INVENTORY,
        gpus=(
            msgspec.structs.replace(INVENTORY.gpus[0], index=1),
            msgspec.structs.replace(INVENTORY.gpus[1], index=3),
        ),
        failures=("0: no answer", "2: GPU is lost", "4: GPU is lost"),
    )
    found = entries(desired(inventory))
    assert [(entry["uuid"], entry["memory"], entry["healthy"]) for entry in found] == [
        ("GPU-00000000-0000-0000-0000-000000000000", 0, False),
        (U0, 24576, True),
        ("GPU-00000000-0000-0000-0000-000000000002", 0, False),
        (U1, 24576, True),
        ("GPU-00000000-0000-0000-0000-000000000004", 0, False),
    ]
    assert topology_text(inventory) == (
        '[{"index":1,"links":{"3":[1]}},{"index":3,"links":{"1":[1]}}]'
    )


def test_more_cards_than_the_library_knows() -> None:
    """``vgpu-manager:D32``: they are published, and unhealthy."""
    found = entries(desired(cards(18)))
    assert [entry["healthy"] for entry in found] == [True] * 16 + [False] * 2


@pytest.mark.parametrize(
    ("link", "types"),
    [
        (Link(0), [6]),
        (Link(10), [5]),
        (Link(20), [4]),
        (Link(30), [3]),
        (Link(40), [2]),
        (Link(50), [1]),
        (Link(50, 1), [1, 7]),
        (Link(20, 18), [4, 24]),
        (Link(20, 36), [4, 24]),
        (Link(50, 0, 12), [1, 18]),
        (Link(50, 2, 12), [1, 8]),
        (Link(99), []),
    ],
)
def test_link_types(link: Link, types: list[int]) -> None:
    """``vgpu-manager §3``: direct links before those through switches, at most 18 of them."""
    assert link_types(link) == types


def test_links_are_sorted_as_by_go() -> None:
    """Keys of a map are texts: 10 comes before 2."""
    inventory = cards(11)
    pairs = {(one.uuid, two.uuid): Link(20) for one in inventory.gpus for two in inventory.gpus}
    text = topology_text(msgspec.structs.replace(inventory, links=pairs))
    assert list(json.loads(text)[0]["links"]) == ["1", "10", *map(str, range(2, 10))]


def test_without_its_gate_there_is_no_topology() -> None:
    """And one of before goes."""
    assert desired(topology=False).annotations[TOPOLOGY] is None


def test_another_domain_keeps_the_labels() -> None:
    """``vgpu-manager §1.2``: ``--domain`` replaces all but the version labels."""
    node = desired(keys=Keys("example.com"))
    assert set(node.annotations) == {
        key.replace("nvidia.com", "example.com") for key in (CONFIG, REGISTER, TOPOLOGY, HEARTBEAT)
    }
    assert node.labels == desired().labels


def test_labels_that_the_api_server_would_refuse_are_left_out() -> None:
    """One label that is none would cost the others."""
    odd = msgspec.structs.replace(INVENTORY, driver_version="57 é", cuda_version="?")
    assert set(desired(odd).labels.values()) == {None}


def test_nothing_is_touched_before_the_driver_has_answered() -> None:
    """The values from before the agent's restart are the best ones until then."""
    assert desired(Inventory()) == DesiredNode()


def test_a_node_whose_gpus_are_gone_is_no_gpu_node() -> None:
    """An empty list would be an error for schedulers."""
    left = desired(Inventory(2))
    assert left.annotations == cleanup(OPTIONS).annotations
    assert left.labels == cleanup(OPTIONS).labels


def test_operators_keep_what_is_theirs() -> None:
    """``vgpu-manager:D30``: at the agent's removal all else is taken back. The rails and the
    compute policy are never written or taken away.
    """
    left = cleanup(OPTIONS)
    assert left.annotations == dict.fromkeys((CONFIG, REGISTER, TOPOLOGY, HEARTBEAT))
    assert set(left.labels.values()) == {None}
    assert len(left.labels) == 4
    keys = Keys()
    operators = {keys.node_gpu_domain, keys.compute_policy}
    assert operators.isdisjoint(left.annotations)
    assert operators.isdisjoint(desired().annotations)


def test_a_quota_whose_gate_is_off_leaves_the_node() -> None:
    """``vgpu-manager §2.2``: the kubelet would keep it at 0 for ever. Slots stay: a pod that asks
    for a resource that its Node does not have is started without it.
    """
    assert desired().capacity == {CORES: None, MEMORY: None}
    assert desired(offer_cores=True).capacity == {MEMORY: None}
    assert desired(offer_cores=True, offer_memory=True).capacity == {}
    assert desired(Inventory(2)).capacity == {CORES: None, MEMORY: None}
    assert desired(keys=Keys("example.com")).capacity == {
        "example.com/vgpu-cores": None,
        "example.com/vgpu-memory": None,
    }


def test_a_quota_that_is_too_long_to_offer_leaves_the_node_as_well() -> None:
    """The kubelet would keep the count from before the memory was scaled."""
    assert desired(cards(8), offer_cores=True, offer_memory=True).capacity == {MEMORY: None}


def test_kinds_of_instances_that_are_gone_leave_the_node() -> None:
    """Only at 0, and none that a family of this node offers: another plugin may have the name."""
    counts = {
        "nvidia.com/mig-1g.10gb": "0",
        "nvidia.com/mig-2g.20gb": "0",
        "nvidia.com/mig-3g.40gb": "7",
        "nvidia.com/gpu": "0",
        "example.com/mig-1g.10gb": "0",
    }
    node = Node("gpu-node-1", capacity=counts, allocatable=counts)
    gone = desired(node=node, others=frozenset({"nvidia.com/mig-2g.20gb"})).capacity
    assert gone == {"nvidia.com/mig-1g.10gb": None, CORES: None, MEMORY: None}
    draining = Node(
        "gpu-node-1",
        capacity={"nvidia.com/mig-1g.10gb": "3"},
        allocatable={"nvidia.com/mig-1g.10gb": "0"},
    )
    assert desired(node=draining).capacity == {CORES: None, MEMORY: None}


def test_texts_stay_within_what_a_node_may_have() -> None:
    """256 KiB for all annotations together: one that would be refused is named instead."""
    inventory = cards(600)
    node = desired(inventory)
    assert node.annotations[REGISTER] is None
    assert node.annotations[CONFIG] is not None
    (sentence,) = too_long_texts(inventory, OPTIONS)
    assert sentence.startswith(f"{REGISTER} is not written: it would have more than 98304 bytes")
    assert too_long_texts(cards(64), OPTIONS) == too_long_texts(Inventory(1), OPTIONS) == ()


@given(
    st.lists(
        st.tuples(st.text(max_size=96), st.integers(0, 10**6), st.integers(0, 3), st.booleans()),
        max_size=20,
    ),
    st.sets(st.integers(0, 25)),
)
def test_any_node_can_be_read_by_a_scheduler(
    facts: list[tuple[str, int, int, bool]], excluded: set[int]
) -> None:
    """Whatever the driver says: numbers without a gap, and UUIDs that differ."""
    place, gpus = 0, []
    for number, (name, memory, gap, mig) in enumerate(facts):
        place += gap
        gpus.append(Gpu(f"GPU-{number}", place, number, name, memory, mig_enabled=mig))
        place += 1
    inventory = Inventory(1, tuple(gpus))
    if not gpus:
        return
    found = entries(desired(inventory, excluded_indices=frozenset(excluded)))
    assert len({entry["uuid"] for entry in found}) == len(found) == place
    assert all(entry["healthy"] is False for entry in found if entry["id"] in excluded)
    healthy = dict.fromkeys(inventory.devices, False)
    assert len(register_text(inventory, OPTIONS, healthy=healthy).encode()) < 96 * 1024
