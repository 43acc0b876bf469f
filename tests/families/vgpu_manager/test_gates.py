"""The feature gates of vgpu-manager (vgpu-manager §1.7)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.vgpu_manager.gates import Gates, read_gates

NEW_AND_OLD = [
    ("GPUCoreResourcePlugin", "CorePlugin", "offer_cores"),
    ("GPUMemoryResourcePlugin", "MemoryPlugin", "offer_memory"),
    ("AllocationFailureReschedule", "Reschedule", "reschedule"),
    ("TopologyAwareGPUAllocation", "GPUTopology", "topology"),
    ("SharedSMUtilizationWatcher", "SMWatcher", "sm_watcher"),
    ("VirtualMemoryTracking", "VMemoryNode", "tracks_virtual_memory"),
    ("DevicePluginClientMode", "ClientMode", "client_mode"),
]


def on(gates: Gates) -> set[str]:
    """The fields that are true."""
    return {
        field.name
        for field in msgspec.structs.fields(type(gates))
        if getattr(gates, field.name) is True
    }


@pytest.mark.parametrize(("new", "old", "field"), NEW_AND_OLD)
def test_a_gate_is_known_by_its_name_and_by_the_one_before(new: str, old: str, field: str) -> None:
    """A DaemonSet from before v1.0.0 has the old names."""
    assert on(read_gates([f"{new}=true"])) == on(read_gates([f"{old}=true"])) == {field}
    assert read_gates([f"{old}=true"]).problems == ()


def test_all_gates_are_off_by_default() -> None:
    """The defaults are those of the replaced plugin; its Helm chart turns some of them on."""
    assert read_gates([]) == Gates()
    assert on(Gates()) == set()


def test_the_gates_of_the_chart_are_accepted() -> None:
    """Those that `charts/vgpu-manager/values.yaml` gives to the device plugin."""
    gates = read_gates(
        [
            "VirtualMemoryTracking=true",
            "SharedSMUtilizationWatcher=true",
            "TopologyAwareGPUAllocation=true",
            "HonorPreAllocatedDeviceIDs=true",
        ]
    )
    assert on(gates) == {"tracks_virtual_memory", "sm_watcher", "topology", "prefer_claimed"}
    assert (gates.problems, gates.without_effect) == ((), ())


def test_the_last_word_about_a_gate_counts() -> None:
    """Go's flags follow the same rule. A patch that appends arguments overrides earlier ones, in
    either spelling.
    """
    assert on(read_gates(["CorePlugin=true", "GPUCoreResourcePlugin=false"])) == set()
    assert on(read_gates(["GPUCoreResourcePlugin=0", "CorePlugin=1"])) == {"offer_cores"}


def test_two_spellings_of_one_gate_that_disagree_are_named() -> None:
    """The arguments of an old release with those of a new one behind them: nobody sees that the two
    are one gate.
    """
    gates = read_gates(["CorePlugin=true", "GPUCoreResourcePlugin=false"])
    assert gates.without_effect == (
        (
            "CorePlugin=true has no effect before GPUCoreResourcePlugin=false, which is the same "
            "gate; keep one of them"
        ),
    )
    assert read_gates(["CorePlugin=true", "GPUCoreResourcePlugin=1"]).without_effect == ()
    assert read_gates(["CorePlugin=true", "CorePlugin=false"]).without_effect == ()


@pytest.mark.parametrize("word", ["SerialBindNode=true", "SerializedNodeFilter=false"])
def test_a_gate_of_the_scheduler_is_named_as_without_effect(word: str) -> None:
    """An operator who sets it here expects something of it."""
    gates = read_gates([word])
    name = word.partition("=")[0]
    assert gates.problems == ()
    assert gates.without_effect == (
        f"{name} is a gate of the scheduler extender, it has no effect on a node; leave it out",
    )


def test_a_gate_of_the_dra_driver_is_named_as_without_effect() -> None:
    """The environment of that driver may have been copied."""
    assert read_gates(["VGPUSupport=true", "VGPUSupport=true"]).without_effect == (
        (
            "VGPUSupport is a gate of the DRA driver, which this agent does not have; it has no "
            "effect; leave it out"
        ),
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "GPUCoresResourcePlugin=true",
            'unknown feature gate "GPUCoresResourcePlugin", did you mean GPUCoreResourcePlugin?',
        ),
        ("smwatcher=true", 'unknown feature gate "smwatcher", did you mean SMWatcher?'),
        (
            "Frobnicate=true",
            (
                'unknown feature gate "Frobnicate", expected one of GPUCoreResourcePlugin, '
                "GPUMemoryResourcePlugin, AllocationFailureReschedule, TopologyAwareGPUAllocation, "
                "SharedSMUtilizationWatcher, VirtualMemoryTracking, DevicePluginClientMode, "
                "HonorPreAllocatedDeviceIDs"
            ),
        ),
        ("CorePlugin", "CorePlugin: expected CorePlugin=true or CorePlugin=false, got no value"),
        (
            "CorePlugin=yes",
            'CorePlugin: expected CorePlugin=true or CorePlugin=false, got "yes"',
        ),
        (
            "SerialBindNode=",
            'SerialBindNode: expected SerialBindNode=true or SerialBindNode=false, got ""',
        ),
    ],
)
def test_what_is_no_gate_is_named_with_what_was_meant(word: str, said: str) -> None:
    """One sentence; the gates beside it keep their meaning."""
    gates = read_gates([word, "MemoryPlugin=true"])
    assert gates.problems == (said,)
    assert on(gates) == {"offer_memory"}


@given(st.lists(st.text(max_size=400), max_size=20))
def test_no_words_end_in_an_exception_or_in_a_long_sentence(words: list[str]) -> None:
    """A flag may be any text."""
    gates = read_gates(words)
    assert all(len(problem) < 400 and problem.isprintable() for problem in gates.problems)
