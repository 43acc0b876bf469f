"""The data last read from the API server that the offers depend on, kept in a file on the node.

A restart during an outage of the API server must not change device ids or the binding mode under
running pods. So a copy is kept in ``stateDirectory``. It is a cache: if it is lost or damaged, the
agent waits for the API server instead. Used by `api_server` and `named_configuration`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.agent.state_file import StateFile
from vgpu_agent.nodes import Node

if TYPE_CHECKING:
    from vgpu_agent.status import WriteFailure


class Remembered(msgspec.Struct, frozen=True, rename="camel"):
    """The content of the file.

    Attributes:
        node: the name of the Node that the data is about.
        kubelet_version: the version of the Node's kubelet.
        runtime_version: the version of the Node's container runtime.
        texts: name of a configuration file of a plugin that a family replaces → those of its texts
            that are in force: the last valid one, and invalid ones after it, whose correct parts
            count (`plugin_files.texts_in_force`). Texts from files on the node are included.
        config_label: the value of the Node's label that selects its configuration; "" if there was
            no label, None if the Node was never read.
        named_config: the name of the configuration that was in force; "" for none, None if none
            was ever selected.
        named_text: the text of that configuration.
        annotations: the Node's annotations that are defaults, set by operators, for the same
            annotations of its pods.
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
        """The Node with the remembered data only."""
        return Node(
            self.node,
            annotations=self.annotations,
            kubelet_version=self.kubelet_version,
            runtime_version=self.runtime_version,
        )


class RememberedFile:
    """The file ``remembered.json`` in ``directory``, which is ``stateDirectory``."""

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

    async def read(self, node: str) -> Remembered | None:
        """Read the data about ``node``; None if there is no file, or it is damaged or another
        node's.
        """
        found = await self._file.read()
        return found if found is not None and found.node == node else None

    @property
    def failure(self) -> WriteFailure | None:
        """The reason why the last facts could not be written; None while the file has them."""
        return self._file.failure

    async def write(self, facts: Remembered) -> None:
        """Write ``facts`` if they differ from the content of the file."""
        await self._file.write(facts)
