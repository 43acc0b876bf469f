"""The health of one GPU, on plain values and a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import constants
from vgpu_agent.gpu import xid
from vgpu_agent.gpu.health import (
    MAX_CAUSES,
    NOT_LISTED,
    GpuHealth,
    Probe,
    RecoveryAction,
    RecoveryPolicy,
)
from vgpu_agent.model import Remedy

GOOD = Probe()
LOST = Probe(trouble="GPU is lost")
POLICY = RecoveryPolicy(quiet_seconds=10)
MAX_QUIET_SECONDS = 35


@pytest.fixture(autouse=True, scope="module")
def _short_times() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        constants.use(
            monkeypatch, {constants.FLAP_WINDOW: 100, constants.MAX_QUIET: MAX_QUIET_SECONDS}
        )
        yield


def _machine(policy: RecoveryPolicy = POLICY) -> GpuHealth:
    return GpuHealth(policy, wall=lambda: 1234.5)


def test_a_new_gpu_is_healthy_until_it_is_asked() -> None:
    """A restart begins with the benefit of the doubt, and the first probe ends it."""
    machine = _machine()

    assert machine.health.ok
    assert machine.probed(LOST, 0)
    assert (machine.health.ok, machine.health.reason, machine.health.since) == (
        False,
        "GPU is lost",
        1234.5,
    )


def test_an_xid_makes_it_unhealthy_at_once() -> None:
    """No second opinion is asked for. The reason is the XID's."""
    machine = _machine()

    assert machine.reported(xid.trouble_of(79), 5)
    assert machine.health.reason == xid.describe(79)


def test_it_recovers_after_the_quiet_time_and_not_before() -> None:
    """Ten quiet seconds after the last bad news, counted to the probe that finds them over."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 100)

    machine.probed(GOOD, 109.9)
    assert not machine.health.ok
    assert machine.recovers_at == 110
    assert machine.probed(GOOD, 110)
    assert machine.health.ok
    assert machine.health.reason == ""


def test_time_alone_brings_nothing_back() -> None:
    """Only a good answer after the quiet time does. A bad one starts it again."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 0)
    machine.probed(LOST, 500)

    machine.probed(GOOD, 505)
    assert not machine.health.ok
    assert machine.probed(GOOD, 510)


