"""The differences between two inventories that are events in the journal, such as GPUs and MIG
instances that came, went, became unhealthy or recovered; and their counts for metrics.

`watch` and `source` call `record` for each inventory that they publish, and `watch` calls `count`.
Both functions compare the inventory with the one before and read nothing else. Each event has a
fixed name.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.journal import Journal
    from vgpu_agent.model import Gpu, Health, Inventory, MigInstance, Remedy
    from vgpu_agent.status import GpuHistory

_HEALTHY, _UNHEALTHY, _LOST = "healthy", "unhealthy", "lost"


def record(journal: Journal, old: Inventory, new: Inventory) -> None:
    """Record the differences that have an event."""
    if new.simulated and not old.simulated:
        journal.record(
            "gpu.simulated",
            level="warning",
            meaning="these GPUs are simulated; no work runs on them",
        )
    if news := [failure for failure in new.failures if failure not in old.failures]:
        journal.record("gpu.not_answering", level="error", failures=news)
    for gpu in new.gpus:
        before = old.gpu(gpu.uuid)
        _record_gpu(journal, before, gpu)
        _record_layout(journal, before, gpu)
        _record_instances(journal, before, gpu)


def count(history: GpuHistory, old: Inventory, new: Inventory) -> None:
    """Add to ``history`` each change of a GPU's state, and the seconds that each recovery took."""
    for gpu in new.gpus:
        before = old.gpu(gpu.uuid)
        was, now = _state(before), _state(gpu)
        if was == now:
            continue
        history.count_transition(gpu.uuid, now)
        if now == _HEALTHY and before is not None and not before.health.ok:
            # `since` is wall time, and the clock may have been set in between.
            seconds = max(0.0, gpu.health.since - before.health.since)
            history.recovery_seconds.add(seconds)


def _state(gpu: Gpu | None) -> str:
    """Return the state of a GPU; one that was not known before counts as healthy."""
    if gpu is None or (gpu.present and gpu.health.ok):
        return _HEALTHY
    return _UNHEALTHY if gpu.present else _LOST


def _record_gpu(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    facts: dict[str, Any] = {"gpu": new.uuid, "index": new.index}
    was_present, was_ok = (old.present, old.health.ok) if old else (False, True)
    if new.present and not was_present:
        journal.record("gpu.appeared", **facts, name=new.name, pci=new.pci_bus_id)
    if was_present and not new.present:
        journal.record("gpu.lost", level="error", **facts, **_illness(new.health, new.uuid))
    if was_ok and not new.health.ok:
        journal.record("gpu.unhealthy", level="error", **facts, **_illness(new.health, new.uuid))
    elif old and not new.health.ok and _essence(old.health) != _essence(new.health):
        journal.record(
            "gpu.cause_changed", level="warning", **facts, **_illness(new.health, new.uuid)
        )
    if new.health.ok and not was_ok:
        journal.record("gpu.recovered", **facts, was=old.health.reason if old else "")


def _record_layout(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    """Record how the division of a known GPU has changed."""
    if old is None:
        return
    before, after = _by_uuid(old.mig_instances), _by_uuid(new.mig_instances)
    stayed = before.keys() & after.keys()
    if old.mig_enabled != new.mig_enabled or before.keys() != after.keys():
        journal.record(
            "gpu.mig_changed",
            gpu=new.uuid,
            index=new.index,
            mig="on" if new.mig_enabled else "off",
            removed={
                uuid: instance.profile for uuid, instance in before.items() if uuid not in stayed
            },
            added={
                uuid: instance.profile for uuid, instance in after.items() if uuid not in stayed
            },
        )


def _record_instances(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    """Record which MIG instances became unhealthy, recovered or are given to no container. An
    instance that becomes unhealthy or recovers together with its whole GPU has no event of its own.
    """
    before = _by_uuid(old.mig_instances if old else ())
    gpu_was_ok = old is None or old.health.ok
    for instance in new.mig_instances:
        facts: dict[str, Any] = {
            "gpu": new.uuid,
            "instance": instance.uuid,
            "profile": instance.profile,
        }
        known = before.get(instance.uuid)
        was_ok, old_trouble = (known.health.ok, known.trouble) if known else (True, "")
        if new.health.ok and was_ok and not instance.health.ok:
            journal.record(
                "gpu.mig_instance_unhealthy",
                level="error",
                **facts,
                **_illness(instance.health, new.uuid),
            )
        if gpu_was_ok and instance.health.ok and not was_ok:
            journal.record(
                "gpu.mig_instance_recovered", **facts, was=known.health.reason if known else ""
            )
        # an instance with trouble is listed as Unhealthy, and never granted
        if instance.trouble and instance.trouble != old_trouble:
            journal.record(
                "gpu.mig_instance_withheld", level="error", **facts, reason=instance.trouble
            )


def _illness(health: Health, gpu: str) -> dict[str, str]:
    """Return the reason and the remedy of an Unhealthy device, and when it is offered again."""
    facts = {"reason": health.reason}
    if health.remedy:
        facts["remedy"] = health.remedy.sentence(gpu)
    if health.offered_at:
        at = dt.datetime.fromtimestamp(health.offered_at, dt.UTC)
        facts["offered_again"] = at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return facts


def _essence(health: Health) -> tuple[str, Remedy | None]:
    """Return what an operator acts on: the reason, which names the worst cause, and the remedy. The
    times and the other causes are left out.
    """
    return health.reason, health.remedy


def _by_uuid(instances: Iterable[MigInstance]) -> dict[str, MigInstance]:
    return {instance.uuid: instance for instance in instances}
