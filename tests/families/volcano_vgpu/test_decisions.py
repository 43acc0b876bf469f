"""A container's share when a scheduler has decided (volcano-vgpu §3, §8, §9)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.volcano_vgpu.golden import (
    CORES,
    G3,
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
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.family import Decision
from vgpu_agent.model import Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

BY = "the scheduler, in volcano.sh/vgpu-ids-new"
ONE = main(number=1, memory=3000, cores=50)
TWO_SEGMENTS = f"{U1},NVIDIA,3000,0:;{U1},NVIDIA,4000,30:"


def _shares(about: Pod, container: str = "main", *, ids: int = 1) -> tuple[Share, ...]:
    return family().decide(question(about, container, ids=ids)).shares


def _refusal(about: Pod, container: str = "main", *, ids: int = 1) -> str:
    with pytest.raises(RequestRefusedError) as caught:
        family().decide(question(about, container, ids=ids))
    assert "pod team/p1" in str(caught.value)
    assert family().recall(question(about, container, ids=ids)) is None
    return str(caught.value)


def test_g3_the_scheduler_decides() -> None:
    """``volcano-vgpu:G3``: 3000 MiB and 50 percent of U1, whatever id kubelet chose."""
    assert family().decide(question(pod(ONE, annotations=decided(G3)))) == Decision(
        (Share(U1, 3000, 50),), BY, by_scheduler=True
    )


def test_g6_two_cards_in_the_order_of_the_annotation() -> None:
    """``volcano-vgpu:G6``: U1 first, as the scheduler walked."""
    about = pod(
        main(number=2, memory=3000, cores=50),
        annotations=decided(f"{U1},NVIDIA,3000,50:{U0},NVIDIA,3000,50:"),
    )
    assert _shares(about, ids=2) == (Share(U1, 3000, 50), Share(U0, 3000, 50))


def test_g7_a_number_alone_is_the_whole_card() -> None:
    """``volcano-vgpu:G7``: all 24576 MiB, no claim on compute."""
    assert _shares(pod(main(number=1), annotations=decided(f"{U1},NVIDIA,24576,0:"))) == (
        Share(U1, 24576, 0),
    )


def test_g8_segments_belong_to_the_containers_that_ask() -> None:
    """``volcano-vgpu:G8``, ``volcano-vgpu:D1``, ``volcano-vgpu:D3``:
    of (none, 1, none, 1) the second and the fourth.
    """
    containers = (
        main("side"),
        main("a", number=1, memory=3000),
        main("log"),
        main("b", number=1, memory=4000, cores=30),
    )
    about = pod(*containers, annotations=decided(TWO_SEGMENTS))
    assert _shares(about, "a") == (Share(U1, 3000, 0),)
    assert _shares(about, "b") == (Share(U1, 4000, 30),)


def test_what_is_decided_stays_so_after_the_first_container_is_served() -> None:
    """``vgpu-ids-new`` is the permanent record.
    What is left to allocate may be empty, as for a container that crashed.
    """
    containers = (main("a", number=1, memory=3000), main("b", number=1, memory=4000, cores=30))
    about = pod(
        *containers,
        annotations=decided(TWO_SEGMENTS, devices_to_allocate=";", bind_phase="success"),
    )
    assert _shares(about, "a") == (Share(U1, 3000, 0),)
    assert _shares(about, "b") == (Share(U1, 4000, 30),)


def test_a_container_that_asks_for_memory_only_has_a_segment() -> None:
    """The scheduler counts it (volcano-vgpu §8), though kubelet never asks for it.
    The one after it must not get its share.
    """
    containers = (main("odd", memory=3000), main("main", number=1, memory=4000, cores=30))
    assert _shares(pod(*containers, annotations=decided(TWO_SEGMENTS))) == (Share(U1, 4000, 30),)


def test_memory_is_counted_in_units() -> None:
    """With 4 MiB a unit, 3000 units are 12000 MiB."""
    of = family(factor=4)
    assert of.decide(question(pod(ONE, annotations=decided(G3)), of=of)).shares == (
        Share(U1, 12000, 50),
    )


@pytest.mark.parametrize("units", [12288, 12287])
def test_a_percentage_is_one_of_the_cards_memory(units: int) -> None:
    """Half of 24576 MiB. A scheduler may round down."""
    about = pod(main(number=1, percentage=50), annotations=decided(f"{U1},NVIDIA,{units},0:"))
    assert _shares(about) == (Share(U1, units, 0),)


def test_what_runs_is_recalled_from_its_pod() -> None:
    """After a restart the annotation says what was given."""
    recalled = family().recall(question(pod(ONE, annotations=decided(G3, bind_phase="success"))))
    assert recalled == Decision(
        (Share(U1, 3000, 50),), "the annotation volcano.sh/vgpu-ids-new", by_scheduler=True
    )


def test_what_nobody_wrote_down_is_not_recalled() -> None:
    """Nothing is placed while remembering."""
    assert family().recall(question(pod(ONE))) is None
    assert family().recall(question(pod(ONE), "another")) is None


@pytest.mark.parametrize(
    ("ids_new", "told"),
    [
        (
            f"{U1},NVIDIA,-1073741824,0:",
            "would mean no limit at all; ask for volcano.sh/vgpu-memory as a plain number",
        ),
        (f"{U1},NVIDIA,0,0:", "0 units of memory would mean no limit at all"),
        (
            f"{U1},NVIDIA,3001,50:",
            "3001 units of memory and 50 % of the compute do not fit the request of container main",
        ),
        (
            f"{U1},NVIDIA,3000,51:",
            "(volcano.sh/vgpu-memory: 3000, volcano.sh/vgpu-cores: 50: at most 3000 units)",
        ),
        (f"{U1},NVIDIA,3000,-1:", "do not fit the request of container main"),
        (f"{U1},NVIDIA,999999999999999999,0:", "are more than the 24576 of GPU"),
        (
            f"{U1},NVIDIA,3000,50:{U0},NVIDIA,3000,50:",
            "2 GPUs were decided for container main, and the kubelet gave it 1 ×",
        ),
        (
            "GPU-elsewhere,NVIDIA,3000,50:",
            f"node node-a offers no GPU 'GPU-elsewhere'; it offers {U0}, {U1}",
        ),
        ("GPU-1[group2-0],NVIDIA,3000,50:", "is a MIG instance"),
        (f"{G3};{G3}", "it has entries for 2 containers, and 1 of the pod ask for GPUs"),
        (f"{U1},NVIDIA,3000", "has 3 fields"),
        ("\x00", "has 1 fields"),
        (f"{U1},NVIDIA,{'9' * 100_000},50:", "expected a whole number"),
    ],
)
def test_a_decision_that_cannot_be_is_refused(ids_new: str, told: str) -> None:
    """Each names pod, key, value and what to do.
    No container gets more than it asked for, and no annotation stops the agent.
    """
    text = _refusal(pod(ONE, annotations=decided(ids_new)))
    assert text.startswith("pod team/p1: annotation volcano.sh/vgpu-ids-new=")
    assert told in text
    assert "; " in text
    assert len(text) < 900


def test_two_cards_are_two_cards() -> None:
    """One GPU named twice is no decision for two."""
    text = _refusal(
        pod(
            main(number=2, memory=3000),
            annotations=decided(f"{U1},NVIDIA,3000,0:{U1},NVIDIA,3000,0:"),
        ),
        ids=2,
    )
    assert "a GPU is named twice for one container" in text


@pytest.mark.parametrize("node", ["node-b", ""])
def test_a_decision_for_another_node_is_refused(node: str) -> None:
    """A gang that was given up leaves such annotations behind (volcano-vgpu §3.4),
    and any user may forge them.
    """
    text = _refusal(pod(ONE, annotations=decided(G3, vgpu_node=node)))
    assert (
        f"annotation volcano.sh/vgpu-node='{node}': the GPUs were decided for a node other than "
        "node-a"
    ) in text


def test_a_decision_for_no_node_names_the_annotation_that_is_there() -> None:
    """A key was copied into a template. A complaint about another missing key would not help."""
    text = _refusal(pod(ONE, annotations={"volcano.sh/vgpu-ids-new": G3}))
    assert (
        f"annotation volcano.sh/vgpu-ids-new='{G3}': no volcano.sh/vgpu-node beside it says for "
        "which node"
    ) in text
    assert text.endswith("without this annotation in its template")


def test_a_decision_that_contradicts_itself_is_refused() -> None:
    """A scheduler writes both keys at once.
    When they differ, another client has written one of them.
    """
    text = _refusal(pod(ONE, annotations=decided(G3, devices_to_allocate=f"{U0},NVIDIA,3000,50:")))
    assert text.startswith(
        f"pod team/p1: annotation volcano.sh/devices-to-allocate='{U0},NVIDIA,3000,50:'"
    )


def test_what_is_left_to_allocate_in_another_shape_means_nothing() -> None:
    """Only ``vgpu-ids-new`` counts."""
    assert _shares(pod(ONE, annotations=decided(G3, devices_to_allocate="junk;junk"))) == (
        Share(U1, 3000, 50),
    )


def test_a_hidden_gpu_is_not_given_out() -> None:
    """``filterdevices`` also holds against an annotation."""
    of = family(hidden_uuids=frozenset({U1}))
    with pytest.raises(RequestRefusedError, match="offers no GPU"):
        of.decide(question(pod(ONE, annotations=decided(G3)), of=of))


def test_a_container_that_the_pod_does_not_have_is_refused() -> None:
    """The kubelet's records and the pod's specification must speak of one pod."""
    assert "has no container of that name" in _refusal(pod(ONE, annotations=decided(G3)), "ghost")


def test_a_main_container_that_asks_for_nothing_is_refused() -> None:
    """It has no segment, and no other's is taken."""
    about = pod(main("side"), ONE, annotations=decided(G3))
    assert "container side asks for none of" in _refusal(about, "side")


