"""NVIDIA's names: `nvidia.com/gpu` and `nvidia.com/mig-…`, whole or in replicas,
and those of iktos's fork.
"""
