"""Compiling the library: once, safely, and with a clear word where it cannot be."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import build as building

pytestmark = pytest.mark.component  # it starts programs


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vgpu-agent" / "sim"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _no_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ziglang" else real(name, *more),
    )


def test_the_sources_are_free_of_warnings(tmp_path: Path) -> None:
    """Held here and not in `build`, where a newer compiler's new warning would stop a user."""
    files = [str(source) for source in building.sources() if source.suffix == ".c"]

    done = subprocess.run(
        [
            *building.compiler(),
            *building._FLAGS,
            "-Werror",
            "-o",
            tmp_path / building.LIBRARY,
            *files,
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == ""
    assert done.returncode == 0


def test_the_second_build_does_nothing(cache: Path) -> None:
    """The same file, untouched, and no leftovers beside it."""
    first = building.build()
    written = first.stat().st_mtime_ns

    second = building.build()

    assert (second, second.stat().st_mtime_ns) == (first, written)
    assert sorted(path.name for path in first.parent.iterdir()) == [building.LIBRARY, "lock"]
    assert first.is_relative_to(cache)


def test_changed_sources_are_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library is never replaced under a running process."""
    native = tmp_path / "native"
    shutil.copytree(building._NATIVE, native)
    before = building._content_hash()
    monkeypatch.setattr(building, "_NATIVE", native)
    unchanged = building._content_hash()
    with (native / "events.c").open("a") as file:
        file.write("/* one more word */\n")

    assert unchanged == before
    assert building._content_hash() != before


def test_a_library_that_was_brought_along_needs_no_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image takes the cache of its builder with it. Where it runs, there is no compiler."""
    built = building.build()
    monkeypatch.setenv("PATH", "/nowhere")
    _no_ziglang(monkeypatch)
    assert building.build() == built


def test_two_processes_build_at_once(cache: Path) -> None:
    """Both get a whole library, and it is one."""
    program = "from vgpu_agent.sim.build import build; print(build())"
    together = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    paths = {process.communicate()[0].strip() for process in together}

    assert [process.returncode for process in together] == [0, 0]
    assert len(paths) == 1
    assert ctypes.CDLL(paths.pop()).nvmlShutdown() == 1  # NVML_ERROR_UNINITIALIZED


def test_without_a_compiler(cache: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the remedy."""
    _no_ziglang(monkeypatch)

    with pytest.raises(
        SimulationError,
        match=r"no C compiler found .* install one, for example with: pip install ziglang",
    ):
        building.build()


def test_compilers_are_tried_in_order(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cc, gcc, clang, then ziglang from PyPI."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: real("os") if name == "ziglang" else real(name, *more),
    )
    found = [building.compiler()]
    for name in ("clang", "gcc", "cc"):
        _script(tools / name, "exit 0")
        found.append(building.compiler())

    assert found == [
        [sys.executable, "-m", "ziglang", "cc"],
        *([str(tools / name)] for name in ("clang", "gcc", "cc")),
    ]


def test_a_compiler_that_fails(cache: Path, tools: Path) -> None:
    """Its complaint is in the error, and nothing half-made stays."""
    _script(tools / "cc", "echo 'stdio.h: No such file or directory' >&2; exit 4")

    with pytest.raises(
        SimulationError,
        match=r"cannot compile the simulated driver \(exit 4\).*stdio.h: No such file",
    ):
        building.build()

    assert list(cache.rglob(building.LIBRARY)) == []


def test_a_compiler_that_hangs(cache: Path, tools: Path) -> None:
    """It is stopped, and the error says so."""
    _script(tools / "cc", "exec /bin/sleep 30")

    with pytest.raises(SimulationError, match=r"did not compile the simulated driver within 0.1 s"):
        building.build(timeout_seconds=0.1)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home directory is read-only in many containers."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(
        SimulationError,
        match=(
            r"cannot write the simulated driver to .*; set XDG_CACHE_HOME to a writable directory"
        ),
    ):
        building.build()


def test_the_cache_is_below_the_home_directory_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The XDG base directory specification names this default."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert building.cache_directory() == tmp_path / ".cache" / "vgpu-agent" / "sim"


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None,
    reason="ziglang is only installed where there is no C compiler (dependency group compiler)",
)
def test_ziglang_compiles_it_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler from PyPI, for machines without one."""
    monkeypatch.setattr(building, "_COMPILERS", ())

    library = building.build()

    assert ctypes.CDLL(os.fspath(library)).nvmlShutdown() == 1