@pytest.mark.parametrize(
    ("limits", "unreadable", "told"),
    [
        (
            {NUMBER: 1, MEMORY: 3 * 2**30},
            {},
            "volcano.sh/vgpu-memory is '3221225472'; expected a plain number of memory units",
        ),
        ({NUMBER: 1, MEMORY: -1}, {}, "volcano.sh/vgpu-memory is '-1'"),
        (
            {NUMBER: 1, CORES: 101},
            {},
            "volcano.sh/vgpu-cores is '101'; expected percent of one GPU's compute, 0 to 100",
        ),
        (
            {NUMBER: 1, "volcano.sh/vgpu-memory-percentage": 0},
            {},
            "volcano.sh/vgpu-memory-percentage is '0'; expected percent",
        ),
        (
            {NUMBER: 1, "volcano.sh/vgpu-memory-percentage": 150},
            {},
            "volcano.sh/vgpu-memory-percentage is '150'",
        ),
        ({NUMBER: 1}, {MEMORY: "1500m"}, "volcano.sh/vgpu-memory is '1500m'"),
        ({NUMBER: 1}, {CORES: "9" * 1000}, "volcano.sh/vgpu-cores is '9999"),
    ],
)
@pytest.mark.parametrize("annotations", [{}, decided(f"{U1},NVIDIA,3000,0:")])
def test_limits_that_cannot_be_meant_are_refused(
    limits: dict[str, int], unreadable: dict[str, str], told: str, annotations: dict[str, str]
) -> None:
    """With or without a scheduler: pod, container, key, value, and what is expected."""
    text = _refusal(
        pod(
            PodContainer("main", limits=limits, unreadable_limits=unreadable),
            annotations=annotations,
        )
    )
    assert text.startswith("pod team/p1, container main: ")
    assert told in text


