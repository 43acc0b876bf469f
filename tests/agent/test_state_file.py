"""Files in ``stateDirectory`` over restarts, damage and full disks."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.agent.state_file import StateFile


def state_file(directory: Path) -> StateFile[dict[str, int]]:
    """The file ``facts.json`` in ``directory``."""
    return StateFile(
        str(directory),
        "facts.json",
        dict[str, int],
        when_unreadable="nothing",
        when_not_written="it is forgotten",
    )


async def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    """The directory is made, readable by no other user, and nothing unfinished stays."""
    assert await state_file(tmp_path / "state").write({"a": 1})
    assert await state_file(tmp_path / "state").read() == {"a": 1}
    assert [
        (path.name, path.stat().st_mode & 0o777) for path in (tmp_path / "state").iterdir()
    ] == [("facts.json", 0o600)]


async def test_facts_that_were_read_are_not_written_again(tmp_path: Path) -> None:
    """Most starts change nothing."""
    await state_file(tmp_path).write({"a": 1})
    again = state_file(tmp_path)
    await again.read()
    (tmp_path / "facts.json").unlink()
    assert await again.write({"a": 1})
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    assert await again.write({"a": 2})
    assert await state_file(tmp_path).read() == {"a": 2}


async def test_a_write_waits_for_one_whose_caller_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop is cancelled while its thread still writes, and the end of the process writes the last
    facts: two at once would mix their content in the unfinished file.
    """
    file, writing, go_on = state_file(tmp_path), threading.Event(), threading.Event()
    replace = os.replace

    def replace_slowly(source: Path, target: Path) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_SECONDS)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_slowly)
    first = asyncio.ensure_future(file.write({"a": 1}))
    await eventually(writing.is_set)
    first.cancel()
    last = asyncio.ensure_future(file.write({"a": 2}))
    await asyncio.sleep(0.05)
    assert (tmp_path / "facts.new").read_bytes() == b'{"a":1}'
    go_on.set()
    assert await last
    assert await state_file(tmp_path).read() == {"a": 2}


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "x"}', b"\xff\xfe"])
async def test_a_damaged_file_is_logged_and_read_as_nothing(tmp_path: Path, content: bytes) -> None:
    """A full disk or a crash of the node must not keep the agent from starting."""
    (tmp_path / "facts.json").write_bytes(content)
    with capture_logs() as lines:
        assert await state_file(tmp_path).read() is None
    assert [(line["event"], line["remedy"]) for line in lines] == [("state.unreadable", "nothing")]


async def test_a_failure_to_write_is_logged_once_and_tried_again(tmp_path: Path) -> None:
    """It says which setting, and what is lost until then."""
    (tmp_path / "state").write_text("")
    file = state_file(tmp_path / "state")
    with capture_logs() as lines:
        assert not await file.write({"a": 1})
        assert not await file.write({"a": 1})
    assert [line["event"] for line in lines] == ["state.not_written"]
    assert lines[0]["remedy"].endswith("until then it is forgotten")
    (tmp_path / "state").unlink()
    assert await file.write({"a": 1})
    assert await file.read() == {"a": 1}
