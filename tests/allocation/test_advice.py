"""The second half of refusals on a node of several families: the holder of the GPU, what frees it,
what to do, and where there is room.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.allocation.later_parts import confirm
from tests.allocation.mixed_node import MixedNode
from tests.allocation.test_mixed_families import MEMORY, NUMBER, SHARED, UNIT_MIB
from tests.allocation.volcano_place import VolcanoPlace, scheduled
from tests.families.nvidia.parts import shared_by
from tests.families.volcano_vgpu.golden import decided
from tests.golden import U0
from vgpu_agent.allocation import advice
from vgpu_agent.allocation.context import Families
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import AgentError, CapacityError, UnhealthyDeviceError
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.model import Gpu, Health, Inventory

GPUS = tuple(f"GPU-{place:08d}-0000-4000-8000-000000000000" for place in range(16))


def gpu(place: int) -> Gpu:
    """A card of 24 GiB."""
    return Gpu(GPUS[place], place, place, "NVIDIA A10", 24576, f"0000:{place:02x}:00.0", 0, (8, 6))


def mixed(gpus: int = 4) -> MixedNode:
    """Two replicas of each GPU under NVIDIA's name, and Volcano's vGPUs of the same GPUs."""
    families = Families(
        (NvidiaFamily(shared_by(2, published=SHARED)),),
        (VolcanoVgpuFamily(VolcanoVgpuOptions(factor=UNIT_MIB), NoIsolation()),),
    )
    return MixedNode(
        families, Inventory(version=1, gpus=tuple(map(gpu, range(gpus)))), random.Random(0)
    )


async def hold(node: MixedNode, *ids: str) -> None:
    """A pod of NVIDIA's family for each id, known to kubelet by name."""
    for id_ in ids:
        node.kubelet.lists[SHARED] = {id_: True}
        assert await node.admit({SHARED: 1})
        node.look()
    node.verify()


async def admit(node: MixedNode, units: int = 1) -> str:
    """A pod that asks for a vGPU and waits for its image."""
    name = await node.admit({NUMBER: 1, MEMORY: units})
    assert name
    return name


async def admit_scheduled(node: MixedNode, place: int, units: int = 1) -> str:
    """The same, and Volcano's scheduler has named the GPU at ``place``."""
    name = await admit(node, units)
    pod = node.book.get(f"uid-{name}")
    assert pod is not None
    text = f"{GPUS[place]},NVIDIA,{units},0:"
    annotations = {**decided(text), "volcano.sh/vgpu-node": "node-a"}
    node.book.put(msgspec.structs.replace(pod, annotations=annotations, scheduler="volcano"))
    return name


async def refused(node: MixedNode, name: str) -> str:
    """The text that kubelet shows for the start of the pod."""
    held = node.kubelet.pods[name].held
    with pytest.raises(AgentError) as caught:
        await node.allocator.pre_start(NUMBER, held[NUMBER])
    return str(caught.value)


async def test_a_pod_whose_gpu_serves_another_family_reads_what_frees_it_and_where_room_is() -> (
    None
):
    """It waited beside idle GPUs, and nothing named them, the remedy, or the end of the wait."""
    node = mixed()
    await hold(node, f"{GPUS[0]}::0", f"{GPUS[0]}::1", f"{GPUS[1]}::0")
    name = await admit_scheduled(node, 0)
    text = await refused(node, name)
    before, since, after = text.partition(", since ")
    assert before == (
        f"default/{name}, container main: {GPUS[0]} is not available: the GPU serves nvidia until "
        "its last share is returned. 2 pods of nvidia have shares of it"
    )
    assert since
    assert after.partition(". ")[2] == (
        "The pod's scheduler has named this GPU, so the pod waits for it. The kubelet tries again "
        "by itself. To have the pod scheduled anew, delete it, or set binding.refusedEvictSeconds "
        "(now 0: never). Room for it now: GPU 2, 3."
    )
    assert text.count(GPUS[0]) == 1


async def test_a_refusal_names_no_pod_of_anybody_else() -> None:
    """It is shown in the status of a tenant's pod and in its events."""
    node = mixed()
    await hold(node, f"{GPUS[0]}::0")
    name = await admit_scheduled(node, 0)
    text = await refused(node, name)
    assert "1 pod of nvidia has shares of it" in text
    assert "default/pod-1" not in text


async def test_memory_that_is_not_there_is_summed_up_in_plain_words() -> None:
    """``38400 MiB booked of 23028`` added what was booked and what was wanted without a word."""
    node = mixed(2)
    first = await admit_scheduled(node, 0, units=4)
    await node.allocator.pre_start(NUMBER, node.kubelet.pods[first].held[NUMBER])
    text = await refused(node, await admit_scheduled(node, 0, units=3))
    assert (
        f"{GPUS[0]} has no room: 16384 MiB booked + 12288 wanted, of 24576; memory is never "
        "overcommitted. "
    ) in text
    assert text.endswith("Room for it now: GPU 1.")


async def test_where_nothing_has_room_that_is_said() -> None:
    """An empty list would leave the reader guessing."""
    node = mixed(2)
    name = await admit_scheduled(node, 0)
    await hold(node, f"{GPUS[0]}::0", f"{GPUS[1]}::0")
    assert (await refused(node, name)).endswith("No other GPU of this node has room for it now.")


