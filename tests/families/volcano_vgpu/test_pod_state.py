"""The annotations of a pod once its containers are allocated (volcano-vgpu §3.3)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.volcano_vgpu.golden import (
    G3,
    INVENTORY,
    NODE,
    U0,
    U1,
    decided,
    family,
    grants,
    main,
    pod,
    question,
)
from vgpu_agent.model import Grant, Share
from vgpu_agent.pods import ContainerKind, Pod

TO_ALLOCATE, PHASE, TIME = (
    "volcano.sh/devices-to-allocate",
    "volcano.sh/bind-phase",
    "volcano.sh/vgpu-time",
)
IDS, ON = "volcano.sh/vgpu-ids-new", "volcano.sh/vgpu-node"
NEVER = "18446744073709551615"
SHARE = (Share(U1, 3000, 50),)
A, B = f"{U1},NVIDIA,3000,0:", f"{U1},NVIDIA,4000,30:"
ONE = pod(main(number=1, memory=3000, cores=50), annotations=decided(G3))
TWO = pod(
    main("side"),
    main("a", number=1, memory=3000),
    main("b", number=1, memory=4000, cores=30),
    annotations=decided(f"{A};{B}"),
)


def _desired_state(
    about: Pod, held: Mapping[str, Grant], *, failed: bool = False
) -> Mapping[str, str | None]:
    of = family()
    of.resources(INVENTORY)
    return of.desired_pod(about, held, failed=failed).annotations


def _written(about: Pod, desired_state: Mapping[str, str | None]) -> Pod:
    kept = {
        key: value
        for key, value in {**about.annotations, **desired_state}.items()
        if value is not None
    }
    return msgspec.structs.replace(about, annotations=kept)


def test_g5_a_served_pod() -> None:
    """``volcano-vgpu:G5``: nothing left to allocate, success, and a time that never comes. The rest
    is unchanged, and then all is quiet.
    """
    desired_state = _desired_state(ONE, grants(main=SHARE))
    assert desired_state == {TO_ALLOCATE: "", PHASE: "success", TIME: NEVER}
    assert _desired_state(_written(ONE, desired_state), grants(main=SHARE)) == {}


def test_g8_one_container_after_the_other() -> None:
    """``volcano-vgpu:G8``, ``volcano-vgpu:D1``, ``volcano-vgpu:D3``: the first segment empties
    first, and success comes with the last.
    """
    first = _desired_state(TWO, grants(a=SHARE))
    assert first == {TO_ALLOCATE: f";{B}"}
    half = _written(TWO, first)
    assert _desired_state(half, grants(a=SHARE)) == {}
    assert _desired_state(half, grants(a=SHARE, b=SHARE)) == {
        TO_ALLOCATE: ";",
        PHASE: "success",
        TIME: NEVER,
    }


def test_containers_may_start_in_any_order() -> None:
    """``volcano-vgpu:D3``: the segment of the container that was served is the one that empties."""
    assert _desired_state(TWO, grants(b=SHARE)) == {TO_ALLOCATE: f"{A};"}


def test_a_pod_of_which_nobody_is_served_is_left_alone() -> None:
    """``volcano-vgpu:D18``: what a scheduler writes or takes back before
    that is its own business.
    """
    assert _desired_state(ONE, {}) == {}
    assert _desired_state(pod(main(number=1)), {}) == {}


def test_an_init_container_serves_nobody_else() -> None:
    """``volcano-vgpu:D14``: it has no segment, so nothing is done yet."""
    about = pod(
        main("init", ContainerKind.INIT, number=1), *ONE.containers, annotations=ONE.annotations
    )
    assert _desired_state(about, grants(init=SHARE)) == {}
    assert _desired_state(about, grants(init=SHARE, main=SHARE))[PHASE] == "success"


def test_a_container_that_kubelet_never_asks_for_holds_nothing_up() -> None:
    """One with memory and no number has a segment, and no Allocate ever comes for it.
    The pod must still end as served.
    """
    about = pod(
        main("odd", memory=3000),
        main("b", number=1, memory=4000, cores=30),
        annotations=decided(f"{A};{B}"),
    )
    assert _desired_state(about, grants(b=SHARE)) == {
        TO_ALLOCATE: ";",
        PHASE: "success",
        TIME: NEVER,
    }


def test_a_pod_that_never_starts_has_failed() -> None:
    """The list of shares still to allocate stays as it was (volcano-vgpu §3.3)."""
    desired_state = _desired_state(TWO, grants(a=SHARE), failed=True)
    assert desired_state == {PHASE: "failed", TIME: NEVER}
    assert _desired_state(_written(TWO, desired_state), grants(a=SHARE), failed=True) == {}
    assert _desired_state(pod(main(number=1)), {}, failed=True) == {}


def test_other_families_and_resources_are_not_looked_at() -> None:
    """Only the number's grants decide."""
    other = {
        "main": msgspec.structs.replace(
            grants(main=SHARE)["main"], resource="volcano.sh/gpu-memory"
        )
    }
    assert _desired_state(ONE, other) == {}


