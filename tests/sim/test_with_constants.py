"""The launcher by which tests shorten the pauses of a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu_agent import concurrency
from vgpu_agent.errors import SimulationError
from vgpu_agent.isolation import mps
from vgpu_agent.sim import with_constants

STUCK = "vgpu_agent.concurrency:STUCK_SECONDS"


def test_a_constant_has_the_other_value_in_the_program(tmp_path: Path) -> None:
    """The program itself is started as ``python -m`` would, with its own arguments."""
    (tmp_path / "shown.py").write_text(
        "import sys\nfrom vgpu_agent import concurrency\n"
        "print(__name__, sys.argv[1:], concurrency.STUCK_SECONDS)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-m", with_constants.MODULE, json.dumps({STUCK: 1.5}), "shown", "run"],
        env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown == "__main__ ['run'] 1.5\n"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vgpu_agent.concurrency:STUCK", "vgpu_agent.concurrency has no numeric constant STUCK"),
        ("vgpu_agent.concurrency:Backoff", "has no numeric constant Backoff"),
        ("vgpu_agent.concurrency", "has no numeric constant"),
        ("vgpu_agent.isolation.mps:CONTAINER_ROOT", "has no numeric constant CONTAINER_ROOT"),
        ("vgpu_agent.nowhere:STUCK_SECONDS", "there is no module vgpu_agent.nowhere"),
    ],
)
def test_a_name_that_is_no_constant_is_an_error(name: str, problem: str) -> None:
    """After a constant was renamed, no test may go on with the long pause."""
    before = concurrency.STUCK_SECONDS
    with pytest.raises(SimulationError) as refused:
        with_constants.set_constants({name: 1.0})
    assert problem in str(refused.value)
    assert before == concurrency.STUCK_SECONDS


def test_a_text_takes_the_place_of_a_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path where a number is read would fail far from here."""
    monkeypatch.setattr(mps, "CONTAINER_ROOT", mps.CONTAINER_ROOT)  # taken back after the test
    with_constants.set_constants({"vgpu_agent.isolation.mps:CONTAINER_ROOT": "/elsewhere"})
    assert mps.MpsOptions().directory("r") == "/elsewhere/r"
    with pytest.raises(SimulationError, match="has no text constant STUCK_SECONDS"):
        with_constants.set_constants({"vgpu_agent.concurrency:STUCK_SECONDS": "long"})
