"""Figures of a measurement, for both parts of the benchmark and the table that `__main__` prints
of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

_OF_TIME = ("s", "ms", "% of a core")
_RATIO = "×"  # of two times, whose limit is the same on each processor


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured figure and its limit, in the same unit;
    without a limit it is there to be compared with.
    """

    name: str
    value: float
    limit: float | None
    unit: str
    how: str
    scaled: bool = False  # the limit allows for the speed of the processor already

    @property
    def met(self) -> bool:
        """Tell whether the figure is within its limit."""
        return self.limit is None or self.value <= self.limit

    def on_slower_processor(self, factor: float) -> Figure:
        """Return the figure with a limit for a processor that needs ``factor`` times as long.

        Only times and shares of a processor's time have other limits there.
        """
        if self.limit is None or self.unit not in _OF_TIME or self.scaled:
            return self
        return dataclasses.replace(self, limit=round(self.limit * factor, 3), scaled=True)

    @property
    def line(self) -> str:
        """The figure, its limit and the verdict."""
        limit, verdict = (
            ("", "")
            if self.limit is None
            else (f"≤ {self.limit:g}", "ok" if self.met else "MISSED")
        )
        return f"{self.value:9.3f}  {limit:7} {self.unit:12} {verdict:7} {self.how}"


def of_two_measurements(first: Sequence[Figure], second: Sequence[Figure]) -> list[Figure]:
    """Combine two measurements of one part, of which the first had figures beyond their limits.

    A time counts as it was in the measurement in which it was within its limit, because other
    guests of the machine can take any time. Anything else, such as memory, requests or wrong
    claims, must be within its limit in both.
    """
    return [_of_two(*figures) for figures in zip(first, second, strict=True)]


def _of_two(first: Figure, second: Figure) -> Figure:
    if first.met and second.met:
        return first
    beyond, within = sorted((first, second), key=lambda figure: figure.met)
    is_time = first.unit in {*_OF_TIME, _RATIO}
    taken, other = (within, beyond) if is_time else (beyond, within)
    return dataclasses.replace(
        taken, how=f"{taken.how}; in the other of two measurements {other.value:.3f}"
    )


def percentile(values: Iterable[float], percent: int) -> float:
    """The value that ``percent`` % of all values do not exceed;
    with few values, rather a larger one than a smaller one.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
