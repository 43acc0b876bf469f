"""docs/events.md is the index by which a warning of the log is looked up,
so it has all of them and no other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "events.md").read_text()
_EVENT = re.compile(r"[a-z_]+\.[a-z_]+")
_LEVELS = {"warning", "error"}
_WRITERS = ("node", "pods", "events", "allocatable", "reschedule", "rescue", "gpu_evictions")
"""The names that writers give to `vgpu_agent.cluster.retrying.FailureLog`;
each is the first half of three events.
"""


def _calls() -> Iterator[tuple[Path, ast.Call, str]]:
    """Each call of a method with positional texts, by file, with the method's name."""
    for file in sorted((ROOT / "vgpu_agent").rglob("*.py")):
        if "sim" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield file, node, node.func.attr


def _level(call: ast.Call, method: str) -> str:
    """Return the level of a logging call; empty when it is none."""
    given = {
        word.value.value
        for word in call.keywords
        if word.arg == "level" and isinstance(word.value, ast.Constant)
    }
    if method == "record":
        return str(next(iter(given), ""))
    return method if method in _LEVELS else ""


def _events() -> set[str]:
    """Return every event that the agent logs as a warning or an error."""
    found = set[str]()
    for _, call, method in _calls():
        texts = [
            one.value
            for one in call.args[:3]
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        names = [text for text in texts if _EVENT.fullmatch(text)]
        if names and _level(call, method) in _LEVELS:
            found.add(names[0])
    return found | {
        f"{writer}.{what}" for writer in _WRITERS for what in ("failed", "forbidden", "refused")
    }


def test_every_warning_and_error_is_on_the_page() -> None:
    """An SRE searches for the name that the log shows at night."""
    listed = {
        name
        for row in PAGE.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", row.split("|")[1])
    }
    logged = _events()
    assert len(logged) > 80
    assert logged - listed == set()
    assert listed - logged == set()


def test_the_writers_are_those_of_the_code() -> None:
    """A sixth writer has three events of its own."""
    found = {
        node.args[1].value
        for file in (ROOT / "vgpu_agent" / "cluster").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "FailureLog"
        if isinstance(node.args[1], ast.Constant)
    }
    assert found == set(_WRITERS)


def test_every_link_leads_to_a_section() -> None:
    """The remedy is one step away."""
    for page, anchor in re.findall(r"\]\(([a-z-]+\.md)#([a-z0-9-]+)\)", PAGE):
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        slugs = {
            re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        assert anchor in slugs, f"{page}#{anchor}"
