"""MPS daemons follow the ledger's offers and holders,
with the stand-in tools and without a kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests import constants
from tests.agent.offers.test_servers import Node as Offers
from tests.golden import U0, U1, golden_inventory
from tests.mps.supervised import no_blocked_loop
from tests.patience import PATIENCE_SECONDS
from tests.settings import settings as settings_of
from tests.settings import switches
from tests.simulated import simulated_node
from vgpu_agent.agent.devices.mps import MpsController
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.collisions import two_daemons_remedy
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.aws.settings import Aws
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.settings import Sharing
from vgpu_agent.model import Resource, Share, SharingMode
from vgpu_agent.mps import daemon, directories
from vgpu_agent.mps.host_tools import HostTool
from vgpu_agent.sim.mps_tools import MpsTools, end_daemon
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.status import MpsState

GPU = "nvidia.com/gpu"


pytestmark = pytest.mark.component  # each test starts dozens of processes


@pytest.fixture(autouse=True)
def _nothing_blocks() -> Iterator[None]:
    with no_blocked_loop():
        yield


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(daemon, "BACKOFF_MIN_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def _paths_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = MpsTools(tmp_path / "tools")
    paths = {
        constants.MPS_CONTAINER_ROOT: str(tmp_path / "mps"),
        constants.MPS_CONTROL_BINARY: str(tools.control),
        constants.MPS_SMI_BINARY: str(tools.smi),
    }
    constants.use(monkeypatch, paths)


@pytest.fixture(autouse=True)
def _nobody_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test has no business in the mount table of the machine."""
    monkeypatch.setattr(directories, "share_memory", lambda *_, **__: None)


class Node:
    """An MPS side over a ledger whose offers and grants the test sets."""

    def __init__(self, tmp_path: Path, offers: Offers) -> None:
        self.gpus = simulated_node(tmp_path, uuids=(U0, U1))
        self.tools = MpsTools.install(tmp_path / "tools", self.gpus.directory)
        self.root = tmp_path / "mps"
        self.inventory = golden_inventory()
        self.offers = offers
        self.settings = settings_of(aws=Aws(mps="supervised"))
        self.side = self._side()
        offers.ledger.observe(self.inventory)
        offers.ledger.rebuilt = True

    def _side(self) -> MpsController:
        return MpsController(
            self.settings,
            ledger=self.offers.ledger,
            offering=self.offers.offering,
            inventory=lambda: self.inventory,
            supervisor=self.offers.supervisor,
            journal=self.offers.journal,
        )

    @property
    def withheld(self) -> dict[str, str]:
        """Resource → why it is not served."""
        return self.offers.offering.withheld

    @property
    def compute_modes(self) -> list[int]:
        """Return the compute modes that NVML would show: 0 default, 3 exclusive process."""
        state = SimulatedNode.open(self.gpus.directory).state
        return [state.gpus[number].compute_mode for number in range(2)]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that other processes do."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, (self.withheld, self.side.statuses)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Node]:
    """A started MPS side on a node that offers nothing yet."""
    async with Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1.0) as supervisor:
        node = await asyncio.to_thread(Node, tmp_path, Offers(supervisor, tmp_path))
        try:
            node.side.start()
            yield node
            await node.side.stop(PATIENCE_SECONDS)
            await node.offers.offering.stop()
        finally:
            for name in (GPU, "nvidia.com/gpu.shared"):
                end_daemon(node.root / name / "pipe")


def _shared(replicas: int = 4, name: str = GPU, **fields: Any) -> Resource:
    ids = tuple(
        DeviceId(f"{uuid}::{number}", uuid) for uuid in (U0, U1) for number in range(replicas)
    )
    return Resource(
        name, "nvidia", ids, holders_per_device=replicas, sharing=SharingMode.MPS, **fields
    )


async def test_a_shared_resource_is_served_once_its_limits_are_in_force(tmp_path: Path) -> None:
    """nvidia:G11: until the daemon has 10240M for each GPU and 25 percent the resource is withheld
    with the reason; others are not.
    """
    async with running(tmp_path) as node:
        with capture_logs() as lines:
            await node.offers.offer(
                _shared(), Resource("nvidia.com/other", "nvidia", (DeviceId("GPU-x", "GPU-x"),))
            )
            assert node.withheld == {GPU: "its MPS control daemon is about to be started"}
            assert node.offers.served == ["nvidia.com/other"]
            await node.until(lambda: GPU in node.offers.served)
        # the ordinary start is no trouble
        assert {line["log_level"] for line in lines if line["event"] == "plugin.withheld"} == {
            "info"
        }
        assert node.withheld == {}
        (status,) = node.side.statuses
        assert (status.thread_percentage, status.memory_limit_mib) == (25, {U0: 10240, U1: 10240})


