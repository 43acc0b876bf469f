"""The verdicts behind ``/readyz`` and ``/livez``, in what words; and what is collected about
ledger, binding and API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.allocation.without_pods import without_pods
from tests.golden import U0, U1, golden_inventory
from tests.settings import settings as settings_of
from vgpu_agent.agent.api_server import ClusterAccess
from vgpu_agent.agent.lag import LoopLag
from vgpu_agent.agent.offers.families import FamiliesInForce
from vgpu_agent.agent.offers.servers import Offering
from vgpu_agent.agent.records.verification import Verification
from vgpu_agent.agent.reload import Reload
from vgpu_agent.agent.remembered import Remembered
from vgpu_agent.agent.report import Report
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.overcommits import Overcommits
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster.config_map import ConfigMapWatch
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.concurrency import Latest, Supervisor
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.model import ContainerUsage, Decider, Inventory, Resource, Share
from vgpu_agent.pods import Pod, PodCache
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.runtime.region_guard import RegionGuard
from vgpu_agent.status import FamilyStatus, KubeletStatus, NvmlState, PluginState, Withheld

VGPU = "volcano.sh/vgpu-number"


class Parts:
    """A report over real parts that have not been started: neither a driver nor a kubelet."""

    def __init__(self, supervisor: Supervisor, directory: Path, config: str = "") -> None:
        loaded = load_contents(
            Sources({}, {}, "config.yaml"),
            Contents(f"version: v1\nkubelet: {{directory: {directory}}}\n{config}".encode()),
        )
        settings = loaded.settings
        journal, self.ledger, self.kubelet = Journal(), Ledger(), KubeletStatus()
        self.supervisor, self.watch = (
            supervisor,
            GpuWatch(settings.gpu, journal, sysfs_root=settings.sysfs_root),
        )
        self.allocator = Allocator(
            without_pods(
                ledger=self.ledger,
                families=Families((NvidiaFamily(NvidiaOptions()),)),
                inventory=golden_inventory,
                journal=journal,
            )
        )
        path = settings.kubelet.device_plugin_directory
        self.offering = Offering(
            ledger=self.ledger,
            allocator=self.allocator,
            directory=DirectoryWatch(path, poll_seconds=5, journal=journal, status=self.kubelet),
            supervisor=supervisor,
            journal=journal,
            error_after_seconds=30,
        )
        self.containers: Latest[tuple[ContainerUsage, ...]] = Latest(())
        self.cluster, self.refusals = ClusterAccess(settings, journal, supervisor), Refusals()
        self.families = FamiliesInForce(
            settings,
            origins={},
            allocator=self.allocator,
            offering=self.offering,
            cluster=self.cluster,
            inventory=golden_inventory,
            journal=journal,
        )
        self.grants = GrantDirectory("/nowhere/cdi", journal, kept_directory="/nowhere/grants")
        self.regions = RegionGuard([], journal, pause_seconds=1)
        self.report = Report(
            ledger=self.ledger,
            gpu_watch=self.watch,
            kubelet_status=self.kubelet,
            allocator=self.allocator,
            families=self.families,
            offering=self.offering,
            refusals=self.refusals,
            overcommits=Overcommits(Notices()),
            grants=self.grants,
            regions=self.regions,
            cluster=self.cluster,
            verification=Verification(
                allocator=self.allocator,
                ledger=self.ledger,
                kubelet_settings=settings.kubelet,
                kubelet_status=self.kubelet,
                pod_resources=PodResources(
                    settings.kubelet.pod_resources_socket, timeout_seconds=1
                ),
                pod_cache=PodCache(),
                journal=journal,
                servers=tuple,
                kubelet_age_seconds=lambda: 0.0,
            ),
            reload=Reload(loaded, apply=self._apply, journal=journal),
            supervisor=supervisor,
            journal=journal,
            lag=LoopLag(),
            container_usage=self.containers,
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
    async with (
        asyncio.timeout(10),
        Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1) as supervisor,
    ):
        parts = Parts(supervisor, directory)
        parts.allocator.refresh_offer()
        await parts.offering.sync()
        yield parts


async def test_a_resource_that_waits_for_kubelet_is_not_ready_and_says_so(tmp_path: Path) -> None:
    """Nothing is wrong with the process, so it stays alive."""
    async with parts(tmp_path) as node:
        assert node.not_ready == {
            "resource nvidia.com/gpu": (
                f"waiting for the kubelet: there is no {tmp_path}/device-plugins/kubelet.sock; "
                "start the kubelet, or correct the directory in which its socket is looked for"
            )
        }
        assert node.not_alive == {}
        node.kubelet.directory_trouble = "cannot read it: Permission denied"
        assert list(node.not_ready.values()) == [
            "waiting for the kubelet: cannot read it: Permission denied"
        ]


@pytest.mark.parametrize(
    ("config", "inventory", "reason"),
    [
        (
            "",
            Inventory(),
            "this node has no GPU to offer; /debug/devices says which cards did not answer",
        ),
        (
            "",
            golden_inventory(),
            (
                "nothing of this node's 2 GPUs is offered; /debug/devices shows them, "
                "/debug/events?event=config.caution says why"
            ),
        ),
        (
            "families: {nvidia: false}\n",
            golden_inventory(),
            (
                "no family of resources is on; set one of families.nvidia, aws, volcanoVgpu, "
                "volcanoGpushare, vgpuManager to true"
            ),
        ),
    ],
)
async def test_why_nothing_is_offered_is_told_apart(
    tmp_path: Path, config: str, inventory: Inventory, reason: str
) -> None:
    """A node that switches to another family without naming it has no broken cards to look for."""
    async with (
        asyncio.timeout(10),
        Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1) as supervisor,
    ):
        node = Parts(supervisor, tmp_path, config)
        node.watch.inventory.publish(inventory)
        assert node.not_ready == {"gpus": reason}


async def test_a_refused_registration_stays_in_the_verdict(tmp_path: Path) -> None:
    """kubelet V6: the loop has ended for good, and that must be seen without reading the log."""
    async with parts(tmp_path) as node:
        (status,) = node.offering.statuses
        status.state, status.last_error = (
            PluginState.FAILED,
            "the kubelet refuses to register nvidia.com/gpu",
        )
        assert node.not_ready == {
            "resource nvidia.com/gpu": "failed; the kubelet refuses to register nvidia.com/gpu"
        }
        assert node.not_alive == {}


async def test_registered_without_a_stream_is_not_ready(tmp_path: Path) -> None:
    """The kubelet knows the resource and has no devices for it."""
    async with parts(tmp_path) as node:
        (status,) = node.offering.statuses
        status.state = PluginState.REGISTERED
        assert "has not opened the stream of the list" in node.not_ready["resource nvidia.com/gpu"]
        status.stream_open = True
        assert node.not_ready == {}


async def test_a_hung_driver_is_named_and_no_reason_to_restart(tmp_path: Path) -> None:
    """A restart does not help against a hung driver, and would take the other GPUs away."""
    async with parts(tmp_path) as node:
        node.watch.status.state, node.watch.status.call, node.watch.status.since = (
            NvmlState.HUNG,
            "nvmlDeviceGetName",
            time.time() - 7,
        )
        assert node.not_ready["nvml"].startswith("nvmlDeviceGetName has not returned for 7 s")
        assert node.not_alive == {}


async def test_a_stuck_loop_is_named_with_the_time_it_has_been_silent(tmp_path: Path) -> None:
    """Counted from its last heartbeat, not from the end of our patience."""
    async with parts(tmp_path) as node:
        # what it returns is ignored
        wait: Any = asyncio.Event().wait
        node.supervisor.start("watch", wait, stuck_after_seconds=12)
        await asyncio.sleep(0)
        node.supervisor._beats["watch"] -= 11
        assert node.not_alive == {}
        node.supervisor._beats["watch"] -= 9
        assert node.not_alive == {
            "task watch": "no heartbeat for 20 s; it will not recover by itself"
        }


def a_resource(name: str, family: str, ids: Sequence[DeviceId], **changes: Any) -> Resource:
    """One offer."""
    return Resource(name, family, ids, **changes)


async def test_a_device_may_have_as_many_holders_as_one_family_allows(tmp_path: Path) -> None:
    """It serves one family at a time, and ids that are only counted are no places."""
    gpu = golden_inventory().gpus[0].uuid
    async with parts(tmp_path) as node:
        node.ledger.offer(
            (
                a_resource(
                    "nvidia.com/gpu",
                    "nvidia",
                    (DeviceId("n-0", gpu), DeviceId("n-1", gpu)),
                    holders_per_device=2,
                ),
                a_resource(
                    VGPU,
                    "volcano-vgpu",
                    NumberedIds((IdBlock("v-", 10, gpu),)),
                    holders_per_device=10,
                    decided_by=Decider.POD,
                ),
                a_resource(
                    "volcano.sh/vgpu-memory",
                    "volcano-vgpu",
                    NumberedIds((IdBlock("m-", 81920, gpu),)),
                    decided_by=Decider.NOBODY,
                ),
            )
        )
        ledger = node.report.status().ledger
    assert ledger.capacity == {gpu: 10}
    assert ledger.decided_by_pod == {VGPU}
    assert ledger.sharing == {"nvidia.com/gpu": "none"}
    assert sorted(ledger.rooms) == ["nvidia.com/gpu", VGPU]
    assert ledger.rooms[VGPU][0].holders_free == 10


async def test_more_ids_than_can_be_looked_at_are_counted_by_block(tmp_path: Path) -> None:
    """Thousands of millions of replicas are withheld,
    and the status of everything else is reported all the same.
    """
    first, second = (gpu.uuid for gpu in golden_inventory().gpus)
    blocks = tuple(IdBlock(f"{uuid}::", 2**31 - 1, uuid) for uuid in (first, second))
    async with parts(tmp_path) as node:
        node.ledger.offer(
            (
                a_resource(
                    "nvidia.com/gpu", "nvidia", NumberedIds(blocks), holders_per_device=2**31 - 1
                ),
            )
        )
        ledger = node.report.status().ledger
    assert ledger.capacity == {first: 2**31 - 1, second: 2**31 - 1}


async def test_the_use_of_each_gpu_is_collected_with_those_who_wait(tmp_path: Path) -> None:
    """Every page and metric reads it there. A claim alone is news as well."""
    async with parts(tmp_path) as node:
        node.ledger.observe(golden_inventory())
        ids = (DeviceId(U0, U0), DeviceId(U1, U1))
        node.ledger.offer(
            (a_resource("nvidia.com/gpu", "nvidia", ids), a_resource(VGPU, "volcano-vgpu", ids))
        )
        node.ledger.reserve("nvidia.com/gpu", [U0], [Share(U0)])
        before = node.report.status().ledger
        claim = Claim(U0, "volcano-vgpu", "ml/waits", "uid-waits", 1.0, 1)
        node.ledger.claim([claim])
        after = node.report.status().ledger
    assert [(use.family, use.claims) for use in before.uses] == [("nvidia", ()), ("", ())]
    assert [(use.family, use.claims) for use in after.uses] == [("nvidia", (claim,)), ("", ())]
    assert [each.family for each in after.held_back[VGPU]] == ["nvidia"]


async def test_what_the_ledger_offers_is_counted_once_for_each_change(tmp_path: Path) -> None:
    """A scrape or a probe must not count tens of thousands of ids."""
    gpu = golden_inventory().gpus[0].uuid
    async with parts(tmp_path) as node:
        first = node.report.status().ledger
        assert node.report.status().ledger.rooms is first.rooms
        node.ledger.reserve(
            "nvidia.com/gpu",
            [next(entry.id for entry in node.ledger.resource("nvidia.com/gpu").ids)],
            (Share(gpu),),
        )
        assert (
            node.report.status().ledger.free["nvidia.com/gpu"] == first.free["nvidia.com/gpu"] - 1
        )


async def test_refusals_and_the_binding_mode_are_reported(tmp_path: Path) -> None:
    """With the counters of starts, which are 0 where ids name GPUs."""
    async with parts(tmp_path) as node:
        node.refusals.refuse(
            Pod("uid-1", "default", "train"), "main", VGPU, "no GPU has 8000 MiB left"
        )
        node.allocator.use_mode(
            BindingMode(late=False, by_annotation=False, reason="binding.mode is early")
        )
        binding = node.report.status().binding
    assert [refusal.reason for refusal in binding.refusals] == ["no GPU has 8000 MiB left"]
    assert binding.mode == node.allocator.mode
    assert (binding.ambiguities, binding.wrong_guesses, binding.exchanges) == (0, 0, 0)


async def test_families_are_reported_with_what_keeps_them_from_being_offered(
    tmp_path: Path,
) -> None:
    """A family whose plugin server runs is offered; of the other one the reason is known."""
    async with parts(tmp_path) as node:
        node.families._families = Families((NvidiaFamily(NvidiaOptions()),))
        assert node.report.status().binding.families == (FamilyStatus("nvidia"),)
        await node.offering.stop()
        node.offering.blocked = {"nvidia": "it is switched off"}
        assert node.report.status().binding.families == (
            FamilyStatus("nvidia", offered=False, trouble="it is switched off"),
        )
        node.offering.blocked = {}
        node.offering.withhold("nvidia.com/gpu", Withheld("its CDI spec is missing"))
        node.offering.withhold("example.com/other", Withheld("that of another family"))
        assert node.report.status().binding.families == (
            FamilyStatus(
                "nvidia", offered=False, trouble="nvidia.com/gpu: its CDI spec is missing"
            ),
        )
        node.offering.withhold("nvidia.com/gpu.shared", Withheld("the same"))
        (family,) = node.report.status().binding.families
        assert family.trouble == "nvidia.com/gpu: its CDI spec is missing; and 1 more resources"


async def test_a_family_for_which_the_node_has_nothing_says_so(tmp_path: Path) -> None:
    """Its resources are neither offered nor withheld: there are none. That is no fault."""
    async with parts(tmp_path) as node:
        await node.offering.stop()
        plain = golden_inventory()
        count = len(plain.gpus)
        node.families._families = Families((NvidiaFamily(NvidiaOptions()),))
        shown = [plain]
        node.families._inventory = lambda: shown[-1]
        for inventory, reason in (
            (msgspec.structs.replace(plain, gpus=()), "this node has no GPU"),
            (plain, f"of its {count} GPUs, none is in MIG mode"),
            (
                msgspec.structs.replace(
                    plain,
                    gpus=(
                        msgspec.structs.replace(plain.gpus[0], mig_enabled=True),
                        *plain.gpus[1:],
                    ),
                ),
                f"of its {count} GPUs, 1 is in MIG mode",
            ),
            (
                msgspec.structs.replace(
                    plain,
                    gpus=tuple(
                        msgspec.structs.replace(gpu, mig_enabled=True) for gpu in plain.gpus
                    ),
                ),
                f"of its {count} GPUs, {count} are in MIG mode",
            ),
        ):
            shown.append(inventory)
            (family,) = node.report.status().binding.families
            assert (family.offered, family.idle) == (False, True)
            assert family.trouble.endswith(reason)


async def test_without_credentials_the_cluster_side_says_why(tmp_path: Path) -> None:
    """The agent then has neither watches nor writers."""
    async with parts(tmp_path) as node:
        await node.cluster.connect()
        cluster = node.report.status().cluster
    assert (cluster.connected, cluster.disconnected_reason, cluster.waiting_for) == (
        False,
        "no family or setting that needs the API server is on",
        "",
    )
    assert (cluster.watches, cluster.writers, cluster.requests) == ((), (), {})


class Source:
    """An API server that is asked for nothing here."""

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Never answered."""
        raise AssertionError(path)

    def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Never answered."""
        raise AssertionError(path)

    def lines(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Never answered."""
        raise AssertionError(path)


