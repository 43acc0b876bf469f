"""The audit log: its lines, its rotation, and disks that refuse it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import SERVE, WHOLE, Clock, book, held, make, reconcile
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.agent.records.audit import AuditLog
from vgpu_agent.config.audit import Audit
from vgpu_agent.journal import Journal


class World:
    """A ledger, and the log of its grants."""

    def __init__(self, file: Path) -> None:
        self.file, self.clock, self.journal = file, Clock(), Journal()
        self.ledger = make(self.clock, WHOLE)
        self.log = AuditLog(
            Audit(file=str(file)),
            self.ledger,
            inventory=golden_inventory,
            journal=self.journal,
            clock=self.clock,
        )
        self.log.look()  # at the start, when the ledger is empty

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of the file."""
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    @property
    def recorded(self) -> list[str]:
        """The events of the journal."""
        return [entry.event for entry in self.journal.entries]


async def written(world: World) -> bool:
    """Look at the ledger and write."""
    world.log.look()
    return await world.log.write()


async def test_a_grant_has_a_line_at_its_begin_and_one_at_its_end(tmp_path: Path) -> None:
    """Nothing while its pod is unknown; then who has what by whose decision, and until when."""
    world = World(tmp_path / "audit.jsonl")
    grant = book(world.ledger, U0)
    await written(world)
    assert not world.file.exists()
    world.clock.now += 1
    reconcile(world.ledger, held(U0))
    await written(world)
    world.clock.now += 60.5
    world.ledger.release(grant.number)
    await written(world)
    granted, released = world.lines
    about = {
        "grant": 1,
        "namespace": "default",
        "pod": "train",
        "podUID": "uid-train",
        "container": "main",
        "family": "nvidia",
        "resource": "nvidia.com/gpu",
        "amount": 1,
        "devices": [
            {
                "device": U0,
                "gpu": U0,
                "memoryMiB": 40960,
                "coresPercent": 100,
                "exclusive": True,
            }
        ],
        "decidedBy": "the kubelet, which chose the device ids",
        "since": "1970-01-01T00:16:40.000Z",
    }
    assert granted == {"at": "1970-01-01T00:16:41.000Z", "event": "granted", **about}
    assert released == {
        "at": "1970-01-01T00:17:41.500Z",
        "event": "released",
        **about,
        "until": "1970-01-01T00:17:41.500Z",
        "seconds": 61.5,
    }
    assert world.file.stat().st_mode & 0o777 == 0o600


