"""The driver's table of MIG capability numbers: what is read from it, and what is believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import simulated_node
from vgpu_agent.gpu.capabilities import Capabilities, parse

WHOLE = (
    b"config 1\nmonitor 2\ngpu1/gi7/access 201\ngpu1/gi7/ci0/access 202\n"
    b"gpu1/gi8/access 210\ngpu1/gi8/ci0/access 211\n"
)
NODES = ("/dev/nvidia-caps/nvidia-cap201", "/dev/nvidia-caps/nvidia-cap202")


def _minors(proc_root: Path) -> Path:
    path = proc_root / "driver" / "nvidia-caps" / "mig-minors"
    path.parent.mkdir(parents=True)
    return path


def test_an_instance_has_two_nodes() -> None:
    """nvidia §4 and §17: GPU instance 7 of the GPU with minor 1 is 201,
    its compute instance 202.
    """
    assert parse(WHOLE, "mig-minors").nodes(1, 7, 0) == (NODES, "")


def test_the_numbers_of_a_simulated_driver(tmp_path: Path) -> None:
    """nvidia A18: M3 is GPU instance 10 of minor 1, so 228 and 229."""
    node = simulated_node(tmp_path, gpus=2)

    nodes, trouble = Capabilities(node.directory / "proc").read().nodes(1, 10, 0)

    assert (nodes, trouble) == (
        ("/dev/nvidia-caps/nvidia-cap228", "/dev/nvidia-caps/nvidia-cap229"),
        "",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b"gpu1/gi7/ci0/access banana",
            "line 4: 'gpu1/gi7/ci0/access banana': expected the number of a device node",
        ),
        (b"gpu1/gi7/ci0/access", "line 4: 'gpu1/gi7/ci0/access': expected the number"),
        (b"gpu1/gi7/ci0/access -3", "line 4: 'gpu1/gi7/ci0/access -3': expected the number"),
        (b"gpu1/gi7/ci0/access 9999999999999999999", "expected the number"),
        (b"gpu1/gi7/ci0/access 1048576", "expected the number"),
        ("gpu1/gi7/ci0/access ٢٠٢".encode(), "expected the number"),
        (b"gpu1/gi7/ci0/access 20\x002", "expected the number"),
        (b"gpu1/gi7/ci0/access 202 203", "expected the number"),
        (b"gpu1/gi7/access 205", "line 4: 'gpu1/gi7/access 205': an earlier line says 201"),
        (b"\xff\xfe\x00", "mig-minors has no line for gpu1/gi7/ci0/access"),
        (b"", "mig-minors has no line for gpu1/gi7/ci0/access"),
    ],
    ids=repr,
)
def test_a_bad_line_costs_its_instance_and_no_other(line: bytes, said: str) -> None:
    """The trouble names file, line, value and remedy. The instance next to it keeps its nodes."""
    minors = parse(WHOLE.replace(b"gpu1/gi7/ci0/access 202", line), "mig-minors")

    nodes, trouble = minors.nodes(1, 7, 0)

    assert nodes == ()
    assert said in trouble
    assert "check that gpu.procRoot shows the host's procfs" in trouble
    assert minors.nodes(1, 8, 0) == (
        ("/dev/nvidia-caps/nvidia-cap210", "/dev/nvidia-caps/nvidia-cap211"),
        "",
    )


def test_half_a_number_is_not_believed() -> None:
    """The file ends within its last line: 21 may be the beginning of 211."""
    minors = parse(WHOLE[: -len(b"1\n")], "mig-minors")

    nodes, trouble = minors.nodes(1, 8, 0)

    assert nodes == ()
    assert "mig-minors line 6: 'gpu1/gi8/ci0/access 21': the line is cut off" in trouble
    assert minors.nodes(1, 7, 0) == (NODES, "")


def test_a_missing_file_is_every_instances_trouble(tmp_path: Path) -> None:
    """It is named with its path and the reason, and is read again the next time."""
    capabilities = Capabilities(tmp_path)
    before = capabilities.read().nodes(1, 7, 0)
    _minors(tmp_path).write_bytes(WHOLE)

    assert before[0] == ()
    assert f"cannot read {capabilities.path}: No such file or directory; check" in before[1]
    assert capabilities.read().nodes(1, 7, 0) == (NODES, "")


def test_a_file_that_no_driver_wrote_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A procRoot that points at something endless costs a megabyte and no more."""
    _minors(tmp_path).write_bytes(b"x" * (2 << 20))

    nodes, trouble = Capabilities(tmp_path).read().nodes(0, 0, 0)

    assert nodes == ()
    assert "is larger than 1048576 bytes" in trouble


def test_the_table_is_parsed_again_only_when_it_changed(tmp_path: Path) -> None:
    """It has a thousand lines and is the same for the life of the driver."""
    path = _minors(tmp_path)
    path.write_bytes(WHOLE)
    capabilities = Capabilities(tmp_path)
    first = capabilities.read()

    assert capabilities.read() is first
    path.write_bytes(WHOLE.replace(b"201", b"301"))
    assert capabilities.read().nodes(1, 7, 0)[0][0] == "/dev/nvidia-caps/nvidia-cap301"


@given(st.binary())
def test_no_bytes_break_the_table(text: bytes) -> None:
    """Any file gives an answer, and nodes and a trouble never come together."""
    nodes, trouble = parse(text, "mig-minors").nodes(0, 0, 0)

    assert bool(nodes) != bool(trouble)
