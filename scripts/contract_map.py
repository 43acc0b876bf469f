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

# Label → what the line is about, in a few words. D: defects of the replaced plugins, which this agent must not have; other letters: golden
# vectors. A line without a number of its own is named by its section, and by its place in the section's table.
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
        "G10": "MIG slices by strategy",
        "G11": "no pod found for the ids",
        "G12": "MIG instances that a scheduler chose",
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
        "D15": "one MIG instance for two pods",
        "D16": "tool failure that ends the process",
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
    "nvidia": {
        "G1": "whole GPUs without MIG",
        "G2": "MIG that strategy none does not see",
        "G3": "single: GPUs that are not alike",
        "G4": "single: slices as nvidia.com/gpu",
        "G5": "single: slices that are not alike",
        "G6": "mixed: a resource for each profile",
        "G7": "mixed: MIG mode without slices",
        "G8": "replicas of whole GPUs",
        "G9": "replicas under the shared name",
        "G10": "replicas of MIG slices",
        "G11": "MPS replicas with their limits",
        "G12": "time-slicing and MPS at once",
        "G13": "MPS with strategy mixed",
        "G14": "MPS on MIG slices",
        "G15": "more MPS clients than MPS serves",
        "G16": "one replica",
        "A1": "envvar: one GPU",
        "A2": "envvar: two GPUs in order",
        "A3": "envvar: replicas of two GPUs",
        "A4": "envvar: a MIG slice",
        "A5": "names by index",
        "A6": "volume-mounts",
        "A7": "cdi-annotations",
        "A8": "cdi-annotations with another prefix",
        "A9": "cdi-cri",
        "A10": "cdi-cri: a slice by index",
        "A11": "cdi-cri with GDS and IMEX",
        "A12": "envvar with IMEX",
        "A13": "volume-mounts with IMEX",
        "A14": "envvar and cdi-cri together",
        "A15": "envvar and volume-mounts together",
        "A16": "device nodes of a GPU",
        "A17": "device nodes below a driver root",
        "A18": "device nodes of a MIG slice",
        "A19": "MPS client with envvar",
        "A20": "MPS client with cdi-cri",
        "A21": "MPS client of a renamed resource",
        "A22": "MPS: more than one replica",
        "A23": "time-slicing: more than one replica",
        "A24": "id that nobody offers",
        "A25": "GDRCopy, GDS and MOFED",
        "A26": "WSL",
        "§6.1": "whole GPUs that belong together",
        "§6.2-1": "distributed: a GPU that is half used",
        "§6.2-2": "distributed: 2 of 2 × 4",
        "§6.2-3": "distributed: 3 of 3 × 2",
        "§6.2-4": "distributed: 4 of 2 × 4",
        "§6.2-5": "packed: 2 of 2 × 4",
        "§6.2-6": "packed: 3 of 3 × 2",
        "§6.2-7": "packed: 4 of 2 × 4",
        "§6.2-8": "packed: 5 of 2 × 4",
        "§6.2-9": "spread against packed",
        "§6.2-10": "fewer than wanted",
        "§17.3": "commands for an MPS daemon",
        "§17.4-1": "health: no lists",
        "§17.4-2": "health: all disabled",
        "§17.4-3": "health: one XID disabled",
        "§17.4-4": "health: one XID enabled",
        "§17.4-5": "health: all enabled",
        "§17.4-6": "health: enabled beats disabled",
        "§17.4-7": "health: all disabled but one",
        "§17.4-8": "health: all in both lists",
        "D1": "XID that flags one replica only",
        "D2": "GPU that never recovers",
        "D3": "enabled XID that is not watched",
        "D4": "choice that fails for another GPU",
        "D5": "order that chance decides",
        "D6": "compute capability 7.0 under MPS",
        "D7": "MPS daemon asked once only",
        "D8": "profile of a divided instance",
        "D9": "MIG geometry that changes",
        "D10": "unknown configuration keys",
        "D11": "health forgotten at a restart",
        "D12": "Allocate of an unhealthy id",
        "D13": "device node named twice",
        "D14": "no metrics and probes",
        "D15": "replicas and names for each GPU",
    },
    "iktos": {
        "K1": "replicas under a new name",
        "K2": "automatic replicas by memory",
        "K3": "empty configuration",
        "K4": "one replica with its suffix",
        "K5": "new names for MIG slices",
        "K6": "single: GPUs that are not alike",
        "K7": "single: replicas of slices",
        "K8": "single without MIG",
        "K9": "MIG that strategy none does not see",
        **{f"§I.4-{row}": f"spreading, row {row}" for row in range(1, 15)},
        "D1": "resource that is not listed",
        "D2": "new name ignored for MIG",
        "D3": "single without MIG never ends",
        "D4": "replicas that never fall ill",
        "D5": "choice of MIG replicas fails",
        "D6": "choice names ids nobody offers",
        "D7": "slices counted by their GPU's memory",
        "D8": "gigabytes of 1000 MiB",
        "D9": "counts and names not checked",
        "D10": "failed start retried at once",
        "D11": "NVML error ends the process",
        "D12": "memory spread over several GPUs",
        "D13": "limits that nothing enforces",
        "D14": "replica-10 before replica-2",
        "D15": "dead libraries",
        "D16": "NVIDIA runtime needed",
    },
    "aws": {
        "W1": "ten ids a GPU",
        "W2": "48 ids a GPU",
        "W3": "49 ids a GPU",
        "W4": "GPU in MIG mode",
        "§II.6-1": "one vGPU",
        "§II.6-2": "two of one GPU",
        "§II.6-3": "two of two GPUs",
        "§II.6-4": "id that nobody offers",
        "D1": "limits that ignore the share",
        "D2": "hostIPC for every workload",
        "D3": "kubelet restart",
        "D4": "registration retried by chance",
        "D5": "no driver looks healthy",
        "D6": "no health, choice, CDI, MIG",
        "D7": "several vGPUs on several GPUs",
        "D8": "not beside nvidia.com/gpu",
        "D9": "pods without a request see all GPUs",
        "D10": "dead manifest and libraries",
        "D11": "GPUs before Volta",
        "D12": "resource name for autoscalers",
    },
}

WANTED = {f"{contract}:{line}": subject for contract, lines in LINES.items() for line, subject in lines.items()}


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
    unknown = [claim for claim in claims if claim.label not in WANTED]
    for claim in unknown:
        print(f"{claim.test}, line {claim.line}: there is no {claim.label}; see LINES in scripts/contract_map.py", file=sys.stderr)
    if gaps:
        print(f"{len(gaps)} of {len(WANTED)} lines have no test: {', '.join(gaps)}", file=sys.stderr)
    return 1 if gaps or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
