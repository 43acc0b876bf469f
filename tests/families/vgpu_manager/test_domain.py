"""vgpu-manager's keys in a domain of the operator's (vgpu-manager §1.2, ``--domain``)."""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.node import INVENTORY
from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.cluster import decode
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.family import NodeView, Ownership, PodFamily
from vgpu_agent.families.pod_annotations import ANNOTATIONS, BY_DEFAULT, pod_keys
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.spec import FamilySpec, NodeFacts
from vgpu_agent.families.vgpu_manager.keys import (
    CUDA_MAJOR_LABEL,
    CUDA_MINOR_LABEL,
    CUDA_VERSION_LABEL,
    DRIVER_VERSION_LABEL,
    Keys,
)
from vgpu_agent.families.vgpu_manager.settings import VgpuManager
from vgpu_agent.families.vgpu_manager.spec import SPEC
from vgpu_agent.nodes import Node

THEIRS = Keys("gpu.example.com")


def settings_in(domain: str) -> Settings:
    """A node with this family alone, and its keys in ``domain``."""
    return settings_of(
        families=switches(nvidia=False, vgpu_manager=True), vgpu_manager=VgpuManager(domain=domain)
    )


def family_in(domain: str) -> PodFamily:
    """The family whose pods decide, with its keys in ``domain``."""
    (family,) = SPEC.build(settings_in(domain), NodeFacts()).pod_families
    return family


def pod(annotations: dict[str, str], labels: dict[str, str]) -> bytes:
    """A pod as the API server sends it."""
    metadata = {
        "name": "p",
        "namespace": "n",
        "uid": "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e",
        "annotations": annotations,
        "labels": labels,
    }
    return msgspec.json.encode({"metadata": metadata})


def test_pods_are_read_by_the_keys_of_the_domain_and_by_no_others() -> None:
    """A tenant who knows only the default domain forges nothing."""
    annotations = {
        THEIRS.pre_allocated: "a",
        Keys().pre_allocated: "b",
        THEIRS.compute_policy: "none",
        "volcano.sh/vgpu-node": "kept",
    }
    labels = {THEIRS.phase: "allocating", Keys().phase: "succeed"}
    read = decode.pods_with(pod_keys(settings_in(THEIRS.domain)))(pod(annotations, labels))
    assert read.annotations == {
        THEIRS.pre_allocated: "a",
        THEIRS.compute_policy: "none",
        "volcano.sh/vgpu-node": "kept",
    }
    assert read.labels == {THEIRS.phase: "allocating"}


def test_without_a_domain_the_keys_are_the_default_ones() -> None:
    """One decoder for both: it is made once."""
    assert pod_keys(settings_in("nvidia.com")) == pod_keys() == BY_DEFAULT
    read = decode.pod(pod({Keys().pre_allocated: "b", THEIRS.pre_allocated: "a"}, {}))
    assert read.annotations == {Keys().pre_allocated: "b"}


@pytest.mark.parametrize("domain", ["nvidia.com", "gpu.example.com"])
def test_each_key_of_the_vocabulary_is_in_the_domain(domain: str) -> None:
    """But those of vgpu-manager §1.2."""
    words = SPEC.vocabulary(settings_in(domain))
    constant = {DRIVER_VERSION_LABEL, CUDA_VERSION_LABEL, CUDA_MAJOR_LABEL, CUDA_MINOR_LABEL}
    keys = {
        *words.annotations,
        *words.labels,
        *words.resource_prefixes,
        *words.progress_annotations,
    }
    keys |= {*words.node_annotations} - constant
    assert {key.partition("/")[0] for key in keys} == {domain}
    assert constant <= {*words.node_annotations}


def test_resources_and_the_node_are_in_the_domain() -> None:
    """The kubelet, quotas and schedulers see the same names."""
    family = family_in(THEIRS.domain)
    assert [resource.name for resource in family.resources(INVENTORY)] == [THEIRS.number]
    desired = family.desired_node(NodeView(Node("n"), INVENTORY, {}, {}, 0.0))
    written = {key for key, value in desired.annotations.items() if value is not None}
    assert {THEIRS.node_config, THEIRS.node_register} <= written
    assert not any(key.startswith("nvidia.com/") for key in written)
    assert desired.labels[DRIVER_VERSION_LABEL] == "570.86.10"


@pytest.mark.parametrize(
    ("resource", "owners"),
    [
        # what containers hold from before the domain was changed is still read
        ("nvidia.com/vgpu-number", {"vgpu-manager": Ownership.CERTAIN}),
        ("gpu.example.com/vgpu-number", {"vgpu-manager": Ownership.CERTAIN}),
        ("gpu.example.com/vgpu-memory", {"vgpu-manager": Ownership.CERTAIN}),
        ("gpu.example.com/other", {}),
        ("nvidia.com/gpu", {"nvidia": Ownership.CERTAIN}),
        ("nvidia.com/other", {"nvidia": Ownership.POSSIBLE}),
        ("gpu.example.com/mig-1g.5gb", {"vgpu-manager-mig": Ownership.CERTAIN}),
    ],
)
def test_a_name_in_the_kubelets_records_has_one_owner(
    resource: str, owners: dict[str, Ownership]
) -> None:
    """The family `nvidia` takes any name of NVIDIA's domain for one that it may have had, and must
    not take this family's.
    """
    settings = settings_of(
        families=switches(nvidia=True, vgpu_manager=True),
        vgpu_manager=VgpuManager(domain=THEIRS.domain),
    )
    built = [spec.build(settings, NodeFacts()) for spec in FAMILIES]
    families = [
        each for part in built for each in (*part.id_families, *part.pod_families, *part.idle)
    ]
    found = {each.name: each.owns(resource) for each in families}
    assert {name: owns for name, owns in found.items() if owns is not Ownership.NONE} == owners


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_a_family_whose_keys_are_fixed_has_them_under_any_settings(family: FamilySpec) -> None:
    """The default vocabulary is the declared one."""
    assert family.vocabulary() == family.vocabulary(settings_in("nvidia.com"))
    assert set(family.vocabulary().annotations) <= set(ANNOTATIONS)
