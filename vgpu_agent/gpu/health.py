"""The decision when a GPU may not be given away, and when it may again:
one small state machine a GPU, on plain values.

Three things make a GPU Unhealthy: an XID that counts, a probe that the card or the driver answered
badly, and a driver call about this GPU that does not return. It comes back when the card answers,
the driver asks for no recovery action, no row remap is pending, and it has been quiet (without
errors) for a while.
A GPU that fails again soon must be quiet for twice as long each time, so that a flapping card does
not fail one pod after another.

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

from vgpu_agent.model import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.model import Gpu, MigInstance

# A GPU that fails again within this time of its last recovery must be quiet for twice as long as
# the time before, up to the longest quiet time. A longer `gpu.recovery.quietSeconds` counts as it
# is.
FLAP_WINDOW_SECONDS = 3600.0
MAX_QUIET_SECONDS = 3600.0


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
        """True where no new work may start before the action is done; all other actions only delay
        the recovery of an Unhealthy GPU.
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


class Probe(msgspec.Struct, frozen=True):
    """The result of one probe of a GPU.

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

    ``now`` is monotonic seconds in every method; ``wall`` returns unix seconds for `Health.since`.
    Each method that returns a bool returns True when `health` became a different value. A restart
    of the agent begins with a healthy GPU, and its first probe decides.
    """

    def __init__(self, policy: RecoveryPolicy, *, wall: Callable[[], float]) -> None:
        self.policy = policy
        self._wall = wall
        self._health = Health()
        self._cause = ""
        self._last_probe = Probe()
        self._hung = False
        self._trouble_at = 0.0  # the time of the last trouble
        self._recovered_at: float | None = None
        self._relapses = 0

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
        if (
            self._health.ok
            or self._hung
            or not self.policy.automatic
            or self._last_probe.failure
            or self._last_probe.obstacle
        ):
            return None
        return self._trouble_at + self.quiet_needed_seconds

    def reported(self, reason: str, now: float) -> bool:
        """Take note of an error event that counts: the GPU is Unhealthy now, for ``reason``."""
        return self._fail(reason, now)

    def hung(self, reason: str, now: float) -> bool:
        """Take note of a hung driver call about this GPU, named by ``reason``;
        holds until `answering`.
        """
        self._hung = True
        return self._fail(reason, now)

    def answering(self, now: float) -> None:
        """Take note that the call that hung has returned; from now on the GPU must be quiet, as
        after any other trouble.
        """
        if self._hung:
            self._hung = False
            self._trouble_at = now

    def probed(self, probe: Probe, now: float) -> bool:
        """Take note of a probe; only a probe can bring an Unhealthy GPU back."""
        self._last_probe = probe
        if probe.failure:
            return self._fail(probe.failure, now)
        if self._health.ok:
            return False
        if probe.obstacle:
            self._trouble_at = now
        recovers_at = self.recovers_at
        if recovers_at is not None and now >= recovers_at:
            self._recovered_at, self._cause = now, ""
            self._health = Health(since=self._wall())
            return True
        return self._explain()

    def _fail(self, cause: str, now: float) -> bool:
        self._trouble_at = now
        self._cause = cause
        if not self._health.ok:
            return self._explain()
        within_window = (
            self._recovered_at is not None and now - self._recovered_at < FLAP_WINDOW_SECONDS
        )
        self._relapses = self._relapses + 1 if within_window else 0
        self._health = Health(ok=False, reason=self._reason(), since=self._wall())
        return True

    def _explain(self) -> bool:
        """Bring the reason up to date; it contains no times,
        so that it changes only when something happens.
        """
        before = self._health
        self._health = msgspec.structs.replace(before, reason=self._reason())
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
        """List when a good probe would bring each machine back:
        monotonic seconds, where nothing but time is missing.
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
            silent: the probes of MIG instances with a worse result than their GPU, by UUID.
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
        reason: str,
        now: float,
    ) -> None:
        """Take note of an error event that counts.

        Args:
            gpu: where it happened.
            gpu_instance: in which GPU instance; None for the whole GPU.
            compute_instance: in which of its compute instances; None for all of them.
            reason: what happened.
            now: monotonic seconds.
        """
        hit = [
            instance
            for instance in gpu.mig_instances
            if _is_in(instance, gpu_instance, compute_instance)
        ]
        machines = self._instances_of(gpu)
        for uuid in [instance.uuid for instance in hit] or list(machines):
            machines[uuid].reported(reason, now)
        if not hit:
            self._machine(gpu.uuid).reported(reason, now)

    def hung(self, gpu: Gpu, reason: str, now: float) -> bool:
        """Note that a driver call about the GPU does not return;
        return whether that changed anything.
        """
        changed = self._machine(gpu.uuid).hung(reason, now)
        for machine in self._instances_of(gpu).values():
            changed = machine.hung(reason, now) or changed
        return changed

    def answering(self, now: float) -> None:
        """Take note that the call that hung has returned."""
        for machine in self._all():
            machine.answering(now)

    def applied(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The same GPUs with their health, and their MIG instances with theirs."""
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
