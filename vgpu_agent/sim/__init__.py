"""Simulated GPUs and a simulated kubelet, for tests, the demo and ``vgpu-agent sim``; never anything else.

GPUs: a real ``libnvidia-ml.so.1`` (native/, compiled by `build`, put below pynvml by `preload`) whose answers are a state file that
`state` writes. Nothing outside this package knows NVML's simulated side; the agent sees a driver.
"""
