"""Late or early, by what the Node says."""

from __future__ import annotations

import pytest

from vgpu_agent.allocation.mode import choose_mode
from vgpu_agent.nodes import Node


@pytest.mark.parametrize(
    ("kubelet", "runtime", "late", "by_annotation", "words"),
    [
        ("v1.36.3", "containerd://2.4.2", True, False, "resolves CDI names"),
        ("v1.29.0-eks-5e0fdde", "containerd://2.0.0-rc.1", True, False, "resolves CDI names"),
        ("v1.28.9", "containerd://2.1.0", True, True, "resolves CDI names"),
        ("v1.31.0", "containerd://1.7.27", False, False, "set binding.mode to late"),
        ("v1.31.0", "containerd://1.6.8", False, False, "by itself from 2.0"),
        ("v1.31.0", "docker://25.0.0", False, False, "only containerd and CRI-O"),
        ("v1.31.0", "containerd://unknown", False, False, "only containerd and CRI-O"),
        ("", "", False, False, "nothing about its runtime"),
    ],
)
def test_auto_follows_the_node(
    kubelet: str, runtime: str, *, late: bool, by_annotation: bool, words: str
) -> None:
    """Versions decide, odd ones never raise, and the reason says what was seen."""
    mode = choose_mode("auto", Node("node-a", kubelet_version=kubelet, runtime_version=runtime))
    assert mode is not None
    assert (mode.late, mode.by_annotation) == (late, by_annotation)
    assert words in mode.reason


def test_a_setting_needs_no_node() -> None:
    """An explicit setting wins. Only auto waits for the Node."""
    for setting in ("late", "early"):
        mode = choose_mode(setting, None)
        assert mode is not None
        assert (mode.late, setting in mode.reason) == (setting == "late", True)
    assert choose_mode("auto", None) is None
