"""The events of an episode, kept as bare tuples and formatted only on request."""

from __future__ import annotations

import asyncio
import collections
import itertools
from typing import Any

_Event = tuple[float, str, str, tuple[Any, ...]]


class Story:
    """The events of one episode, in order; and how often each happened."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._events: list[_Event] = []

    def tell(self, event: str, pod: str = "", *facts: Any) -> None:
        """``event`` happened, to the pod of that UID if one is named."""
        self.counts[event] += 1
        self._events.append((asyncio.get_running_loop().time(), event, pod, facts))

    def last_fact(self, event: str, pod: str) -> str:
        """The first fact of the last ``event`` of that pod, as text; empty when there was none."""
        found = next(
            (each for each in reversed(self._events) if each[1] == event and each[2] == pod), None
        )
        return str(found[3][0]) if found and found[3] else ""

    def latest(self, *, seconds: float) -> str:
        """All that happened in the last so many seconds."""
        since = asyncio.get_running_loop().time() - seconds
        recent = itertools.takewhile(lambda each: each[0] >= since, reversed(self._events))
        return "\n".join(self._line(each) for each in reversed(list(recent)))

    def accuse(self, text: str, pod: str, *, ids: tuple[str, ...] = ()) -> None:
        """Something went wrong for good; keep it with all events of the pod,
        of its ids and of the node.
        """
        self.tell("WRONG", pod, text)
        related = [
            self._line(each) for each in self._events if _concerns(each, text, pod, set(ids))
        ]
        self.wrong.append("\n".join([text, *related[-60:]]))

    @staticmethod
    def _line(event: _Event) -> str:
        at, what, pod, facts = event
        return f"  {at:10.3f} {what:24} {pod:12} {' '.join(str(fact) for fact in facts)}"


def _concerns(event: _Event, text: str, uid: str, ids: set[str]) -> bool:
    _, _, pod, facts = event
    if facts and isinstance(facts[0], dict):  # an entry of the agent's journal
        entry = facts[0]
        return (bool(entry.get("pod")) and entry["pod"] in text) or not ids.isdisjoint(
            entry.get("ids", ())
        )
    return pod in ("", uid) or any(
        isinstance(fact, tuple) and not ids.isdisjoint(fact) for fact in facts
    )
