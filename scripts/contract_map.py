#!/usr/bin/env python3
"""Map the lines of the replaced plugins' contracts to tests,
and find references to contracts that lead nowhere.

usage: scripts/contract_map.py [--all] [FOLDER]
  --all    name every test of a line, not only the first
  FOLDER   where to look for tests (default: tests)

       scripts/contract_map.py --references [FOLDER]
  FOLDER   where to look for references (default: everything in the repository that people write)

The contracts are the pages of docs/contracts. Its README says how a line gets its label and how a
reference is written. Each labelled line needs a test if its page says so (`HELD`): a test whose
docstring quotes the label as `volcano-vgpu:G3`. Lines in a section that says why they have no test
(`NOT_HELD`) are left out. Only the docstring of a test function counts. Tests that are skipped or
expected to fail do not count, nor do those of the simulator: a stand-in that is right says nothing
about the agent.

Exit 1 when a line has no test, a test claims a line that does not exist, or a reference leads
nowhere. scripts/test makes the map, and scripts/lint checks the references.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import pathlib
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / "docs" / "contracts"
FOLDERS = ("vgpu_agent", "tests", "scripts", "docs", "manifests", "protos")
FILES = ("README.md", "CHANGELOG.md", "SECURITY.md", "Containerfile", "pyproject.toml")

HELD = "Every labelled line of this page is held by a test."
# Up to the next heading; the lines can be cited like all others.
NOT_HELD = "The rows of this section have no test; each says why."

# Texts that are no contract of ours and whose sections may be cited all the same.
OUTSIDE = r"RFC \d+|CDI"

_NUMBER = r"(?:[IVX]+\.)?\d+(?:\.\d+)*"
_ITEM = rf"(?:§{_NUMBER}(?:-\d+)?|[A-Z]\d{{1,2}})(?!\w)"
# A line break may stand between two words, and the next line of a comment begins with its mark.
_GAP = r"\s+(?:(?:\#|//)\s+)?"
_LIST = rf"{_ITEM}(?:(?:,{_GAP}|,?{_GAP}(?:and|to){_GAP}){_ITEM})*"

_HEADING = re.compile(rf"^#{{2,4}} ({_NUMBER})\.?\s")
_LISTED = re.compile(r"^ {0,3}(\d+)\. ")
# `| G3 a title | …`, or `**G3 a title** …`; a page that tests do not hold needs no titles.
_LINE = re.compile(rf"^(?:\| |\*\*)([A-Z]\d{{1,2}}|§{_NUMBER}(?:-\d+)?)(?: ([^|*]+?))?(?: \||\*\*)")


@dataclasses.dataclass(frozen=True)
class Page:
    """The parts of one contract that can be cited.

    Attributes:
        anchors: sections, items of numbered lists, and labels of lines, as
            `nvidia §4, §10.6, §6.2-1, G3` cites them.
        lines: label → title of the lines that need a test; empty where the page does not say that
            they do.
    """

    anchors: frozenset[str]
    lines: Mapping[str, str]


def page_of(text: str) -> Page:
    """Read one page of docs/contracts."""
    anchors: set[str] = set()
    lines: dict[str, str] = {}
    section, held = "", True
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            section, held = f"§{heading[1]}", True
            anchors.add(section)
        elif line == NOT_HELD:
            held = False
        elif (listed := _LISTED.match(line)) and section:
            anchors.add(f"{section}.{listed[1]}")
        elif labelled := _LINE.match(line):
            anchors.add(labelled[1])
            if held:
                lines[labelled[1]] = labelled[2] or ""
    return Page(frozenset(anchors), lines if HELD in text else {})


def pages_in(folder: pathlib.Path) -> dict[str, Page]:
    """Contract's name → page; the index of the folder is none."""
    return {
        path.stem: page_of(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.md"))
        if path.name != "README.md"
    }


PAGES = pages_in(CONTRACTS)
WANTED = {
    f"{contract}:{label}": title
    for contract, page in PAGES.items()
    for label, title in page.lines.items()
}
LABEL = re.compile(
    rf"\b(?:{'|'.join(contract for contract, page in PAGES.items() if page.lines)}):(?:[A-Z]\d+|"
    rf"§{_NUMBER}(?:-\d+)?)(?![\d.]*\d)"
)


# Tests of lines


@dataclasses.dataclass(frozen=True)
class Claim:
    """A test that says it holds a line."""

    label: str
    test: str
    line: int


def claims_of(source: str, name: str) -> list[Claim]:
    """Collect what the tests of one file claim, in the order of the file;
    each label once a test.
    """
    claims = []
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or not node.name.startswith("test_")
            or _is_idle(node)
        ):
            continue
        labels = dict.fromkeys(LABEL.findall(ast.get_docstring(node) or ""))
        claims += [Claim(label, f"{name}::{node.name}", node.lineno) for label in labels]
    return sorted(claims, key=lambda claim: claim.line)


