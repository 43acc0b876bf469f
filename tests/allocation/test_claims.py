"""Claims from bind to start, with real families:
what pods claim, for how long, and what it costs to keep up with them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import msgspec
import pytest

from tests.allocation.binding_parts import NODE, Place
from tests.allocation.mixed_node import MixedNode
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.allocation.context import Families
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.errors import AgentError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import PodFamily
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions, SharedEntry
from vgpu_agent.families.vgpu_manager.control import NoControl
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.ledger.turns import TURN_SECONDS, round_seconds
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS
from vgpu_agent.model import Inventory, Owner, Share
from vgpu_agent.pods import MIRROR_POD, Pod, PodContainer

GPU, NUMBER, SHARE = "nvidia.com/gpu", "volcano.sh/vgpu-number", "volcano.sh/gpu-memory"
VGPU_LIMITS, SHARE_LIMITS = {NUMBER: 1, "volcano.sh/vgpu-memory": 4}, {SHARE: 4}
UNIT_MIB = 1024


def vgpu_on(*gpus: str, node: str = NODE, units: int = 4) -> dict[str, str]:
    """Volcano's annotations for one container on these GPUs."""
    text = "".join(f"{gpu},NVIDIA,{units},0:" for gpu in gpus)
    return {
        "volcano.sh/vgpu-node": node,
        "volcano.sh/vgpu-ids-new": text,
        "volcano.sh/devices-to-allocate": text,
    }


def share_on(number: int) -> dict[str, str]:
    """The older annotation of Volcano for the card of that number."""
    return {"volcano.sh/gpu-index": str(number), "volcano.sh/predicate-time": "1795200991257414295"}


class Node(MixedNode):
    """The golden node with nvidia, volcano-vgpu and volcano-gpushare."""

    def __init__(self, *, replicas: int = 1) -> None:
        shared = (SharedEntry(GPU, replicas, GPU),) if replicas > 1 else ()
        vgpu = VolcanoVgpuFamily(VolcanoVgpuOptions(split=4, factor=UNIT_MIB), NoIsolation())
        gpushare = VolcanoGpushareFamily(
            VolcanoGpushareOptions(factor=UNIT_MIB, lists=ListOptions())
        )
        super().__init__(
            Families((NvidiaFamily(NvidiaOptions(shared=shared)),), (vgpu, gpushare)),
            golden_inventory(),
            random.Random(1),
        )

    def offered(self, resource: str) -> set[str]:
        """The GPUs of which kubelet has healthy ids of the resource."""
        devices = {entry.id.device: False for entry in self.ledger.listing(resource)}
        devices |= {
            entry.id.device: True for entry in self.ledger.listing(resource) if entry.healthy
        }
        return {device for device, healthy in devices.items() if healthy}

    def put(self, name: str, **changes: object) -> None:
        """The watch shows that something about the pod has changed."""
        pod = next(pod for pod in self.book.pods if pod.name == name)
        # of the right type in each test
        self.book.put(msgspec.structs.replace(pod, **changes))
        self.look()

    async def refused(self, name: str) -> str:
        """The text with which the start of the pod is refused."""
        ((resource, ids),) = self.kubelet.pods[name].held.items()
        with pytest.raises(AgentError) as caught:
            await self.allocator.pre_start(resource, ids)
        return str(caught.value)


@pytest.fixture
def node() -> Node:
    """A node on which nothing runs."""
    return Node()


async def test_a_gpu_is_claimed_from_bind_to_start(node: Node) -> None:
    """Image pull and init containers take minutes,
    in which the GPU was free to every other family.
    """
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    (claim,) = node.ledger.claims
    assert (claim.gpu, claim.family, claim.pod, claim.pod_uid) == (
        U0,
        "volcano-vgpu",
        f"default/{name}",
        f"uid-{name}",
    )
    node.wait(WITHDRAWAL_SECONDS)
    assert (node.offered(GPU), node.offered(SHARE), node.offered(NUMBER)) == ({U1}, {U1}, {U0, U1})
    await node.admit({NUMBER: 1}, bound=name)
    assert list(node.ledger.claims) == [claim], (
        "kubelet has given ids, which say nothing about a GPU"
    )
    assert await node.start(name)
    assert not node.ledger.claims
    assert (node.offered(GPU), node.offered(SHARE)) == ({U1}, {U1})


