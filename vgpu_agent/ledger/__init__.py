"""The one in-memory ledger of devices and grants: `book` keeps it, `accounting` does its sums."""

from vgpu_agent.ledger.book import Ledger

__all__ = ["Ledger"]
