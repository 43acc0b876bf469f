"""The labels of GPU Feature Discovery: names and values as that program writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.golden import golden_inventory, golden_slices, with_slices
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.feature_labels import NAMES, TIMESTAMP, family_of, feature_labels
from vgpu_agent.families.nvidia.options import NvidiaOptions, SharedEntry
from vgpu_agent.model import INTEGRATED, Gpu, Inventory, SharingMode

GPU = "nvidia.com/gpu"
POLICY = Path(__file__).parents[3] / "manifests/components/own-node-only/policy.yaml"


def labels(inventory: Inventory, **options: Any) -> dict[str, str]:
    """The labels without ``nvidia.com/``."""
    configured = NvidiaOptions(**options)
    family = NvidiaFamily(configured)
    found = feature_labels(configured, family.resources(inventory), inventory)
    assert found is not None
    for value in found.values():
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", value), value
    return {key.removeprefix("nvidia.com/"): value for key, value in found.items()}


def capable(inventory: Inventory) -> Inventory:
    """The golden GPUs as the driver shows them: an A100 supports MIG."""
    gpus = tuple(msgspec.structs.replace(gpu, mig_capable=True) for gpu in inventory.gpus)
    return msgspec.structs.replace(
        inventory, gpus=gpus, driver_version="580.95.05", cuda_version="13.0"
    )


def test_whole_gpus_have_the_labels_of_their_product() -> None:
    """nvidia §12: driver, runtime, product, memory and architecture."""
    assert labels(capable(golden_inventory())) == {
        "cuda.driver-version.full": "580.95.05",
        "cuda.driver-version.major": "580",
        "cuda.driver-version.minor": "95",
        "cuda.driver-version.revision": "05",
        "cuda.driver.major": "580",
        "cuda.driver.minor": "95",
        "cuda.driver.rev": "05",
        "cuda.runtime-version.full": "13.0",
        "cuda.runtime-version.major": "13",
        "cuda.runtime-version.minor": "0",
        "cuda.runtime.major": "13",
        "cuda.runtime.minor": "0",
        "gpu.compute.major": "8",
        "gpu.compute.minor": "0",
        "gpu.count": "2",
        "gpu.family": "ampere",
        "gpu.memory": "40960",
        "gpu.product": "NVIDIA-A100-SXM4-40GB",
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "mig.capable": "true",
        "mps.capable": "false",
    }


def test_shared_gpus_say_so_in_the_product_unless_they_are_renamed() -> None:
    """nvidia §17.5, G8 and G9."""
    shared = labels(golden_inventory(), shared=(SharedEntry(GPU, 4, GPU),))
    assert shared["gpu.product"] == "NVIDIA-A100-SXM4-40GB-SHARED"
    assert (shared["gpu.replicas"], shared["gpu.sharing-strategy"]) == ("4", "time-slicing")
    renamed = labels(golden_inventory(), shared=(SharedEntry(GPU, 4, f"{GPU}.shared"),))
    assert renamed["gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert renamed["gpu.replicas"] == "4"


def test_mps_is_named_as_the_strategy_and_as_a_capability() -> None:
    """NVIDIA's MPS DaemonSet selects nodes by the second one."""
    shared = labels(golden_inventory(), sharing=SharingMode.MPS, shared=(SharedEntry(GPU, 4, GPU),))
    assert (shared["gpu.sharing-strategy"], shared["mps.capable"]) == ("mps", "true")


