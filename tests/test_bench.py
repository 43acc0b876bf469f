"""The benchmark as far as it can be tested without measuring anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.component  # it starts programs


def test_the_benchmark_needs_no_test_tools() -> None:
    """It has an environment of its own, so that it measures the agent as the image has it."""
    program = "import sys; sys.modules['pytest'] = None; import tests.bench.__main__"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
