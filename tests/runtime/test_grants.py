"""The grants' specs and host files as a whole:
delivered, found again, restored, and whole or absent after a kill.
"""

from __future__ import annotations

import asyncio
import errno
import json
import operator
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import jsonschema
import msgspec
import pytest

from tests.cdi.cdi_schema import SCHEMA
from tests.patience import PATIENCE_SECONDS, quickest
from tests.runtime.conftest import MakeGrant, names
from tests.runtime.grants_parts import changed_at, events, link, put, read, spec_name
from vgpu_agent.allocation.carrier import Carrier
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.journal import Journal
from vgpu_agent.runtime.grants import GrantDirectory

STEPS = {"mkdir": 5, "chmod": 5, "ftruncate": 1, "pwrite": 3, "fchmod": 2, "rename": 7}
"""How often each is called in one delivery."""


async def test_a_delivered_grant_is_on_the_host_and_in_the_runtimes_directory(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path
) -> None:
    """The directory is made first, since /run is empty after a reboot.
    The file alone is there, without leftovers.
    """
    record, provision = grant()
    carrier: Carrier = grants
    await carrier.deliver(record, provision)
    assert names(cdi_directory) == [spec_name(record.token)]
    jsonschema.validate(json.loads((cdi_directory / spec_name(record.token)).read_bytes()), SCHEMA)
    assert len(read(provision.files[0].path)) == 8192
    assert carrier.records == (record,)


async def test_delivering_again_writes_nothing(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path
) -> None:
    """The kubelet asks before each start of the container."""
    record, provision = grant()
    await grants.deliver(record, provision)
    os.utime(cdi_directory / spec_name(record.token), (1, 1))
    os.utime(provision.files[0].path, (1, 1))
    await grants.deliver(record, provision)
    assert changed_at(cdi_directory / spec_name(record.token)) == 1
    assert changed_at(provision.files[0].path) == 1


async def test_a_spec_that_is_written_twice_means_the_second_thing(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path
) -> None:
    """An init container and the container after it share a name. Each start sees its own edits."""
    record, provision = grant()
    await grants.deliver(record, provision)
    await grants.deliver(record, msgspec.structs.replace(provision, edits=Edits({"SECOND": "yes"})))
    spec = json.loads((cdi_directory / spec_name(record.token)).read_bytes())
    assert spec["devices"][0]["containerEdits"]["env"] == ["SECOND=yes"]


async def test_a_spec_that_somebody_deleted_is_written_again(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path
) -> None:
    """An earlier delivery is no proof that the spec is still there."""
    record, provision = grant()
    await grants.deliver(record, provision)
    (cdi_directory / spec_name(record.token)).unlink()
    assert await grants.missing([record.token]) == (record.token,)
    await grants.deliver(record, provision)
    assert await grants.missing([record.token]) == ()


async def test_after_a_reboot_all_specs_are_restored(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path, journal: Journal
) -> None:
    """One that cannot be is named in the journal and holds up no other."""
    good, bad = grant(1), grant(2)
    put(*os.path.split(bad[1].directories[0].path), "in the way")
    assert await grants.restore([bad, good]) == 1
    assert names(cdi_directory) == [spec_name(good[0].token)]
    assert [(entry.event, entry.facts["pod"]) for entry in journal.entries] == [
        ("grants.not_restored", "default/pod-2")
    ]
    assert await grants.restore([good]) == 0


async def test_what_cannot_be_restored_is_said_once_as_long_as_nothing_changes(
    grants: GrantDirectory, grant: MakeGrant, journal: Journal
) -> None:
    """It is tried at every look. The journal has room for a thousand entries, and others need it,
    too.
    """
    bad = grant()
    stone = put(*os.path.split(bad[1].directories[0].path), "in the way")
    for _ in range(3):
        assert await grants.restore([bad]) == 0
    assert events(journal) == ["grants.not_restored"]
    stone.unlink()
    assert await grants.restore([bad]) == 1
    await grants.collect(lambda _: False)
    put(*os.path.split(bad[1].directories[0].path), "in the way again")
    assert await grants.restore([bad]) == 0
    assert events(journal) == ["grants.not_restored", "grants.not_restored"]


