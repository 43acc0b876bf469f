"""Attacks by annotations: whatever a tenant writes into its own pod,
its own start is refused or served, in bounded time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adversary.test_early_mode import placed_by_its_owner, stranger
from tests.allocation.binding_parts import IDS, NODE, NUMBER, Place, a_pod, wants
from tests.allocation.test_claims import Node
from tests.families.volcano_gpushare import parts as gpushare
from tests.families.volcano_vgpu import golden as vgpu
from tests.golden import U0, U1
from vgpu_agent.agent.records.starting_pods import StartingPods
from vgpu_agent.allocation.context import Families
from vgpu_agent.errors import AgentError
from vgpu_agent.families.family import PodFamily, Question
from vgpu_agent.families.vgpu_manager import claims
from vgpu_agent.families.vgpu_manager.control import NoControl
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.volcano_vgpu import pod_devices
from vgpu_agent.model import Holding, Owner
from vgpu_agent.pods import Pod, PodContainer

KEYS = (
    "volcano.sh/vgpu-ids-new", "volcano.sh/devices-to-allocate", "volcano.sh/vgpu-time",
    "volcano.sh/vgpu-node", "volcano.sh/bind-phase", "volcano.sh/bind-time",
    "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/vgpu-nouse-gpuuuid", "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype", "volcano.sh/vgpu-mode", "volcano.sh/gpu-index",
    "volcano.sh/predicate-time", "volcano.sh/gpu-assigned",
)  # fmt: skip
PIECES = st.sampled_from(
    [
        U0,
        U1,
        "NVIDIA",
        "0",
        "1",
        "-1",
        "100",
        "9" * 40,
        "9" * 5000,
        "1e9",
        "nan",
        "inf",
        "٣",
        "\u0000",
        " ",
        "",
        "../",
        "x" * 5000,
        "[1]",
    ]
)
TEXTS = st.lists(
    st.one_of(PIECES, st.sampled_from([",", ":", ";", "[", "]", "-", "_"])), max_size=24
).map("".join) | st.text(max_size=64)
ANNOTATIONS = st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=6)
NUMBERS = st.sampled_from([0, 1, 2, 7, 101, 2**31, 2**63 - 1, 10**40])


def _only_our_errors(asked: Callable[[], object]) -> None:
    began, said = time.process_time(), ""
    try:
        asked()
    except AgentError as err:
        said = str(err)
    assert len(said) < 5000
    assert time.process_time() - began < 2


def _asked(family: PodFamily, question: Question) -> None:
    _only_our_errors(lambda: family.provision(question, family.decide(question).shares))
    _only_our_errors(lambda: family.recall(question))
    _only_our_errors(lambda: family.desired_pod(question.pod, {}, failed=True))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(annotations=ANNOTATIONS, memory=NUMBERS, cores=NUMBERS, ids=st.integers(1, 4))
def test_no_annotation_of_a_vgpu_pod_raises_what_nobody_expects(
    annotations: dict[str, str], memory: int, cores: int, ids: int
) -> None:
    """An unexpected exception ends the call without a word for the user,
    and kubelet goes on asking.
    """
    container = vgpu.main(number=ids, memory=memory, cores=cores)
    _asked(vgpu.family(), vgpu.question(vgpu.pod(container, annotations=annotations), ids=ids))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(annotations=ANNOTATIONS, amount=st.sampled_from([1, 2, 100]))
def test_no_annotation_of_a_gpushare_pod_raises_what_nobody_expects(
    annotations: dict[str, str], amount: int
) -> None:
    """The same for Volcano's other way of sharing."""
    _asked(
        gpushare.family_of(), gpushare.question_of(gpushare.pod_of(amount, annotations=annotations))
    )


