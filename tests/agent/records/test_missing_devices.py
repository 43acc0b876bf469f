"""Pods on devices that are gone: named once, with pod and device, and again when that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from tests.patience import PATIENCE_SECONDS
from tests.settings import settings as settings_of
from vgpu_agent.agent.records.missing_devices import InstanceFile, MissingDevices
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.journal import Entry, Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Holding, Inventory, KubeletRecords, MigInstance, Owner, Resource, Share

MIG = "nvidia.com/mig-1g.5gb"
OWNER = Owner("main", "uid-1", "ml", "train-0")


def _cut(*uuids: str) -> Inventory:
    """GPU 1 cut into instances of these UUIDs."""
    whole = golden_inventory()
    instances = tuple(
        MigInstance(uuid, number, 7 + number, 0, "1g.5gb", 4864)
        for number, uuid in enumerate(uuids)
    )
    return msgspec.structs.replace(
        whole,
        gpus=(
            whole.gpus[0],
            msgspec.structs.replace(whole.gpus[1], mig_enabled=True, mig_instances=instances),
        ),
    )


class Node:
    """A ledger with its inputs, and the journal."""

    def __init__(self, inventory: Inventory, state: Path = Path("/nowhere")) -> None:
        self.inventory, self.journal, self.ledger = inventory, Journal(), Ledger()
        self.ledger.observe(inventory)
        self.ledger.offer(
            [Resource(MIG, "nvidia", (DeviceId("MIG-a", "MIG-a"), DeviceId("MIG-b", "MIG-b")))]
        )
        self.missing = MissingDevices(
            settings_of(state_directory=str(state)),
            self.ledger,
            inventory=lambda: self.inventory,
            journal=self.journal,
        )

    def change(self, inventory: Inventory) -> None:
        """Another inventory, and a look."""
        self.inventory = inventory
        self.ledger.observe(inventory)
        self.missing.check()

    def name(self, *holdings: Holding) -> None:
        """The kubelet's records name the holders of MIG-a."""
        self.ledger.reconcile(
            KubeletRecords(holdings),
            lambda holding: InterpretedHolding("nvidia", tuple(Share(id_) for id_ in holding.ids)),
            reservation_seconds=60,
        )

    def told(self, event: str) -> list[Entry]:
        """The journal's entries of that name."""
        return [entry for entry in self.journal.entries if entry.event == event]


def _held() -> Node:
    node = Node(_cut("MIG-a", "MIG-b"))
    node.ledger.reserve(MIG, ("MIG-a",), (Share("MIG-a"),))
    node.name(Holding(MIG, ("MIG-a",), OWNER))
    return node


def test_a_pod_on_an_instance_that_is_cut_away_is_named_once() -> None:
    """nvidia:D9: an event line with pod, container, resource and device.
    The same state again says nothing.
    """
    node = _held()

    node.change(_cut("MIG-b", "MIG-c"))
    node.change(_cut("MIG-c"))

    (entry,) = node.told("grant.device_missing")
    assert entry.facts["pod"] == "ml/train-0"
    assert {key: entry.facts[key] for key in ("container", "resource", "device", "gpu")} == {
        "container": "main",
        "resource": MIG,
        "device": "MIG-a",
        "gpu": U1,
    }


def test_nobody_is_named_while_devices_only_come() -> None:
    """A geometry that keeps the pod's instance is none of its business."""
    node = _held()

    node.change(_cut("MIG-a", "MIG-z"))

    assert node.told("grant.device_missing") == []


def test_a_lost_gpu_has_not_vanished() -> None:
    """It keeps its place in the inventory and is reported as lost."""
    node = Node(golden_inventory())
    node.ledger.offer([Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0), DeviceId(U1, U1)))])
    node.ledger.reserve("nvidia.com/gpu", (U1,), (Share(U1),))
    whole = golden_inventory()

    node.change(
        msgspec.structs.replace(
            whole, gpus=(whole.gpus[0], msgspec.structs.replace(whole.gpus[1], present=False))
        )
    )

    assert node.told("grant.device_missing") == []


def test_a_driver_that_has_not_answered_says_nothing_about_devices() -> None:
    """At a start without a driver every device would be gone."""
    node = _held()

    node.change(Inventory())

    assert node.told("grant.device_missing") == []


def test_a_driver_that_shows_no_gpu_for_a_moment_brings_no_device_back() -> None:
    """A driver that is opened again has an empty inventory first. The device is missing before and
    after, and is reported once.
    """
    node = _held()
    node.change(_cut("MIG-b"))

    node.change(msgspec.structs.replace(golden_inventory(), gpus=()))
    node.change(_cut("MIG-b"))

    assert len(node.told("grant.device_missing")) == 1
    assert node.told("grant.device_returned") == []


def test_a_device_that_comes_back_to_its_pod_is_told() -> None:
    """MIG UUIDs are the same for the same layout, so the change has been undone."""
    node = _held()
    node.change(_cut("MIG-c"))

    node.change(_cut("MIG-a"))

    (entry,) = node.told("grant.device_returned")
    assert (entry.facts["pod"], entry.facts["device"]) == ("ml/train-0", "MIG-a")


def test_a_pod_that_ended_is_forgotten_silently() -> None:
    """Its device did not come back."""
    node = _held()
    node.change(_cut("MIG-c"))
    node.name()
    node.name()
    node.missing.check()

    assert node.ledger.grants == ()
    assert node.told("grant.device_returned") == []


async def test_after_a_restart_the_gpu_of_an_instance_that_is_gone_is_known(tmp_path: Path) -> None:
    """A process of the pod may still hold the GPU:
    it is named, and not given out whole, as without a restart of the agent.
    """
    before = Node(_cut("MIG-a", "MIG-b"), tmp_path)
    remembering = asyncio.ensure_future(before.missing.save_instances())
    async with asyncio.timeout(PATIENCE_SECONDS):
        # a file has no event to wait for
        while len(await InstanceFile(str(tmp_path)).read()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    remembering.cancel()

    node = Node(golden_inventory(), tmp_path)
    await node.missing.load_instances()
    node.ledger.offer([Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0), DeviceId(U1, U1)))])
    node.name(Holding(MIG, ("MIG-a",), OWNER))
    node.missing.check()

    (entry,) = node.told("grant.device_missing")
    assert (entry.facts["pod"], entry.facts["device"], entry.facts["gpu"]) == (
        "ml/train-0",
        "MIG-a",
        U1,
    )
    assert {
        listed.id.device: listed.healthy for listed in node.ledger.listing("nvidia.com/gpu")
    } == {U0: True, U1: False}


@pytest.mark.looptime
async def test_a_holder_that_is_named_later_is_told_then() -> None:
    """The kubelet's records come a second after Allocate. The loop reads them by itself."""
    node = Node(_cut("MIG-a"))
    node.ledger.reserve(MIG, ("MIG-a",), (Share("MIG-a"),))
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(node.missing.run())
        node.inventory = _cut("MIG-b")
        node.ledger.observe(node.inventory)
        await asyncio.sleep(0)
        assert node.told("grant.device_missing") == []
        node.name(Holding(MIG, ("MIG-a",), OWNER))
        await asyncio.sleep(1)
        loop.cancel()

    assert [entry.facts["pod"] for entry in node.told("grant.device_missing")] == ["ml/train-0"]
