"""vgpu-agent: shares the NVIDIA GPUs of one Kubernetes node between its pods."""

__version__ = "0.1.0"
