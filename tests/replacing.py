"""Files that a running loop or another process reads meanwhile:
a reader must see the old content or the new, never half of it.

`Path.write_text` empties a file before it fills it, so a reader on a busy machine may find it empty
and act upon that. For all tests that change a file which is being watched; one about a file that is
half written says so by writing it in place.
"""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Give ``path`` the content ``text`` at one moment, whether or not it exists."""
    # hidden, for some of those readers list the directory
    beside = path.with_name(f".{path.name}.beside")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
