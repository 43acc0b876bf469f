"""The choice of GPUs where several families share a node: as few as possible for each family."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests import constants
from tests.allocation.mixed_node import Container, MixedNode
from tests.families.nvidia.parts import shared_by
from tests.families.volcano_vgpu.golden import U0, U1, main, pod
from tests.families.volcano_vgpu.mig.parts import GROUP2, ask, mig_family
from tests.families.volcano_vgpu.mig.parts import node as divided
from tests.settings import settings as settings_of
from vgpu_agent.allocation.claims import Claims
from vgpu_agent.allocation.context import Families
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import IdFamily, PodFamily
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.model import Gpu, Inventory, MigInstance
from vgpu_agent.placement.mixing import GpuUses

GPUS = tuple(
    f"GPU-{letter * 8}-0000-4000-8000-00000000000{place}" for place, letter in enumerate("abcd")
)
INVENTORY = Inventory(
    1,
    tuple(
        Gpu(uuid, place, place, "NVIDIA A10", 24576, f"0000:0{place}:00.0", 0, (8, 6))
        for place, uuid in enumerate(GPUS)
    ),
)
GPU, VGPU, CARD_MEMORY, CARDS, NUMBER, MEMORY = (
    "nvidia.com/gpu",
    "k8s.amazonaws.com/vgpu",
    "volcano.sh/gpu-memory",
    "volcano.sh/gpu-number",
    "volcano.sh/vgpu-number",
    "volcano.sh/vgpu-memory",
)
CARDS_40GB = (U0, U1)
AWS = AwsFamily(AwsOptions(vgpus=4))


def node(
    *by_ids: IdFamily, by_pod: tuple[PodFamily, ...] = (), inventory: Inventory = INVENTORY
) -> MixedNode:
    """Four GPUs that these families share."""
    return MixedNode(Families(by_ids, by_pod), inventory, random.Random(0))


def nvidia(**options: Any) -> NvidiaFamily:
    """Each GPU four times."""
    return NvidiaFamily(shared_by(4, **options))


def gpushare(strategy: str = "share") -> VolcanoGpushareFamily:
    """Budgets or whole cards."""
    return VolcanoGpushareFamily(VolcanoGpushareOptions(strategy=strategy, lists=ListOptions()))


async def take(on: MixedNode, resource: str, count: int = 1) -> list[str]:
    """The GPUs that the next container gets, chosen as the kubelet has them chosen;
    by the first letter of their UUIDs.
    """
    chosen = on.allocator.preferred(resource, on.kubelet.free(resource), [], count)
    await on.allocator.allocate(resource, chosen)
    name = f"by-ids-{len(on.kubelet.pods)}"
    on.kubelet.pods[name] = Container(name, {resource: chosen}, Edits())
    on.look()
    return [
        GPUS[next(place for place, uuid in enumerate(GPUS) if id_.startswith(uuid))][4]
        for id_ in chosen
    ]


async def test_three_pods_of_one_replica_leave_three_gpus_to_the_other_families() -> None:
    """Spread over three GPUs, which is NVIDIA's default,
    they would lock the others out of all but one.
    """
    mixed = node(nvidia(), AWS)
    assert [await take(mixed, GPU) for _ in range(5)] == [["a"], ["a"], ["a"], ["a"], ["b"]]
    assert await take(mixed, VGPU) == ["c"]


async def test_with_one_family_on_replicas_are_spread_as_ever() -> None:
    """No family is locked out there."""
    alone = node(nvidia())
    assert [await take(alone, GPU) for _ in range(5)] == [["a"], ["b"], ["c"], ["d"], ["a"]]


async def test_a_policy_that_an_operator_has_set_counts_before_the_mix() -> None:
    """An operator who sets distributed on such a node wants the time of each GPU more than room
    for others.
    """
    mixed = node(nvidia(policy_is_set=True), AWS)
    assert [await take(mixed, GPU) for _ in range(3)] == [["a"], ["b"], ["c"]]


async def test_gpus_that_no_other_family_is_offered_are_shared_out_first() -> None:
    """Volcano's node configuration hides GPU a and c from its families: nvidia spreads over those
    two, and keeps off the others.
    """
    vgpu = VolcanoVgpuFamily(
        VolcanoVgpuOptions(hidden_uuids=frozenset((GPUS[0], GPUS[2]))), NoIsolation()
    )
    mixed = node(nvidia(), by_pod=(vgpu,))
    assert [await take(mixed, GPU) for _ in range(4)] == [["a"], ["c"], ["a"], ["c"]]


async def test_slices_of_a_gpu_that_no_other_family_can_use_are_chosen_by_the_policy() -> None:
    """GPU sharing is offered GPUs in MIG mode and gives nothing of them away,
    so nvidia's slices lock no family out.
    """
    gpus = tuple(
        msgspec.structs.replace(
            gpu,
            mig_enabled=True,
            mig_instances=tuple(
                MigInstance(
                    f"MIG-{gpu.index}{number}",
                    number,
                    number,
                    0,
                    "1g.5gb",
                    4864,
                    1,
                    1,
                    ("/dev/cap",),
                )
                for number in range(2)
            ),
        )
        for gpu in INVENTORY.gpus[:2]
    )
    inventory = msgspec.structs.replace(INVENTORY, gpus=(*gpus, *INVENTORY.gpus[2:]))
    mixed = node(
        NvidiaFamily(NvidiaOptions(mig_strategy="mixed")), by_pod=(gpushare(),), inventory=inventory
    )
    slices = "nvidia.com/mig-1g.5gb"
    chosen = [mixed.allocator.preferred(slices, mixed.kubelet.free(slices), [], 2)]
    assert chosen == [["MIG-00", "MIG-10"]]


async def test_shares_of_aws_stay_on_gpus_of_aws() -> None:
    """The fullest that has room is one of its own. A free one is begun when those are full."""
    mixed = node(nvidia(), AWS)
    assert [await take(mixed, VGPU, 3), await take(mixed, VGPU, 2), await take(mixed, VGPU)] == [
        ["a"] * 3,
        ["b"] * 2,
        ["a"],
    ]


@pytest.mark.parametrize(
    "family", [gpushare(), VolcanoVgpuFamily(VolcanoVgpuOptions(), NoIsolation())]
)
async def test_a_pod_that_no_scheduler_placed_goes_where_its_family_is(family: PodFamily) -> None:
    """GPU sharing by itself takes the lowest number with room:
    GPU a, which nvidia has given back meanwhile.
    """
    limits = {CARD_MEMORY: 1000} if family.name == "volcano-gpushare" else {NUMBER: 1, MEMORY: 1000}
    mixed = node(nvidia(), by_pod=(family,))
    assert await take(mixed, GPU) == ["a"]
    first = await mixed.admit(limits)
    assert await mixed.start(first)
    mixed.kubelet.pods = {first: mixed.kubelet.pods[first]}  # the pod of nvidia has ended
    mixed.verify()
    second = await mixed.admit(limits)
    assert await mixed.start(second)
    devices = {share.device for grant in mixed.ledger.grants for share in grant.shares}
    assert devices == {GPUS[1]}


@pytest.mark.parametrize(
    "family", [gpushare(), VolcanoVgpuFamily(VolcanoVgpuOptions(), NoIsolation())]
)
async def test_a_pod_that_no_scheduler_placed_keeps_off_gpus_that_another_family_waits_for(
    family: PodFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that a scheduler has sent to GPU a would otherwise find it in use when it starts. One
    of its own family is not in the way.
    """
    limits = {CARD_MEMORY: 1000} if family.name == "volcano-gpushare" else {NUMBER: 1, MEMORY: 1000}
    mixed = node(nvidia(), by_pod=(family,))
    monkeypatch.setattr(Claims, "refresh", lambda _: None)  # these belong to no pod of the cache
    mixed.ledger.claim(
        [
            Claim(GPUS[0], "another", "team/waits", "uid-1", 1.0, 1),
            Claim(GPUS[1], family.name, "team/b", "uid-2", 2.0, 2),
        ]
    )
    name = await mixed.admit(limits)
    assert await mixed.start(name)
    assert [share.device for grant in mixed.ledger.grants for share in grant.shares] == [GPUS[1]]


