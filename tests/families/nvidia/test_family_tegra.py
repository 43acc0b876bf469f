"""The GPU of a Tegra processor under NVIDIA's names, and what cannot be had of it (nvidia §4, §6,
§7, §10).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.families.nvidia.parts import cautions, iktos, offered, only_resource, refused, shared_by
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions, Pattern, SharedEntry
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import INTEGRATED, Gpu, Inventory, Share, SharingMode

GPU = "nvidia.com/gpu"
NODE = Inventory(
    version=1, gpus=(Gpu(INTEGRATED, index=0, minor=-1, name=INTEGRATED, memory_mib=0),)
)


def told(options: NvidiaOptions, *ids: str) -> dict[str, str]:
    """The variables that a container gets."""
    return dict(NvidiaFamily(options).edits(only_resource(options, NODE), ids, NODE).environment)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (NvidiaOptions(), {GPU: ["tegra"]}),
        (shared_by(3), {GPU: ["tegra::0", "tegra::1", "tegra::2"]}),
        (
            shared_by(2, published="nvidia.com/gpu.shared"),
            {"nvidia.com/gpu.shared": ["tegra::0", "tegra::1"]},
        ),
        (
            iktos(("gpu", "sharedgpu", 2)),
            {"nvidia.com/sharedgpu": ["tegra-replica-0", "tegra-replica-1"]},
        ),
        (
            NvidiaOptions(gpu_patterns=(Pattern("teg*", "nvidia.com/igpu"),)),
            {"nvidia.com/igpu": ["tegra"]},
        ),
        (
            NvidiaOptions(shared=(SharedEntry(GPU, 2, "nvidia.com/half", ("0",)),)),
            {"nvidia.com/half": ["tegra::0", "tegra::1"]},
        ),
    ],
)
def test_the_one_gpu_has_the_id_tegra(options: NvidiaOptions, ids: dict[str, list[str]]) -> None:
    """nvidia §4: id ``tegra``, replicas behind ``::``;
    renames and patterns, by the name ``tegra``, are those of any GPU.
    """
    assert offered(options, NODE) == ids
    assert (refused(options, NODE), cautions(options, NODE)) == ((), ())


def test_its_ids_have_no_numa_node_and_are_healthy() -> None:
    """nvidia §4 and §10: no topology field, no health of its own,
    so kubelet counts them and nothing takes them away.
    """
    ledger = Ledger()
    ledger.observe(NODE)
    ledger.offer([only_resource(shared_by(2), NODE)])
    assert [
        (listed.id.id, listed.id.numa_node, listed.healthy) for listed in ledger.listing(GPU)
    ] == [
        ("tegra::0", None, True),
        ("tegra::1", None, True),
    ]


@pytest.mark.parametrize(
    ("lists", "variables"),
    [
        ({}, {"NVIDIA_VISIBLE_DEVICES": "tegra"}),
        ({"id_strategy": "index"}, {"NVIDIA_VISIBLE_DEVICES": "0"}),
        (
            {"strategies": ("volume-mounts",)},
            {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
        ),
    ],
)
def test_containers_are_told_of_it_as_of_any_gpu(
    lists: dict[str, Any], variables: dict[str, str]
) -> None:
    """nvidia §7: the base id once, also behind two replicas, or its index."""
    options = shared_by(4, lists=ListOptions(**lists))
    assert told(options, "tegra::2", "tegra::0") == variables


def test_it_has_no_device_node_of_its_own() -> None:
    """nvidia §4: no paths. With device specs only the control nodes that are there are named."""
    options = NvidiaOptions(
        lists=ListOptions(pass_device_specs=True, control_nodes=("/dev/nvidiactl",))
    )
    edits = NvidiaFamily(options).edits(only_resource(options, NODE), ["tegra"], NODE)
    assert [node.container_path for node in edits.device_nodes] == ["/dev/nvidiactl"]


@pytest.mark.parametrize("policy", ["distributed", "packed"])
def test_preferred_replicas_are_the_first_that_are_free(policy: str) -> None:
    """nvidia §6: always distributed. With one GPU each policy comes to that."""
    options = shared_by(4, policy=policy)
    resource = only_resource(options, NODE)
    family = NvidiaFamily(options)
    assert family.prefer(resource, ["tegra::3", "tegra::1", "tegra::2"], ["tegra::3"], 2, NODE) == [
        "tegra::3",
        "tegra::1",
    ]
    whole = NvidiaFamily(NvidiaOptions())
    assert whole.prefer(only_resource(NvidiaOptions(), NODE), ["tegra"], [], 1, NODE) == ["tegra"]


def test_whole_it_is_exclusive_and_shared_it_has_a_place() -> None:
    """There is no memory to book, only the holder."""
    assert NvidiaFamily(NvidiaOptions()).shares(GPU, ["tegra"], NODE) == (
        Share(INTEGRATED, 0, 100, exclusive=True),
    )
    assert NvidiaFamily(shared_by(2)).shares(GPU, ["tegra::1"], NODE) == (Share(INTEGRATED),)


def test_mps_is_refused() -> None:
    """nvidia §11: its daemon is set up by the UUIDs and the memory that NVML tells."""
    options = shared_by(2, sharing=SharingMode.MPS)
    assert offered(options, NODE) == {}
    assert refused(options, NODE) == (
        (
            f"{GPU}: GPU 0 (tegra) is part of the processor, where MPS cannot limit its clients; "
            "share it by time-slicing"
        ),
    )


def test_replicas_by_memory_are_refused() -> None:
    """iktos §I.2: ``-1`` counts the GPU's memory, of which it has none."""
    options = iktos(("gpu", "gpu-mem", -1))
    assert offered(options, NODE) == {}
    (reason,) = refused(options, NODE)
    assert reason == (
        "nvidia.com/gpu-mem: GPU 0 (tegra) is part of the processor and has no memory of its own "
        "that could be counted; set a number of replicas for it in iktos.resourceConfig"
    )


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_mig_strategy_has_no_effect_and_says_so(strategy: str) -> None:
    """nvidia §3: without slices it behaves as ``none``."""
    options = NvidiaOptions(mig_strategy=strategy)
    assert offered(options, NODE) == {GPU: ["tegra"]}
    assert cautions(options, NODE) == (
        (
            f"plugin.migStrategy: {strategy} has no effect here: GPU 0 (tegra) is part of the "
            "processor and cannot be cut into MIG instances"
        ),
    )


def test_awss_name_offers_nothing_of_it() -> None:
    """aws §II.2: its ids are made of a UUID, and its pods bring an MPS of their own."""
    family = AwsFamily(AwsOptions())
    assert family.resources(NODE) == ()
    assert family.shortfall(NODE).refused == {
        "k8s.amazonaws.com/vgpu": (
            "GPU 0 (tegra) is part of the processor and has no UUID to name it by; offer it by "
            "families.nvidia"
        ),
    }


def test_the_id_of_a_tegra_node_means_nothing_under_other_names() -> None:
    """The word is an id only as a whole."""
    family = NvidiaFamily(msgspec.structs.replace(NvidiaOptions()))
    assert family.shares(GPU, ["tegra-0", "tegra2", "Tegra", "tegra::x"], NODE) == ()
