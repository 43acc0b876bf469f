"""Limits, containers and annotations that name no card:
the volcano-gpushare family refuses them in one clear line.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.families.volcano_gpushare.parts import (
    ASSIGNED,
    BY_NUMBER,
    INDEX,
    MEMORY,
    NUMBER,
    PREDICATE_TIME,
    SCHEDULED,
    U0,
    U1,
    family_of,
    grant_of,
    pod_of,
    question_of,
    recalled,
)
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.volcano_gpushare.family import VolcanoGpushareOptions
from vgpu_agent.model import Share
from vgpu_agent.pods import PodContainer


def test_an_unreadable_limit_is_refused() -> None:
    """A limit that is no whole number is named with its text."""
    container = PodContainer("c0", unreadable_limits={MEMORY: "1.5k"})
    with pytest.raises(
        RequestRefusedError, match=r"limit volcano.sh/gpu-memory: '1.5k' is not a whole number"
    ):
        family_of().decide(question_of(msgspec.structs.replace(pod_of(), containers=(container,))))


def test_a_container_that_the_pod_does_not_have_is_refused() -> None:
    """The kubelet's records and the pod disagree:
    an error, not an exception of the family's own.
    """
    with pytest.raises(RequestRefusedError, match="pod default/p has no container other"):
        family_of().decide(question_of(pod_of(3000, annotations=SCHEDULED), "other"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "-1",
        "+1",
        "0x1",
        "0, 1",
        "0,",
        ",0",
        "1.0",
        "٣",
        "00",
        "0\n",
        "1e3",
        "9" * 5000,
        "0," * 100_000,
        "GPU-1",
        "\x00",
        "2",
        "999",
    ],
)
def test_an_annotation_that_names_no_card_is_refused_with_its_text(text: str) -> None:
    """Malformed, foreign and huge values of gpu-index: one clear line that names pod, key, value
    and remedy, and no recollection.
    """
    with pytest.raises(RequestRefusedError) as refused:
        family_of().decide(question_of(pod_of(3000, annotations={INDEX: text})))
    message = str(refused.value)
    assert message.startswith("pod default/p: volcano.sh/gpu-index is '")
    assert "delete the pod so that it is scheduled anew" in message
    assert message.isprintable()
    assert len(message) < 300
    assert recalled(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0", "the pod needs 2 GPUs"), ("1,1", "names a GPU twice"), ("0,7", "no GPU 7; it has 0, 1")],
)
def test_an_annotation_that_does_not_suffice_for_whole_cards_is_refused(
    text: str, reason: str
) -> None:
    """Too few cards, one twice, or an unknown one."""
    question = question_of(pod_of(2, annotations={INDEX: text}, resource=NUMBER), options=BY_NUMBER)
    with pytest.raises(RequestRefusedError, match=reason):
        family_of(BY_NUMBER).decide(question)


@given(
    text=st.one_of(st.text(max_size=40), st.from_regex(r"[0-9, +-]{0,12}")),
    strategy=st.sampled_from(["share", "number"]),
)
@example(text="0,1", strategy="number")
def test_no_annotation_raises_anything_but_a_refusal(text: str, strategy: str) -> None:
    """The result of any gpu-index is cards of this node, or a refusal."""
    options = VolcanoGpushareOptions(strategy=strategy, factor=1024)
    pod = pod_of(1, annotations={INDEX: text}, resource=MEMORY if strategy == "share" else NUMBER)
    question = question_of(pod, options=options)
    try:
        shares = family_of(options).decide(question).shares
    except RequestRefusedError:
        assert family_of(options).recall(question) is None
    else:
        assert {share.device for share in shares} <= {U0, U1}


@pytest.mark.parametrize(
    "text", ["", "false", "true", "TRUE", "x" * 5000, "\x00", "18446744073709551616", "-1"]
)
def test_other_annotations_of_the_pod_decide_nothing(text: str) -> None:
    """predicate-time and gpu-assigned may say anything:
    the pod is proven and not guessed from them, and ends up assigned.
    """
    pod = pod_of(3000, annotations={INDEX: "1", PREDICATE_TIME: text, ASSIGNED: text})
    assert family_of().decide(question_of(pod)).shares == (Share(U1, 3000),)
    assert family_of().desired_pod(
        pod, {"c0": grant_of(Share(U1, 3000))}, failed=False
    ).annotations == {ASSIGNED: "true"}
