"""Suggestions for unknown keys and variables: the name that was probably meant.

Called by `reading` for keys of our file, by `load` for variables and by `families.nvidia` for keys
of NVIDIA's plugin.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from vgpu_agent.config import schema

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST_GUESSED = 60  # characters; a longer name gets no suggestion


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about the unknown key ``name`` of a section whose keys are
    ``known``.
    """
    if guess := nearest(name, known):
        return f"did you mean {guess}?"
    # A key in the wrong section is the mistake that NVIDIA's plugin swallows (nvidia §2, its issue
    # 1433).
    if elsewhere := [path for path in _paths_everywhere() if path.rpartition(".")[2] == name]:
        return f"did you mean {elsewhere[0]}?"
    return f"expected {', '.join(known)}"


def _paths_everywhere() -> list[str]:
    sections = {path.rpartition(".")[0] for path in schema.value_paths()} - {""}
    return [*schema.value_paths(), *sorted(sections)]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of ``known`` that ``name`` probably meant; case, ``-`` and ``_`` are
    ignored.
    """
    if len(name) > _LONGEST_GUESSED:
        return None
    folded = {_folded(word): word for word in known}
    found = difflib.get_close_matches(_folded(name), folded, n=1, cutoff=0.7)
    return folded[found[0]] if found else None


def _folded(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()
