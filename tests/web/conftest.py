"""A node as plain data, the two servers on loopback ports, and a client."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent import log
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.allocation.refusals import Refusal
from vgpu_agent.concurrency import TaskReport
from vgpu_agent.journal import Entry
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.ledger.uses import GpuUse, HeldBack
from vgpu_agent.model import (
    Cause,
    ContainerUsage,
    DeviceRoom,
    Gpu,
    GpuUsage,
    Grant,
    GrantState,
    Health,
    Inventory,
    Link,
    MigInstance,
    Owner,
    Remedy,
    Share,
)
from vgpu_agent.pods import ContainerKind, Pod, PodContainer
from vgpu_agent.status import (
    AgentStatus,
    BindingStatus,
    ClusterStatus,
    FamilyStatus,
    GpuHistory,
    KubeletStatus,
    LedgerStatus,
    MpsState,
    MpsStatus,
    NvmlState,
    NvmlStatus,
    PluginState,
    PluginStatus,
    WatchStatus,
    WriterStatus,
)
from vgpu_agent.web.server import WebServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

_HEALTHY = Health()
NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
MAX_BODY_BYTES = 65536
FALLEN_OFF = "XID 79: the GPU has fallen off the bus"


@dataclasses.dataclass
class Snapshot:
    """A snapshot that a test can replace."""

    current: AgentStatus

    def status(self) -> AgentStatus:
        return self.current


@dataclasses.dataclass(frozen=True)
class Answer:
    """The server's answer."""

    status: int
    headers: dict[str, str]
    text: str


def a_gpu(index: int, *, health: Health = _HEALTHY, present: bool = True) -> Gpu:
    """One of the node's cards."""
    return Gpu(
        uuid=f"GPU-{index}",
        index=index,
        minor=index,
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        pci_bus_id=f"0000:0{index}:00.0",
        numa_node=index // 4,
        compute_capability=(8, 0),
        health=health,
        present=present,
    )


def a_grant(number: int, gpu: str, pod: str = "train-0", **changes: Any) -> Grant:
    """One share of ``gpu`` in the hands of the pod ``ml/<pod>``."""
    owner = Owner("main", f"uid-{pod}", "ml", pod)
    grant = Grant(
        number,
        "nvidia",
        "nvidia.com/gpu",
        (f"{gpu}::{number}",),
        (Share(gpu),),
        GrantState.GRANTED,
        owner,
        reserved_at=NOW - 60 * number,
    )
    return msgspec.structs.replace(grant, **changes)


