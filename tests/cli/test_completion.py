"""Completion and manual page, as the shells and man read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vgpu_agent.cli import command_tree, completion, main, manual

KNOWN = list(command_tree.commands(main.whole_parser()))


def script(shell: str) -> str:
    """Return the output of ``vgpu-agent completion``."""
    return "\n".join(completion._SHELLS[shell](KNOWN)) + "\n"


def completed(*words: str) -> set[str]:
    """The words that bash offers for the last of ``words``."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script('bash')}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        '_vgpu_agent; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    ran = subprocess.run(
        ["bash", "--norc"], input=program, capture_output=True, text=True, check=True
    )
    assert ran.stderr == ""
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("vgpu-agent", "st"), {"status"}),
        (("vgpu-agent", "config", "ch"), {"check"}),
        (("vgpu-agent", "status", "--wa"), {"--watch", "--wait"}),
        (("vgpu-agent", "status", "-o", ""), {"wide", "json", "yaml"}),
        (("vgpu-agent", "status", "--wait", "r"), {"ready"}),
        (("vgpu-agent", "completion", ""), {"bash", "zsh", "fish", "-h", "--help"}),
        (("vgpu-agent", "run", "--node-n"), {"--node-name"}),
        (("vgpu-agent", "events", "--since", "1"), set()),
    ],
)
def test_bash_completes_commands_flags_and_values(
    words: tuple[str, ...], offered: set[str]
) -> None:
    """The script runs in a real bash."""
    assert completed(*words) == offered


def test_bash_completes_files(tmp_path: Path) -> None:
    """A flag that takes a path is followed by files."""
    (tmp_path / "config.yaml").touch()
    assert completed("vgpu-agent", "run", "--config", f"{tmp_path}/con") == {
        f"{tmp_path}/config.yaml"
    }


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_their_script(shell: str, tmp_path: Path) -> None:
    """Its syntax, by the shell itself where it is installed."""
    path = tmp_path / "script"
    path.write_text(script(shell))
    if shutil.which(shell) is None:
        # bash is on every machine; the other two are no requirement of the tests
        pytest.skip(f"{shell} is not installed on this machine")
    ran = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_in_the_script(shell: str) -> None:
    """None is forgotten, because all are read from the parsers."""
    text = script(shell)
    for command in KNOWN:
        for name in command.commands:
            assert name in text
        for parameter in command.parameters:
            assert all(flag.lstrip("-") in text for flag in parameter.flags)


def test_the_page_in_the_docs_is_that_of_these_parsers() -> None:
    """scripts/generate writes it."""
    page = Path(__file__).resolve().parents[2] / "docs" / "vgpu-agent.1"
    assert page.read_text() == manual.page()


def test_the_manual_page_is_proper_roff_and_names_every_option() -> None:
    """Read by groff with all warnings, as man does."""
    text = manual.page()
    commands = list(command_tree.commands(main.whole_parser(simulator=False)))
    for command in commands:
        for parameter in command.parameters:
            assert all(flag.replace("-", "\\-") in text for flag in parameter.flags)
    assert {"sim", "demo"} & {command.words[0] for command in commands if command.words} == set()
    if shutil.which("groff") is None:
        # the page is compared with the one in docs/ all the same
        pytest.skip("groff is not installed on this machine")
    ran = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    assert "vgpu-agent status" in ran.stdout


@pytest.mark.parametrize("words", [["completion", "bash"], ["man"]])
def test_the_commands_print_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they are called in the same process as other commands."""
    assert main.main(words) == 0
    assert capsys.readouterr().out == (
        script("bash") if words[0] == "completion" else manual.page()
    )
