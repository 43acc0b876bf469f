"""docs/troubleshooting.md quotes what the agent says;
a message that is worded anew must be worded anew there as well.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from vgpu_agent.gpu import xid
from vgpu_agent.model import Remedy

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text()
_SHORTEST_FRAGMENT = 5  # characters; what is left of a message between two values may be a comma


def _quoted() -> list[str]:
    """Each line of the blocks marked as messages."""
    return [
        line
        for block in re.findall(r"^```message\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.fixture(scope="module")
def spoken() -> str:
    """Every text in the agent's code, implicit concatenation joined and values replaced
    by ``…``.
    """
    texts = []
    for file in sorted((ROOT / "vgpu_agent").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    texts += [xid.describe(code) for code in xid.KNOWN]
    texts += [remedy.sentence("…") for remedy in Remedy]
    return "\n".join(texts)


@pytest.mark.parametrize("code", xid.KNOWN)
def test_the_table_of_xids_is_that_of_the_code(code: int) -> None:
    """An operator looks a number up at night."""
    meaning, remedy = xid.KNOWN[code]
    assert f"\n| {code} | {meaning} | `{remedy.value}` |\n" in GUIDE


@pytest.mark.parametrize("remedy", Remedy)
def test_the_table_of_remedies_is_that_of_the_code(remedy: Remedy) -> None:
    """The short name in a metric leads to the sentence."""
    assert f"\n| `{remedy.value}` | {remedy.sentence('…')} |\n" in GUIDE


def test_there_are_messages() -> None:
    """A changed marker would leave nothing to check."""
    assert len(_quoted()) > 25


@pytest.mark.parametrize("message", _quoted())
def test_a_quoted_message_is_the_agents_own(spoken: str, message: str) -> None:
    """Each piece between two values is in the code, word for word;
    a subject, a text and a remedy may be apart there.
    """
    pieces = [
        piece
        for part in message.split("…")
        if len(piece := part.strip()) >= _SHORTEST_FRAGMENT and piece not in spoken
    ]
    missing = [
        each
        for piece in pieces
        for each in piece.removeprefix(": ").split("; ")
        if each not in spoken
    ]
    assert missing == []


@pytest.mark.parametrize(
    "reason",
    [
        "the driver asks for a ",
        "recovery waits for ",
        "the driver no longer lists this GPU",
        "the NVIDIA driver does not return from ",
        "recovery is switched off (gpu.recovery.mode), restart the agent to use it again",
        "(not named yet)",
    ],
)
def test_a_reason_in_the_tables_is_the_agents_own(spoken: str, reason: str) -> None:
    """A reason in a table cell cannot have a block of its own."""
    assert reason in GUIDE
    assert reason in spoken


def test_links_within_the_guide_and_to_its_neighbours_lead_somewhere() -> None:
    """An anchor is made from a heading as GitHub does it. A file must exist."""
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", page.read_text()):
            assert not target or (page.parent / target).exists(), f"{page.name}: {target}"
    headings = re.findall(r"^#+ (.*)$", GUIDE, re.MULTILINE)
    anchors = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", GUIDE)) <= anchors
