"""Volcano's vGPU: `volcano.sh/vgpu-number`, `-memory` and `-cores`."""
