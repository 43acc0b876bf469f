"""Volcano's annotations, read and written for kube-scheduler (volcano-vgpu §2, §3, §8)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.volcano_vgpu.pod_devices import DevicesTextError
from vgpu_agent.families.volcano_vgpu.requests import Names
from vgpu_agent.families.volcano_vgpu.scheduling import VolcanoScheduling
from vgpu_agent.placement.nodes.allocation import Placement, Refusal, allocate
from vgpu_agent.placement.nodes.book import Book, HeldCard, Holding
from vgpu_agent.placement.nodes.cards import NodeCards, Unfit
from vgpu_agent.placement.nodes.demand import ContainerDemand, PodDemand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

U0, U1 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
REGISTER = "volcano.sh/node-vgpu-register"
G1 = "".join(f"{uuid},10,24576,NVIDIA-NVIDIA A10,true,hami-core:" for uuid in (U0, U1))
MAIN = ContainerKind.MAIN


def pod(
    *containers: PodContainer, annotations: Mapping[str, str] | None = None, node: str = ""
) -> Pod:
    """A pod of these containers."""
    return Pod(
        name="train",
        namespace="ml",
        uid="uid-train",
        node=node,
        annotations=dict(annotations or {}),
        containers=containers,
    )


def container(
    name: str = "main", *, kind: ContainerKind = MAIN, **limits: int | str
) -> PodContainer:
    """A container with these limits, without their prefix; a text is one that is no number."""
    keys = {f"volcano.sh/vgpu-{name.replace('_', '-')}": value for name, value in limits.items()}
    return PodContainer(
        name,
        kind=kind,
        limits={key: value for key, value in keys.items() if isinstance(value, int)},
        unreadable_limits={key: value for key, value in keys.items() if isinstance(value, str)},
    )


@pytest.fixture
def volcano() -> VolcanoScheduling:
    """The family under its usual names."""
    return VolcanoScheduling(Names())


def cards(volcano: VolcanoScheduling, text: str = G1) -> NodeCards:
    """The cards of a Node."""
    found = volcano.read_cards({REGISTER: text}, 20)
    assert isinstance(found, NodeCards)
    return found


def demand(volcano: VolcanoScheduling, wanted: Pod) -> PodDemand:
    """The demand of a pod that asks for cards."""
    found = volcano.read_demand(wanted)
    assert found is not None
    return found


def test_the_cards_of_the_contract_are_read(volcano: VolcanoScheduling) -> None:
    """volcano-vgpu G1."""
    found = cards(volcano)
    assert found.uuids == (U0, U1)
    (card, other) = found.hardware.cards
    assert card == other
    assert (card.model, card.memory_mib, card.cores_percent, card.slots) == (
        "NVIDIA-NVIDIA A10",
        24576,
        100,
        10,
    )


@pytest.mark.parametrize(
    ("text", "slots", "reason"),
    [
        (G1, 0, Reason.NodeNotVGPUEnabled),
        ("", 20, Reason.NodeNoVGPURegister),
        ("nonsense", 20, Reason.NodeBadVGPURegister),
        (f"{U0},10,24576,NVIDIA-A10,true:", 20, Reason.NodeBadVGPURegister),
        (f"{U0},10,1,t,true,hami-core:" * 2, 20, Reason.NodeBadVGPURegister),
        (f"{U0},10,24576,NVIDIA-A10,true,mig:", 20, Reason.DeviceMIGEnabled),
        ("," * 300_000, 20, Reason.NodeBadVGPURegister),
    ],
)
def test_a_node_that_cannot_be_used_says_why(
    volcano: VolcanoScheduling, text: str, slots: int, reason: Reason
) -> None:
    """It gets no pod, and no other Node is affected (volcano-vgpu §2.2, G13)."""
    found = volcano.read_cards({REGISTER: text}, slots)
    assert isinstance(found, Unfit)
    assert found.reason is reason
    assert len(found.note) < 500


def test_numbers_that_are_none_count_as_0_and_health_counts(volcano: VolcanoScheduling) -> None:
    """Volcano's scheduler gives out an unhealthy card (volcano-vgpu §2.2); this one does not."""
    text = f"{U0},x,-5,t,true,hami-core:{U1},10,99999999999,t,False,hami-core,seventh:"
    first, second = cards(volcano, text).hardware.cards
    assert (first.slots, first.memory_mib, first.blocked) == (0, 0, None)
    assert (second.memory_mib, second.blocked) == (0, Reason.DeviceUnhealthy)


def test_the_request_of_the_contract_is_read(volcano: VolcanoScheduling) -> None:
    """volcano-vgpu G3, G8: containers that do not ask, and init containers, are not there."""
    asked = pod(
        container("none"),
        container("first", number=1, memory=3000, cores=50),
        container("init", kind=ContainerKind.INIT, number=1),
        container("second", number=2, memory_percentage=25),
    )
    found = demand(volcano, asked)
    assert found.names == ("first", "second")
    assert found.demand.containers == (
        ContainerDemand(MAIN, 1, 50, 3000),
        ContainerDemand(MAIN, 2, 0, None, 25),
    )


