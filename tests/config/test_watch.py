"""A changed file while the agent runs: noticed whichever way it was changed,
and never able to do harm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
import structlog

from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.config.load import Contents, Loaded, Sources, load
from vgpu_agent.config.watch import changes
from vgpu_agent.errors import ConfigError

# Real threads read the file, so time is real here, and short.
INTERVAL_SECONDS = 0.02
LONG_ENOUGH_SECONDS = 0.3

Changes = AsyncGenerator[Loaded | ConfigError, None]


def _text(node_name: str) -> str:
    return f"version: v1\nnodeName: {node_name}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose node name is ``first``."""
    file = tmp_path / "config.yaml"
    file.write_text(_text("first"))
    return file


@pytest.fixture
def loaded(file: Path) -> Loaded:
    """Return the configuration in force: `file`, a flag and a variable."""
    return load({"--config": str(file), "--log-level": "debug"}, {"VGPU_AGENT_LISTEN": ":1"})


@pytest.fixture
async def watched(loaded: Loaded) -> AsyncIterator[Changes]:
    """Yield the changes of `file` from now on."""
    found = cast("Changes", changes(loaded, interval_seconds=INTERVAL_SECONDS))
    yield found
    await found.aclose()


@pytest.fixture
def configmap(tmp_path: Path) -> Path:
    """A file as kubelet mounts it, with its next version ready beside it."""
    for name in ("first", "second"):
        (tmp_path / f"..{name}").mkdir()
        (tmp_path / f"..{name}" / "config.yaml").write_text(_text(name))
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "..data_tmp").symlink_to("..second")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    return tmp_path / "config.yaml"


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _replace(file: Path, text: str) -> None:
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


async def _next(watched: Changes) -> Loaded | ConfigError:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await anext(watched)


async def _next_name(watched: Changes) -> str:
    found = await _next(watched)
    assert isinstance(found, Loaded)
    return found.settings.node_name


async def _nothing(watched: Changes, until: Callable[[], object] = lambda: True) -> bool:
    """Tell whether nothing comes ``until`` a condition holds, and for many intervals after it.

    The iterator is at its end afterwards.
    """
    waiting = asyncio.ensure_future(anext(watched))
    await eventually(until)
    done, _ = await asyncio.wait({waiting}, timeout=LONG_ENOUGH_SECONDS)
    waiting.cancel()
    await asyncio.wait({waiting})
    return not done


async def test_a_file_that_is_written_in_place_is_noticed(file: Path, watched: Changes) -> None:
    """``cat >`` writes this way."""
    _write(file, _text("second"))

    assert await _next_name(watched) == "second"


async def test_a_file_that_is_replaced_is_noticed(file: Path, watched: Changes) -> None:
    """Editors write this way."""
    _replace(file, _text("second"))

    assert await _next_name(watched) == "second"


class TestConfigMap:
    """A volume that kubelet keeps up to date."""

    @pytest.fixture
    def file(self, configmap: Path) -> Path:
        """The file of the volume, for the fixtures above."""
        return configmap

    async def test_the_swap_of_a_configmap_is_noticed(self, file: Path, watched: Changes) -> None:
        """The kubelet renames a new link over ``..data``. The file's own link never changes."""
        file.with_name("..data_tmp").replace(file.with_name("..data"))

        assert await _next_name(watched) == "second"


async def test_flags_and_variables_still_win_over_new_content(file: Path, watched: Changes) -> None:
    """The precedence is that of the start."""
    _write(file, _text("second") + "listen: ':2'\nlog: {level: error, format: console}\n")

    found = await _next(watched)

    assert isinstance(found, Loaded)
    assert (found.settings.listen, found.settings.log.level, found.settings.log.format) == (
        ":1",
        "debug",
        "console",
    )


@pytest.mark.parametrize("with_a_file", [True, False])
async def test_other_sources_are_a_change_whether_or_not_there_is_a_file(
    loaded: Loaded, with_a_file: bool
) -> None:
    """A label of the node may choose the file that a flag names (named configurations)."""
    first = loaded.sources if with_a_file else msgspec.structs.replace(loaded.sources, file=None)
    second = msgspec.structs.replace(first, flags={**first.flags, "--node-name": "labelled"})
    asked = itertools.chain([first, second], itertools.repeat(second))

    async def sources() -> Sources:
        return next(asked)

    before = (
        loaded if with_a_file else dataclasses.replace(loaded, sources=first, contents=Contents())
    )
    watched = cast("Changes", changes(before, interval_seconds=INTERVAL_SECONDS, sources=sources))
    assert await _next_name(watched) == "labelled"
    assert await _nothing(watched)


