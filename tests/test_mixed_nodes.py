"""docs/mixed-nodes.md and the pages that point to it:
what they say about families side by side is what the agent does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vgpu_agent.config import schema
from vgpu_agent.config.load import Contents, Sources, load_contents

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "mixed-nodes.md").read_text()
BOTH_WHOLE = (
    "families: {nvidia: true, volcanoGpushare: true}\nvolcanoGpushare: {strategy: number}\n"
)


def test_the_settings_of_the_page_are_those_of_the_agent() -> None:
    """A setting that was renamed would send an operator looking for it."""
    paths = schema.value_paths().keys()
    sections = {path.partition(".")[0] for path in paths if "." in path}
    named = {
        word
        for word in re.findall(r"`([a-z][A-Za-z]*\.[a-z][A-Za-z.]*)`", PAGE)
        if word.partition(".")[0] in sections
    }
    assert "plugin.sharedDevicesAllocationPolicy" in named
    assert [
        word
        for word in sorted(named)
        if not any(path == word or path.startswith(f"{word}.") for path in paths)
    ] == []


def test_the_example_of_the_page_is_a_configuration_without_collisions() -> None:
    """It is what an operator copies first."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    loaded = load_contents(
        Sources({}, {}, "c.yaml"),
        Contents("\n".join(["version: v1", *(line[4:] for line in example.splitlines())]).encode()),
    )
    assert [loaded.settings.is_on(family) for family in ("nvidia", "volcano-vgpu")] == [True, True]
    assert loaded.collisions == loaded.warnings == ()


def test_whole_gpus_under_two_names_are_no_collision() -> None:
    """Both families have one id a GPU, its UUID. It works, and every page says so."""
    assert (
        load_contents(
            Sources({}, {}, "c.yaml"), Contents(f"version: v1\n{BOTH_WHOLE}".encode())
        ).collisions
        == ()
    )


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_page_forbids_a_mix_that_works(page: Path) -> None:
    """One page said that nvidia must be off beside gpu-number, another that both work."""
    assert (
        re.findall(
            r"`?(?:nvidia|aws|volcanoVgpu|volcanoGpushare)`? must be (?:`?false|off)",
            page.read_text(),
        )
        == []
    )
    assert "kubelet cannot tell them apart" not in page.read_text()
