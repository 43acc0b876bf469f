"""GPUs divided one after the other, on simulated GPUs and with the stand-in for the host tool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests import constants
from tests.gpu.watched import Watched, watching
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.agent.devices.mig import MigDivider
from vgpu_agent.families.family import MigLayout
from vgpu_agent.mig.parted import MigParted
from vgpu_agent.sim.mig_parted import Misbehaviour, calls, deliver, misbehave
from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.state import ProcessUse, SimulatedNode

pytestmark = pytest.mark.component  # it starts programs

GROUP = ("3g.20gb", "2g.10gb", "1g.5gb")


class Dividing:
    """A running side, and what came of what it was asked."""

    def __init__(self, node: SimulatedNode, side: MigDivider, watched: Watched) -> None:
        self.node, self.side, self.watched = node, side, watched

    async def divide(self, gpu: int = 1, profiles: Sequence[str] = GROUP) -> str:
        """Divide the GPU. Return the reason of a failure, or an empty string."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.side.divide(MigLayout(self.node.uuids[gpu], tuple(profiles)), answered.set_result)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await answered

    async def misbehave(self, what: Misbehaviour | None) -> None:
        """Let the tool go wrong."""
        await asyncio.to_thread(misbehave, self.node.directory, what)

    def profiles(self, gpu: int = 1) -> list[str]:
        """Return the profiles that the driver shows."""
        return sorted(
            instance.profile for instance in self.watched.gpu(self.node.uuids[gpu]).mig_instances
        )

    async def runs(self) -> list[str]:
        """The commands that the tool was given."""
        return [arguments[0] for arguments in await asyncio.to_thread(calls, self.node.directory)]


@contextlib.asynccontextmanager
async def dividing(
    folder: Path,
    others: Mapping[str, float] | None = None,
    *,
    timeout_seconds: float = PATIENCE_SECONDS,
) -> AsyncIterator[Dividing]:
    """A node of two A100, watched, and a side that is quick about everything."""

    def prepared() -> tuple[SimulatedNode, str]:
        node = SimulatedNode.create(folder / "gpus", model="A100-SXM4-40GB", gpus=2)
        preload(folder / "gpus")
        return node, str(deliver(node.directory, folder / "nvidia-mig-parted"))

    node, program = await asyncio.to_thread(prepared)
    quick = {constants.MIG_SETTLE: PATIENCE_SECONDS, constants.MIG_RETRY: 0.01}
    async with watching(node, {**quick, **(others or {})}) as watched:
        parted = MigParted(
            program,
            folder / "mig",
            timeout_seconds=timeout_seconds,
            setting="volcanoVgpu.migParted",
        )
        side = MigDivider(parted, watched.watch, call_timeout_seconds=PATIENCE_SECONDS)
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(side.run())
            try:
                yield Dividing(node, side, watched)
            finally:
                loop.cancel()


async def test_a_gpu_is_divided_and_seen_to_be(tmp_path: Path) -> None:
    """The answer comes when the inventory shows the instances, so that a start finds them.
    The other GPU stays as it is.
    """
    async with dividing(tmp_path) as side:
        assert await side.divide() == ""
        assert side.profiles() == sorted(GROUP)
        assert side.profiles(0) == []
        assert await side.runs() == ["export", "apply"]


async def test_a_gpu_that_is_divided_so_already_is_left_alone(tmp_path: Path) -> None:
    """The driver's word, read anew, counts more than what the asking start has seen."""
    async with dividing(tmp_path) as side:
        await asyncio.to_thread(side.node.set_mig, 1, list(GROUP))
        assert await side.divide() == ""
        assert await side.runs() == []


async def test_changes_are_made_one_after_the_other(tmp_path: Path) -> None:
    """The tool never runs twice at once, whatever is asked."""
    async with dividing(tmp_path) as side:
        assert list(await asyncio.gather(side.divide(0), side.divide(1, ("7g.40gb",)))) == ["", ""]
        assert (side.profiles(0), side.profiles(1)) == (sorted(GROUP), ["7g.40gb"])
        assert await side.runs() == ["export", "apply", "export", "apply"]


async def test_a_gpu_on_which_somebody_works_is_not_touched(tmp_path: Path) -> None:
    """A process that no share explains: its pids are named,
    and the tool is asked again at once when it has gone.
    """
    async with dividing(tmp_path, {constants.MIG_RETRY: 60}) as side:
        slot = await asyncio.to_thread(side.node.add_process, 1, 4711, ProcessUse(memory_mib=100))
        assert await side.divide() == "processes without a share of it use it (host pids 4711)"
        assert await side.runs() == []
        await asyncio.to_thread(side.node.remove_process, 1, slot)
        assert await side.divide() == ""


