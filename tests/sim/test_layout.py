"""The state file means the same to its author (ctypes) and to its readers (C)."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from vgpu_agent.sim import layout
from vgpu_agent.sim.build import build

HEADER = Path(layout.__file__).with_name("native") / "state.h"
STRUCTURES = {
    "sim_link": layout.Link,
    "sim_mig_profile": layout.MigProfile,
    "sim_mig_device": layout.MigDevice,
    "sim_process": layout.Process,
    "sim_gpu": layout.Gpu,
    "sim_event": layout.Event,
    "sim_fault": layout.Fault,
    "sim_node": layout.Node,
}


def _fields_in_c(structure: str) -> list[str]:
    body = re.search(
        rf"struct {structure} {{(.*?)\n}};",
        re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL),
        re.DOTALL,
    )
    assert body is not None
    return re.findall(r"(\w+)(?:\[\w+\])*;", body[1])


def _constants_in_c() -> dict[str, int]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    pairs = re.findall(r"\b(SIM_\w+) = (\d+)", text) + re.findall(
        r"#define (SIM_\w+) +(0x\w+)", text
    )
    return {name: int(re.sub(r"(?i)[ul]+$", "", value), 0) for name, value in pairs}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_has_the_same_fields_in_the_same_order(structure: str) -> None:
    """A field added, dropped or moved on one side only is found by name, not by garbled values."""
    assert [name for name, *_ in STRUCTURES[structure]._fields_] == _fields_in_c(structure)


def test_the_compiled_library_agrees_on_sizes_and_offsets() -> None:
    """The compiler's padding is ctypes' padding."""
    library = ctypes.CDLL(str(build()))
    library.vgpusim_layout.restype = ctypes.c_char_p

    assert layout.description() == library.vgpusim_layout().decode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SIM_MAGIC", layout.MAGIC),
        ("SIM_NONE", layout.NONE),
        ("SIM_LOCK_BASE", layout.LOCK_BASE),
        ("SIM_LAYOUT", layout.LAYOUT),
        ("SIM_GPUS", layout.GPUS),
        ("SIM_PROCESSES", layout.PROCESSES),
        ("SIM_LINKS", layout.LINKS),
        ("SIM_MIG_DEVICES", layout.MIG_DEVICES),
        ("SIM_PROFILES", layout.PROFILES),
        ("SIM_PLACEMENTS", layout.PLACEMENTS),
        ("SIM_RETIRED_PAGES", layout.RETIRED_PAGES),
        ("SIM_EVENTS", layout.EVENTS),
        ("SIM_FAULTS", layout.FAULTS),
        ("SIM_CPU_WORDS", layout.CPU_WORDS),
        ("SIM_ANSWERS", layout.Gpu.ANSWERS),
        ("SIM_LOST_BUT_KNOWN", layout.Gpu.LOST_BUT_KNOWN),
        ("SIM_LOST_ENTIRELY", layout.Gpu.LOST_ENTIRELY),
        ("SIM_PROCESS_FREE", layout.Process.FREE),
        ("SIM_PROCESS_FIXED", layout.Process.FIXED),
        ("SIM_PROCESS_LIVE", layout.Process.LIVE),
    ],
)
def test_constants_have_the_same_values(name: str, value: int) -> None:
    """Array lengths and codes are one set of numbers."""
    assert _constants_in_c()[name] == value
