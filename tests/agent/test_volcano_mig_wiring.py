"""MIG under Volcano's names, from settings and files to families."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.families.volcano_vgpu.mig.parts import DEVICE_CONFIG, GROUP2, node
from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.agent.offers.build import Found, build
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.spec import NodeFacts
from vgpu_agent.families.volcano_vgpu.mig.family import VolcanoVgpuMigFamily
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu

HAMI = VolcanoVgpu(isolation="none", gpu_memory_factor=64)


def settings(vgpu: VolcanoVgpu = HAMI, *, nvidia: bool = False, strategy: str = "none") -> Settings:
    """A node that serves volcano-vgpu."""
    known = settings_of(
        node_name="node-a", families=switches(nvidia=nvidia, volcano_vgpu=True), volcano_vgpu=vgpu
    )
    return msgspec.structs.replace(
        known, plugin=msgspec.structs.replace(known.plugin, mig_strategy=strategy)
    )


def offered(of: Settings, found: Found | None = None) -> tuple[set[str], tuple[str, ...]]:
    """The names of what is offered by ids on a node with one divided card, and the problems."""
    built = build(of, found or Found())
    return {
        resource.name
        for family in built.families.id_families
        for resource in family.resources(node(of_u1=GROUP2))
    }, built.problems


MIXED = {"volcano.sh/mig-1g.5gb", "volcano.sh/mig-2g.10gb"}


def test_the_strategy_of_the_plugin_counts_for_volcano() -> None:
    """``MIG_STRATEGY`` of the replaced plugin; the node configuration may say it, too."""
    assert offered(settings(strategy="mixed")) == (MIXED, ())
    text = json.dumps({"nodeconfig": [{"name": "node-a", "migstrategy": "mixed"}]})
    assert offered(settings(), Found(facts=NodeFacts(texts={"config.json": (text,)}))) == (
        MIXED,
        (),
    )
    assert offered(settings()) == (set(), ())


def test_beside_the_nvidia_family_the_strategy_is_its_own() -> None:
    """The same instances are not offered twice, unless it is configured,
    and then the problem is named.
    """
    names, problems = offered(settings(nvidia=True, strategy="mixed"))
    assert names == {"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"}
    assert problems == ()
    asked = msgspec.structs.replace(HAMI, mig_strategy="mixed")
    _, (problem,) = offered(settings(asked, nvidia=True, strategy="mixed"))
    assert problem.startswith(
        "volcanoVgpu.migStrategy: mixed: the family nvidia offers the same instances"
    )
    names, problems = offered(settings(asked, nvidia=True))
    assert names >= MIXED
    assert problems == ()


def test_in_the_mode_mig_instances_have_no_names_of_their_own() -> None:
    """They are given through the count resource.
    A configuration that asks for both gets a warning.
    """
    found = Found(facts=NodeFacts(texts={"device-config.yaml": (DEVICE_CONFIG,)}))
    names, (problem,) = offered(
        settings(msgspec.structs.replace(HAMI, operating_mode="mig", mig_strategy="mixed")), found
    )
    assert names == set()
    assert "in the operating mode mig" in problem


def test_a_tool_that_is_missing_is_named_before_a_pod_needs_it() -> None:
    """GPUs that are divided already can be given all the same, so nothing is withheld.
    In the other mode the tool is not needed.
    """
    mode = settings(
        msgspec.structs.replace(HAMI, operating_mode="mig", mig_parted="/nowhere/nvidia-mig-parted")
    )
    built = build(
        mode, Found(facts=NodeFacts(texts={"device-config.yaml": (DEVICE_CONFIG,)}, divides=False))
    )
    (problem,) = built.problems
    assert problem.startswith(
        "volcanoVgpu.migParted: there is no program /nowhere/nvidia-mig-parted here"
    )
    assert len(built.families.pod_families) == 1
    assert build(settings(), Found(facts=NodeFacts(divides=False))).problems == ()


@pytest.mark.parametrize("entry", [{"operatingmode": "mig"}, {"operatingmode": "hami-core"}])
def test_the_mode_of_the_node_chooses_the_family(entry: dict[str, str]) -> None:
    """With the geometries of the ConfigMap; the factor of the ConfigMap counts as ever."""
    text = json.dumps({"nodeconfig": [{"name": "node-a", **entry}]})
    coarse = DEVICE_CONFIG.replace("gpuMemoryFactor: 1", "gpuMemoryFactor: 64")
    built = build(
        settings(),
        Found(facts=NodeFacts(texts={"device-config.yaml": (coarse,), "config.json": (text,)})),
    )
    (family,) = built.families.pod_families
    is_mig = entry["operatingmode"] == "mig"
    assert isinstance(family, VolcanoVgpuMigFamily) is is_mig
    names = {resource.name: len(resource.ids) for resource in family.resources(node(of_u1=GROUP2))}
    # a divided card is shared in the mode mig only
    assert names["volcano.sh/vgpu-number"] == (20 if is_mig else 10)
    assert built.origins["volcano-vgpu"]["operating_mode"] == "config.json"
