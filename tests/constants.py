"""Names of the agent's constants that tests of its real process set to other values, see
`vgpu_agent.sim.with_constants`.
"""

from __future__ import annotations

RELOAD = "vgpu_agent.agent.reload:RELOAD_SECONDS"
SHUTDOWN = "vgpu_agent.agent.composition:SHUTDOWN_SECONDS"
WEB_SHUTDOWN = "vgpu_agent.agent.late_web:SHUTDOWN_SECONDS"
WEB_REQUEST_TIMEOUT = "vgpu_agent.agent.late_web:REQUEST_TIMEOUT_SECONDS"
SPEC_RETRY_MAX = "vgpu_agent.agent.devices.cdi:RETRY_MAX_SECONDS"
CTK_TIMEOUT = "vgpu_agent.cdi.nvidia_ctk:TIMEOUT_SECONDS"
MPS_PROBE = "vgpu_agent.mps.daemon:PROBE_SECONDS"
MPS_BACKOFF_MIN = "vgpu_agent.mps.daemon:BACKOFF_MIN_SECONDS"
MPS_BACKOFF_MAX = "vgpu_agent.mps.daemon:BACKOFF_MAX_SECONDS"
VERIFY = "vgpu_agent.agent.records.verification:VERIFY_SECONDS"
RESERVATION = "vgpu_agent.agent.records.verification:RESERVATION_SECONDS"
REGISTER_RETRY_MAX = "vgpu_agent.kubelet.server:RETRY_MAX_SECONDS"
COALESCE = "vgpu_agent.kubelet.server:COALESCE_SECONDS"
DRAIN = "vgpu_agent.kubelet.server:DRAIN_SECONDS"
SOCKET_POLL = "vgpu_agent.kubelet.directory:POLL_SECONDS"
