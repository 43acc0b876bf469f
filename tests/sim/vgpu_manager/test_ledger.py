"""The simulated extender's ledger of one node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.vgpu_manager.objects import (
    CONFIG,
    REGISTER,
    U0,
    U1,
    asking,
    container,
    node,
    pod,
    register,
)
from vgpu_agent.sim.vgpu_manager.formats import Claim, Keys, read_claims, write_claims
from vgpu_agent.sim.vgpu_manager.ledger import NodeLedger, Use, footprint, holds_claim

KEYS = Keys()
NOW = 1_787_331_600.0


def _ledger(*pods: dict[str, Any], of: dict[str, Any] | None = None) -> NodeLedger:
    made = NodeLedger.of(of or node(), pods, KEYS, NOW)
    assert isinstance(made, NodeLedger), made
    return made


def _placed(asked: dict[str, Any], *others: dict[str, Any], policy: str = "none") -> str:
    claims = _ledger(*others).place(asked, KEYS, policy=policy)
    assert not isinstance(claims, str), claims
    return write_claims(claims).replace(U0, "U0").replace(U1, "U1")


def _bound(name: str, claim: str, *containers: dict[str, Any], **more: Any) -> dict[str, Any]:
    text = claim.replace("U0", U0).replace("U1", U1)
    return pod(
        name,
        containers or [container("c", asking())],
        annotations={"pre-allocated": text},
        node_name="gpu-node-1",
        **more,
    )


def test_the_golden_pod() -> None:
    """vgpu-manager §13.3: card 0, since no policy sorts by NUMA node and index."""
    golden = pod("gpu-pod", [container("default", asking(1, 10, 1024))])
    assert _placed(golden) == "default[0_U0_10_1024]"
    assert _placed(golden, policy="binpack") == "default[0_U0_10_1024]"
    assert _placed(golden, policy="spread") == "default[0_U0_10_1024]"


def test_what_a_request_leaves_open() -> None:
    """vgpu-manager §5.3: cores alone take all memory, memory alone no compute, nothing at all the
    whole card.
    """
    assert _placed(pod("a", [container("c", asking(1, 10))])) == "c[0_U0_10_24576]"
    assert _placed(pod("a", [container("c", asking(1, 0, 5))])) == "c[0_U0_0_5]"
    assert _placed(pod("a", [container("c", asking(2))])) == "c[0_U0_100_24576,1_U1_100_24576]"


def test_policies_look_at_what_is_free() -> None:
    """vgpu-manager §5.5: binpack takes the fuller card, spread the emptier one."""
    other = _bound("other", "c[1_U1_10_1000]")
    asked = pod("a", [container("c", asking(1, 10, 1000))])
    assert _placed(asked, other, policy="binpack") == "c[1_U1_10_1000]"
    assert _placed(asked, other, policy="spread") == "c[0_U0_10_1000]"
    asked["metadata"]["annotations"]["nvidia.com/device-scheduler-policy"] = "spread"
    assert _placed(asked, other, policy="binpack") == "c[0_U0_10_1000]"


def test_containers_of_a_pod_see_each_other_and_init_containers_run_alone() -> None:
    """vgpu-manager §5.5: later containers see the reduced cards; an init container is placed beside
    sidecars only, first on the pod's own cards; init containers come first in the claim.
    """
    asked = pod(
        "a",
        [container("one", asking(1, 60, 100)), container("two", asking(1, 60, 100))],
        init=[
            container("before", asking(1, 90, 100)),
            container("side", asking(1, 10, 100), sidecar=True),
        ],
    )
    assert _placed(asked) == (
        "before[0_U0_90_100];side[0_U0_10_100];one[0_U0_60_100];two[1_U1_60_100]"
    )


def test_a_pod_takes_the_larger_of_its_init_containers_and_its_containers() -> None:
    """vgpu-manager §4.4: sidecars, and the maximum of both in each dimension."""
    made = pod(
        "a",
        [container("one", {}), container("two", {})],
        init=[container("before", {}), container("side", {}, sidecar=True)],
    )
    claims = read_claims(f"before[0_{U0}_5_9];side[0_{U0}_1_1];one[0_{U0}_3_4];two[0_{U0}_3_4]")
    assert claims is not None
    assert footprint(made, claims) == {U0: Use(3, 10, 7)}


def test_a_full_card_is_not_taken() -> None:
    """Memory, compute and slots each are enough to leave it out; so is ill health."""
    asked = pod("a", [container("c", asking(1, 30, 1000))])
    assert _placed(asked, _bound("x", "c[0_U0_80_1000]")) == "c[1_U1_30_1000]"
    assert _placed(asked, _bound("x", "c[0_U0_10_24000]")) == "c[1_U1_30_1000]"
    ten = [_bound(f"x{number}", "c[0_U0_0_10]") for number in range(10)]
    assert _placed(asked, *ten) == "c[1_U1_30_1000]"
    ill = node(
        annotations={"node-device-register": register(healthy=False), "node-config-info": CONFIG}
    )
    ledger = _ledger(_bound("x", "c[0_U0_80_1000]"), of=ill)
    assert ledger.place(asked, KEYS) == "Insufficient GPU resources"
    asked = pod("a", [container("c", asking(2))])
    assert ledger.place(asked, KEYS) == "Insufficient GPU cards"


def test_a_claim_in_use_counts_before_a_planned_one() -> None:
    """vgpu-manager §4.4: `real-allocated` once it lists as many containers."""
    served = _bound("x", "c[0_U0_10_1000]")
    served["metadata"]["annotations"]["nvidia.com/real-allocated"] = f"c[1_{U1}_20_2000]"
    assert _ledger(served).uses == {U1: Use(1, 2000, 20)}


def test_a_pods_list_of_cards() -> None:
    """vgpu-manager §4.1: substrings, without regard to case."""
    asked = pod(
        "a", [container("c", asking(1, 1, 1))], annotations={"include-gpu-uuid": "gpu-7F1C, ,"}
    )
    assert _placed(asked) == "c[1_U1_1_1]"
    asked = pod(
        "a", [container("c", asking(1, 1, 1))], annotations={"exclude-gpu-type": "nvidia a10"}
    )
    assert _ledger().place(asked, KEYS) == "GPU type mismatch"


@pytest.mark.parametrize(
    ("annotations", "number", "reason"),
    [
        ({}, "20", "node has no vGPU registered"),
        ({}, "0", "node not vGPU-enabled"),
        ({"node-device-register": "x"}, "20", "node vGPU registry invalid"),
        ({"node-device-register": REGISTER}, "20", "node has no vGPU configuration"),
        (
            {"node-device-register": REGISTER, "node-config-info": "x"},
            "20",
            "node vGPU configuration invalid",
        ),
        (
            {
                "node-device-register": REGISTER,
                "node-config-info": '{"deviceSplit":1,"memoryFactor":0}',
            },
            "20",
            "node memory factor invalid",
        ),
    ],
)
def test_a_node_that_takes_no_pods(annotations: dict[str, str], number: str, reason: str) -> None:
    """vgpu-manager §5.2: the phrase that a pod's event would show."""
    assert NodeLedger.of(node(annotations=annotations, number=number), [], KEYS, NOW) == reason


