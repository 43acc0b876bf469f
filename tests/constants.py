"""Names of the agent's constants that tests set to other values:
in their own process with `use`, in the agent's by `vgpu_agent.sim.with_constants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest  # the benchmark runs without it

RELOAD = "vgpu_agent.agent.reload:RELOAD_SECONDS"
SUCCESSION_ANSWER = "vgpu_agent.agent.succession:ANSWER_SECONDS"
SHUTDOWN = "vgpu_agent.agent.composition:SHUTDOWN_SECONDS"
WEB_SHUTDOWN = "vgpu_agent.agent.late_web:SHUTDOWN_SECONDS"
WEB_REQUEST_TIMEOUT = "vgpu_agent.agent.late_web:REQUEST_TIMEOUT_SECONDS"
SPEC_RETRY_MAX = "vgpu_agent.cdi.controller:RETRY_MAX_SECONDS"
CTK_TIMEOUT = "vgpu_agent.cdi.nvidia_ctk:TIMEOUT_SECONDS"
MPS_PROBE = "vgpu_agent.mps.daemon:PROBE_SECONDS"
MPS_BACKOFF_MIN = "vgpu_agent.mps.daemon:BACKOFF_MIN_SECONDS"
MPS_BACKOFF_MAX = "vgpu_agent.mps.daemon:BACKOFF_MAX_SECONDS"
API_CONNECT_TIMEOUT = "vgpu_agent.cluster.client:CONNECT_TIMEOUT_SECONDS"
API_REQUEST_TIMEOUT = "vgpu_agent.cluster.api:REQUEST_TIMEOUT_SECONDS"
API_WATCH_SILENCE = "vgpu_agent.cluster.api:WATCH_SILENCE_SECONDS"
API_WATCH = "vgpu_agent.cluster.reflector:WATCH_SECONDS"
API_BACKOFF_MIN = "vgpu_agent.cluster.retrying:BACKOFF_MIN_SECONDS"
API_BACKOFF_MAX = "vgpu_agent.cluster.retrying:BACKOFF_MAX_SECONDS"
ALLOCATABLE_PROCESSING = "vgpu_agent.cluster.allocatable:PROCESSING_SECONDS"
API_START_WAIT = "vgpu_agent.agent.api_server:START_WAIT_SECONDS"
HANDSHAKE = "vgpu_agent.families.volcano_vgpu.offer:HANDSHAKE_SECONDS"
REFUSED_EVENT = "vgpu_agent.cluster.reschedule:REFUSED_EVENT_SECONDS"
POD_WAIT = "vgpu_agent.allocation.identification:POD_WAIT_SECONDS"
START = "vgpu_agent.allocation.identification:START_SECONDS"
SPEC_RETRY_MIN = "vgpu_agent.cdi.controller:RETRY_MIN_SECONDS"
GPU_POLL = "vgpu_agent.gpu.watch:POLL_SECONDS"
GPU_INIT_RETRY = "vgpu_agent.gpu.watch:INIT_RETRY_SECONDS"
GPU_HUNG_UNHEALTHY = "vgpu_agent.gpu.watch:HUNG_UNHEALTHY_SECONDS"
NVML_CALL_TIMEOUT = "vgpu_agent.gpu.thread:CALL_TIMEOUT_SECONDS"
NVML_EVENT_WAIT = "vgpu_agent.gpu.thread:EVENT_WAIT_SECONDS"
SPEC_LOOK = "vgpu_agent.cdi.controller:LOOK_SECONDS"
VERIFY = "vgpu_agent.agent.records.verification:VERIFY_SECONDS"
RESERVATION = "vgpu_agent.agent.records.verification:RESERVATION_SECONDS"
REGISTER_RETRY_MAX = "vgpu_agent.kubelet.server:RETRY_MAX_SECONDS"
COALESCE = "vgpu_agent.kubelet.server:COALESCE_SECONDS"
DRAIN = "vgpu_agent.kubelet.server:DRAIN_SECONDS"
MESSAGE_BUDGET = "vgpu_agent.device_ids:MESSAGE_BUDGET_BYTES"
FLAP_WINDOW = "vgpu_agent.gpu.health:FLAP_WINDOW_SECONDS"
MAX_QUIET = "vgpu_agent.gpu.health:MAX_QUIET_SECONDS"
STARTS_FIRST = "vgpu_agent.cluster.pod_publisher:STARTS_FIRST_SECONDS"
MIG_SETTLE = "vgpu_agent.agent.devices.mig:SETTLE_SECONDS"
MIG_RETRY = "vgpu_agent.agent.devices.mig:RETRY_SECONDS"
MPS_CONTAINER_ROOT = "vgpu_agent.isolation.mps:CONTAINER_ROOT"
MPS_CONTROL_BINARY = "vgpu_agent.mps.host_tools:CONTROL_BINARY"
MPS_SMI_BINARY = "vgpu_agent.mps.host_tools:SMI_BINARY"
SYSFS_ROOT = "vgpu_agent.config.settings:SYSFS_ROOT"
PAGE_REFRESH = "vgpu_agent.web.dashboard.stream:REFRESH_SECONDS"
EVENTS_LOOK = "vgpu_agent.cluster.gpu_events:LOOK_SECONDS"
SOCKET_POLL = "vgpu_agent.kubelet.directory:POLL_SECONDS"


def use(monkeypatch: pytest.MonkeyPatch, constants: Mapping[str, float | str]) -> None:
    """Set constants in this process until ``monkeypatch`` takes it back."""
    for name, value in constants.items():
        monkeypatch.setattr(name.replace(":", "."), value)
