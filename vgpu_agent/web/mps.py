"""The metrics about the MPS control daemons. A node without a resource that is shared with MPS has none. Used by `catalogue`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.status import MpsState
from vgpu_agent.web.metric import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.status import MpsStatus
    from vgpu_agent.web.readings import Moment, Row


def each_daemon(value: Callable[[MpsStatus], float]) -> Callable[[Moment], Iterator[Row]]:
    """One series a daemon."""
    return lambda moment: (((daemon.resource,), value(daemon)) for daemon in moment.status.mps)


def _in_force(daemon: MpsStatus) -> bool:
    return daemon.state is MpsState.RUNNING and not daemon.trouble


MPS: tuple[Metric, ...] = (
    Metric(
        "vgpu_agent_mps_daemon_up",
        Kind.GAUGE,
        ("resource",),
        "1 while the resource's MPS control daemon runs and its limits were seen to be in force.",
        each_daemon(_in_force),
    ),
    Metric(
        "vgpu_agent_mps_restarts_total",
        Kind.COUNTER,
        ("resource",),
        "How often the resource's MPS control daemon ended or went silent under the agent.",
        each_daemon(lambda daemon: daemon.restarts),
    ),
    Metric(
        "vgpu_agent_mps_clients",
        Kind.GAUGE,
        ("resource",),
        "Processes that were clients of the daemon when it was last asked.",
        each_daemon(lambda daemon: len(daemon.clients)),
    ),
    Metric(
        "vgpu_agent_mps_clients_lost_total",
        Kind.COUNTER,
        ("resource",),
        "Client processes whose daemon ended under them; /debug/events?event=mps names their pods.",
        each_daemon(lambda daemon: daemon.clients_lost),
    ),
)
