"""A stand-in for vgpu-manager's scheduler extender."""