def _config_map(expected_in: str = "") -> ConfigMapWatch:
    namespaces = ("kube-system", "volcano-system")
    return ConfigMapWatch(
        Source(),
        "volcano-vgpu-device-config",
        "device-config.yaml",
        namespaces=namespaces,
        journal=Journal(),
        expected_in=expected_in,
    )


@pytest.mark.parametrize(
    ("asked", "complained_of"), [("", False), ("volcano-system", False), ("kube-system", True)]
)
async def test_a_config_map_that_may_not_be_read_where_it_was_said_to_be_is_a_problem(
    tmp_path: Path, asked: str, complained_of: bool
) -> None:
    """In the two usual namespaces a missing role is as it should be.
    Where the ConfigMap is configured it is a mistake.
    """
    cluster = ClusterAccess(
        settings_of(state_directory=str(tmp_path)),
        Journal(),
        Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1),
    )
    cluster.config_maps["device-config.yaml"] = _config_map(asked)
    cluster.config_maps["device-config.yaml"].statuses["kube-system"].errors = 1
    (watch,) = cluster.status().watches
    assert watch.essential is complained_of


async def test_watches_and_memory_are_reported(tmp_path: Path) -> None:
    """The report says how long a watch has failed,
    and that an earlier agent's memory stands in for the Node.
    """
    async with parts(tmp_path) as node:
        cluster, journal = node.cluster, Journal()
        cluster.pod_watch = PodWatch(Source(), "node-a", cluster.pod_cache, journal=journal)
        cluster.node_watch = NodeWatch(Source(), "node-a", journal=journal)
        cluster.config_maps["device-config.yaml"] = _config_map()
        cluster.config_maps["device-config.yaml"].statuses["kube-system"].lists = 1
        cluster.remembered = Remembered(
            "node-a",
            "v1.30.0",
            "containerd://2.0.1",
            {"device-config.yaml": ("version: v1",), "config.json": ()},
        )
        cluster.pod_watch.status.failing_since = 17.0
        found = node.report.status().cluster
    assert [(watch.name, watch.failing_since, watch.essential) for watch in found.watches] == [
        ("pods of this node", 17.0, True),
        ("this node", 0.0, True),
        ("ConfigMap kube-system/volcano-vgpu-device-config", 0.0, False),
    ]
    assert found.remembered == {
        "kubelet_version": "v1.30.0",
        "runtime_version": "containerd://2.0.1",
        "files": ["device-config.yaml"],
        "in_use": True,
    }
