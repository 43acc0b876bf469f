"""The decision to open the driver anew, on plain readings."""

from __future__ import annotations

from vgpu_agent.gpu.health import Probe
from vgpu_agent.gpu.inventory import Card, Reading
from vgpu_agent.gpu.nvml import Handle
from vgpu_agent.gpu.reopening import Reopening
from vgpu_agent.gpu.session import Snapshot
from vgpu_agent.model import Gpu


def _snapshot(
    *uuids: str, failures: tuple[str, ...] = (), driven: frozenset[str] = frozenset()
) -> Snapshot:
    cards = tuple(
        Card(Gpu(uuid, index, index, "A100", 81920), Handle(None), Probe())
        for index, uuid in enumerate(uuids)
    )
    return Snapshot(Reading(cards, failures), None, driven, (), "580", "13.0", simulated=True)


def test_a_node_where_all_is_well_is_never_reopened() -> None:
    """The first reading is no news, and neither is the same one again."""
    reopening = Reopening(5)
    for now in (0, 5, 10):
        reopening.note_reading(_snapshot("A", "B"), ["A", "B"], reopened=False, now=now)

        assert not reopening.due(now)


def test_a_gpu_that_stops_answering_is_a_reason_at_once() -> None:
    """It may have been pulled: only a new opening tells."""
    reopening = Reopening(5)
    reopening.note_reading(_snapshot("A", "B"), [], reopened=False, now=0)

    reopening.note_reading(_snapshot("A", failures=("1: lost",)), ["A", "B"], reopened=False, now=5)

    assert reopening.due(5)


def test_a_reason_that_stays_is_tried_at_growing_pauses() -> None:
    """5, 10, 20, 30 and then every 30 seconds:
    a card that is dead for a week does not keep the driver busy.
    """
    reopening = Reopening(5)
    reopening.note_reading(_snapshot("A"), ["A", "B"], reopened=False, now=0)
    pauses = []
    now = 0
    for _ in range(5):
        opened_at = now
        reopening.note_reading(_snapshot("A"), ["A", "B"], reopened=True, now=now)
        while not reopening.due(now):
            now += 5
            reopening.note_reading(_snapshot("A"), ["A", "B"], reopened=False, now=now)
        pauses.append(now - opened_at)

    assert pauses == [5, 10, 20, 30, 30]


def test_news_does_not_wait_for_the_pause() -> None:
    """While one card is dead another one comes back:
    its handle and its events need a new opening now.
    """
    reopening = Reopening(5)
    reopening.note_reading(_snapshot("A"), ["A", "B", "C"], reopened=True, now=0)

    reopening.note_reading(_snapshot("A", "B"), ["A", "B", "C"], reopened=False, now=1)

    assert reopening.due(1)


def test_the_kernel_driving_another_card_is_a_reason_once() -> None:
    """A card that NVML does not know of yet. The opening settles it."""
    reopening = Reopening(5)
    reopening.note_reading(
        _snapshot("A", driven=frozenset({"0000:07:00.0"})), ["A"], reopened=False, now=0
    )

    reopening.note_reading(
        _snapshot("A", driven=frozenset({"0000:07:00.0", "0000:0f:00.0"})),
        ["A"],
        reopened=False,
        now=5,
    )
    assert reopening.due(5)
    reopening.note_reading(
        _snapshot("A", driven=frozenset({"0000:07:00.0", "0000:0f:00.0"})),
        ["A"],
        reopened=True,
        now=5,
    )

    assert not reopening.due(1000)


def test_a_broken_queue_stays_a_reason_until_it_is_replaced() -> None:
    """A pause may delay the new opening and must not cancel it."""
    reopening = Reopening(5)
    reopening.note_reading(_snapshot("A"), ["A"], reopened=True, now=0)
    reopening.driver_failed = True

    reopening.note_reading(_snapshot("A"), ["A"], reopened=False, now=2)
    assert reopening.due(100)
    reopening.note_reading(_snapshot("A"), ["A"], reopened=True, now=100)

    assert not reopening.due(1000)