def _unschedulable(at: str) -> dict[str, Any]:
    return {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "lastTransitionTime": at,
            }
        ]
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"spec": {"nodeName": "n"}}, True),
        ({"labels": {"nvidia.com/assigned-phase": "failed"}}, False),
        ({"status": _unschedulable("2026-08-21T17:00:00Z")}, True),
        ({"status": _unschedulable("2026-08-21T17:00:01Z")}, False),
        ({"status": _unschedulable("2026-08-21T16:00:00Z"), "age": 31.0}, False),
        ({"status": _unschedulable("2026-08-21T16:00:00Z"), "time": str(2**63 - 1)}, False),
    ],
)
def test_which_claims_count(changes: dict[str, Any], expected: bool) -> None:
    """vgpu-manager §4.4: the rule by which a reservation is held, row by row."""
    made = pod("a", [])
    planned = "1787331601000000000"  # 2026-08-21T17:00:01Z
    made["metadata"]["annotations"]["nvidia.com/predicate-time"] = changes.get("time", planned)
    made["metadata"]["labels"] = changes.get("labels", {})
    made["spec"] |= changes.get("spec", {})
    made["status"] = changes.get("status", {})
    assert holds_claim(made, KEYS, 1_787_331_601.0 + changes.get("age", 0.0)) is expected


def test_a_planned_pod_without_a_node_counts_on_the_planned_one() -> None:
    """Between filter and bind the annotation says where it will be."""
    planned = pod(
        "x",
        [container("c", asking())],
        annotations={"pre-allocated": f"c[0_{U0}_5_5]", "predicate-node": "gpu-node-1"},
    )
    assert _ledger(planned).uses == {U0: Use(1, 5, 5)}
    planned["metadata"]["annotations"]["nvidia.com/predicate-node"] = "gpu-node-2"
    assert _ledger(planned).uses == {}


def test_memory_is_counted_in_the_nodes_units() -> None:
    """vgpu-manager §5.3: a claim is in MiB, a limit in units of `memoryFactor`."""
    config = CONFIG.replace('"memoryFactor":1', '"memoryFactor":64')
    many = node(annotations={"node-device-register": REGISTER, "node-config-info": config})
    claims = _ledger(of=many).place(pod("a", [container("c", asking(1, 1, 10))]), KEYS)
    assert claims == {"c": (Claim(0, U0, 1, 640),)}
