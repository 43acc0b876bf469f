"""The table of ``vgpu-agent top``: given against used. The command itself is tested beside the real
agent in tests/component.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vgpu_agent.cli.top import Node, table

U0 = "GPU-0"


def node(*shares: dict[str, Any], limit: str = "in force", **gpu: Any) -> Node:
    """One GPU of 40000 MiB, whose shares one pod holds."""
    return msgspec.convert(
        {
            "node": "node-a",
            "ready": True,
            "gpus": [
                {
                    "uuid": U0,
                    "name": "A100",
                    "memory_mib": 40000,
                    "health": "Healthy",
                    "max_holders": 4,
                    "usage": {
                        "memory_used_mib": 10000,
                        "utilisation_percent": 25,
                        "temperature_celsius": 41,
                        "power_watts": 119.6,
                    },
                    **gpu,
                }
            ],
            "pods": [
                {
                    "pod": "ml/train-0",
                    "grants": [
                        {
                            "container": "main",
                            "resource": "example.com/gpu",
                            "limit": limit,
                            "shares": [{"device": U0, "gpu": U0, **share} for share in shares],
                        }
                    ],
                }
            ],
        },
        Node,
    )


def lines(given: Node, width: int | None = None, *, bars: bool = False) -> list[str]:
    """The lines of the table, without their styles."""
    return [line.text for line in table(given, width, bars=bars)]


def test_given_is_the_sum_of_the_limits_beside_what_is_used() -> None:
    """Two shares of one pod; the row of the GPU has both figures for memory and compute."""
    share = {"memory_mib": 8000, "cores_percent": 20}
    shown = lines(node(share, share))
    assert shown[0] == "node node-a · ready · 1 GPUs · 2 shares"
    assert " ".join(shown[3].split()) == (
        "0 A100 Healthy 41 C 120 W 10000/40000 MiB 16000 MiB 25 % 40 % 2/4"
    )
    assert shown[4:] == ["    ml/train-0 main: 8000 MiB, 20 % (example.com/gpu)"] * 2


@pytest.mark.parametrize(
    ("share", "limit", "pod", "memory"),
    [
        ({}, "no limit", "no limit", "no limit"),
        ({}, "whole device", "40000 MiB, 100 %", "40000 MiB"),
        ({"exclusive": True}, "", "40000 MiB, 100 %", "40000 MiB"),
        ({"memory_mib": 500}, "in force", "500 MiB, no limit", "500 MiB"),
    ],
)
def test_shares_without_amounts(share: dict[str, Any], limit: str, pod: str, memory: str) -> None:
    """A replica of time-slicing has no limit, and a whole device has all of it."""
    shown = lines(node(share, limit=limit))
    assert shown[4] == f"    ml/train-0 main: {pod} (example.com/gpu)"
    assert memory in shown[3]


def test_a_share_of_a_mig_instance_counts_for_its_gpu() -> None:
    """The instance's memory is what its pod has."""
    mig = {"uuid": "MIG-0", "profile": "1g.5gb", "memory_mib": 4864}
    shown = lines(node({"device": "MIG-0"}, mig_instances=[mig]))
    assert "4864 MiB" in shown[3]
    assert shown[4] == "    ml/train-0 main: 4864 MiB, no limit (example.com/gpu 1g.5gb)"


def test_a_gpu_that_is_ill_has_its_reason_and_its_countdown() -> None:
    """A countdown is shown only if the agent's answer has one; it may be of an earlier version."""
    ill: dict[str, Any] = {"health": "Unhealthy", "health_reason": "XID 79"}
    assert lines(node(**ill))[4] == "    XID 79"
    ill["illness"] = {"offered_again_in_seconds": 41.7}
    assert lines(node(**ill))[4] == "    offered again in 42 s; XID 79"
    assert lines(node(present=False))[3].split()[2] == "Gone"


def test_bars_show_used_within_given() -> None:
    """A quarter is used and half is given: a quarter of the bar, another quarter, and the rest."""
    shown = lines(node({"memory_mib": 20000, "cores_percent": 10}), 80, bars=True)
    memory, compute = shown[4].split("compute")
    assert memory.strip() == "memory [|||||:::::..........]"
    assert compute.strip() == "[|||||...............]"
    assert max(map(len, shown)) <= 80


def test_lines_are_cut_to_the_terminal_and_cannot_control_it() -> None:
    """A name may be anything that the driver says."""
    shown = lines(node(name="A\033[31m" * 30), 60)
    assert max(map(len, shown)) <= 60
    assert "\033" not in "".join(shown)


def test_a_driver_that_reports_nothing_is_dashes() -> None:
    """A GPU that does not answer is an example."""
    assert lines(node(usage=None))[3].split()[3:7] == ["-", "-", "-/40000", "MiB"]
