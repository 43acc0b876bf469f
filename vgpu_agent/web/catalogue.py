"""The table of metrics: name, type, labels, help, and how each is read from a snapshot: the status
of the agent and the facts about its process at one moment.

`web.metrics` serves from it and ``docs/metrics.md`` is generated from it, so the two always have
the same metrics. The names are a contract with dashboards: add, but do not rename.

The number of series is bounded: one for each GPU, resource, task, share that is held now, or family
that has or waits for a GPU. A series vanishes with the object that it describes. ``gpu`` is always
the UUID of the physical card. Join with ``vgpu_agent_gpu_info`` for index and name.
"""

from __future__ import annotations

from vgpu_agent.web import readings, views
from vgpu_agent.web.catalogue_binding import BINDING, CLUSTER, MPS
from vgpu_agent.web.metric import Kind, Metric

_G, _C, _S = Kind.GAUGE, Kind.COUNTER, Kind.SUMMARY
# the names of labels
_GPU, _RESOURCE, _TASK = ("gpu",), ("resource",), ("task",)
_GPU_FAMILY = ("gpu", "family")
_INSTANCE = ("gpu", "instance", "profile")
_GPU_INFO = ("gpu", "index", "minor", "name", "pci_bus_id", "numa_node", "mig")
_GRANT_INFO = ("namespace", "pod", "container", "resource", "gpu", "device", "state")

