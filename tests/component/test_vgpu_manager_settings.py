"""Settings of vgpu-manager that reach the cluster: a domain of the operator's, and the node
configuration that changes while the agent runs. With the agent's real process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.vgpu_manager import ON, U0, U1, ManagerStage, manager_stage
from tests.component.volcano import NODE
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.families.vgpu_manager.keys import DRIVER_VERSION_LABEL, Keys

KEYS = Keys("gpu.example.com")
REGISTER = "nvidia.com/node-device-register"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


class _InDomain(ManagerStage):
    """The same stage with all keys in `KEYS`."""

    @property
    def slots(self) -> int:
        status = self.cluster.node_object()["status"]
        return int((status.get("allocatable") or {}).get(KEYS.number, 0))

    def bind(self, name: str, claims: str, **annotations: str) -> None:
        written = {
            KEYS.pre_allocated: claims,
            KEYS.real_allocated: "",
            KEYS.predicate_node: NODE,
            KEYS.predicate_time: "1787331600123456789",
        }
        labels = {KEYS.phase: "allocating", KEYS.metrics_node: NODE}
        metadata = {"annotations": written | annotations, "labels": labels}
        objects = self.cluster.objects
        objects.patch("pods", name, {"metadata": metadata}, "default")
        uid = self.cluster.pod(name)["metadata"]["uid"]
        objects.bind(name, "default", {"metadata": {"uid": uid}, "target": {"name": NODE}})


async def test_every_key_is_in_the_domain_of_the_operator(folder: Path) -> None:
    """vgpu-manager §1.2: resources, the Node's annotations and the pod's, read and written; the
    labels with versions stay.
    """
    stage = await asyncio.to_thread(lambda: _InDomain(folder))
    async with stage.cluster:
        try:
            await stage.start_agent(f"{ON}vgpuManager: {{domain: {KEYS.domain}}}\n")
            claim = f"main[1_{U1}_10_1024]"
            limits = {KEYS.number: 1, KEYS.memory: 1024, KEYS.cores: 10}
            came = await stage.serve("gpu-pod", limits, claim)
            assert came.environment["NVIDIA_VISIBLE_DEVICES"] == U1
            await stage.cluster.until(
                lambda: stage.labels("gpu-pod").get(KEYS.phase) == "succeed", "gpu-pod succeed"
            )
            written = stage.cluster.annotations("gpu-pod")
            assert written[KEYS.real_allocated] == claim
            assert {key.partition("/")[0] for key in written} == {KEYS.domain}
            node = stage.cluster.node_object()["metadata"]
            assert len(json.loads(node["annotations"][KEYS.node_register])) == 2
            assert not any(key.startswith("nvidia.com/") for key in node["annotations"])
            assert DRIVER_VERSION_LABEL in node["labels"]
        finally:
            if hasattr(stage, "agent"):
                with contextlib.suppress(SimulationError):
                    await stage.agent.terminate()


def _register(stage: ManagerStage) -> list[dict[str, Any]]:
    """The GPUs as the Node's annotation has them."""
    annotations = stage.cluster.node_object()["metadata"].get("annotations") or {}
    found: list[dict[str, Any]] = json.loads(annotations.get(REGISTER, "[]"))
    return found


async def test_the_node_configuration_is_followed_and_an_error_changes_nothing(
    stage: ManagerStage,
) -> None:
    """vgpu-manager §1.6: from a file with comments to the Node's annotation and the kubelet's
    count, with the agent running on; a wrong edit is named with file and line.
    """
    file = stage.folder / "nodeConfig.json"
    replace_text(file, '[{"nodeName": "node-.", "deviceSplitCount": 4}] // all of them\n')
    await stage.start_agent(f"{ON}vgpuManager: {{nodeConfigFile: {file}}}\n")
    await stage.cluster.until(lambda: stage.slots == 8, "4 slots of each GPU")
    assert [gpu["number"] for gpu in _register(stage)] == [4, 4]

    excluded = '[\n{"nodeName": "node-a", "deviceSplitCount": 3, "excludeDevices": "0-0"}\n]'
    await asyncio.to_thread(replace_text, file, excluded)
    await stage.cluster.until(lambda: stage.slots == 3, "3 slots of one GPU")
    await stage.cluster.until(
        lambda: [gpu["healthy"] for gpu in _register(stage)] == [False, True], "an excluded GPU"
    )
    assert [gpu["uuid"] for gpu in _register(stage)] == [U0, U1]

    await asyncio.to_thread(replace_text, file, '[\n{"nodeName": "node-(", "deviceSplitCount": 9}]')
    await stage.agent.until_logged("config.file_problem")
    problems = (await stage.agent.get("/debug/config"))["file_problems"]
    assert problems == [
        f'{file}:2: [0].nodeName: "node-(" is no regular expression (RE2): "missing ): node-("',
        f"{file}: until that is corrected, its previous content stays in force",
    ]
    assert stage.slots == 3
    assert [gpu["number"] for gpu in _register(stage)] == [3, 3]

    await asyncio.to_thread(replace_text, file, "[]")
    await stage.cluster.until(lambda: stage.slots == 20, "the settings' slots again")
