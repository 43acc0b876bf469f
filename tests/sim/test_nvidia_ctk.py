"""The stand-in for nvidia-ctk says of simulated GPUs what the real tool says of real ones,
and misbehaves on request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vgpu_agent.sim import nvidia_ctk
from vgpu_agent.sim.nvidia_ctk import StandInCtk
from vgpu_agent.sim.state import SimulatedNode


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """Two A100."""
    return SimulatedNode.create(tmp_path / "gpus", model="A100-SXM4-40GB", gpus=2)


def _arguments(node: SimulatedNode, *more: str) -> list[str]:
    roots = [f"--driver-root={node.directory}", f"--dev-root={node.directory}"]
    return [
        "cdi",
        "generate",
        "--mode=auto",
        "--vendor=v.com",
        "--class=gpu",
        "--device-name-strategy=index",
        *roots,
        *more,
    ]


def _spec(node: SimulatedNode, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert nvidia_ctk.main(_arguments(node, *more)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_device_nodes_are_there_on_this_machine(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real runtime looks for them when a container starts."""
    spec = _spec(node, capsys)
    nodes = [
        each for device in spec["devices"] for each in device["containerEdits"]["deviceNodes"]
    ] + spec["containerEdits"]["deviceNodes"]
    assert nodes
    assert all(Path(each["hostPath"]).is_char_device() for each in nodes)
    assert all(Path(mount["hostPath"]).is_file() for mount in spec["containerEdits"]["mounts"])


def test_a_hook_is_named_only_where_its_program_is(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook that is not there would keep every container from starting."""
    assert (
        "hooks" not in _spec(node, capsys, "--nvidia-cdi-hook-path=/nonexistent")["containerEdits"]
    )
    assert (
        _spec(node, capsys, "--nvidia-cdi-hook-path=/bin/true")["containerEdits"]["hooks"][0][
            "path"
        ]
        == "/bin/true"
    )


def test_an_unplugged_gpu_is_not_described_and_a_lost_one_fails_for_all(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver does the same: its list of GPUs ends in an error when one
    of them has fallen off the bus.
    """
    node.unplug(0)
    assert [device["name"] for device in _spec(node, capsys)["devices"]] == ["0", "all"]
    node.lose(1)
    assert nvidia_ctk.main(_arguments(node)) == 1
    assert "GPU is lost" in capsys.readouterr().err


def test_an_option_that_the_real_tool_does_not_know_is_refused(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error in the agent then does not wait for a real node."""
    assert nvidia_ctk.main(_arguments(node, "--nonsense=1")) == 1
    assert "flag provided but not defined: -nonsense" in capsys.readouterr().err


def test_it_misbehaves_until_it_is_told_to_behave(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fail, print something else, leave out a device. Each call is written down."""
    tool = StandInCtk(node.directory)
    tool.misbehave(fail="no driver")
    assert nvidia_ctk.main(_arguments(node)) == 1
    assert "no driver" in capsys.readouterr().err
    tool.misbehave(print_text="nonsense")
    assert nvidia_ctk.main(_arguments(node)) == 0
    assert capsys.readouterr().out == "nonsense\n"
    tool.misbehave(without=["1"])
    assert [device["name"] for device in _spec(node, capsys)["devices"]] == ["0", "all"]
    tool.behave()
    assert len(_spec(node, capsys)["devices"]) == 3
    assert tool.calls == [_arguments(node)] * 4
