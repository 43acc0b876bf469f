"""Another chance for pods that cannot start here:
when their owner is informed, and when they are evicted; on virtual time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cluster.fake_api import FakeApi, pod, pod_at, running, unavailable
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.overcommits import Overcommits
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.reschedule import Reschedule
from vgpu_agent.concurrency import Revision
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.ledger.accounting import Overcommit
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod

NUMBER = "volcano.sh/vgpu-number"
EVENTS = "/api/v1/namespaces/default/events"

pytestmark = pytest.mark.looptime


def _now() -> float:
    return 1000 + asyncio.get_running_loop().time()


class World:
    """An API server with the pods a and b, their refusals, and the part under test."""

    def __init__(self, *, evict_seconds: float = 0.0, rescued: bool = False) -> None:
        self.api, self.journal, self.notices = FakeApi(), Journal(), Notices()
        self.overcommits = Overcommits(self.notices)
        self.set_back_seconds = 0.0
        self.refusals = Refusals(lambda: _now() - self.set_back_seconds)
        self.events = Events(self.api, "vgpu-agent", "n1", self.journal, _now)
        self.reschedule = Reschedule(
            self.api,
            self.events,
            lambda: self.refusals.current,
            self.refusals.revision,
            Binding(refused_evict_seconds=evict_seconds),
            self.journal,
            notices=self.notices,
            rescued=lambda _resource: rescued,
        )
        for name in "ab":
            self.api.put(pod_at(name), pod(name))

    def run(self) -> Any:
        """Both loops while the block lasts."""
        return running(self.reschedule.run(_ignore), self.events.run(_ignore))

    def refuse(
        self,
        name: str = "a",
        reason: str = "no GPU has 8000 MiB left",
        *,
        advice: str = "",
        final: bool = False,
    ) -> None:
        """PreStartContainer says no."""
        self.refusals.refuse(
            Pod(f"uid-{name}", "default", name), "main", NUMBER, reason, advice=advice, final=final
        )

    @property
    def told(self) -> list[tuple[str, str, str]]:
        """Pod, reason and message of each event."""
        return [
            (event["involvedObject"]["name"], event["reason"], event["message"])
            for event in self.api.below(EVENTS)
        ]

    @property
    def evictions(self) -> list[str]:
        """Paths of the eviction requests."""
        return [request.path for request in self.api.requests if request.path.endswith("/eviction")]


def _ignore() -> None:
    """A heartbeat without a listener."""


TOLD = (
    "a",
    "VgpuStartRefused",
    f"container main may not start with its {NUMBER}: no GPU has 8000 MiB left",
)


async def test_a_start_that_stays_refused_becomes_an_event_after_its_time() -> None:
    """Refused for 30 seconds: once, whatever kubelet tries meanwhile, and the pod stays."""
    world = World()
    async with world.run():
        world.refuse()
        await asyncio.sleep(29)
        assert world.told == []
        for _ in range(20):
            await asyncio.sleep(14)
            world.refuse()
    assert world.told == [TOLD]
    assert world.evictions == []


async def test_the_owner_reads_the_remedy_once_although_the_node_has_changed() -> None:
    """The room changes with every pod that comes or goes.
    An event for each would flood the API server.
    """
    world = World()
    async with world.run():
        for number in range(20):
            world.refuse(advice=f"Room for it now: GPU {number}.")
            await asyncio.sleep(14)
    ((_, _, message),) = world.told
    assert message == f"{TOLD[2]}. Room for it now: GPU 2."


async def test_a_pod_that_was_started_beyond_the_card_gets_one_event() -> None:
    """At the next look, whether anything is refused or not. The start itself waits for nothing."""
    world = World()
    async with world.run():
        text = world.overcommits.add(
            Pod("uid-a", "default", "a"), "main", [Overcommit(NUMBER, "GPU-0", 111, 100, 3, 10)]
        )
        await asyncio.sleep(11)
        await asyncio.sleep(600)
    assert world.told == [("a", "VgpuOvercommitted", text)]
    assert world.evictions == []


async def test_a_pod_whose_memory_was_overbooked_is_given_back() -> None:
    """Its scheduler counts it as placed, so it would wait here for ever;
    evicted after its time, its controller makes it anew.
    """
    world = World(evict_seconds=120)
    async with world.run():
        for _ in range(12):
            world.refuse(
                reason=(
                    "GPU-0 has no room: 39936 MiB booked + 2048 wanted, of 40960; memory is never "
                    "overcommitted"
                )
            )
            await asyncio.sleep(12)
    assert [reason for _, reason, _ in world.told] == ["VgpuStartRefused", "VgpuEvicted"]
    assert len(world.evictions) == 1


async def test_a_start_that_succeeds_in_time_is_not_talked_about() -> None:
    """The pod had merely not been seen yet."""
    world = World(evict_seconds=60)
    async with world.run():
        world.refuse()
        await asyncio.sleep(20)
        world.refusals.clear("uid-a", "main")
        await asyncio.sleep(600)
    assert world.api.requests == []


async def test_a_final_refusal_is_reported_at_once() -> None:
    """A wrong early guess cannot mend itself."""
    world = World()
    async with world.run():
        world.refuse(final=True)
        await asyncio.sleep(1)
    assert world.told == [TOLD]


async def test_a_pod_whose_refusal_is_final_is_given_back_at_once_under_eviction() -> None:
    """The kubelet keeps a wrong early answer for the life of the pod,
    so only a new pod can start.
    """
    for evict_seconds, evicted in ((0.0, 0), (600.0, 1)):
        world = World(evict_seconds=evict_seconds)
        async with world.run():
            world.refuse(final=True)
            await asyncio.sleep(15)
        assert len(world.evictions) == evicted


async def test_a_final_refusal_is_left_to_whoever_makes_pods_anew() -> None:
    """Evicted here, a bare pod would be gone for good."""
    world = World(evict_seconds=600, rescued=True)
    async with world.run():
        world.refuse(final=True)
        await asyncio.sleep(1200)
    assert world.evictions == []


async def test_a_refusal_that_becomes_final_is_told_again_at_once() -> None:
    """The reason is another one now."""
    world = World()
    async with world.run():
        world.refuse()
        await asyncio.sleep(31)
        world.refuse(reason="the guess was wrong", final=True)
        await asyncio.sleep(1)
    assert len(world.told) == 2


async def test_a_refusal_that_becomes_final_for_the_same_reason_is_told_again() -> None:
    """The advice is new: which of two pods with the same ids is to be deleted."""
    world = World()
    async with world.run():
        world.refuse()
        await asyncio.sleep(31)
        world.refuse(advice="delete this one", final=True)
        await asyncio.sleep(1)
    assert [message.endswith("delete this one") for _, _, message in world.told] == [False, True]


async def test_a_reason_with_changing_numbers_does_not_become_a_flood() -> None:
    """Each try has another number of free MiB. The owner gets one every half minute at most."""
    world = World()
    async with world.run():
        for number in range(60):
            world.refuse(reason=f"only {number} MiB are left")
            await asyncio.sleep(5)
    assert len(world.told) <= 10


async def test_what_is_still_refused_after_an_hour_is_told_again() -> None:
    """The API server forgets events after an hour, the user's question stays."""
    world = World()
    async with world.run():
        world.refuse()
        await asyncio.sleep(3640)
    assert world.told == [TOLD, TOLD]