async def test_a_daemon_that_dies_withholds_its_resource_until_it_is_back(tmp_path: Path) -> None:
    """nvidia:D7: the death is seen within the time between two probes, the reason is shown, and the
    resource comes back by itself.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        node.tools.misbehave(start="refuse")
        end_daemon(node.root / GPU / "pipe")
        await node.until(lambda: "Insufficient permissions" in node.withheld.get(GPU, ""))
        assert node.offers.served == []
        node.tools.behave()
        await node.until(lambda: GPU in node.offers.served)


async def test_the_pods_of_a_lost_daemon_are_named(tmp_path: Path) -> None:
    """The journal's line names the pods whose CUDA programs ended. The ledger knows them."""
    async with running(tmp_path) as node:
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        node.offers.ledger.reserve(GPU, [f"{U0}::1"], [Share(U0, 10240, 25)])
        end_daemon(node.root / GPU / "pipe")
        await node.until(
            lambda: any(entry.event == "mps.daemon_lost" for entry in node.offers.journal.entries)
        )
        (lost,) = (
            entry for entry in node.offers.journal.entries if entry.event == "mps.daemon_lost"
        )
        assert lost.facts["pods"] == ["a starting pod"]
        node.offers.ledger.release(1)


async def test_a_daemon_whose_shares_are_held_outlives_the_agent(tmp_path: Path) -> None:
    """NVIDIA's issue 669: at the end of the agent it is left, and the GPUs stay exclusive.
    Without holders both are undone.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        node.offers.ledger.reserve(GPU, [f"{U0}::1"], [Share(U0, 10240, 25)])
        await node.side.stop(PATIENCE_SECONDS)
        assert node.compute_modes == [3, 3]
        assert node.side.statuses[0].state is MpsState.RUNNING


async def test_before_kubelet_has_told_who_holds_what_no_daemon_is_ended(tmp_path: Path) -> None:
    """An agent that stops before it could read kubelet's records does not know of the pods
    that its daemon serves.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        node.offers.ledger.rebuilt = False
        await node.side.stop(PATIENCE_SECONDS)
        assert node.side.statuses[0].state is MpsState.RUNNING


async def test_sharing_that_is_switched_off_ends_the_daemon(tmp_path: Path) -> None:
    """The resource is offered without MPS now:
    quit, and the compute mode goes back to the default.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        await node.offers.offer(
            msgspec.structs.replace(_shared(), sharing=SharingMode.TIME_SLICING)
        )
        await node.until(lambda: node.compute_modes == [0, 0])
        assert node.offers.served == [GPU]


async def test_settings_that_change_no_offer_reach_the_daemon(tmp_path: Path) -> None:
    """failRequestsGreaterThanOne decides with perContainerLimits which pods have limits.
    The ledger does not change with it.
    """
    async with running(tmp_path) as node:
        mps = msgspec.structs.replace(node.settings.mps, per_container_limits=True)
        single = msgspec.structs.replace(node.settings, mps=mps)
        node.side.apply(single)
        await node.offers.offer(_shared())
        await node.until(lambda: GPU in node.offers.served)
        assert node.side.statuses[0].thread_percentage == 25
        several = msgspec.structs.replace(
            single.section(Sharing).mps, fail_requests_greater_than_one=False
        )
        node.side.apply(
            msgspec.structs.replace(
                single, sharing=msgspec.structs.replace(single.section(Sharing), mps=several)
            )
        )
        await node.until(lambda: node.side.statuses[0].thread_percentage == 100)


async def test_a_gpu_that_another_resource_holds_is_in_use_by_others(tmp_path: Path) -> None:
    """aws:D8: EXCLUSIVE_PROCESS would keep the other family's programs out of the GPU
    that serves it now.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(
            _shared(),
            Resource("example.com/whole", "volcano-vgpu", (DeviceId(U0, U0), DeviceId(U1, U1))),
        )
        await node.until(lambda: GPU in node.offers.served)
        node.offers.ledger.reserve("example.com/whole", [U1], [Share(U1, exclusive=True)])
        await node.until(lambda: node.compute_modes == [3, 0])
        node.offers.ledger.release(1)
        await node.until(lambda: node.compute_modes == [3, 3])


async def test_one_gpu_has_one_daemon(tmp_path: Path) -> None:
    """Two servers cannot both have a GPU in exclusive mode:
    the second resource says which one has it, and the first is offered.
    """
    async with running(tmp_path) as node:
        other = msgspec.structs.replace(
            _shared(2, "nvidia.com/gpu.shared"),
            ids=tuple(DeviceId(f"{U0}-{number}", U0) for number in range(2)),
        )
        await node.offers.offer(_shared(), other)
        await node.until(lambda: GPU in node.offers.served)
        reason = node.withheld["nvidia.com/gpu.shared"]
        assert f"{U0} has an MPS control daemon for {GPU} already" in reason
        assert reason.endswith(two_daemons_remedy())  # the same words as `config check`


