"""The page as parts that have ids, and the differences between two states of it.

A part is the inner HTML of the element with its id, or the width of a bar. The HTML has a mark at
the place of each part inside it. So a changed number is sent alone, without the box around it. A
list is a part whose items are parts: items come, go and move without the others being sent.

Used by `node`, which makes the parts, and `stream`, which sends them. ``dashboard.js`` applies the
changes.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# the parts that are in no other part
ROOTS = ("head", "main")
_MARK = re.compile("\0([^\0]+)\0")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def text(value: object) -> str:
    """Return ``value`` as HTML text. It cannot become markup, an attribute's end or a mark."""
    return html.escape(_CONTROL.sub(" ", str(value)))


class Parts:
    """The parts of one state of the page.

    State: id → HTML with marks, and id → ids of the items for lists.
    """

    def __init__(self) -> None:
        self._html: dict[str, str] = {}
        self._items: dict[str, tuple[str, ...]] = {}

    def add(self, part: str, content: str, *, tag: str = "span", css: str = "") -> str:
        """Add the part with the id ``part``, and return its element for the HTML around it.
        ``content`` is the HTML inside, with marks for the parts in it.
        """
        self._html[part] = content
        css_attribute = f' class="{css}"' if css else ""
        return f'<{tag} id="{part}"{css_attribute}>\0{part}\0</{tag}>'

    def bar(self, part: str, percent: float, *, css: str) -> str:
        """Add a horizontal bar of a drawing that is 100 units wide, and return its element."""
        self._html[part] = f"{min(100.0, max(0.0, percent)):.0f}"
        return f'<rect id="{part}" class="{css}" width="\0{part}\0" height="8"/>'

    def list(self, part: str, items: Mapping[str, str], *, css: str) -> str:
        """Add a list whose items are parts (id → HTML), and return its element."""
        self._html[part] = ""
        self._html.update(items)
        self._items[part] = tuple(items)
        return f'<ul id="{part}" class="{css}">\0{part}\0</ul>'

    def whole(self, part: str) -> str:
        """Return the HTML of a part with all parts inside it."""
        if part in self._items:
            return "".join(f'<li id="{item}">{self.whole(item)}</li>' for item in self._items[part])
        content = self._html[part]
        return _MARK.sub(lambda mark: self.whole(mark[1]), content) if "\0" in content else content

    def differing(self, other: Parts) -> Iterator[str]:
        """Yield the ids of parts that ``other``, the earlier state, lacks or has with other
        content.
        """
        for part, content in self._html.items():
            if other._html.get(part) != content or other._items.get(part) != self._items.get(part):
                yield part

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all parts."""
        return list(self._html)

    def changes(self, changed: Mapping[str, int], version: int) -> dict[str, Any]:
        """Return the changes of the parts after ``version``.

        Args:
            changed: id → the version in which the part changed last.
            version: the one that the viewer has.

        Returns:
            ``order``: id of a list → ids of its items now; ``set``: id → inner HTML, or the width
            of a bar. A key without entries is absent.
        """
        order: dict[str, tuple[str, ...]] = {}
        new: dict[str, str] = {}

        def look(part: str) -> None:
            if part in self._items:
                if changed[part] > version:
                    order[part] = self._items[part]
                for item in self._items[part]:
                    look(item)
            elif changed[part] > version:
                new[part] = self.whole(part)
            else:
                for mark in _MARK.finditer(self._html[part]):
                    look(mark[1])

        for part in ROOTS:
            look(part)
        return {name: found for name, found in (("order", order), ("set", new)) if found}