async def test_a_pod_is_evicted_after_its_time_and_only_this_very_pod() -> None:
    """The request carries the UID; event and journal say why."""
    world = World(evict_seconds=120)
    async with world.run():
        world.refuse()
        await asyncio.sleep(119)
        assert world.evictions == []
        await asyncio.sleep(2)
    (request,) = [request for request in world.api.requests if request.path.endswith("/eviction")]
    assert request.body == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "a", "namespace": "default"},
        "deleteOptions": {"preconditions": {"uid": "uid-a"}},
    }
    assert pod_at("a") not in world.api.objects
    assert [reason for _, reason, _ in world.told] == ["VgpuStartRefused", "VgpuEvicted"]
    assert [entry.event for entry in world.journal.entries] == ["reschedule.evicted"]
    assert world.reschedule.evictions["evicted"] == 1


async def test_a_clock_that_is_set_makes_no_refusal_older() -> None:
    """The node's clock is an hour slow until it is set,
    seconds after a start was refused that only the API server held up.
    """
    world = World(evict_seconds=120)
    world.set_back_seconds = 3600
    async with world.run():
        world.refuse()
        world.set_back_seconds = 0
        await asyncio.sleep(25)
        assert (world.told, world.evictions) == ([], [])
        await asyncio.sleep(100)
    assert [reason for _, reason, _ in world.told] == ["VgpuStartRefused", "VgpuEvicted"]
    assert "for 120 s" in world.told[1][2]


