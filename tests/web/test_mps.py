"""MPS control daemons in ``/debug/mps`` and in the metrics."""

from __future__ import annotations

import msgspec

from vgpu_agent.process import ProcessFacts
from vgpu_agent.status import AgentStatus, MpsState, MpsStatus
from vgpu_agent.web import debug
from vgpu_agent.web.catalogue_binding import MPS
from vgpu_agent.web.readings import Moment

RUNNING = MpsStatus(
    "nvidia.com/gpu",
    MpsState.RUNNING,
    adopted=True,
    running_since=1000.0,
    limits_seen_at=1060.0,
    thread_percentage=25,
    memory_limit_mib={"GPU-1": 10240},
    clients=(4711, 4712),
    restarts=1,
    clients_lost=3,
)


def test_a_daemon_is_shown_with_its_limits_and_clients() -> None:
    """The page says what is in force, since when it was proven, and which pods would be hit."""
    answer = next(entry.answer for entry in debug.PATHS if entry.path == "/debug/mps")
    (daemon,) = answer(
        debug.parse_request(AgentStatus(mps=(RUNNING,)), 1061.0, (), (), "/debug/mps")
    )["daemons"]
    assert (daemon["state"], daemon["adopted"], daemon["trouble"]) == ("running", True, "")
    assert daemon["memory_limit_mib"] == {"GPU-1": 10240}
    assert daemon["clients"] == (4711, 4712)
    assert daemon["limits_seen"].seconds_ago == 1.0


def test_each_daemon_has_its_series() -> None:
    """A daemon that runs and waits for its holders with old limits does not count as up."""
    waits = msgspec.structs.replace(
        RUNNING, resource="k8s.amazonaws.com/vgpu", trouble="it gets its new limits once …"
    )
    moment = Moment(AgentStatus(mps=(RUNNING, waits)), ProcessFacts(), 1061.0)
    rows = {
        metric.name.removeprefix("vgpu_agent_mps_"): [value for _, value in metric.read(moment)]
        for metric in MPS
    }
    assert rows == {
        "daemon_up": [True, False],
        "restarts_total": [1, 1],
        "clients": [2, 2],
        "clients_lost_total": [3, 3],
    }