async def test_a_claim_of_the_older_family_names_its_card(node: Node) -> None:
    """``volcano.sh/gpu-index`` counts cards as NVML does."""
    name = node.bind(SHARE_LIMITS, share_on(1))
    assert [(claim.gpu, claim.family) for claim in node.ledger.claims] == [(U1, "volcano-gpushare")]
    await node.admit({SHARE: 4}, bound=name)
    assert await node.start(name)
    assert node.ledger.claims == ()


ENDS: Mapping[str, dict[str, object]] = {
    "it has ended": {"phase": "Failed"},
    "it is being deleted": {"deleting": True},
    "its container has started": {
        "containers": (PodContainer("main", limits=VGPU_LIMITS, started=True),)
    },
}


@pytest.mark.parametrize("changes", ENDS.values(), ids=ENDS)
def test_a_claim_ends_with_what_would_have_started(node: Node, changes: dict[str, object]) -> None:
    """Nothing is kept for a pod that starts nothing any more."""
    node.put(node.bind(VGPU_LIMITS, vgpu_on(U0)), **changes)
    assert node.ledger.claims == ()
    node.wait(TURN_SECONDS)
    assert node.offered(GPU) == {U0, U1}


def test_a_claim_ends_when_the_start_is_refused_for_good(node: Node) -> None:
    """An early guess was wrong, so kubelet will never let this pod start."""
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    node.refusals.refuse(node.pod(name), "main", NUMBER, "a test")
    node.look()
    assert node.ledger.claims, "this one is tried again"
    node.refusals.refuse(node.pod(name), "main", NUMBER, "a test", final=True)
    node.look()
    assert not node.ledger.claims


NOTHING: Mapping[str, tuple[dict[str, int], dict[str, str]]] = {
    "another node": (VGPU_LIMITS, vgpu_on(U0, node="node-b")),
    "an unknown GPU": (VGPU_LIMITS, vgpu_on("GPU-99999999-0000-0000-0000-000000000000")),
    "more memory than the GPU has": (
        {NUMBER: 1, "volcano.sh/vgpu-memory": 99999},
        vgpu_on(U0, units=99999),
    ),
    "more memory than was asked for": (VGPU_LIMITS, vgpu_on(U0, units=5)),
    "more GPUs than were asked for": (VGPU_LIMITS, vgpu_on(U0, U1)),
    "one GPU twice": (VGPU_LIMITS | {NUMBER: 2}, vgpu_on(U0, U0)),
    "more GPUs than there are": (VGPU_LIMITS | {NUMBER: 2**62}, vgpu_on(U0)),
    "no number of GPUs": ({"volcano.sh/vgpu-memory": 4}, vgpu_on(U0)),
    "nothing asked for": ({}, vgpu_on(U0)),
    "no annotation": (VGPU_LIMITS, {}),
    "a malformed annotation": (VGPU_LIMITS, vgpu_on(f"{U0},x,")),
    "two families for one container": (VGPU_LIMITS | {GPU: 1}, vgpu_on(U0)),
    "a card without that number": (SHARE_LIMITS, share_on(2)),
    "cards of a hostile length": (SHARE_LIMITS, {"volcano.sh/gpu-index": "0," * 100_000}),
    "more units than a card has": ({SHARE: 41}, share_on(0)),
    "units without end": ({SHARE: 2**62}, share_on(0)),
}