def test_another_xid_while_unhealthy_starts_the_quiet_time_again() -> None:
    """A card that keeps reporting errors stays away, and the worst of them stays the reason."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 0)

    assert machine.reported(xid.trouble_of(48), 8)
    machine.probed(GOOD, 17)
    assert not machine.health.ok
    assert not machine.health.ok
    assert machine.health.reason == xid.describe(79)
    assert [cause.code for cause in machine.health.causes] == ["XID 79", "XID 48"]


@pytest.mark.parametrize(
    "action", [action for action in RecoveryAction if action is not RecoveryAction.NONE]
)
def test_a_wanted_recovery_action_blocks_recovery(action: RecoveryAction) -> None:
    """An Unhealthy GPU waits for any action that the driver wants, and the reason says so."""
    machine = _machine()
    machine.reported(xid.trouble_of(48), 0)

    machine.probed(Probe(recovery_action=action), 100)

    assert not machine.health.ok
    assert machine.recovers_at is None
    assert action.words in machine.health.reason


@pytest.mark.parametrize(
    "action", [RecoveryAction.GPU_RESET, RecoveryAction.NODE_REBOOT, RecoveryAction.DRAIN_AND_RESET]
)
def test_a_gpu_that_needs_a_reset_is_unhealthy_without_any_xid(action: RecoveryAction) -> None:
    """After a restart of the agent the XID is forgotten. The driver still asks for the reset."""
    machine = _machine()

    assert machine.probed(Probe(recovery_action=action), 0)
    assert machine.health.reason == f"the driver asks for a {action.words}"


def test_a_drain_of_peer_traffic_leaves_a_healthy_gpu_alone() -> None:
    """The card itself works on. Only a recovery would wait for it."""
    machine = _machine()

    assert not machine.probed(Probe(recovery_action=RecoveryAction.DRAIN_P2P), 0)
    assert machine.health.ok


def test_an_action_of_a_newer_driver_blocks_recovery() -> None:
    """A number that this agent does not know is not read as none."""
    assert RecoveryAction(99) is RecoveryAction.UNKNOWN


def test_a_pending_row_remap_blocks_recovery_and_its_reset_starts_the_quiet_time() -> None:
    """The card is quiet, but only from the moment at which nothing is pending any more."""
    machine = _machine()
    machine.reported(xid.trouble_of(63), 0)

    machine.probed(Probe(remap_pending=True), 50)
    assert (
        machine.health.reason
        == f"{xid.describe(63)}; recovery waits for a GPU reset that replaces a row of memory"
    )
    machine.probed(GOOD, 59)
    assert (machine.health.ok, machine.health.reason) == (False, xid.describe(63))
    assert machine.probed(GOOD, 60)
    assert machine.health.ok


def test_a_pending_row_remap_leaves_a_healthy_gpu_alone() -> None:
    """The bad row is out of use already. The card works on until its next reset."""
    machine = _machine()

    assert not machine.probed(Probe(remap_pending=True), 0)
    assert machine.health.ok


def test_a_flapping_gpu_waits_twice_as_long_each_time_up_to_the_limit() -> None:
    """Quiet times of 10, 20, and 35 instead of 40 seconds."""
    machine = _machine()
    machine.reported(xid.trouble_of(48), 0)
    machine.probed(GOOD, 10)

    machine.reported(xid.trouble_of(48), 11)
    assert machine.quiet_needed_seconds == 20
    machine.probed(GOOD, 31)
    assert machine.health.ok

    machine.reported(xid.trouble_of(48), 32)
    assert machine.quiet_needed_seconds == 35
    machine.probed(GOOD, 66)
    assert not machine.health.ok
    assert machine.probed(GOOD, 67)


def test_a_gpu_that_held_out_for_the_whole_window_starts_afresh() -> None:
    """Old sins are forgotten after the flap window."""
    machine = _machine()
    machine.reported(xid.trouble_of(48), 0)
    machine.probed(GOOD, 10)
    machine.reported(xid.trouble_of(48), 20)
    machine.probed(GOOD, 40)

    machine.reported(xid.trouble_of(48), 140)

    assert machine.quiet_needed_seconds == 10


def test_mode_never_keeps_it_away_until_the_setting_changes() -> None:
    """`never` holds through any number of good answers, says so,
    and ends when the operator reloads another mode.
    """
    machine = _machine(msgspec.structs.replace(POLICY, automatic=False))
    machine.reported(xid.trouble_of(79), 0)

    machine.probed(GOOD, 1_000_000)
    assert not machine.health.ok
    assert "recovery is switched off" in machine.health.reason

    machine.policy = POLICY
    assert machine.probed(GOOD, 1_000_001)
    assert machine.health.ok


def test_a_hang_holds_until_the_call_returns_and_the_gpu_was_quiet() -> None:
    """A probe that was answered before the hang does not count.
    The quiet time begins when the driver answers.
    """
    machine = _machine()
    machine.probed(GOOD, 0)

    assert machine.hung("nvmlX", 10)
    assert not machine.hung("nvmlX", 11)
    machine.probed(GOOD, 50)
    assert not machine.health.ok
    machine.answering(50, 60)
    machine.probed(GOOD, 69)
    assert not machine.health.ok
    assert machine.probed(GOOD, 70)


def test_the_reason_is_the_same_value_while_nothing_happens() -> None:
    """Streams send only what changed, so an unchanged state must compare equal."""
    machine = _machine()
    machine.reported(xid.trouble_of(48), 0)
    machine.probed(Probe(remap_pending=True), 1)
    before = machine.health

    assert not machine.probed(Probe(remap_pending=True), 2)
    assert machine.health == before


def test_a_milder_error_hides_no_worse_one() -> None:
    """The card has fallen off the bus. A contained error that comes later is not the reason."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 0)

    machine.reported(xid.trouble_of(94), 1)

    assert machine.health.reason == xid.describe(79)
    assert machine.health.remedy is Remedy.REBOOT_OR_REPLACE
    assert [cause.text for cause in machine.health.causes] == [xid.describe(79), xid.describe(94)]