def _is_idle(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether pytest leaves the test out, or expects it to fail."""
    marks = [ast.unparse(decorator) for decorator in test.decorator_list]
    return any(
        mark.startswith(("pytest.mark.skip", "pytest.mark.xfail"))
        and not mark.startswith("pytest.mark.skipif")
        for mark in marks
    )


def claims_below(folder: pathlib.Path) -> list[Claim]:
    """Collect what all test files below ``folder`` claim, by file;
    those of the simulator left out.
    """
    return [
        claim
        for path in sorted(folder.rglob("test_*.py"))
        if path.relative_to(folder).parts[0] != "sim"
        for claim in claims_of(path.read_text(encoding="utf-8"), str(path.relative_to(folder)))
    ]


def table(claims: list[Claim], *, every: bool) -> str:
    """Label, subject and test, one line each; a gap is marked."""
    lines = []
    labels, subjects = max(map(len, WANTED)), max(map(len, WANTED.values()))
    for label, subject in WANTED.items():
        tests = [claim.test for claim in claims if claim.label == label]
        more = f" (and {len(tests) - 1} more)" if len(tests) > 1 and not every else ""
        shown = (tests if every else tests[:1]) or ["-- NO TEST --"]
        lines.append(f"{label:<{labels}}  {subject:<{subjects}}  {shown[0]}{more}")
        lines += [f"{'':<{labels + subjects + 4}}{test}" for test in shown[1:]]
    return "\n".join(lines)


# References


@dataclasses.dataclass(frozen=True)
class Astray:
    """A reference that leads nowhere: the line it is on, its text, and what to do about it."""

    line: int
    text: str
    remedy: str


def astray_in(text: str, pages: Mapping[str, Page], *, own: str = "") -> list[Astray]:
    """Find the references in ``text`` that lead nowhere, in its order.

    Args:
        text: a source file, or a page of documentation.
        pages: contract's name → page.
        own: the contract whose page ``text`` is, if it is one; it cites its own sections without a
            name.
    """
    found: list[tuple[int, str, str]] = []
    covered: set[int] = set()
    for match in _references(tuple(pages)).finditer(text):
        covered.update(range(*match.span()))
        contract = match["contract"]
        for cited in re.finditer(_ITEM, match["items"]):
            if cited[0] not in pages[contract].anchors:
                at = match.start("items") + cited.start()
                remedy = (
                    f"docs/contracts/{contract}.md has no such section, vector or row; correct the "
                    "number, or add it there"
                )
                found.append((at, f"{contract} {cited[0]}", remedy))
    for match in _old_form(tuple(pages)).finditer(text):
        covered.update(range(*match.span()))
        found.append(
            (
                match.start(),
                " ".join(match[0].split()),
                f'write "{match["contract"].lower()} {match["item"]}"',
            )
        )
    for match in re.finditer(
        rf"(?P<outside>\b(?:{OUTSIDE}){_GAP})?(?P<item>§ ?{_NUMBER}(?:-\d+)?)", text
    ):
        at, item = match.start("item"), match["item"]
        if match["outside"] or at in covered or (own and item in pages[own].anchors):
            continue
        remedy = (
            f"docs/contracts/{own}.md has no such section"
            if own
            else f'say of which contract, as in "volcano-vgpu {item}"'
        )
        found.append((at, item, remedy))
    return [
        Astray(text.count("\n", 0, at) + 1, reference, remedy)
        for at, reference, remedy in sorted(found)
    ]


@functools.cache
def _references(contracts: tuple[str, ...]) -> re.Pattern[str]:
    """Match `volcano-vgpu §3.4, G3` and `volcano-vgpu:G3`;
    only the form with a space goes on with a list.
    """
    name = rf"(?<![\w./-])(?P<contract>{'|'.join(sorted(contracts, key=len, reverse=True))})"
    return re.compile(
        rf"{name}(?::(?=(?P<label>{_ITEM}))|{_GAP}(?={_ITEM}))(?P<items>(?(label)(?P=label)|"
        rf"{_LIST}))"
    )


@functools.cache
def _old_form(contracts: tuple[str, ...]) -> re.Pattern[str]:
    """Match the name, the word contract, and an item; the word says nothing."""
    return re.compile(
        rf"(?<![\w./-])(?P<contract>(?i:{'|'.join(contracts)})) contract,?{_GAP}(?P<item>{_ITEM})"
    )


def texts_in(places: tuple[pathlib.Path, ...]) -> Iterator[tuple[pathlib.Path, str]]:
    """Read every text file at or below these places;
    others, caches and hidden folders are left out.
    """
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            hidden = any(
                part.startswith((".", "__pycache__")) for part in path.relative_to(place).parts
            )
            if hidden or not path.is_file():
                continue
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def print_astray(places: tuple[pathlib.Path, ...]) -> int:
    """Print each reference that leads nowhere; 1 when there is one."""
    status = 0
    for path, text in texts_in(places):
        own = path.stem if path.parent == CONTRACTS and path.stem in PAGES else ""
        for astray in astray_in(text, PAGES, own=own):
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{shown}:{astray.line}: {astray.text}: {astray.remedy}", file=sys.stderr)
            status = 1
    return status


def print_map(folder: pathlib.Path, *, every: bool) -> int:
    """Print the table; 1 when there is a gap or an unknown label."""
    claims = claims_below(folder)
    print(table(claims, every=every))
    held = {claim.label for claim in claims}
    gaps = [label for label in WANTED if label not in held]
    unknown = [claim for claim in claims if claim.label not in WANTED]
    for claim in unknown:
        page = f"docs/contracts/{claim.label.partition(':')[0]}.md"
        print(
            f"{claim.test}, line {claim.line}: there is no {claim.label}; see {page}",
            file=sys.stderr,
        )
    if gaps:
        print(
            f"{len(gaps)} of {len(WANTED)} lines have no test: {', '.join(gaps)}", file=sys.stderr
        )
    return 1 if gaps or unknown else 0


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="name every test of a line")
    parser.add_argument(
        "--references", action="store_true", help="look for references that lead nowhere"
    )
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="where to look")
    arguments = parser.parse_args()
    if arguments.references:
        return print_astray(
            (arguments.folder,)
            if arguments.folder
            else tuple(ROOT / place for place in FOLDERS + FILES)
        )
    return print_map(arguments.folder or ROOT / "tests", every=arguments.all)


if __name__ == "__main__":
    sys.exit(main())
