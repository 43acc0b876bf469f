"""Plugin servers while offers change, fit or do not fit, and the agent stops.
The kubelet is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests import constants
from tests.allocation.without_pods import without_pods
from vgpu_agent.agent.offers import servers
from vgpu_agent.agent.offers.servers import Offering
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.device_ids import DeviceId, ListedDevice
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.plugin import SentList
from vgpu_agent.kubelet.server import DevicePlugin
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Inventory, Resource
from vgpu_agent.nodes import SentCounts
from vgpu_agent.status import KubeletStatus, Withheld


def resource(name: str, ids: int = 1) -> Resource:
    """An offer of one GPU under this name."""
    return Resource(
        name,
        "nvidia",
        tuple(DeviceId(f"GPU-1::{number}", "GPU-1") for number in range(ids)),
        holders_per_device=ids,
    )


class Node:
    """An offering over a ledger whose offers the test sets."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        self.supervisor, self.ledger, self.journal = supervisor, Ledger(), Journal()
        settings = Kubelet(directory=str(directory))
        self.offering = Offering(
            ledger=self.ledger,
            allocator=Allocator(
                without_pods(
                    ledger=self.ledger,
                    families=Families(),
                    inventory=Inventory,
                    journal=self.journal,
                )
            ),
            directory=DirectoryWatch(
                settings.device_plugin_directory,
                poll_seconds=5,
                journal=self.journal,
                status=KubeletStatus(),
            ),
            supervisor=supervisor,
            journal=self.journal,
            error_after_seconds=30,
        )

    async def offer(self, *resources: Resource) -> None:
        """Offer these and nothing else."""
        self.ledger.offer(resources)
        await self.offering.sync()

    @property
    def served(self) -> list[str]:
        """The resources that have a plugin server."""
        return [status.resource for status in self.offering.statuses]

    @property
    def tasks(self) -> list[str]:
        """The supervised loops."""
        return [report.name for report in self.supervisor.reports]


