"""Text for a terminal: tables and sentences that fit its width, and colours on request.

Called by `page`. A cell is never broken within a word, because ids and names are copied from it. So
a table that is too wide keeps its first columns aligned, and the others follow below each row with
their titles. Only a word that is longer than a line makes that line longer than the width.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

NARROWEST, WIDEST = 40, 1000  # the limits of `Layout.columns`, in characters
# for `str.translate`: control characters become spaces
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")
_INDENT, _GAP = "  ", "  "
_BELOW = " " * 6  # the indentation of what follows below a row
_NARROWEST_TEXT = 24  # characters that a wrapped cell needs at least beside the others of its row
_TITLE, _HEADER, _GOOD, _BAD = "1", "2", "32", "31"  # SGR: bold, dim, green, red
# The columns that have the word of a state, and the words that are coloured in them.
_STATE_COLUMNS = ("HEALTH", "STATE", "LIMIT")
_GOOD_WORDS = frozenset({"Healthy", "registered", "offered", "in force", "whole device", "ready"})
_BAD_WORDS = frozenset(
    {"Unhealthy", "Gone", "NOT OFFERED", "NOT READY", "STUCK", "not in force", "failed", "refused"}
)


class Layout(NamedTuple):
    """The form of a text.

    Attributes:
        columns: the width in characters that lines have to fit; None for any width, with one line
            for each row of a table.
        colours: mark titles and states with the escape sequences of a terminal.
    """

    columns: int | None = None
    colours: bool = False


PLAIN = Layout()


class Table(NamedTuple):
    """A table.

    Attributes:
        title: the line above it.
        columns: their titles.
        rows: the cells of each row.
        if_empty: stands in for the table where it has no row.
        optional: titles of columns that are left out, in this order, while the table is too wide.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    if_empty: str = "none"
    optional: tuple[str, ...] = ()


def table(content: Table, layout: Layout) -> list[str]:
    """Return the lines of a table below its title."""
    lines = [styled(content.title, _TITLE, layout)]
    if not content.rows:
        return [*lines, f"{_INDENT}{content.if_empty}"]
    content = content._replace(
        rows=[tuple(cell.translate(_CONTROL) for cell in row) for row in content.rows]
    )
    for title in content.optional:
        if not _too_wide(content, layout.columns):
            break
        content = _without(content, title)
    widths = _widths(content)
    beside, room = _beside(content, widths, layout.columns)
    lines.append(styled(_line(content.columns[:beside], widths, Layout(), ()), _HEADER, layout))
    for row in content.rows:
        lines += _row(content.columns, row, widths, beside, room, layout)
    return lines


def sentence(text: str, layout: Layout, *, indent: str = "") -> list[str]:
    """Return the lines of a text; those after the first are indented further."""
    return wrapped(
        f"{indent}{text.translate(_CONTROL)}", layout.columns, below=f"{indent}{_INDENT}"
    )


def wrapped(text: str, columns: int | None, *, below: str = "") -> list[str]:
    """Break a text between words so that its lines fit. ``below`` begins those after the first."""
    if columns is None or len(text) <= columns:
        return [text]
    return textwrap.wrap(
        text,
        columns,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )


def parts(texts: Sequence[str], separator: str, layout: Layout) -> list[str]:
    """Join texts with ``separator``, in several lines where they do not fit into one. No text is
    broken.
    """
    lines: list[str] = []
    for text in (text.translate(_CONTROL) for text in texts):
        longer = f"{lines[-1]}{separator}{text}" if lines else text
        if lines and (layout.columns is None or len(longer) <= layout.columns):
            lines[-1] = longer
        else:
            lines.append(f"{_INDENT}{text}" if lines else text)
    return lines


def styled(text: str, style: str, layout: Layout) -> str:
    """Put a style around a text, with the escape sequences of a terminal (SGR)."""
    return f"\033[{style}m{text}\033[0m" if layout.colours and text else text


def state(word: str, layout: Layout) -> str:
    """Colour a word that names a good or a bad state; return any other word as it is."""
    style = _GOOD if word in _GOOD_WORDS else _BAD if word in _BAD_WORDS else ""
    return styled(word, style, layout) if style else word


def _widths(content: Table) -> list[int]:
    return [
        max(len(row[number]) for row in (content.columns, *content.rows))
        for number in range(len(content.columns))
    ]


def _too_wide(content: Table, columns: int | None) -> bool:
    widths = _widths(content)
    return columns is not None and sum(widths) + len(_GAP) * len(widths) > columns


def _without(content: Table, title: str) -> Table:
    place = content.columns.index(title)
    return content._replace(
        columns=(*content.columns[:place], *content.columns[place + 1 :]),
        rows=[(*row[:place], *row[place + 1 :]) for row in content.rows],
    )


def _beside(content: Table, widths: list[int], columns: int | None) -> tuple[int, int | None]:
    """Return how many columns of the table stand beside each other, and the width (``room``) that
    is left for the last one if its cells have to be wrapped; None if they need not be.
    """
    ends, end = [], len(_INDENT)
    for width in widths:
        ends.append(end + width)
        end += width + len(_GAP)
    if columns is None or ends[-1] <= columns:
        return len(widths), None
    room = columns - (ends[-1] - widths[-1])
    longest = max(len(word) for row in content.rows for word in row[-1].split(" "))
    if room >= max(longest, _NARROWEST_TEXT):
        return len(widths), room
    return max(1, sum(end <= columns for end in ends)), None


def _row(
    titles: tuple[str, ...],
    row: tuple[str, ...],
    widths: list[int],
    beside: int,
    room: int | None,
    layout: Layout,
) -> list[str]:
    """Return the lines of one row: the first ``beside`` cells aligned, the others below with their
    titles. With ``room``, all cells are aligned, and the last one is wrapped to that width.
    """
    if room is not None:
        first, *others = wrapped(row[-1], room) or [""]
        head = _line((*row[:-1], first), widths, layout, titles)
        before = " " * (len(_INDENT) + sum(width + len(_GAP) for width in widths[:-1]))
        return [head, *(f"{before}{line}" for line in others)]
    lines, below = [_line(row[:beside], widths, layout, titles)], ""
    for title, cell in zip(titles[beside:], row[beside:], strict=True):
        if cell in {"", "-"}:  # no value
            continue
        piece = f"{title} {cell}"
        longer = f"{below}{_GAP}{piece}" if below else f"{_BELOW}{piece}"
        if below and layout.columns is not None and len(longer) > layout.columns:
            lines += wrapped(below, layout.columns, below=f"{_BELOW}{_INDENT}")
            longer = f"{_BELOW}{piece}"
        below = longer
    if below:
        lines += wrapped(below, layout.columns, below=f"{_BELOW}{_INDENT}")
    return lines


def _line(cells: Sequence[str], widths: list[int], layout: Layout, titles: tuple[str, ...]) -> str:
    """Return ``cells`` aligned in one line; with ``titles``, words of states are coloured."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    padded[-1] = padded[-1].rstrip()
    if layout.colours and titles:
        padded = [
            text.replace(cell, state(cell, layout), 1) if title in _STATE_COLUMNS and cell else text
            for text, cell, title in zip(padded, cells, titles, strict=False)
        ]
    return f"{_INDENT}{_GAP.join(padded)}".rstrip()
