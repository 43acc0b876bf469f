"""The verdicts behind ``/readyz`` and ``/livez``: which trouble fails which of them, and in what words."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.golden import golden_inventory
from vgpu_agent.agent.binding_report import BindingReport
from vgpu_agent.agent.cluster_report import ClusterReport
from vgpu_agent.agent.cluster_side import ClusterSide
from vgpu_agent.agent.families_in_force import FamiliesInForce
from vgpu_agent.agent.lag import LoopLag
from vgpu_agent.agent.offering import Offering
from vgpu_agent.agent.reload import Reload
from vgpu_agent.agent.report import Report
from vgpu_agent.agent.verification import Verification
from vgpu_agent.allocation.allocator import Allocator, Families
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.load import Sources, load_content
from vgpu_agent.families.nvidia import NvidiaFamily, NvidiaOptions
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.status import KubeletStatus, NvmlState, PluginState


class Parts:
    """A report over real parts that nobody has started: neither a driver nor a kubelet."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        loaded = load_content(Sources({}, {}, "config.yaml"), f"version: v1\nkubelet: {{directory: {directory}}}\n".encode())
        settings = loaded.settings
        journal, self.ledger, self.kubelet = Journal(), Ledger(), KubeletStatus()
        self.supervisor, self.watch = supervisor, GpuWatch(settings.gpu, journal)
        self.allocator = Allocator(
            ledger=self.ledger, families=Families((NvidiaFamily(NvidiaOptions()),)), inventory=golden_inventory, journal=journal
        )
        path = settings.kubelet.device_plugin_directory
        self.offering = Offering(
            ledger=self.ledger,
            allocator=self.allocator,
            settings=settings.kubelet,
            directory=DirectoryWatch(path, poll_seconds=5, journal=journal, status=self.kubelet),
            supervisor=supervisor,
            journal=journal,
        )
        self.cluster, self.refusals = ClusterSide(settings, journal, supervisor), Refusals()
        families = FamiliesInForce(
            settings,
            origins={},
            allocator=self.allocator,
            offering=self.offering,
            cluster=self.cluster,
            inventory=golden_inventory,
            journal=journal,
        )
        self.report = Report(
            ledger=self.ledger,
            watch=self.watch,
            kubelet=self.kubelet,
            offering=self.offering,
            verification=Verification(
                allocator=self.allocator,
                ledger=self.ledger,
                settings=settings.kubelet,
                kubelet=self.kubelet,
                pod_resources=PodResources(settings.kubelet.pod_resources_socket, timeout_seconds=1),
                journal=journal,
                servers=tuple,
            ),
            reload=Reload(loaded, apply=self._apply, journal=journal),
            supervisor=supervisor,
            journal=journal,
            lag=LoopLag(),
            binding=BindingReport(self.allocator, families, self.offering, self.refusals),
            cluster=ClusterReport(self.cluster),
        )
        self.report.starting = ""
        self.watch.status.state = NvmlState.ANSWERING

    @staticmethod
    async def _apply(_: object) -> None:
        """No reload happens here."""

    @property
    def not_ready(self) -> dict[str, str]:
        """Part → reason."""
        return {problem.part: problem.reason for problem in self.report.status().not_ready}

    @property
    def not_alive(self) -> dict[str, str]:
        """Part → reason."""
        return {problem.part: problem.reason for problem in self.report.status().not_alive}


@contextlib.asynccontextmanager
async def parts(directory: Path) -> AsyncIterator[Parts]:
    """The parts, serving both golden GPUs."""
    async with asyncio.timeout(10), Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1) as supervisor:
        parts = Parts(supervisor, directory)
        parts.allocator.refresh_offer()
        await parts.offering.sync()
        yield parts


async def test_a_resource_that_waits_for_kubelet_is_not_ready_and_says_so(tmp_path: Path) -> None:
    """Nothing is wrong with the process, so it stays alive."""
    async with parts(tmp_path) as node:
        assert node.not_ready == {"resource nvidia.com/gpu": f"waiting for kubelet: there is no {tmp_path}/device-plugins/kubelet.sock"}
        assert node.not_alive == {}


async def test_a_refused_registration_stays_in_the_verdict(tmp_path: Path) -> None:
    """kubelet contract V6: the loop has ended for good, and that must be seen without reading the log."""
    async with parts(tmp_path) as node:
        (status,) = node.offering.statuses
        status.state, status.last_error = PluginState.FAILED, "kubelet refuses to register nvidia.com/gpu"
        assert node.not_ready == {"resource nvidia.com/gpu": "failed; kubelet refuses to register nvidia.com/gpu"}
        assert node.not_alive == {}


async def test_registered_without_a_stream_is_not_ready(tmp_path: Path) -> None:
    """Kubelet knows the resource and has no devices for it."""
    async with parts(tmp_path) as node:
        (status,) = node.offering.statuses
        status.state = PluginState.REGISTERED
        assert "has not opened the list" in node.not_ready["resource nvidia.com/gpu"]
        status.stream_open = True
        assert node.not_ready == {}


async def test_a_hung_driver_is_named_and_no_reason_to_restart(tmp_path: Path) -> None:
    """A restart does not help against a hung driver, and would take the other GPUs away."""
    async with parts(tmp_path) as node:
        node.watch.status.state, node.watch.status.call, node.watch.status.since = NvmlState.HUNG, "nvmlDeviceGetName", time.time() - 7
        assert node.not_ready["nvml"].startswith("nvmlDeviceGetName has not returned for 7 s")
        assert node.not_alive == {}


async def test_a_stuck_loop_is_named_with_the_time_it_has_been_silent(tmp_path: Path) -> None:
    """Counted from its last sign of life, not from the end of our patience."""
    async with parts(tmp_path) as node:
        node.supervisor.start("watch", asyncio.Event().wait, stuck_after_seconds=12)  # type: ignore[arg-type]  # what it returns is ignored
        await asyncio.sleep(0)
        node.supervisor._beats["watch"] -= 11
        assert node.not_alive == {}
        node.supervisor._beats["watch"] -= 9
        assert node.not_alive == {"task watch": "no sign of life for 20 s; it will not come back by itself"}
