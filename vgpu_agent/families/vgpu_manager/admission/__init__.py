"""The rules of vgpu-manager for new pods (vgpu-manager §6)."""
