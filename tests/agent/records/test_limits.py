"""Limits that are no longer in force are reported once."""

from __future__ import annotations

import asyncio

import msgspec

from tests.patience import eventually
from vgpu_agent.agent.records.limits import LimitsWatch
from vgpu_agent.concurrency import Latest
from vgpu_agent.isolation.backend import LibraryLimits
from vgpu_agent.journal import Journal
from vgpu_agent.model import ContainerUsage, ControlledUse, Grant, GrantState, Owner, Share
from vgpu_agent.status import AgentStatus, BindingStatus, LedgerStatus

GRANT = Grant(
    1,
    "volcano-vgpu",
    "volcano.sh/vgpu-number",
    ("id",),
    (Share("GPU-0", 1000),),
    GrantState.IDENTIFIED,
    Owner("main", "uid", "team", "p"),
    reserved_at=0.0,
)


def test_a_limit_that_is_raised_is_told_once_for_each_grant() -> None:
    """However often the container changes its region: it would fill the journal otherwise."""
    journal = Journal()
    status = AgentStatus(
        ledger=LedgerStatus(grants=(GRANT,)),
        binding=BindingStatus(limits={"volcano-vgpu": LibraryLimits()}),
    )
    watch = LimitsWatch([Latest(())], lambda: status, journal)

    def look(limit_mib: int) -> list[str]:
        status.containers = (
            ContainerUsage("team", "p", "main", 0, "GPU-0", 0, limit_mib << 20, processes=1),
        )
        watch.check()
        return [entry.event for entry in journal.entries]

    assert look(1000) == []
    assert look(2000) == ["limit.not_in_force"]
    assert look(3000) == ["limit.not_in_force"]
    assert journal.entries[0].facts["pod"] == "team/p"
    assert "the region allows 2000 MiB of GPU-0 instead of 1000 MiB" in str(
        journal.entries[0].facts["reason"]
    )
    assert look(1000) == ["limit.not_in_force"]
    assert look(2000) == ["limit.not_in_force"]
    status.ledger = msgspec.structs.replace(
        status.ledger, grants=(msgspec.structs.replace(GRANT, number=2),)
    )
    assert look(2000) == ["limit.not_in_force"] * 2
    assert [entry.facts["grant"] for entry in journal.entries] == [1, 2]


async def test_both_libraries_containers_are_followed() -> None:
    """A change in what is read of either is enough."""
    journal, read = Journal(), Latest[tuple[ControlledUse, ...]](())
    status = AgentStatus(
        ledger=LedgerStatus(grants=(GRANT,)),
        binding=BindingStatus(limits={"volcano-vgpu": LibraryLimits(backend="vgpu-control")}),
    )
    watch = LimitsWatch([Latest(()), read], lambda: status, journal)
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0)
        assert not journal.entries
        trouble = "its vgpu.config is missing"
        status.controlled = (ControlledUse("team", "p", "main", trouble=trouble),)
        read.publish(status.controlled)
        await eventually(lambda: bool(journal.entries))
    finally:
        task.cancel()
    (entry,) = journal.entries
    assert (entry.event, entry.facts["reason"]) == ("limit.not_in_force", trouble)
