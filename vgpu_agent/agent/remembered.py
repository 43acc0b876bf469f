"""The data last read from the API server that is needed to offer the same resources again,
kept in a file of the node.

A restart during an outage of the API server must not change device ids or the way of binding under
running pods, so the last good copy is kept in ``stateDirectory``. It is a cache: when it is lost or
damaged, the agent waits for the API server instead. Used by `api_server`.
"""

from __future__ import annotations

import msgspec

from vgpu_agent.agent.state_file import StateFile
from vgpu_agent.nodes import Node


class Remembered(msgspec.Struct, frozen=True, rename="camel"):
    """The facts.

    Attributes:
        node: the Node's name they belong to.
        texts: configuration file of a replaced plugin → those of its texts that count, see
            `plugin_files.texts_in_force`. Some are not from the API server, but can be wrong as
            easily.
        config_label: value of the Node's label that names its configuration, empty without the
            label; None when it was never read.
        named_config: the named configuration that was in force, empty for none; None when none was
            ever chosen.
        named_text: its content.
        annotations: the Node's annotations that families read on pods as well: defaults that
            operators set for the pods of a node.
    """

    node: str = ""
    kubelet_version: str = ""
    runtime_version: str = ""
    texts: dict[str, tuple[str, ...]] = {}
    config_label: str | None = None
    named_config: str | None = None
    named_text: str = ""
    annotations: dict[str, str] = {}

    @property
    def as_node(self) -> Node:
        """The Node as far as it is remembered."""
        return Node(
            self.node,
            annotations=self.annotations,
            kubelet_version=self.kubelet_version,
            runtime_version=self.runtime_version,
        )


class Memory:
    """The file in ``directory``."""

    def __init__(self, directory: str) -> None:
        self._file = StateFile(
            directory,
            "remembered.json",
            Remembered,
            when_unreadable="it will be written again from the API server's data",
            when_not_written=(
                "a restart during an outage of the API server offers nothing that needs it"
            ),
        )

    async def recall(self, node: str) -> Remembered | None:
        """Read what was remembered about ``node``;
        None when there is nothing, or it is damaged or another node's.
        """
        found = await self._file.read()
        return found if found is not None and found.node == node else None

    async def keep(self, facts: Remembered) -> None:
        """Write ``facts``, when they differ from what was written last."""
        await self._file.write(facts)
