"""The map from contract lines to tests finds gaps, wrong labels and tests that do not run; the
check finds references that lead nowhere.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "contract_map.py"

# The checker reads this file as well, so its examples must not look like references to it.
S = "\N{SECTION SIGN}"

PAGE = f"""# peer: a plugin

{{held}}

## 4. Ids

1. A first rule.
2. A second rule.

### 4.1 Vectors

| line | ids | result |
|---|---|---|
| {S}4.1-1 one id | a | one |
| V1 two ids | a, b | two |

**G3 an answer**: the variable and nothing else.

## I.7 Defects

| line | ours |
|---|---|
| D2 an id given twice | refused |
"""

Run = Callable[..., int]


@pytest.fixture
def script() -> dict[str, Any]:
    """The script's names."""
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the script on one test file with these docstrings, one test each."""

    def run(*docstrings: str, before: str = "") -> int:
        tests = "".join(
            f'{before}def test_{number}():\n    """{text}"""\n'
            for number, text in enumerate(docstrings)
        )
        (tmp_path / "test_some.py").write_text(tests)
        monkeypatch.setattr(sys, "argv", ["contract_map", str(tmp_path)])
        return int(script["main"]())

    return run


def _all_labels(script: dict[str, Any]) -> list[str]:
    return list(script["WANTED"])


def test_every_line_held_is_a_success(
    script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0, and each line is in the table with its test."""
    assert run(*_all_labels(script)) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(_all_labels(script))
    assert "test_some.py::test_0" in shown.out.splitlines()[0]
    assert shown.err == ""


def test_a_gap_is_named(
    script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line without a test: exit 1, and its label in the last sentence as well as in the table."""
    assert run(*(label for label in _all_labels(script) if label != "volcano-gpushare:D3")) == 1
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines() if "NO TEST" in line] == [
        "volcano-gpushare:D3"
    ]
    assert shown.err == f"1 of {len(_all_labels(script))} lines have no test: volcano-gpushare:D3\n"


def test_a_longer_number_is_another_line(
    script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """``D13`` does not hold ``D1``."""
    assert run(*(label for label in _all_labels(script) if label != "volcano-vgpu:D1")) == 1
    assert "volcano-vgpu:D1\n" in capsys.readouterr().err


def test_a_line_that_does_not_exist_is_an_error(
    script: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip in a label does not pass as a test of nothing."""
    no_such_row = f"volcano-vgpu:D{99}"
    assert run(*_all_labels(script), f"{no_such_row}: quoted all the same") == 1
    assert f"there is no {no_such_row}" in capsys.readouterr().err


def test_rows_that_say_why_need_no_test(script: dict[str, Any]) -> None:
    """They can be cited, and the heading after them ends the section."""
    page = PAGE.format(held=script["HELD"]) + (
        f"\n## 8. Apart\n\n{script['NOT_HELD']}\n\n| D3 a library's own | why |\n"
        "\n## 9. Others\n\n| D4 an id too many | refused |\n"
    )
    found = script["page_of"](page)
    assert {"D3", "D4"} <= found.anchors
    assert [label for label in found.lines if label.startswith("D")] == ["D2", "D4"]


def test_lines_for_later_may_be_quoted(script: dict[str, Any], run: Run) -> None:
    """MIG rows are neither wanted nor wrong."""
    assert run(*_all_labels(script), "volcano-vgpu:D15 is for later") == 0


@pytest.mark.parametrize("mark", ["skip", "skip(reason='later')", "xfail"])
def test_a_test_that_does_not_count_for_pytest_holds_nothing(
    script: dict[str, Any], run: Run, mark: str
) -> None:
    """Skipped tests, and tests that are expected to fail, prove nothing."""
    assert run(*_all_labels(script), before=f"@pytest.mark.{mark}\n") == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""volcano-vgpu:G1"""\n',
        'def helper():\n    """volcano-vgpu:G1"""\n',
        "def test_it():\n    # volcano-vgpu:G1\n    pass\n",
    ],
    ids=["module", "helper", "comment"],
)
def test_only_the_docstring_of_a_test_counts(script: dict[str, Any], source: str) -> None:
    """A label in a module's docstring, a helper or a comment is no claim."""
    assert script["claims_of"](source, "test_it.py") == []


def test_tests_of_the_simulator_hold_nothing(script: dict[str, Any], tmp_path: Path) -> None:
    """The correctness of a stand-in scheduler says nothing about the agent."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "test_stand_in.py").write_text(
        'def test_it():\n    """volcano-vgpu:G3"""\n'
    )
    assert script["claims_below"](tmp_path) == []


def test_methods_and_coroutines_are_tests_too(script: dict[str, Any]) -> None:
    """A label is found in a class of tests and in an asynchronous test, once for each test."""
    source = (
        'class TestIt:\n    async def test_it(self):\n        """volcano-vgpu:G1 and '
        'volcano-vgpu:G1, volcano-vgpu:G2"""\n'
    )
    assert [claim.label for claim in script["claims_of"](source, "test_it.py")] == [
        "volcano-vgpu:G1",
        "volcano-vgpu:G2",
    ]


