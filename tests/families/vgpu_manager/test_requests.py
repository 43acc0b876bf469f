"""The request of a container (vgpu-manager §5.3), and what it sets itself (vgpu-manager §4.1)."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.families.vgpu_manager.golden import KEYS, ONE, container, pod
from tests.families.vgpu_manager.node import MEMORY, NUMBER
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.vgpu_manager.requests import (
    DISABLED,
    Request,
    asks,
    compute_policy,
    read_request,
    sets,
)
from vgpu_agent.isolation.vgpu_control import ComputePolicy
from vgpu_agent.pods import PodContainer


@pytest.mark.parametrize(
    ("limits", "factor", "request_"),
    [
        ({"number": 1, "cores": 10, "memory": 1024}, 1, Request(1, 10, 1024)),
        ({"number": 2, "cores": 10, "memory": 4}, 1024, Request(2, 10, 4096)),
        ({"number": 1}, 1, Request(1, 100, None)),
        ({"number": 1, "cores": 10}, 1, Request(1, 10, None)),  # the trap
        ({"number": 1, "memory": 1024}, 1, Request(1, 0, 1024)),  # the other one
        ({"number": 16, "cores": 100}, 1, Request(16, 100, None)),
    ],
)
def test_the_limits_are_what_schedulers_read(
    limits: dict[str, Any], factor: int, request_: Request
) -> None:
    """vgpu-manager:D15: cores alone take all memory; memory alone is not limited in compute."""
    read = read_request(pod(), container(**limits), KEYS, factor)
    assert read == request_
    assert read.memory_on(24576) == (request_.memory_mib or 24576)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"number": 17}, "nvidia.com/vgpu-number is '17'; expected a number of GPUs, at most 16"),
        ({"number": 1, "cores": 101}, "nvidia.com/vgpu-cores is '101'; expected percent"),
        ({"number": 1, "memory": 2**62}, "nvidia.com/vgpu-memory is '4611686018427387904'"),
    ],
)
def test_what_no_card_has_is_refused(limits: dict[str, Any], told: str) -> None:
    """vgpu-manager §5.2 refuses the same; the user is told which limit."""
    with pytest.raises(RequestRefusedError, match=re.escape(told)):
        read_request(pod(), container(**limits), KEYS, 1)


def test_a_limit_that_is_no_number_is_quoted() -> None:
    """The user finds it in the specification."""
    odd = PodContainer("main", limits={NUMBER: 1}, unreadable_limits={MEMORY: "1.5Gi" * 20})
    with pytest.raises(RequestRefusedError, match="without Mi or Gi") as caught:
        read_request(pod(), odd, KEYS, 1)
    assert "container main" in str(caught.value)
    assert "(100 characters)" in str(caught.value)


def test_only_the_number_makes_a_container_ask() -> None:
    """The kubelet calls for nothing else (vgpu-manager §2.1)."""
    assert asks(ONE, KEYS)
    assert asks(PodContainer("main", unreadable_limits={NUMBER: "x"}), KEYS)
    assert not asks(container(cores=10, memory=1024), KEYS)
    assert not asks(container(number=0), KEYS)


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("true", True), ("TRUE", True), ("Enabled", True),
     ("0", False), ("yes", False), ("", False), ("$(X)", False), ("true ", False)],
)  # fmt: skip
def test_a_variable_counts_where_it_is_switched_on(value: str, *, on: bool) -> None:
    """vgpu-manager §4.1: 1, true, enabled in any case."""
    assert sets(container(number=1, values={DISABLED: value}), DISABLED) is on
    assert not sets(None, DISABLED)


@pytest.mark.parametrize(
    ("of_pod", "of_node", "policy"),
    [
        (None, None, ComputePolicy.FIXED),
        ("balance", None, ComputePolicy.BALANCE),
        ("none", "balance", ComputePolicy.NONE),
        (None, "Balance", ComputePolicy.BALANCE),
        ("as fast as possible", "balance", ComputePolicy.BALANCE),
        ("x" * 10_000, "y", ComputePolicy.FIXED),
    ],
)
def test_the_pods_compute_policy_beats_the_nodes(
    of_pod: str | None, of_node: str | None, policy: ComputePolicy
) -> None:
    """A word that means nothing counts as none."""
    key = KEYS.compute_policy
    about = msgspec.structs.replace(pod(), annotations={key: of_pod} if of_pod else {})
    assert compute_policy(about, {key: of_node} if of_node else {}, KEYS) is policy
