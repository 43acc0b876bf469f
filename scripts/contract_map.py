#!/usr/bin/env python3
"""Which test holds which line of the replaced plugins' contracts; exit 1 when a line has none, or a test claims one that does not exist.

usage: scripts/contract_map.py [--all] [FOLDER]
  --all    name every test of a line, not only the first
  FOLDER   where to look for tests (default: tests)

A golden vector or a row of a table of defects is held by the tests whose docstring quotes it as `volcano-vgpu:G3`. Only the docstring of a
test function counts, and not that of a test that is skipped or expected to fail, nor of one of the simulator: what a stand-in does right
says nothing about the agent. Run by scripts/test.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

LABEL = re.compile(r"\b(?:volcano-vgpu|volcano-gpushare|nvidia|iktos|aws):(?:[A-Z]\d+|§[\dIVX]+(?:\.\d+)?(?:-\d+)?)(?![\d.]*\d)")

# Label → what the line is about, in a few words. G: golden vectors of volcano-vgpu, S: those of volcano-gpushare, D: defects of the
# replaced plugins, which this agent must not have.
LINES = {
    "volcano-vgpu": {
        "G1": "node annotation that registers cards",
        "G2": "ids and amounts for kubelet",
        "G3": "annotations that the scheduler writes",
        "G4": "environment and mounts of a container",
        "G5": "annotations of a served pod",
        "G6": "two cards in one container",
        "G7": "number only: a whole card's memory",
        "G8": "several containers, some without GPU",
        "G9": "memory and cores answer nothing",
        "G11": "no pod found for the ids",
        "G13": "entries that older readers accept",
        "D1": "pods with several GPU containers",
        "D2": "equal pods in the same second",
        "D3": "sidecar without GPU comes first",
        "D4": "running pod taken a second time",
        "D5": "directory of a live container removed",
        "D6": "unhealthy card is still scheduled",
        "D7": "container metrics that go missing",
        "D8": "settings that were without effect",
        "D9": "device list over four megabytes",
        "D10": "preferences asked for memory ids",
        "D11": "registered with kubelet before the scheduler",
        "D12": "all pods listed at each Allocate",
        "D13": "one more loop per kubelet restart",
        "D14": "init container takes another's segment",
        "D17": "over-commit that the scheduler misses",
        "D18": "gang rollback leaves the agent alone",
        "D19": "node lock not given back",
        "D20": "scrape reads a region being unmapped",
        "D21": "library overwritten under running containers",
        "D22": "limits in another order than cards",
        "D23": "configuration read once, errors silent",
        "D24": "annotations that outlive the agent",
    },
    "volcano-gpushare": {
        "S1": "memory ids and count of cards",
        "S2": "card that the scheduler chooses",
        "S3": "environment for a memory budget",
        "S4": "factor makes larger units",
        "S5": "whole cards by UUID",
        "S6": "unhealthy card is named",
        "S7": "two containers on one card",
        "D1": "pods with several GPU containers",
        "D2": "equal pods get swapped cards",
        "D3": "whole cards on fresh nodes",
        "D4": "cards of different size",
        "D5": "card numbers that shift",
        "D6": "pod overwritten without conflict check",
        "D7": "count of cards lost by kubelet",
        "D8": "stale list of unhealthy cards",
        "D9": "init container with GPU memory",
        "D10": "device list over four megabytes",
        "D11": "configuration that has no effect",
        "D12": "pod that no GPU scheduler placed",
        "D13": "several cards for a memory pod",
    },
}
# Lines of what is being built: they may be quoted and need not be held yet. A line without a number of its own is named by its section
# and its place in the section's table.
LATER = {
    "volcano-vgpu": ("G10", "G12", "D15", "D16"),
    "nvidia": (
        *(f"G{number}" for number in range(1, 17)),
        *(f"A{number}" for number in range(1, 27)),
        "§6.1",
        *(f"§6.2-{number}" for number in range(1, 11)),
        "§17.3",
        *(f"§17.4-{number}" for number in range(1, 9)),
        *(f"D{number}" for number in range(1, 16)),
    ),
    "iktos": (
        *(f"K{number}" for number in range(1, 10)),
        *(f"§I.4-{number}" for number in range(1, 15)),
        *(f"D{number}" for number in range(1, 17)),
    ),
    "aws": (
        *(f"W{number}" for number in range(1, 5)),
        *(f"§II.6-{number}" for number in range(1, 5)),
        *(f"D{number}" for number in range(1, 13)),
    ),
}

WANTED = {f"{contract}:{line}": subject for contract, lines in LINES.items() for line, subject in lines.items()}
ALLOWED = WANTED.keys() | {f"{contract}:{line}" for contract, lines in LATER.items() for line in lines}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A test that says it holds a line."""

    label: str
    test: str
    line: int


def claims_of(source: str, name: str) -> list[Claim]:
    """What the tests of one file claim, in the order of the file; each label once a test."""
    claims = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_") or _is_idle(node):
            continue
        labels = dict.fromkeys(LABEL.findall(ast.get_docstring(node) or ""))
        claims += [Claim(label, f"{name}::{node.name}", node.lineno) for label in labels]
    return sorted(claims, key=lambda claim: claim.line)


def _is_idle(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether pytest leaves the test out, or expects it to fail."""
    marks = [ast.unparse(decorator) for decorator in test.decorator_list]
    return any(mark.startswith(("pytest.mark.skip", "pytest.mark.xfail")) and not mark.startswith("pytest.mark.skipif") for mark in marks)


def claims_below(folder: pathlib.Path) -> list[Claim]:
    """What all test files below ``folder`` claim, by file; those of the simulator left out."""
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


def main() -> int:
    """Print the table; 1 when there is a gap or an unknown label."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="name every test of a line")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "tests", help="where to look for tests")
    arguments = parser.parse_args()

    claims = claims_below(arguments.folder)
    print(table(claims, every=arguments.all))
    held = {claim.label for claim in claims}
    gaps = [label for label in WANTED if label not in held]
    unknown = [claim for claim in claims if claim.label not in ALLOWED]
    for claim in unknown:
        print(f"{claim.test}, line {claim.line}: there is no {claim.label}; see LINES in scripts/contract_map.py", file=sys.stderr)
    if gaps:
        print(f"{len(gaps)} of {len(WANTED)} lines have no test: {', '.join(gaps)}", file=sys.stderr)
    return 1 if gaps or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
