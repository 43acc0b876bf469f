"""The GPUs that schedulers have given to a pod, as each family whose pods decide reads them:
`PodFamily.named_gpus`.
"""

from __future__ import annotations

import contextlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.families.volcano_gpushare import parts as cards
from tests.families.volcano_vgpu.golden import (
    INVENTORY,
    MEMORY,
    NUMBER,
    U0,
    U1,
    decided,
    family,
    main,
    pod,
    question,
)
from tests.families.volcano_vgpu.mig.parts import GROUP2, mig_family, node
from vgpu_agent.errors import AgentError
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

LIMITS = {NUMBER: 1, MEMORY: 3000}


def entries(*gpus: str, units: int = 3000) -> str:
    """A container's segment."""
    return "".join(f"{gpu},NVIDIA,{units},0:" for gpu in gpus)


def test_each_container_is_given_the_gpus_of_its_segment() -> None:
    """Those that ask for none have none, and a segment that is still empty is the agent's
    to decide.
    """
    containers = (
        main("log"),
        main("one", number=1, memory=3000),
        main("two", number=2, memory=3000),
        main("late", number=1, memory=3000),
    )
    about = pod(*containers, annotations=decided(f"{entries(U0)};{entries(U1, U0)};"))
    assert family().named_gpus(about, INVENTORY) == {"one": (U0,), "two": (U1, U0)}


def test_init_containers_and_sidecars_are_given_nothing_of_their_own() -> None:
    """The first work on the GPUs of the containers after them.
    The second have no segment, and the agent places them.
    """
    init, sidecar = (
        PodContainer(str(kind), kind, LIMITS)
        for kind in (ContainerKind.INIT, ContainerKind.SIDECAR)
    )
    about = pod(init, sidecar, main(number=1, memory=3000), annotations=decided(entries(U0)))
    assert family().named_gpus(about, INVENTORY) == {"main": (U0,)}


def test_a_container_that_cannot_follow_its_segment_takes_nothing_from_the_others() -> None:
    """It is refused with its reason when it starts."""
    containers = (main("one", number=1, memory=10), main("two", number=1, memory=3000))
    about = pod(*containers, annotations=decided(f"{entries(U0)};{entries(U1)}"))
    assert family().named_gpus(about, INVENTORY) == {"two": (U1,)}


def test_an_instance_of_a_gpu_is_a_claim_on_the_gpu() -> None:
    """It may have to be divided first, and no other pod may have a part of it."""
    place = f"{U0}[group2-0]"
    for inventory in (node(), node(*GROUP2)):
        about = pod(main(number=1, memory=3000), annotations=decided(f"{place},NVIDIA,3000,0:"))
        assert mig_family(factor=1).named_gpus(about, inventory) == {"main": (U0,)}


def test_whole_cards_belong_to_the_containers_one_after_the_other() -> None:
    """``volcano-gpushare:S5``: the annotation names the cards of the whole pod."""
    about = cards.pod_of(1, 2, annotations={cards.INDEX: "2,0,1"}, resource=cards.NUMBER)
    named = cards.family_of(cards.BY_NUMBER, cards.THREE).named_gpus(about, cards.THREE)
    assert named == {"c0": (cards.U2,), "c1": (cards.U0, cards.U1)}


def test_a_card_that_is_shared_is_one_for_the_whole_pod() -> None:
    """``volcano-gpushare:S7``, also where an old scheduler wrote every card that would do."""
    about = cards.pod_of(1000, 1000, annotations={cards.INDEX: "1,0"}, init=(500,))
    assert cards.family_of().named_gpus(about, cards.TWO) == {"c0": (cards.U1,), "c1": (cards.U1,)}


def test_a_pod_that_needs_more_than_a_card_has_is_given_nothing() -> None:
    """Its last container would be refused for ever."""
    assert (
        cards.family_of().named_gpus(
            cards.pod_of(20000, 20000, annotations={cards.INDEX: "0"}), cards.TWO
        )
        == {}
    )


def test_a_divided_card_is_nobodys_to_share() -> None:
    """Its slices are another family's. The pod could not start as long as they are there."""
    divided = msgspec.structs.replace(
        cards.TWO, gpus=(msgspec.structs.replace(cards.NODE_0, mig_enabled=True), cards.NODE_1)
    )
    about = cards.pod_of(1000, annotations={cards.INDEX: "0"})
    assert cards.family_of(inventory=divided).named_gpus(about, divided) == {}


@given(
    text=st.lists(
        st.sampled_from([*"013,;:-x[]", U0, U1, f"{U0},NVIDIA,3000,0:", ",NVIDIA,", "3000"]),
        max_size=8,
    ).map("".join),
    number=st.integers(-1, 3) | st.integers(-1, 2**63),
    memory=st.just(3000) | st.integers(-1, 2**63),
)
def test_what_is_named_is_what_would_be_decided(text: str, number: int, memory: int) -> None:
    """Any text in an annotation: it is no error,
    and no GPU is kept with which the container could not start.
    """
    annotations = decided(text) | {cards.INDEX: text}
    about = Pod(
        "uid-p1",
        "team",
        "p1",
        "node-a",
        annotations=annotations,
        containers=(main(number=1, memory=1),),
        scheduled=True,
    )
    container = msgspec.structs.replace(
        about.containers[0], limits={NUMBER: number, MEMORY: memory, cards.MEMORY: number}
    )
    about = msgspec.structs.replace(about, containers=(container,))
    expected: dict[str, tuple[str, ...]] = {}
    if 0 < number <= 2:
        with contextlib.suppress(AgentError):
            decision = family().decide(question(about, ids=number))
            expected = (
                {"main": tuple(share.device for share in decision.shares)}
                if decision.by_scheduler
                else {}
            )
    assert family().named_gpus(about, INVENTORY) == expected
    assert set(cards.family_of().named_gpus(about, cards.TWO)) <= {"main"}
