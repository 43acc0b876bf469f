"""The XID policy: NVIDIA's list, its two variables, and what is done with junk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.gpu.xid import IGNORED_BY_DEFAULT, XidHistory, XidPolicy, describe


def _row(disable: str, enable: str) -> tuple[bool, bool, bool, bool]:
    policy = XidPolicy.from_lists(disable, enable)
    return policy.any_counts, policy.counts(31), policy.counts(48), policy.counts(79)


def test_without_lists_program_errors_are_ignored() -> None:
    """nvidia:§17.4-1: DISABLE –, ENABLE –: watch, 31 ignored, 48 and 79 unhealthy."""
    assert _row("", "") == (True, False, True, True)


@pytest.mark.parametrize("word", ["all", "xids", "ALL", " Xids "])
def test_disabling_all_stops_the_watch(word: str) -> None:
    """nvidia:§17.4-2: DISABLE `all` / `xids`: no watch."""
    assert _row(word, "") == (False, False, False, False)


def test_a_disabled_number_is_ignored() -> None:
    """nvidia:§17.4-3: DISABLE 48: 31 and 48 ignored, 79 unhealthy."""
    assert _row("48", "") == (True, False, False, True)


def test_an_enabled_number_beats_the_default_list() -> None:
    """nvidia:§17.4-4: ENABLE 31: 31, 48 and 79 unhealthy."""
    assert _row("", "31") == (True, True, True, True)


def test_enabling_all_beats_the_default_list() -> None:
    """nvidia:§17.4-5: ENABLE all: everything unhealthy."""
    assert _row("", "all") == (True, True, True, True)


def test_enabling_beats_disabling() -> None:
    """nvidia:§17.4-6: DISABLE 48, ENABLE 48: 31 ignored, 48 and 79 unhealthy."""
    assert _row("48", "48") == (True, False, True, True)


def test_all_disabled_and_one_enabled_watches_that_one() -> None:
    """nvidia:§17.4-7, nvidia:D3: DISABLE all, ENABLE 79: the original watches nothing, a bug.
    We watch only 79.
    """
    assert _row("all", "79") == (True, False, False, True)


def test_all_disabled_and_all_enabled_watches_all() -> None:
    """nvidia:§17.4-8: DISABLE all, ENABLE all: everything unhealthy."""
    assert _row("all", "all") == (True, True, True, True)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_the_default_list_is_nvidias(code: int) -> None:
    """nvidia §10.2: exactly these are ignored, and only they."""
    assert code in IGNORED_BY_DEFAULT
    assert len(IGNORED_BY_DEFAULT) == 6


def test_junk_is_skipped_and_named() -> None:
    """A word that is no number is left out with a warning that names key and word.
    The rest of the list holds.
    """
    policy = XidPolicy.from_lists("48,bananas,,-3", "31x")

    assert not policy.counts(48)
    assert policy.counts(79)
    assert [warning.split(" is skipped")[0] for warning in policy.warnings] == [
        "gpu.disableHealthChecks: 'bananas'",
        "gpu.disableHealthChecks: '-3'",
        "gpu.enableHealthChecks: '31x'",
    ]


@given(st.text(), st.text())
def test_no_text_breaks_the_policy(disable: str, enable: str) -> None:
    """Any values of the two variables give a policy, and enabling never makes fewer XIDs count."""
    policy, less = XidPolicy.from_lists(disable, enable), XidPolicy.from_lists(disable, "")

    assert all(policy.counts(code) for code in range(200) if less.counts(code))


def test_a_known_xid_is_explained_and_an_unknown_one_is_a_number() -> None:
    """The reason of an Unhealthy GPU can be read without the catalogue."""
    assert describe(79) == "XID 79: the GPU has fallen off the bus"
    assert describe(4711) == "XID 4711"


def test_the_history_counts_a_storm_in_one_entry_and_keeps_the_latest() -> None:
    """A storm of one XID pushes nothing out, and hostile programs cannot fill the memory."""
    history = XidHistory()
    history.note("GPU-0", 79, 1.0, ignored=False)
    for number in range(1000):
        history.note("GPU-0", 31, 100.0 + number / 10, ignored=True)
    storm = history.seen["GPU-0"]
    assert [(each.xid, each.count) for each in storm] == [(79, 1), (31, 1000)]
    assert (storm[1].first_at, storm[1].last_at) == (100.0, 199.9)

    history.note("GPU-0", 31, 300.0, ignored=True)
    history.note("GPU-0", 31, 300.0, ignored=True, instance=(7, 0))
    assert [each.count for each in history.seen["GPU-0"]] == [1, 1000, 1, 1]

    for number in range(1000):
        history.note("GPU-0", number, 400.0 + 100 * number, ignored=True)
    kept = [each.xid for each in history.seen["GPU-0"]]
    assert len(kept) <= 32
    assert kept[-1] == 999
