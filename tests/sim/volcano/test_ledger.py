"""The simulated Volcano scheduler's vGPU ledger: which card, which string, and what it refuses
(volcano-vgpu §2.2, §3.2, §8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.sim.volcano.objects import ALLOCATABLE, REGISTER, U0, U1, asking, bound, node, pod
from vgpu_agent.sim.volcano.ledger import Placed, Policy, VgpuLedger

NOW = 1795200692.7
Object = dict[str, Any]


def ledger_of(*pods: Object, policy: Policy = "none", **of_node: Any) -> VgpuLedger:
    """The ledger of the golden node with those pods on it."""
    ledger = VgpuLedger.of(node(**of_node), pods, policy=policy, requires_resources=True)
    assert ledger is not None
    return ledger


def devices(ledger: VgpuLedger, *limits: Mapping[str, str], **requests: str) -> str | None:
    """The pod devices string of a new pod, with U0 and U1 for the long names;
    None when it does not fit.
    """
    placed = ledger.place(
        pod(
            "p",
            *limits,
            annotations={
                key.replace("__", "/").replace("_", "-"): text for key, text in requests.items()
            },
        ),
        NOW,
    )
    return (
        None
        if placed is None
        else placed.annotations["volcano.sh/vgpu-ids-new"].replace(U0, "U0").replace(U1, "U1")
    )


def holding(text: str, name: str = "holder") -> Object:
    """A bound pod whose annotation says that."""
    return bound(
        pod(name, asking(1)), {"volcano.sh/vgpu-ids-new": text.replace("U0", U0).replace("U1", U1)}
    )


def test_g3_the_six_annotations() -> None:
    """volcano-vgpu:G3: one container of 1/3000/50 without a policy goes to the card
    of the highest index.
    """
    assert ledger_of().place(pod("p", asking(1, 3000, 50)), NOW) == Placed(
        {
            "volcano.sh/vgpu-node": "node-a",
            "volcano.sh/vgpu-time": "1795200692",
            "volcano.sh/bind-time": "1795200692",
            "volcano.sh/bind-phase": "allocating",
            "volcano.sh/vgpu-ids-new": f"{U1},NVIDIA,3000,50:",
            "volcano.sh/devices-to-allocate": f"{U1},NVIDIA,3000,50:",
        }
    )


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param(
            [asking(2, 3000, 50)], "U1,NVIDIA,3000,50:U0,NVIDIA,3000,50:", id="G6 two cards"
        ),
        pytest.param([asking(1)], "U1,NVIDIA,24576,0:", id="G7 number only"),
        pytest.param(
            [{}, asking(1, 3000), {}, asking(1, 4000, 30)],
            "U1,NVIDIA,3000,0:;U1,NVIDIA,4000,30:",
            id="G8 containers",
        ),
        pytest.param([asking(memory=500)], "U1,NVIDIA,500,0:", id="no number is one card"),
        pytest.param(
            [asking(1, 700, percentage=50)], "U1,NVIDIA,12288,0:", id="a percentage beats memory"
        ),
        pytest.param([asking(3, 10)], None, id="more cards than there are"),
        pytest.param([asking(1, 24577)], None, id="more memory than a card has"),
        pytest.param(
            [asking(1, 20000), asking(2, 5000)], None, id="one container of two does not fit"
        ),
    ],
)
def test_pod_devices_strings(limits: list[Mapping[str, str]], expected: str | None) -> None:
    """volcano-vgpu:G6, volcano-vgpu:G7 and volcano-vgpu:G8:
    one segment per asking container, the whole card by default.
    """
    assert devices(ledger_of(), *limits) == expected


def test_a_pod_that_does_not_fit_leaves_the_ledger_as_it_was() -> None:
    """The memory that its first container took is free again."""
    ledger = ledger_of()
    assert devices(ledger, asking(1, 20000), asking(2, 5000)) is None
    assert devices(ledger, asking(2, 24576)) == "U1,NVIDIA,24576,0:U0,NVIDIA,24576,0:"


def test_g3_binpack_fills_one_card() -> None:
    """volcano-vgpu:G3: the first pod and the second go to U0, with the scores of the vector."""
    ledger = ledger_of(policy="binpack")
    first, second = (ledger.place(pod(name, asking(1, 3000)), NOW) for name in ("one", "two"))
    assert first is not None
    assert second is not None
    assert [placed.annotations["volcano.sh/vgpu-ids-new"] for placed in (first, second)] == [
        f"{U0},NVIDIA,3000,0:"
    ] * 2
    assert [first.score, second.score] == [12.20703125, 24.4140625]


def test_g3_spread_takes_the_emptier_card() -> None:
    """volcano-vgpu:G3: the first pod goes to U0, the second to U1,
    and no node is better than another.
    """
    ledger = ledger_of(policy="spread")
    placed = [ledger.place(pod(name, asking(1, 3000)), NOW) for name in ("one", "two", "three")]
    assert [
        each and each.annotations["volcano.sh/vgpu-ids-new"].split(",")[0] for each in placed
    ] == [U0, U1, U0]
    assert [each and each.score for each in placed] == [0, 0, 0]


def test_binpack_prefers_the_fuller_card_until_it_is_full() -> None:
    """Memory in use decides, not the number of holders."""
    ledger = ledger_of(
        holding("U0,NVIDIA,10,0:U0,NVIDIA,10,0:;U1,NVIDIA,20000,0:"), policy="binpack"
    )
    assert devices(ledger, asking(1, 4000)) == "U1,NVIDIA,4000,0:"
    assert devices(ledger, asking(1, 4000)) == "U0,NVIDIA,4000,0:"


@pytest.mark.parametrize(
    ("held", "limits", "expected"),
    [
        pytest.param(
            "U1,NVIDIA,10,60:", asking(1, 10, 50), "U0,NVIDIA,10,50:", id="cores above 100"
        ),
        pytest.param(
            "U1,NVIDIA,10,0:",
            asking(1, 10, 100),
            "U0,NVIDIA,10,100:",
            id="all cores need an empty card",
        ),
        pytest.param(
            "U1,NVIDIA,10,100:",
            asking(1, 10),
            "U0,NVIDIA,10,0:",
            id="no cores on a card whose cores are gone",
        ),
        pytest.param("U1,NVIDIA,24000,0:", asking(1, 577), "U0,NVIDIA,577,0:", id="memory"),
        pytest.param("U1,NVIDIA,1,0:" * 10, asking(1, 1), "U0,NVIDIA,1,0:", id="seats"),
        pytest.param(
            "U1[group2-0],NVIDIA,24000,0:",
            asking(1, 577),
            "U0,NVIDIA,577,0:",
            id="an id that contains the UUID",
        ),
        pytest.param(
            "junk;U1,NVIDIA:U1,NVIDIA,x,y:;;",
            asking(1, 24576),
            "U1,NVIDIA,24576,0:",
            id="junk is passed over",
        ),
        pytest.param(
            "GPU-elsewhere,NVIDIA,24576,0:",
            asking(1, 24576),
            "U1,NVIDIA,24576,0:",
            id="a card of nobody",
        ),
    ],
)
def test_what_is_held_is_rebuilt_from_the_annotations(
    held: str, limits: Mapping[str, str], expected: str
) -> None:
    """Only `vgpu-ids-new` of the pods on the node counts."""
    assert devices(ledger_of(holding(held)), limits) == expected


def test_ended_pods_hold_nothing_and_deleted_ones_still_do() -> None:
    """A pod on its way out may still run."""
    ended = {**holding("U1,NVIDIA,24576,0:", "ended"), "status": {"phase": "Succeeded"}}
    leaving = holding("U0,NVIDIA,24576,0:", "leaving")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    ledger = ledger_of(ended, leaving)
    assert devices(ledger, asking(1)) == "U1,NVIDIA,24576,0:"
    assert devices(ledger, asking(1, 1)) is None


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({"nvidia.com__use_gputype": "a100,A10"}, "U1"),
        ({"nvidia.com__use_gputype": "V100"}, None),
        ({"nvidia.com__use_gputype": " V100, A10"}, "U1"),  # the type has a space before A10
        ({"nvidia.com__nouse_gputype": "a10"}, None),
        ({"nvidia.com__nouse_gputype": "a10", "nvidia.com__use_gputype": "A10"}, "U1"),
        ({"volcano.sh__vgpu_use_gpuuuid": f" {U0} , x"}, "U0"),
        ({"volcano.sh__vgpu_nouse_gpuuuid": U1}, "U0"),
        ({"volcano.sh__vgpu_use_gpuuuid": U1, "volcano.sh__vgpu_nouse_gpuuuid": U1}, None),
        ({"volcano.sh__vgpu_mode": "hami-core"}, "U1"),
        ({"volcano.sh__vgpu_mode": "mig"}, None),
    ],
)
def test_requests_for_types_and_uuids(requests: Mapping[str, str], expected: str | None) -> None:
    """Types match as substrings and a wanted one silences the unwanted; of UUIDs the denied win."""
    assert devices(ledger_of(), asking(1, 10), **requests) == (
        expected and f"{expected},NVIDIA,10,0:"
    )


def test_pods_of_a_group_are_kept_apart_where_asked() -> None:
    """`volcano.sh/vgpu-podgroup-policy: spread`:
    a card holds one pod of a group, and any pod of others.
    """
    mine = {"scheduling.k8s.io__group_name": "mine", "volcano.sh__vgpu_podgroup_policy": "spread"}
    ledger = ledger_of()
    assert [devices(ledger, asking(1, 10), **mine) for _ in range(3)] == [
        "U1,NVIDIA,10,0:",
        "U0,NVIDIA,10,0:",
        None,
    ]
    assert (
        devices(ledger, asking(1, 10), **{**mine, "scheduling.k8s.io__group_name": "other"})
        == "U1,NVIDIA,10,0:"
    )


def _register(first: str, second: str) -> str:
    return f"{U0},{first}:{U1},{second}:"


CARD = "10,24576,NVIDIA-NVIDIA A10,true,hami-core"


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        pytest.param(_register(CARD, CARD.rpartition(",")[0]), None, id="5 fields: node ignored"),
        pytest.param(_register(CARD, CARD + ",extra"), "U1", id="7 fields: accepted"),
        pytest.param(_register(CARD, "0" + CARD[2:]), "U0", id="count 0: card skipped"),
        pytest.param(
            _register(CARD, CARD.replace("true", "false")), "U1", id="health false: card still used"
        ),
        pytest.param(
            _register(CARD, CARD.replace("24576", "much")), "U0", id="memory that is no number is 0"
        ),
        pytest.param(REGISTER.replace(":", ""), None, id="no colon"),
        pytest.param("", None, id="empty"),
    ],
)
def test_g13_decoding(register: str, expected: str | None) -> None:
    """volcano-vgpu:G13: what the scheduler makes of unusual register annotations."""
    ledger = VgpuLedger.of(node(register=register), [], policy="none", requires_resources=True)
    assert (ledger and devices(ledger, asking(1, 10))) == (expected and f"{expected},NVIDIA,10,0:")


def test_g13_a_card_with_count_0_keeps_what_it_holds() -> None:
    """volcano-vgpu:G13: its pods stay accounted,
    so that it is right again when the count returns.
    """
    ledger = ledger_of(holding("U1,NVIDIA,3000,0:"), register=_register(CARD, "0" + CARD[2:]))
    assert [(use.card.index, use.memory, use.holders) for use in ledger.uses] == [
        (0, 0, 0),
        (1, 3000, 1),
    ]


@pytest.mark.parametrize("missing", sorted(ALLOCATABLE))
@pytest.mark.parametrize("how", ["absent", "zero"])
def test_a_node_without_all_three_resources_has_no_cards(missing: str, how: str) -> None:
    """Schedulers from 1.14.3 ask for each of them in allocatable; older ones do not."""
    allocatable = {**ALLOCATABLE, missing: "0"}
    if how == "absent":
        del allocatable[missing]
    lacking = node(allocatable=allocatable)
    assert VgpuLedger.of(lacking, [], policy="none", requires_resources=True) is None
    assert VgpuLedger.of(lacking, [], policy="none", requires_resources=False) is not None


def test_init_containers_are_not_seen() -> None:
    """Only regular containers get a segment."""
    placed = ledger_of().place(pod("p", asking(1, 10), init=[asking(1, 9)]), NOW)
    assert placed is not None
    assert placed.annotations["volcano.sh/vgpu-ids-new"] == f"{U1},NVIDIA,10,0:"
