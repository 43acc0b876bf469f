"""The declarations of the families: complete, in one order,
and enough for the rest of the agent to know no family by name.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.agent.offers.build import Found, build
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.pod_annotations import ANNOTATIONS, VARIABLES
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.spec import FamilySpec, NodeFacts

SWITCHES = [field.name for field in msgspec.structs.fields(type(switches()))]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


def with_only(*on: str) -> Settings:
    """The settings with just these families switched on."""
    return settings_of(families=switches(**{name: name in on for name in SWITCHES}))


def switch_of(family: FamilySpec) -> str:
    """The field of ``families`` in the settings that switches this family on."""
    return family.name.replace("-", "_")


def test_each_switch_of_the_settings_is_that_of_one_family() -> None:
    """A switch without a family would offer nothing,
    and a family without a switch could not be turned off.
    """
    assert sorted(map(switch_of, FAMILIES)) == sorted(SWITCHES)


@every_family
def test_a_family_that_is_off_offers_nothing(family: FamilySpec) -> None:
    """Only `idle` may have parts of it, because containers may still hold ids from before it was
    switched off.
    """
    assert not family.is_on(with_only())
    built = family.build(with_only(), NodeFacts())
    assert (built.id_families, built.pod_families, built.problems, built.blocked) == (
        (),
        (),
        (),
        "",
    )


@every_family
def test_a_family_that_is_on_is_built_and_the_others_are_not(family: FamilySpec) -> None:
    """Whoever needs the API server is a family whose pods decide,
    because nothing else tells which pod it is.
    """
    settings = with_only(switch_of(family))
    assert [each.name for each in FAMILIES if each.is_on(settings)] == [family.name]
    built = build(settings, Found()).families
    # a part of it that offers MIG instances has a name of its own
    assert {each.name.removesuffix("-mig") for each in built.all} == {family.name}
    assert bool(built.pod_families) is family.needs_api_server


def test_families_are_offered_in_the_order_of_the_registry() -> None:
    """The first of two conflicting families is served, so the order must not depend on the
    settings.
    """
    families = build(with_only(*SWITCHES), Found()).families
    assert [each.name for each in families.all] == [each.name for each in FAMILIES]


@every_family
def test_what_a_family_writes_while_a_pod_starts_is_kept_of_pods(family: FamilySpec) -> None:
    """The publisher compares with what the watch has kept;
    a key that was skipped would be written for ever.
    """
    assert family.progress_annotations <= set(family.annotations) <= set(ANNOTATIONS)


def test_no_annotation_belongs_to_two_families() -> None:
    """Each would take the other's for its own."""
    every = [key for family in FAMILIES for key in family.annotations]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MEMORY_LIMIT_15",
        "VOLCANO_GPU_ALLOCATED",
    ],
)
def test_variables_of_the_driver_and_of_each_family_are_seen(name: str) -> None:
    """A container that sets one could take another GPU, or leave its limit."""
    assert VARIABLES.fullmatch(name)
    assert not VARIABLES.fullmatch(f"{name}_X")


def test_facts_are_not_shared_between_builds() -> None:
    """The lists of the settings are put in for each build anew."""
    found = Found(facts=NodeFacts(late=True))
    build(with_only("volcano_vgpu"), found)
    assert found.facts == msgspec.structs.replace(NodeFacts(), late=True)
