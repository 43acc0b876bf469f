"""A simulated node that the page can show in full: shares of memory and compute, what containers
use of them, and a pod that cannot start.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.component.volcano import FACTOR, VolcanoStage, asks
from tests.regions import Device, Slot, v1
from vgpu_agent.sim.cdi_reader import Received
from vgpu_agent.sim.state import ProcessUse

_MIB = 1 << 20


class Share(NamedTuple):
    """A pod of one container, what it may use of one GPU, and what it uses."""

    pod: str
    gpu: int
    memory_mib: int
    cores_percent: int
    used_mib: int = 0
    used_percent: int = 0


async def serve(stage: VolcanoStage, shares: Sequence[Share]) -> None:
    """Start these pods, let them use what they use, and wait until the agent has measured that."""
    for share in shares:
        uuid = stage.gpus.uuids[share.gpu]
        came = await stage.serve(
            share.pod,
            asks(1, share.memory_mib // FACTOR, share.cores_percent),
            annotations={"volcano.sh/vgpu-use-gpuuuid": uuid},
        )
        if share.used_mib:
            await asyncio.to_thread(_use, came, uuid, share)
            use = ProcessUse(memory_mib=share.used_mib, sm_percent=share.used_percent)
            await asyncio.to_thread(stage.gpus.add_process, share.gpu, 1, use)

    def is_measured(found: dict[str, Any]) -> bool:
        for gpu in found["gpus"]:
            on_it = [share for share in shares if share.gpu == gpu["index"]]
            usage = gpu["usage"] or {}
            if (usage.get("memory_used_mib") or 0) < sum(share.used_mib for share in on_it):
                return False
            if (usage.get("utilisation_percent") or 0) < sum(each.used_percent for each in on_it):
                return False
        return True

    await stage.agent.until("/debug/devices", is_measured)


def _use(came: Received, uuid: str, share: Share) -> None:
    """Enter one process into the container's region in place, as the library does."""
    content = v1(
        [Device(uuid)], [Slot(used={0: share.used_mib * _MIB}, sm={0: share.used_percent})]
    )
    with Path(came.mounts["/tmp/cudevshr.cache"][0]).open("r+b") as file:
        # the first slot, the number of slots, and the time of the last kernel
        for offset, length in ((1_856, 1_960), (2_008_896, 4)):
            file.seek(offset)
            file.write(content[offset : offset + length])
        file.seek(2_008_912)
        file.write(struct.pack("<Q", int(Path(file.name).stat().st_mtime)))


async def refuse(stage: VolcanoStage, pod: str, memory_mib: int) -> None:
    """Create a pod that asks for more than any GPU has left, past the scheduler that knows."""
    stage.cluster.create_pod(pod, asks(1, memory_mib // FACTOR), scheduler="default-scheduler")
    await stage.agent.until(
        "/debug/allocations",
        lambda found: any(each["pod"].endswith(pod) for each in found["refusals"]),
    )
