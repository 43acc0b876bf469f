"""The texts of claims (vgpu-manager §4.2)."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.vgpu_manager.golden import CLAIM
from tests.families.vgpu_manager.node import U0, U1
from vgpu_agent.families.vgpu_manager.claims import (
    ClaimsTextError,
    ContainerClaim,
    DeviceClaim,
    by_container,
    parse_claims,
    write_claims,
)

GOLDEN = (ContainerClaim("default", (DeviceClaim(0, U0, 10, 1024),)),)
TWO = f"init[0_{U0}_100_24576];train[0_{U0}_50_8192,1_{U1}_50_8192]"


def test_the_golden_claim_is_read_and_written_byte_for_byte() -> None:
    """vgpu-manager:§13.3."""
    assert parse_claims(CLAIM) == GOLDEN
    assert write_claims(GOLDEN) == CLAIM
    assert write_claims(parse_claims(TWO)) == TWO


def test_claims_are_written_by_index() -> None:
    """Extenders sort them so, and readers may rely on it."""
    cards = (DeviceClaim(1, U1, 50, 8192), DeviceClaim(0, U0, 50, 8192))
    assert write_claims([ContainerClaim("train", cards)]) == TWO.split(";")[1]


@pytest.mark.parametrize(
    "text",
    [f" {CLAIM} ", f";;{CLAIM};", CLAIM.replace("[", " [ "), CLAIM.replace("]", ",,]")],
)
def test_spaces_and_empty_segments_count_for_nothing(text: str) -> None:
    """vgpu-manager's own parser drops them."""
    assert parse_claims(text) == GOLDEN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it names no container"),
        (" ; ;", "it names no container"),
        ("default", "'default' is no <container>"),
        ("default[", "is no <container>"),
        ("[0_a_1_1]", "is no <container>"),
        ("a[0_a_1_1]]", "is no <container>"),
        ("a[b[0_a_1_1]", "is no <container>"),
        ("a[]", "gives container 'a' no card"),
        ("a[0_b_1]", "'0_b_1' has 3 fields"),
        ("a[0_b_c_1_1]", "has 5 fields"),
        ("a[0__1_1]", "has no UUID"),
        ("a[0_\x00_1_1]", "has no UUID"),
        ("a[x_b_1_1]", "has 'x' for its index, expected a whole number"),
        ("a[0_b_1.5_1]", "has '1.5' for its cores"),
        ("a[0_b_1_1Gi]", "has '1Gi' for its memory"),
        (f"a[0_b_1_{'9' * 19}]", "for its memory, expected a whole number"),
        ("a[٣_b_1_1]", "for its index"),
        ("a[0_b_1_1]" + ";" * 4097, "more than 4096 entries"),
        ("x" * 200_000, "(200000 characters) is no <container>"),
    ],
)
def test_what_is_malformed_is_named_in_one_sentence(text: str, told: str) -> None:
    """Tenants can write anything, and the text ends up in a pod's status."""
    with pytest.raises(ClaimsTextError, match=re.escape(told)) as caught:
        parse_claims(text)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[" * 262_144, "a[0_b_1_1],;" * 20_000, "_" * 262_144, " " * 262_144]
)
def test_the_largest_hostile_text_takes_no_time(text: str) -> None:
    """256 KiB are the most that the API server stores."""
    began = time.process_time()
    with pytest.raises(ClaimsTextError):
        parse_claims(text)
    assert time.process_time() - began < 0.25


def test_a_container_that_is_named_twice_has_no_claim() -> None:
    """A choice between the two claims would be a guess."""
    with pytest.raises(ClaimsTextError, match="container 'default' is named twice"):
        by_container(parse_claims(f"{CLAIM};{CLAIM}"))


names = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
cards = st.builds(
    DeviceClaim,
    st.integers(0, 255),
    st.uuids().map(lambda uuid: f"GPU-{uuid}"),
    st.integers(0, 100),
    st.integers(0, 2**40),
)


@given(
    st.lists(
        st.builds(ContainerClaim, names, st.lists(cards, min_size=1, max_size=4).map(tuple)),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read_back(claims: list[ContainerClaim]) -> None:
    """In the order of the indices."""
    read = parse_claims(write_claims(claims))
    assert [each.container for each in read] == [each.container for each in claims]
    for back, each in zip(read, claims, strict=True):
        assert back.cards == tuple(sorted(each.cards, key=lambda card: card.index))


@given(st.text(alphabet="a0_[],; GPU-", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Claims, or one clear error."""
    try:
        parsed = parse_claims(text)
    except ClaimsTextError:
        return
    assert parse_claims(write_claims(parsed))
