"""The decision when a GPU may not be given away, and when it may again:
one small state machine a GPU, on plain values.

Three things make a GPU Unhealthy: an XID that counts, a probe that the card or the driver answered
badly, and a driver call about this GPU that does not return. It comes back when the card answers,
the driver asks for no reset or reboot, no row remap is pending, and it has been quiet for a while.
A GPU that fails again soon must be quiet for twice as long each time, so that a flapping card does
not fail one pod after another.

Called by `healths` only, on the event loop. Reads no clock but the one it is given. A MIG slice has
a machine of this class of its own beside its GPU's.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from vgpu_agent.model import Health

if TYPE_CHECKING:
    from collections.abc import Callable


class RecoveryAction(enum.IntEnum):
    """The action that the driver requires before a GPU is used again (NVML:
    nvmlDeviceGpuRecoveryAction_t).
    """

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7
    UNKNOWN = -1  # a newer driver's word

    @classmethod
    def _missing_(cls, value: object) -> RecoveryAction:
        del value
        return cls.UNKNOWN

    @property
    def forbids_use(self) -> bool:
        """No new work may start before it is done;
        the others let running cards run on and only delay a recovery.
        """
        return self in {
            self.GPU_RESET,
            self.NODE_REBOOT,
            self.DRAIN_AND_RESET,
            self.BUS_RESET,
            self.SYSTEM_REBOOT,
        }

    @property
    def words(self) -> str:
        """``GPU reset``, for a reason."""
        return {
            self.UNKNOWN: "recovery action that this agent does not know",
            self.DRAIN_P2P: "drain of peer-to-peer traffic",
        }.get(
            self, self.name.lower().replace("_", " ").replace("gpu", "GPU").replace("imex", "IMEX")
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """The health of a GPU in one probe.

    Attributes:
        trouble: why it did not answer as a working GPU does; empty when it did.
        recovery_action: NVML field 230; NONE where the driver does not know the field.
        remap_pending: a row of its memory waits for a reset to be replaced.
    """

    trouble: str = ""
    recovery_action: RecoveryAction = RecoveryAction.NONE
    remap_pending: bool = False

    @property
    def failure(self) -> str:
        """The reason why this answer makes a GPU Unhealthy; empty when it does not."""
        if self.trouble:
            return self.trouble
        return (
            f"the driver asks for a {self.recovery_action.words}"
            if self.recovery_action.forbids_use
            else ""
        )

    @property
    def obstacle(self) -> str:
        """The condition that must go away before an Unhealthy GPU may recover;
        empty when there is none.
        """
        if self.recovery_action is not RecoveryAction.NONE:
            return f"a {self.recovery_action.words}"
        return "a GPU reset that replaces a row of memory" if self.remap_pending else ""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The rules by which an Unhealthy GPU comes back (settings ``gpu.recovery``); times in seconds.

    Attributes:
        automatic: False for mode ``never``: only a restart of the agent forgives.
        quiet_seconds: how long the GPU must be without errors.
        flap_window_seconds: a relapse within this time of the last recovery doubles the quiet time.
        max_quiet_seconds: where the doubling ends.
    """

    automatic: bool = True
    quiet_seconds: float = 60.0
    flap_window_seconds: float = 3600.0
    max_quiet_seconds: float = 3600.0


class GpuHealth:
    """One GPU's state.

    ``now`` is monotonic seconds in every method; ``wall`` returns unix seconds for `Health.since`.
    Each method returns True when `health` became a different value. A restart of the agent begins
    with a healthy GPU and lets the first probe judge.
    """

    def __init__(self, policy: RecoveryPolicy, *, wall: Callable[[], float]) -> None:
        self.policy = policy
        self._wall = wall
        self._health = Health()
        self._cause = ""
        self._last_probe = Probe()
        self._hung = False
        self._heard_at = 0.0  # the last bad news
        self._recovered_at: float | None = None
        self._relapses = 0

    @property
    def health(self) -> Health:
        """The health that the inventory shows."""
        return self._health

    @property
    def quiet_needed_seconds(self) -> float:
        """Return how long it must be quiet this time."""
        longest = max(self.policy.quiet_seconds, self.policy.max_quiet_seconds)
        doublings = min(self._relapses, 64)  # far beyond any limit, and still a float
        return float(min(self.policy.quiet_seconds * 2.0**doublings, longest))

    @property
    def recovers_at(self) -> float | None:
        """The earliest monotonic time at which a good probe would bring it back;
        None when more than time is missing.
        """
        if (
            self._health.ok
            or self._hung
            or not self.policy.automatic
            or self._last_probe.failure
            or self._last_probe.obstacle
        ):
            return None
        return self._heard_at + self.quiet_needed_seconds

    def reported(self, reason: str, now: float) -> bool:
        """An error event that counts: the GPU is Unhealthy from now on, for ``reason``."""
        return self._fail(reason, now)

    def hung(self, reason: str, now: float) -> bool:
        """Take note of a hung driver call about this GPU, named by ``reason``;
        holds until `answering`.
        """
        self._hung = True
        return self._fail(reason, now)

    def answering(self, now: float) -> None:
        """The call that hung has returned; from here the GPU must be quiet like
        after any other trouble.
        """
        if self._hung:
            self._hung = False
            self._heard_at = now

    def probed(self, probe: Probe, now: float) -> bool:
        """The GPU was asked; only this can bring an Unhealthy GPU back."""
        self._last_probe = probe
        if probe.failure:
            return self._fail(probe.failure, now)
        if self._health.ok:
            return False
        if probe.obstacle:
            self._heard_at = now
        recovers_at = self.recovers_at
        if recovers_at is not None and now >= recovers_at:
            self._recovered_at, self._cause = now, ""
            self._health = Health(since=self._wall())
            return True
        return self._explain()

    def _fail(self, cause: str, now: float) -> bool:
        self._heard_at = now
        self._cause = cause
        if not self._health.ok:
            return self._explain()
        within_window = (
            self._recovered_at is not None
            and now - self._recovered_at < self.policy.flap_window_seconds
        )
        self._relapses = self._relapses + 1 if within_window else 0
        self._health = Health(ok=False, reason=self._reason(), since=self._wall())
        return True

    def _explain(self) -> bool:
        """Bring the reason up to date; it holds no times,
        so that it changes only when something happens.
        """
        before = self._health
        self._health = dataclasses.replace(before, reason=self._reason())
        return self._health != before

    def _reason(self) -> str:
        if not self.policy.automatic:
            return (
                f"{self._cause}; recovery is switched off (gpu.recovery.mode), restart the agent "
                "to use it again"
            )
        if self._last_probe.obstacle and not self._last_probe.failure:
            return f"{self._cause}; recovery waits for {self._last_probe.obstacle}"
        return self._cause
