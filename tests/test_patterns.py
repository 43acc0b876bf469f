"""Regular expressions of the agent, as the Python of its image understands them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import vgpu_agent

_ROOM = Path(vgpu_agent.__file__).parent
_MODULES = [
    path
    for path in sorted(_ROOM.rglob("*.py"))
    if re.search(r"^import re$", path.read_text(), re.MULTILINE)
]
# A quantifier that gives nothing back (`*+`, `++`, `?+`, `{2}+`), or a group that does not (`(?>`).
_POSSESSIVE = re.compile(r"(?<!\\)[*+?}]\+|\(\?>")


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOM)))
def test_no_pattern_is_possessive(path: Path) -> None:
    """Python before 3.11.5 matches too little with such patterns (CPython issue 106052),
    and the image has Debian's 3.11.2.
    """
    constants = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    ]
    texts = [
        each.decode("latin-1") if isinstance(each, bytes) else each
        for each in constants
        if isinstance(each, str | bytes)
    ]
    assert [
        text for text in texts if _POSSESSIVE.search(text) and len(text) < 200 and "\n" not in text
    ] == []
