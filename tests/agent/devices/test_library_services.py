"""The services run where a library relies on them, for as long as somebody needs them, and only
then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.patience import eventually
from vgpu_agent.agent.devices import library_services
from vgpu_agent.agent.devices.library_services import LibraryServicesInForce
from vgpu_agent.concurrency import Latest, Revision, Supervisor
from vgpu_agent.isolation.backend import LibraryServices
from vgpu_agent.journal import Journal
from vgpu_agent.model import Grant, Health, Inventory, Share
from vgpu_agent.pods import PodCache

FAMILY = "slot"


class Book:
    """Grants, and that they have changed."""

    def __init__(self) -> None:
        self.revision = Revision()
        self.grants: tuple[Grant, ...] = ()

    def hold(self, *shares: Share, family: str = FAMILY) -> None:
        self.grants = (Grant(1, family, "a/b", ("1",), shares),) if shares else ()
        self.revision.advance()


class Watch:
    """GPUs, and what is to be sampled."""

    def __init__(self) -> None:
        self.inventory: Latest[Inventory] = Latest(golden_inventory())
        self.aimed: list[tuple[tuple[int, str], ...]] = []

    def sample(self, gpus: Sequence[tuple[int, str]], sink: object) -> None:
        assert sink is not None
        self.aimed.append(tuple(gpus))

    def change(self, uuid: str, **changes: Any) -> None:
        old = self.inventory.value
        gpus = tuple(
            msgspec.structs.replace(gpu, **changes) if gpu.uuid == uuid else gpu for gpu in old.gpus
        )
        self.inventory.publish(msgspec.structs.replace(old, gpus=gpus, version=old.version + 1))


class Stage:
    """The services of a node."""

    def __init__(self, folder: Path, supervisor: Supervisor) -> None:
        self.folder, self.supervisor = folder, supervisor
        self.book, self.watch, self.journal = Book(), Watch(), Journal()
        self.services: Latest[Mapping[str, LibraryServices]] = Latest({})
        self.parts = LibraryServicesInForce(
            self.services,
            # stand-ins with the attributes that are read here
            ledger=self.book,  # type: ignore[arg-type]  # a stand-in with the members that are used
            gpu_watch=self.watch,  # type: ignore[arg-type]  # a stand-in with the members that are used
            pods=PodCache(),
            supervisor=supervisor,
            journal=self.journal,
            proc_root="/proc",
            sysfs_root="/sys",
        )

    def want(self, *, registry: bool = False, watcher: bool = False) -> None:
        """Have the family's library rely on them."""
        wanted = LibraryServices(
            containers_directory=str(self.folder / "containers"),
            registry_directory=str(self.folder / "registry") if registry else "",
            samples_directory=str(self.folder / "watcher") if watcher else "",
        )
        self.services.publish({FAMILY: wanted})

    @property
    def tasks(self) -> set[str]:
        return {report.name for report in self.supervisor.reports} - {"services"}

    async def settled(self) -> None:
        """Let a change be followed."""
        await asyncio.sleep(0.1)


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Services that follow changes at once."""
    monkeypatch.setattr(library_services, "_COALESCING_SECONDS", 0.0)
    supervisor = Supervisor(backoff_min_seconds=0.01, backoff_max_seconds=0.1)
    async with supervisor:
        made = Stage(tmp_path, supervisor)
        supervisor.start("services", made.parts.run)
        yield made


async def test_nothing_runs_and_nothing_is_made_where_no_library_wants_it(stage: Stage) -> None:
    """Also beside grants of other families."""
    stage.book.hold(Share(U0, 100, 50), family="other")
    await stage.settled()
    assert stage.tasks == set()
    assert list(stage.folder.iterdir()) == []
    assert stage.watch.aimed == []


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


async def test_the_registry_runs_while_processes_register(stage: Stage) -> None:
    """It comes and goes with the settings."""
    stage.want(registry=True)
    path = stage.folder / "registry" / "socket.sock"
    await eventually(lambda: _accepts_connections(path))
    assert stage.tasks == {"process registry", "process lists"}
    stage.want()
    await eventually(lambda: not stage.tasks)
    assert not _accepts_connections(path)
    stage.want(registry=True)
    await eventually(lambda: _accepts_connections(path))
    assert stage.tasks == {"process registry", "process lists"}


async def test_only_gpus_are_sampled_on_which_compute_is_limited(stage: Stage) -> None:
    """From the booking of the first such container to the end of the last."""
    stage.want(watcher=True)
    stage.book.hold(Share(U0, 1000), Share(U1, 1000, 100))
    await stage.settled()
    assert stage.watch.aimed == []
    assert not (stage.folder / "watcher").exists()
    stage.book.hold(Share(U0, 1000), Share(U1, 1000, 30))
    await eventually(lambda: stage.watch.aimed == [((1, U1),)])
    assert (stage.folder / "watcher" / "sm_util.config").stat().st_size == 1_311_232
    stage.book.hold(Share(U0, 1000, 10), Share(U1, 1000, 30))
    await eventually(lambda: stage.watch.aimed[-1] == ((0, U0), (1, U1)))
    stage.book.hold()
    await eventually(lambda: stage.watch.aimed[-1] == ())
    number = len(stage.watch.aimed)
    stage.book.hold()
    await stage.settled()
    assert len(stage.watch.aimed) == number


@pytest.mark.parametrize(
    "change",
    [{"health": Health(ok=False, reason="XID 79")}, {"mig_enabled": True}, {"present": False}],
    ids=["unhealthy", "mig", "gone"],
)
async def test_gpus_that_cannot_be_sampled_are_left_out(
    stage: Stage, change: dict[str, Any]
) -> None:
    """vgpu-manager §8.6; and they come back."""
    stage.want(watcher=True)
    stage.book.hold(Share(U0, 1000, 10), Share(U1, 1000, 30))
    await eventually(lambda: stage.watch.aimed == [((0, U0), (1, U1))])
    before = {name: getattr(stage.watch.inventory.value.gpus[0], name) for name in change}
    stage.watch.change(U0, **change)
    await eventually(lambda: stage.watch.aimed[-1] == ((1, U1),))
    stage.watch.change(U0, **before)
    await eventually(lambda: stage.watch.aimed[-1] == ((0, U0), (1, U1)))


async def test_a_gate_that_goes_off_ends_the_samples(stage: Stage) -> None:
    """With the settings, and with the agent's end."""
    stage.want(watcher=True)
    stage.book.hold(Share(U0, 1000, 10))
    await eventually(lambda: stage.watch.aimed == [((0, U0),)])
    stage.want(registry=False)
    await eventually(lambda: stage.watch.aimed[-1] == ())
    stage.want(watcher=True)
    await eventually(lambda: stage.watch.aimed[-1] == ((0, U0),))
    await stage.supervisor.stop("services")
    assert stage.watch.aimed[-1] == ()


async def test_a_file_that_cannot_be_made_is_named_once_and_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries ask the driver themselves meanwhile."""
    monkeypatch.setattr(library_services, "_RETRY_SECONDS", 0.02)
    (stage.folder / "watcher").write_text("in the way")
    stage.want(watcher=True)
    stage.book.hold(Share(U0, 1000, 10))
    await eventually(lambda: stage.journal.entries)
    await stage.settled()
    assert [entry.event for entry in stage.journal.entries] == ["samples.not_written"]
    (stage.folder / "watcher").unlink()
    await eventually(lambda: stage.watch.aimed == [((0, U0),)])
