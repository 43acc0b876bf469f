"""The decision of when a GPU may not be given away, and when it may again:
one small state machine per GPU, on plain values.

Three things make a GPU Unhealthy: an XID that *counts* (it is not ignored, by default or by the
settings), a probe (a reading of the card's state) that the card or the driver answered badly, and a
driver call about this GPU that does not return. It comes back when the card answers, the driver
asks for no recovery action, no row remap is pending, and it has been quiet (without errors) for a
while. A GPU that fails again soon must be quiet for twice as long each time, so that a flapping
card does not fail one pod after another.

`Healths` has one machine for each GPU and one for each MIG instance beside it, and chooses those
that an error, an answer or a hang concerns. A report about a whole GPU also counts for all its MIG
instances. An error that names a MIG instance counts for that MIG instance alone (nvidia §10.7;
NVIDIA's plugin marks one replica at random, or the wrong MIG instance, or none). An error that
names an unknown MIG instance counts for the whole GPU, because an error that counts must not get
lost.

Called by `watch`, on the event loop. Reads no clock but the one it is given.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.gpu.return_codes import GPU_IS_LOST
from vgpu_agent.model import Cause, Health, Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.model import Gpu, MigInstance

# A GPU that fails again within this time of its last recovery must be quiet for twice as long as
# the time before, up to the longest quiet time. A longer `gpu.recovery.quietSeconds` counts as it
# is.
FLAP_WINDOW_SECONDS = 3600.0
MAX_QUIET_SECONDS = 3600.0

# Causes that are kept from the time that a GPU becomes Unhealthy until it recovers. A card that
# fails has few, and status and page list them all.
MAX_CAUSES = 8
NOT_LISTED = "the driver no longer lists this GPU"

_DEMAND = "recovery action"  # the code of a cause that is a demand of the driver


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
    UNKNOWN = -1  # an action that only newer drivers have

    @classmethod
    def _missing_(cls, value: object) -> RecoveryAction:
        del value
        return cls.UNKNOWN

    @property
    def forbids_use(self) -> bool:
        """Tell whether no new work may start before the action is done. All other actions only
        delay the recovery of an Unhealthy GPU.
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
        """The action in words, such as ``GPU reset``, for the reason of a health."""
        return {
            self.UNKNOWN: "recovery action that this agent does not know",
            self.DRAIN_P2P: "drain of peer-to-peer traffic",
            self.RECOVER_IMEX_DOMAIN: "recovery of the IMEX domain",
        }.get(self, self.name.lower().replace("_", " ").replace("gpu", "GPU"))

    @property
    def remedy(self) -> Remedy:
        """The remedy that fulfils the demand."""
        return {
            self.GPU_RESET: Remedy.RESET,
            self.BUS_RESET: Remedy.RESET,
            self.DRAIN_AND_RESET: Remedy.RESET,
            self.NODE_REBOOT: Remedy.REBOOT,
            self.SYSTEM_REBOOT: Remedy.REBOOT,
            self.DRAIN_P2P: Remedy.DRAIN_PEERS,
        }.get(self, Remedy.FOLLOW_DRIVER)


class Trouble(msgspec.Struct, frozen=True):
    """An event or a state that makes a GPU Unhealthy.

    Attributes:
        code: its short name for metrics, such as ``XID 79``.
        text: the sentence about it while it lasts, without its full stop.
        remedy: what helps against it while it lasts.
        later: the text once it is over; empty for an event, which has no end.
        later_remedy: the remedy once it is over.
    """

    code: str
    text: str
    remedy: Remedy
    later: str = ""
    later_remedy: Remedy = Remedy.WAIT

    def cause(self, since: float, *, over: bool = False) -> Cause:
        """Return the cause, in the tense that is true now."""
        if over and self.later:
            return Cause(self.code, self.later, self.later_remedy, since)
        return Cause(self.code, self.text, self.remedy, since)