@pytest.fixture
def node() -> AgentStatus:
    """Two GPUs, one of them broken and in MIG mode, a registered resource,
    a named and an unnamed grant, everything else once.
    """
    mig = MigInstance("MIG-1", 0, 7, 0, "1g.10gb", 9856)
    broken = msgspec.structs.replace(
        a_gpu(
            1,
            health=Health(
                ok=False,
                reason=FALLEN_OFF,
                since=NOW - 30,
                causes=(Cause("XID 79", FALLEN_OFF, Remedy.REBOOT_OR_REPLACE, NOW - 30),),
                remedy=Remedy.REBOOT_OR_REPLACE,
                answers=False,
                offered_at=NOW + 30,
            ),
        ),
        mig_enabled=True,
        mig_instances=(mig,),
    )
    return AgentStatus(
        node="node-a",
        version="0.1.0",
        commit="abc1234",
        simulated=True,
        started_at=NOW - 3700,
        inventory=Inventory(
            version=3,
            gpus=(a_gpu(0), broken),
            links={("GPU-0", "GPU-1"): Link(20, 12), ("GPU-1", "GPU-0"): Link(20, 12)},
            driver_version="580.65.06",
            cuda_version="13.0",
            failures=("2: GPU is lost",),
        ),
        usage=(GpuUsage("GPU-0", 1024, 81920, 55, 41, 250.5, 2, ((4711, 512),)), GpuUsage("GPU-1")),
        inventory_at=NOW - 100,
        usage_at=NOW - 5,
        mps=(MpsStatus("nvidia.com/gpu", MpsState.RUNNING, clients=(4711,)),),
        nvml=NvmlStatus(
            NvmlState.ANSWERING,
            calls=100,
            errors=2,
            hangs=1,
            library="libnvidia-ml.so.1",
            history=GpuHistory(xids={("GPU-1", "79"): 1}, transitions={("GPU-1", "unhealthy"): 1}),
        ),
        kubelet=KubeletStatus(
            "/var/lib/kubelet", socket_present=True, restarts_seen=1, records_read_at=NOW - 7
        ),
        plugins=(
            PluginStatus(
                "nvidia.com/gpu",
                "nvidia",
                PluginState.REGISTERED,
                endpoint="vgpu-agent-nvidia.com_gpu.sock",
                registered_at=NOW - 3600,
                registrations=2,
                registration_failures=1,
                stream_open=True,
                streams_opened=2,
                ids_sent=20,
                healthy_sent=10,
                bytes_sent=1300,
                messages_sent=3,
                allocations=5,
                allocations_refused=2,
                allocate_seconds_sum=0.004,
            ),
        ),
        ledger=LedgerStatus(
            revision=9,
            grants=(
                a_grant(1, "GPU-0"),
                a_grant(2, "MIG-1", owner=None, state=GrantState.RESERVED),
            ),
            drift_total=4,
            drift_last=("released GPU-0::9",),
            verified_at=NOW - 12,
            unknown_ids=("GPU-9::0",),
            capacity={"GPU-0": 10, "MIG-1": 10},
            free={"nvidia.com/gpu": 9},
            sharing={"nvidia.com/gpu": "time-slicing"},
            share_seconds={("ml", "train-0", "nvidia.com/gpu"): 90.5},
        ),
        tasks=(
            TaskReport(
                "health",
                last_heartbeat_at=NOW - 1,
                started_at=NOW - 3700,
                restarts=3,
                last_error="OSError: gone",
                stuck_after_seconds=5,
            ),
        ),
        events=(
            Entry(NOW - 600, "gpu.recovered", {"gpu": "GPU-1"}),
            Entry(NOW - 30, "gpu.unhealthy", {"gpu": "GPU-1", "xid": 79}),
            Entry(NOW - 20, "allocate.granted", {"ids": ("GPU-0::1",), "odd": object}),
        ),
        loop_lag_seconds=0.001,
        loop_lag_max_seconds=0.25,
        config={"listen": (":9394", "default"), "gpu.usageSeconds": (5.0, "config.yaml:3")},
    )


VGPU, MEMORY = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory"
IDS = ("a-1", "a-2")
TOKEN = grant_token(VGPU, IDS)


def a_pod(name: str, *containers: PodContainer, **changes: Any) -> Pod:
    """The pod ``ml/<name>``, bound to this node."""
    pod = Pod(
        f"uid-{name}",
        "ml",
        name,
        "node-a",
        containers=containers,
        created_at=NOW - 90,
        scheduler="volcano",
    )
    return msgspec.structs.replace(pod, **changes)


def wants_vgpus(name: str, count: int = 1, **changes: Any) -> PodContainer:
    """A container that asks for GPUs of Volcano's."""
    return msgspec.structs.replace(
        PodContainer(name, limits={VGPU: count, MEMORY: 4096, "example.com/nic": 1}), **changes
    )


