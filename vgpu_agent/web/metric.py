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
    """The Prometheus types in use."""

    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One line of the table.

    Attributes:
        name: as scraped; a counter ends in ``_total``, a summary is scraped as ``<name>_sum`` and
            ``<name>_count``, a histogram also as ``<name>_bucket``.
        kind: its type.
        labels: label names, in the order of a row's label values.
        help: one sentence, with the unit where the name does not have it.
        read: its rows (label values and value) at a moment, the input of one scrape; for a summary
            and a histogram the sums.
        read_count: the counts of a summary or a histogram.
        read_buckets: a histogram's buckets, each with its upper bound as the last label value, and
            the number of values up to it.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    read: Callable[[Moment], Iterable[Row]]
    read_count: Callable[[Moment], Iterable[Row]] | None = None
    read_buckets: Callable[[Moment], Iterable[Row]] | None = None
