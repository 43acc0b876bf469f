"""The one in-memory book of devices and grants: `book` keeps it, `accounting` does its sums."""

from vgpu_agent.ledger.book import Ledger

__all__ = ["Ledger"]