async def test_a_start_in_the_middle_of_a_restoration_is_not_undone(
    grants: GrantDirectory, grant: MakeGrant, monkeypatch: pytest.MonkeyPatch, cdi_directory: Path
) -> None:
    """The ids of a spec that was found missing are another container's when its turn comes."""
    old, (new, provision) = grant(1), grant(2)
    new = msgspec.structs.replace(new, token=old[0].token)
    really = grants.missing

    async def missing(tokens: Iterable[str]) -> tuple[str, ...]:
        found = await really(tokens)
        await grants.deliver(new, provision)
        return found

    monkeypatch.setattr(grants, "missing", missing)
    assert await grants.restore([old]) == 0
    assert grants.records == (new,)
    assert "pod-2" in (cdi_directory / spec_name(new.token)).read_text()


@pytest.mark.parametrize(
    ("work", "hangs_at", "early"),
    [
        ("collect", "_lock", False),
        ("collect", "_lock", True),
        ("collect", "_mounts.mounted_below", False),
        ("withdraw", "_lock", False),
    ],
)
async def test_a_thread_of_an_agent_that_hands_over_removes_nothing(
    grants: GrantDirectory,
    grant: MakeGrant,
    monkeypatch: pytest.MonkeyPatch,
    cdi_directory: Path,
    work: str,
    hangs_at: str,
    *,
    early: bool,
) -> None:
    """It outlives the cancelled loop. Meanwhile the successor may have given the ids, and so the
    name of the file, to another container. ``early``: one without a spec and without a directory.
    """
    kept = cdi_directory.parent / "kept"
    successor = GrantDirectory(str(cdi_directory), Journal(), kept_directory=str(kept))
    (record, provision), (new, new_provision) = grant(1), grant(2)
    if early:
        record = msgspec.structs.replace(record, own_directory="")
    new = msgspec.structs.replace(new, token=record.token)
    await (grants.write_host_files if early else grants.deliver)(record, provision)
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    hanging: Callable[[str], object] = operator.attrgetter(hangs_at)(grants)
    working: Callable[[object], object] = getattr(grants, f"_{work}")

    def hang(name: str) -> object:
        reached.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return hanging(name)

    def work_to_the_end(record: object) -> object:
        try:
            return working(record)
        finally:
            ended.set()

    with monkeypatch.context() as patched:
        owner, _, name = hangs_at.rpartition(".")
        patched.setattr(getattr(grants, owner) if owner else grants, name, hang)
        patched.setattr(grants, f"_{work}", work_to_the_end)
        task = asyncio.ensure_future(
            grants.collect(lambda _: False) if work == "collect" else grants.withdraw(record)
        )
        assert await asyncio.to_thread(reached.wait, PATIENCE_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    grants.keep_all()

    await successor.load()
    await (successor.write_host_files if early else successor.deliver)(new, new_provision)
    path = (kept if early else cdi_directory) / spec_name(new.token)
    content = read(str(path))
    go_on.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE_SECONDS)
    assert read(str(path)) == content
    assert read(provision.files[0].path)


async def test_an_early_answer_needs_host_files_and_is_remembered(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path, journal: Journal
) -> None:
    """A runtime without CDI gets no spec. The next agent knows it,
    and all of it is collected in the end.
    """
    record, provision = grant()
    await grants.write_host_files(record, provision)
    assert (len(read(provision.files[0].path)), names(cdi_directory), grants.records) == (
        8192,
        [],
        (record,),
    )
    again = GrantDirectory(
        str(cdi_directory), journal, kept_directory=str(cdi_directory.parent / "kept")
    )
    await again.load()
    assert again.records == (record,)
    assert await grants.collect(lambda _: False) == (record,)
    assert not names(Path(record.own_directory).parent)


async def test_a_new_agent_finds_what_the_old_one_wrote(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path, journal: Journal
) -> None:
    """The files alone say what was decided."""
    await grants.deliver(*grant(1))
    await grants.deliver(*grant(2))
    again = GrantDirectory(
        str(cdi_directory), journal, kept_directory=str(cdi_directory.parent / "kept")
    )
    await again.load()
    assert {record.token for record in again.records} == {grant(1)[0].token, grant(2)[0].token}
    assert set(again.records) == set(grants.records)


async def test_loading_leaves_the_files_of_others_alone(
    grants: GrantDirectory, cdi_directory: Path, journal: Journal
) -> None:
    """This includes files whose names are like ours."""
    theirs = [
        "nvidia.yaml",
        "vgpu-agent-node.json",
        f"vgpu-agent-{'g' * 32}.json",
        ".vgpu-agent-x",
        "rig.json",
    ]
    for name in theirs:
        put(cdi_directory, name, "not ours")
    await grants.load()
    assert names(cdi_directory) == sorted(theirs)
    assert (grants.records, events(journal)) == ((), [])