# -- init containers and sidecars ------------------------------------------------------------------


def _with_init(ids_new: str, *mains: PodContainer, **limits: int) -> Pod:
    return pod(main("init", ContainerKind.INIT, **limits), *mains, annotations=decided(ids_new))


def test_an_init_container_takes_no_segment() -> None:
    """``volcano-vgpu:D14``: the main container gets what was decided for it,
    though an init container asks as well.
    """
    about = _with_init(G3, ONE, number=1, memory=1000)
    assert _shares(about) == (Share(U1, 3000, 50),)


def test_an_init_container_works_on_the_gpu_of_the_container_after_it() -> None:
    """``volcano-vgpu:D14``: on the same GPU, with what it asks for,
    but not more than was set aside for the pod.
    """
    assert _shares(_with_init(G3, ONE, number=1, memory=1000, cores=10), "init") == (
        Share(U1, 1000, 10),
    )
    assert _shares(_with_init(G3, ONE, number=1, memory=9000, cores=90), "init") == (
        Share(U1, 3000, 50),
    )
    assert _shares(_with_init(G3, ONE, number=1), "init") == (Share(U1, 3000, 0),)


def test_an_init_container_takes_the_gpus_of_a_container_with_as_many() -> None:
    """``volcano-vgpu:D14``: of two main containers the one whose number is the same."""
    ids_new = f"{U1},NVIDIA,3000,0:;{U0},NVIDIA,2000,0:{U1},NVIDIA,2000,0:"
    mains = (main("a", number=1, memory=3000), main("b", number=2, memory=2000))
    assert _shares(_with_init(ids_new, *mains, number=2, memory=9000), "init", ids=2) == (
        Share(U0, 2000, 0),
        Share(U1, 5000, 0),
    )


def test_an_init_container_with_more_gpus_than_each_takes_those_of_all() -> None:
    """``volcano-vgpu:D14``: two containers with a GPU each make two for the one before them."""
    mains = (main("a", number=1, memory=3000), main("b", number=1, memory=2000))
    about = _with_init(f"{U1},NVIDIA,3000,0:;{U0},NVIDIA,2000,0:", *mains, number=2, memory=2500)
    assert _shares(about, "init", ids=2) == (Share(U1, 2500, 0), Share(U0, 2000, 0))


