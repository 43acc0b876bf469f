"""Fixtures for the kubelet side: a simulated kubelet, and plugins that run under a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.grpc.conftest import directory, grpcio_stays_initialised
from tests.kubelet.backend import FakeBackend
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.concurrency import Revision, Supervisor
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import server
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.server import DevicePlugin
from vgpu_agent.model import Resource
from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet
from vgpu_agent.status import KubeletStatus

__all__ = ["directory", "grpcio_stays_initialised"]


@pytest.fixture
async def kubelet(directory: Path) -> AsyncIterator[SimulatedKubelet]:
    """A simulated kubelet that is running."""
    simulated = SimulatedKubelet(directory)
    await simulated.start()
    yield simulated
    await simulated.stop()


class Node:
    """The agent's kubelet side on one node:
    a directory watch and plugins, supervised as in the agent.
    """

    def __init__(
        self,
        directory: Path,
        supervisor: Supervisor,
        monkeypatch: pytest.MonkeyPatch,
        **constants: float,
    ) -> None:
        """Build it, with other constants of `server` as long as the test runs."""
        # A busy kubelet is no silent one.
        patience = {"STREAM_OPEN_TIMEOUT_SECONDS": 60.0, "DRAIN_SECONDS": PATIENCE_SECONDS}
        quick = {"RETRY_MIN_SECONDS": 0.05, "COALESCE_SECONDS": 0.02}
        for name, seconds in {**patience, **quick, **constants}.items():
            monkeypatch.setattr(server, name, seconds)
        self.settings = Kubelet(directory=str(directory))
        self.journal = Journal()
        self.status = KubeletStatus()
        self.supervisor = supervisor
        self.watch = DirectoryWatch(
            self.settings.device_plugin_directory,
            poll_seconds=60.0,  # nothing but inotify explains what a test sees
            journal=self.journal,
            status=self.status,
        )
        self.plugins: list[DevicePlugin] = []

    def watch_directory(self) -> None:
        """Begin to watch; plugins wait until this."""
        self.supervisor.start("kubelet directory", self.watch.run)

    def offer(
        self, resource: Resource, backend: FakeBackend, *, lists: Revision | None = None
    ) -> DevicePlugin:
        """Run a plugin for the resource; ``lists`` advances with the lists that it sends."""
        plugin = DevicePlugin(resource, backend, self.watch, self.journal, lists_revision=lists)
        self.plugins.append(plugin)
        self.supervisor.start(f"plugin {resource.name} {len(self.plugins)}", plugin.run)
        return plugin

    def events(self, name: str) -> list[dict[str, object]]:
        """Facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


@pytest.fixture
async def node(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node that is watched; its loops end with the test."""
    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=1.0) as supervisor:
        built = Node(directory, supervisor, monkeypatch)
        built.watch_directory()
        yield built
        await asyncio.wait_for(
            asyncio.gather(*(plugin.stop() for plugin in built.plugins)), PATIENCE_SECONDS
        )
