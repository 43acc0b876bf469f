"""The type of a line in the catalogue of metrics. The lines themselves are in `catalogue` and
`catalogue_binding`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.web.readings import Moment, Row


class Kind(enum.StrEnum):
    """Prometheus types in use."""

    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"


class Metric(msgspec.Struct, frozen=True):
    """One line of the table.

    Attributes:
        name: as scraped; a counter ends in ``_total``, a summary is scraped as ``<name>_sum`` and
            ``<name>_count``.
        kind: its type.
        labels: label names, in the order of a row's label values.
        help: one sentence, with the unit where the name does not have it.
        read: its rows; for a summary the sums.
        read_count: a summary's counts.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    read: Callable[[Moment], Iterable[Row]]
    read_count: Callable[[Moment], Iterable[Row]] | None = None