async def test_grants_from_before_the_start_are_found_and_the_decider_is_named(
    tmp_path: Path,
) -> None:
    """A reader takes the grants of the process before that have no such line as ended."""
    world = World(tmp_path / "audit.jsonl")
    reconcile(world.ledger, held(U1, owner=SERVE), initial=True)
    world.log._looked = False
    task = asyncio.ensure_future(world.log.run())
    await eventually(lambda: world.file.exists() and len(world.lines) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.log.close()
    assert [line["event"] for line in world.lines] == ["started", "found", "stopped"]
    assert world.lines[1]["pod"] == "serve"


async def test_a_stop_in_the_middle_of_a_write_neither_repeats_nor_loses_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk takes its time, and the loop is cancelled before it knows that its lines are in the
    file.
    """
    world = World(tmp_path / "audit.jsonl")
    reconcile(world.ledger, held(U1, owner=SERVE), initial=True)
    writing, go_on = threading.Event(), threading.Event()
    append = world.log._append

    def append_slowly(content: bytes) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_SECONDS)
        append(content)

    monkeypatch.setattr(world.log, "_append", append_slowly)
    task = asyncio.ensure_future(world.log.run())
    await eventually(writing.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    closing = asyncio.ensure_future(world.log.close())
    await asyncio.sleep(0.01)
    go_on.set()
    await closing
    assert [line["event"] for line in world.lines] == ["started", "found", "stopped"]


async def restarted(world: World) -> list[str]:
    """The next agent's lines, with GPU 0 and 1 held; the event of each, and of which pod."""
    count = len(world.lines)
    later = World(world.file)
    later.clock.now = world.clock.now
    later.log._looked, later.log._known = False, {}
    reconcile(later.ledger, held(U0), held(U1, owner=SERVE), initial=True)
    task = asyncio.ensure_future(later.log.run())
    await eventually(lambda: len(later.lines) == count + 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [f"{line['event']} {line.get('pod', '')}".strip() for line in later.lines[count:]]


async def test_a_grant_whose_pod_became_known_during_a_hand_over_is_granted(
    tmp_path: Path,
) -> None:
    """The old agent has no line of it, because it did not know the pod, and its log is whole."""
    world = World(tmp_path / "audit.jsonl")
    world.log._add("started")
    book(world.ledger, U0)
    reconcile(world.ledger, held(U0))
    await world.log.close()
    assert [line["event"] for line in world.lines] == ["started", "granted", "stopped"]
    world.clock.now += 2
    assert await restarted(world) == ["started", "found train", "granted serve"]


@pytest.mark.parametrize("cause", ["crash", "long ago", "rotated", "torn"])
async def test_without_a_whole_log_of_the_agent_before_all_grants_are_found(
    tmp_path: Path, cause: str
) -> None:
    """Lines may be missing, or another plugin may have granted meanwhile."""
    world = World(tmp_path / "audit.jsonl")
    if cause != "rotated":
        world.log._add("started")
    reconcile(world.ledger, held(U0))
    await written(world)
    if cause != "crash":
        await world.log.close()
    if cause == "torn":
        with world.file.open("a") as file:
            file.write("{}\n")
    world.clock.now += 3600 if cause == "long ago" else 2
    assert await restarted(world) == ["started", "found train", "found serve"]


async def test_who_decided_is_read_from_the_evidence(tmp_path: Path) -> None:
    """A scheduler, or the agent itself."""
    world = World(tmp_path / "audit.jsonl")
    book(world.ledger, U0)
    reconcile(world.ledger, held(U0))
    (grant,) = world.ledger.grants
    grants = world.ledger._grants.by_number
    grants[grant.number] = msgspec.structs.replace(
        grant, evidence=("the kubelet says so", "decided by the scheduler, in an annotation")
    )
    await written(world)
    assert world.lines[0]["decidedBy"] == "the scheduler, in an annotation"


async def test_a_full_file_is_renamed_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes five times its size at most, and each file ends with a whole line."""
    world = World(tmp_path / "audit.jsonl")
    monkeypatch.setattr(world.log, "_max_bytes", 2000)
    for _ in range(60):
        grant = book(world.ledger, U0)
        reconcile(world.ledger, held(U0))
        await written(world)
        world.ledger.release(grant.number)
        await written(world)
    files = sorted(await asyncio.to_thread(os.listdir, tmp_path))
    assert files == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, 5))]
    for name in files:
        text = (tmp_path / name).read_text()
        assert len(text) <= 2000
        assert all(json.loads(line) for line in text.splitlines())
    assert world.lines[-1]["grant"] == grant.number


async def test_a_line_that_a_crash_has_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    """The rest of the file stays readable."""
    world = World(tmp_path / "audit.jsonl")
    world.file.write_text('{"event":"gran')
    book(world.ledger, U0)
    reconcile(world.ledger, held(U0))
    await written(world)
    cut, line = world.file.read_text().splitlines()
    assert cut == '{"event":"gran'
    assert json.loads(line)["event"] == "granted"


async def test_a_file_that_cannot_be_written_is_one_error_and_loses_nothing(tmp_path: Path) -> None:
    """The lines wait until the operator has mended it."""
    place = tmp_path / "audit"
    place.write_text("in the way")
    world = World(place / "audit.jsonl")
    grant = book(world.ledger, U0)
    reconcile(world.ledger, held(U0))
    assert not await written(world)
    world.ledger.release(grant.number)
    assert not await written(world)
    assert world.recorded == ["audit.not_written"]
    error = world.journal.entries[0].facts["error"]
    assert str(world.file) in error
    assert "move away the file" in error
    place.unlink()
    assert await written(world)
    assert [line["event"] for line in world.lines] == ["granted", "released"]
    assert world.recorded == ["audit.not_written", "audit.written_again"]


async def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Whoever could put it there would choose the file that root appends to."""
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    world = World(tmp_path / "audit.jsonl")
    book(world.ledger, U0)
    reconcile(world.ledger, held(U0))
    assert not await written(world)
    assert not (tmp_path / "elsewhere").exists()


async def test_lines_that_wait_too_long_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a day must not fill the memory; the log says what it lacks."""
    monkeypatch.setattr("vgpu_agent.agent.records.audit._MAX_WAITING", 3)
    place = tmp_path / "audit"
    place.write_text("in the way")
    world = World(place / "audit.jsonl")
    for _ in range(4):
        grant = book(world.ledger, U0)
        reconcile(world.ledger, held(U0))
        await written(world)
        world.ledger.release(grant.number)
        await written(world)
    place.unlink()
    assert await written(world)
    assert [line["event"] for line in world.lines] == ["lost", "released", "granted", "released"]
    assert world.lines[0]["lines"] == 5
