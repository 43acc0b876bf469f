"""Remains of grants on the host: collected, never while mounted or needed,
and swept where no grant remembers them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import msgspec
import pytest

from tests.runtime.conftest import HostProc, MakeGrant, names
from tests.runtime.grants_parts import events, read, spec_name
from vgpu_agent.journal import Journal
from vgpu_agent.runtime import host_files
from vgpu_agent.runtime.grants import GrantDirectory


async def test_a_grant_that_is_gone_is_collected_whole(
    grants: GrantDirectory, grant: MakeGrant, cdi_directory: Path, tmp_path: Path
) -> None:
    """Spec and directory go, and no others."""
    gone, kept = grant(1), grant(2)
    await grants.deliver(*gone)
    await grants.deliver(*kept)
    assert await grants.collect(lambda record: record == kept[0]) == (gone[0],)
    assert names(cdi_directory) == [spec_name(kept[0].token)]
    assert names(tmp_path / "vgpu" / "containers") == ["uid-2_main"]
    assert grants.records == (kept[0],)


async def test_nothing_that_is_mounted_is_collected(
    grants: GrantDirectory, grant: MakeGrant, proc: HostProc, cdi_directory: Path
) -> None:
    """volcano-vgpu:D5: the container that is still ending keeps its files.
    The next time they go.
    """
    record, provision = grant()
    await grants.deliver(record, provision)
    proc.someone_else((provision.files[0].path, "/tmp/cudevshr.cache"))
    assert await grants.collect(lambda _: False) == ()
    assert (len(read(provision.files[0].path)), names(cdi_directory)) == (
        8192,
        [spec_name(record.token)],
    )
    proc.someone_else()
    assert await grants.collect(lambda _: False) == (record,)


async def test_where_mounts_cannot_be_seen_kubelets_word_is_enough(
    grants: GrantDirectory, grant: MakeGrant, proc: HostProc
) -> None:
    """Without the host's process ids a directory would otherwise stay for ever."""
    record, provision = grant()
    await grants.deliver(record, provision)
    (proc.root / "1" / "mountinfo").write_bytes((proc.root / "self" / "mountinfo").read_bytes())
    assert await grants.collect(lambda _: False) == (record,)
    assert not read(provision.files[0].path)


async def test_a_directory_that_two_grants_of_a_container_share_goes_with_the_last(
    grants: GrantDirectory, grant: MakeGrant
) -> None:
    """A container may hold shares through two resources."""
    first, provision = grant()
    second = msgspec.structs.replace(first, token="f" * 32)
    await grants.deliver(first, provision)
    await grants.deliver(second, provision)
    assert await grants.collect(lambda record: record == second) == (first,)
    assert read(provision.files[0].path)
    assert await grants.collect(lambda _: False) == (second,)
    assert not read(provision.files[0].path)


async def test_a_grant_that_was_renewed_meanwhile_is_not_collected(
    grants: GrantDirectory, grant: MakeGrant
) -> None:
    """The ids of a pod that is gone may be another pod's before the collection comes to them."""
    record, provision = grant()
    await grants.deliver(record, provision)
    await grants.deliver(msgspec.structs.replace(record, decider="somebody else"), provision)
    assert not await asyncio.to_thread(grants._collect, record)
    assert read(provision.files[0].path)


async def test_the_directory_of_an_init_container_goes_with_its_turn(
    grants: GrantDirectory, grant: MakeGrant, tmp_path: Path
) -> None:
    """The container after it has the same ids,
    so the spec does not remember the first directory any more.
    """
    first, second = grant(1), grant(2)
    await grants.deliver(*first)
    await grants.deliver(msgspec.structs.replace(second[0], token=first[0].token), second[1])
    assert await grants.collect(lambda _: True) == ()
    assert names(tmp_path / "vgpu" / "containers") == ["uid-2_main"]


async def test_a_directory_whose_container_starts_again_is_not_taken_for_left_behind(
    grants: GrantDirectory, grant: MakeGrant, tmp_path: Path
) -> None:
    """An init container starts once more when its pod's sandbox is made anew.
    What is mounted waits for the next time.
    """
    first, second = grant(1), grant(2)
    await grants.deliver(*first)
    await grants.deliver(msgspec.structs.replace(second[0], token=first[0].token), second[1])
    await grants.deliver(*first)
    await grants.collect(lambda _: True)
    assert names(tmp_path / "vgpu" / "containers") == ["uid-1_main"]


async def test_what_cannot_be_removed_is_tried_again(
    grants: GrantDirectory, grant: MakeGrant, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks no other grant."""
    first, second = grant(1), grant(2)
    await grants.deliver(*first)
    await grants.deliver(*second)
    really = os.unlink

    def refuse(path: str, **more: int) -> None:
        if first[0].token in path:
            raise PermissionError(1, "Operation not permitted")
        really(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        assert await grants.collect(lambda _: False) == (second[0],)
        assert await grants.collect(lambda _: False) == ()
    assert events(journal) == ["grants.not_collected"]
    assert await grants.collect(lambda _: False) == (first[0],)


async def test_a_sweep_finds_what_no_grant_remembers(
    grants: GrantDirectory, grant: MakeGrant, proc: HostProc, tmp_path: Path
) -> None:
    """Directories of pods that went while the node was down;
    not those of known pods, of grants, or still mounted ones.
    """
    await grants.deliver(*grant(1))
    containers = tmp_path / "vgpu" / "containers"
    for name in ("uid-7_gone", "uid-8_known", "uid-9_mounted"):
        (containers / name).mkdir()
    (containers / "file").write_text("")
    proc.someone_else((f"{containers}/uid-9_mounted", "/tmp/vgpu"))
    assert await grants.sweep(str(containers), lambda name: name.startswith("uid-8")) == (
        "uid-7_gone",
    )
    assert names(containers) == ["file", "uid-1_main", "uid-8_known", "uid-9_mounted"]
    assert await grants.sweep(str(tmp_path / "missing"), lambda _: False) == ()


@pytest.mark.parametrize("by", ["sweep", "collect"])
async def test_who_removes_a_directory_does_not_meet_who_makes_it(
    by: str,
    grants: GrantDirectory,
    grant: MakeGrant,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A container starts again under other ids,
    in the directory that is just being removed as unneeded.
    """
    old, provision = grant()
    new = msgspec.structs.replace(old, token="f" * 32)
    await grants.deliver(old, provision)
    if by == "sweep":
        await grants.withdraw(old)
    really, starts = host_files.move_aside, []

    def move(path: str) -> str:
        starts.append(threading.Thread(target=grants._deliver, args=(new, provision)))
        starts[0].start()
        starts[0].join(0.2)
        return really(path)

    monkeypatch.setattr(host_files, "move_aside", move)
    if by == "sweep":
        await grants.sweep(str(tmp_path / "vgpu" / "containers"), lambda _: False)
    else:
        await grants.collect(lambda _: False)
    await asyncio.to_thread(starts[0].join)
    assert grants.records == (new,)
    assert read(provision.files[0].path)
