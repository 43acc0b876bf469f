"""Named configurations on a real node: the label of the Node is switched, and the ConfigMap's
content changes, while pods run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import constants
from tests.real_node.agents import (
    QUICK,
    QUICK_CONSTANTS,
    NodeAgent,
    kubelets_view,
    wait_allocatable,
)
from tests.real_node.nvidia import containers_of, gpu_pod, running, wait_running
from tests.real_node.rig import Rig

LABEL = "nvidia.com/device-plugin.config"
CONFIG = QUICK + (
    "namedConfig: {directory: FOLDER/available-configs, default: two}\n"
    "stateDirectory: FOLDER/state\n"
)
CONSTANTS = QUICK_CONSTANTS | {constants.API_BACKOFF_MIN: 0.2, constants.API_BACKOFF_MAX: 1}
FAILED = "vgpu_agent_config_reload_failed"


class MountedConfigMap:
    """A ConfigMap with configurations of NVIDIA's plugin, as kubelet mounts it:
    links into ``..data``, which is swapped.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._version = folder, 0

    def hold(self, replicas: Mapping[str, int]) -> None:
        """These keys from now on, each with a configuration of so many replicas of each GPU;
        0 is one that is wrong.
        """
        self._version += 1
        content = self._folder / f"..{self._version}"
        content.mkdir()
        for key, number in replicas.items():
            shared = f"timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {number}}}]}}"
            (content / key).write_text(
                f"version: v1\nflags: {{migStrategy: none}}\nsharing: {{{shared}}}\n"
            )
            if not (self._folder / key).is_symlink():
                os.symlink(f"..data/{key}", self._folder / key)
        os.symlink(content.name, self._folder / "..data_tmp")
        os.replace(self._folder / "..data_tmp", self._folder / "..data")


@pytest.fixture
def agent(rig: Rig) -> Iterator[NodeAgent]:
    """An agent in the cluster that has not been started, on a node without the label."""
    yield NodeAgent(rig, CONFIG, gpus=2, in_cluster=True, constants=CONSTANTS)
    label(rig, None)


def label(rig: Rig, value: str | None) -> None:
    """Put the label onto the Node, or take it off."""
    patch = {"metadata": {"labels": {LABEL: value}}}
    rig.api.patch(
        f"/api/v1/nodes/{rig.node_name()}", patch, content_type="application/merge-patch+json"
    )


def test_the_label_is_switched_while_pods_run(rig: Rig, agent: NodeAgent) -> None:
    """Offers follow label and content. Pods keep their replicas,
    also those that the new configuration does not have.
    """
    configurations = MountedConfigMap(agent.folder / "available-configs")
    configurations.hold({"four": 4, "two": 2})
    label(rig, "four")
    with running(agent):
        wait_allocatable(rig, 8)
        names = [f"stays-{number}" for number in range(5)]
        for name in names:
            rig.create_pod(gpu_pod(name))
        wait_running(rig, names)
        before, containers = agent.knows(5), containers_of(rig, names)

        label(rig, "two")
        wait_allocatable(rig, 4)
        assert agent.get("/debug/config")["named"]["reason"] == f"label {LABEL}=two"
        # the same key, other content: NVIDIA's does not notice
        configurations.hold({"four": 4, "two": 5})
        wait_allocatable(rig, 10)
        rig.create_pod(gpu_pod("fresh"))
        wait_running(rig, ["fresh"])
        view = kubelets_view(rig)
        assert {name: view[name] for name in names} == before
        assert not set(view["fresh"]) & {id_ for ids in before.values() for id_ in ids}

        label(rig, "typo")
        agent.until("/debug/config", lambda answer: '"typo"' in answer["problem"])
        assert agent.run(agent.process.metric(FAILED)) == 1
        label(rig, "four")
        wait_allocatable(rig, 8)
        agent.until("/debug/config", lambda answer: not answer["problem"])
        configurations.hold({"four": 0, "two": 2})
        agent.until("/debug/config", lambda answer: "available-configs/four" in answer["problem"])
        label(rig, None)
        wait_allocatable(rig, 4)
        assert agent.get("/debug/config")["named"]["reason"] == "namedConfig.default"
        assert containers_of(rig, names) == containers