def test_a_demand_of_the_driver_hides_no_error() -> None:
    """The demand follows from the error. Both are in the reason, and the demand is the remedy."""
    machine = _machine()
    machine.reported(xid.trouble_of(94), 0)

    machine.probed(Probe(recovery_action=RecoveryAction.GPU_RESET), 1)

    assert (
        machine.health.reason
        == "XID 94: a memory error hit one program only; the driver asks for a GPU reset"
    )
    assert machine.health.remedy is Remedy.RESET


def test_after_the_demanded_reset_nothing_is_left_to_do() -> None:
    """A sentence that still sends to a reset would cause a second one."""
    machine = _machine()
    machine.reported(xid.trouble_of(48), 0)
    machine.probed(Probe(recovery_action=RecoveryAction.GPU_RESET), 1)
    machine.probed(LOST, 2)  # while it is reset

    machine.probed(GOOD, 3)

    assert machine.health.reason == xid.describe(48)
    assert machine.health.remedy is Remedy.WAIT
    assert "the driver asked for a GPU reset" in [c.text for c in machine.health.causes]

    machine.reported(xid.trouble_of(48), 4)
    assert (machine.health.reason, machine.health.remedy) == (xid.describe(48), Remedy.RESET)


def test_a_hang_that_is_over_is_told_in_the_past() -> None:
    """The call has returned: the reason must not say that it does not."""
    machine = _machine()
    machine.hung("nvmlX", 0)
    assert machine.health.reason == "the NVIDIA driver does not return from nvmlX"
    assert (machine.health.answers, machine.health.remedy) == (False, Remedy.CHECK_DRIVER)

    assert machine.answering(42.4, 42)

    assert machine.health.reason == "the NVIDIA driver did not return from nvmlX for 42 s"
    assert (machine.health.answers, machine.health.remedy) == (None, Remedy.WAIT)
    machine.probed(GOOD, 43)
    assert machine.health.answers is True

    machine.hung("nvmlX", 44)
    assert machine.health.reason == "the NVIDIA driver does not return from nvmlX"


@pytest.mark.parametrize(
    ("trouble", "now", "later"),
    [
        (
            NOT_LISTED,
            "the driver no longer lists this GPU",
            "the driver did not list this GPU for a while",
        ),
        (
            "nvmlX: GPU is lost (NVML code 15)",
            "nvmlX: GPU is lost (NVML code 15)",
            "an earlier reading failed: nvmlX: GPU is lost (NVML code 15)",
        ),
    ],
)
def test_a_lost_gpu_that_is_back_is_told_in_the_past(trouble: str, now: str, later: str) -> None:
    """It answers again, and the remedy is no longer a reboot."""
    machine = _machine()
    machine.probed(Probe(trouble=trouble), 0)
    before = machine.health
    assert (before.reason, before.answers) == (now, False)
    assert before.remedy is Remedy.REBOOT_OR_REPLACE

    assert machine.probed(GOOD, 1)

    assert (machine.health.reason, machine.health.answers) == (later, True)
    assert machine.health.remedy is Remedy.CHECK_SLOT


