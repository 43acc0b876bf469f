"""The desired state of our Node that follows from the health of its GPUs; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.cluster.fake_api import NODE, WatchedNode, node, running
from tests.cluster.gpu_world import U0, U1, XID, World, gpu, ignore
from vgpu_agent.cluster import gpu_status
from vgpu_agent.cluster.gpu_status import CONDITION, TAINT, Outage, condition
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.concurrency import Revision
from vgpu_agent.config.node_status import NodeStatus
from vgpu_agent.model import Health, Inventory
from vgpu_agent.nodes import DesiredNode, Node
from vgpu_agent.status import NvmlState

pytestmark = pytest.mark.looptime


class Published:
    """A world and the publisher of its Node."""

    def __init__(self, world: World, settings: NodeStatus) -> None:
        self.world, self.settings, self.wake = world, settings, Revision()
        self.watched, self._outage = WatchedNode(world.api), Outage()
        self.publisher = NodePublisher(
            world.api,
            "n1",
            self.watched.latest,
            lambda node, _: self._desired(node),
            self.wake,
            world.journal,
            world.now,
        )
        world.api.put(NODE, node())

    def _desired(self, node: Node) -> DesiredNode:
        seconds = self._outage.seconds(
            self.world.inventory.value, asyncio.get_running_loop().time()
        )
        return gpu_status.desired_node(self.world.facts, self.settings, node, seconds)

    def run(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Run the publisher."""
        return running(self.publisher.run(ignore))

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the Node's conditions by type."""
        found = self.world.api.objects[NODE]["status"]["conditions"]
        return {one["type"]: one for one in found}

    @property
    def taints(self) -> list[dict[str, Any]]:
        """Return the Node's taints."""
        found: list[dict[str, Any]] = self.world.api.objects[NODE].get("spec", {}).get("taints", [])
        return found

    @property
    def patches(self) -> int:
        """Return the number of writes to the Node."""
        return sum(request.verb == "patch" for request in self.world.api.requests)


async def test_the_condition_says_which_gpu_is_dead_and_why() -> None:
    """True, False and True again, with the transition times of a condition."""
    published = Published(World(), NodeStatus(condition=True))
    async with published.run():
        await asyncio.sleep(20)
        first = published.conditions[CONDITION]
        published.world.fail(U0)
        await asyncio.sleep(20)
        failed = published.conditions[CONDITION]
        published.world.fail(U1, lost=True)
        await asyncio.sleep(20)
        lost = published.conditions[CONDITION]
    assert (first["status"], first["reason"], first["message"]) == (
        "True",
        "AllGpusHealthy",
        "2 GPUs can be used",
    )
    assert (failed["status"], failed["reason"], failed["message"]) == (
        "False",
        "GpuUnhealthy",
        f"GPU 0 ({U0}): {XID}",
    )
    assert (lost["status"], lost["reason"]) == ("False", "GpuLost")
    assert lost["lastTransitionTime"] == failed["lastTransitionTime"] != first["lastTransitionTime"]
    assert lost["lastHeartbeatTime"] != failed["lastHeartbeatTime"]
    assert published.conditions["Ready"]["reason"] == "KubeletReady"


async def test_a_condition_that_does_not_change_costs_no_request() -> None:
    """Nothing is refreshed: a thousand nodes would cost writes for nothing."""
    published = Published(World(), NodeStatus(condition=True))
    async with published.run():
        await asyncio.sleep(20)
        before = len(published.world.api.requests)
        await asyncio.sleep(4 * 3600)
        assert len(published.world.api.requests) == before
    assert published.patches == 1


async def test_a_condition_that_is_switched_off_is_removed_and_those_of_others_stay() -> None:
    """A stale one would claim for ever that the GPUs are healthy."""
    published = Published(World(), NodeStatus(condition=True))
    async with published.run():
        await asyncio.sleep(20)
        published.settings = NodeStatus()
        published.wake.advance()
        await asyncio.sleep(20)
        assert set(published.conditions) == {"Ready"}
        foreign = {"type": CONDITION, "status": "True", "reason": "Theirs", "message": ""}
        conditions = [*published.conditions.values(), foreign]
        published.world.api.change(NODE, {"status": {"conditions": conditions}})
        before = published.patches
        await asyncio.sleep(60)
        assert (published.conditions[CONDITION], published.patches) == (foreign, before)


@pytest.mark.parametrize(
    ("state", "gpus", "failures", "expected"),
    [
        (NvmlState.HUNG, 2, (), ("Unknown", "DriverHung")),
        (NvmlState.MISSING, 0, (), ("Unknown", "DriverMissing")),
        (NvmlState.STARTING, 0, (), ("Unknown", "DriverMissing")),
        (NvmlState.ANSWERING, 0, (), ("Unknown", "NoGpu")),
        (NvmlState.ANSWERING, 0, ("0: Unknown Error",), ("False", "GpuNotAnswering")),
        (NvmlState.ANSWERING, 1, ("1: Unknown Error",), ("False", "GpuNotAnswering")),
        (NvmlState.ANSWERING, 1, (), ("True", "AllGpusHealthy")),
        (NvmlState.UNUSED, 1, (), ("True", "AllGpusHealthy")),
    ],
)
async def test_a_driver_that_does_not_say_how_the_gpus_are_makes_it_unknown(
    state: NvmlState, gpus: int, failures: tuple[str, ...], expected: tuple[str, str]
) -> None:
    """Unknown is neither healthy nor a reason to drain."""
    world = World()
    world.driver.state = state
    cards = tuple(gpu(number, f"GPU-{number}") for number in range(gpus))
    world.inventory.publish(Inventory(2, cards, failures=failures))
    assert condition(world.facts)[:2] == expected