@pytest.mark.parametrize(("limits", "annotations"), NOTHING.values(), ids=NOTHING)
def test_what_can_never_start_claims_nothing(
    node: Node, limits: dict[str, int], annotations: dict[str, str]
) -> None:
    """Every user with the right to create pods may write annotations."""
    node.bind(limits, annotations)
    assert node.ledger.claims == ()


def test_containers_that_together_need_more_than_the_gpu_has_claim_nothing(node: Node) -> None:
    """The last of them would be refused for ever, and the GPU be kept for it."""
    text = f"{U0},NVIDIA,30,0:;{U0},NVIDIA,30,0:"
    containers = tuple(
        PodContainer(name, limits={NUMBER: 1, "volcano.sh/vgpu-memory": 30})
        for name in ("one", "two")
    )
    annotations = vgpu_on(U0) | {
        "volcano.sh/vgpu-ids-new": text,
        "volcano.sh/devices-to-allocate": text,
    }
    node.put(node.bind(VGPU_LIMITS, {}), containers=containers, annotations=annotations)
    assert node.ledger.claims == ()


def test_a_pod_that_no_scheduler_has_bound_claims_nothing(node: Node) -> None:
    """A pod with spec.nodeName has passed no scheduler, and the kubelet may never admit it."""
    node.put(node.bind(VGPU_LIMITS, vgpu_on(U0)), scheduled=False)
    assert node.ledger.claims == ()


def test_a_pod_that_calls_itself_a_mirror_claims_nothing(node: Node) -> None:
    """The kubelet runs no such pod, so the claim would never end."""
    node.bind(VGPU_LIMITS, vgpu_on(U0) | {MIRROR_POD: "x"})
    assert node.ledger.claims == ()


def test_a_family_that_is_not_served_now_keeps_nothing(node: Node) -> None:
    """Its library is missing, say: its pods cannot start,
    and the GPUs would be idle until it is delivered.
    """
    node.bind(VGPU_LIMITS, vgpu_on(U0))
    node.allocator.use_families(
        msgspec.structs.replace(node.families, paused=node.families.pod_families[:1])
    )
    node.look()
    assert node.ledger.claims == ()


def test_claims_are_as_they_were_after_a_restart_of_the_agent(node: Node) -> None:
    """They are made from the watch before anything is offered.
    Only since when is not known any more.
    """
    for gpu in (U1, U0):
        node.bind(VGPU_LIMITS, vgpu_on(gpu))
    before = [msgspec.structs.replace(claim, since=0.0) for claim in node.ledger.claims]
    node.start_agent()
    assert [msgspec.structs.replace(claim, since=0.0) for claim in node.ledger.claims] == before
    assert node.offered(GPU) == set()


def test_a_claim_remembers_since_when_it_is_there(node: Node) -> None:
    """Other pods come and go meanwhile."""
    node.bind(VGPU_LIMITS, vgpu_on(U0))
    (claim,) = node.ledger.claims
    node.bind(VGPU_LIMITS, vgpu_on(U1))
    assert node.ledger.claims[0] == claim


async def test_a_start_that_would_join_a_drained_gpu_is_tried_again_later(node: Node) -> None:
    """Otherwise the other family's pod waits for ever. The kubelet asks again, and the text names
    the pod for which the GPU is kept.
    """
    running = node.bind(VGPU_LIMITS, vgpu_on(U0))
    await node.admit({NUMBER: 1}, bound=running)
    assert await node.start(running)
    waits = node.bind(SHARE_LIMITS, share_on(0))
    late = node.bind(VGPU_LIMITS, vgpu_on(U0))
    await node.admit({NUMBER: 1}, bound=late)
    assert "kept for a pod to which a scheduler of volcano-gpushare" in await node.refused(late)
    node.wait(WITHDRAWAL_SECONDS)
    assert node.offered(NUMBER) == {U1}
    node.end(running)
    node.verify()
    await node.admit({SHARE: 4}, bound=waits)
    assert await node.start(waits)
    node.end(waits)
    node.verify()
    assert await node.start(late), "the claim that is older now is its own"


