"""The keeper's record, by which any other process can find the rig, enter it, end it,
or collect what is left of it.

Written by keeper.py; read by lifecycle.py and leftovers.py.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.real_node.rig.processes import ProcessId

if TYPE_CHECKING:
    from tests.real_node.rig.layout import Layout


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """The keeper's record of itself and its rig.
    ``first`` is the namespaces' first process, by its host pid.
    """

    keeper: ProcessId
    first: ProcessId | None = None
    namespaces: tuple[str, ...] = ()

    def save(self, layout: Layout) -> None:
        writing = layout.keeper.with_suffix(".writing")
        writing.write_text(json.dumps(dataclasses.asdict(self)))
        writing.rename(layout.keeper)

    @classmethod
    def load(cls, layout: Layout) -> KeeperRecord | None:
        """The record of a rig; None when its keeper never came to write one."""
        try:
            raw = json.loads(layout.keeper.read_text())
        except FileNotFoundError:
            return None
        first = raw["first"]
        return cls(
            ProcessId(**raw["keeper"]),
            ProcessId(**first) if first else None,
            tuple(raw["namespaces"]),
        )
