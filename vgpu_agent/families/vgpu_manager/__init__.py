"""The family `vgpu-manager`: shares of GPUs, compatible with coldzerofear/vgpu-manager."""