async def test_an_ill_gpu_is_not_waited_for_because_of_its_pods() -> None:
    """Their end would not make it well."""
    node = mixed()
    await hold(node, f"{GPUS[0]}::0")
    ill = msgspec.structs.replace(node.inventory.gpus[0], health=Health(ok=False, reason="XID 79"))
    node.inventory = msgspec.structs.replace(
        node.inventory, version=2, gpus=(ill, *node.inventory.gpus[1:])
    )
    node.look()
    text = await refused(node, await admit_scheduled(node, 0))
    assert "is not available: XID 79. The pod's scheduler" in text


async def test_a_pod_that_the_agent_places_reads_the_remedy_and_one_reason_for_alike_gpus() -> None:
    """Sixteen GPUs with the same reason filled the message with it."""
    node = mixed(16)
    name = await admit(node)
    await hold(node, *(f"{uuid}::0" for uuid in GPUS))
    text = await refused(node, name)
    assert text.count("the GPU serves nvidia until its last share is returned") == 1
    assert f"{', '.join(GPUS[:4])}, … (16 in all): the GPU serves nvidia" in text
    assert text.endswith(
        "To have the pod scheduled anew, delete it, or set binding.refusedEvictSeconds (now 0: "
        "never)."
    )
    assert len(text) < 1024  # the longest event


async def test_the_eviction_that_will_come_is_announced() -> None:
    """The pod's owner need not delete anything then."""
    assert advice.for_waiting(Binding(refused_evict_seconds=120)) == (
        "The kubelet tries again by itself. To have the pod scheduled anew at once, delete it; "
        "binding.refusedEvictSeconds does so after 120 s."
    )


async def test_an_allocate_that_came_too_late_is_final_and_says_so() -> None:
    """The kubelet fails the pod for it, and its owner reads why, what to do,
    and that there is room elsewhere.
    """
    node = mixed()
    name = await admit_scheduled(node, 0)
    await node.allocator.pre_start(NUMBER, node.kubelet.pods[name].held[NUMBER])
    with pytest.raises(UnhealthyDeviceError) as caught:
        await node.allocator.allocate(SHARED, [f"{GPUS[0]}::1"])
    text = str(caught.value)
    assert text.startswith(
        f'invalid allocation request for "{SHARED}": {GPUS[0]}::1 is not available: the GPU serves '
        "volcano-vgpu until its last share is "
        "returned. 1 pod of volcano-vgpu has shares of it, since "
    )
    assert text.endswith(
        "The kubelet chose these ids from an older list and fails the pod for good. Its "
        "controller creates a new pod; a pod without a controller must be created again. Room "
        "for it now: GPU 1, 2, 3."
    )


async def test_the_reason_stays_the_same_while_the_node_around_it_changes() -> None:
    """The journal and the events tell a reason once;
    how many pods there are and where there is room changes by the second.
    """
    node = mixed()
    await hold(node, f"{GPUS[0]}::0")
    name = await admit_scheduled(node, 0)
    first = await refused(node, name)
    await hold(node, f"{GPUS[0]}::1", f"{GPUS[2]}::0")
    second = await refused(node, name)
    assert first != second
    told = [entry for entry in node.journal.entries if entry.event == "start.refused"]
    assert [entry.facts["reason"] for entry in told] == [
        f"{GPUS[0]} is not available: the GPU serves nvidia until its last share is returned"
    ]


async def test_a_gpu_serves_since_its_pod_was_decided_also_for_an_agent_started_later() -> None:
    """The spec of a late grant has the time.
    A wait that begins anew with each restart would look short.
    """
    place = VolcanoPlace()
    await place.started(scheduled("first", (U0, 4, 60)))
    (record,) = place.carrier.records
    place.carrier.specs[record.token] = (
        msgspec.structs.replace(record, decided_at=1000.0),
        place.carrier.specs[record.token][1],
    )
    after = VolcanoPlace(before=place)
    confirm(after, initial=True)
    (use,) = (use for use in after.ledger.uses if use.family)
    assert (use.gpu, use.since, use.or_earlier, use.pods) == (U0, 1000.0, False, ("team/first",))


async def test_a_gpu_whose_pod_only_kubelets_records_name_serves_since_then_or_earlier() -> None:
    """The kubelet's records have no times; also after the pod has been named and looked at again
    and again.
    """
    node = mixed()
    await hold(node, f"{GPUS[0]}::0")
    assert not node.ledger.uses[0].or_earlier
    node.start_agent()
    node.verify()
    (use,) = (use for use in node.ledger.uses if use.family)
    assert (use.family, use.pods, use.or_earlier) == ("nvidia", ("default/pod-1",), True)


async def test_an_error_carries_its_parts() -> None:
    """The advice is part of the message and can be separated from the rest."""
    err = CapacityError("no room", device="GPU-0").advised("Wait.", suffix="; really")
    assert (str(err), err.text, err.device, err.advice) == (
        "no room; really. Wait.",
        "no room; really",
        "GPU-0",
        "Wait.",
    )
