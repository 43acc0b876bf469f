"""Cards of a whole pod's containers under volcano-gpushare, their names,
and the annotations written into the pod.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.volcano_gpushare.parts import (
    ASSIGNED,
    BY_NUMBER,
    INDEX,
    MEMORY,
    NUMBER,
    SCHEDULED,
    THREE,
    TWO,
    U0,
    U1,
    U2,
    devices_of,
    family_of,
    grant_of,
    ledger_of,
    offer_of,
    pod_of,
    question_of,
    recalled,
)
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.errors import CapacityError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.volcano_gpushare.family import VolcanoGpushareOptions
from vgpu_agent.model import Owner, Share
from vgpu_agent.pods import ContainerKind, PodContainer


def test_a_pod_is_placed_with_all_its_containers_in_mind() -> None:
    """The first of two containers goes where both have room, and the second where the first is,
    before any annotation says so.
    """
    ledger = ledger_of(offer_of())
    ledger.decide(MEMORY, ["0-0"], [Share(U0, 22000)], Owner("c", "uid-0"))
    pod = pod_of(2000, 2000)
    assert family_of().decide(question_of(pod, rooms=ledger.rooms(MEMORY))).shares == (
        Share(U1, 2000),
    )
    siblings = {"c0": (Share(U1, 2000),)}
    assert family_of().decide(question_of(pod, "c1", siblings=siblings)).shares == (
        Share(U1, 2000),
    )


def test_a_sidecar_and_an_init_container_count_as_kubernetes_counts_them() -> None:
    """A sidecar runs beside everything after it;
    an ordinary init container before the main ones.
    """
    containers = (
        PodContainer("s", ContainerKind.SIDECAR, {MEMORY: 1000}),
        PodContainer("i", ContainerKind.INIT, {MEMORY: 24000}),
        PodContainer("c", limits={MEMORY: 2000}),
    )
    pod = msgspec.structs.replace(pod_of(), containers=containers)
    with pytest.raises(CapacityError, match="no GPU has 25000 MiB"):
        family_of().decide(question_of(pod, "c"))


def test_a_choice_beyond_a_cards_memory_is_refused_by_the_ledger() -> None:
    """The family follows the annotation, whatever wrote it.
    The ledger does not give more than there is.
    """
    resource = offer_of()
    ledger = ledger_of(resource)
    ledger.decide(MEMORY, ["1-0"], [Share(U0, 23000)], Owner("c", "uid-0"))
    shares = family_of().decide(question_of(pod_of(3000, annotations=SCHEDULED))).shares
    with pytest.raises(CapacityError, match=r"23000 MiB booked \+ 3000 wanted, of 24576"):
        ledger.decide(MEMORY, ["0-0"], shares, Owner("c0", "uid-1"))


def test_whole_cards_of_several_containers_do_not_overlap() -> None:
    """The first container has two of the annotation's three cards, the second the third."""
    pod = pod_of(2, 1, annotations={INDEX: "2,0,1"}, resource=NUMBER)
    shares = [
        devices_of(question_of(pod, name, options=BY_NUMBER, inventory=THREE))
        for name in ("c0", "c1")
    ]
    assert shares == [[U2, U0], [U1]]


def test_whole_cards_are_placed_by_the_agent_on_idle_ones() -> None:
    """Containers of a pod without annotation get different cards,
    and the pod is annotated once all are known.
    """
    ledger = ledger_of(offer_of(BY_NUMBER, THREE), THREE)
    ledger.decide(NUMBER, [U2], [Share(U0, 24576, 100, exclusive=True)], Owner("c", "uid-0"))
    pod = pod_of(1, 1, resource=NUMBER)
    rooms = ledger.rooms(NUMBER)
    assert devices_of(question_of(pod, "c0", options=BY_NUMBER, inventory=THREE, rooms=rooms)) == [
        U1
    ]
    siblings = {"c0": (Share(U1, 24576, 100, exclusive=True),)}
    assert devices_of(
        question_of(pod, "c1", options=BY_NUMBER, inventory=THREE, rooms=rooms, siblings=siblings)
    ) == [U2]

    family = family_of(BY_NUMBER, THREE)
    first = {"c0": grant_of(Share(U1), resource=NUMBER)}
    assert family.desired_pod(pod, first, failed=False).annotations == {}
    both = first | {"c1": grant_of(Share(U2), resource=NUMBER)}
    assert family.desired_pod(pod, both, failed=False).annotations[INDEX] == "1,2"


def test_too_few_idle_cards_are_refused_with_the_reason() -> None:
    """A pod that wants more whole cards than are idle reads what keeps each of them."""
    ledger = ledger_of(offer_of(BY_NUMBER))
    ledger.decide(NUMBER, [U1], [Share(U0, 24576, 100, exclusive=True)], Owner("c", "uid-0"))
    question = question_of(
        pod_of(2, resource=NUMBER), options=BY_NUMBER, rooms=ledger.rooms(NUMBER)
    )
    with pytest.raises(
        CapacityError,
        match=r"2 idle GPUs are requested, 1 available: .*deviceshare.GPUNumberEnable",
    ):
        family_of(BY_NUMBER).decide(question)


def test_what_stands_in_the_pod_is_not_written_again() -> None:
    """The scheduler's choice and time are never replaced by ours."""
    pod = pod_of(3000, annotations={INDEX: "1"})
    assert family_of().desired_pod(
        pod, {"c0": grant_of(Share(U1, 3000))}, failed=False
    ).annotations == {ASSIGNED: "true"}


def test_a_running_container_is_recalled_from_its_pod() -> None:
    """After a restart the annotation says what a container has. Without one this is unknown."""
    assert recalled("1") == (Share(U1, 3000),)
    assert family_of().recall(question_of(pod_of(3000))) is None


def test_a_card_is_told_by_cdi_name_where_asked_for() -> None:
    """The specs of this node name cards by UUID, whatever the variable would show.
    The way of sharing is passed as ever.
    """
    settings = load_contents(Sources({}, {}, "config.yaml"), Contents(b"version: v1\n")).settings
    options = VolcanoGpushareOptions.from_settings(
        settings, lists=ListOptions(strategies=("cdi-cri",))
    )
    of = family_of(options)
    asked = question_of(pod_of(2000, annotations=SCHEDULED | {INDEX: "1"}))
    edits = of.provision(asked, of.decide(asked).shares).edits
    assert edits.cdi_names == (f"k8s.device-plugin.nvidia.com/gpu={TWO.gpus[1].uuid}",)
    assert set(edits.environment) == {"VOLCANO_GPU_ALLOCATED", "VOLCANO_GPU_MEMORY_TOTAL"}
