"""The API server's side for a node of which only a label matters:
its Node is watched but no pods, and nothing is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import constants
from tests.agent.volcano_parts import NODE, QUICK, volcano_settings
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from tests.settings import switches
from vgpu_agent.agent import api_server
from vgpu_agent.agent.api_server import ClusterAccess
from vgpu_agent.agent.named_configuration import NamedConfiguration
from vgpu_agent.concurrency import Revision, Supervisor
from vgpu_agent.config.load import load, load_sources
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.nvidia.named import NamedConfig
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.journal import Journal
from vgpu_agent.sim.api.server import ApiServer

LABEL = "nvidia.com/device-plugin.config"


@pytest.fixture(autouse=True)
def _library_reads_files(loop_may_block: None) -> None:
    """kubernetes-asyncio reads the kubeconfig in a coroutine;
    the agent runs that in a loop of its own, in a thread.
    """


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.use(monkeypatch, QUICK)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server that knows the node, with a label."""
    async with ApiServer() as running:
        running.objects.create("nodes", {"metadata": {"name": NODE, "labels": {LABEL: "four"}}})
        yield running


async def settings(tmp_path: Path, server: ApiServer) -> Settings:
    """Return the settings of a node that offers nvidia.com/gpu by a named configuration."""
    return await volcano_settings(
        tmp_path,
        server,
        families=switches(),
        named_config=NamedConfig(directory=str(tmp_path)),
        listen=":0",
        debug_listen=":0",
    )


@contextlib.asynccontextmanager
async def connected(
    settings: Settings, waited_seconds: float = 0.0, named: NamedConfiguration | None = None
) -> AsyncIterator[ClusterAccess]:
    """A cluster side that has connected."""
    async with Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1) as supervisor:
        cluster = ClusterAccess(settings, Journal(), supervisor, named)
        await cluster.connect(waited_seconds)
        try:
            yield cluster
        finally:
            await cluster.close()


async def test_only_the_node_is_watched(tmp_path: Path, server: ApiServer) -> None:
    """An admin can still label nodes without giving the agent a right to see pods."""
    async with connected(await settings(tmp_path, server)) as cluster:
        assert (cluster.connected, cluster.needed, cluster.config_label) == (True, False, "four")
        assert [watch.name for watch in cluster.status().watches] == ["this node"]
        assert cluster.node_annotations == {}
        changes = {"labels": {LABEL: None}, "annotations": {"example.com/policy": "none"}}
        server.objects.patch("nodes", NODE, {"metadata": changes})
        nobody: Any = None
        cluster.start_writers(nobody, nobody, nobody, Revision(), lambda _: ())
        assert (cluster.node_publisher, cluster.pod_publisher, cluster.reschedule) == (
            None,
            None,
            None,
        )
        assert cluster.node_watch is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            await cluster.node_watch.node.newer_than(cluster.node_watch.node.version)
        assert cluster.config_label == ""
        assert cluster.node_annotations == {"example.com/policy": "none"}
    assert server.writes == []


async def test_without_families_and_without_named_configurations_nobody_is_asked(
    tmp_path: Path, server: ApiServer
) -> None:
    """A node with nvidia.com/gpu alone needs no API server."""
    plain = msgspec.structs.replace(await settings(tmp_path, server), named_config=NamedConfig())
    async with connected(plain) as cluster:
        assert (cluster.connected, cluster.config_label) == (False, None)
        assert cluster.node_annotations == {}


async def test_the_label_outlives_a_restart_during_an_outage(
    tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label is remembered with the configuration that it chose,
    and the time already waited counts.
    """
    quick = await settings(tmp_path, server)
    named = NamedConfiguration(load({}, {}).sources, quick, Journal())
    await asyncio.to_thread((tmp_path / "four").write_text, "version: v1\n")
    async with connected(quick, named=named) as cluster:
        named.note_in_force(await asyncio.to_thread(load_sources, await named.sources()))
        await cluster.remember()
    await server.down()
    began = time.monotonic()
    monkeypatch.setattr(api_server, "START_WAIT_SECONDS", FOR_EVER_SECONDS)
    async with connected(quick, waited_seconds=FOR_EVER_SECONDS) as cluster:
        assert time.monotonic() - began < PATIENCE_SECONDS
        assert cluster.remembered is not None
        assert (cluster.remembered.config_label, cluster.remembered.named_config) == (
            "four",
            "four",
        )
        assert cluster.remembered.named_text == "version: v1\n"


async def test_defaults_for_pods_outlive_a_restart_during_an_outage(
    tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vgpu-manager:D34``: the node's compute policy is what the Node said when it was last read,
    never what an empty cache has. Before it was ever read, nothing starts.
    """
    quick = await settings(tmp_path, server)
    policy = Keys().compute_policy
    said = {policy: "balance", "example.com/else": "x", Keys().device_policy: "x" * 10_000}
    server.objects.patch("nodes", NODE, {"metadata": {"annotations": said}})
    async with connected(quick) as cluster:
        assert cluster.node_annotations == said
        await cluster.remember()
    await server.down()
    async with connected(quick, waited_seconds=FOR_EVER_SECONDS) as cluster:
        assert cluster.node_annotations == {policy: "balance"}
    await asyncio.to_thread((tmp_path / "state" / "remembered.json").unlink)
    monkeypatch.setattr(api_server, "START_WAIT_SECONDS", 0.1)
    async with connected(quick, waited_seconds=FOR_EVER_SECONDS) as cluster:
        assert cluster.node_annotations == {}
        assert "Node object has not been read yet" in cluster.waiting_for


async def test_what_could_not_be_remembered_is_remembered_once_the_disk_takes_it(
    tmp_path: Path, server: ApiServer
) -> None:
    """The Node may say nothing new for weeks after the disk was full,
    and then comes an outage with a restart.
    """
    quick, state = await settings(tmp_path, server), tmp_path / "state"
    await asyncio.to_thread(state.write_text, "")  # something is in the place of the directory
    async with connected(quick) as cluster:
        following = asyncio.ensure_future(cluster.follow(_nothing))
        try:
            await asyncio.sleep(QUICK[constants.API_BACKOFF_MAX])
            await asyncio.to_thread(state.unlink)
            await asyncio.to_thread(_until_there, state / "remembered.json")
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _nothing() -> None:
    """There are no families here that would need news."""


def _until_there(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
