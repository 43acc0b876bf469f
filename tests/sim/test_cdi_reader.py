"""Resolution of CDI names by the simulated runtime, which refuses what a real one would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.cdi_reader import Received, received
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

KIND = "example.com/grant"


def lay(directory: Path, name: str = "a", **changes: Any) -> None:
    """A spec with one device ``one``."""
    edits = {
        "env": ["A=spec=1"],
        "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["ro"]}],
        "deviceNodes": [{"path": "/dev/n"}],
    }
    spec = {
        "cdiVersion": "0.6.0",
        "kind": KIND,
        "devices": [{"name": "one", "containerEdits": edits}],
    } | changes
    (directory / f"{name}.json").write_text(json.dumps(spec))


def answer(*names: str, **environment: str) -> messages.ContainerAllocateResponse:
    """An answer with those CDI names."""
    made = messages.ContainerAllocateResponse(envs=environment)
    for name in names:
        made.cdi_devices.add(name=name)
    return made


def test_a_name_brings_its_edits_over_the_plugin_s(tmp_path: Path) -> None:
    """Environment, mounts and device nodes of the spec, which is applied last."""
    lay(tmp_path)
    came = received(answer(f"{KIND}=one", A="plugin", B="2"), tmp_path)
    assert came == Received({"A": "spec=1", "B": "2"}, {"/c": ("/h", True)}, frozenset({"/dev/n"}))


def test_a_name_in_an_annotation_counts_as_well(tmp_path: Path) -> None:
    """For kubelets without the field."""
    lay(tmp_path)
    made = messages.ContainerAllocateResponse(
        annotations={"cdi.k8s.io/x": f"{KIND}=one", "other": "ignored"}
    )
    assert received(made, tmp_path).environment == {"A": "spec=1"}


def test_a_runtime_without_cdi_ignores_names(tmp_path: Path) -> None:
    """Such a container starts without what it should have, silently."""
    assert received(answer(f"{KIND}=one", B="2"), None) == Received({"B": "2"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{KIND}=two", "unresolvable"),
        ("nonsense", "no qualified device name"),
        ("example.com/other=one", "unresolvable"),
    ],
)
def test_a_name_that_nobody_has_is_refused(tmp_path: Path, name: str, said: str) -> None:
    """The container does not start."""
    lay(tmp_path)
    with pytest.raises(SimulationError, match=said):
        received(answer(name), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"unknownField": 1}, {"devices": []}, {"devices": [{"name": "one", "containerEdits": {}}]}],
)
def test_a_spec_that_no_runtime_would_take_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """One field too many, no device, or a device without any edit."""
    lay(tmp_path, **changes)
    with pytest.raises(SimulationError):
        received(answer(f"{KIND}=one"), tmp_path)


def test_two_specs_with_one_name_are_a_conflict(tmp_path: Path) -> None:
    """Neither is taken."""
    lay(tmp_path, "a")
    lay(tmp_path, "b")
    with pytest.raises(SimulationError, match="conflicting"):
        received(answer(f"{KIND}=one"), tmp_path)


def test_what_all_devices_of_a_spec_have_in_common_comes_once_and_first(tmp_path: Path) -> None:
    """A variable of the device wins over the common one, as with a runtime, which applies the
    spec's edits before the device's.
    """
    edits = {"env": ["A=device"], "deviceNodes": [{"path": "/dev/own"}]}
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "vendor.com/gpu",
        "containerEdits": {
            "env": ["A=common", "B=common"],
            "deviceNodes": [{"path": "/dev/control"}],
        },
        "devices": [{"name": "0", "containerEdits": edits}],
    }
    (tmp_path / "gpu.json").write_text(json.dumps(spec))
    came = received(answer("vendor.com/gpu=0"), tmp_path)
    assert came.environment == {"A": "device", "B": "common"}
    assert came.device_nodes == {"/dev/control", "/dev/own"}
