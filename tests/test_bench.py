"""The benchmark as far as it can be tested without measuring anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.figures import Figure, of_two_measurements


@pytest.mark.component  # it starts a program
def test_the_benchmark_needs_no_test_tools() -> None:
    """It has an environment of its own, so that it measures the agent as the image has it."""
    program = "import sys; sys.modules['pytest'] = None; import tests.bench.__main__"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("unit", "limit", "met"),
    [
        ("ms", 15.0, True),
        ("% of a core", 15.0, True),
        ("MiB", 10.0, False),
        ("requests", 10, False),
    ],
)
def test_on_a_slower_processor_only_limits_of_time_are_higher(
    unit: str, limit: float, met: bool
) -> None:
    """A limit is for one processor. Memory and requests do not depend on its speed."""
    figure = Figure("a figure", 14.0, 10.0, unit, "").on_slower_processor(1.5)
    assert (figure.limit, figure.met) == (limit, met)


def test_a_figure_without_a_limit_has_none_anywhere() -> None:
    """It is there to be compared with."""
    assert Figure("a figure", 14.0, None, "ms", "").on_slower_processor(1.5).met


def test_a_limit_is_stretched_once() -> None:
    """A part that measures the speed beside each of its runs has stretched its limits already."""
    once = Figure("a figure", 14.0, 10.0, "ms", "").on_slower_processor(1.5)
    assert once.on_slower_processor(2.0).limit == 15.0
    assert (
        Figure("a figure", 14.0, 10.0, "ms", "", scaled=True).on_slower_processor(2.0).limit == 10
    )


@pytest.mark.parametrize(
    ("unit", "values", "met"),
    [
        ("ms", (11.0, 9.0), True),
        ("ms", (9.0, 11.0), True),
        ("×", (11.0, 9.0), True),
        ("ms", (11.0, 12.0), False),
        ("MiB", (11.0, 9.0), False),
        ("requests", (9.0, 11.0), False),
    ],
)
def test_of_two_measurements_a_time_must_be_within_its_limit_in_one(
    unit: str, values: tuple[float, float], met: bool
) -> None:
    """Other guests of a machine take time, but no memory, and they cause no wrong claim."""
    first, second = (Figure("a figure", value, 10.0, unit, "so") for value in values)
    (figure,) = of_two_measurements([first], [second])
    assert figure.met == met
    assert figure.value in values
    (other,) = set(values) - {figure.value}
    assert figure.how == f"so; in the other of two measurements {other:.3f}"


def test_two_measurements_within_all_limits_are_the_first() -> None:
    """Nothing is said about the second one then."""
    first, second = (Figure("a figure", value, 10.0, "ms", "so") for value in (8.0, 9.0))
    assert of_two_measurements([first], [second]) == [first]