def test_an_init_container_with_more_gpus_than_the_pod_is_refused() -> None:
    """``volcano-vgpu:D14``: the scheduler has set nothing aside for it,
    and the text says what would work.
    """
    text = _refusal(_with_init(G3, ONE, number=2, memory=1000), "init", ids=2)
    assert (
        "init container init asks for 2 GPUs, and 1 were decided for the whole pod; ask for at "
        "most 1 ×"
    ) in text


def test_what_the_agent_has_written_itself_decides_about_no_init_container() -> None:
    """It writes no devices-to-allocate. The init container of a pod that it has placed runs again
    after a reboot, and needs what it had: more than the containers after it, as well.
    """
    about = _with_init(G3, ONE, number=2, memory=9000)
    annotations = dict(about.annotations)
    del annotations["volcano.sh/devices-to-allocate"]
    placed = msgspec.structs.replace(about, annotations=annotations)
    asked = question(placed, "init", ids=2)
    assert family().recall(asked) is None
    decision = family().decide(asked)
    assert decision.by_agent
    assert {(share.device, share.memory_mib) for share in decision.shares} == {
        (U0, 9000),
        (U1, 9000),
    }
    assert _shares(placed) == (Share(U1, 3000, 50),)  # the other one keeps what it had


def test_a_forged_decision_does_not_reach_an_init_container_either() -> None:
    """The decision for the other containers must make sense before an init container uses it."""
    assert "would mean no limit" in _refusal(
        _with_init(f"{U1},NVIDIA,-5,0:", ONE, number=1, memory=1000), "init"
    )


def test_a_sidecar_keeps_its_gpu_beside_the_others_so_it_is_placed() -> None:
    """The scheduler does not see it. The agent places it as this node has room,
    and the main container keeps its segment.
    """
    about = pod(
        main("proxy", ContainerKind.SIDECAR, number=1, memory=1000), ONE, annotations=decided(G3)
    )
    assert family().decide(question(about, "proxy")) == Decision(
        (Share(U0, 1000, 0),), "the agent, binpack"
    )
    assert _shares(about) == (Share(U1, 3000, 50),)


# -- anything at all -------------------------------------------------------------------------------

TEXT = st.text(max_size=60) | st.text(alphabet=f"{U1},:;NVIDIA30", max_size=120)
SEGMENT = st.builds(
    "{},NVIDIA,{},{}:".format,
    st.sampled_from([U0, U1, "GPU-x"]),
    st.integers(-(2**40), 2**40) | st.integers(0, 3000),
    st.integers(-5, 120),
)


@given(
    ids_new=(
        TEXT
        | st.lists(SEGMENT, max_size=3).map("".join)
        | st.lists(SEGMENT, max_size=3).map(";".join)
    ),
    pending=TEXT | st.just(""),
    limits=st.dictionaries(
        st.sampled_from([NUMBER, MEMORY, CORES]), st.integers(-5, 4000) | st.integers(), max_size=3
    ),
    kind=st.sampled_from(ContainerKind),
    ids=st.integers(1, 3),
)
def test_no_annotation_gives_more_than_asked_or_stops_the_agent(
    ids_new: str, pending: str, limits: dict[str, int], kind: ContainerKind, ids: int
) -> None:
    """The result for any pod is a decision within its limits and the GPUs' memory,
    or one of two errors.
    """
    about = pod(
        PodContainer("main", kind, limits),
        ONE,
        annotations=decided(ids_new, devices_to_allocate=pending),
    )
    family().recall(question(about, ids=ids))
    try:
        shares = family().decide(question(about, ids=ids)).shares
    except (RequestRefusedError, CapacityError):
        return
    assert len({share.device for share in shares}) == ids
    for share in shares:
        assert share.device in (U0, U1)
        assert 0 < share.memory_mib <= (limits.get(MEMORY) or 24576)
        assert 0 <= share.cores_percent <= limits.get(CORES, 0)


def test_a_card_that_is_lost_can_still_be_recalled() -> None:
    """It keeps its place in the inventory, so the grant keeps its share."""
    lost = msgspec.structs.replace(
        INVENTORY,
        gpus=(INVENTORY.gpus[0], msgspec.structs.replace(INVENTORY.gpus[1], present=False)),
    )
    recalled = family().recall(question(pod(ONE, annotations=decided(G3)), inventory=lost))
    assert recalled is not None
    assert recalled.shares == (Share(U1, 3000, 50),)