async def test_a_pod_cannot_claim_another_pods_ids_or_uid_by_its_annotations() -> None:
    """Identity is in kubelet's records alone, so a pod may write what it likes."""
    place = Place()
    victim = a_pod("victim", annotations=wants(main=f"{U0} 1000"))
    texts = {
        "uid": victim.uid,
        "volcano.sh/vgpu-node": victim.uid,
        "pod-uid": victim.uid,
        "device-ids": IDS[0],
    }
    liar = a_pod("liar", annotations={**wants(main=f"{U1} 39000"), **texts})
    place.book.replace([liar, victim])
    await place.admit(victim, "main", IDS[:1])
    await place.start(IDS[:1])
    (grant,) = place.ledger.grants
    assert grant.owner == Owner("main", victim.uid, "default", "victim")


async def test_thousands_of_pods_that_never_start_do_not_delay_a_neighbours_start() -> None:
    """They are bound by spec.nodeName, and the API server takes as many as quotas allow. A start
    must not look at each for each.
    """
    place = Place()
    place.book.replace([placed_by_its_owner(f"never-{number}") for number in range(5000)])
    starting = StartingPods(place.book, place.ledger, started=dict)
    place.book.put(stranger())
    began = time.process_time()
    holders = frozenset((f"uid-never-{number}", "main") for number in range(5000))
    with starting.expected(NUMBER, 1, excluding=holders) as expected:
        assert expected == ("default", "stranger")
    await place.admit(stranger(), "main", IDS[:1])
    await place.start(IDS[:1])
    assert time.process_time() - began < 0.5  # measured: 5 ms


@pytest.mark.parametrize("count", [100, 1000])
async def test_a_pod_of_very_many_containers_keeps_nobody_else_from_starting(count: int) -> None:
    """Each of them may ask for a share; kubelet's records have a line for each."""
    place = Place()
    many = a_pod(
        "many",
        *(PodContainer(f"c{number}", limits={NUMBER: 1}) for number in range(count)),
        annotations={},
    )
    place.book.replace([many, stranger()])
    assert place.checkpoint is not None
    place.checkpoint += [
        Holding(NUMBER, (IDS[1],), Owner(container.name, many.uid)) for container in many.containers
    ]
    began = time.process_time()
    await place.admit(stranger(), "main", IDS[:1])
    await place.start(IDS[:1])
    assert time.process_time() - began < 0.5
    assert [grant.owner.pod for grant in place.ledger.grants if grant.owner and grant.shares] == [
        "stranger"
    ]


@pytest.mark.parametrize("family", ["volcano-vgpu", "vgpu-manager"])
def test_a_long_annotation_is_read_once_for_all_containers_of_a_pod(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant can change its pod many times a second, and each change is read in the loop that
    answers the kubelet. It took 135 and 258 ms when the text was read for each of 64 containers.
    """
    count, node = 64, Node()
    if family == "volcano-vgpu":
        limits = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 4}
        text = ";".join(["a,NVIDIA,1,0:" * 38] * count)
        annotations = {"volcano.sh/vgpu-node": NODE, "volcano.sh/vgpu-ids-new": text}
        read = _counted(monkeypatch, pod_devices, "_segment")
    else:
        manager = VgpuManagerFamily(VgpuManagerOptions(), NoControl())
        node.allocator.use_families(Families((), (manager,)))
        node.allocator.refresh_offer()
        limits = {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 100}
        text = ";".join(f"c{number}[{','.join(['0_a_1_1'] * 62)}]" for number in range(count))
        annotations = {"nvidia.com/predicate-node": NODE, "nvidia.com/pre-allocated": text}
        read = _counted(monkeypatch, claims, "_container")
    containers = tuple(PodContainer(f"c{number}", limits=limits) for number in range(count))
    node.book.put(
        Pod("uid-x", "default", "x", NODE, "Pending", annotations, containers, scheduled=True)
    )
    node.allocator.refresh_claims()
    assert len(read) == count


def _counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str) -> list[str]:
    """Return a list that grows with each text that a function of a module is called with."""
    called, before = list[str](), getattr(module, function)

    def counted(text: str) -> object:
        called.append(text)
        return before(text)

    monkeypatch.setattr(module, function, counted)
    return called
