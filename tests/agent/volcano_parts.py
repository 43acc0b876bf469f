"""The parts of an agent that serves volcano-vgpu, over the simulated API server and without a
process, for tests of the wiring.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from tests import constants
from tests.golden import golden_inventory
from tests.patience import PATIENCE_SECONDS
from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.agent.api_server import ClusterAccess
from vgpu_agent.agent.offers.families import FamiliesInForce
from vgpu_agent.agent.offers.servers import Offering
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.identification import KubeletEvidence
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config import settings as schema
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Inventory
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.status import KubeletStatus

NODE = "node-a"
QUICK = {
    constants.API_START_WAIT: PATIENCE_SECONDS,
    constants.API_BACKOFF_MIN: 0.05,
    constants.API_BACKOFF_MAX: 0.2,
    constants.API_REQUEST_TIMEOUT: PATIENCE_SECONDS,
}


async def volcano_settings(
    folder: Path, server: ApiServer | None, **changes: object
) -> schema.Settings:
    """Settings with volcano-vgpu alone, without isolation, and quick about everything."""
    kubeconfig = (
        str(await asyncio.to_thread(server.kubeconfig, folder / "kubeconfig")) if server else ""
    )
    settings = settings_of(
        node_name=NODE,
        kubeconfig=kubeconfig,
        state_directory=str(folder / "state"),
        families=switches(nvidia=False, volcano_vgpu=True),
        volcano_vgpu=VolcanoVgpu(isolation="none", node_config_file=str(folder / "config.json")),
        kubelet=schema.Kubelet(directory=str(folder / "kubelet")),
        gpu=schema.Gpu(dev_root=str(folder)),
    )
    return msgspec.structs.replace(settings, **changes)


class Wired:
    """The parts, as `composition` puts them together."""

    def __init__(
        self, settings: schema.Settings, supervisor: Supervisor, inventory: Inventory | None = None
    ) -> None:
        self.settings, self.journal, self.ledger, self.refusals = (
            settings,
            Journal(),
            Ledger(),
            Refusals(),
        )
        self.inventory = inventory or golden_inventory()
        self.cluster = ClusterAccess(settings, self.journal, supervisor)
        self.directory = GrantDirectory(
            str(Path(settings.state_directory).parent / "cdi"),
            self.journal,
            kept_directory=f"{settings.state_directory}/grants",
        )
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=Families(),
                inventory=lambda: self.inventory,
                journal=self.journal,
                node=NODE,
                pods=self.cluster.pod_cache,
                read_records=self._nothing,
                fetch_pod=self.cluster.fetch_pod,
                carrier=self.directory,
                refusals=self.refusals,
                settings=settings.binding,
            )
        )
        kubelet = settings.kubelet
        self.offering = Offering(
            ledger=self.ledger,
            allocator=self.allocator,
            directory=DirectoryWatch(
                kubelet.device_plugin_directory,
                poll_seconds=5,
                journal=self.journal,
                status=KubeletStatus(),
            ),
            supervisor=supervisor,
            journal=self.journal,
            error_after_seconds=30,
        )
        self.families = FamiliesInForce(
            settings,
            origins={},
            allocator=self.allocator,
            offering=self.offering,
            cluster=self.cluster,
            inventory=lambda: self.inventory,
            journal=self.journal,
        )

    @staticmethod
    async def _nothing(
        resource: str, ids: Sequence[str], *, whole: bool = False
    ) -> KubeletEvidence:
        return KubeletEvidence((), ())

    @property
    def offered(self) -> dict[str, int]:
        """Resource → number of ids, as the ledger offers them."""
        return {resource.name: len(resource.ids) for resource in self.ledger.resources}

    def journalled(self, event: str) -> list[dict[str, object]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == event]


@contextlib.asynccontextmanager
async def wired(
    settings: schema.Settings,
    inventory: Inventory | None = None,
    others: Mapping[str, float] = QUICK,
) -> AsyncIterator[Wired]:
    """The parts, connected, with other values of constants; closed in the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        constants.use(monkeypatch, others)
        async with _connected(settings, inventory) as parts:
            yield parts


@contextlib.asynccontextmanager
async def _connected(
    settings: schema.Settings, inventory: Inventory | None
) -> AsyncIterator[Wired]:
    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=0.2) as supervisor:
        parts = Wired(settings, supervisor, inventory)
        await parts.cluster.connect()
        try:
            yield parts
        finally:
            await parts.offering.stop()
            await parts.cluster.close()
