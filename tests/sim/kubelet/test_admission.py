"""Times at which the kubelet stand-in writes its checkpoint: those of the real one.

See pkg/kubelet/cm/devicemanager, `allocateContainerResources`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from vgpu_agent.sim.kubelet.endpoint import CallFailedError, Endpoint
from vgpu_agent.sim.kubelet.faults import AdmissionError
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet
from vgpu_agent.sim.kubelet.records import CHECKPOINT, ResourceDevices
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages


class Plugin:
    """An endpoint without a connection."""

    options = None

    def __init__(self, written: Path, *, refuses: bool = False) -> None:
        self._written, self._refuses = written, refuses
        self.entries_before: list[int] = []

    async def allocate(self, ids: Sequence[str]) -> messages.ContainerAllocateResponse:
        """Look what the checkpoint knows, and answer."""
        assert ids
        self.entries_before.append(len(await asyncio.to_thread(_entries, self._written)))
        if self._refuses:
            raise CallFailedError("no")
        return messages.ContainerAllocateResponse()


def _entries(checkpoint: Path) -> list[dict[str, Any]]:
    return (
        (json.loads(checkpoint.read_text())["Data"]["PodDeviceEntries"] or [])
        if checkpoint.exists()
        else []
    )


def _kubelet(
    tmp_path: Path, *, refuses: bool = False
) -> tuple[SimulatedKubelet, list[Plugin], Path]:
    kubelet = SimulatedKubelet(tmp_path)
    kubelet.plugins.mkdir(parents=True)
    checkpoint = kubelet.plugins / CHECKPOINT
    plugins = [Plugin(checkpoint), Plugin(checkpoint, refuses=refuses)]
    for name, plugin in zip(("r/a", "r/b"), plugins, strict=True):
        kubelet._endpoints[name] = cast("Endpoint", plugin)  # it has of one what an admission needs
        kubelet._records.devices[name] = ResourceDevices(
            {f"{name}-{each}": None for each in range(4)}
        )
    return kubelet, plugins, checkpoint


async def test_the_checkpoint_is_written_once_for_all_resources_of_a_container(
    tmp_path: Path,
) -> None:
    """While the second plugin is asked, it does not know yet what the first has answered.
    The next container finds both.
    """
    kubelet, plugins, checkpoint = await asyncio.to_thread(_kubelet, tmp_path)
    await kubelet.admit(
        "p", [Container("one", {"r/a": 1, "r/b": 1}), Container("two", {"r/a": 1, "r/b": 1})]
    )
    assert [plugin.entries_before for plugin in plugins] == [[0, 2], [0, 2]]
    assert sorted(
        (entry["ContainerName"], entry["ResourceName"])
        for entry in await asyncio.to_thread(_entries, checkpoint)
    ) == [(container, resource) for container in ("one", "two") for resource in ("r/a", "r/b")]


async def test_a_container_that_gets_not_all_is_not_written_down(tmp_path: Path) -> None:
    """Its earlier resources are only in memory, until the next clean-up."""
    kubelet, _, checkpoint = await asyncio.to_thread(_kubelet, tmp_path, refuses=True)
    with pytest.raises(AdmissionError):
        await kubelet.admit("p", [Container("one", {"r/a": 1, "r/b": 1})])
    assert await asyncio.to_thread(_entries, checkpoint) == []