@pytest.fixture
def volcano_node(node: AgentStatus) -> AgentStatus:
    """The node with Volcano's vGPUs: ml/served runs, ml/refused may not start,
    one reservation has no holder yet.
    """
    served = Grant(
        7,
        "volcano-vgpu",
        VGPU,
        IDS,
        (Share("GPU-0", 4096, 30),),
        GrantState.IDENTIFIED,
        Owner("main", "uid-served", "ml", "served"),
        NOW - 50,
        ("uid-served", "main"),
        (
            "kubelet's checkpoint gives these ids to container main",
            "decided by the scheduler, in volcano.sh/vgpu-ids-new",
        ),
    )
    node.ledger.grants = (
        *node.ledger.grants,
        served,
        Grant(8, "volcano-vgpu", VGPU, ("a-3",), (), reserved_at=NOW - 9),
    )
    node.ledger.free |= {VGPU: 7, MEMORY: 100}
    node.ledger.rooms = {VGPU: (DeviceRoom("GPU-0", "", 81920, 77824, 70, 1, 9),)}
    node.ledger.decided_by_pod = frozenset({VGPU})
    node.ledger.only_counted = frozenset({MEMORY})
    refused = a_pod("refused", wants_vgpus("main", 2), bound=2)
    started = wants_vgpus("main", 2, started=True)
    setup = PodContainer("setup", ContainerKind.INIT)
    node.cluster = ClusterStatus(
        connected=True,
        needed=True,
        origin="service account in /var/run/secrets",
        requests={("patch", "pods", "200"): 4, ("get", "nodes", "no answer"): 1},
        watches=(
            WatchStatus(
                "pods of this node",
                synced=True,
                lists=1,
                watches=3,
                events=12,
                errors=2,
                unreadable=1,
                last_event_at=NOW - 3,
            ),
            WatchStatus("this node", synced=True, last_event_at=NOW - 4),
        ),
        writers=(
            WriterStatus("node", 3),
            WriterStatus("pods", 4, 1, 0, 2, 1.5),
            WriterStatus("events", 1, 0, 5),
        ),
        evictions={"evicted": 1, "postponed": 2, "failed": 0},
        gpu_evictions={"evicted": 1, "postponed": 0, "failed": 0},
        rescued={"evicted": 0, "recreated": 1, "left_alone": 0},
        config_map="kube-system/volcano-vgpu-device-config",
        remembered={"kubelet_version": "v1.30.0", "in_use": False},
        pods=(
            a_pod(
                "served",
                setup,
                started,
                phase="Running",
                annotations={
                    "volcano.sh/bind-phase": "success",
                    "kubernetes.io/config.source": "api",
                },
                bound=1,
            ),
            refused,
        ),
        pods_synced=True,
    )
    node.binding = BindingStatus(
        mode=BindingMode(
            late=True,
            by_annotation=False,
            reason="the Node says containerd://2.0.1, which resolves CDI names",
        ),
        families=(FamilyStatus("nvidia"), FamilyStatus("volcano-vgpu", decided_by_pod=True)),
        refusals=(
            Refusal(refused, "main", VGPU, "no GPU has 4096 MiB left", NOW - 63, 5, final=False),
        ),
        ambiguities=1,
        wrong_guesses=2,
        exchanges=3,
        in_force={"volcano-vgpu": {"split": 10}},
        file_problems=("device-config.yaml: nvidia.deviceMemoryScaling is no number",),
    )
    node.containers = (
        ContainerUsage(
            "ml", "served", "main", 0, "GPU-0", 1 << 30, 4 << 30, 25, int(NOW) - 8, 30, 1
        ),
    )
    node.plugins = (
        *node.plugins,
        PluginStatus(
            VGPU,
            "volcano-vgpu",
            PluginState.REGISTERED,
            stream_open=True,
            pre_starts=4,
            pre_starts_refused=1,
            pre_start_seconds_sum=0.04,
        ),
    )
    node.events = (
        *node.events,
        Entry(NOW - 50, "allocate.reserved", {"grant": 7, "token": TOKEN}),
        Entry(NOW - 40, "start.bound", {"pod": "ml/served", "token": TOKEN}),
        Entry(NOW - 30, "pods.written", {"pod": "ml/served", "tokens": [TOKEN]}),
        Entry(NOW - 5, "ledger.released", {"pod": "ml/gone"}),
    )
    return node


