"""Every name that an NVML client may look up is exported, for some clients die of a missing one."""

from __future__ import annotations

import ctypes
import runpy
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.simulated import nvml_on
from vgpu_agent.sim.build import build
from vgpu_agent.sim.state import SimulatedNode

GENERATOR = Path(__file__).resolve().parents[2] / "scripts" / "generate_nvml_stubs.py"


def test_every_name_that_the_binding_looks_up_resolves() -> None:
    """dlsym finds each of them, in the installed nvidia-ml-py's own words."""
    library = ctypes.CDLL(str(build()))

    wanted = runpy.run_path(str(GENERATOR))["looked_up"]()

    assert len(wanted) > 400
    assert [name for name in sorted(wanted) if not hasattr(library, name)] == []


def test_the_committed_list_of_stubs_is_the_generated_one() -> None:
    """An upgraded nvidia-ml-py makes this fail until scripts/generate was run."""
    done = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_a_stale_list_of_stubs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--check`` exits 1 and says what to run."""
    generator = runpy.run_path(str(GENERATOR))
    stale = tmp_path / "stubs.inc"
    stale.write_text("STUB(nvmlOld)\n")
    monkeypatch.setitem(generator["main"].__globals__, "STUBS", stale)
    monkeypatch.setattr(sys, "argv", ["generate_nvml_stubs", "--check"])

    code = generator["main"]()

    assert code == 1
    assert "run scripts/generate_nvml_stubs.py" in capsys.readouterr().err


def test_a_stub_says_not_supported(node: SimulatedNode) -> None:
    """A name that is only there to be found answers like a card without the feature."""
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGspFirmwareVersion(pynvml.nvmlDeviceGetHandleByIndex(0))


def test_a_stub_before_initialisation_says_uninitialised(node: SimulatedNode) -> None:
    """A stub also knows whether NVML was initialised."""
    with nvml_on(node):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetGspFirmwareVersion(handle)
