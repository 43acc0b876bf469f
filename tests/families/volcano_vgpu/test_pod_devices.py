"""The annotation text that lists the GPUs of each container (volcano-vgpu §3.2)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.families.volcano_vgpu.golden import G3, U0, U1
from vgpu_agent.families.volcano_vgpu.pod_devices import (
    Assigned,
    DevicesTextError,
    parse_pod_devices,
    write_segment,
)


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        pytest.param(G3, ((Assigned(U1, 3000, 50),),), id="volcano-vgpu:G3"),
        pytest.param(
            f"{U1},NVIDIA,3000,50:{U0},NVIDIA,3000,50:",
            ((Assigned(U1, 3000, 50), Assigned(U0, 3000, 50)),),
            id="volcano-vgpu:G6",
        ),
        pytest.param(f"{U1},NVIDIA,24576,0:", ((Assigned(U1, 24576, 0),),), id="volcano-vgpu:G7"),
        pytest.param(
            f"{U1},NVIDIA,3000,0:;{U1},NVIDIA,4000,30:",
            ((Assigned(U1, 3000, 0),), (Assigned(U1, 4000, 30),)),
            id="volcano-vgpu:G8",
        ),
        pytest.param(
            f";{U1},NVIDIA,4000,30:",
            ((), (Assigned(U1, 4000, 30),)),
            id="volcano-vgpu:G8, first one served",
        ),
        pytest.param(";", ((), ()), id="volcano-vgpu:G8, both served"),
        pytest.param("", ((),), id="one container, served"),
        pytest.param(
            f"{U1},NVIDIA,3000,50", ((Assigned(U1, 3000, 50),),), id="without the last colon"
        ),
        pytest.param(
            f"{U1},NVIDIA,-1073741824,0:",
            ((Assigned(U1, -1073741824, 0),),),
            id="3Gi, turned negative",
        ),
        pytest.param(
            "GPU-1[group2-0],NVIDIA,8000,0:",
            ((Assigned("GPU-1[group2-0]", 8000, 0),),),
            id="a MIG instance",
        ),
        pytest.param(
            f"{U1},NVIDIA,3000,50,later:", ((Assigned(U1, 3000, 50),),), id="a field of later days"
        ),
    ],
)
def test_what_schedulers_write_is_read(
    text: str, segments: tuple[tuple[Assigned, ...], ...]
) -> None:
    """Golden texts of the contract, and forms between them."""
    assert parse_pod_devices(text) == segments


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{U1}:", "has 1 fields, expected"),
        (f"{U1},NVIDIA,3000:", "has 3 fields"),
        (",NVIDIA,3000,50:", "does not begin with the UUID"),
        ("GPU 1,NVIDIA,3000,50:", "does not begin with the UUID"),
        ("GPU-\x00,NVIDIA,3000,50:", "does not begin with the UUID"),
        (f"{U1},AMD,3000,50:", "is of type 'AMD', expected NVIDIA"),
        (f"{U1},NVIDIA,3Gi,50:", "has '3Gi' for its memory"),
        (f"{U1},NVIDIA,,50:", "has '' for its memory"),
        (f"{U1},NVIDIA,٣,50:", r"has '\u0663' for its memory"),
        (f"{U1},NVIDIA,1e3,50:", "has '1e3' for its memory"),
        (f"{U1},NVIDIA, 3,50:", "has ' 3' for its memory"),
        (f"{U1},NVIDIA,{'9' * 5000},50:", "for its memory, expected a whole number"),
        (f"{U1},NVIDIA,3000,half:", "has 'half' for its cores"),
        (f"{U1},NVIDIA,3000,50:" * 5000, "more than 4096 entries"),
        (";" * 300_000, "more than 4096 entries"),
        ("x" * 300_000, "has 1 fields"),
    ],
)
def test_what_nobody_writes_is_refused_with_the_entry(text: str, told: str) -> None:
    """Malformed, hostile and huge values: one short sentence that shows the entry."""
    with pytest.raises(DevicesTextError) as caught:
        parse_pod_devices(text)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 400


@given(text=st.text(max_size=100) | st.text(alphabet="GPU-1,:;NVIDIA0123456789[] -", max_size=100))
@example("GPU-1,NVIDIA,--1,0:")
def test_any_text_is_read_or_refused(text: str) -> None:
    """No exception but the one that callers know."""
    try:
        segments = parse_pod_devices(text)
    except DevicesTextError:
        return
    assert len(segments) == text.count(";") + 1


@given(
    st.lists(
        st.lists(
            st.builds(
                Assigned,
                st.uuids().map(lambda uuid: f"GPU-{uuid}"),
                st.integers(0, 10**9),
                st.integers(0, 100),
            ),
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read_back(segments: list[list[Assigned]]) -> None:
    """The agent's own texts are schedulers' texts."""
    assert parse_pod_devices(";".join(write_segment(segment) for segment in segments)) == tuple(
        map(tuple, segments)
    )