@pytest.fixture
def source(node: AgentStatus) -> Snapshot:
    """Return the source from which the servers read; a test changes `current`."""
    return Snapshot(node)


@pytest.fixture
def request_timeout_seconds() -> float:
    """Return how long a request may take to arrive; tests of this limit shorten it."""
    return PATIENCE_SECONDS


@pytest.fixture
async def web(source: Snapshot, request_timeout_seconds: float) -> AsyncIterator[WebServer]:
    """Both servers on free loopback ports."""
    server = WebServer(
        source.status,
        listen="127.0.0.1:0",
        debug_listen="127.0.0.1:0",
        max_body_bytes=MAX_BODY_BYTES,
        request_timeout_seconds=request_timeout_seconds,
        shutdown_seconds=1,
        clock=lambda: NOW,
    )
    async with server:
        yield server


@pytest.fixture
async def ask(web: WebServer) -> AsyncIterator[Callable[..., Awaitable[Answer]]]:
    """A client that takes a path to whichever server has it;
    method and further options are aiohttp's.
    """
    async with aiohttp.ClientSession() as session:

        async def request(path: str, method: str = "GET", **options: Any) -> Answer:
            address = web.debug_address if path.startswith("/debug") else web.public_address
            async with session.request(method, f"http://{address}{path}", **options) as response:
                return Answer(response.status, dict(response.headers), await response.text())

        yield request


@pytest.fixture
def log_level() -> Iterator[None]:
    """The log level after the test is the one before it."""
    before = log.current_level()
    yield
    log.set_level(before if before in log.LEVELS else "warning")


LENT = "the GPU serves nvidia until its last share is returned"


@pytest.fixture
def mixed_node(volcano_node: AgentStatus) -> AgentStatus:
    """Four GPUs: two serve NVIDIA's family, one Volcano's, one none. ml/waits and ml/later wait for
    the first, ml/other for the third.
    """
    volcano_node.inventory = msgspec.structs.replace(
        volcano_node.inventory, gpus=tuple(map(a_gpu, range(4)))
    )
    waits = Claim("GPU-0", "volcano-vgpu", "ml/waits", "uid-waits", NOW - 190, 3)
    later = Claim("GPU-0", "volcano-gpushare", "ml/later", "uid-later", NOW - 60, 4)
    other = Claim("GPU-2", "volcano-gpushare", "ml/other", "uid-other", NOW - 30, 5)
    volcano_node.ledger.uses = (
        GpuUse("GPU-0", "nvidia", NOW - 600, pods=("ml/a", "ml/b"), claims=(waits, later)),
        GpuUse(
            "GPU-1",
            "nvidia",
            NOW - 300,
            or_earlier=True,
            pods=("ml/a", "ml/c", "ml/d", "ml/e"),
            unnamed=1,
        ),
        GpuUse("GPU-2", "volcano-vgpu", NOW - 50, pods=("ml/served",), claims=(other,)),
        GpuUse("GPU-3"),
    )
    volcano_node.ledger.held_back = {
        VGPU: (
            HeldBack("XID 79", "", ("GPU-3",), 1),
            HeldBack(LENT, "nvidia", ("GPU-0", "GPU-1"), 20),
        ),
        "nvidia.com/gpu": (
            HeldBack(LENT.replace("nvidia", "volcano-vgpu"), "volcano-vgpu", ("GPU-2",), 10),
        ),
    }
    volcano_node.plugins = tuple(
        msgspec.structs.replace(plugin, ids_sent=40) if plugin.resource == VGPU else plugin
        for plugin in volcano_node.plugins
    )
    volcano_node.cluster.pods = (
        *volcano_node.cluster.pods,
        *(a_pod(name, wants_vgpus("main"), bound=9) for name in ("waits", "later")),
    )
    return volcano_node