class Probe(msgspec.Struct, frozen=True):
    """The result of one probe of a GPU.

    Attributes:
        trouble: why it did not answer as a working GPU does, in words; empty when it did.
        recovery_action: what the driver requires, NVML field 230; NONE where the driver does not
            know the field.
        remap_pending: a row of its memory waits for a reset to be replaced.
    """

    trouble: str = ""
    recovery_action: RecoveryAction = RecoveryAction.NONE
    remap_pending: bool = False

    @property
    def failure(self) -> Trouble | None:
        """The trouble by which this answer makes a GPU Unhealthy; None when it does not."""
        if self.trouble == NOT_LISTED:
            return Trouble(
                "not listed",
                self.trouble,
                Remedy.REBOOT_OR_REPLACE,
                "the driver did not list this GPU for a while",
                Remedy.CHECK_SLOT,  # the PCIe slot and the power of the card
            )
        if self.trouble:
            lost = f"(NVML code {GPU_IS_LOST})" in self.trouble
            return Trouble(
                "lost" if lost else "reading",
                self.trouble,
                Remedy.REBOOT_OR_REPLACE if lost else Remedy.CHECK_DRIVER,
                f"an earlier reading failed: {self.trouble}",
                Remedy.CHECK_SLOT if lost else Remedy.WAIT,
            )
        if self.recovery_action.forbids_use:
            return Trouble(
                _DEMAND,
                f"the driver asks for a {self.recovery_action.words}",
                self.recovery_action.remedy,
                f"the driver asked for a {self.recovery_action.words}",
            )
        return None

    @property
    def demand(self) -> Remedy | None:
        """The remedy that the driver itself asks for, a pending remap included; None when it asks
        for nothing.
        """
        if self.recovery_action is not RecoveryAction.NONE:
            return self.recovery_action.remedy
        return Remedy.RESET_LATER if self.remap_pending else None

    @property
    def obstacle(self) -> str:
        """The condition that must go away before an Unhealthy GPU may recover;
        empty when there is none.
        """
        if self.recovery_action is not RecoveryAction.NONE:
            return f"a {self.recovery_action.words}"
        return "a GPU reset that replaces a row of memory" if self.remap_pending else ""


class RecoveryPolicy(msgspec.Struct, frozen=True):
    """The rules by which an Unhealthy GPU comes back (settings ``gpu.recovery``).

    Attributes:
        automatic: False for mode ``never``: the GPU comes back only by a
            restart of the agent.
        quiet_seconds: how long the GPU must be without errors.
    """

    automatic: bool = True
    quiet_seconds: float = 60.0