CATALOGUE: tuple[Metric, ...] = (
    # The agent
    Metric(
        "vgpu_agent_build_info",
        _G,
        ("version", "commit", "python"),
        "The running build; always 1.",
        readings.build_info,
    ),
    Metric(
        "vgpu_agent_simulated",
        _G,
        (),
        "1 when the GPUs of this node are simulated, 0 on real ones.",
        readings.one(lambda moment: views.is_simulated(moment.status)),
    ),
    Metric(
        "vgpu_agent_ready",
        _G,
        (),
        "1 when /readyz succeeds; /readyz names the reasons when it does not.",
        readings.one(lambda moment: not moment.status.not_ready),
    ),
    Metric(
        "vgpu_agent_problems",
        _G,
        ("kind",),
        "Known problems of the node by the part that has them; /readyz and the status name them.",
        readings.problems_by_kind,
    ),
    Metric(
        "vgpu_agent_config_reload_failed",
        _G,
        (),
        "1 while the newest configuration file is refused and the previous one stays in force.",
        readings.one(lambda moment: bool(moment.status.config_problems)),
    ),
    Metric(
        "vgpu_agent_config_restart_needed",
        _G,
        (),
        "How many changed settings wait for a restart of the agent.",
        readings.one(lambda moment: len(moment.status.config_needs_restart)),
    ),
    Metric(
        "vgpu_agent_event_loop_lag_seconds",
        _G,
        (),
        "How late the event loop wakes up: 99 of 100 times in the last minute at most this much.",
        readings.one(lambda moment: moment.status.loop_lag_seconds),
    ),
    Metric(
        "vgpu_agent_event_loop_lag_max_seconds",
        _G,
        (),
        "How late the event loop woke up at worst in the last minute.",
        readings.one(lambda moment: moment.status.loop_lag_max_seconds),
    ),
    Metric(
        "vgpu_agent_task_restarts_total",
        _C,
        _TASK,
        "How often a loop of the agent failed and was started again.",
        readings.each_task(lambda task, _: task.restarts),
    ),
    Metric(
        "vgpu_agent_task_stuck_seconds",
        _G,
        _TASK,
        "How late the heartbeat of a loop is; 0 when it is on time.",
        readings.each_task(lambda task, now: task.stuck_for(now)),
    ),
    # GPUs
    Metric(
        "vgpu_agent_driver_info",
        _G,
        ("driver", "cuda"),
        "The NVIDIA driver and the newest CUDA it serves; always 1.",
        readings.driver_info,
    ),
    Metric(
        "vgpu_agent_gpu_info", _G, _GPU_INFO, "A GPU of this node; always 1.", readings.gpu_info
    ),
    Metric(
        "vgpu_agent_gpu_present",
        _G,
        _GPU,
        "1 while the GPU answers, 0 once it is lost or unplugged.",
        readings.each_gpu(lambda gpu: gpu.present),
    ),
    Metric(
        "vgpu_agent_gpu_healthy",
        _G,
        _GPU,
        "1 when the GPU may be given to new containers; /debug/devices names the reason when it "
        "may not.",
        readings.each_gpu(lambda gpu: gpu.present and gpu.health.ok),
    ),
    Metric(
        "vgpu_agent_gpu_health_changed_timestamp_seconds",
        _G,
        _GPU,
        "When the GPU's health changed last, in unix seconds; 0 when it never did.",
        readings.each_gpu(lambda gpu: gpu.health.since),
    ),
    Metric(
        "vgpu_agent_gpu_unhealthy_info",
        _G,
        ("gpu", "cause", "remedy"),
        "The worst cause of an Unhealthy GPU, such as XID 79 or hang, and the class of its remedy, "
        "such as reset or reboot; always 1, absent while the GPU is healthy.",
        readings.gpu_unhealthy_info,
    ),
    Metric(
        "vgpu_agent_gpu_offered_again_timestamp_seconds",
        _G,
        _GPU,
        "When an Unhealthy GPU is offered again if it stays quiet, in unix seconds; absent while "
        "more than time is missing.",
        readings.gpu_offered_again,
    ),
    Metric(
        "vgpu_agent_gpu_health_transitions_total",
        _C,
        ("gpu", "state"),
        "How often the GPU became healthy again, unhealthy, or lost, since the agent's start.",
        readings.health_transitions,
    ),
    Metric(
        "vgpu_agent_gpu_recovery_seconds",
        Kind.HISTOGRAM,
        (),
        "Time from the failure of a GPU to its recovery, of all GPUs since the agent's start.",
        # `read`, `read_count` and `read_buckets`
        *readings.histogram(lambda status: status.nvml.history.recovery_seconds),
    ),
    Metric(
        "vgpu_agent_gpu_xids_total",
        _C,
        ("gpu", "xid"),
        "XIDs that the driver has reported since the agent's start, ignored ones included; gpu is "
        "empty where the driver names none, and xid is `other` beyond 256 different ones.",
        readings.xids,
    ),
    Metric(
        "vgpu_agent_mig_instance_healthy",
        _G,
        _INSTANCE,
        "1 when the MIG instance may be given to new containers; /debug/devices names the reason "
        "when it may not.",
        readings.mig_instances_healthy,
    ),
    Metric(
        "vgpu_agent_gpu_enumeration_failures",
        _G,
        (),
        "How many GPUs did not answer when the driver was last asked for all of them.",
        readings.one(lambda moment: len(moment.status.inventory.failures)),
    ),
    Metric(
        "vgpu_agent_gpu_memory_total_bytes",
        _G,
        _GPU,
        "Memory of the GPU.",
        readings.gpu_memory_total,
    ),
    Metric(
        "vgpu_agent_gpu_memory_used_bytes",
        _G,
        _GPU,
        "Memory in use on the GPU by all processes; the last value from the driver.",
        readings.each_usage(lambda usage: readings.mib(usage.memory_used_mib)),
    ),
    Metric(
        "vgpu_agent_gpu_utilisation_ratio",
        _G,
        _GPU,
        "Part of the last sample period in which a kernel ran, from 0 to 1.",
        readings.each_usage(
            lambda usage: (
                None if usage.utilisation_percent is None else usage.utilisation_percent / 100
            )
        ),
    ),
    Metric(
        "vgpu_agent_gpu_temperature_celsius",
        _G,
        _GPU,
        "Temperature of the GPU.",
        readings.each_usage(lambda usage: usage.temperature_celsius),
    ),
    Metric(
        "vgpu_agent_gpu_power_watts",
        _G,
        _GPU,
        "Power drawn by the GPU.",
        readings.each_usage(lambda usage: usage.power_watts),
    ),
    Metric(
        "vgpu_agent_gpu_ecc_uncorrected_total",
        _C,
        _GPU,
        "Uncorrected memory errors that the driver has counted; absent without ECC.",
        readings.each_usage(lambda usage: usage.ecc_uncorrected_total),
    ),
    Metric(
        "vgpu_agent_inventory_age_seconds",
        _G,
        (),
        "How old the list of GPUs is; absent until the driver has answered once.",
        readings.one(readings.inventory_age),
    ),
    Metric(
        "vgpu_agent_usage_age_seconds",
        _G,
        (),
        "How old memory, utilisation, temperature and power are; absent until they were read once.",
        readings.one(readings.usage_age),
    ),
    # Grants
    Metric(
        "vgpu_agent_grant_info",
        _G,
        _GRANT_INFO,
        "A share that a container holds; 1, or the number of shares that have all labels in "
        "common. namespace, pod and container are empty until the kubelet's records name them; "
        "device differs from gpu for a MIG instance.",
        readings.grant_info,
    ),
    Metric(
        "vgpu_agent_share_seconds_total",
        _C,
        ("namespace", "pod", "resource"),
        "The amount of the resource that the pod held, times the seconds; for chargeback. It "
        "survives restarts of the agent, and stays for an hour after the pod's end.",
        readings.share_seconds,
    ),
    Metric(
        "vgpu_agent_grants_on_missing_devices",
        _G,
        _RESOURCE,
        "Shares that containers hold of devices which this node no longer has, e.g. removed MIG "
        "instances; the event grant.device_missing names the pods.",
        readings.grants_on_missing_devices,
    ),
    Metric(
        "vgpu_agent_gpu_grants",
        _G,
        _GPU,
        "How many shares of the GPU containers hold.",
        readings.gpu_grants,
    ),
    Metric(
        "vgpu_agent_gpu_grants_allowed",
        _G,
        _GPU,
        "How many device ids of the GPU may be held at once.",
        readings.gpu_grants_allowed,
    ),
    Metric(
        "vgpu_agent_gpu_serves_since_timestamp_seconds",
        _G,
        _GPU_FAMILY,
        "When the GPU began to serve the family, in unix seconds: the time of its oldest share; "
        "absent while no share is held. Shares that are known from the kubelet's records alone "
        "count from the restart of the agent that found them.",
        readings.gpu_serves_since,
    ),
    Metric(
        "vgpu_agent_gpu_claims",
        _G,
        _GPU_FAMILY,
        "Pods for which the GPU is kept and that have nothing of it yet, by their family; absent "
        "while there are none.",
        readings.gpu_claims,
    ),
    Metric(
        "vgpu_agent_gpu_claims_oldest_seconds",
        _G,
        _GPU_FAMILY,
        "How long the pod of the GPU's oldest claim has been waiting; absent while there is none.",
        readings.gpu_claims_oldest,
    ),
    Metric(
        "vgpu_agent_resource_ids",
        _G,
        _RESOURCE,
        "Device ids in the last list that the kubelet received.",
        readings.each_plugin(lambda plugin: plugin.ids_sent),
    ),
    Metric(
        "vgpu_agent_resource_ids_healthy",
        _G,
        _RESOURCE,
        "Healthy device ids in the last list that the kubelet received.",
        readings.each_plugin(lambda plugin: plugin.healthy_sent),
    ),
    Metric(
        "vgpu_agent_resource_ids_held",
        _G,
        _RESOURCE,
        "Device ids that containers hold.",
        readings.ids_held,
    ),
    Metric(
        "vgpu_agent_resource_ids_free",
        _G,
        _RESOURCE,
        "Device ids that a new container could get.",
        readings.ids_free,
    ),
    Metric(
        "vgpu_agent_ledger_drift_total",
        _C,
        (),
        "Differences from the kubelet's records that verification found and corrected.",
        readings.one(lambda moment: moment.status.ledger.drift_total),
    ),
    Metric(
        "vgpu_agent_ledger_unknown_ids",
        _G,
        (),
        "Ids in the kubelet's records of our resources that this node does not offer.",
        readings.one(lambda moment: len(moment.status.ledger.unknown_ids)),
    ),
    Metric(
        "vgpu_agent_ledger_verified_timestamp_seconds",
        _G,
        (),
        "When the ledger was last compared with the kubelet's records, in unix seconds; 0 before "
        "the first time.",
        readings.one(lambda moment: moment.status.ledger.verified_at),
    ),
    # kubelet
    Metric(
        "vgpu_agent_kubelet_up",
        _G,
        (),
        "1 while the kubelet's registration socket exists.",
        readings.one(lambda moment: moment.status.kubelet.socket_present),
    ),
    Metric(
        "vgpu_agent_kubelet_restarts_total",
        _C,
        (),
        "Restarts of the kubelet while the agent ran.",
        readings.one(lambda moment: moment.status.kubelet.restarts_seen),
    ),
    Metric(
        "vgpu_agent_plugin_registered",
        _G,
        _RESOURCE,
        "1 when the kubelet has registered the resource and reads its stream.",
        readings.each_plugin(lambda plugin: plugin.ready),
    ),
    Metric(
        "vgpu_agent_plugin_registered_timestamp_seconds",
        _G,
        _RESOURCE,
        "When the kubelet accepted the resource last, in unix seconds; 0 before the first time.",
        readings.each_plugin(lambda plugin: plugin.registered_at),
    ),
    Metric(
        "vgpu_agent_stream_open",
        _G,
        _RESOURCE,
        "1 while the kubelet's ListAndWatch stream is open.",
        readings.each_plugin(lambda plugin: plugin.stream_open),
    ),
    Metric(
        "vgpu_agent_registrations_total",
        _C,
        _RESOURCE,
        "Registrations that the kubelet accepted.",
        readings.each_plugin(lambda plugin: plugin.registrations),
    ),
    Metric(
        "vgpu_agent_registration_failures_total",
        _C,
        _RESOURCE,
        "Registrations that the kubelet refused or did not answer.",
        readings.each_plugin(lambda plugin: plugin.registration_failures),
    ),
    Metric(
        "vgpu_agent_streams_opened_total",
        _C,
        _RESOURCE,
        "ListAndWatch streams that the kubelet opened.",
        readings.each_plugin(lambda plugin: plugin.streams_opened),
    ),
    Metric(
        "vgpu_agent_messages_sent_total",
        _C,
        _RESOURCE,
        "Device lists sent to the kubelet.",
        readings.each_plugin(lambda plugin: plugin.messages_sent),
    ),
    Metric(
        "vgpu_agent_sent_bytes_total",
        _C,
        _RESOURCE,
        "Size of the device lists sent to the kubelet.",
        readings.each_plugin(lambda plugin: plugin.bytes_sent),
    ),
    Metric(
        "vgpu_agent_allocations_total",
        _C,
        ("resource", "result"),
        "Allocate calls by result: granted or refused.",
        readings.allocations,
    ),
    Metric(
        "vgpu_agent_allocate_seconds",
        _S,
        _RESOURCE,
        "Time spent in Allocate, granted or refused.",
        read=readings.each_plugin(lambda plugin: plugin.allocate_seconds_sum),
        read_count=readings.each_plugin(lambda plugin: plugin.allocations),
    ),
    *BINDING,
    *CLUSTER,
    *MPS,
    # NVML
    Metric(
        "vgpu_agent_nvml_up",
        _G,
        (),
        "1 while the driver answers; absent on a Tegra processor, where NVML is not used.",
        readings.one(readings.nvml_up),
    ),
    Metric(
        "vgpu_agent_nvml_hung_seconds",
        _G,
        (),
        "How long an NVML call has not returned; 0 when none hangs. /debug/tasks names it.",
        readings.one(readings.nvml_hung_seconds),
    ),
    Metric(
        "vgpu_agent_nvml_calls_total",
        _C,
        (),
        "Calls into the driver's library.",
        readings.one(lambda moment: moment.status.nvml.calls),
    ),
    Metric(
        "vgpu_agent_nvml_errors_total",
        _C,
        (),
        "Calls that the driver answered with an error.",
        readings.one(lambda moment: moment.status.nvml.errors),
    ),
    Metric(
        "vgpu_agent_nvml_hangs_total",
        _C,
        (),
        "Calls that did not return in time.",
        readings.one(lambda moment: moment.status.nvml.hangs),
    ),
    # The process, under the names that every Prometheus client uses
    Metric(
        "process_resident_memory_bytes",
        _G,
        (),
        "Resident memory of the agent.",
        readings.one(lambda moment: moment.process.resident_bytes),
    ),
    Metric(
        "process_cpu_seconds_total",
        _C,
        (),
        "CPU time of the agent, user and system.",
        readings.one(lambda moment: moment.process.cpu_seconds),
    ),
    Metric(
        "process_open_fds",
        _G,
        (),
        "File descriptors that the agent holds; absent on kernels before 6.2.",
        readings.one(lambda moment: moment.process.open_descriptors),
    ),
    Metric(
        "process_start_time_seconds",
        _G,
        (),
        "When the agent started, in unix seconds.",
        readings.one(lambda moment: moment.status.started_at),
    ),
)
