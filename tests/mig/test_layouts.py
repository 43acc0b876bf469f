"""The YAML of nvidia-mig-parted."""

from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.errors import MigError
from vgpu_agent.mig.layouts import Division, layout_file, read_export

EXPORTED = """\
version: v1
mig-configs:
  current:
  - devices: [0, 2]
    mig-enabled: true
    mig-devices:
      "2g.10gb": 3
      1g.5gb: 1
  - devices: [1]
    mig-enabled: false
    mig-devices: {}
"""


def test_an_export_says_how_each_gpu_is_divided() -> None:
    """Several GPUs may share an entry, and one without MIG mode has no instances."""
    cut = Division(enabled=True, instances={"2g.10gb": 3, "1g.5gb": 1})
    assert read_export(EXPORTED, 3) == {0: cut, 1: Division(enabled=False, instances={}), 2: cut}


def test_all_means_every_gpu() -> None:
    """A node whose GPUs are alike is exported in one entry,
    and MIG mode without instances is a division, too.
    """
    text = "version: v1\nmig-configs: {current: [{devices: all, mig-enabled: true}]}"
    assert read_export(text, 2) == {
        0: Division(enabled=True, instances={}),
        1: Division(enabled=True, instances={}),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not YAML"),
        ("nonsense", "does not have exactly one configuration"),
        ("{", "is not YAML"),
        ("mig-configs: {a: [], b: []}", "does not have exactly one configuration"),
        ("mig-configs: {a: 7}", "an invalid entry"),
        ("mig-configs: {a: [7]}", "an invalid entry: '7'"),
        ("mig-configs: {a: [{devices: [0]}]}", "without devices, mig-enabled and mig-devices"),
        ("mig-configs: {a: [{devices: [x], mig-enabled: true}]}", "impossible numbers"),
        (
            "mig-configs: {a: [{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: many}}]}",
            "impossible numbers",
        ),
        ("mig-configs: {a: [{devices: [0, 0], mig-enabled: true}]}", "has GPU 0 twice"),
        (
            "mig-configs: {a: [{devices: [5], mig-enabled: true}]}",
            "has GPU 5 twice, or it is not one of the node's 2",
        ),
        (
            "mig-configs: {a: [{devices: [0], mig-enabled: true}]}",
            "has 1 GPUs, and the driver shows 2",
        ),
    ],
)
def test_nonsense_is_refused_with_what_was_found(text: str, expected: str) -> None:
    """The message quotes what the tool has printed as its export."""
    with pytest.raises(MigError, match=expected):
        read_export(text, 2)


def test_a_layout_names_one_gpu_only() -> None:
    """The tool leaves GPUs alone that no entry names; instances of one profile are counted."""
    assert yaml.safe_load(layout_file(3, ["2g.10gb", "1g.5gb", "2g.10gb"])) == {
        "version": "v1",
        "mig-configs": {
            "current": [
                {"devices": [3], "mig-enabled": True, "mig-devices": {"2g.10gb": 2, "1g.5gb": 1}}
            ]
        },
    }


@given(
    text=(
        st.text(max_size=200)
        | st.recursive(st.none() | st.integers() | st.text(max_size=9), st.lists).map(json.dumps)
    )
)
def test_any_output_is_an_answer_or_a_reason(text: str) -> None:
    """Never another exception."""
    with contextlib.suppress(MigError):
        assert set(read_export(text, 1)) == {0}
