"""The health of every GPU and of every MIG slice:
the choice of state machines for an error, an answer or a hang.

One `GpuHealth` for each GPU and one for each slice beside it. A report about a whole GPU also
counts for all its slices. An error that names a slice counts for that slice alone (nvidia §10.7;
the original marks one replica at random, or the wrong slice, or none). An error that names an
unknown slice counts for the whole GPU, because an error that counts must not get lost.

Called by `watch` only, on the event loop.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.gpu.health import GpuHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.gpu.health import Probe, RecoveryPolicy
    from vgpu_agent.model import Gpu, MigInstance


class Healths:
    """All state machines.

    State: in memory only. They outlive everything but the process: plugin servers, streams, the
    kubelet and the configuration may come and go. A slice that vanishes while it is Unhealthy is
    remembered until it would have recovered, so that it is not healthy for having been away for a
    moment.
    """

    def __init__(self, policy: RecoveryPolicy, *, wall: Callable[[], float]) -> None:
        self._policy = policy
        self._wall = wall
        self._gpus: dict[str, GpuHealth] = {}
        self._slices: dict[str, dict[str, GpuHealth]] = {}  # GPU → MIG UUID → machine

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
        """The GPU was asked how it is.

        Args:
            gpu: with the slices that it has now.
            probe: its answer, which is its slices' too.
            now: monotonic seconds.
            silent: what slices answered that did worse than their GPU, by UUID.
        """
        self._machine(gpu.uuid).probed(probe, now)
        slices = self._slices_of(gpu)
        for uuid, machine in slices.items():
            machine.probed(probe if probe.failure else (silent or {}).get(uuid, probe), now)
        here = {instance.uuid for instance in gpu.mig_instances}
        for uuid in [
            uuid for uuid, machine in slices.items() if uuid not in here and machine.health.ok
        ]:
            del slices[uuid]

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
        slices = self._slices_of(gpu)
        for uuid in [instance.uuid for instance in hit] or list(slices):
            slices[uuid].reported(reason, now)
        if not hit:
            self._machine(gpu.uuid).reported(reason, now)

    def hung(self, gpu: Gpu, reason: str, now: float) -> bool:
        """Note that a driver call about the GPU does not return;
        return whether that changed anything.
        """
        changed = self._machine(gpu.uuid).hung(reason, now)
        for machine in self._slices_of(gpu).values():
            changed = machine.hung(reason, now) or changed
        return changed

    def answering(self, now: float) -> None:
        """The call that hung has returned."""
        for machine in self._all():
            machine.answering(now)

    def applied(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The same GPUs with their health, and their slices with theirs."""
        return tuple(self._with_health(gpu) for gpu in gpus)

    def _with_health(self, gpu: Gpu) -> Gpu:
        slices = self._slices_of(gpu)
        instances = tuple(
            dataclasses.replace(instance, health=slices[instance.uuid].health)
            for instance in gpu.mig_instances
        )
        return dataclasses.replace(
            gpu, health=self._machine(gpu.uuid).health, mig_instances=instances
        )

    def _slices_of(self, gpu: Gpu) -> dict[str, GpuHealth]:
        """The machines of the GPU's slices; those it has now and those that are remembered."""
        slices = self._slices.setdefault(gpu.uuid, {})
        for instance in gpu.mig_instances:
            if instance.uuid not in slices:
                slices[instance.uuid] = GpuHealth(self._policy, wall=self._wall)
        return slices

    def _machine(self, uuid: str) -> GpuHealth:
        if uuid not in self._gpus:
            self._gpus[uuid] = GpuHealth(self._policy, wall=self._wall)
        return self._gpus[uuid]

    def _all(self) -> Iterator[GpuHealth]:
        yield from self._gpus.values()
        for slices in self._slices.values():
            yield from slices.values()


def _is_in(instance: MigInstance, gpu_instance: int | None, compute_instance: int | None) -> bool:
    """Tell whether an event with these ids concerns the instance.
    Without the second id it concerns all of the first.
    """
    return instance.gpu_instance_id == gpu_instance and compute_instance in {
        None,
        instance.compute_instance_id,
    }
