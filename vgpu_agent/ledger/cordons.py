"""Who keeps which device back from new containers, and why: each keeper lifts his own cordon only.

`book` holds one of these. A GPU can be kept back twice at a moment, because it is being divided and because no runtime can name it yet; the
first of the two that is done must not open it for the other.
"""

from __future__ import annotations


class Cordons:
    """State: device → keeper → reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}

    def set(self, device: str, by: str, reason: str) -> None:
        """``by`` keeps ``device`` back for ``reason``, which replaces an earlier one of his."""
        self._reasons.setdefault(device, {})[by] = reason

    def lift(self, device: str, by: str) -> bool:
        """``by`` keeps it back no longer; whether he did before."""
        reasons = self._reasons.get(device, {})
        lifted = reasons.pop(by, None) is not None
        if not reasons:
            self._reasons.pop(device, None)
        return lifted

    def reason(self, device: str) -> str:
        """Why nothing of ``device`` may be given out, by everybody who keeps it back; empty when nobody does."""
        return "; ".join(self._reasons.get(device, {}).values())