async def test_what_cannot_be_shared_by_mps_is_withheld_for_good(tmp_path: Path) -> None:
    """nvidia:G13, nvidia:G14, nvidia:G15: slices and too many clients are a reason in the
    readiness, not a retry every 30 seconds.
    """
    async with running(tmp_path) as node:
        await node.offers.offer(_shared(49))
        assert "49 replicas of GPU 0" in node.withheld[GPU]
        sliced = tuple(
            msgspec.structs.replace(gpu, mig_enabled=True) for gpu in node.inventory.gpus
        )
        node.inventory = msgspec.structs.replace(node.inventory, gpus=sliced)
        await node.offers.offer(_shared(7, "nvidia.com/mig-1g.5gb"))
        assert (
            "sharing using MPS is not supported for MIG devices"
            in node.withheld["nvidia.com/mig-1g.5gb"]
        )
        assert node.side.statuses == ()
        assert node.tools.calls == []


async def test_daemons_whose_files_containers_could_change_are_not_started(tmp_path: Path) -> None:
    """A container of the family aws has /tmp/nvidia-mps mounted.
    With a link in it, it could have the agent write anywhere.
    """
    async with running(tmp_path) as node:
        mps = msgspec.structs.replace(node.settings.mps, root="/tmp/nvidia-mps/ours")
        node.side.apply(
            msgspec.structs.replace(node.settings, mps=mps, families=switches(aws=True))
        )
        await node.offers.offer(_shared())
        assert node.withheld[GPU].startswith(
            'mps.root: "/tmp/nvidia-mps/ours" lies in /tmp/nvidia-mps, which aws.mps: supervised'
        )
        assert node.tools.calls == []


async def test_virtual_gpus_of_aws_get_a_daemon_where_their_old_clients_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aws:D1, aws:D2: supervised, with limits from the share,
    and its pipe in the directory that pods with hostIPC mount.
    """
    pipe = tmp_path / "tmp/nvidia-mps"
    monkeypatch.setattr("vgpu_agent.isolation.mps.DEFAULT_PIPE_DIRECTORY", str(pipe))
    async with running(tmp_path) as node:
        family = AwsFamily(AwsOptions.from_settings(node.settings, lists=ListOptions()))
        await node.offers.offer(*family.resources(node.inventory))
        await node.until(lambda: "k8s.amazonaws.com/vgpu" in node.offers.served)
        started = next(call for call in node.tools.calls if call["arguments"] == ["-d"])
        assert started["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == str(pipe)
        assert node.side.statuses[0].memory_limit_mib == {U0: 4096, U1: 4096}
    end_daemon(pipe)


async def test_virtual_gpus_with_a_daemon_of_the_host_are_served_and_cautioned_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods of AWS's plugin ran without the daemon, too, so nothing is withheld.
    A setting of `host` is reported as not fulfilled.
    """
    pipe, name = tmp_path / "tmp/nvidia-mps", "k8s.amazonaws.com/vgpu"
    monkeypatch.setattr("vgpu_agent.isolation.mps.DEFAULT_PIPE_DIRECTORY", str(pipe))
    async with running(tmp_path) as node:
        settings = msgspec.structs.replace(node.settings, aws=Aws(mps="host"))
        node.side.apply(settings)
        await node.offers.offer(
            *AwsFamily(AwsOptions.from_settings(settings, lists=ListOptions())).resources(
                node.inventory
            )
        )
        await node.until(lambda: node.offers.offering.cautions)
        (caution,) = node.offers.offering.cautions.values()
        assert caution.startswith(
            f"{name}: the agent sees no directory {pipe}, so its containers may take turns without "
            "limits"
        )
        assert (node.offers.served, node.side.statuses) == ([name], ())

        await asyncio.to_thread(pipe.mkdir, parents=True)
        tool = HostTool(str(node.tools.control), timeout_seconds=20)
        await tool.run(
            "-d",
            environment={"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)},
        )
        await node.until(lambda: not node.offers.offering.cautions)
        await asyncio.to_thread(end_daemon, pipe)
        await node.until(lambda: node.offers.offering.cautions)
        events = [
            entry.event
            for entry in node.offers.journal.entries
            if "mps" in entry.event or "caution" in entry.event
        ]
        assert (events.count("mps.host_daemon_found"), events[0]) == (1, "config.caution")
        await node.offers.offer()
        await node.until(lambda: not node.offers.offering.cautions)


async def test_without_a_directory_for_mps_nothing_is_shared_by_it(tmp_path: Path) -> None:
    """mps.root may be empty. The reason names the key."""
    async with running(tmp_path) as node:
        node.side.apply(
            msgspec.structs.replace(
                node.settings, mps=msgspec.structs.replace(node.settings.mps, root="")
            )
        )
        await node.offers.offer(_shared())
        assert "mps.root is empty" in node.withheld[GPU]


async def test_a_node_without_mps_runs_no_tool(tmp_path: Path) -> None:
    """Time-slicing needs no daemon, no directory and no exclusive mode."""
    async with running(tmp_path) as node:
        await node.offers.offer(
            msgspec.structs.replace(_shared(), sharing=SharingMode.TIME_SLICING)
        )
        assert node.offers.served == [GPU]
        assert node.tools.calls == []
        assert not node.root.exists()
