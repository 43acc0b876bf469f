"""A stage for the family `vgpu-manager`: the one of Volcano's tests, with the stand-in for
vgpu-manager's scheduler and that family's checks.
"""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.component.volcano import NODE, QUICK, VolcanoStage
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cdi_reader import Received
from vgpu_agent.sim.stand_in_library import deliver_stand_in_control_library
from vgpu_agent.sim.vgpu_manager.formats import FINISHED_TIME, Claim, Claims, read_claims
from vgpu_agent.sim.vgpu_manager.ledger import Use, footprint

DOMAIN = "nvidia.com"
NUMBER, MEMORY, CORES = (f"{DOMAIN}/vgpu-{name}" for name in ("number", "memory", "cores"))
PRE, REAL, TIME, PLANNED = (
    f"{DOMAIN}/{name}"
    for name in ("pre-allocated", "real-allocated", "predicate-time", "predicate-node")
)
PHASE, METRICS_NODE = f"{DOMAIN}/assigned-phase", f"{DOMAIN}/metrics-node"
REGISTER = f"{DOMAIN}/node-device-register"
SCHEDULER = "vgpu-scheduler"
FAMILY = "families: {nvidia: false, vgpuManager: true}\n"
CARD_MIB = 23028  # of each of the simulated A10


def asks(number: int = 1, cores: int = 0, memory: int = 0) -> dict[str, int]:
    """The limits of a container; what is 0 is not mentioned."""
    named = {NUMBER: number, CORES: cores, MEMORY: memory}
    return {name: value for name, value in named.items() if value}


class ExtenderStage(VolcanoStage):
    """One node in one cluster, with two A10.

    Attributes:
        withdraws: at its end the agent takes back what it has written on the Node.
    """

    withdraws = False

    def configure(self, more: str = FAMILY, *, factor: int = 1) -> None:
        """Write the agent's configuration; ``factor`` is MiB in a unit of memory."""
        self.factor = factor
        text = QUICK.format(node=NODE, folder=self.folder)
        unit = f"vgpuManager: {{deviceMemoryFactor: {factor}}}\n" if factor != 1 else ""
        if self.withdraws:
            text += "cluster: {withdrawAtStop: true}\n"
        control = f"vgpuControl: {{hostDirectory: {self.folder}/control}}\n"
        replace_text(self.config, text + more + unit + control)

    async def start_agent(
        self, more: str = FAMILY, *, factor: int = 1, offers: Sequence[str] = ()
    ) -> AgentProcess:
        """Configure, deliver the library, start, and wait until the Node shows what is offered."""
        self.configure(more, factor=factor)
        self.deliver_library()
        await self.new_agent().start()
        await self.offered(*offers)
        return self.agent

    def deliver_library(self) -> None:
        """Put libvgpu-control.so where the operator would."""
        deliver_stand_in_control_library(self.folder / "control")

    async def offered(self, *names: str) -> None:
        """Wait until the Node shows these resources, the number of vGPUs when none is named."""
        await super().offered(*(names or (NUMBER,)))

    def create(self, name: str, *limits: dict[str, int], **more: Any) -> None:
        """Create a pod for the stand-in scheduler, a container for each of ``limits``."""
        self.cluster.create_pod(name, limits, **({"scheduler": SCHEDULER} | more))

    def labels(self, name: str) -> dict[str, str]:
        """The pod's labels."""
        return dict(self.cluster.pod(name)["metadata"].get("labels") or {})

    def claims(self, name: str) -> Claims:
        """The claims that are planned for the pod."""
        claims = read_claims(self.cluster.annotations(name).get(PRE, ""))
        assert claims is not None, self.cluster.annotations(name)
        return claims

    async def settled(self, *names: str) -> None:
        """Wait until these pods are marked as served (vgpu-manager §4.3)."""

        def served(name: str) -> bool:
            found = self.cluster.annotations(name)
            return (
                self.labels(name).get(PHASE) == "succeed"
                and found.get(REAL, "") == found.get(PRE)
                and found.get(TIME) == FINISHED_TIME
            )

        await self.cluster.until(
            lambda: all(map(served, names)), f"{', '.join(names)} to be marked as served"
        )

    def check(self) -> None:
        """Check that each container of a running pod got what was claimed for it, at each of its
        starts, and that no card is given out beyond its size.
        """
        used: dict[str, Use] = collections.defaultdict(Use)
        for item in self.cluster.objects.list("pods"):
            name = item["metadata"]["name"]
            if item["status"].get("phase") != "Running" or not self._claiming(item):
                continue
            claims = self.claims(name)
            assert list(claims) == self._claiming(item)
            for container, cards in claims.items():
                starts = self.cluster.starts(name, container)
                assert starts, f"{name} runs, and {container} has not started"
                for came in starts:
                    check_cards(came, item["metadata"]["uid"], container, cards)
            for uuid, use in footprint(item, claims).items():
                used[uuid] += use
        for uuid, use in used.items():
            assert use.memory <= CARD_MIB, (uuid, use)
            assert use.cores <= 100, (uuid, use)

    def _claiming(self, item: dict[str, Any]) -> list[str]:
        spec = item["spec"]
        containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
        return [each["name"] for each in containers if NUMBER in each["resources"]["limits"]]


def check_cards(came: Received, uid: str, container: str, cards: Sequence[Claim]) -> None:
    """One start of a container, against its claim: cards, limits, and whose they are
    (vgpu-manager §7.3).
    """
    environment = came.environment
    limits = {
        key: value
        for key, value in environment.items()
        if re.fullmatch(r"CUDA_(MEM|CORE)_LIMIT_\d+", key)
    }
    wanted = {f"CUDA_MEM_LIMIT_{card.index}": f"{card.memory}m" for card in cards} | {
        f"CUDA_CORE_LIMIT_{card.index}": str(card.cores) if 0 < card.cores < 100 else ""
        for card in cards
    }
    assert limits == wanted
    assert environment["NVIDIA_VISIBLE_DEVICES"] == ",".join(card.uuid for card in cards)
    assert (environment["VGPU_POD_UID"], environment["VGPU_CONTAINER_NAME"]) == (uid, container)
    source, read_only = came.mounts["/etc/vgpu-manager/config"]
    assert read_only
    assert Path(source).parent.name == f"{uid}_{container}"


@contextlib.asynccontextmanager
async def extender_stage(folder: Path, **options: Any) -> AsyncIterator[ExtenderStage]:
    """A stage, and the scheduler's stand-in on it; the agent is ended with it."""
    stage = ExtenderStage(folder, **options)
    async with stage.cluster:
        await stage.cluster.start_extender()
        try:
            yield stage
        finally:
            if hasattr(stage, "agent"):
                with contextlib.suppress(SimulationError):
                    await stage.agent.terminate()