def test_the_time_of_the_return_is_known_while_only_time_is_missing() -> None:
    """Unix seconds, by the latest trouble; 0 while a good answer or a reset is missing."""
    clock = [1000.0]
    machine = GpuHealth(POLICY, wall=lambda: clock[0])
    machine.reported(xid.trouble_of(48), 0)
    assert machine.health.offered_at == 1010

    clock[0] = 1005
    assert not machine.reported(xid.trouble_of(48), 5)  # the same again wakes no reader
    assert machine.probed(GOOD, 5.5)
    assert machine.health.offered_at == 1015

    machine.probed(Probe(remap_pending=True), 6)
    assert machine.health.offered_at == 0
    machine.probed(LOST, 7)
    assert machine.health.offered_at == 0
    assert machine.probed(GOOD, 8)
    assert machine.health.offered_at == 1015


def test_mode_never_names_no_time_of_return() -> None:
    """Only a restart of the agent brings it back."""
    machine = _machine(msgspec.structs.replace(POLICY, automatic=False))
    machine.reported(xid.trouble_of(48), 0)
    machine.probed(GOOD, 1)

    assert machine.health.offered_at == 0


def test_the_causes_are_few_and_the_worst_are_kept() -> None:
    """A card may report any number of different errors."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 0)
    for code in range(1000, 1100):
        machine.reported(xid.trouble_of(code), 1)

    assert len(machine.health.causes) == MAX_CAUSES
    assert machine.health.causes[0].code == "XID 79"


def test_a_recovery_forgets_the_causes() -> None:
    """The next illness has its own."""
    machine = _machine()
    machine.reported(xid.trouble_of(79), 0)
    machine.probed(GOOD, 10)
    assert (machine.health.causes, machine.health.remedy) == ((), None)

    machine.reported(xid.trouble_of(94), 11)
    assert machine.health.reason == xid.describe(94)


_PROBES = st.builds(
    Probe,
    trouble=st.sampled_from(["", "", "GPU is lost"]),
    recovery_action=st.sampled_from(RecoveryAction),
    remap_pending=st.booleans(),
)


def test_a_quiet_time_above_the_longest_is_kept() -> None:
    """The operator's number counts as it is; only flapping has a limit."""
    machine = _machine(RecoveryPolicy(quiet_seconds=2 * MAX_QUIET_SECONDS))
    machine.reported(xid.trouble_of(79), 0)
    machine.probed(GOOD, 2 * MAX_QUIET_SECONDS - 1)
    assert not machine.health.ok
    assert machine.probed(GOOD, 2 * MAX_QUIET_SECONDS)


_STEPS = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.one_of(_PROBES, st.just(GOOD), st.sampled_from(["xid", "hung", "answering"])),
    ),
    max_size=40,
)


@given(_STEPS, st.booleans())
def test_the_promises_hold_in_every_order_of_events(
    steps: list[tuple[float, Probe | str]], automatic: bool
) -> None:
    """Never healthy after a bad answer, in a hang, or too soon, and never back in mode never.
    `reason` and `ok` always agree.
    """
    machine = _machine(msgspec.structs.replace(POLICY, automatic=automatic))
    now, bad_news_at, hung, ever_bad = 0.0, float("-inf"), False, False
    for delay, step in steps:
        now += delay
        before = machine.health
        if step == "xid":
            changed = machine.reported(xid.trouble_of(79), now)
        elif step == "hung":
            changed, hung = machine.hung("hung", now), True
        elif step == "answering":
            changed, hung = machine.answering(1, now), False
        else:
            assert isinstance(step, Probe)
            changed = machine.probed(step, now)
            if machine.health.ok and not before.ok:
                assert automatic
                assert step == GOOD
                assert now - bad_news_at >= POLICY.quiet_seconds
        if step in {"xid", "hung"} or (isinstance(step, Probe) and step.failure):
            bad_news_at, ever_bad = now, True
            assert not machine.health.ok
        assert changed == (machine.health != before)
        assert machine.health.ok == (machine.health.reason == "")
        assert not (hung and machine.health.ok)
        assert not (ever_bad and not automatic and machine.health.ok)
        assert machine.quiet_needed_seconds <= MAX_QUIET_SECONDS
