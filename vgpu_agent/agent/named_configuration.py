"""The named configuration that a label of our Node chooses, updated when the label or the directory
of configurations changes.

NVIDIA's plugin has a process of its own for this, which waits for the API server at every start and
does not notice new content under the same name (nvidia §13). Called by `composition.run` before the
agent is built, because some settings hold for the life of the process; by `reload` before each
check of the files; and by `report`. `api_server` supplies the label, and stores the configuration
in force for a restart. The family that replaces the plugin maps the label's value to a file
(`NamedDocuments.choose`).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.agent import api_server
from vgpu_agent.agent.remembered import RememberedFile
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.credentials import credentials
from vgpu_agent.concurrency import Revision
from vgpu_agent.config import load
from vgpu_agent.config.documents import Choice
from vgpu_agent.config.families import plugin_document
from vgpu_agent.errors import ClusterError, ConfigError
from vgpu_agent.journal import Journal
from vgpu_agent.status import CORRECT_CONFIGURATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.config.load import Loaded, Sources
    from vgpu_agent.config.settings import Settings

# The flag of NVIDIA's plugin that names its file. The choice is passed on as this flag, because a
# flag overrides all other sources of nvidiaConfigFile.
_FILE_FLAG = "--config-file"


class InForce(msgspec.Struct, frozen=True):
    """A valid configuration.

    Attributes:
        key: its name, which is a key of the ConfigMap with the configurations; empty for none.
        text: its content.
    """

    key: str
    text: str


class NamedConfiguration:
    """The chosen configuration, and the reason why a newer choice is not in force.

    State: the last valid choice. It survives a restart by `remembered` (written by `api_server`).

    Attributes:
        choice: the last valid choice: the name of the configuration, and why it was chosen.
        problem: why the present label or directory has no effect; empty when it has.
        in_force: the configuration in force: the choice, or the previous one if that is invalid.
            None before `begin`.
        revision: a count that advances when ``in_force`` is set, for which tasks can wait.
        label: the label's value when it was read last, empty where the Node has none; None when it
            was never read.
        waited_seconds: the time spent on waiting for the API server at the start, by which
            `api_server` shortens its own wait.
    """

    def __init__(self, sources: Sources, settings: Settings, journal: Journal) -> None:
        """Begin without a choice; ``sources`` (flags, environment, name of the agent's file) and
        ``settings`` are the agent's own, without a named configuration.
        """
        self.journal = journal
        self.choice = Choice()
        self.problem = ""
        self.in_force: InForce | None = None
        self.revision = Revision()
        self.label: str | None = None
        self.waited_seconds = 0.0
        self._known_label: Callable[[], str | None] = lambda: None  # see `read_label_by`
        # where the named configurations of NVIDIA's plugin are, and the label that chooses one
        self._named_documents = plugin_document().named_documents(settings)
        self._own_sources, self._settings = sources, settings
        self._why_unread = ""  # why the label has not been read
        self._before_restart: InForce | None = None  # in force before the agent was restarted

    @property
    def report(self) -> dict[str, str]:
        """Return the choice, its reason, and the problem of a newer one, for ``/debug/config``."""
        return {
            "name": self.choice.key,
            "reason": self.choice.reason,
            "file": self._file(self.choice),
            "in_force": "" if self.in_force is None else self.in_force.key,
            "problem": self.problem,
        }

    def read_label_by(self, read_label: Callable[[], str | None]) -> None:
        """Call ``read_label`` for the label's value from now on, whenever the sources are asked
        for; while it returns None, because the Node has not been read, the last value counts.
        """
        self._known_label = read_label

    async def begin(self) -> Loaded:
        """Wait for the label, not longer than ``START_WAIT_SECONDS``, choose,
        and read the chosen file.

        Raises:
            ConfigError: the directory cannot be read, or the chosen configuration is invalid.
        """
        await self._read_label()
        keys = await asyncio.to_thread(keys_in, self._named_documents.directory)
        self._choose(keys)
        if self.problem and not self.choice.reason:  # nothing is in force that could stay
            before = self._before_restart
            if before is not None and (not before.key or before.key in keys):
                self._take(Choice(before.key, reason="in force before the agent was restarted"))
            else:
                # The choice for a Node without the label. If that fails as well, its key is empty,
                # and without its problem it is the valid choice of no configuration.
                self._take(
                    msgspec.structs.replace(self._named_documents.choose("", keys), problem="")
                )
        loaded = await asyncio.to_thread(self._load)
        self.note_in_force(loaded)
        return loaded

    def note_in_force(self, loaded: Loaded) -> None:
        """Record that ``loaded`` is in force."""
        # path and content of the named configuration, which is a file of NVIDIA's plugin
        named, content = loaded.contents.nvidia_file, loaded.contents.nvidia or b""
        self.in_force = InForce(os.path.basename(named), content.decode(errors="replace"))
        self.revision.advance()

    async def sources(self) -> Sources:
        """Return the present sources of settings: the agent's own, and the file that label and
        directory choose.
        """
        try:
            self._choose(await asyncio.to_thread(keys_in, self._named_documents.directory))
        except ConfigError as err:
            self._set_problem(str(err))
        return self._with(self.choice)

    def _load(self) -> Loaded:
        """Load the chosen file.

        If it cannot be used, load the named configuration that an earlier agent had in force, under
        its own name, with the agent's own file as it is now.
        """
        sources = self._with(self.choice)
        try:
            return load.load_sources(sources)
        except ConfigError as err:
            before = self._before_restart
            if before is None or (before.key and not before.text):  # its content is not known
                raise
            named = Choice(before.key)
            own = None if sources.file is None else load.read(sources.file)
            text = before.text.encode() if before.key else None
            loaded = load.load_contents(
                self._with(named),
                load.Contents(own=own, nvidia_file=self._file(named), nvidia=text),
            )
            self.journal.record(
                "config.refused",
                level="error",
                problems=err.problems,
                in_force="the named configuration in force before the restart",
                remedy=CORRECT_CONFIGURATION,
            )
            return loaded

    def _choose(self, keys: frozenset[str]) -> None:
        """Choose again. If the new choice is invalid, report a problem and keep the previous
        one.
        """
        known = self._known_label()
        self.label = self.label if known is None else known
        found = self._named_documents.choose(self.label or "", keys)
        if not found.problem:
            self._take(found)
        unread = "" if self.label is not None else self._why_unread
        self._set_problem("; ".join(filter(None, (found.problem, unread))))

    def _take(self, choice: Choice) -> None:
        """Make the valid ``choice`` the last one; record it if it differs from the one before."""
        if choice != self.choice:
            self.choice = choice
            self.journal.record(
                "config.named",
                name=choice.key or "none",
                reason=choice.reason,
                directory=self._named_documents.directory,
            )

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            running = self.choice.key if self.in_force is None else self.in_force.key
            self.journal.record(
                "config.named_refused", level="error", problem=problem, in_force=running or "none"
            )
        self.problem = problem

    def _with(self, choice: Choice) -> Sources:
        """Return the agent's own sources and the file of ``choice``."""
        return msgspec.structs.replace(
            self._own_sources, flags={**self._own_sources.flags, _FILE_FLAG: self._file(choice)}
        )

    def _file(self, choice: Choice) -> str:
        """Return the path of the chosen file; empty for the choice of none."""
        return self._named_documents.path(choice.key) if choice.key else ""

    async def _read_label(self) -> None:
        """Read the label from the API server. If it does not answer, use the label that was stored
        before the agent was restarted.
        """
        node, began = self._settings.node_name_or_hostname, time.monotonic()
        if self._settings.cluster.enabled == "never":
            self.label = ""
            return
        try:
            async with asyncio.timeout(api_server.START_WAIT_SECONDS):
                self.label = await self._fetch_label(node)
        except (ClusterError, TimeoutError) as err:
            why = str(err) or (
                f"no answer from the API server in {api_server.START_WAIT_SECONDS:g} s"
            )
            self._why_unread = (
                f"label {self._named_documents.label} of this node has not been read: {why}; until "
                "then it counts as not set"
            )
        self.waited_seconds = time.monotonic() - began
        remembered = await RememberedFile(self._settings.state_directory).read(node)
        if remembered is not None:
            if remembered.named_config is not None:
                self._before_restart = InForce(remembered.named_config, remembered.named_text)
            self.label = remembered.config_label if self.label is None else self.label

    async def _fetch_label(self, node: str) -> str:
        """The label's value; empty where the Node has none.

        Raises:
            ClusterError: there are no credentials, or the Node cannot be read.
        """
        found = await asyncio.to_thread(credentials, self._settings)
        if found is None:
            raise ClusterError(
                "there are no credentials for the API server (run with a service account, or set "
                "kubeconfig)"
            )
        await asyncio.to_thread(importlib.import_module, "vgpu_agent.cluster.client")
        # It imports aiohttp, which most nodes need for the web server only, and later.
        from vgpu_agent.cluster.client import ApiClient  # noqa: PLC0415

        client = ApiClient(found)
        try:
            return decode.node(await client.get(f"/api/v1/nodes/{node}")).labels.get(
                self._named_documents.label, ""
            )
        finally:
            await client.close()


def keys_in(directory: str) -> frozenset[str]:
    """The keys of the ConfigMap that is mounted at ``directory``: its files, through links, without
    the kubelet's own entries (``..data``).

    Blocks.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return frozenset(
                entry.name
                for entry in entries
                if not entry.name.startswith("..") and Path(entry).is_file()
            )
    except OSError as err:
        raise ConfigError(
            [
                (
                    f"{plugin_document().directory_key}: {directory} cannot be read: {err.strerror}"
                    "; mount the ConfigMap with the configurations there"
                )
            ]
        ) from err


async def with_named_configuration(loaded: Loaded) -> tuple[Loaded, NamedConfiguration | None]:
    """Return ``loaded`` with the named configuration of this node applied to it; unchanged if no
    directory is set.

    Raises:
        ConfigError: the directory cannot be read, or the chosen configuration is invalid.
    """
    if not plugin_document().named_documents(loaded.settings).directory:
        return loaded, None
    # The agent, which is built later, takes over this journal as its own.
    named = NamedConfiguration(loaded.sources, loaded.settings, Journal())
    return await named.begin(), named