def test_a_pod_that_asks_for_no_gpu_is_not_ours(volcano: VolcanoScheduling) -> None:
    """The extender hands its Nodes back as they are."""
    assert volcano.read_demand(pod(container("main", cores=10))) is None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            msgspec.structs.replace(pod(container(memory=3000)), has_more_requests=True),
            "names more GPU resources",
        ),
        (pod(container(memory=3000)), "without which the container would get no GPU"),
        (pod(container(number=65)), "volcano.sh/vgpu-number is '65'"),
        (pod(container(number="1500m")), "volcano.sh/vgpu-number is '1500m'"),
        (pod(container(number=1, memory="3Gi")), "without Mi or Gi"),
        (
            pod(container(number=1), annotations={"volcano.sh/vgpu-mode": "mig"}),
            "need Volcano's scheduler",
        ),
        (
            pod(
                container(number=1),
                annotations={"nvidia.com/use-gputype": ",".join(map(str, range(65)))},
            ),
            "has 65 entries",
        ),
    ],
)
def test_a_request_that_no_node_can_serve_is_refused(
    volcano: VolcanoScheduling, wanted: Pod, text: str
) -> None:
    """With the key, the value and what is expected."""
    with pytest.raises(RequestRefusedError, match=text):
        volcano.read_demand(wanted)


def test_a_percentage_is_that_of_the_card(volcano: VolcanoScheduling) -> None:
    """Volcano's schedulers have never served one (volcano-vgpu §8)."""
    wanted = demand(volcano, pod(container(number=1, memory_percentage=25)))
    placed = allocate(wanted.demand, cards(volcano).hardware, [(0, 0, 0), (0, 0, 0)])
    assert isinstance(placed, Placement)
    ((share,),) = placed.shares
    assert share.memory_mib == 6144


def test_a_whole_card_of_compute_is_an_empty_card(volcano: VolcanoScheduling) -> None:
    """volcano-vgpu §8: cores 100 shares with nobody, also not with one that has no compute."""
    wanted = demand(volcano, pod(container(number=1, memory=1, cores=100))).demand
    hardware = cards(volcano).hardware
    placed = allocate(wanted, hardware, [(1, 1, 0), (0, 0, 0)])
    assert isinstance(placed, Placement)
    assert placed.shares[0][0].card == 1
    assert isinstance(allocate(wanted, hardware, [(1, 1, 0), (1, 1, 0)]), Refusal)


def test_selected_types_and_uuids_count(volcano: VolcanoScheduling) -> None:
    """volcano-vgpu §3.1: where types are wanted, the unwanted ones are not looked at."""
    keys = {
        "nvidia.com/use-gputype": "A10",
        "nvidia.com/nouse-gputype": "NVIDIA",
        "volcano.sh/vgpu-nouse-gpuuuid": U0,
    }
    wanted = demand(volcano, pod(container(number=1, memory=1), annotations=keys)).demand
    assert (wanted.include_types, wanted.exclude_types) == (("a10",), ())
    book = Book()
    book.put_node("n0", cards(volcano))
    holding = book.choose(wanted, ["n0"]).holding
    assert holding is not None
    assert holding.cards == ((HeldCard(U1, 0, 1),),)


def test_a_bound_pod_has_the_annotations_of_the_contract(volcano: VolcanoScheduling) -> None:
    """volcano-vgpu G3, G6."""
    held = HeldCard(U1, 50, 3000), HeldCard(U0, 50, 3000)
    wanted = demand(volcano, pod(container(number=2, memory=3000, cores=50)))
    state = volcano.when_bound(
        wanted, Holding("node-a", (MAIN,), (held,)), {}, 1795200692_999999999
    )
    devices = f"{U1},NVIDIA,3000,50:{U0},NVIDIA,3000,50:"
    assert state.annotations == {
        "volcano.sh/vgpu-node": "node-a",
        "volcano.sh/vgpu-time": "1795200692",
        "volcano.sh/bind-time": "1795200692",
        "volcano.sh/bind-phase": "allocating",
        "volcano.sh/vgpu-ids-new": devices,
        "volcano.sh/devices-to-allocate": devices,
    }
    assert not state.labels
    bound = pod(container(number=2), annotations=dict(state.annotations), node="node-a")  # type: ignore[arg-type]
    assert volcano.read_holding(bound) == Holding("node-a", (MAIN,), (held,))


def test_only_bound_pods_hold_cards(volcano: VolcanoScheduling) -> None:
    """Any user can write the annotation of a pod without a Node; amounts below 0 count as 0."""
    text = {"volcano.sh/vgpu-ids-new": f"{U0}[group1-0],NVIDIA,-1,-1:;"}
    assert volcano.read_holding(pod(container(number=1), annotations=text)) is None
    assert volcano.read_holding(pod(container(number=1), node="n0")) is None
    assert volcano.read_holding(pod(container(number=1), annotations=text, node="n0")) == Holding(
        "n0", (MAIN,), ((HeldCard(U0, 0, 0),),)
    )
    spoiled = {"volcano.sh/vgpu-ids-new": "x:"}
    with pytest.raises(DevicesTextError):
        volcano.read_holding(pod(container(number=1), annotations=spoiled, node="n0"))


def test_containers_that_ask_for_nothing_hold_nothing(volcano: VolcanoScheduling) -> None:
    """A tenant could block all cards of the cluster by the annotation of a pod without any GPU."""
    text = {"volcano.sh/vgpu-ids-new": f"{U0},NVIDIA,9,100:;{U1},NVIDIA,9,100:"}
    assert volcano.read_holding(pod(container(), annotations=text, node="n0")) is None
    held = volcano.read_holding(
        pod(container(), container("b", number=1), annotations=text, node="n")
    )
    assert held is not None
    assert held.cards == ((HeldCard(U0, 100, 9),),)