async def test_a_gpu_whose_instances_cannot_be_read_is_not_touched(tmp_path: Path) -> None:
    """It may be divided already, and in use:
    the pod's status has the driver's word and the remedy.
    """
    async with dividing(tmp_path, {constants.MIG_RETRY: 60}) as side:
        await asyncio.to_thread(side.node.set_mig, 1, ["7g.40gb"])
        await asyncio.to_thread(side.node.fault, "nvmlDeviceGetMaxMigDeviceCount", gpu=1, code=4)
        reason = await side.divide()
        assert reason.startswith(
            "its instances cannot be read: nvmlDeviceGetMaxMigDeviceCount: Insufficient Permissions"
        )
        assert reason.endswith("(components/mig-monitor)")
        assert await side.runs() == []
        await asyncio.to_thread(side.node.clear_faults)
        assert await side.divide() == ""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            Misbehaviour(command="apply", fails="Insufficient Resources"),
            "apply failed with status 1: Insufficient Resources",
        ),
        (
            Misbehaviour(command="export", fails="no driver"),
            "export failed with status 1: no driver",
        ),
        (
            Misbehaviour(command="export", prints="{}"),
            "does not have exactly one configuration below mig-configs",
        ),
        (
            Misbehaviour(command="apply", divides=("7g.40gb",)),
            "but 0.3 s later the driver shows 7g.40gb",
        ),
        (
            Misbehaviour(command="apply", divides=()),
            "but 0.3 s later the driver shows no instances",
        ),
        (Misbehaviour(hangs=True), "has not ended after 0.5 s and was ended"),
    ],
)
async def test_d16_whatever_goes_wrong_is_a_reason(
    tmp_path: Path, what: Misbehaviour, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """volcano-vgpu:D16: the cost falls on the pod that asked, and nothing ends."""
    monkeypatch.setattr("vgpu_agent.mig.parted._TERM_SECONDS", 0.1)
    timeout = 0.5 if what.hangs else PATIENCE_SECONDS
    quick = {constants.MIG_SETTLE: 0.3}
    async with dividing(tmp_path, quick, timeout_seconds=timeout) as side:
        await side.misbehave(what)
        assert expected in await side.divide()


async def test_a_tool_that_counts_the_gpus_otherwise_changes_none(tmp_path: Path) -> None:
    """It knows GPUs by their index only. Where its export does not show what the driver shows,
    the index may be another GPU's.
    """
    async with dividing(tmp_path) as side:
        await asyncio.to_thread(side.node.set_mig, 0, ["7g.40gb"])
        await side.watched.until(lambda inventory: inventory.gpus[0].mig_enabled)
        swapped = (
            "[{devices: [0], mig-enabled: false}, {devices: [1], mig-enabled: true, mig-devices: "
            "{7g.40gb: 1}}]"
        )
        await side.misbehave(
            Misbehaviour(
                command="export", prints=f"version: v1\nmig-configs: {{current: {swapped}}}"
            )
        )
        assert "shows a division of GPU 0" in await side.divide()
        assert await side.runs() == ["export"]


@pytest.mark.parametrize("is_counted", [False, True])
async def test_a_gpu_is_divided_beside_one_that_is_lost(tmp_path: Path, is_counted: bool) -> None:
    """It stays in the inventory. Either driver and tool show one GPU, whose number has changed, or
    they still count the lost one.
    """
    async with dividing(tmp_path) as side:
        await asyncio.to_thread(side.node.lose if is_counted else side.node.unplug, 0)
        await side.watched.until(
            lambda inventory: (
                not inventory.gpus[0].present and inventory.gpus[1].index == int(is_counted)
            )
        )
        assert await side.divide(1) == ""
        assert side.profiles(1) == sorted(GROUP)


async def test_a_change_that_has_failed_is_not_tried_again_at_once(tmp_path: Path) -> None:
    """The kubelet asks every quarter of a minute. A GPU is not reset as often.
    Another division of it is tried at once.
    """
    async with dividing(tmp_path, {constants.MIG_RETRY: 60}) as side:
        await side.misbehave(Misbehaviour(command="apply", fails="Insufficient Resources"))
        await side.divide()
        again = await side.divide()
        assert "Insufficient Resources" in again
        assert "tried again in 60 s at the earliest" in again
        assert await side.runs() == ["export", "apply"]
        await side.misbehave(None)
        assert await side.divide(1, ("7g.40gb",)) == ""


async def test_a_driver_that_does_not_answer_is_waited_for_by_no_tool(tmp_path: Path) -> None:
    """Nothing is divided that cannot be looked at."""
    async with dividing(tmp_path) as side:
        await asyncio.to_thread(side.node.lose, 1)
        assert await side.divide() == "the driver does not report its state"
        assert await side.runs() == []