async def test_loading_moves_a_damaged_spec_out_of_the_runtimes_way(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path, journal: Journal
) -> None:
    """One clear line, all others are loaded,
    and the next start of that container writes it anew.
    """
    bad, good = grant(1), grant(2)
    await grants.deliver(*bad)
    await grants.deliver(*good)
    path = cdi_directory / spec_name(bad[0].token)
    path.write_bytes(path.read_bytes()[:100])
    await grants.load()
    assert grants.records == (good[0],)
    assert names(cdi_directory) == sorted(
        [spec_name(good[0].token), spec_name(bad[0].token) + ".broken"]
    )
    assert [(entry.event, entry.facts["path"]) for entry in journal.entries] == [
        ("grants.unreadable", str(path))
    ]


async def test_what_a_killed_agent_had_half_written_is_cleared_away(
    grants: GrantDirectory, cdi_directory: Path
) -> None:
    """No other program would."""
    put(cdi_directory, ".vgpu-agent-17af.tmp", "half")
    await grants.tidy()
    assert names(cdi_directory) == []


async def test_loading_leaves_what_another_agent_is_just_writing(
    grants: GrantDirectory, cdi_directory: Path
) -> None:
    """In an update the new agent reads the files while the old one serves. The start of a container
    would fail there, for a reason that nobody could find.
    """
    put(cdi_directory, ".vgpu-agent-17af.tmp", "half")
    await grants.load()
    assert names(cdi_directory) == [".vgpu-agent-17af.tmp"]


