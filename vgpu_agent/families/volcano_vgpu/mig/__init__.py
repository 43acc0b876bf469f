"""Volcano's vGPU on MIG instances: divided for pods, or by an administrator."""
