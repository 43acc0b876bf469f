"""The differences between two inventories, for the journal: GPUs that came, went, became
unhealthy or recovered, and their division into MIG instances.

`watch` calls it once for each inventory that it publishes. It looks at nothing but the two.
Every line is an event with a fixed name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.journal import Journal
    from vgpu_agent.model import Gpu, Inventory, MigInstance


def record(journal: Journal, old: Inventory, new: Inventory) -> None:
    """Write down everything that is different in ``new``."""
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


def _record_gpu(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    facts: dict[str, Any] = {"gpu": new.uuid, "index": new.index}
    was_present, was_ok = (old.present, old.health.ok) if old else (False, True)
    if new.present and not was_present:
        journal.record("gpu.appeared", **facts, name=new.name, pci=new.pci_bus_id)
    if was_present and not new.present:
        journal.record("gpu.lost", level="error", **facts, reason=new.health.reason)
    if was_ok and not new.health.ok:
        journal.record("gpu.unhealthy", level="error", **facts, reason=new.health.reason)
    if new.health.ok and not was_ok:
        journal.record("gpu.recovered", **facts, was=old.health.reason if old else "")


def _record_layout(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    """Record how the division of a known GPU has changed."""
    if old is None:
        return
    went, came = _by_uuid(old.mig_instances), _by_uuid(new.mig_instances)
    stayed = went.keys() & came.keys()
    if old.mig_enabled != new.mig_enabled or went.keys() != came.keys():
        journal.record(
            "gpu.mig_changed",
            gpu=new.uuid,
            index=new.index,
            mig="on" if new.mig_enabled else "off",
            removed={
                uuid: instance.profile for uuid, instance in went.items() if uuid not in stayed
            },
            added={uuid: instance.profile for uuid, instance in came.items() if uuid not in stayed},
        )


def _record_instances(journal: Journal, old: Gpu | None, new: Gpu) -> None:
    """Record the changes of single MIG instances, except those of their whole GPU."""
    before = _by_uuid(old.mig_instances if old else ())
    gpu_was_ok = old is None or old.health.ok
    for instance in new.mig_instances:
        facts: dict[str, Any] = {
            "gpu": new.uuid,
            "instance": instance.uuid,
            "profile": instance.profile,
        }
        known = before.get(instance.uuid)
        was_ok, had_trouble = (known.health.ok, known.trouble) if known else (True, "")
        if new.health.ok and was_ok and not instance.health.ok:
            journal.record(
                "gpu.mig_instance_unhealthy", level="error", **facts, reason=instance.health.reason
            )
        if gpu_was_ok and instance.health.ok and not was_ok:
            journal.record(
                "gpu.mig_instance_recovered", **facts, was=known.health.reason if known else ""
            )
        if instance.trouble and instance.trouble != had_trouble:
            journal.record(
                "gpu.mig_instance_withheld", level="error", **facts, reason=instance.trouble
            )


def _by_uuid(instances: Iterable[MigInstance]) -> dict[str, MigInstance]:
    return {instance.uuid: instance for instance in instances}
