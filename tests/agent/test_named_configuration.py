"""The named configuration of a node: which one at start, with and without an API server,
and what happens while it runs.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import constants
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.agent import api_server
from vgpu_agent.agent.named_configuration import (
    InForce,
    NamedConfiguration,
    keys_in,
    with_named_configuration,
)
from vgpu_agent.agent.reload import Reload
from vgpu_agent.agent.remembered import Remembered, RememberedFile
from vgpu_agent.config.load import Loaded, load, load_sources
from vgpu_agent.config.settings import Settings
from vgpu_agent.config.watch import changes
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.nvidia.settings import Sharing
from vgpu_agent.sim.api.server import ApiServer

NODE, LABEL = "node-a", "nvidia.com/device-plugin.config"


@pytest.fixture(autouse=True)
def _kubeconfig_is_read_in_a_loop_of_its_own(loop_may_block: None) -> None:
    """kubernetes-asyncio reads the kubeconfig in a coroutine;
    the agent runs that in a loop of its own, in a thread.
    """


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no server that does not answer."""
    constants.use(
        monkeypatch, {constants.API_START_WAIT: 60.0, constants.API_REQUEST_TIMEOUT: 60.0}
    )


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server that knows the node, without a label."""
    async with ApiServer() as running:
        running.objects.create("nodes", {"metadata": {"name": NODE}})
        yield running


@pytest.fixture
def named_documents(tmp_path: Path) -> Path:
    """Two configurations, neither of them a default."""
    folder = tmp_path / "available-configs"
    folder.mkdir()
    for name, replicas in {"four": 4, "two": 2}.items():
        write(folder / name, replicas)
    return folder


def write(file: Path, replicas: int) -> None:
    """A configuration of NVIDIA's plugin."""
    file.write_text(
        "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: "
        f"{replicas}}}]}}}}\n"
    )


def label(server: ApiServer, value: str | None) -> None:
    """Put the label onto the node, or take it off."""
    server.objects.patch("nodes", NODE, {"metadata": {"labels": {LABEL: value}}})


async def own(
    tmp_path: Path,
    server: ApiServer | None,
    *,
    more: str = "",
    cluster: str = "{}",
) -> Loaded:
    """The agent's own configuration, which names the directory."""
    lines = [
        "version: v1",
        f"nodeName: {NODE}",
        f"stateDirectory: {tmp_path}/state",
        f"namedConfig: {{directory: {tmp_path}/available-configs{more}}}",
        f"cluster: {cluster}",
    ]
    if server is not None:
        lines.append(
            f"kubeconfig: {await asyncio.to_thread(server.kubeconfig, tmp_path / 'kubeconfig')}"
        )
    file = tmp_path / "config.yaml"
    await asyncio.to_thread(file.write_text, "\n".join(lines))
    return await asyncio.to_thread(load, {"--config": str(file)}, {})


async def begun(
    tmp_path: Path, server: ApiServer | None, *, more: str = ""
) -> tuple[Loaded, NamedConfiguration]:
    """Load the settings and the named configuration, as `composition.run` does first."""
    loaded, named = await with_named_configuration(await own(tmp_path, server, more=more))
    assert named is not None
    return loaded, named


def replicas(loaded: Loaded) -> int:
    """Return the replicas of the one shared resource; 1 when none is shared."""
    shared = loaded.settings.section(Sharing).time_slicing.resources
    return shared[0].replicas if shared else 1


def journalled(named: NamedConfiguration, event: str) -> list[Mapping[str, Any]]:
    """The facts of the journal's entries of that name."""
    return [entry.facts for entry in named.journal.entries if entry.event == event]


async def remember(tmp_path: Path, **facts: Any) -> None:
    """Write the memory that an earlier agent has left."""
    await RememberedFile(str(tmp_path / "state")).write(Remembered(NODE, **facts))


async def test_without_a_directory_nothing_is_asked_and_nothing_chosen() -> None:
    """The usual node has no named configurations."""
    loaded = load({}, {})
    assert await with_named_configuration(loaded) == (loaded, None)