async def test_the_file_of_nvidias_plugin_is_followed_as_ours(file: Path, tmp_path: Path) -> None:
    """New content comes with ours, wrong content as the error,
    and a file that vanishes changes nothing.
    """
    theirs = tmp_path / "v1.yaml"
    theirs.write_text("flags: {migStrategy: single}\n")
    loaded = await asyncio.to_thread(
        load, {"--config": str(file), "--config-file": str(theirs)}, {}
    )
    watched = cast("Changes", changes(loaded, interval_seconds=INTERVAL_SECONDS))

    _replace(theirs, "flags: {migStrategy: mixed}\n")
    found = await _next(watched)
    assert isinstance(found, Loaded)
    assert (found.settings.plugin.mig_strategy, found.settings.node_name) == ("mixed", "first")

    _replace(theirs, "flags: {migStrategy: some}\n")
    wrong = await _next(watched)
    assert isinstance(wrong, ConfigError)
    assert wrong.problems == [
        f'{theirs}:1: flags.migStrategy: expected none, single or mixed, got "some"'
    ]

    theirs.unlink()
    _replace(file, _text("second"))
    assert isinstance(await _next(watched), ConfigError)  # what is wrong stays wrong

    _replace(theirs, "{}\n")
    assert await _next_name(watched) == "second"
    await watched.aclose()


async def test_content_that_changed_before_the_watch_began_is_not_lost(
    file: Path, loaded: Loaded
) -> None:
    """Between `load` and the first look lies the start of the agent."""
    _write(file, _text("second"))

    watched = cast("Changes", changes(loaded, interval_seconds=INTERVAL_SECONDS))

    assert await _next_name(watched) == "second"
    await watched.aclose()


async def test_bad_content_comes_once_as_the_error(file: Path, watched: Changes) -> None:
    """The reader keeps what it has. Repeating the complaint every two seconds would not help."""
    _write(file, "version: v1\nnodName: x\n")

    found = await _next(watched)

    assert isinstance(found, ConfigError)
    assert found.problems == [f"{file}:2: nodName: unknown key, did you mean nodeName?"]
    assert await _nothing(watched)


async def test_after_bad_content_the_good_one_comes_again(file: Path, watched: Changes) -> None:
    """It comes even when it was in force all the time, so that an alarm about it can end."""
    _write(file, "junk")
    await _next(watched)

    _write(file, _text("first"))

    assert await _next_name(watched) == "first"


async def test_a_file_that_is_touched_or_copied_over_itself_is_no_change(
    file: Path, watched: Changes
) -> None:
    """Only content counts."""
    os.utime(file, (1, 1))
    _replace(file, _text("first"))

    assert await _nothing(watched)


async def test_a_file_that_vanishes_is_a_warning_and_no_change(
    file: Path, watched: Changes
) -> None:
    """A volume that is remounted must not turn the sharing off. It is logged once."""
    os.unlink(file)

    with structlog.testing.capture_logs() as lines:
        assert await _nothing(watched, until=lambda: lines)

    assert [(line["event"], line["log_level"], line["file"]) for line in lines] == [
        ("config.missing", "warning", str(file))
    ]


async def test_a_file_that_returns_is_watched_as_before(file: Path, watched: Changes) -> None:
    """With other content it is a change."""
    os.unlink(file)
    with structlog.testing.capture_logs() as lines:
        waiting = asyncio.ensure_future(_next_name(watched))
        await eventually(lambda: lines)
        _replace(file, _text("second"))
        assert await waiting == "second"

    assert [line["event"] for line in lines] == ["config.missing", "config.found"]


async def test_a_file_that_cannot_be_read_is_an_error_once(file: Path, watched: Changes) -> None:
    """Here a folder that was mounted in its place."""
    os.unlink(file)
    os.mkdir(file)

    found = await _next(watched)

    assert isinstance(found, ConfigError)
    assert found.problems == [f"{file}: is a directory; expected a YAML file"]
    assert await _nothing(watched)


async def test_a_file_that_is_empty_for_a_moment_does_not_mean_the_defaults(
    watched: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer in place truncates first; content counts when two readings in a row agree."""
    half, whole = b"version: v1\nnodeName: sec", _text("second").encode()
    readings = itertools.chain([_text("first").encode(), b"", half], itertools.repeat(whole))
    monkeypatch.setattr("vgpu_agent.config.load.read", lambda *_: next(readings))

    assert await _next_name(watched) == "second"


async def test_without_a_file_there_is_nothing_to_watch() -> None:
    """The iterator ends at once."""
    assert [found async for found in changes(load({}, {}), interval_seconds=INTERVAL_SECONDS)] == []