async def test_a_directory_that_cannot_be_read_is_an_error(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be taken for missing that only could not be seen."""
    directory = GrantDirectory(
        str(tmp_path / "cdi"), journal, kept_directory=str(tmp_path / "kept")
    )
    refused = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(
        HostFileError, match=f"cannot read {tmp_path}/cdi: Permission denied; give the agent"
    ):
        await directory.load()


async def test_a_file_in_the_place_of_the_directory_holds_no_grants(
    tmp_path: Path, journal: Journal, grant: MakeGrant
) -> None:
    """The agent starts, for all that needs no specs.
    A grant that does is refused with the reason.
    """
    (tmp_path / "cdi").write_text("a file")
    directory = GrantDirectory(
        str(tmp_path / "cdi"), journal, kept_directory=str(tmp_path / "kept")
    )
    await directory.load()
    assert not directory.records
    with pytest.raises(
        HostFileError, match="move away the file that is in the place of a directory"
    ):
        await directory.deliver(*grant())


@pytest.mark.parametrize(
    ("step", "which"), [(step, which) for step, times in STEPS.items() for which in range(times)]
)
async def test_a_kill_at_any_step_leaves_a_whole_grant_or_none(
    step: str,
    which: int,
    grants: GrantDirectory,
    grant: MakeGrant,
    cdi_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    journal: Journal,
) -> None:
    """The step fails as if the agent had died there; a new agent sees a spec only together with all
    that it mentions, and a second delivery completes it.
    """
    record, provision = grant()
    really, count = getattr(os, step), [0]

    class KilledError(BaseException):
        """Nothing in the agent catches it."""

    def kill(*arguments: object, **more: object) -> object:
        count[0] += 1
        if count[0] > which:
            raise KilledError
        return really(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, step, kill)
        with pytest.raises(KilledError):
            await grants.deliver(record, provision)
        assert not (cdi_directory / spec_name(record.token)).exists()
    again = GrantDirectory(
        str(cdi_directory), journal, kept_directory=str(cdi_directory.parent / "kept")
    )
    await again.load()
    for found in again.records:
        assert found == record
        assert read(provision.files[0].path)[8000:8005] == b"limit"
    await again.deliver(record, provision)
    assert again.records == (record,)
    assert names(cdi_directory) == [spec_name(record.token)]


async def test_files_of_a_life_before_are_gone_when_the_container_starts_again(
    grants: GrantDirectory, grant: MakeGrant
) -> None:
    """Files of the previous run are removed when a new spec is written, and also when the answer
    was complete in Allocate. Files that must be there again are made after that. A restoration
    removes nothing, because the container may be running.
    """
    record, provision = grant()
    provision = msgspec.structs.replace(provision, removed=("pids", "region.cache"))
    for deliver in (grants.deliver, grants.write_host_files):
        await deliver(record, provision)
        put(provision.own_directory, "pids", "1")
        put(provision.own_directory, "region.cache", "old")
        put(provision.own_directory, "log", "stays")
        await deliver(record, provision)
        assert names(Path(provision.own_directory)) == ["log", "region.cache"]
        assert read(provision.files[0].path)[:5] == b"magic"
    put(provision.own_directory, "pids", "1")
    await grants.withdraw(record)
    assert await grants.restore([(record, provision)]) == 1
    assert names(Path(provision.own_directory)) == ["log", "pids", "region.cache"]


async def test_files_in_a_slot_are_removed(grants: GrantDirectory, grant: MakeGrant) -> None:
    """The container's directory is then a link of the agent's, and no other link counts."""
    record, provision = grant()
    own = Path(provision.own_directory)
    slot = own.parent.parent / "slots" / "003" / own.name
    put(slot, "pids", "1")
    link(own, f"../slots/003/{own.name}")
    provision = Provision(own_directory=provision.own_directory, removed=("pids",))
    await grants.deliver(record, provision)
    assert names(slot) == []
    put(slot, "pids", "1")
    link(own, slot)
    with pytest.raises(HostFileError, match="cannot remove"):
        await grants.deliver(record, provision)
    assert names(slot) == ["pids"]


@pytest.mark.parametrize("which", range(3))
async def test_a_kill_between_two_removals_is_made_up_for_by_the_next_start(
    which: int, grants: GrantDirectory, grant: MakeGrant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet has no answer, so it asks again before the container starts."""
    record, provision = grant()
    provision = msgspec.structs.replace(provision, removed=("one", "two", "three"))
    for name in provision.removed:
        put(provision.own_directory, name)
    really, left = os.unlink, [which]

    class KilledError(BaseException):
        """Nothing in the agent catches it."""

    def kill(name: str, *, dir_fd: int | None = None) -> None:
        if not left[0]:
            raise KilledError
        left[0] -= 1
        really(name, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", kill)
        with pytest.raises(KilledError):
            await grants.deliver(record, provision)
    assert names(Path(provision.own_directory)) == sorted(provision.removed[which:])
    await grants.deliver(record, provision)
    assert names(Path(provision.own_directory)) == ["region.cache"]


async def test_a_cancelled_delivery_is_finished_and_known(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path
) -> None:
    """The kubelet may give up on its call at any moment; file and memory stay of one mind."""
    record, provision = grant()
    task = asyncio.create_task(grants.deliver(record, provision))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await grants.deliver(record, provision)
    assert (grants.records, names(cdi_directory)) == ((record,), [spec_name(record.token)])


async def test_a_full_disk_refuses_this_grant_alone(
    grants: GrantDirectory, grant: MakeGrant, monkeypatch: pytest.MonkeyPatch, cdi_directory: Path
) -> None:
    """With path, reason and remedy. The same grant goes through once there is room."""
    record, provision = grant()
    with monkeypatch.context() as patched:
        patched.setattr(
            os,
            "ftruncate",
            lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        with pytest.raises(
            HostFileError, match=r"region\.cache: No space left on device; free some space"
        ):
            await grants.deliver(record, provision)
    assert (names(cdi_directory), grants.records) == ([], ())
    await grants.deliver(record, provision)
    assert grants.records == (record,)


async def test_forty_starts_at_once_are_delivered_in_milliseconds(
    grants: GrantDirectory, grant: MakeGrant
) -> None:
    """This package takes a small part of the start's 50 ms (p99).

    The forty together stay below forty times 10 ms, one alone below 10 ms.
    """
    alone = []
    for record, provision in [grant(number) for number in range(100, 120)]:
        began = time.perf_counter()
        await grants.deliver(record, provision)
        alone.append(time.perf_counter() - began)
    assert statistics.median(alone) < 0.01
    bursts = iter([[grant(100 * burst + number) for number in range(40)] for burst in range(2, 7)])

    async def burst() -> None:
        await asyncio.gather(*(grants.deliver(*pair) for pair in next(bursts)))

    assert await quickest(burst, within_seconds=0.4) < 0.4
    assert len(grants.records) % 40 == 20
