"""An Unhealthy GPU, understood from the page alone: the state machine's own values in sentences."""

from __future__ import annotations

import msgspec

from tests.web.conftest import NOW
from vgpu_agent.gpu import xid
from vgpu_agent.gpu.health import GpuHealth, Probe, RecoveryAction, RecoveryPolicy
from vgpu_agent.model import Health
from vgpu_agent.status import AgentStatus
from vgpu_agent.web import page, views

GOOD = Probe()


class Illness:
    """The health of a GPU that has a story; time in seconds before `NOW`."""

    def __init__(self, *, automatic: bool = True) -> None:
        self._at = NOW
        policy = RecoveryPolicy(automatic=automatic, quiet_seconds=60)
        self.machine = GpuHealth(policy, wall=lambda: self._at)

    def at(self, seconds_ago: float) -> float:
        """Set the clock, and return monotonic seconds."""
        self._at = NOW - seconds_ago
        return 1000.0 - seconds_ago


def shown(node: AgentStatus, health: Health, *, present: bool = True) -> tuple[str, views.GpuView]:
    """The problem of GPU 1 on the page for a terminal, and its view in the JSON."""
    healthy, broken = node.inventory.gpus
    broken = msgspec.structs.replace(broken, health=health, present=present, mig_instances=())
    node.inventory = msgspec.structs.replace(node.inventory, gpus=(healthy, broken), failures=())
    overview = views.overview(node, NOW)
    (line,) = [line for line in page.as_text(overview).splitlines() if line.startswith("  gpu 1 ")]
    return line.removeprefix("  gpu 1").strip(), overview.gpus[1]


def test_a_gpu_with_several_errors_names_the_worst_and_when_it_returns(node: AgentStatus) -> None:
    """Since when, the cause, the others, that it answers, the countdown, the remedy."""
    ill = Illness()
    ill.machine.reported(xid.trouble_of(48), ill.at(42))
    ill.machine.reported(xid.trouble_of(94), ill.at(30))
    ill.machine.probed(GOOD, ill.at(29))

    line, gpu = shown(node, ill.machine.health)

    assert line == (
        "GPU-1 has been unhealthy since 2027-01-15T07:59:18Z (42 s): XID 48: GPU memory lost bits "
        "beyond what ECC corrects; other causes: XID 94: a memory error hit one program "
        "only; it answers now; it is offered again at 2027-01-15T08:00:30Z, in 30 s, if it stays "
        "quiet; drain the GPU's pods and reset it (nvidia-smi --gpu-reset -i GPU-1); replace the "
        "card if the error comes back"
    )
    illness = gpu.illness
    assert illness is not None
    assert [(cause.code, cause.remedy) for cause in illness.causes] == [
        ("XID 48", "reset"),
        ("XID 94", "restart pods"),
    ]
    assert illness.causes[1].since.seconds_ago == 30
    assert (illness.answers, illness.offered_again_in_seconds) == (True, 30)
    assert illness.offered_again.at == "2027-01-15T08:00:30.000Z"
    assert illness.remedy.startswith("drain the GPU's pods and reset it")


def test_a_reset_that_the_driver_asks_for_is_told_beside_the_error(node: AgentStatus) -> None:
    """No time of return, because more than time is missing."""
    ill = Illness()
    ill.machine.reported(xid.trouble_of(94), ill.at(42))
    ill.machine.probed(Probe(recovery_action=RecoveryAction.NODE_REBOOT), ill.at(41))

    line, gpu = shown(node, ill.machine.health)

    assert line == (
        "GPU-1 has been unhealthy since 2027-01-15T07:59:18Z (42 s): XID 94: a memory error hit "
        "one program only; the driver asks for a node reboot; it answers now; drain the node and "
        "reboot it"
    )
    assert gpu.illness is not None
    assert gpu.illness.offered_again_in_seconds is None


def test_a_call_that_has_returned_is_told_in_the_past(node: AgentStatus) -> None:
    """The GPU answers: nothing may say that it does not."""
    ill = Illness()
    ill.machine.hung("nvmlDeviceGetTemperature", ill.at(700))
    hanging, _ = shown(node, ill.machine.health)
    ill.machine.answering(670, ill.at(50))
    ill.machine.probed(GOOD, ill.at(50))
    back, _ = shown(node, ill.machine.health)

    assert hanging == (
        "GPU-1 has been unhealthy since 2027-01-15T07:48:20Z (11 min): the NVIDIA driver does not "
        "return from nvmlDeviceGetTemperature; it does not answer; see dmesg; if the driver does "
        "not answer within minutes, drain the node and reboot it"
    )
    assert back == (
        "GPU-1 has been unhealthy since 2027-01-15T07:48:20Z (11 min): the NVIDIA driver did not "
        "return from nvmlDeviceGetTemperature for 670 s; it answers now; it is offered again at "
        "2027-01-15T08:00:10Z, in 10 s, if it stays quiet; nothing needs to be done unless it "
        "happens again; dmesg has what happened"
    )


def test_a_gpu_that_is_gone_says_so(node: AgentStatus) -> None:
    """With the XID that came before, which is the cause."""
    ill = Illness()
    ill.machine.reported(xid.trouble_of(79), ill.at(20))
    ill.machine.probed(Probe(trouble="the driver no longer lists this GPU"), ill.at(10))

    line, _ = shown(node, ill.machine.health, present=False)

    assert line == (
        "GPU-1 has been gone since 2027-01-15T07:59:40Z (20 s): XID 79: the GPU has fallen off "
        "the bus; other causes: the driver no longer lists this GPU; it does not answer; "
        "drain the node and reboot it; if the GPU is lost again, check its slot and its power, and "
        "replace the card"
    )


def test_a_quiet_time_that_is_over_waits_for_the_next_reading(node: AgentStatus) -> None:
    """A countdown below zero would mean nothing."""
    ill = Illness()
    ill.machine.reported(xid.trouble_of(48), ill.at(61))
    ill.machine.probed(GOOD, ill.at(60))

    line, gpu = shown(node, ill.machine.health)

    assert "it is offered again after the next reading, if it stays quiet" in line
    assert gpu.illness is not None
    assert gpu.illness.offered_again_in_seconds == 0


def test_recovery_that_is_switched_off_promises_no_return(node: AgentStatus) -> None:
    """The reason names the setting."""
    ill = Illness(automatic=False)
    ill.machine.reported(xid.trouble_of(48), ill.at(42))
    ill.machine.probed(GOOD, ill.at(30))

    line, _ = shown(node, ill.machine.health)

    assert "recovery is switched off (gpu.recovery.mode)" in line
    assert "offered again" not in line