async def test_a_younger_claim_keeps_nothing_from_a_pod_with_an_older_one(node: Node) -> None:
    """Oldest claim first, in both directions."""
    first = node.bind(VGPU_LIMITS, vgpu_on(U0))
    second = node.bind(SHARE_LIMITS, share_on(0))
    await node.admit({SHARE: 4}, bound=second)
    await node.admit({NUMBER: 1}, bound=first)
    assert "kept for a pod to which a scheduler of volcano-vgpu" in await node.refused(second)
    assert await node.start(first)


async def test_a_pod_that_nobody_has_placed_goes_to_a_gpu_that_is_nobodys(node: Node) -> None:
    """The agent's own choice used to take the GPU for which a scheduler's pod was on its way."""
    node.bind(SHARE_LIMITS, share_on(0))
    name = await node.admit({NUMBER: 1})
    assert await node.start(name)
    (grant,) = node.ledger.grants
    assert [share.device for share in grant.shares] == [U1]


async def test_a_start_knows_of_a_pod_that_was_bound_a_moment_ago(node: Node) -> None:
    """The loop that follows the pods may not have had its turn yet."""
    name = await node.admit({NUMBER: 1})
    bound = Pod(
        "uid-x",
        "default",
        "x",
        NODE,
        annotations=share_on(0),
        containers=(PodContainer("main", limits=SHARE_LIMITS),),
    )
    node.book.put(msgspec.structs.replace(bound, scheduled=True))
    assert await node.start(name)
    assert [share.device for grant in node.ledger.grants for share in grant.shares] == [U1]


def test_the_preferred_ids_are_of_gpus_that_nobody_claims(node: Node) -> None:
    """The kubelet's list may be a moment older than ours."""
    node.bind(VGPU_LIMITS, vgpu_on(U0))
    assert node.allocator.preferred(GPU, [U0, U1], [], 1) == [U1]
    assert set(node.allocator.preferred(GPU, [U0, U1], [], 2)) == {U0, U1}


async def test_pods_that_each_hold_a_part_do_not_wait_for_each_other(node: Node) -> None:
    """A pod with a part of its GPUs comes before all that have nothing, also when a restart has
    changed the order of the pods.
    """
    text = f"{U0},NVIDIA,4,0:;{U1},NVIDIA,4,0:"
    containers = tuple(PodContainer(name, limits=VGPU_LIMITS) for name in ("main", "second"))
    half = node.bind(VGPU_LIMITS, {})
    annotations = vgpu_on(U0) | {
        "volcano.sh/vgpu-ids-new": text,
        "volcano.sh/devices-to-allocate": text,
    }
    node.put(half, containers=containers, annotations=annotations)
    await node.admit({NUMBER: 1}, bound=half)
    assert await node.start(half)
    older = Pod(
        "uid-older",
        "default",
        "older",
        NODE,
        annotations=share_on(1),
        created_at=-1.0,
        scheduled=True,
    )
    older = msgspec.structs.replace(older, containers=(PodContainer("main", limits=SHARE_LIMITS),))
    partly = node.pod(half)
    node.book.replace([older])
    node.book.replace([older, partly])
    node.start_agent()
    assert node.pod("older").bound < node.pod(half).bound
    assert [(claim.pod, claim.gpu) for claim in node.ledger.claims] == [
        (f"default/{half}", U1),
        ("default/older", U1),
    ]


async def test_the_agent_gives_a_pod_the_rest_although_older_pods_claim_all_gpus(
    node: Node,
) -> None:
    """One of them may wait for the GPU that this pod has a part of already."""
    name = await node.admit({NUMBER: 1})
    containers = tuple(PodContainer(each, limits=VGPU_LIMITS) for each in ("before", "main"))
    (held,) = node.kubelet.pods[name].held[NUMBER]
    free = next(id_ for id_ in node.kubelet.lists[NUMBER] if id_ != held)
    node.put(name, containers=containers)
    node.ledger.decide(
        NUMBER,
        [free],
        [Share(U0, 4 * UNIT_MIB)],
        Owner("before", f"uid-{name}", "default", name),
        evidence=("a test",),
    )
    for number in (0, 1):
        node.bind(SHARE_LIMITS, share_on(number))
    assert all(room.trouble for room in node.ledger.rooms(NUMBER))
    assert await node.start(name)