def _page(script: dict[str, Any], *, held: bool = True) -> Any:
    return script["page_of"](PAGE.format(held=script["HELD"] if held else "Not all of it."))


def test_the_page_says_which_lines_there_are(script: dict[str, Any]) -> None:
    """A row or a paragraph that begins with a label is a line,
    and what follows the label is its title.
    """
    lines = {f"{S}4.1-1": "one id", "V1": "two ids", "G3": "an answer", "D2": "an id given twice"}
    assert _page(script).lines == lines
    assert _page(script, held=False).lines == {}


def test_what_can_be_cited(script: dict[str, Any]) -> None:
    """Sections, items of numbered lists, and lines, also of a page that tests do not hold."""
    sections = {f"{S}4", f"{S}4.1", f"{S}4.2", f"{S}I.7"}  # 4.1 is a section and an item of a list
    assert _page(script, held=False).anchors == {*sections, f"{S}4.1-1", "V1", "G3", "D2"}


@pytest.mark.parametrize(
    "text",
    [
        f"peer {S}4.1",
        f"peer {S}I.7 and {S}4",
        f"peer {S}4, G3",
        f"peer {S}4 to {S}4.2, and V1",
        "peer G3 (and peer D2)",
        "peer:G3: quoted by a test",
        f"peer:{S}4.1-1",
        f"# as in peer\n# {S}4.1",
        f"// peer\n// {S}4",
        "the peer V1000, another-peer:G9 and peer-to-peer G9",
        f"RFC 6902 {S}4.4",
    ],
)
def test_a_reference_that_leads_somewhere_is_no_finding(script: dict[str, Any], text: str) -> None:
    """Lists, ranges and line breaks included. So are texts that are no contract."""
    assert script["astray_in"](text, {"peer": _page(script)}) == []


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        (f"peer {S}9", f"peer {S}9", "peer.md has no such section"),
        (f"peer {S}4, {S}9", f"peer {S}9", "peer.md has no such section"),
        (f"peer {S}4 to {S}4.7", f"peer {S}4.7", "correct the number"),
        (f"peer {S}4, G4", "peer G4", "peer.md has no such section, vector or row"),
        ("peer:D3", "peer D3", "peer.md has no such section, vector or row"),
        (f"peer:G3 and {S}4", f"{S}4", "say of which contract"),
        (f"contract {S}4", f"{S}4", "say of which contract"),
        (f"stranger {S}4", f"{S}4", "say of which contract"),
        ("Peer contract V1", "Peer contract V1", 'write "peer V1"'),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(
    script: dict[str, Any], text: str, found: str, remedy: str
) -> None:
    """Its line, its text, and what to do about it."""
    (astray,) = script["astray_in"](f"first line\nsecond line: {text}.\n", {"peer": _page(script)})
    assert (astray.line, astray.text) == (2, found)
    assert remedy in astray.remedy


def test_a_page_cites_itself_without_its_name(script: dict[str, Any]) -> None:
    """It cites only sections that it has."""
    (astray,) = script["astray_in"](f"see {S}4.1, and {S}9", {"peer": _page(script)}, own="peer")
    assert (astray.text, astray.remedy) == (f"{S}9", "docs/contracts/peer.md has no such section")


def test_references_are_looked_for_in_every_text(
    script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """File, line and remedy on stderr, exit 1; caches and what is no text are read past."""
    monkeypatch.setattr(sys, "argv", ["contract_map", "--references", str(tmp_path)])
    (tmp_path / "library.so").write_bytes(b"\xff\xfe")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "old.py").write_text(f"# {S}4\n")
    (tmp_path / "good.py").write_text(f"# kubelet {S}4\n")
    assert script["main"]() == 0
    (tmp_path / "bad.md").write_text(f"\nwritten down in kubelet {S}99\n")
    assert script["main"]() == 1
    assert capsys.readouterr().err.startswith(
        f"{tmp_path}/bad.md:2: kubelet {S}99: docs/contracts/kubelet.md has no such section"
    )
