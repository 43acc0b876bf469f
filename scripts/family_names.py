#!/usr/bin/env python3
"""Find places of the product that know a family by its name, or by a domain of its resources; print
them and exit 1 when there are any.

Other rooms learn about families from `families.registry`. A name or a key of a family elsewhere is
a place that its package does not show, and that a new family would have to be added to. Read are
string literals, docstrings aside, and the identifiers of the code. The family `nvidia` shares its
name and its domain with the vendor, so it is not looked for.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from vgpu_agent.families.registry import FAMILIES  # noqa: E402 - the path comes first

if TYPE_CHECKING:
    from collections.abc import Iterator

PRODUCT = ROOT / "vgpu_agent"
VENDOR = "nvidia"
# Where names of families may stand, and why.
EXCEPTIONS = {
    "families": "the families themselves",
    "sim": "the simulator plays the schedulers of certain families",
    "protocol": "generated",
    "isolation/vgpu_control.py": "the library's own paths in containers",
    "config/vgpu_control.py": "the default of the directory on the node, which has such a name",
    "runtime/control_library.py": "the product that is to be delivered, for people",
}


def pattern() -> re.Pattern[str]:
    """Build the pattern of all names, as words, and of all domains, with their slash."""
    names, domains = set[str](), set[str]()
    for family in FAMILIES:
        if family.name != VENDOR:
            names |= {
                family.name,
                family.settings.attribute,
                family.settings.key.removeprefix("families."),
            }
            domains |= {
                name.partition("/")[0] for name in (*family.resource_prefixes, *family.annotations)
            } - {f"{VENDOR}.com"}
    words = [rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])" for name in names]
    # a longer domain that ends so is another one, such as that of a scheduler's own API group
    keys = [rf"(?<![a-z0-9.-]){re.escape(domain)}/" for domain in domains]
    return re.compile("|".join(sorted([*words, *keys])))


def places(code: str, forbidden: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name in ``code``."""
    tree = ast.parse(code)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for text in [] if id(node) in documents else _texts(node):
            if found := forbidden.search(text):
                yield getattr(node, "lineno", 0), found.group()


def _texts(node: ast.AST) -> list[str]:
    match node:
        case ast.Constant(value=str(text)) | ast.Name(id=text) | ast.Attribute(attr=text):
            return [text]
        case ast.keyword(arg=str(text)) | ast.arg(arg=text) | ast.ImportFrom(module=str(text)):
            return [text]
        case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.alias(name=text):
            return [text]
        case _:
            return []


def main() -> int:
    """Print each place."""
    forbidden, status = pattern(), 0
    for path in sorted(PRODUCT.rglob("*.py")):
        name = path.relative_to(PRODUCT).as_posix()
        if not any(name == excepted or name.startswith(f"{excepted}/") for excepted in EXCEPTIONS):
            for line, found in places(path.read_text(encoding="utf-8"), forbidden):
                print(
                    f"vgpu_agent/{name}:{line}: {found}: only families/ and its registry know a "
                    "family by its name",
                    file=sys.stderr,
                )
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
