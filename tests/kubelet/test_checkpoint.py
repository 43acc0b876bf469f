"""The kubelet's checkpoint in every state that a file can be in (kubelet §9)."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubelet.backend import U0, U1
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import CheckpointError
from vgpu_agent.kubelet import checkpoint
from vgpu_agent.kubelet.checkpoint import (
    CheckpointEntry,
    parse_checkpoint,
    read_checkpoint,
    release_memory,
)

SAMPLE = {
    "Data": {
        "PodDeviceEntries": [
            {
                "PodUID": "11111111-2222-3333-4444-555555555555",
                "ContainerName": "train",
                "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"0": [U0]},
                "AllocResp": (
                    "CkIKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSKEdQVS1hYWFhYWFhYS0wMDAwLTQwMDAt"
                    "ODAwMC0wMDAwMDAwMDAwMDA="
                ),
            }
        ],
        "RegisteredDevices": {"nvidia.com/gpu": [U0, U1]},
    },
    "Checksum": 1234567890,
}


def _parse(content: Any) -> tuple[CheckpointEntry, ...]:
    return parse_checkpoint(json.dumps(content).encode(), name="checkpoint")


def _entry(**changes: Any) -> dict[str, Any]:
    """The sample with its one entry changed."""
    return {
        "Data": {
            "PodDeviceEntries": [{**SAMPLE["Data"]["PodDeviceEntries"][0], **changes}],  # type: ignore[index]  # a sample of plain JSON
            "RegisteredDevices": {},
        },
        "Checksum": 1,
    }


def test_the_contracts_sample_is_understood() -> None:
    """Pod UID, container, resource, ids, and the answer that was once given,
    which is the golden vector envvar of kubelet §17.
    """
    (entry,) = _parse(SAMPLE)

    assert (entry.pod_uid, entry.container_name, entry.resource_name) == (
        "11111111-2222-3333-4444-555555555555",
        "train",
        "nvidia.com/gpu",
    )
    assert entry.ids == (U0,)
    assert b"NVIDIA_VISIBLE_DEVICES\x12(" + U0.encode() in entry.answer


@pytest.mark.parametrize(
    ("device_ids", "expected"),
    [
        ({"0": ["a"], "1": ["b", "c"]}, ("a", "b", "c")),
        ({"-1": ["a"]}, ("a",)),
        (["a", "b"], ("a", "b")),
        ({"0": None}, ()),
        ({}, ()),
        (None, ()),
    ],
    ids=[
        "by NUMA node",
        "without topology",
        "flat list of kubelets before 1.20",
        "node without ids",
        "no node",
        "null",
    ],
)
def test_ids_are_read_in_every_form(device_ids: Any, expected: tuple[str, ...]) -> None:
    """The change of this form once broke other plugins."""
    (entry,) = _parse(_entry(DeviceIDs=device_ids))

    assert entry.ids == expected


def test_a_kubelet_that_has_given_nothing_has_null_entries() -> None:
    """Go writes an empty list as null."""
    assert (
        _parse({"Data": {"PodDeviceEntries": None, "RegisteredDevices": {}}, "Checksum": 1}) == ()
    )


def test_unknown_keys_are_ignored() -> None:
    """A newer kubelet may say more."""
    (entry,) = _parse(_entry(Generation=3, AllocResp=None) | {"Version": "v9"})

    assert (entry.ids, entry.answer) == ((U0,), b"")


@pytest.mark.parametrize("answer", ["%%%", "CgQ\u00e9"])
def test_an_answer_that_is_no_base64_harms_only_who_asks_for_it(answer: str) -> None:
    """The ids count; the stored answer is decoded on demand."""
    (entry,) = _parse(_entry(AllocResp=answer))

    assert entry.ids == (U0,)
    with pytest.raises(CheckpointError, match=r"container train .* is not base64"):
        _ = entry.answer


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (json.dumps(SAMPLE).encode()[:200], "truncated"),
        (b"\x00" * 512, "malformed"),
        (b"\xff\xfe{}", "malformed"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `Data`"),
        (b'{"Data": {"Pods": []}}', "missing required field `PodDeviceEntries`"),
        (b'{"Data": {"PodDeviceEntries": [{"PodUID": 5}]}}', "Expected `str`, got `int`"),
        (
            b'{"Data": {"PodDeviceEntries": [{"PodUID": "a"}]}}',
            "missing required field `ContainerName`",
        ),
        (b"[" * 100_000, "cannot be understood"),
    ],
    ids=[
        "empty",
        "blank",
        "half-written",
        "zeros",
        "other encoding",
        "list",
        "foreign",
        "future",
        "wrong type",
        "no name",
        "very deep",
    ],
)
def test_what_cannot_be_understood_is_one_clear_error(content: bytes, complaint: str) -> None:
    """The message names the file, what is wrong, and what it means."""
    with pytest.raises(CheckpointError, match=complaint) as error:
        parse_checkpoint(content, name="/k/kubelet_internal_checkpoint")

    assert str(error.value).startswith("the kubelet's checkpoint /k/kubelet_internal_checkpoint ")
    assert "until then pods are known by name only" in str(error.value)


@given(st.binary(max_size=200))
def test_junk_is_an_error_and_nothing_else(content: bytes) -> None:
    """No bytes lead to another exception."""
    try:
        entries = parse_checkpoint(content, name="junk")
    except CheckpointError:
        return
    assert entries == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "-1", "PodUID", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"), _JSON
        ),
    )
)
def test_an_entry_of_any_shape_is_understood_or_an_error(entry: dict[str, Any]) -> None:
    """JSON of the right outline and the wrong inside leads to no other exception,
    and ids are always strings.
    """
    try:
        entries = _parse({"Data": {"PodDeviceEntries": [entry]}})
    except CheckpointError:
        return
    assert all(isinstance(device, str) for each in entries for device in each.ids)


async def test_no_file_means_that_nothing_was_given(directory: Path) -> None:
    """A fresh node."""
    assert await read_checkpoint(directory / "none") == ()


async def test_a_file_that_cannot_be_read_is_an_error(directory: Path) -> None:
    """Here a directory in its place. The message names the path."""
    (directory / "checkpoint").mkdir()

    with pytest.raises(CheckpointError, match=r"/checkpoint cannot be read: Is a directory"):
        await read_checkpoint(directory / "checkpoint")


async def test_a_big_file_is_read_without_blocking_the_loop(directory: Path) -> None:
    """Eight megabytes, in a thread; the fixture
    for blocked loops would fail this test otherwise.
    """
    entry = {
        **SAMPLE["Data"]["PodDeviceEntries"][0],  # type: ignore[index]  # a sample of plain JSON
        "DeviceIDs": {"0": [f"{U0}::{number}" for number in range(150_000)]},
    }
    content = json.dumps(
        {"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}
    )
    (directory / "checkpoint").write_text(content, encoding="utf-8")

    (read,) = await read_checkpoint(directory / "checkpoint")

    assert (len(content) > 7_000_000, len(read.ids)) == (True, 150_000)


async def test_files_of_any_size_are_read_one_after_the_other_and_at_once(tmp_path: Path) -> None:
    """They share one piece of memory. Nothing of a longer file is left over in the reading
    of a shorter one.
    """
    files = {}
    for number in (1, 3000, 2, 40_000, 3):
        ids = [f"GPU-{number}-{each}" for each in range(number)]
        path = tmp_path / str(number)
        path.write_text(json.dumps(_entry(DeviceIDs={"-1": ids})))
        files[path] = ids
    for path, ids in files.items():
        (entry,) = await read_checkpoint(path)
        assert entry.ids == tuple(ids)
    read = await asyncio.gather(*(read_checkpoint(path) for path in (*files, *files)))
    assert [entry.ids for (entry,) in read] == [
        tuple(ids) for ids in (*files.values(), *files.values())
    ]


async def test_the_memory_of_a_long_reading_is_let_go(tmp_path: Path) -> None:
    """A reading keeps memory of the file's size for the next, `release_memory` gives it back,
    and reading goes on.
    """
    path = tmp_path / "checkpoint"
    path.write_text(
        json.dumps(_entry(DeviceIDs={"-1": [f"GPU-{each}" for each in range(100_000)]}))
    )
    release_memory()
    tracemalloc.start()
    try:
        await read_checkpoint(path)
        kept, _ = tracemalloc.get_traced_memory()
        release_memory()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept - left > path.stat().st_size
    (entry,) = await read_checkpoint(path)
    assert len(entry.ids) == 100_000


def _as_kubelet_writes(path: Path, ids: list[str], *, devices: int = 40_000) -> None:
    """Without spaces, and with the list of all devices behind the entries."""
    content = {
        "Data": {
            **_entry(DeviceIDs={"-1": ids})["Data"],
            "RegisteredDevices": {"r": [f"d{each}" for each in range(devices)]},
        }
    }
    path.write_text(json.dumps(content, separators=(",", ":")))


async def test_the_entries_are_found_wherever_they_end(tmp_path: Path) -> None:
    """More and fewer of them than the last time, by little and by much;
    also when an id looks like what stands behind them.
    """
    path = tmp_path / "checkpoint"
    for number in (1, 60_000, 59_999, 60_001, 2, 20_000, 0, 31_000):
        ids = [f'GPU-{each},"RegisteredDevices":' for each in range(number)]
        _as_kubelet_writes(path, ids)
        (entry,) = await read_checkpoint(path)
        assert entry.ids == tuple(ids)


async def test_nobody_waits_for_a_file_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet has replaced it meanwhile,
    and giving back its megabytes takes the file system milliseconds.
    """
    path, closing = tmp_path / "checkpoint", threading.Event()
    _as_kubelet_writes(path, ["a"])

    class SlowToClose(io.FileIO):
        def close(self) -> None:
            closing.wait(PATIENCE_SECONDS)
            super().close()

    monkeypatch.setattr(
        checkpoint, "open", lambda path, *_, **__: SlowToClose(str(path)), raising=False
    )

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            (entry,) = await read_checkpoint(path)
        assert (entry.ids, closing.is_set()) == (("a",), False)
    finally:
        closing.set()