class GpuHealth:
    """One GPU's state.

    ``now`` is monotonic seconds in every method; ``wall`` returns unix seconds for the times of
    `Health`. Each method that returns a bool returns True when `health` became a different value. A
    restart of the agent begins with a healthy GPU, and its first probe decides.
    """

    def __init__(self, policy: RecoveryPolicy, *, wall: Callable[[], float]) -> None:
        self.policy = policy
        self._wall = wall
        self._health = Health()
        self._causes: dict[tuple[str, str], Cause] = {}  # code and text of the trouble → cause
        self._last_probe = Probe()
        # the last probe was answered; None without a probe since the last new error
        self._answers: bool | None = None
        self._probe_trouble: Trouble | None = None  # of the last probe
        self._hang: Trouble | None = None  # while it lasts
        self._demanded = False  # the driver has asked for something since the last error
        self._trouble_at = 0.0  # the time of the last trouble
        self._trouble_wall = 0.0  # the same in unix seconds
        self._recovered_at: float | None = None  # monotonic, the last time; None for never
        self._relapses = 0  # how often in a row it failed again soon after it had recovered

    @property
    def health(self) -> Health:
        """The health that the inventory shows."""
        return self._health

    @property
    def quiet_needed_seconds(self) -> float:
        """The time that the GPU must be without trouble before this recovery."""
        longest = max(self.policy.quiet_seconds, MAX_QUIET_SECONDS)
        doublings = min(self._relapses, 64)  # far beyond any limit, and still a float
        return float(min(self.policy.quiet_seconds * 2.0**doublings, longest))

    @property
    def recovers_at(self) -> float | None:
        """The earliest monotonic time at which a good probe would bring the GPU back;
        None where not only time is missing.
        """
        if self._health.ok or not self._only_time_is_missing:
            return None
        return self._trouble_at + self.quiet_needed_seconds

    @property
    def _only_time_is_missing(self) -> bool:
        return (
            self._hang is None
            and self.policy.automatic
            and self._last_probe.failure is None
            and not self._last_probe.obstacle
        )

    def reported(self, trouble: Trouble, now: float) -> bool:
        """Take note of an error event that counts: the GPU is Unhealthy now."""
        return self._fail(trouble, now)

    def hung(self, call: str, now: float) -> bool:
        """Take note of a hung driver call about this GPU, named by ``call``;
        holds until `answering`.
        """
        self._hang = Trouble(
            "hang",
            f"the NVIDIA driver does not return from {call}",
            Remedy.CHECK_DRIVER,
            f"the NVIDIA driver did not return from {call}",
        )
        return self._fail(self._hang, now)

    def answering(self, seconds: float, now: float) -> bool:
        """Take note that the call that hung has returned after ``seconds``; from now on the GPU
        must be quiet, as after any other trouble.
        """
        if self._hang is None:
            return False
        ended = msgspec.structs.replace(self._hang, later=f"{self._hang.later} for {seconds:.0f} s")
        self._hang = None
        self._note_time(now)
        self._end(ended)
        return self._update()

    def probed(self, probe: Probe, now: float) -> bool:
        """Take note of a probe; only a probe can bring an Unhealthy GPU back."""
        self._last_probe = probe
        self._answers = not probe.trouble
        ended, self._probe_trouble = self._probe_trouble, probe.failure
        if ended is not None and ended != self._probe_trouble:
            self._end(ended)
        if probe.demand is not None:
            self._demanded = True
        if self._probe_trouble is not None:
            return self._fail(self._probe_trouble, now)
        if self._health.ok:
            return False
        if probe.obstacle:
            self._note_time(now)
        recovers_at = self.recovers_at
        if recovers_at is not None and now >= recovers_at:
            self._recovered_at = now
            self._causes.clear()
            self._health = Health(since=self._wall())
            return True
        return self._update()

    def _note_time(self, now: float) -> None:
        """Take note of the time of a trouble."""
        self._trouble_at, self._trouble_wall = now, self._wall()

    def _fail(self, trouble: Trouble, now: float) -> bool:
        self._note_time(now)
        key = (trouble.code, trouble.text)
        before = self._causes.get(key)
        cause = trouble.cause(before.since if before else self._wall())
        is_from_probe = trouble is self._probe_trouble
        if cause == before and not is_from_probe and not self._demanded:
            # a storm of one error publishes nothing; the next probe updates `offered_at`
            return False
        self._causes[key] = cause
        while len(self._causes) > MAX_CAUSES:
            del self._causes[min(self._causes, key=self._rank)]
        if not is_from_probe:
            self._demanded = False
            self._answers = None
        if not self._health.ok:
            return self._update()
        within_window = (
            self._recovered_at is not None and now - self._recovered_at < FLAP_WINDOW_SECONDS
        )
        self._relapses = self._relapses + 1 if within_window else 0
        self._health = Health(ok=False, since=self._wall())
        self._update()
        return True

    def _end(self, trouble: Trouble) -> None:
        """Put the cause of a trouble that is over into the past tense."""
        key = (trouble.code, trouble.text)
        if key in self._causes:
            self._causes[key] = trouble.cause(self._causes[key].since, over=True)

    def _rank(self, key: tuple[str, str]) -> tuple[bool, int, float]:
        """Return the order of causes, the worst last: a demand of the driver follows from another
        cause and must not hide it, and of two equal ones the first counts.
        """
        cause = self._causes[key]
        return cause.code != _DEMAND, cause.remedy.rank, -cause.since

    def _update(self) -> bool:
        """Bring the health of an Unhealthy GPU up to date. It changes only when something has
        happened, so that readers are not woken by the time that passes.
        """
        if self._health.ok:
            return False
        before = self._health
        keys = sorted(self._causes, key=self._rank, reverse=True)
        causes = tuple(self._causes[key] for key in keys)
        offered_at = (
            self._trouble_wall + self.quiet_needed_seconds if self._only_time_is_missing else 0.0
        )
        self._health = msgspec.structs.replace(
            before,
            reason=self._reason(causes[0]),
            causes=causes,
            remedy=self._remedy(causes[0]),
            answers=False if self._hang else self._answers,
            offered_at=offered_at,
        )
        return self._health != before

    def _reason(self, worst: Cause) -> str:
        parts = [worst.text]
        failure = self._last_probe.failure
        if failure is not None and failure.code == _DEMAND:
            parts += [failure.text] if failure.text != worst.text else []
        elif self._last_probe.obstacle and failure is None:
            parts.append(f"recovery waits for {self._last_probe.obstacle}")
        if not self.policy.automatic:
            parts.append(
                "recovery is switched off (gpu.recovery.mode), restart the agent to use it again"
            )
        return "; ".join(parts)

    def _remedy(self, worst: Cause) -> Remedy:
        """Return the remedy; where the driver answers, its own demand counts before that of the
        worst cause.
        """
        if self._last_probe.trouble or self._hang is not None:
            return worst.remedy
        if self._last_probe.demand is not None:
            return self._last_probe.demand
        if self._demanded and self._answers:  # the driver no longer asks for it
            return Remedy.WAIT
        if worst.remedy is Remedy.REBOOT_OR_REPLACE and self._answers:
            return Remedy.CHECK_SLOT
        return worst.remedy


