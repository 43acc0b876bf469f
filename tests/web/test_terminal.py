"""Tables and sentences for terminals of any width."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.web.conftest import NOW
from vgpu_agent.model import Gpu
from vgpu_agent.status import AgentStatus
from vgpu_agent.web import page, terminal, views
from vgpu_agent.web.terminal import PLAIN, Layout, Table

UUIDS = [f"GPU-5f0e{number:04}-1111-2222-3333-444455556666" for number in range(2)]


@pytest.fixture
def overview(node: AgentStatus) -> views.Overview:
    """A node whose GPUs have UUIDs and whose pods have names of their usual lengths."""
    found = views.overview(node, NOW)
    text = msgspec.json.encode(found).decode()
    for number, uuid in enumerate(UUIDS):
        text = text.replace(f'"GPU-{number}"', f'"{uuid}"')
    text = text.replace("ml/train-0", "recommendations/train-7d9f8b6c5-abcde")
    return msgspec.json.decode(text, type=views.Overview)


@pytest.mark.parametrize("columns", [80, 100, 132])
def test_the_overview_fits_and_breaks_no_id(overview: views.Overview, columns: int) -> None:
    """Ids and names are copied from the page, so each is in one piece."""
    lines = page.as_text(overview, Layout(columns)).splitlines()
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    for uuid in UUIDS:
        assert uuid in text
    assert "recommendations/train-7d9f8b6c5-abcde" in text
    # nothing is lost but the columns that are left out
    words = set(page.as_text(overview).split())
    left_out = {"KNOWN", "FOR", "STATE", "reserved", "granted", "1m00s", "2m00s"}
    assert words - left_out - set(text.split()) == set()


def test_what_does_not_fit_follows_below_its_row() -> None:
    """With the titles of the columns, and without cells that say nothing."""
    content = Table("Pods", ("POD", "GPU", "UUID", "NOTE"), [("a", "0", "U" * 30, "-")])
    assert terminal.table(content, Layout(41)) == [
        "Pods",
        "  POD  GPU",
        "  a    0",
        f"      UUID {'U' * 30}",
    ]


def test_a_text_in_the_last_column_is_wrapped_in_it() -> None:
    """A reason is a sentence; the rows stay a table."""
    content = Table("Problems", ("PART", "REASON"), [("gpu 1", "it fell off the bus an hour ago")])
    assert terminal.table(content, Layout(40)) == [
        "Problems",
        "  PART   REASON",
        "  gpu 1  it fell off the bus an hour ago",
    ]
    content = content._replace(rows=[("gpu 1", "it fell off the bus more than an hour ago")])
    assert terminal.table(content, Layout(40)) == [
        "Problems",
        "  PART   REASON",
        "  gpu 1  it fell off the bus more than",
        "         an hour ago",
    ]


def test_a_text_with_a_word_longer_than_its_column_follows_below() -> None:
    """Two ids of 30 characters are longer than what is left beside the event."""
    content = Table("Events", ("EVENT", "FACTS"), [("gpu.lost", f"ids: {'U' * 30}, more")])
    assert terminal.table(content, Layout(40)) == [
        "Events",
        "  EVENT",
        "  gpu.lost",
        "      FACTS ids:",
        f"        {'U' * 30},",
        "        more",
    ]


def test_columns_that_may_be_missing_are_left_out_first() -> None:
    """A row stays one line, and -o wide has all of them."""
    row = ("a" * 20, "b" * 20, "c")
    content = Table("Pods", ("POD", "AGE", "GPU"), [row], optional=("AGE",))
    assert terminal.table(content, Layout(40))[1:] == [f"  POD{' ' * 19}GPU", f"  {'a' * 20}  c"]
    assert terminal.table(content, Layout(50))[2] == f"  {'a' * 20}  {'b' * 20}  c"
    assert "b" * 20 in terminal.table(content, PLAIN)[2]


def test_a_word_longer_than_the_line_stays_whole() -> None:
    """The only lines that are longer than the width."""
    content = Table("Pods", ("POD",), [("p" * 60,)])
    assert terminal.table(content, Layout(40))[2] == "  " + "p" * 60


def test_colours_change_nothing_but_the_colours(overview: views.Overview) -> None:
    """The same text; a sick GPU is red, a sound one green."""
    coloured = page.as_text(overview, Layout(80, colours=True))
    assert re.sub(r"\033\[\d*m", "", coloured) == page.as_text(overview, Layout(80))
    assert "\033[31mUnhealthy\033[0m" in coloured
    assert "\033[32mHealthy\033[0m" in coloured
    assert "\033[32mready\033[0m" in coloured.splitlines()[0]
    assert "\033" not in page.as_text(overview)


def test_no_text_can_control_the_terminal() -> None:
    """Tenants choose names and annotations, and drivers the names of GPUs."""
    node = AgentStatus(node="node\033[2J", version="0.1.0")
    node.inventory = msgspec.structs.replace(
        node.inventory, gpus=(Gpu("GPU-0", 0, 0, "A\x9b31m\033]0;x\x07", 40960),)
    )
    for layout in (PLAIN, Layout(80)):
        text = page.as_text(views.overview(node, NOW), layout)
        assert set(re.findall(r"[\x00-\x1f\x7f-\x9f]", text)) == {"\n"}
    assert terminal.sentence("a\033[31mb", Layout(80)) == ["a [31mb"]
