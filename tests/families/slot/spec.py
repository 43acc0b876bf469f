"""The declaration of the family `example-slot`."""

from __future__ import annotations

from tests.families.slot.family import GPU, SERVED, STATE, SlotFamily, slots_in_use
from tests.families.slot.settings import RESOURCE, SETTINGS, Slot
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.spec import BuiltFamily, FamilyMetric, FamilySpec, NodeFacts


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    del facts
    if not settings.is_on(SETTINGS.name):
        return BuiltFamily()
    slot = settings.section(Slot)
    return BuiltFamily(pod_families=(SlotFamily(slot.per_gpu, slot.directory),))


SPEC = FamilySpec(
    SETTINGS,
    _build,
    needs_api_server=True,
    resource_prefixes=(RESOURCE,),
    annotations=(GPU, SERVED),
    labels=(STATE,),
    metrics=(
        FamilyMetric(
            "example_slots_in_use", ("gpu",), "Slots of the GPU that have a holder.", slots_in_use
        ),
    ),
)