async def test_an_evicted_pod_is_left_alone_while_it_ends() -> None:
    """Its grace period may be minutes, in which it stays refused."""
    world = World(evict_seconds=60)
    async with world.run():
        world.refuse()
        await asyncio.sleep(600)
    assert len(world.evictions) == 1


async def test_a_disruption_budget_is_honoured() -> None:
    """429: asked again when the API server says so, until it agrees."""
    world = World(evict_seconds=60)
    world.api.fault = lambda _verb, path, _body: (
        ClusterError(
            "Cannot evict pod: it would violate the budget", status=429, retry_after_seconds=100
        )
        if path.endswith("/eviction")
        else None
    )
    async with world.run():
        world.refuse()
        await asyncio.sleep(370)
        assert len(world.evictions) == 4
        world.api.fault = None
        await asyncio.sleep(101)
    assert world.reschedule.evictions["postponed"] == 4
    assert world.reschedule.evictions["evicted"] == 1
    assert [entry.event for entry in world.journal.entries].count("reschedule.postponed") == 1


async def test_a_static_pod_is_never_evicted() -> None:
    """The kubelet reads it from a file. Its mirror in the API would only come back."""
    world = World(evict_seconds=60)
    static = Pod("mirror-uid", "default", "a", annotations={MIRROR_POD: "h", STATIC_POD_HASH: "h"})
    async with world.run():
        world.refusals.refuse(static, "main", NUMBER, "full")
        await asyncio.sleep(600)
    assert world.evictions == []
    assert len(world.told) == 1


async def test_a_pod_that_is_being_deleted_is_not_evicted_too() -> None:
    """It goes anyway."""
    world = World(evict_seconds=60)
    async with world.run():
        world.refusals.refuse(Pod("uid-a", "default", "a", deleting=True), "main", NUMBER, "full")
        await asyncio.sleep(600)
    assert world.evictions == []


async def test_another_pod_of_the_name_is_not_evicted() -> None:
    """The pod was re-created and the watch does not show it yet: the UID protects the new one."""
    world = World(evict_seconds=60)
    world.api.put(pod_at("a"), pod("a", uid="another"))
    async with world.run():
        world.refuse()
        await asyncio.sleep(120)
        world.refusals.forget_absent([])
        await asyncio.sleep(600)
    assert pod_at("a") in world.api.objects
    assert world.reschedule.evictions["evicted"] == 0
    assert 1 <= len(world.evictions) <= 12


async def test_an_outage_of_an_hour_costs_few_requests_and_the_eviction_follows() -> None:
    """Pauses grow to half a minute. Both pods get their chance in the end."""
    world = World(evict_seconds=60)
    world.api.fault = unavailable
    async with world.run():
        world.refuse("a")
        world.refuse("b")
        await asyncio.sleep(3600)
        tried = len(world.evictions)
        world.api.fault = None
        await asyncio.sleep(31)
    assert tried < 450
    assert world.reschedule.evictions["evicted"] == 2


async def test_a_missing_permission_is_named_once() -> None:
    """It is tried rarely, for it may be granted later."""
    world = World(evict_seconds=60)
    world.api.fault = lambda _verb, path, _body: (
        ClusterError("forbidden", status=403) if path.endswith("/eviction") else None
    )
    async with world.run():
        world.refuse("a")
        world.refuse("b")
        await asyncio.sleep(3600)
    (facts,) = [
        entry.facts for entry in world.journal.entries if entry.event == "reschedule.forbidden"
    ]
    assert "the verb 'create' on 'pods/eviction'" in facts["error"]
    assert len(world.evictions) <= 26


async def test_nothing_is_requested_while_nothing_is_refused() -> None:
    """Ten virtual minutes with signs of life."""
    world = World(evict_seconds=60)
    wake: Revision = world.refusals.revision
    beats: list[int] = []
    async with running(world.reschedule.run(lambda: beats.append(1))):
        wake.publish(7)
        await asyncio.sleep(600)
    assert world.api.requests == []
    assert len(beats) >= 60
