"""The parts of the catalogue of metrics about grants that are bound to pods, the API server, and
MPS control daemons.

Read by `catalogue`, which adds them to its table. Each metric has a function from `readings`, which
takes its values from the agent's status at the moment of a scrape. The label ``watch`` is the kind
of object that is watched in the API server, and ``writer`` the kind of what is written there, so
their series are few.
"""

from __future__ import annotations

from vgpu_agent.status import MpsState
from vgpu_agent.web import readings
from vgpu_agent.web.metric import Kind, Metric

_G, _C, _S = Kind.GAUGE, Kind.COUNTER, Kind.SUMMARY
_RESOURCE, _FAMILY, _WATCH, _WRITER = ("resource",), ("family",), ("watch",), ("writer",)

BINDING: tuple[Metric, ...] = (
    # How grants are bound
    Metric(
        "vgpu_agent_binding_info",
        _G,
        ("mode",),
        "How grants of pods are bound: late, early, or unknown while the Node has not been read; "
        "always 1. /debug/config gives the reason.",
        readings.binding_info,
    ),
    Metric(
        "vgpu_agent_family_offered",
        _G,
        _FAMILY,
        "1 while a resource of the family is served; /readyz names the reason when none is.",
        readings.family_offered,
    ),
    Metric(
        "vgpu_agent_grants",
        _G,
        ("family", "state"),
        (
            "Grants by family and state; identified means that the owner is known, not that a "
            "limit is in force."
        ),
        readings.grants,
    ),
    Metric(
        "vgpu_agent_limits",
        _G,
        ("family", "limit"),
        "Grants by family and by the state of their limit: whole device, no limit, configured, "
        "in force (seen from the host) or not in force. /debug/allocations says why.",
        readings.limits,
    ),
    Metric(
        "vgpu_agent_pre_starts_total",
        _C,
        ("resource", "result"),
        "PreStartContainer calls by result: granted or refused.",
        readings.pre_starts,
    ),
    Metric(
        "vgpu_agent_pre_start_seconds",
        _S,
        _RESOURCE,
        "Time spent in PreStartContainer, granted or refused.",
        read=readings.each_plugin(lambda plugin: plugin.pre_start_seconds_sum),
        read_count=readings.each_plugin(lambda plugin: plugin.pre_starts),
    ),
    Metric(
        "vgpu_agent_refused_starts",
        _G,
        ("final",),
        "Containers that may not start now; final is true when trying again cannot help. "
        "/debug/allocations names them.",
        readings.refused_starts,
    ),
    Metric(
        "vgpu_agent_files_left_over",
        _G,
        (),
        "Directories of ended containers that cannot be removed; the status names them with the "
        "reason.",
        readings.one(lambda moment: len(moment.status.binding.left_over)),
    ),
    Metric(
        "vgpu_agent_regions_cut_total",
        _C,
        (),
        "How often a container's region, which the container had made larger, was cut back to its "
        "size; region.cut in the log names it.",
        readings.one(lambda moment: moment.status.binding.regions_cut),
    ),
    Metric(
        "vgpu_agent_ambiguous_starts_total",
        _C,
        (),
        "Starts refused because the kubelet's records named several holders of the same ids.",
        readings.one(lambda moment: moment.status.binding.ambiguities),
    ),
    Metric(
        "vgpu_agent_pods_failed_while_down",
        _G,
        (),
        "Pods that the kubelet failed within the ten minutes before this start because no agent "
        "was registered.",
        readings.one(lambda moment: moment.status.cluster.failed_while_agent_down),
    ),
    Metric(
        "vgpu_agent_wrong_guesses_total",
        _C,
        (),
        "Early answers that were meant for another pod and whose start was refused.",
        readings.one(lambda moment: moment.status.binding.wrong_guesses),
    ),
    Metric(
        "vgpu_agent_exchanged_guesses_total",
        _C,
        (),
        "Early answers that were meant for another pod with an equal share, and were exchanged "
        "with it.",
        readings.one(lambda moment: moment.status.binding.exchanges),
    ),
    Metric(
        "vgpu_agent_scheduler_overcommitted",
        _G,
        ("resource", "gpu", "kind"),
        "How much of a GPU schedulers have given out beyond what it has: kind cores in percent of "
        "the GPU, kind holders in containers; absent where nothing is. See "
        "binding.schedulerOvercommit.",
        readings.overcommitted,
    ),
    Metric(
        "vgpu_agent_overcommitted_starts_total",
        _C,
        (),
        "Containers started on a GPU of which their scheduler had given out more compute or more "
        "places than it has.",
        readings.one(lambda moment: moment.status.binding.overcommitted_starts),
    ),
    Metric(
        "vgpu_agent_config_file_problems",
        _G,
        (),
        "Problems in the ConfigMap and the node configuration of the plugin that is replaced; "
        "/debug/config lists them.",
        readings.one(lambda moment: len(moment.status.binding.file_problems)),
    ),
)

