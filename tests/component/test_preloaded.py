"""A fork of the process that has imported the agent is a process like any other to its test."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.component.preloaded import Preloaded
from tests.patience import eventually
from vgpu_agent.kubelet import sockets
from vgpu_agent.sim.agent_process import StartedProcess

_PROGRAM = """\
import json, os, signal, sys
from vgpu_agent.kubelet import sockets
print(json.dumps({
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "variables": sorted(os.environ),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:4],
    "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "socket": sockets.new_socket_name("a/b"),
    "command": sys.orig_argv,
    "imported": "vgpu_agent.agent.composition" in sys.modules,
}), flush=True)
"""


@pytest.fixture
def folder_of_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with programs to run by their module's name."""
    (folder / "tells.py").write_text(_PROGRAM)
    (folder / "fails.py").write_text("raise SystemExit(3)")
    (folder / "waits.py").write_text("import time; print('is there', flush=True); time.sleep(300)")
    monkeypatch.chdir(folder)
    return folder


async def _start(preloaded: Preloaded, folder: Path, *words: str, **more: str) -> StartedProcess:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **more}
    with (folder / "log").open("ab") as log:
        return await preloaded.start(words, environment, log)


async def test_a_module_runs_as_if_its_interpreter_were_new(
    preloaded: Preloaded, folder_of_program: Path
) -> None:
    """Arguments, folder, environment, descriptors, signals; and nothing has another one's name."""
    for _ in range(2):
        process = await _start(preloaded, folder_of_program, "tells", "a", "b c", MINE="x")
        assert await process.wait() == 0
    first, second = map(json.loads, (folder_of_program / "log").read_text().splitlines())
    assert first["arguments"] == ["a", "b c"]
    assert first["folder"] == str(folder_of_program)
    assert set(first["variables"]) == {*os.environ, "PYTHONUNBUFFERED", "MINE"}
    assert first["descriptors"] == [0, 1, 2, 3]  # the last is that of the listing itself
    assert first["default"]
    assert first["command"] == [sys.executable, "-m", "tells", "a", "b c"]
    assert first["imported"]
    names = {first["socket"], second["socket"], sockets.new_socket_name("a/b")}
    assert len({name.rsplit("-", 2)[1] for name in names}) == 3


async def test_its_end_is_reported(preloaded: Preloaded, folder_of_program: Path) -> None:
    """An exit status, or the signal."""
    failed = await _start(preloaded, folder_of_program, "fails")
    assert await failed.wait() == 3
    waiting = await _start(preloaded, folder_of_program, "waits")
    assert waiting.returncode is None
    os.kill(waiting.pid, signal.SIGKILL)
    assert await waiting.wait() == -signal.SIGKILL


async def test_a_variable_that_only_a_start_reads_gets_a_new_interpreter(
    preloaded: Preloaded, folder_of_program: Path
) -> None:
    """A fork would run without it, and the test would show nothing."""
    process = await _start(preloaded, folder_of_program, "tells", PYTHONHASHSEED="1")
    assert await process.wait() == 0
    assert not json.loads((folder_of_program / "log").read_text())["imported"]


async def test_no_fork_outlives_the_tests(folder_of_program: Path) -> None:
    """It would keep a port, or write into the next test's folder."""
    with Preloaded() as preloaded:
        process = await _start(preloaded, folder_of_program, "waits")
        log = folder_of_program / "log"
        await eventually(lambda: log.exists() and "is there" in log.read_text())
    await eventually(lambda: not Path(f"/proc/{process.pid}").exists())
    assert process.returncode == -signal.SIGTERM