class Healths:
    """All state machines.

    State: in memory only. They outlive everything but the process: plugin servers, streams, the
    kubelet and the configuration may come and go. A MIG instance that vanishes while it is
    Unhealthy is remembered until it would have recovered, so that a short absence does not make it
    healthy.
    """

    def __init__(self, policy: RecoveryPolicy, *, wall: Callable[[], float]) -> None:
        self._policy = policy
        self._wall = wall
        self._gpus: dict[str, GpuHealth] = {}
        self._instances: dict[str, dict[str, GpuHealth]] = {}  # GPU → MIG UUID → machine

    def follow(self, policy: RecoveryPolicy) -> None:
        """Recover by another policy from now on."""
        self._policy = policy
        for machine in self._all():
            machine.policy = policy

    @property
    def recoveries(self) -> list[float]:
        """List the monotonic times at which a good probe would bring a device back, one for each
        device that lacks nothing but time.
        """
        return [at for machine in self._all() if (at := machine.recovers_at) is not None]

    def probed(
        self, gpu: Gpu, probe: Probe, now: float, silent: Mapping[str, Probe] | None = None
    ) -> None:
        """Take note of a probe of the GPU.

        Args:
            gpu: with the MIG instances that it has now.
            probe: its result, which also counts for the MIG instances.
            now: monotonic seconds.
            silent: the probes of MIG instances with a worse result than their GPU, by UUID; None
                for none.
        """
        self._machine(gpu.uuid).probed(probe, now)
        machines = self._instances_of(gpu)
        for uuid, machine in machines.items():
            machine.probed(probe if probe.failure else (silent or {}).get(uuid, probe), now)
        here = {instance.uuid for instance in gpu.mig_instances}
        for uuid in [
            uuid for uuid, machine in machines.items() if uuid not in here and machine.health.ok
        ]:
            del machines[uuid]

    def reported(
        self,
        gpu: Gpu,
        gpu_instance: int | None,
        compute_instance: int | None,
        trouble: Trouble,
        now: float,
    ) -> None:
        """Take note of an error event that counts.

        Args:
            gpu: where it happened.
            gpu_instance: in which GPU instance; None for the whole GPU.
            compute_instance: in which of its compute instances; None for all of them.
            trouble: what happened.
            now: monotonic seconds.
        """
        hit = [
            instance
            for instance in gpu.mig_instances
            if _is_in(instance, gpu_instance, compute_instance)
        ]
        machines = self._instances_of(gpu)
        for uuid in [instance.uuid for instance in hit] or list(machines):
            machines[uuid].reported(trouble, now)
        if not hit:
            self._machine(gpu.uuid).reported(trouble, now)

    def hung(self, gpu: Gpu, call: str, now: float) -> bool:
        """Note that a driver call about the GPU does not return;
        return whether that changed anything.
        """
        changed = self._machine(gpu.uuid).hung(call, now)
        for machine in self._instances_of(gpu).values():
            changed = machine.hung(call, now) or changed
        return changed

    def answering(self, seconds: float, now: float) -> bool:
        """Take note that the call that hung has returned after ``seconds``; return whether that
        changed anything.
        """
        changed = False
        for machine in self._all():
            changed = machine.answering(seconds, now) or changed
        return changed

    def applied(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Return ``gpus`` with their health, and their MIG instances with theirs."""
        return tuple(self._with_health(gpu) for gpu in gpus)

    def _with_health(self, gpu: Gpu) -> Gpu:
        machines = self._instances_of(gpu)
        instances = tuple(
            msgspec.structs.replace(instance, health=machines[instance.uuid].health)
            for instance in gpu.mig_instances
        )
        return msgspec.structs.replace(
            gpu, health=self._machine(gpu.uuid).health, mig_instances=instances
        )

    def _instances_of(self, gpu: Gpu) -> dict[str, GpuHealth]:
        """Return the machines of the MIG instances that the GPU has now, and of those that are
        remembered.
        """
        machines = self._instances.setdefault(gpu.uuid, {})
        for instance in gpu.mig_instances:
            if instance.uuid not in machines:
                machines[instance.uuid] = GpuHealth(self._policy, wall=self._wall)
        return machines

    def _machine(self, uuid: str) -> GpuHealth:
        if uuid not in self._gpus:
            self._gpus[uuid] = GpuHealth(self._policy, wall=self._wall)
        return self._gpus[uuid]

    def _all(self) -> Iterator[GpuHealth]:
        yield from self._gpus.values()
        for machines in self._instances.values():
            yield from machines.values()


def _is_in(instance: MigInstance, gpu_instance: int | None, compute_instance: int | None) -> bool:
    """Tell whether an event with these ids concerns the instance.
    Without the second id it concerns all of the first.
    """
    return instance.gpu_instance_id == gpu_instance and compute_instance in {
        None,
        instance.compute_instance_id,
    }
