"""Output of an MPS daemon, logged by the agent once,
without our own questions and without filling the node's memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vgpu_agent.mps import daemon
from vgpu_agent.mps.daemon import LogTail

STAMP = "[2026-04-23 06:04:59.389 Control    72] "


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A control.log that is not there yet."""
    return tmp_path / "control.log"


def test_each_line_is_told_once_and_questions_are_not(path: Path) -> None:
    """Half a line waits for its end."""
    tail = LogTail(str(path), from_the_end=False)
    assert tail.read() == []
    path.write_text(
        f"{STAMP}Starting\n{STAMP}Accepting connection...\n"
        f"{STAMP}NEW UI\n{STAMP}Cmd:get_server_list\n{STAMP}UI closed\n"
        "hal"
    )
    assert tail.read() == [f"{STAMP}Starting"]
    with path.open("a") as file:
        file.write(f"f\n{STAMP}Cmd:quit\n")
    assert tail.read() == ["half", f"{STAMP}Cmd:quit"]
    assert tail.read() == []


def test_what_an_earlier_agent_has_told_is_not_told_again(path: Path) -> None:
    """After an adoption reading begins at the end.
    A new file is read from its beginning all the same.
    """
    path.write_text("old\n")
    tail = LogTail(str(path), from_the_end=True)
    assert tail.read() == []
    path.rename(path.with_suffix(".1"))
    path.write_text("new\n")
    assert tail.read() == ["new"]


def test_a_line_without_end_and_junk_are_bounded(path: Path) -> None:
    """Binary junk becomes replacement characters, and no line is longer than 500."""
    path.write_bytes(b"\xff" * 70000 + b"\n")
    tail = LogTail(str(path), from_the_end=False)
    assert [len(line) for line in tail.read() + tail.read()] == [500, 500]


def test_a_large_file_is_emptied_once_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file lies in memory and grows with each probe. The daemon itself never shortens it."""
    monkeypatch.setattr(daemon, "_LARGEST_LOG", 4096)
    path.write_text("x" * 9000 + "\n")
    tail = LogTail(str(path), from_the_end=False)
    tail.read()
    assert path.stat().st_size == 0
    with path.open("a") as file:
        file.write("after\n")
    assert tail.read() == ["after"]
