"""The map from contract lines to tests finds gaps, wrong labels and tests that do not run."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "contract_map.py"

Run = Callable[..., int]


@pytest.fixture
def script() -> dict[str, Any]:
    """The script's names."""
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the script on one test file with these docstrings, one test each."""

    def run(*docstrings: str, before: str = "") -> int:
        tests = "".join(f'{before}def test_{number}():\n    """{text}"""\n' for number, text in enumerate(docstrings))
        (tmp_path / "test_some.py").write_text(tests)
        monkeypatch.setattr(sys, "argv", ["contract_map", str(tmp_path)])
        return int(script["main"]())

    return run


def _all_labels(script: dict[str, Any]) -> list[str]:
    return list(script["WANTED"])


def test_every_line_held_is_a_success(script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, and each line stands in the table with its test."""
    assert run(*_all_labels(script)) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(_all_labels(script))
    assert "test_some.py::test_0" in shown.out.splitlines()[0]
    assert shown.err == ""


def test_a_gap_is_named(script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A line without a test: exit 1, and its label in the last sentence as well as in the table."""
    assert run(*(label for label in _all_labels(script) if label != "volcano-gpushare:D3")) == 1
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines() if "NO TEST" in line] == ["volcano-gpushare:D3"]
    assert shown.err == f"1 of {len(_all_labels(script))} lines have no test: volcano-gpushare:D3\n"


def test_a_longer_number_is_another_line(script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """``D13`` does not hold ``D1``."""
    assert run(*(label for label in _all_labels(script) if label != "volcano-vgpu:D1")) == 1
    assert "volcano-vgpu:D1\n" in capsys.readouterr().err


def test_a_line_that_does_not_exist_is_an_error(script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip in a label does not pass as a test of nothing."""
    assert run(*_all_labels(script), "volcano-vgpu:D99: no such row") == 1
    assert "there is no volcano-vgpu:D99" in capsys.readouterr().err


def test_lines_for_later_may_be_quoted(script: dict[str, Any], run: Run) -> None:
    """MIG rows are neither wanted nor wrong."""
    assert run(*_all_labels(script), "volcano-vgpu:D15 is for later") == 0


@pytest.mark.parametrize("mark", ["skip", "skip(reason='later')", "xfail"])
def test_a_test_that_does_not_count_for_pytest_holds_nothing(script: dict[str, Any], run: Run, mark: str) -> None:
    """Skipped tests, and tests that are expected to fail, prove nothing."""
    assert run(*_all_labels(script), before=f"@pytest.mark.{mark}\n") == 1


@pytest.mark.parametrize(
    "source",
    ['"""volcano-vgpu:G1"""\n', 'def helper():\n    """volcano-vgpu:G1"""\n', "def test_it():\n    # volcano-vgpu:G1\n    pass\n"],
    ids=["module", "helper", "comment"],
)
def test_only_the_docstring_of_a_test_counts(script: dict[str, Any], source: str) -> None:
    """What a module, a helper or a comment says is no claim."""
    assert script["claims_of"](source, "test_it.py") == []


def test_tests_of_the_simulator_hold_nothing(script: dict[str, Any], tmp_path: Path) -> None:
    """What a stand-in scheduler does right says nothing about the agent."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "test_stand_in.py").write_text('def test_it():\n    """volcano-vgpu:G3"""\n')
    assert script["claims_below"](tmp_path) == []


def test_methods_and_coroutines_are_tests_too(script: dict[str, Any]) -> None:
    """A label is found in a class of tests and in an asynchronous test, once for each test."""
    source = 'class TestIt:\n    async def test_it(self):\n        """volcano-vgpu:G1 and volcano-vgpu:G1, volcano-vgpu:G2"""\n'
    assert [claim.label for claim in script["claims_of"](source, "test_it.py")] == ["volcano-vgpu:G1", "volcano-vgpu:G2"]
