"""The families whose failed pods get another chance, and the keys that are taken off them."""

from __future__ import annotations

import pytest

from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.agent.api_server import rescues, stale_keys
from vgpu_agent.config.binding import Binding
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.vgpu_manager.settings import VgpuManager


@pytest.mark.parametrize(
    ("setting", "gate", "expected"),
    [
        (False, False, set()),
        (True, False, {"nvidia", "vgpu-manager"}),
        (False, True, {"vgpu-manager"}),
    ],
)
def test_the_setting_is_for_all_families_and_the_gate_for_its_own(
    setting: bool, gate: bool, expected: set[str]
) -> None:
    """A gate of vgpu-manager must not have pods of other families deleted."""
    gates = ("AllocationFailureReschedule=true",) if gate else ()
    settings = settings_of(
        families=switches(nvidia=True, vgpu_manager=True),
        binding=Binding(reschedule_failed=setting),
        vgpu_manager=VgpuManager(feature_gates=gates),
    )
    assert {family.name for family in FAMILIES if rescues(family, settings)} == expected


def test_all_that_schedulers_and_the_agent_write_on_a_pod_is_stale_and_nothing_of_its_owner() -> (
    None
):
    """With its old claim a pod would go back to the card that it could not get;
    vgpu-manager:D24. Its wishes are still its owner's.
    """
    stale = stale_keys(settings_of(vgpu_manager=VgpuManager(domain="example.com")))
    assert stale >= {
        "example.com/pre-allocated",
        "example.com/real-allocated",
        "example.com/predicate-node",
        "example.com/predicate-time",
        "example.com/assigned-phase",
        "example.com/metrics-node",
        "volcano.sh/vgpu-ids-new",
        "volcano.sh/gpu-index",
    }
    assert not stale & {
        "example.com/vgpu-compute-policy",
        "example.com/include-gpu-type",
        "volcano.sh/vgpu-use-gpuuuid",
        "volcano.sh/vgpu-mode",
    }
    written = {key for family in FAMILIES for key in family.progress_annotations}
    assert {key for key in written if not key.startswith("nvidia.com/")} <= stale