async def test_a_restarted_agent_waits_for_no_claim_where_a_container_starts_again(
    node: Node,
) -> None:
    """A container keeps its share across restarts. Another family's claim waits for its end."""
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    await node.admit({NUMBER: 1}, bound=name)
    assert await node.start(name)
    node.bind(SHARE_LIMITS, share_on(0))
    assert await node.start(name)
    node.start_agent()
    assert await node.start(name)


def test_nothing_is_asked_again_while_nothing_has_changed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at before every decision, and a start has a budget of milliseconds."""
    names = [node.bind(VGPU_LIMITS, vgpu_on(U0)) for _ in range(5)]
    asked: list[str] = []
    family = node.families.pod_families[0]
    before = family.named_gpus

    def named_gpus(pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        asked.append(pod.name)
        return before(pod, inventory)

    monkeypatch.setattr(family, "named_gpus", named_gpus)
    for _ in range(10):
        node.allocator.refresh_claims()
    assert asked == []
    node.put(names[2], resource_version="2")
    assert asked == [names[2]]


def test_the_annotations_of_pods_that_run_are_not_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most events are about those, and reading annotations is most of what claims cost in a burst
    of starts.
    """
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    asked: list[str] = []

    def named_gpus(pod: Pod, _: Inventory) -> Mapping[str, tuple[str, ...]]:
        asked.append(pod.name)
        return {}

    for family in node.families.pod_families:
        monkeypatch.setattr(family, "named_gpus", named_gpus)
    node.put(name, containers=(PodContainer("main", limits=VGPU_LIMITS, started=True),))
    node.put(name, phase="Running")
    assert asked == []
    assert not node.ledger.claims


async def test_a_pod_event_costs_at_most_one_changed_list_a_family(node: Node) -> None:
    """The kubelet rewrites its checkpoint for each list that it is sent."""
    lists: dict[str, list[object]] = {}

    def note() -> int:
        for resource in (GPU, NUMBER, SHARE):
            seen = lists.setdefault(resource, [])
            now = list(node.ledger.listing(resource))
            if not seen or seen[-1] != now:
                seen.append(now)
        return max(map(len, lists.values()))

    assert note() == 1
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    assert note() == 1, "kubelet is told after the schedulers"
    node.wait(WITHDRAWAL_SECONDS)
    assert note() == 2
    await node.admit({NUMBER: 1}, bound=name)
    assert await node.start(name)
    assert note() == 2
    node.end(name)
    node.verify()
    note()
    node.wait(TURN_SECONDS)
    assert note() == 3


