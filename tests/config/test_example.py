"""The example file and the documentation, both written from the schema."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.conftest import Load
from tests.settings import settings as settings_of
from vgpu_agent.config import schema, yaml
from vgpu_agent.config.example import example, yaml_value
from vgpu_agent.families.nvidia.settings import Sharing

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_loads_to_the_defaults(load_text: Load) -> None:
    """A person may start from it and change single lines."""
    assert load_text(example()).settings == settings_of()


def test_a_section_is_described_the_same_however_its_docstring_is_wrapped() -> None:
    """The text goes into a comment of the example and a paragraph of the documentation."""

    class Wrapped:
        """One sentence,
        in two lines.
        """

    assert schema.section_text(Wrapped) == "One sentence, in two lines."


def test_the_example_sets_every_key_but_the_sharing(load_text: Load) -> None:
    """Sharing cannot be there with its default, because its list must not be empty."""
    origins = load_text(example()).origins

    assert {path for path, origin in origins.items() if origin == "default"} == {
        path for path in origins if path.startswith("sharing.")
    }


@pytest.mark.parametrize("kind", ["timeSlicing", "mps"])
def test_the_sharing_of_the_example_works_when_its_comment_is_removed(
    load_text: Load, kind: str
) -> None:
    """The text above it says how: remove the first # of each line."""
    before, block = example().split(f"  # {kind}:\n")
    commented, after = block.split("\n\n", 1)
    text = f"{before}    {kind}:\n" + re.sub(r"(?m)^  #", "  ", commented) + "\n\n" + after

    sharing = load_text(text).settings.section(Sharing)

    used = sharing.mps if kind == "mps" else sharing.time_slicing
    assert [(resource.name, resource.replicas) for resource in used.resources] == [
        ("nvidia.com/gpu", 4)
    ]


def test_no_line_of_the_example_is_too_long_to_read() -> None:
    """Comments are wrapped."""
    assert [line for line in example().splitlines() if len(line) > 110] == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        ":9394",
        "yes",
        "true",
        "12",
        "a b",
        "/dev",
        "uuid",
        "127.0.0.1:1",
        '"',
        "\\",
        1,
        0.2,
        3600.0,
        1e-07,
        True,
    ],
)
def test_a_value_is_written_so_that_it_is_read_back(value: object) -> None:
    """Quotes where YAML, ours or another, would read something else."""
    root, faults = yaml.parse(f"a: {yaml_value(value)}")

    assert faults == []
    assert root is not None
    assert isinstance(root.value, dict)
    assert root.value["a"].value == value


def test_the_documentation_is_up_to_date() -> None:
    """docs/configuration.md is what the script would write now."""
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_configuration_docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (checked.returncode, checked.stderr) == (0, "")
