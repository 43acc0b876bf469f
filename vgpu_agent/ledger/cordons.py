"""The cordons that keep devices back from new containers, with their reasons.
Each owner lifts its own cordon only.

`book` holds one of these. A GPU can have two cordons at once: it is being divided, and no runtime
can resolve its CDI name yet. Lifting the first must not lift the other.
"""

from __future__ import annotations


class Cordons:
    """State: device → owner of the cordon → reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}

    def set(self, device: str, by: str, reason: str) -> None:
        """Keep ``device`` back for the owner ``by``; ``reason`` replaces an earlier one of the same
        owner.
        """
        self._reasons.setdefault(device, {})[by] = reason

    def lift(self, device: str, by: str) -> bool:
        """End the cordon of ``by``; tell whether there was one."""
        reasons = self._reasons.get(device, {})
        lifted = reasons.pop(by, None) is not None
        if not reasons:
            self._reasons.pop(device, None)
        return lifted

    def reason(self, device: str) -> str:
        """Return why nothing of ``device`` may be granted, for all of its cordons;
        empty when there is none.
        """
        return "; ".join(self._reasons.get(device, {}).values())