async def test_the_label_decides_what_the_agent_starts_with(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """Before anything is built, so that what needs a restart is in force, too."""
    label(server, "four")
    loaded, named = await begun(tmp_path, server)
    assert replicas(loaded) == 4
    assert (named.choice.key, named.problem) == ("four", "")
    assert journalled(named, "config.named") == [
        {"name": "four", "reason": f"label {LABEL}=four", "directory": str(named_documents)}
    ]


async def test_without_the_label_default_and_fallbacks_decide(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """Two configurations have no default between them,
    and NVIDIA's third strategy chooses none at all.
    """
    loaded, named = await begun(tmp_path, server)
    assert (replicas(loaded), named.choice.key, named.problem) == (1, "", "")
    loaded, named = await begun(tmp_path, server, more=", default: two")
    assert (replicas(loaded), named.choice.key) == (2, "two")


async def test_a_label_that_is_switched_is_followed(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """`reload` asks before each look at the files."""
    label(server, "four")
    _, named = await begun(tmp_path, server)
    heard = ["two", ""]
    named.read_label_by(lambda: heard[0])
    assert (await named.sources()).flags["--config-file"] == str(named_documents / "two")
    heard.pop(0)
    assert (await named.sources()).flags["--config-file"] == ""


async def test_a_label_that_names_nothing_changes_nothing_and_says_so_once(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """The last good configuration stays until the label or the directory is put right."""
    label(server, "four")
    _, named = await begun(tmp_path, server)
    named.read_label_by(lambda: "typo")
    for _ in range(2):
        assert (await named.sources()).flags["--config-file"] == str(named_documents / "four")
    assert named.problem.startswith(f'label {LABEL} of this node names the configuration "typo"')
    assert [facts["in_force"] for facts in journalled(named, "config.named_refused")] == ["four"]
    write(named_documents / "typo", 8)
    assert (await named.sources()).flags["--config-file"] == str(named_documents / "typo")
    assert named.problem == ""


async def test_what_is_in_force_is_what_could_be_applied(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """`reload` reports it. A restart falls back upon it,
    and reports the refused choice beside the label's problem.
    """

    async def apply(settings: Settings) -> None:
        applied.append(settings)

    applied: list[Settings] = []
    label(server, "four")
    loaded, named = await begun(tmp_path, server)
    reload = Reload(loaded, apply=apply, journal=named.journal, named_configuration=named)
    named.read_label_by(lambda: "two")
    await reload.take(await asyncio.to_thread(load_sources, await named.sources()))
    assert len(applied) == 1
    assert named.in_force is not None
    assert (named.in_force.key, named.report["name"]) == ("two", "two")
    await reload.take(ConfigError(["available-configs/four:1: no"]))
    named.read_label_by(lambda: "typo")
    await named.sources()
    assert named.in_force.key == "two"
    assert reload.problems[0] == "available-configs/four:1: no"
    assert '"typo"' in reload.problems[1]


async def test_a_directory_that_vanishes_changes_nothing(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """A mount that is taken away is no request for another configuration."""
    label(server, "four")
    _, named = await begun(tmp_path, server)
    await asyncio.to_thread(named_documents.rename, tmp_path / "elsewhere")
    assert (await named.sources()).flags["--config-file"] == str(named_documents / "four")
    assert "namedConfig.directory" in named.problem


async def test_an_agent_that_starts_with_a_wrong_label_goes_on_as_the_one_before(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """A restart is no reason to offer pods something else."""
    label(server, "typo")
    await remember(tmp_path, config_label="typo", named_config="four")
    loaded, named = await begun(tmp_path, server)
    assert (replicas(loaded), named.choice.key) == (4, "four")
    assert '"typo"' in named.problem


@pytest.mark.parametrize("before", [None, "gone"])
async def test_a_wrong_label_on_a_node_without_a_past_counts_as_none(
    tmp_path: Path, named_documents: Path, server: ApiServer, before: str | None
) -> None:
    """NVIDIA's README says so. Its program ends with an error, and the node has no plugin."""
    label(server, "typo")
    await remember(tmp_path, named_config=before)
    loaded, named = await begun(tmp_path, server, more=", default: two")
    assert (replicas(loaded), named.choice.key) == (2, "two")
    assert '"typo"' in named.problem


async def test_without_an_answer_the_start_goes_by_what_was_read_before(
    tmp_path: Path, named_documents: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waits no longer than five seconds,
    which NVIDIA's init container does (its issue 1540).
    """
    await remember(tmp_path, config_label="four")
    monkeypatch.setattr(api_server, "START_WAIT_SECONDS", 0.3)
    settings = await own(tmp_path, server)
    await server.down()
    loaded, named = await asyncio.wait_for(with_named_configuration(settings), PATIENCE_SECONDS)
    assert named is not None
    assert (replicas(loaded), named.problem) == (4, "")


async def test_a_server_that_hangs_is_not_waited_for(
    tmp_path: Path, named_documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and never answers."""
    monkeypatch.setattr(api_server, "START_WAIT_SECONDS", 0.3)
    settings = await own(tmp_path, None)
    async with ApiServer() as server:
        kubeconfig = await asyncio.to_thread(server.kubeconfig, tmp_path / "kubeconfig")
    with socket.create_server(("127.0.0.1", 0)) as hung:  # only the kernel takes the connection
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        await asyncio.to_thread(
            kubeconfig.write_text, kubeconfig.read_text().replace(server.url, url)
        )
        settings = await asyncio.to_thread(
            load, {**settings.sources.flags, "--kubeconfig": str(kubeconfig)}, {}
        )
        loaded, named = await asyncio.wait_for(with_named_configuration(settings), PATIENCE_SECONDS)
    assert named is not None
    assert replicas(loaded) == 1
    assert 0.3 <= named.waited_seconds < PATIENCE_SECONDS
    assert named.problem == (
        f"label {LABEL} of this node has not been read: no answer from the API server in 0.3 s; "
        "until then it counts as not set"
    )
    named.read_label_by(lambda: "four")
    assert (await named.sources()).flags["--config-file"] == str(named_documents / "four")
    assert named.problem == ""


async def test_who_wants_no_api_server_has_default_and_fallbacks(
    tmp_path: Path, named_documents: Path
) -> None:
    """With cluster.enabled: never there is no label, and nothing to complain of."""
    loaded, named = await with_named_configuration(
        await own(tmp_path, None, more=", default: two", cluster="{enabled: never}")
    )
    assert named is not None
    assert (replicas(loaded), named.problem) == (2, "")


async def test_a_named_configuration_that_is_wrong_ends_a_start_as_any_other_does(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """The sentence has the file in it."""
    label(server, "four")
    await asyncio.to_thread((named_documents / "four").write_text, "version: v2\n")
    with pytest.raises(ConfigError, match="available-configs/four"):
        await begun(tmp_path, server)


async def test_a_wrong_one_does_not_stop_a_restart_that_knows_the_good_one(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """It runs with the text from before, and the first look at the files says what is wrong
    with the new one.
    """
    label(server, "four")
    good = await asyncio.to_thread((named_documents / "four").read_text)
    await remember(tmp_path, named_config="four", named_text=good)
    await asyncio.to_thread((named_documents / "four").write_text, "version: v2\n")
    loaded, named = await begun(tmp_path, server)
    assert replicas(loaded) == 4
    outcome = await anext(changes(loaded, interval_seconds=0.01, sources=named.sources))
    assert isinstance(outcome, ConfigError)
    assert "available-configs/four" in str(outcome)
    assert [facts["problems"] for facts in journalled(named, "config.refused")] == [
        outcome.problems
    ]
    assert named.in_force == InForce("four", good)


async def test_a_wrong_one_under_a_new_name_leaves_the_good_one_of_before_too(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """The label was changed to it while an agent ran, which kept what it had.
    Its restart must not end the node's service.
    """
    label(server, "four")
    two = await asyncio.to_thread((named_documents / "two").read_text)
    await remember(tmp_path, named_config="two", named_text=two)
    await asyncio.to_thread((named_documents / "four").write_text, "version: v2\n")
    loaded, named = await begun(tmp_path, server)
    assert replicas(loaded) == 2
    assert (named.in_force, named.report["name"], named.report["in_force"]) == (
        InForce("two", two),
        "four",
        "two",
    )
    outcome = await anext(changes(loaded, interval_seconds=0.01, sources=named.sources))
    assert isinstance(outcome, ConfigError)
    write(named_documents / "four", 4)
    mended = await asyncio.to_thread(load_sources, await named.sources())
    assert replicas(mended) == 4


async def test_a_wrong_one_where_none_was_in_force_leaves_it_at_none(
    tmp_path: Path, named_documents: Path, server: ApiServer
) -> None:
    """This is also what runs on the node."""
    label(server, "four")
    await remember(tmp_path, named_config="", named_text="")
    await asyncio.to_thread((named_documents / "four").write_text, "version: v2\n")
    loaded, named = await begun(tmp_path, server)
    assert loaded.settings.section(Sharing).time_slicing.resources == ()
    assert named.in_force == InForce("", "")


async def test_a_directory_that_is_missing_ends_a_start(tmp_path: Path, server: ApiServer) -> None:
    """Nothing says that the node would have been meant to do without."""
    with pytest.raises(ConfigError, match=r"namedConfig\.directory"):
        await begun(tmp_path, server)


def test_keys_are_the_files_of_a_mounted_config_map(tmp_path: Path) -> None:
    """The kubelet mounts links into ``..data``, itself a link.
    Neither that nor a directory is a key.
    """
    version = tmp_path / "..2026"
    version.mkdir()
    (version / "a.yaml").write_text("version: v1\n")
    os.symlink("..2026", tmp_path / "..data")
    os.symlink("..data/a.yaml", tmp_path / "a.yaml")
    (tmp_path / "folder").mkdir()
    os.symlink("..data/gone", tmp_path / "gone")
    assert keys_in(str(tmp_path)) == {"a.yaml"}


def test_a_directory_that_is_not_there_is_told_with_its_setting(tmp_path: Path) -> None:
    """The usual reason is a mount that was forgotten."""
    with pytest.raises(
        ConfigError, match=r"namedConfig\.directory: .*/nowhere cannot be read: No such file"
    ):
        keys_in(str(tmp_path / "nowhere"))
