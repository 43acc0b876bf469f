"""Shared parts of the tests of the grants' files: names of specs, contents of files, records."""

from __future__ import annotations

from pathlib import Path

from vgpu_agent.journal import Journal


def spec_name(token: str) -> str:
    """The file of a grant."""
    return f"vgpu-agent-{token}.json"


def read(path: str) -> bytes:
    """Return the file's content; empty when there is no file."""
    return Path(path).read_bytes() if Path(path).exists() else b""


def put(directory: str | Path, name: str, text: str = "") -> Path:
    """A foreign file in a directory that may be missing."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / name).write_text(text)
    return Path(directory) / name


def link(path: str | Path, target: str | Path) -> None:
    """A link at ``path``, in the place of another."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    Path(path).symlink_to(target)


def changed_at(path: str | Path) -> float:
    """Unix seconds."""
    return Path(path).stat().st_mtime


def events(journal: Journal) -> list[str]:
    """The names of what was recorded."""
    return [entry.event for entry in journal.entries]