@pytest.mark.parametrize(
    ("others", "serving", "expected"), [((), (), 0), ((), (1,), 1), ((0,), (), 1)]
)
def test_an_instance_is_taken_of_a_gpu_that_serves_the_family(
    others: tuple[int, ...],
    serving: tuple[int, ...],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both GPUs have a MIG instance that fits.
    One of a GPU that another family has or waits for is not taken.
    """
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 10**9})
    asked = ask(pod(main(number=1, memory=4000)), divided(*GROUP2, of_u1=GROUP2))
    used, wanted = (
        frozenset(CARDS_40GB[place] for place in places) for places in (serving, others)
    )
    around = GpuUses(frozenset(CARDS_40GB), used, wanted)
    (share,) = mig_family().decide(msgspec.structs.replace(asked, gpu_uses=around)).shares
    assert share.device == f"MIG-{CARDS_40GB[expected][-1]}-3"


def test_the_setting_auto_is_the_default_and_any_other_is_a_choice() -> None:
    """NVIDIA's default written out by an operator is a setting,
    the same default of ours is none.
    """
    written = load_contents(
        Sources({}, {}, "c.yaml"),
        Contents(b"version: v1\nplugin: {sharedDevicesAllocationPolicy: distributed}\n"),
    ).settings
    read = [
        NvidiaOptions.from_settings(settings, lists=ListOptions())
        for settings in (settings_of(), written)
    ]
    assert [(options.policy, options.policy_is_set) for options in read] == [
        ("distributed", False),
        ("distributed", True),
    ]
