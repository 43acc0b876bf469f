"""The small formats around the simulated Volcano scheduler:
handshake, node lock, quantities, and the GPU-share ledger.
"""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.volcano.objects import gpushare_node, node, pod
from vgpu_agent.sim.volcano import annotations as volcano_annotations
from vgpu_agent.sim.volcano import resources
from vgpu_agent.sim.volcano.gpushare import GpushareLedger, Strategy
from vgpu_agent.sim.volcano.ledger import Placed

NOW = 1795200692.0  # 2026-11-20 18:51:32 UTC


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (False, None)),
        ("Reported 2026-01-02 03:04:05 +0000 UTC", (True, "Requesting_2026.11.20 18:51:32")),
        ("Requesting_2026.11.20 18:50:32", (True, None)),
        ("Requesting_2026.11.20 18:50:31", (False, "Deleted_2026.11.20 18:51:32")),
        ("Requesting whenever", (False, "Deleted_2026.11.20 18:51:32")),
        ("Deleted_2026.11.20 18:50:31", (False, None)),
    ],
)
def test_handshake(value: str | None, expected: tuple[bool, str | None]) -> None:
    """volcano-vgpu §2.3: a ping is answered within 60 seconds or the node's GPUs are ignored."""
    assert volcano_annotations.judge_handshake(value, NOW) == expected


@given(st.text(alphabet=st.sampled_from("GPU-0123456789abeE,:;_. []truefalshmig\x00é")))
def test_junk_is_read_without_a_word(text: str) -> None:
    """Other clients' text in annotations never ends a round. It means nothing, or numbers."""
    registration = volcano_annotations.parse_registration(text)
    cards = registration.cards if registration else ()
    assert all(
        isinstance(number, int)
        for card in cards
        for number in (card.index, card.seats, card.memory)
    )
    assert all(
        isinstance(number, int)
        for claim in volcano_annotations.parse_claims(text)
        for number in (claim.memory, claim.cores)
    )
    assert all(index >= 0 for index in volcano_annotations.parse_indices(text))
    assert volcano_annotations.judge_handshake(f"Requesting_{text}", NOW)[0] in (True, False)
    assert isinstance(volcano_annotations.lock_age(text, NOW), float | None)
    assert abs(resources.amount(text)) < 2**63


def test_lock_stamps() -> None:
    """volcano-vgpu §2.4: RFC 3339 in whole seconds. What cannot be read has no age."""
    assert volcano_annotations.lock_stamp(NOW) == "2026-11-20T18:51:32Z"
    assert volcano_annotations.lock_age("2026-11-20T18:51:02Z", NOW) == 30
    assert volcano_annotations.lock_age("2026-11-20T19:51:02+01:00", NOW) == 30
    assert volcano_annotations.lock_age("soon", NOW) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10k", 10_000),
        ("3Gi", 3 * 2**30),
        ("500m", Decimal("0.5")),
        ("1E", 10**18),
        ("7", 7),
        ("x", 0),
        ("Infinity", 0),
        ("1e99999999", 0),
    ],
)
def test_quantities(text: str, expected: Decimal | int) -> None:
    """Kubernetes writes ten thousand devices as 10k."""
    assert resources.amount(text) == expected


def test_a_node_without_the_resource_lacks_it() -> None:
    """`vgpu-memory-percentage` is an ordinary resource that no node has."""
    wanted = resources.requests(
        pod("p", {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "50"})
    )
    assert resources.lacking(resources.free(node(), []), wanted) == [
        "volcano.sh/vgpu-memory-percentage"
    ]


def test_requests_of_init_containers_count_where_they_are_larger() -> None:
    """A pod takes the sum of its containers or its largest init container."""
    wanted = resources.requests(
        pod("p", {"cpu": "1"}, {"cpu": "1"}, init=[{"cpu": "3"}, {"memory": "5"}])
    )
    assert wanted == {"cpu": 3, "memory": 5}


def _ledger(strategy: Strategy, **of_node: str | None) -> GpushareLedger:
    # number and memory only
    ledger = GpushareLedger.of(gpushare_node(**of_node), [], strategy=strategy)  # type: ignore[arg-type]  # the test's own keywords
    assert ledger is not None
    return ledger


def _memory(*amounts: int) -> list[dict[str, str]]:
    return [{"volcano.sh/gpu-memory": str(amount)} for amount in amounts]


def test_s2_gpushare_annotations() -> None:
    """volcano-gpushare:S2: the lowest card with room, and the time in nanoseconds."""
    assert _ledger("share").place(pod("p", *_memory(3000)), 1795200991.25) == Placed(
        {"volcano.sh/gpu-index": "0", "volcano.sh/predicate-time": "1795200991250000000"}
    )


def test_s7_gpushare_places_whole_pods_on_one_card() -> None:
    """volcano-gpushare:S7 and volcano-gpushare §8: 3000, 20000, 3000 MiB go to cards 0, 0, 1. Two
    containers of a pod count together.
    """
    ledger = _ledger("share")
    placed = [
        ledger.place(pod(str(number), *_memory(*amounts)), NOW)
        for number, amounts in enumerate([(3000,), (10000, 10000), (3000,)])
    ]
    assert [each and each.annotations["volcano.sh/gpu-index"] for each in placed] == ["0", "0", "1"]


def test_s6_gpushare_leaves_out_unhealthy_cards() -> None:
    """volcano-gpushare:S6: a card named in the annotation takes no pods.
    What is no number there is passed over.
    """
    sick = gpushare_node(annotations={"volcano.sh/gpu-unhealthy-ids": "x,0"})
    ledger = GpushareLedger.of(sick, [], strategy="share")
    assert ledger is not None
    assert sorted(ledger.holders) == [1]


def test_s5_gpushare_number_gives_idle_cards() -> None:
    """volcano-gpushare:S5: k cards without any pod, or none."""
    ledger = _ledger("number", memory="0")
    assert ledger.place(pod("three", {"volcano.sh/gpu-number": "3"}), NOW) is None
    placed = ledger.place(pod("two", {"volcano.sh/gpu-number": "2"}), NOW)
    assert placed is not None
    assert placed.annotations["volcano.sh/gpu-index"] == "0,1"
    assert ledger.place(pod("late", {"volcano.sh/gpu-number": "1"}), NOW) is None


@pytest.mark.parametrize("lacks", [{"memory": None}, {"number": "0"}])
def test_gpushare_needs_both_resources_in_capacity(lacks: dict[str, str | None]) -> None:
    """A fresh node in number mode has no gpu-memory,
    so the scheduler takes it for one without GPUs.
    """
    # number and memory only
    assert GpushareLedger.of(gpushare_node(**lacks), [], strategy="number") is None  # type: ignore[arg-type]  # the test's own keywords
