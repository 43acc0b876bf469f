"""A file that clients can write makes the agent kill nothing but the daemon to which it belongs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.isolation.mps import PIPE_VARIABLE
from vgpu_agent.mps import processes


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a control daemon of the pipe ``tmp_path``."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "print(flush=True); input()",
        "nvidia-cuda-mps-control",
    ]
    with subprocess.Popen(
        command, env={PIPE_VARIABLE: str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # only now is it certain that it has become that program
        yield process
        process.kill()


def test_the_daemon_of_a_pipe_is_found_and_ended(
    tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    """Its file names it, and its environment says that it was started for this pipe."""
    Path(processes.pid_path(str(tmp_path))).write_text(f"{daemon.pid}\n")
    assert processes.written_pid(str(tmp_path)) == daemon.pid
    assert processes.end([daemon.pid], str(tmp_path)) == []
    assert daemon.wait(PATIENCE_SECONDS) == -9


def test_a_client_cannot_have_another_daemon_ended(
    tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    """Root in a container may write the number of any process. One of another pipe, or that has
    nothing to do with MPS, stays.
    """
    mine = str(tmp_path / "mine")
    Path(mine).mkdir()
    for pid in (daemon.pid, os.getpid(), 1, 0, -1):
        Path(processes.pid_path(mine)).write_text(str(pid))
        assert processes.written_pid(mine) is None
        assert processes.end([pid], mine) == [pid]
    assert daemon.poll() is None


@pytest.mark.parametrize("kind", ["nothing", "fifo", "link", "words", "directory"])
def test_a_file_that_is_no_number_names_nobody_and_holds_nobody_up(
    kind: str, tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    """A pipe without a writer would block for ever,
    and a link could lead to any file of the node.
    """
    path = Path(processes.pid_path(str(tmp_path)))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_text(str(daemon.pid))
        path.symlink_to("other")
    elif kind == "words":
        path.write_text("all of them")
    elif kind == "directory":
        path.mkdir()
    assert processes.written_pid(str(tmp_path)) is None
