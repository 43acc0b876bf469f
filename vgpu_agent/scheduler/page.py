"""The answers of ``/explain`` and ``/capacity`` as plain text, for a terminal.

Used by `scheduler.web` and by ``vgpu-agent why``, so it imports no HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.scheduler.explain import Situation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vgpu_agent.scheduler.capacity import Amount, Capacity, Cards, CardType
    from vgpu_agent.scheduler.explain import Explanation, Row

# code of a reason → its words
_PHRASES = {reason.name: reason.value for reason in Reason}


def explanation(found: Explanation) -> str:
    """Return the explanation of a pod."""
    lines = [f"pod {found.pod}: {found.situation}", *(f"  {line}" for line in found.answer)]
    for title, sentences in (
        ("Request", found.request),
        ("Missing", found.missing),
        ("Changes with which it would fit now", found.changes),
    ):
        if sentences:
            lines += ["", title, *(f"  {line}" for line in sentences)]
    if found.table:
        has_every_node = all(row.nodes == 1 for row in found.table)
        # `KEPT`: cards are kept for it until it is bound
        is_placed = found.situation in {Situation.BOUND.value, Situation.KEPT.value}
        title = "Nodes, for one more such pod" if is_placed else "Nodes"
        lines += ["", title, *_columns([_HEADER, *(_cells(row) for row in found.table)])]
        # all=1 is the parameter of `/explain`, --all the flag of `vgpu-agent why`
        if found.left_out:
            lines.append(f"  … and {found.left_out} more rows; all=1 (--all) shows every Node")
        elif not has_every_node:
            lines.append("  all=1 (--all) shows every Node")
    return _text(lines)


_HEADER = ("NODES", "ANSWER", "CARDS", "LARGEST FREE ON A CARD", "UNTOUCHED", "NAMES")


def _cells(row: Row) -> tuple[str, ...]:
    cards = ", ".join(f"{count} × {_PHRASES.get(code, code)}" for code, count in row.cards.items())
    free = (
        f"{row.largest_free_mib} MiB, {row.largest_free_cores_percent} %"
        if row.largest_free_mib or row.largest_free_cores_percent
        else "-"
    )
    return (
        str(row.nodes),
        row.reason,
        cards or row.note or "-",
        free,
        str(row.untouched_cards),
        _names(row.names, row.nodes),
    )


def capacity(found: Capacity) -> str:
    """Return the free capacity of the cluster."""
    lines = [
        *found.doubts,  # why the answer may be out of date or incomplete
        f"{found.nodes} Nodes, {found.unfit_nodes} of them unfit; {found.pods} pods hold cards",
        "",
        "Largest single requests that fit now, each by itself",
        *_columns(
            [
                ("TYPE", "MEMORY", "COMPUTE", "WHOLE CARDS"),
                *(
                    (
                        name,
                        f"{largest.memory_mib} MiB",
                        f"{largest.cores_percent} %",
                        str(largest.whole_cards),
                    )
                    for name, largest in (
                        ("any", found.largest),
                        *((each.type, each.largest) for each in found.types),
                    )
                ),
            ]
        ),
        "",
        "Cards",
        *_columns(
            [
                ("TYPE", "NODES", "UNTOUCHED", "PARTLY", "FULL", "UNHEALTHY", "MIG"),
                ("any", str(found.nodes - found.unfit_nodes), *_states(found.cards)),
                *((each.type, str(each.nodes), *_states(each.cards)) for each in found.types),
            ]
        ),
        "",
        "Amounts on healthy cards: free of total (free where no container can use it)",
        *_columns(
            [
                ("TYPE", "MEMORY MiB", "COMPUTE %", "SLOTS"),
                *(
                    (
                        each.type,
                        *map(_amount, (each.memory_mib, each.cores_percent, each.slots)),
                    )
                    for each in found.types
                ),
            ]
        ),
    ]
    if any(each.free_memory for each in found.types):
        rows = [row for each in found.types for row in _buckets(each)]
        lines += ["", "Free memory of cards that can serve another container"]
        lines += _columns([("TYPE", "FREE MiB", "CARDS"), *rows])
    if found.unfit:
        lines += [
            "",
            "Unfit Nodes",
            *_columns(
                [
                    ("NODES", "REASON", "NOTE", "NAMES"),
                    *(
                        (str(row.nodes), row.reason, row.note or "-", _names(row.names, row.nodes))
                        for row in found.unfit
                    ),
                ]
            ),
        ]
    return _text(lines)


def _states(cards: Cards) -> tuple[str, ...]:
    return tuple(map(str, (cards.untouched, cards.partly, cards.full, cards.unhealthy, cards.mig)))


def _amount(amount: Amount) -> str:
    unreachable = f" ({amount.unreachable})" if amount.unreachable else ""
    return f"{amount.free} of {amount.total}{unreachable}"


def _buckets(card_type: CardType) -> Iterator[tuple[str, ...]]:
    for bucket in card_type.free_memory:
        end = "or more" if bucket.below_mib is None else f"to {bucket.below_mib - 1}"
        yield card_type.type, f"{bucket.from_mib} {end}", str(bucket.cards)


def _names(names: Sequence[str], count: int) -> str:
    """Return the names of the first of ``count`` Nodes, and how many more there are."""
    more = count - len(names)
    return f"{', '.join(names)} and {more} more" if more > 0 else ", ".join(names)


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Align the rows; the last column is not padded."""
    found = [tuple(map(_printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, (*widths[:-1], 0))).rstrip() for row in found]


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{_printable(line)}\n" for line in lines)


def _printable(text: str) -> str:
    """Return the text without control characters and line ends, which texts of Nodes may have."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))