def test_each_profile_of_mixed_instances_has_its_labels() -> None:
    """nvidia §17.5: G6, where a divided GPU counts as a GPU as well."""
    inventory = capable(with_slices(golden_inventory(), U1=golden_slices()))
    found = labels(inventory, mig_strategy="mixed")
    assert found["gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert (found["gpu.count"], found["gpu.replicas"]) == ("2", "1")
    assert (found["mig.capable"], found["mig.strategy"]) == ("true", "mixed")
    assert {key: value for key, value in found.items() if key.startswith("mig-")} == {
        "mig-1g.5gb.count": "7",
        "mig-1g.5gb.memory": "4864",
        "mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
        "mig-1g.5gb.replicas": "1",
        "mig-1g.5gb.sharing-strategy": "none",
        "mig-1g.5gb.slices.ci": "1",
        "mig-1g.5gb.slices.gi": "1",
    }


def test_a_plus_in_a_profile_becomes_a_dot() -> None:
    """Kubernetes allows no plus in names of labels, nor in their values."""
    slices = golden_slices("1g.5gb+me", count=1)
    found = labels(with_slices(golden_inventory(), U1=slices), mig_strategy="mixed")
    assert found["mig-1g.5gb.me.product"] == "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me"


def test_single_instances_have_the_labels_of_a_gpu() -> None:
    """Only where all GPUs are divided alike; nvidia §17.5: G3 is what cannot be used so."""
    slices = golden_slices()
    both = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=slices)
    found = labels(both, mig_strategy="single")
    assert found["gpu.product"] == "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"
    assert (found["gpu.count"], found["gpu.memory"]) == ("14", "4864")
    assert (found["gpu.slices.gi"], found["gpu.replicas"]) == ("1", "1")
    invalid = labels(with_slices(golden_inventory(), U1=slices), mig_strategy="single")
    assert invalid["gpu.product"] == "NVIDIA-A100-SXM4-40GB-MIG-INVALID"
    assert [invalid[f"gpu.{name}"] for name in ("count", "replicas", "memory")] == ["0"] * 3
    assert invalid["gpu.sharing-strategy"] == ""


def test_a_node_whose_gpus_do_not_answer_keeps_its_labels() -> None:
    """A driver that is reloaded must not make the node's product vanish for a minute."""
    options = NvidiaOptions()
    assert feature_labels(options, (), Inventory()) is None
    lost = msgspec.structs.replace(
        golden_inventory(),
        gpus=tuple(msgspec.structs.replace(gpu, present=False) for gpu in golden_inventory().gpus),
    )
    assert feature_labels(options, (), lost) is None
    tegra = Inventory(gpus=(Gpu(INTEGRATED, 0, -1, INTEGRATED, 0),))
    assert feature_labels(options, (), tegra) is None


def test_of_several_products_the_most_frequent_counts() -> None:
    """GFD takes one at random, so that its labels change from run to run."""
    cards = (*golden_inventory().gpus, Gpu("GPU-2", 2, 2, "Tesla T4", 15360))
    found = labels(Inventory(gpus=(cards[2], *cards[:2])))
    assert (found["gpu.product"], found["gpu.count"]) == ("NVIDIA-A100-SXM4-40GB", "2")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((6, 1), "pascal"),
        ((7, 0), "volta"),
        ((7, 5), "turing"),
        ((8, 6), "ampere"),
        ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"),
        ((10, 3), "blackwell"),
        ((11, 0), "undefined"),
        ((12, 1), "blackwell"),
        ((13, 0), "rubin"),
        ((14, 0), "undefined"),
        ((0, 0), "undefined"),
    ],
)
def test_the_architecture_follows_from_the_compute_capability(
    capability: tuple[int, int], name: str
) -> None:
    """nvidia §12."""
    assert family_of(*capability) == name


def test_the_policy_allows_these_labels_and_not_the_timestamp() -> None:
    """An agent with the timestamp would be taken for GFD, and yield to itself."""
    policy = next(iter(yaml.safe_load_all(POLICY.read_text())))
    (expression,) = (
        variable["expression"]
        for variable in policy["spec"]["variables"]
        if variable["name"] == "featureLabels"
    )
    (pattern,) = re.findall(r'key\.matches\("(.*?)"\)', expression)
    inventory = with_slices(golden_inventory(), U1=golden_slices("1g.5gb+me"))
    mixed = [f"nvidia.com/{name}" for name in labels(inventory, mig_strategy="mixed")]
    assert [name for name in (*NAMES, *mixed) if not re.search(pattern, name)] == []
    for foreign in (TIMESTAMP, "nvidia.com/gpu.present", "nvidia.com/gpu.deploy.driver"):
        assert not re.search(pattern, foreign)
