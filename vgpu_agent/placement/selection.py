"""The cards that a pod wants by their product names and UUIDs (vgpu-manager §4.1), on a node and
for a scheduler. Pure functions; entries are in lower case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Matches = Callable[[str, str], bool]  # of a text in lower case, and an entry


def is_included(text: str, entries: Sequence[str], matches: Matches) -> bool:
    """Tell whether one of the entries matches a text; true where there is no entry."""
    return not entries or is_excluded(text, entries, matches)


def is_excluded(text: str, entries: Iterable[str], matches: Matches) -> bool:
    """Tell whether one of the entries matches a text."""
    low = text.lower()
    return any(matches(low, entry) for entry in entries)


def model_rule(*, substrings: bool) -> Matches:
    """Return how entries match product names: with ``substrings``, ``A10`` also matches ``A100``,
    as for vgpu-manager.
    """
    return has_text if substrings else _has_name


def has_text(text: str, entry: str) -> bool:
    """Tell whether ``entry`` is any part of ``text``."""
    return entry in text


def _has_name(text: str, entry: str) -> bool:
    """Tell whether ``entry`` is a part of ``text`` and cuts no number: ``a10`` is no part of
    ``nvidia a100``, which vgpu-manager takes for one (vgpu-manager §12.3); ``v100`` is a part of
    ``tesla v100s``.
    """
    place = text.find(entry)
    while place >= 0:
        end = place + len(entry)
        before, after = text[:place][-1:] + entry[:1], entry[-1:] + text[end : end + 1]
        if not any(len(pair) == 2 and pair.isdecimal() for pair in (before, after)):
            return True
        place = text.find(entry, place + 1)
    return False