async def test_the_message_of_many_dead_gpus_is_short() -> None:
    """Sixteen cards with their reasons would be unreadable."""
    world = World(tuple(gpu(number, f"GPU-{number}") for number in range(16)))
    dead = msgspec.structs.replace(world.inventory.value.gpus[0].health, ok=False, reason=XID)
    gpus = tuple(msgspec.structs.replace(one, health=dead) for one in world.inventory.value.gpus)
    world.inventory.publish(Inventory(2, gpus))
    _, _, message = condition(world.facts)
    assert message.endswith("; and 12 more")
    assert len(message) < 400


TAINTED = NodeStatus(taint="NoSchedule")
OURS = {"key": TAINT, "effect": "NoSchedule"}
THEIRS = {"key": "example.com/maintenance", "effect": "NoExecute", "value": "today"}


async def test_a_node_whose_gpus_have_all_failed_is_tainted_until_one_is_back() -> None:
    """Not for a moment, and not while one of two works. Taints of others stay."""
    published = Published(World(), TAINTED)
    published.world.api.change(NODE, {"spec": {"taints": [THEIRS]}})
    async with published.run():
        published.world.fail(U0)
        await asyncio.sleep(300)
        assert published.taints == [THEIRS]
        published.world.fail(U1, lost=True)
        await asyncio.sleep(50)
        assert published.taints == [THEIRS]
        await asyncio.sleep(25)
        assert published.taints == [THEIRS, OURS]
        published.world.recover(U1)
        await asyncio.sleep(20)
        assert published.taints == [THEIRS]
    assert published.patches == 2


def test_a_step_of_the_wall_clock_taints_no_node() -> None:
    """With NoExecute, all pods of the node would end because its GPUs were away for a moment, as
    while the driver is reloaded at the boot. A GPU that fails anew begins anew.
    """
    outage, away = Outage(), Health(ok=False, since=1000.0)
    inventory = Inventory(1, (msgspec.structs.replace(gpu(0, U0), health=away),))
    assert outage.seconds(inventory, 5.0) == 0
    assert outage.seconds(inventory, 65.0) == 60
    later = msgspec.structs.replace(away, since=5000.0)
    again = Inventory(2, (msgspec.structs.replace(gpu(0, U0), health=later),))
    assert outage.seconds(again, 66.0) == 0
    assert outage.seconds(Inventory(3, (gpu(0, U0),)), 67.0) is None
    assert outage.seconds(Inventory(4, ()), 68.0) is None


async def test_a_taint_that_another_client_sets_at_the_same_moment_is_kept() -> None:
    """The list is replaced as a whole, so the write depends on the version that was read."""
    published = Published(World(), TAINTED)
    published.world.fail(U0)
    published.world.fail(U1)
    api, get = published.world.api, published.world.api.get

    async def get_and_then_another_taint(
        path: str, params: Mapping[str, str] | None = None
    ) -> bytes:
        answer = await get(path, params)
        if "spec" not in api.objects[NODE]:
            api.change(NODE, {"spec": {"taints": [THEIRS]}})
        return answer

    api.get = get_and_then_another_taint  # type: ignore[method-assign] # a race on purpose
    async with published.run():
        await asyncio.sleep(100)
    assert published.taints == [THEIRS, OURS]


async def test_a_restart_without_any_gpu_leaves_the_taint_as_it_was() -> None:
    """The driver does not list lost GPUs, and a node without GPUs must not be tainted."""
    world = World()
    world.inventory.publish(Inventory(2, ()))
    for standing in ([OURS], []):
        published = Published(world, TAINTED)
        published.world.api.change(NODE, {"spec": {"taints": standing}})
        async with published.run():
            await asyncio.sleep(300)
        assert published.taints == standing


async def test_another_effect_replaces_the_taint_and_switched_off_it_goes() -> None:
    """Two taints of one key would be left otherwise."""
    published = Published(World(), TAINTED)
    published.world.fail(U0)
    published.world.fail(U1)
    async with published.run():
        await asyncio.sleep(100)
        published.settings = NodeStatus(taint="NoExecute")
        published.wake.advance()
        await asyncio.sleep(20)
        assert published.taints == [{"key": TAINT, "effect": "NoExecute"}]
        published.settings = NodeStatus()
        published.wake.advance()
        await asyncio.sleep(20)
        assert published.taints == []


async def test_no_taint_is_written_unless_it_is_asked_for() -> None:
    """A node that is drained for every failed card would surprise."""
    published = Published(World(), NodeStatus())
    published.world.fail(U0)
    published.world.fail(U1)
    async with published.run():
        await asyncio.sleep(600)
    assert published.patches == 0
