"""The CDI side of an agent on a simulated node, with a stand-in for NVIDIA's tool, for tests of
what is offered without a name.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from tests.golden import U0, U1, golden_inventory
from tests.patience import PATIENCE_SECONDS
from tests.replacing import replace_text
from tests.settings import settings as settings_of
from vgpu_agent.cdi.controller import CdiController
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.binding import Binding
from vgpu_agent.config.device_answers import Plugin
from vgpu_agent.config.settings import Gpu as GpuSettings
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, Inventory, Resource
from vgpu_agent.sim.nvidia_ctk import COMMAND, StandInCtk
from vgpu_agent.sim.state import SimulatedNode

VENDOR = "k8s.device-plugin.nvidia.com"
GPUS = Resource("nvidia.com/gpu", "nvidia", tuple(DeviceId(uuid, uuid, 0) for uuid in (U0, U1)))
SHARES = Resource("volcano.sh/vgpu-number", "volcano-vgpu", GPUS.ids, decided_by=Decider.POD)
BY_NAME = Plugin(device_list_strategy=("cdi-cri",))


class Side:
    """A `CdiController` on a simulated node, and what it meets."""

    def __init__(
        self,
        folder: Path,
        supervisor: Supervisor,
        *,
        late: bool = True,
        node: SimulatedNode | None = None,
        **sections: Any,
    ) -> None:
        self.node = node or SimulatedNode.create(
            folder / "gpus", model="A100-SXM4-40GB", gpus=2, uuids=[U0, U1]
        )
        self.tool = StandInCtk(self.node.directory)
        self.cdi = folder / "cdi"
        self.settings = msgspec.structs.replace(
            settings_of(
                simulate=str(self.node.directory),
                binding=Binding(cdi_directory=str(self.cdi)),
                gpu=GpuSettings(driver_root=str(self.node.directory)),
                plugin=BY_NAME,
            ),
            **sections,
        )
        self.journal, self.ledger = Journal(), Ledger()
        self.side = CdiController(
            self.settings,
            ledger=self.ledger,
            journal=self.journal,
            supervisor=supervisor,
            is_late=lambda: late,
            simulated_tool=lambda: COMMAND,
        )

    async def begin(self, inventory: Inventory | None = None) -> None:
        """The start of an agent with these GPUs."""
        inventory = inventory or golden_inventory()
        self.ledger.observe(inventory)
        self.ledger.offer([GPUS])
        await self.side.begin(self.settings, inventory)

    @property
    def healthy(self) -> list[str]:
        """The ids that kubelet may give out."""
        return [listed.id.id for listed in self.ledger.listing(GPUS.name) if listed.healthy]

    def withheld(self, resource: Resource = GPUS) -> str:
        """Return the reason why a resource is not offered; empty when it is."""
        found = self.side.withheld(resource)
        return found.reason if found else ""

    def is_temporary(self, resource: Resource = GPUS) -> bool:
        """Tell whether the reason why a resource is not offered ends by itself."""
        found = self.side.withheld(resource)
        return found is not None and found.temporary

    async def until_offered(self) -> None:
        """Wait, some seconds at most."""
        task = asyncio.ensure_future(self.side.follow(nothing))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    if not self.withheld() and len(self.healthy) == 2:
                        return
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()


async def nothing() -> None:
    """Do nothing: there is no reader to inform."""


def write_toolkits_spec(folder: Path, *names: str) -> None:
    """Write the spec that NVIDIA's toolkit would write for devices of these names."""
    folder.mkdir(exist_ok=True)
    devices = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in names]
    replace_text(
        folder / "nvidia.json",
        json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}),
    )