def test_a_pod_that_the_agent_placed_is_written_down_for_schedulers() -> None:
    """Volcano then counts its GPUs as taken.
    The agent reads it back like a scheduler's decision.
    """
    about = pod(main(number=1, memory=3000, cores=50))
    desired_state = _desired_state(about, grants(main=SHARE))
    assert desired_state == {ON: NODE, IDS: G3, PHASE: "success", TIME: NEVER}
    after = _written(about, desired_state)
    assert _desired_state(after, grants(main=SHARE)) == {}
    recalled = family().recall(question(after))
    assert recalled is not None
    assert recalled.shares == SHARE


def test_a_pod_that_the_agent_placed_container_by_container() -> None:
    """Each has its segment, and one that waits has an empty one."""
    about = pod(main("a", number=1, memory=3000), main("b", number=1, memory=4000, cores=30))
    first = _desired_state(about, grants(a=(Share(U1, 3000, 0),)))
    assert first == {ON: NODE, IDS: f"{A};"}
    half = _written(about, first)
    both = _desired_state(half, grants(a=(Share(U1, 3000, 0),), b=(Share(U0, 4000, 30),)))
    assert both == {IDS: f"{A};{U0},NVIDIA,4000,30:", PHASE: "success", TIME: NEVER}


def test_memory_is_written_in_units() -> None:
    """With 4 MiB a unit, 12000 MiB are 3000."""
    of = family(factor=4)
    about = pod(main(number=1, memory=3000, cores=50))
    assert (
        of.desired_pod(about, grants(main=(Share(U1, 12000, 50),)), failed=False).annotations[IDS]
        == G3
    )


@pytest.mark.parametrize("text", ["", ";;;;", "junk", "\x00", "x" * 100_000])
def test_a_text_of_another_shape_is_replaced_at_the_end(text: str) -> None:
    """The text is not touched while a container waits.
    When all have started, nothing is left to allocate.
    """
    odd = msgspec.structs.replace(TWO, annotations=decided(f"{A};{B}", devices_to_allocate=text))
    assert _desired_state(odd, grants(a=SHARE)) == {}
    assert _desired_state(odd, grants(a=SHARE, b=SHARE))[TO_ALLOCATE] == ";"


@given(
    annotations=st.dictionaries(
        st.sampled_from([TO_ALLOCATE, PHASE, TIME, IDS, ON]),
        st.text(max_size=30) | st.sampled_from([A, f"{A};{B}"]),
    ),
    served=st.lists(st.sampled_from(["a", "b", "side", "ghost"]), unique=True),
    failed=st.booleans(),
)
def test_the_desired_state_is_stable_once_it_is_written(
    annotations: dict[str, str], served: list[str], *, failed: bool
) -> None:
    """For any annotations there is nothing more to write after one write, and nothing raises."""
    about = msgspec.structs.replace(TWO, annotations=annotations)
    held = grants(**dict.fromkeys(served, SHARE))
    assert (
        _desired_state(
            _written(about, _desired_state(about, held, failed=failed)), held, failed=failed
        )
        == {}
    )