CLUSTER: tuple[Metric, ...] = (
    # The API server
    Metric(
        "vgpu_agent_api_connected",
        _G,
        (),
        "1 when there are credentials for the API server.",
        readings.one(lambda moment: moment.status.cluster.connected),
    ),
    Metric(
        "vgpu_agent_api_requests_total",
        _C,
        ("verb", "resource", "outcome"),
        "Requests to the API server; outcome is the HTTP status, or `no answer`.",
        readings.api_requests,
    ),
    Metric(
        "vgpu_agent_watch_synced",
        _G,
        _WATCH,
        "1 once a watch has received a complete list.",
        readings.each_watch(lambda watch, _: watch.synced),
    ),
    Metric(
        "vgpu_agent_watch_age_seconds",
        _G,
        _WATCH,
        "Age of the last answer to a watch, bookmarks included; absent before the first one.",
        readings.each_watch(
            lambda watch, now: max(0.0, now - watch.last_event_at) if watch.last_event_at else None
        ),
    ),
    Metric(
        "vgpu_agent_watch_failing_seconds",
        _G,
        _WATCH,
        "For how long a watch has been failing; 0 while all is well.",
        readings.each_watch(
            lambda watch, now: max(0.0, now - watch.failing_since) if watch.failing_since else 0.0
        ),
    ),
    Metric(
        "vgpu_agent_watch_errors_total",
        _C,
        _WATCH,
        "Lists and watches that failed; an ordinary end is none.",
        readings.each_watch(lambda watch, _: watch.errors),
    ),
    Metric(
        "vgpu_agent_watch_events_total",
        _C,
        _WATCH,
        "Changes that a watch has received.",
        readings.each_watch(lambda watch, _: watch.events),
    ),
    Metric(
        "vgpu_agent_watch_unreadable_total",
        _C,
        _WATCH,
        "Objects that could not be read; the log has them as cluster.unreadable.",
        readings.each_watch(lambda watch, _: watch.unreadable),
    ),
    Metric(
        "vgpu_agent_writes_total",
        _C,
        ("writer", "result"),
        "Writes about the node, its allocatable counts, pods or events: written, failed (and tried "
        "again), or dropped for good.",
        readings.writes,
    ),
    Metric(
        "vgpu_agent_writes_pending",
        _G,
        _WRITER,
        "Things that are not written yet: pods whose annotations differ, events in the queue.",
        readings.each_writer(lambda writer: writer.pending),
    ),
    Metric(
        "vgpu_agent_writes_pending_oldest_seconds",
        _G,
        _WRITER,
        "How long the oldest pending write has been waiting; 0 when there is none.",
        readings.each_writer(lambda writer: writer.oldest_pending_seconds),
    ),
    Metric(
        "vgpu_agent_evictions_total",
        _C,
        ("result",),
        "Evictions of pods that cannot start here: evicted, postponed (by a PodDisruptionBudget), "
        "or failed.",
        readings.evictions,
    ),
    Metric(
        "vgpu_agent_dead_gpu_evictions_total",
        _C,
        ("result",),
        "Evictions of pods that hold a dead GPU: evicted, postponed (by a PodDisruptionBudget), or "
        "failed. Only with nodeStatus.evictSeconds.",
        readings.gpu_evictions,
    ),
    Metric(
        "vgpu_agent_failed_pods_total",
        _C,
        ("result",),
        "Pods that failed here and were given another chance (evicted, recreated), or left_alone. "
        "Only with binding.rescheduleFailed.",
        readings.rescued,
    ),
)

MPS: tuple[Metric, ...] = (
    Metric(
        "vgpu_agent_mps_daemon_up",
        _G,
        _RESOURCE,
        "1 while the resource's MPS control daemon runs and its limits were seen to be in force.",
        readings.each_daemon(
            lambda daemon: daemon.state is MpsState.RUNNING and not daemon.trouble
        ),
    ),
    Metric(
        "vgpu_agent_mps_restarts_total",
        _C,
        _RESOURCE,
        (
            "How often the resource's MPS control daemon ended or stopped answering while the "
            "agent ran."
        ),
        readings.each_daemon(lambda daemon: daemon.restarts),
    ),
    Metric(
        "vgpu_agent_mps_clients",
        _G,
        _RESOURCE,
        "Processes that were clients of the daemon when it was last asked.",
        readings.each_daemon(lambda daemon: len(daemon.clients)),
    ),
    Metric(
        "vgpu_agent_mps_clients_lost_total",
        _C,
        _RESOURCE,
        "Client processes whose daemon ended; /debug/events?event=mps names their pods.",
        readings.each_daemon(lambda daemon: daemon.clients_lost),
    ),
)
