"""What the agent last read from the API server and needs to offer the same resources again, kept in a file of the node.

A restart during an outage of the API server must not change device ids or the way of binding under running pods, so the last good copy is
kept in ``stateDirectory``. It is a cache: when it is lost or damaged, the agent waits for the API server instead. Used by `api_server`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from vgpu_agent import log
from vgpu_agent.nodes import Node

_logger = log.get(__name__)

_FILE = "remembered.json"
_REMEDY = (
    "make stateDirectory a directory with room in which the agent can write; until then a restart during an outage of the API server "
    "offers nothing that needs it"
)


class Remembered(msgspec.Struct, frozen=True, rename="camel"):
    """The facts.

    Attributes:
        node: the Node's name they belong to.
        device_config: text of the ConfigMap's device-config.yaml; None when there is no ConfigMap.
        device_configs_before: where something in that is wrong, what stood there before, see `volcano_files.told`.
        node_configs: the same of the mounted node configuration, with the newest; it is not from the API server, but as easily spoilt.
        config_label: value of the Node's label that names its configuration, empty without the label; None when it was never read.
        named_config: the named configuration that was in force, empty for none; None when none was ever chosen.
        named_text: what stood in it.
    """

    node: str = ""
    kubelet_version: str = ""
    runtime_version: str = ""
    device_config: str | None = None
    device_configs_before: tuple[str, ...] = ()
    node_configs: tuple[str, ...] = ()
    config_label: str | None = None
    named_config: str | None = None
    named_text: str = ""

    @property
    def as_node(self) -> Node:
        """The Node as far as it is remembered."""
        return Node(self.node, kubelet_version=self.kubelet_version, runtime_version=self.runtime_version)


class Memory:
    """The file in ``directory``; what cannot be written is logged once and tried again; nothing else depends on it."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / _FILE
        self._written: Remembered | None = None
        self._complained = False

    async def recall(self, node: str) -> Remembered | None:
        """What was remembered about ``node``; None when there is nothing, or it is damaged or another node's."""
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            found = msgspec.json.decode(content, type=Remembered)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            _logger.warning("memory.unreadable", path=str(self._path), error=str(err), remedy="it is written anew from the API server")
            return None
        return found if found.node == node else None

    async def keep(self, facts: Remembered) -> None:
        """Write ``facts``, when they differ from what was written last."""
        if facts == self._written:
            return
        try:
            await asyncio.to_thread(self._write, msgspec.json.encode(facts))
        except OSError as err:
            if not self._complained:
                _logger.warning("memory.not_written", path=str(self._path), error=str(err), remedy=_REMEDY)
            self._complained = True
            return
        self._written, self._complained = facts, False

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".new")  # always the same, so that nothing can pile up
        unfinished.write_bytes(content)
        unfinished.chmod(0o600)
        os.replace(unfinished, self._path)
