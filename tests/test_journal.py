"""The last thousand decisions."""

from __future__ import annotations

from vgpu_agent.journal import Journal


def test_the_oldest_entry_goes_when_the_journal_is_full() -> None:
    """Memory stays bounded and the newest entries stay."""
    journal = Journal(size=2, clock=lambda: 5.0)
    for number in range(3):
        journal.record("allocate.reserved", number=number)
    assert [(entry.at, entry.event, entry.facts["number"]) for entry in journal.entries] == [
        (5.0, "allocate.reserved", 1),
        (5.0, "allocate.reserved", 2),
    ]