@pytest.mark.looptime
async def test_a_start_waits_a_moment_for_a_gpu_that_another_family_is_offered_first(
    node: Node,
) -> None:
    """The kubelet would ask again much later than the GPU is free."""
    waiting = await node.admit({NUMBER: 1})
    node.bind(SHARE_LIMITS, share_on(1))
    passing = node.bind(VGPU_LIMITS, vgpu_on(U0))
    await node.admit({NUMBER: 1}, bound=passing)
    assert await node.start(passing)
    node.end(passing)
    node.verify()
    assert "before the others" in next(
        room.trouble for room in node.ledger.rooms(NUMBER) if room.device == U0
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    for tenth in range(60):
        loop.call_later(tenth / 10, node.wait, 0.1)
    assert await node.start(waiting)
    assert TURN_SECONDS <= loop.time() - began <= round_seconds(3)


async def test_a_booking_by_ids_is_made_although_a_pod_waits_for_the_gpu(node: Node) -> None:
    """The kubelet received the claim too late, and would fail the pod for a refusal.
    The claim waits for this holder.
    """
    name = node.bind(VGPU_LIMITS, vgpu_on(U0))
    await node.allocator.allocate(GPU, [U0])
    await node.admit({NUMBER: 1}, bound=name)
    assert "serves nvidia" in await node.refused(name)
    assert [claim.gpu for claim in node.ledger.claims] == [U0]


async def test_an_early_answer_is_given_and_its_start_refused_while_an_older_claim_waits() -> None:
    """In early mode the shares are booked in Allocate, which must not fail the pod. What is not
    booked then is tried again at the start.
    """
    node = Node()
    node.allocator.use_mode(BindingMode(late=False, by_annotation=False, reason="a test"))
    first = node.bind(SHARE_LIMITS, share_on(0))
    second = node.bind(VGPU_LIMITS, vgpu_on(U0))
    assert await node.admit({NUMBER: 1}, bound=second)
    (grant,) = node.ledger.grants
    assert grant.shares == ()
    assert [claim.pod for claim in node.ledger.claims] == [f"default/{first}", f"default/{second}"]
    node.end_unadmitted(first)
    node.wait(TURN_SECONDS)
    third = node.bind(VGPU_LIMITS, vgpu_on(U1))
    assert await node.admit({NUMBER: 1}, bound=third)
    assert [claim.pod for claim in node.ledger.claims] == [f"default/{second}"], (
        "booked in Allocate, a claim is over"
    )


_NUMBER = "nvidia.com/vgpu-number"


@pytest.mark.parametrize(
    ("family", "resource", "limits", "annotations"),
    [
        (
            VolcanoVgpuFamily(VolcanoVgpuOptions(factor=2), NoIsolation()),
            NUMBER,
            {NUMBER: 1, "volcano.sh/vgpu-memory": 15000},
            vgpu_on(U0, units=15000),
        ),
        (
            VgpuManagerFamily(VgpuManagerOptions(), NoControl()),
            _NUMBER,
            {_NUMBER: 1, "nvidia.com/vgpu-memory": 30000},
            {
                "nvidia.com/predicate-node": NODE,
                "nvidia.com/pre-allocated": f"main[0_{U0}_0_30000]",
            },
        ),
        (
            VolcanoGpushareFamily(VolcanoGpushareOptions(factor=1024)),
            SHARE,
            {SHARE: 30},
            share_on(0),
        ),
    ],
    ids=["volcano-vgpu", "vgpu-manager", "volcano-gpushare"],
)
async def test_the_agents_own_choice_leaves_a_gpu_to_the_pod_that_it_was_given_to(
    family: PodFamily, resource: str, limits: dict[str, int], annotations: dict[str, str]
) -> None:
    """The image of a pod that a scheduler has bound to GPU 0 is still pulled. A pod of a plain
    kube-scheduler, for which the agent chooses, goes to GPU 1. Otherwise the first one could not
    start for as long as it runs.
    """
    place = Place(family=family, resource=resource)
    found = place.ledger.resource(resource)
    assert found is not None
    ids, count = [entry.id for entry in found.ids], limits[resource]
    given = Pod(
        "uid-v",
        "default",
        "v",
        NODE,
        annotations=annotations,
        containers=(PodContainer("main", limits=limits),),
        scheduled=True,
        scheduler="volcano" if family.name != "vgpu-manager" else "vgpu-scheduler",
    )
    free = msgspec.structs.replace(
        given, uid="uid-q", name="q", annotations={}, scheduler="default-scheduler"
    )
    place.book.replace([given, free])
    place.allocator.refresh_claims()
    await place.admit(given, "main", ids[:count])
    await place.admit(free, "main", ids[count : 2 * count])
    await place.start(ids[count : 2 * count])
    await place.start(ids[:count])
    assert {
        grant.owner.pod: [share.device for share in grant.shares]
        for grant in place.ledger.grants
        if grant.owner is not None
    } == {"v": [U0], "q": [U1]}