def withheld(lines: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Level and reason of each line that says why something is not served."""
    return [
        (line["log_level"], line["reason"]) for line in lines if line["event"] == "plugin.withheld"
    ]


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 4096})


@contextlib.asynccontextmanager
async def running(directory: Path, *, seconds: float = 10) -> AsyncIterator[Node]:
    """A node whose loops end with the test, in time or not at all."""
    async with (
        asyncio.timeout(seconds),
        Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1) as supervisor,
    ):
        yield Node(supervisor, directory)


async def test_a_renamed_resource_is_served_under_its_new_name_only(tmp_path: Path) -> None:
    """renameByDefault: the old name's server is gone, kubelet sees it end."""
    async with running(tmp_path) as node:
        await node.offer(resource("nvidia.com/gpu"))
        await node.offer(resource("nvidia.com/gpu.shared"))
        assert node.served == ["nvidia.com/gpu.shared"]
        assert node.tasks == ["plugin nvidia.com/gpu.shared"]


async def test_a_list_that_no_longer_fits_is_withdrawn_with_a_reason_until_it_fits(
    tmp_path: Path,
) -> None:
    """GPUs that come later can make a list too long.
    This is reported once, and the resource comes back.
    """
    async with running(tmp_path) as node:
        await node.offer(resource("nvidia.com/gpu"))
        await node.offer(resource("nvidia.com/gpu", ids=1000))
        await node.offering.sync()
        assert node.served == []
        assert "replicas: at most" in node.offering.withheld["nvidia.com/gpu"]
        assert [entry.event for entry in node.journal.entries] == ["plugin.withheld"]
        await node.offer(resource("nvidia.com/gpu"))
        assert (node.served, node.offering.withheld) == (["nvidia.com/gpu"], {})


async def test_a_gate_withholds_one_resource_until_it_opens(tmp_path: Path) -> None:
    """A daemon or a file that one resource needs is missing:
    that one waits with the reason, the others are offered.
    """
    async with running(tmp_path) as node:
        missing = {"nvidia.com/gpu.shared": Withheld("the MPS daemon does not answer")}
        node.offering.gates.append(lambda resource: missing.get(resource.name))
        whole = Resource("nvidia.com/gpu", "nvidia", (DeviceId("GPU-2", "GPU-2"),))
        await node.offer(whole, resource("nvidia.com/gpu.shared"))
        assert node.served == ["nvidia.com/gpu"]
        assert node.offering.withheld == {"nvidia.com/gpu.shared": "the MPS daemon does not answer"}
        missing.clear()
        await node.offering.sync()
        assert (node.served, node.offering.withheld) == (
            ["nvidia.com/gpu", "nvidia.com/gpu.shared"],
            {},
        )


@pytest.mark.looptime
async def test_waiting_for_what_is_on_its_way_is_no_error(tmp_path: Path) -> None:
    """The ordinary start of a daemon: shown in the readiness, and logged as information."""
    async with running(tmp_path) as node:
        reasons: list[Withheld | None] = [Withheld("the daemon is being started", temporary=True)]
        node.offering.gates.append(lambda _: reasons[0])
        with capture_logs() as lines:
            await node.offer(resource("nvidia.com/gpu"))
            assert node.offering.withheld == {"nvidia.com/gpu": "the daemon is being started"}
            reasons[0] = None
            await node.offering.sync()
            await asyncio.sleep(9)
        assert withheld(lines) == [("info", "the daemon is being started")]
        assert (node.served, node.offering.withheld) == (["nvidia.com/gpu"], {})


@pytest.mark.looptime
async def test_a_wait_that_fails_is_an_error_at_once(tmp_path: Path) -> None:
    """The daemon was refused. The trouble is reported at once,
    and the wait is not reported again.
    """
    async with running(tmp_path, seconds=100) as node:
        reasons = [Withheld("the daemon is being started", temporary=True)]
        node.offering.gates.append(lambda _: reasons[0])
        with capture_logs() as lines:
            await node.offer(resource("nvidia.com/gpu"))
            reasons[:] = [Withheld("no permission")]
            await node.offering.sync()
            await asyncio.sleep(40)
        assert withheld(lines) == [
            ("info", "the daemon is being started"),
            ("error", "no permission"),
        ]


@pytest.mark.looptime
async def test_a_wait_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    """It is logged once, however often the steps on the way change.
    The readiness has shown it all the time.
    """
    async with running(tmp_path, seconds=100) as node:
        reasons = [Withheld("the daemon is about to be started", temporary=True)]
        node.offering.gates.append(lambda _: reasons[0])
        with capture_logs() as lines:
            await node.offer(resource("nvidia.com/gpu"))
            await asyncio.sleep(20)
            reasons[:] = [Withheld("the daemon is being started", temporary=True)]
            await node.offering.sync()
            await asyncio.sleep(60)
            await node.offering.sync()
        assert [line for line in withheld(lines) if line[0] == "error"] == [
            ("error", "the daemon is being started, for 30 s now")
        ]
        assert node.offering.withheld == {"nvidia.com/gpu": "the daemon is being started"}


@pytest.mark.looptime
async def test_a_wait_for_what_is_no_longer_offered_ends_silently(tmp_path: Path) -> None:
    """Sharing was switched off while the daemon started."""
    async with running(tmp_path, seconds=100) as node:
        node.offering.gates.append(
            lambda _: Withheld("the daemon is being started", temporary=True)
        )
        with capture_logs() as lines:
            await node.offer(resource("nvidia.com/gpu"))
            await node.offer()
            await asyncio.sleep(40)
        assert [level for level, _ in withheld(lines)] == ["info"]


@pytest.mark.parametrize("turns", range(1, 7))
async def test_two_changes_at_once_end_with_the_later_offer(tmp_path: Path, turns: int) -> None:
    """A new configuration and a new inventory come from two loops.
    What the ledger offers at the end is what runs.
    """
    async with running(tmp_path) as node:
        await node.offer(resource("nvidia.com/gpu"))
        changing = asyncio.ensure_future(node.offer(resource("nvidia.com/gpu.shared")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await node.offer(resource("nvidia.com/gpu"))
        await changing
        assert node.served == ["nvidia.com/gpu"]
        assert node.tasks == ["plugin nvidia.com/gpu"]


@pytest.mark.parametrize("turns", range(6))
async def test_nothing_is_started_once_the_agent_stops(tmp_path: Path, turns: int) -> None:
    """SIGTERM while a resource is being renamed:
    a server that started now would register with kubelet on its way out.
    """
    async with running(tmp_path) as node:
        await node.offer(resource("nvidia.com/gpu"))
        changing = asyncio.ensure_future(node.offer(resource("nvidia.com/gpu.shared")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await node.offering.stop()
        await changing
        assert node.served == []
        assert node.tasks == []


async def test_counts_are_told_for_schedulers_where_several_families_are_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One family alone has its GPUs for itself, and kubelet's pace will do.
    A resource without an open stream has no count.
    """
    async with running(tmp_path) as node:
        sent = SentList([ListedDevice(DeviceId("GPU-1::0", "GPU-1"), healthy=False)], seconds_ago=1)
        monkeypatch.setattr(
            DevicePlugin,
            "last_sent",
            property(lambda self: sent if self.resource.name != "example.com/closed" else None),
        )
        one = resource("nvidia.com/gpu")
        await node.offer(one)
        assert node.offering.counts_sent_while_shared == {}
        await node.offer(
            one,
            *(
                msgspec.structs.replace(one, name=name, family=name)
                for name in ("k8s.amazonaws.com/vgpu", "example.com/closed")
            ),
        )
        for plugin in node.offering.plugins:
            plugin.status.ids_sent, plugin.status.healthy_sent = 4, 3
        monkeypatch.setattr(
            node.ledger,
            "offered_ids",
            {"nvidia.com/gpu": 2, "k8s.amazonaws.com/vgpu": 4}.__getitem__,
        )
        fewer, all_of_them = (
            SentCounts(listed=4, healthy=3, offered=2),
            SentCounts(listed=4, healthy=3, offered=3),
        )
        assert node.offering.counts_sent_while_shared == {
            "nvidia.com/gpu": fewer,
            "k8s.amazonaws.com/vgpu": all_of_them,
        }
        node.offering.plugins[0].status.not_listed = "kubelet does not list the agent's ids"
        assert node.offering.counts_sent_while_shared.keys() == {"k8s.amazonaws.com/vgpu"}


@pytest.mark.parametrize("trouble", ["not registered", "not forgotten"])
async def test_a_resource_in_trouble_does_not_spoil_the_hand_over_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Its own ids are Unhealthy for a moment; those of the others never are."""
    ended: list[str] = []

    async def unlink(plugin: DevicePlugin) -> bool:
        assert plugin.is_registered
        return plugin.resource.name != "example.com/b"

    async def end_streams(plugin: DevicePlugin) -> None:
        ended.append(plugin.resource.name)

    async def until_disconnected(_: DevicePlugin, seconds: float) -> None:
        await asyncio.sleep(seconds)

    monkeypatch.setattr(servers, "UNLINK_SECONDS", 0.05)
    monkeypatch.setattr(DevicePlugin, "unlink", unlink)
    monkeypatch.setattr(DevicePlugin, "end_streams", end_streams)
    monkeypatch.setattr(DevicePlugin, "until_disconnected", until_disconnected)
    monkeypatch.setattr(
        DevicePlugin,
        "is_registered",
        property(lambda self: trouble == "not forgotten" or self.resource.name == "example.com/a"),
    )
    names = ("example.com/a", "example.com/b")
    async with running(tmp_path) as node:
        one = resource("nvidia.com/gpu")
        await node.offer(*(msgspec.structs.replace(one, name=name, family=name) for name in names))
        assert await node.offering.unlink(names)
        assert ended == ["example.com/a"]