@pytest.mark.parametrize("before", [0, 100_000, 700_000, 1_000_000])
@pytest.mark.parametrize("beside", [-25, -21, -20, -3, -1, 0, 1, 25])
def test_the_list_of_all_devices_is_left_out_wherever_it_begins(
    before: int, beside: int, tmp_path: Path
) -> None:
    """Beside the ends of what is read and searched at a time,
    which follow from how long the entries were the last time.
    """
    memory, path = checkpoint._Buffer(), tmp_path / "checkpoint"
    ends = {before, before + checkpoint._PART_BYTES, before - checkpoint._PART_BYTES}
    for length in [before, *(each for end in ends if end > 25 for each in (end + beside, before))]:
        path.write_bytes(b"x" * length + b',"RegisteredDevices":' + b"y" * 600_000)
        with memory.content(path, whole=False) as content:
            assert bytes(content) == b"x" * length + b"}}"


def test_only_so_many_files_wait_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that hangs each of them keeps a descriptor,
    and the place of a file that is not there any more.
    """
    memory, path, closing = checkpoint._Buffer(), tmp_path / "checkpoint", threading.Event()
    open_now: list[io.FileIO] = []

    class SlowToClose(io.FileIO):
        def close(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                closing.wait(PATIENCE_SECONDS)
            if not self.closed:
                open_now.remove(self)
            super().close()

        def __init__(self, path: str) -> None:
            super().__init__(path)
            open_now.append(self)

    path.write_bytes(b"{}")
    monkeypatch.setattr(
        checkpoint, "open", lambda path, *_, **__: SlowToClose(str(path)), raising=False
    )
    try:
        for _ in range(20):
            with memory.content(path, whole=False):
                assert len(open_now) <= checkpoint._MAX_PENDING_CLOSES + 1
        assert len(open_now) == checkpoint._MAX_PENDING_CLOSES
    finally:
        closing.set()
        memory._closing.shutdown()
    assert open_now == []
