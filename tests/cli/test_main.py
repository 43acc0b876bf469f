"""The command line as a whole: one line for each error,
and exit statuses that scripts can rely on.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu_agent.cli import main as cli
from vgpu_agent.errors import AgentError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``vgpu-agent version`` says which one it is and exits 0."""
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("vgpu-agent 0.")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-command"],
        ["run", "--no-such-flag"],
        ["config"],
        ["sim", "xid"],
        ["run", "stray"],
    ],
    ids=[
        "nothing",
        "unknown command",
        "unknown flag",
        "no subcommand",
        "missing argument",
        "stray word",
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage errors name the command and where to read on. No page of usage."""
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vgpu-agent")
    assert "--help" in line


def test_an_unknown_flag_points_at_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The top help does not know the flags of ``run``."""
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--replicas", "4"])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "vgpu-agent run: error: unrecognized arguments: --replicas 4 (see vgpu-agent run --help)\n"
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "--devices-split-count=2"], "--device-split-count"),
        (["run", "-device-cores-scalling", "2"], "--device-cores-scaling"),
        (["config", "check", "--feature_gate=CorePlugin=true"], "--feature-gates"),
    ],
)
def test_an_unknown_flag_that_is_close_to_one_names_it(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments of a DaemonSet were typed anew, and there are seventy flags to look through."""
    with pytest.raises(SystemExit):
        cli.main(words)
    assert f"; did you mean {meant}? (see vgpu-agent {words[0]} --help)" in capsys.readouterr().err


@pytest.fixture
def _log_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo that a command in this process configures the log."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@pytest.mark.usefixtures("_log_of_its_own")
@pytest.mark.parametrize(
    ("file_format", "flags"), [("console", ()), ("json", ("--log-format", "console"))]
)
def test_wrong_configuration_is_a_line_a_problem_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file_format: str, flags: tuple[str, ...]
) -> None:
    """Two mistakes, two lines, in the form of a compiler, where the log is for people."""
    file = tmp_path / "config.yaml"
    file.write_text(f"version: v1\nlisten: 5\nlog: {{level: loud, format: {file_format}}}\n")
    assert cli.main(["run", "--config", str(file), *flags]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{file}:2: listen: ")
    assert second.startswith(f"{file}:3: log.level: ")


@pytest.mark.usefixtures("_log_of_its_own")
def test_wrong_configuration_is_json_where_the_log_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collector of logs reads every line of the agent in one way."""
    file = tmp_path / "config.yaml"
    file.write_text("version: v1\nlisten: 5\n")
    assert cli.main(["run", "--config", str(file)]) == 2
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["msg"], line["command"], line["exit_status"]) == ("command.failed", "run", 2)
    assert line["error"].startswith(f"{file}:2: listen: ")


@pytest.mark.usefixtures("_log_of_its_own")
def test_a_failure_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of ours is written for an operator, not as a traceback."""

    def fail(_: object) -> int:
        raise AgentError("the address is in use")

    monkeypatch.setattr("vgpu_agent.cli.version._print_version", fail)
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err == "vgpu-agent: the address is in use\n"


@pytest.mark.parametrize(
    "command",
    [
        *("run", "status", "gpus", "pods", "events", "explain", "top", "doctor", "support-bundle"),
        *("why", "config", "completion", "man", "sim", "demo", "version"),
    ],
)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` exits 0; the commands that take options show examples."""
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert command == "version" or "examples:" in capsys.readouterr().out


def test_the_top_help_shows_every_command_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing a newcomer types."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(
        command in shown
        for command in ("run", "status", "why", "config", "sim", "demo", "version", "examples:")
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["version"],
        ["status", "--help"],
        ["top", "--help"],
        ["gpus", "--help"],
        ["pods", "--help"],
        ["events", "--help"],
        ["explain", "--help"],
        ["why", "--help"],
        ["config", "example"],
    ],
)
def test_small_commands_do_not_load_the_agents_libraries(argv: list[str]) -> None:
    """``status`` in a shell loop on a busy node must not import a gRPC stack and an HTTP server."""
    program = (
        "import sys, contextlib\nfrom vgpu_agent.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({argv!r})\n"
        "print(sorted({'aiohttp', 'grpclib', 'pynvml', 'prometheus_client', 'grpc'} & "
        "set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["status", "gpus", "pods", "events", "top"])
def test_commands_for_people_on_call_load_next_to_nothing(command: str) -> None:
    """Not even an event loop, the log or the families: each takes longer than all else they do."""
    program = (
        "import sys\nfrom vgpu_agent.cli.main import main\n"
        f"main([{command!r}, '--debug-listen', '127.0.0.1:1'])\n"
        "print(sorted({'asyncio', 'structlog', 'vgpu_agent.families', 'vgpu_agent.model'} & "
        "set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "connection refused" in ran.stderr
    assert ran.stdout == "[]\n"
